//! Starting a program: fork, set the child up, execve.
//!
//! `std::process::Command` does not fit: it waits for children itself, lets a
//! shell run what is not executable, and does not say which step failed.
//!
//! The container's first program has no other beside it that could name its process. It is a fork:
//!
//! ```text
//! init ── forks, with a new pid namespace for children ──> the program's process
//!  ├── control group, go on ─────────────────────────────> no descriptor of init's, namespaces
//!  │ <────────────────────── ready ────────────────────────┤
//!  ├── takes the namespaces for later programs, go on ───> mounts, user, execve
//! ```
//!
//! Every later one goes by a helper:
//!
//! ```text
//! init ── forks, and executes itself ──> helper, in init's pid namespace
//!  │ <────────────────────── ready ────────┤ is what the program is: user, capabilities, limits
//!  ├───────────────────────── go ────────> ├─ makes a child of init's, in the program's namespace
//!  │ <──────────────────────  pid ──────── X
//!  ├── control group, go on ─────────────────────> the program's process: execve
//! ```
//! A process that programs can name has nothing of init's: no memory, for the helper is a
//! program of its own; no descriptor but its streams, the pipe on which it says what failed and the
//! one by which it is let go on; and beside other programs no right that its program has not.
//! Without that a cell's root would take all of it by ptrace(2) or pidfd_getfd(2). For the same
//! reason a first process that stays what it is, since it only reaps (`Program::init`), is a
//! helper's too, and so is the first of a container that shares its pids with another.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{ForkResult, fork, pipe2};

use crate::capabilities::Sets;
use crate::container::{Container, Inside};
use crate::limits::Limit;
use crate::{own_proc, sys};

mod child;
mod helper;
mod order;
mod pids;

use child::{Child, Steps};
pub use helper::run as run_helper;
use pids::PlaceOfPid;

/// How long a program beside others may take to begin: they can hold its file by a lease
/// (fcntl(2)), or the file system that it lies on. Less than the host waits.
pub const BEGIN_MAX: Duration = Duration::from_secs(8);
/// How often it is looked whether a program runs that has not said so.
const LOOK: Duration = Duration::from_millis(100);
/// A process's word that it is ready; no [`Step`] has this number.
const READY: u8 = u8::MAX;
/// Bytes that a pipe takes if nobody asks for more (pipe(7)).
const PIPE_BYTES: usize = 64 << 10;

/// The program, checked and resolved.
pub struct Program {
    /// Path to execute, relative to `cwd` if it is relative.
    pub path: CString,
    pub args: Vec<CString>,
    pub env: Vec<CString>,
    pub cwd: CString,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub umask: u32,
    pub limits: Vec<Limit>,
    /// `None` leaves it what root, or another user, has.
    pub capabilities: Option<Sets>,
    pub no_new_privileges: bool,
    /// Instructions of a filter of system calls; none for no filter.
    pub filter: Vec<u64>,
    /// Whether a first process of the pid namespace is its parent.
    pub init: bool,
}

/// The program's ends of its standard streams; all three are the terminal if
/// there is one.
pub struct Stdio {
    pub streams: [OwnedFd; 3],
    pub is_tty: bool,
}

/// Where a program is to be.
pub enum Place<'a> {
    /// Where this process is.
    Here,
    /// In the container that runs.
    Beside(&'a Container),
    /// In a new one, as its first process.
    New(&'a Inside),
    /// In a new one whose programs and those of another see each other.
    Joining(&'a Inside, &'a Container),
}

/// What the child was doing when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    Session,
    Streams,
    Cgroup,
    Mounts,
    Limits,
    Cwd,
    User,
    Filter,
    Exec,
}

impl Step {
    fn from_byte(byte: u8) -> Self {
        const ALL: [Step; 9] = [
            Step::Session,
            Step::Streams,
            Step::Cgroup,
            Step::Mounts,
            Step::Limits,
            Step::Cwd,
            Step::User,
            Step::Filter,
            Step::Exec,
        ];
        ALL.into_iter().find(|step| *step as u8 == byte).unwrap_or(Step::Exec)
    }
}

/// Why a program does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    At(Step, Errno),
    /// It took longer than [`BEGIN_MAX`].
    Late,
}

/// What processes say on their way to the program; nothing that is said binds anyone, since
/// programs may get at the pipe.
struct Report {
    pipe: File,
    until: Option<Instant>,
}

impl Report {
    /// Waits for `size` bytes; fewer are there when the other end is closed.
    fn read(&mut self, size: usize, is_over: impl Fn() -> bool) -> Result<Vec<u8>, Failure> {
        let mut said = Vec::new();
        while said.len() < size {
            if self.until.is_some_and(|until| until <= Instant::now()) {
                return Err(Failure::Late);
            }
            let mut waited = [PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)];
            let look = self.until.map_or(PollTimeout::NONE, |_| {
                PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::NONE)
            });
            if poll(&mut waited, look).unwrap_or(0) == 0 {
                if is_over() {
                    break;
                }
                continue;
            }
            let mut bytes = [0; 8];
            let wanted = bytes.len().min(size - said.len());
            match self.pipe.read(&mut bytes[..wanted]) {
                Ok(count @ 1..) => said.extend_from_slice(&bytes[..count]),
                Ok(0) => break,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        Ok(said)
    }

    /// Waits for the word that a process is ready.
    fn await_ready(&mut self) -> Result<(), Failure> {
        match *self.read(1, || false)? {
            [READY] => Ok(()),
            [step] => {
                let rest = self.read(FAILURE_BYTES - 1, || false)?;
                let failed = Self::failure(&[&[step], &*rest].concat());
                Err(failed.unwrap_or(Failure::At(Step::Session, Errno::ECHILD)))
            }
            _ => Err(Failure::At(Step::Session, Errno::ECHILD)),
        }
    }

    /// What failed, if anything is said to have.
    fn failure(said: &[u8]) -> Option<Failure> {
        let [step, a, b, c, d] = said else { return None };
        let errno = i32::from_ne_bytes([*a, *b, *c, *d]);
        Some(Failure::At(Step::from_byte(*step), Errno::from_raw(errno)))
    }
}

/// A process that may not have reached its program yet.
pub struct Starting {
    report: Report,
    pid: i32,
}

impl Starting {
    /// Waits until the program runs.
    ///
    /// # Errors
    /// Why it does not. Its process may be there, with a program that has lied.
    pub fn wait(mut self) -> Result<(), Failure> {
        let exe = format!("{}/exe", self.pid);
        // The end of the pipe says it too, unless a program has got hold of the other one.
        let runs = || !own_proc::is_same(&exe, "self/exe");
        let said = self.report.read(FAILURE_BYTES, runs)?;
        Report::failure(&said).map_or(Ok(()), Err)
    }
}

/// A step and an error number.
const FAILURE_BYTES: usize = 5;

/// Forks a child for `program` where this process is; its process id.
pub fn start_here(program: &Program, stdio: &Stdio) -> nix::Result<(i32, Starting)> {
    let (report_in, report_out) = pipe2(OFlag::O_CLOEXEC)?;
    let child = Child::new(program, stdio.is_tty);
    let streams = stdio.streams.each_ref().map(AsRawFd::as_raw_fd);
    // SAFETY: the child makes async-signal-safe calls only and never returns. Needed because no
    // safe wrapper starts a program without waiting for it.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => {
            let pid = child.as_raw();
            let report = Report { pipe: report_in.into(), until: None };
            Ok((pid, Starting { report, pid }))
        }
        ForkResult::Child => {
            let Err(failed) = child.become_here(streams);
            child::fail(report_out.as_raw_fd(), failed)
        }
    }
}

/// A process that waits to be let go on to its program.
pub struct Held {
    report: Report,
    go: File,
}

impl Held {
    /// Has a first process, which waits, enter the rest of its namespaces; it waits again, before
    /// anything that is not init's runs in them.
    pub fn enter_namespaces(&mut self) -> Result<(), Failure> {
        let _ = self.go.write_all(&[1]);
        self.report.await_ready()
    }

    /// Lets the process `pid`, which this is of, go on.
    pub fn let_go(mut self, pid: i32) -> Starting {
        // One that is dead is seen to be.
        let _ = self.go.write_all(&[1]);
        Starting { report: self.report, pid }
    }
}

/// Forks a child for `program` as the first process of a new pid namespace; its process id. The
/// child waits. No other program may run in what it is started in.
pub fn start_first(program: &Program, stdio: &Stdio, inside: &Inside) -> nix::Result<(i32, Held)> {
    let (report_in, report_out) = pipe2(OFlag::O_CLOEXEC)?;
    let (go_in, go_out) = pipe2(OFlag::O_CLOEXEC)?;
    let child = Child::new(program, stdio.is_tty);
    let streams = stdio.streams.each_ref().map(AsRawFd::as_raw_fd);
    let own = own_proc::open("thread-self/ns/pid").map_err(|_| Errno::ENOENT)?;
    unshare(CloneFlags::CLONE_NEWPID)?;
    // SAFETY: as in `start_here`.
    let forked = unsafe { fork() };
    if let Ok(ForkResult::Child) = forked {
        let steps = Steps { report: report_out.as_raw_fd(), go: go_in.as_raw_fd() };
        let Err(failed) = child.become_first_of_fork(streams, steps, &inside.mounts);
        child::fail(report_out.as_raw_fd(), failed)
    }
    // A thread whose children are elsewhere makes no other thread (clone(2)).
    let back = setns(own.as_fd(), CloneFlags::CLONE_NEWPID);
    let ForkResult::Parent { child } = forked? else { return Err(Errno::ECHILD) };
    back?;
    let report = Report { pipe: report_in.into(), until: None };
    Ok((child.as_raw(), Held { report, go: go_out.into() }))
}

/// A helper that makes a program's process in another pid namespace.
pub struct Helper {
    /// Where it leaves the pid.
    made: PlaceOfPid,
    report: Report,
    go: File,
}

impl Helper {
    /// Starts one for `program`, which is to be at `place`; its process id. It waits when it is
    /// ready.
    pub fn start(program: &Program, stdio: &Stdio, place: &Place<'_>) -> nix::Result<(i32, Self)> {
        let (mounts, beside) = match place {
            Place::New(inside) => (Some(inside.mounts.as_slice()), None),
            Place::Joining(inside, other) => {
                (Some(inside.mounts.as_slice()), Some(other.pid_namespace()))
            }
            Place::Beside(container) => (None, Some(container.pid_namespace())),
            Place::Here => return Err(Errno::EINVAL),
        };
        let made = PlaceOfPid::take()?;
        let order = ordered(&order::write(program, stdio.is_tty, mounts))?;
        let (report_in, report_out) = pipe2(OFlag::O_CLOEXEC)?;
        let (go_in, go_out) = pipe2(OFlag::O_CLOEXEC)?;
        let itself = own_proc::open("self/exe").map_err(|_| Errno::ENOENT)?;
        let kept = [order.as_fd(), made.page(), report_out.as_fd(), go_in.as_fd()];
        let kept = kept.map(|fd| fd.as_raw_fd());
        let namespace = beside.map_or(-1, |namespace| namespace.as_raw_fd());
        let streams = stdio.streams.each_ref().map(AsRawFd::as_raw_fd);
        let forked = Forked { itself: &itself, streams, kept, place: made.at(), namespace };
        let pid = forked.fork(report_out)?;
        let until = beside.map(|_| Instant::now() + BEGIN_MAX);
        let report = Report { pipe: report_in.into(), until };
        Ok((pid, Self { made, report, go: go_out.into() }))
    }

    /// Waits until the helper is ready.
    pub fn await_ready(&mut self) -> Result<(), Failure> {
        self.report.await_ready()
    }

    /// Has the helper `pid`, which is ready, make the process, and reaps it; the pid of the
    /// process, which waits. This waits for nothing that a program has a hand in.
    pub fn make(&mut self, pid: i32) -> nix::Result<i32> {
        let _ = self.go.write_all(&[1]);
        sys::reap_when_dead(pid)?;
        if let Some(made) = self.made.read() {
            return Ok(made);
        }
        match self.report.read(FAILURE_BYTES, || true).ok().and_then(|said| Report::failure(&said))
        {
            Some(Failure::At(_, errno)) => Err(errno),
            _ => Err(Errno::ECHILD),
        }
    }

    /// The process that was made, which waits.
    pub fn held(self) -> Held {
        Held { report: self.report, go: self.go }
    }
}

/// The end of a pipe that holds all of `order`. A memory file is no place for it: a guest that is
/// above its limit has no page for one (the guest kernel's Pager, tmpfs), and is to be reached then
/// too.
fn ordered(order: &[u8]) -> nix::Result<OwnedFd> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
    if order.len() > PIPE_BYTES {
        let bytes = i32::try_from(order.len()).map_err(|_| Errno::E2BIG)?;
        fcntl(&write, FcntlArg::F_SETPIPE_SZ(bytes))?;
    }
    let written = File::from(write).write_all(order);
    written.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(read)
}

/// What a fork of this process knows on its way to being a helper.
struct Forked<'a> {
    itself: &'a File,
    streams: [RawFd; 3],
    /// The order, the page of pids, the report's end, the end that says go.
    kept: [RawFd; 4],
    /// Where in the page.
    place: usize,
    /// Of pids; -1 for a new one.
    namespace: RawFd,
}

impl Forked<'_> {
    fn fork(&self, report: OwnedFd) -> nix::Result<i32> {
        let [order, page, report_kept, go] = self.kept;
        let place = self.place.to_string();
        let numbers = [order, page, report_kept, go, self.namespace].map(|one| one.to_string());
        let numbers = numbers.into_iter().chain([place]);
        let numbers: Vec<_> =
            numbers.map(|number| CString::new(number).unwrap_or_default()).collect();
        let fixed = [c"init".as_ptr(), helper::VERB.as_ptr()].into_iter();
        let args: Vec<_> =
            fixed.chain(numbers.iter().map(|n| n.as_ptr())).chain([std::ptr::null()]).collect();
        // SAFETY: as in `start_here`.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(child.as_raw()),
            ForkResult::Child => child::fail(report.as_raw_fd(), self.execute(&args)),
        }
    }

    fn execute(&self, args: &[*const libc::c_char]) -> (Step, Errno) {
        child::reset_signals();
        sys::set_nice(0);
        if let Err(failed) = child::close_on_exec().and_then(|()| child::take_streams(self.streams))
        {
            return failed;
        }
        let no_env = [std::ptr::null::<libc::c_char>()];
        let (call, flags) = (libc::SYS_execveat, libc::AT_EMPTY_PATH);
        // SAFETY: fcntl takes numbers; execveat reads a static string and arrays that end with a
        // null pointer. Needed for lack of wrappers that allocate nothing.
        unsafe {
            for kept in self.kept.into_iter().chain([self.namespace]).filter(|kept| *kept >= 0) {
                libc::fcntl(kept, libc::F_SETFD, 0);
            }
            let itself = self.itself.as_raw_fd();
            libc::syscall(call, itself, c"".as_ptr(), args.as_ptr(), no_env.as_ptr(), flags);
        }
        (Step::Exec, Errno::last())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mounts::InChild;

    #[test]
    fn an_order_is_read_as_it_was_written() {
        let text = |text: &str| CString::new(text).unwrap();
        let program = Program {
            path: text("/bin/sh"),
            args: vec![text("sh"), text("")],
            env: vec![text("A=1")],
            cwd: text("/"),
            uid: 1,
            gid: 2,
            groups: vec![3, u32::MAX],
            umask: 0o22,
            limits: vec![Limit { number: 7, soft: 1, hard: u64::MAX }],
            capabilities: Some(Sets { bounding: 1, ambient: 5, ..Sets::default() }),
            no_new_privileges: true,
            filter: vec![0x7fff_0000_0000_0006],
            init: false,
        };
        let mounts = [
            InChild::Mask(text("/proc/keys")),
            InChild::ReadOnly { target: text("/proc/sys"), flags: 9 },
            InChild::Mount {
                source: text("proc"),
                target: text("/proc"),
                kind: text("proc"),
                flags: 14,
                data: text(""),
            },
        ];
        let bytes = order::write(&program, true, Some(&mounts));
        let order = order::read(&bytes).unwrap();
        let again = order::write(&order.program, order.is_tty, order.mounts.as_deref());
        assert_eq!(bytes, again);
        assert_eq!(order.program.limits, program.limits);
        assert!((0..bytes.len()).all(|end| order::read(&bytes[..end]).is_none()));
        let beside = order::read(&order::write(&program, false, None)).unwrap();
        assert!(beside.mounts.is_none() && !beside.is_tty);
    }
}
