//! Reads `strace -f -Y`: which thread class made which host call, and which
//! calls its filter refused.

use std::collections::{BTreeSet, HashMap};

use exocell_cell::vmm::jail::ThreadClass;

type Calls = BTreeSet<String>;

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
    /// Begun, its result still to come.
    begun: Option<String>,
    /// Done, but a SIGSYS may still tell that it was the guest's, not the host's.
    done: Option<(&'static str, String, bool)>,
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
        threads.into_values().filter_map(|thread| thread.done).for_each(|done| trace.add(done));
        self
    }

    pub fn used(&self, class: ThreadClass) -> Calls {
        of(&self.used, class)
    }

    pub fn refused(&self, class: ThreadClass) -> Calls {
        of(&self.refused, class)
    }

    fn step(&mut self, thread: &mut Thread, name: &str, event: &str) {
        if event.starts_with("--- SIGSYS") {
            // The stub's own filter handed a guest call to the guest kernel.
            thread.done = None;
            return;
        }
        if let Some(done) = thread.done.take() {
            self.add(done);
        }
        let Some((call, arguments)) = parse(event, &mut thread.begun) else { return };
        thread.is_supervisor |= call == "setsid" && name == "exocell";
        let class =
            if self.is_isolate { thread.class_in_isolate(name) } else { thread.class(name) };
        let refused = arguments.contains(" = -1 ENOSYS") && call != "rt_sigreturn";
        thread.has_filter |= call == "seccomp" && arguments.trim_end().ends_with("= 0");
        thread.done = class.map(|class| (class.name(), call, refused));
    }

    fn add(&mut self, (class, call, refused): (&'static str, String, bool)) {
        let set = if refused { &mut self.refused } else { &mut self.used };
        set.insert((class, call));
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
            "audit" | "client" | "console" | "control" | "follower" | "operator" | "program"
            | "reaper" | "signal" => Some(ThreadClass::Control),
            "exocell" if !self.has_filter => None,
            "exocell" if self.is_supervisor => Some(ThreadClass::Control),
            "strace" => None,
            _ => Some(ThreadClass::GuestKernel),
        }
    }

    /// The same where there is no guest.
    fn class_in_isolate(&self, name: &str) -> Option<ThreadClass> {
        match name {
            "exocell" if !(self.has_filter && self.is_supervisor) => None,
            "strace" => None,
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
         9<uml-userspace> getppid() = 110\n\
         9<uml-userspace> --- SIGSYS {si_signo=SIGSYS} ---\n\
         7<devices> <... epoll_wait resumed>[], 8, -1) = 0\n\
         7<devices> uname({}) = -1 ENOSYS (Function not implemented)\n\
         9<uml-userspace> futex(0x1, FUTEX_WAIT) = 0\n",
    );
    assert_eq!(trace.used(ThreadClass::Device), BTreeSet::from(["epoll_wait".to_owned()]));
    assert_eq!(trace.refused(ThreadClass::Device), BTreeSet::from(["uname".to_owned()]));
    assert_eq!(trace.used(ThreadClass::GuestKernel), BTreeSet::from(["futex".to_owned()]));
}
