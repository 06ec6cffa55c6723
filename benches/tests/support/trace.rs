//! Reads `strace -f -Y`: which thread class made which host call, and which
//! calls its filter refused.

use std::collections::{BTreeSet, HashMap};

use exocell_cell::vmm::jail::ThreadClass;

type Calls = BTreeSet<String>;

/// ENOSYS, and the same where arguments are raw.
const REFUSED: [&str; 2] = [" = -1 ENOSYS", " = -1 (errno 38)"];

/// What was called, by class.
#[derive(Debug, Default)]
pub struct Trace {
    /// All threads of its supervisor are of one class.
    is_isolate: bool,
    /// (class name, call).
    used: BTreeSet<(&'static str, String)>,
    refused: BTreeSet<(&'static str, String)>,
}

/// One thread as the trace goes on.
#[derive(Default)]
struct Thread {
    is_supervisor: bool,
    has_filter: bool,
    /// Its calls are the guest's, not the host's.
    runs_guest_code: bool,
    /// Begun, its result still to come.
    begun: Option<String>,
}

impl Trace {
    /// The trace of a `vm` cell.
    pub fn read(text: &str) -> Self {
        Self::default().taking(text)
    }

    /// The trace of an isolate.
    pub fn of_isolate(text: &str) -> Self {
        Self { is_isolate: true, ..Self::default() }.taking(text)
    }

    fn taking(mut self, text: &str) -> Self {
        let trace = &mut self;
        let mut threads: HashMap<&str, Thread> = HashMap::new();
        for line in text.lines() {
            let Some((head, rest)) = line.split_once("> ") else { continue };
            let Some((tid, name)) = head.split_once('<') else { continue };
            trace.step(threads.entry(tid).or_default(), name, rest.trim_start());
        }
        self
    }

    pub fn used(&self, class: ThreadClass) -> Calls {
        of(&self.used, class)
    }

    pub fn refused(&self, class: ThreadClass) -> Calls {
        of(&self.refused, class)
    }

    fn step(&mut self, thread: &mut Thread, name: &str, event: &str) {
        // The last that a stub's thread does for itself.
        thread.runs_guest_code |= event.starts_with("close_range(") && event.contains("_UNSHARE");
        let Some((call, arguments)) = parse(event, &mut thread.begun) else { return };
        thread.is_supervisor |= call == "setsid" && name == "exocell";
        let class =
            if self.is_isolate { thread.class_in_isolate(name) } else { thread.class(name) };
        let refused = REFUSED.iter().any(|answer| arguments.contains(answer));
        let refused = refused && call != "rt_sigreturn";
        thread.has_filter |= call == "seccomp" && arguments.trim_end().ends_with("= 0");
        if let Some(class) = class {
            let set = if refused { &mut self.refused } else { &mut self.used };
            set.insert((class.name(), call));
        }
    }
}

impl Thread {
    /// By the thread's name. The supervisor's main thread and the guest
    /// kernel's first steps count from their filter on.
    fn class(&self, name: &str) -> Option<ThreadClass> {
        match name {
            "devices" => self.has_filter.then_some(ThreadClass::Device),
            "network" => self.has_filter.then_some(ThreadClass::Network),
            "dialer" => self.has_filter.then_some(ThreadClass::Dialer),
            "folder" => self.has_filter.then_some(ThreadClass::Folder),
            "door" => self.has_filter.then_some(ThreadClass::Door),
            "credit" => self.has_filter.then_some(ThreadClass::Credit),
            "audit" | "client" | "console" | "control" | "follower" | "operator" | "program"
            | "reaper" | "returns" | "signal" | "socket" => Some(ThreadClass::Control),
            "exocell" if !self.has_filter => None,
            "exocell" if self.is_supervisor => Some(ThreadClass::Control),
            "strace" => None,
            _ if self.runs_guest_code => None,
            _ => Some(ThreadClass::GuestKernel),
        }
    }

    /// The same where there is no guest.
    fn class_in_isolate(&self, name: &str) -> Option<ThreadClass> {
        match name {
            "exocell" if !(self.has_filter && self.is_supervisor) => None,
            // The warden of a stage, before it names itself.
            "exe" | "strace" => None,
            "compile" => self.has_filter.then_some(ThreadClass::Compile),
            _ => Some(ThreadClass::Isolate),
        }
    }
}

/// The call that `event` completes, and the text after its name.
fn parse<'a>(event: &'a str, begun: &mut Option<String>) -> Option<(String, &'a str)> {
    if event.starts_with("<... ") {
        return Some((begun.take()?, event));
    }
    let (call, arguments) = event.split_once('(')?;
    if !call.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        return None;
    }
    if arguments.ends_with("<unfinished ...>") {
        *begun = Some(call.to_owned());
        return None;
    }
    Some((call.to_owned(), arguments))
}

fn of(set: &BTreeSet<(&'static str, String)>, class: ThreadClass) -> Calls {
    set.iter().filter(|(of, _)| *of == class.name()).map(|(_, call)| call.clone()).collect()
}

#[test]
fn guest_calls_and_refusals_are_told_apart() {
    let trace = Trace::read(
        "7<devices> openat(AT_FDCWD, \"/x\") = 3\n\
         7<devices> seccomp(SECCOMP_SET_MODE_FILTER, 0, {len=9}) = 0\n\
         7<devices> epoll_wait(4,  <unfinished ...>\n\
         8<uml-userspace> close_range(0, 4294967295, CLOSE_RANGE_UNSHARE <unfinished ...>\n\
         8<uml-userspace> <... close_range resumed>) = 0\n\
         8<uml-userspace> getppid() = 110\n\
         7<devices> <... epoll_wait resumed>[], 8, -1) = 0\n\
         7<devices> uname({}) = -1 ENOSYS (Function not implemented)\n\
         7<devices> ioctl(0x3, 0x5401, 0) = -1 (errno 38)\n\
         9<uml-userspace> futex(0x1, FUTEX_WAIT) = 0\n",
    );
    assert_eq!(trace.used(ThreadClass::Device), BTreeSet::from(["epoll_wait".to_owned()]));
    assert_eq!(
        trace.refused(ThreadClass::Device),
        BTreeSet::from(["ioctl".to_owned(), "uname".to_owned()])
    );
    assert_eq!(trace.used(ThreadClass::GuestKernel), BTreeSet::from(["futex".to_owned()]));
}
