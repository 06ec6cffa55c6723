//! Starting a program: fork, set the child up, execve.
//!
//! `std::process::Command` does not fit: it waits for children itself, lets a
//! shell run what is not executable, and does not say which step failed.
//! Everything the child needs is allocated before the fork, because another
//! thread may have held the allocator's lock at that moment; between fork and
//! execve the child makes async-signal-safe calls only.

use std::convert::Infallible;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::{ForkResult, fork, pipe2};

use crate::programs::Programs;

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
}

/// The program's ends of its standard streams; all three are the terminal if
/// there is one.
pub struct Stdio {
    pub streams: [OwnedFd; 3],
    pub is_tty: bool,
}

/// What the child was doing when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    Session,
    Streams,
    Cgroup,
    Cwd,
    User,
    Exec,
}

impl Step {
    fn from_byte(byte: u8) -> Self {
        const ALL: [Step; 6] =
            [Step::Session, Step::Streams, Step::Cgroup, Step::Cwd, Step::User, Step::Exec];
        ALL.into_iter().find(|step| *step as u8 == byte).unwrap_or(Step::Exec)
    }
}

/// A child that was forked and may not have reached its program yet.
pub struct Starting(File);

impl Starting {
    /// Waits until the program runs; the pid by which it knows itself.
    ///
    /// # Errors
    /// The step that failed; the child is then dead.
    pub fn wait(mut self) -> Result<i32, (Step, Errno)> {
        let mut report = Vec::new();
        let _ = self.0.read_to_end(&mut report);
        let (pid, failed) = report.split_first_chunk().unwrap_or((&[0; 4], &[]));
        match failed {
            [step, a, b, c, d] => {
                let errno = i32::from_ne_bytes([*a, *b, *c, *d]);
                Err((Step::from_byte(*step), Errno::from_raw(errno)))
            }
            _ => Ok(i32::from_ne_bytes(*pid)),
        }
    }
}

/// Forks a child for `program`; its process id. `cgroup` is a `cgroup.procs`
/// file to join, `programs` the pid namespace that it is to be in.
pub fn start(
    program: &Program,
    stdio: &Stdio,
    cgroup: Option<&File>,
    programs: Option<&Programs>,
) -> nix::Result<(i32, Starting)> {
    let (report_in, report_out) = pipe2(OFlag::O_CLOEXEC)?;
    let child = Child {
        program,
        args: pointers(&program.args),
        env: pointers(&program.env),
        streams: stdio.streams.each_ref().map(AsRawFd::as_raw_fd),
        is_tty: stdio.is_tty,
        cgroup: cgroup.map(AsRawFd::as_raw_fd),
    };
    let fork = || {
        // SAFETY: the child calls only `Child::run`, which neither allocates nor
        // takes locks and never returns. Needed because no safe wrapper starts a
        // program without waiting for it.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(child.as_raw()),
            ForkResult::Child => child.run(report_out.as_raw_fd()),
        }
    };
    let pid = match programs {
        Some(programs) => programs.within(fork)?,
        None => fork()?,
    };
    Ok((pid, Starting(report_in.into())))
}

/// `strings` as the NULL-terminated array that execve takes.
fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
}

/// What the child reads after the fork.
struct Child<'a> {
    program: &'a Program,
    args: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    streams: [RawFd; 3],
    is_tty: bool,
    cgroup: Option<RawFd>,
}

type ChildResult<T> = Result<T, (Step, Errno)>;

impl Child<'_> {
    /// Says which pid it has, and becomes the program, or reports why not and exits.
    fn run(&self, report: RawFd) -> ! {
        // SAFETY: getpid takes nothing, write reads a live local. Needed because std's write
        // takes owned descriptors, which the child has none of.
        unsafe {
            let pid = libc::getpid().to_ne_bytes();
            libc::write(report, pid.as_ptr().cast(), pid.len());
        }
        let Err((step, errno)) = self.become_program();
        let [a, b, c, d] = (errno as i32).to_ne_bytes();
        let message = [step as u8, a, b, c, d];
        // SAFETY: write reads a live local; _exit ends the child without the
        // parent's exit handlers. Needed because std's exit runs them.
        unsafe {
            libc::write(report, message.as_ptr().cast(), message.len());
            libc::_exit(127)
        }
    }

    fn become_program(&self) -> ChildResult<Infallible> {
        reset_signals();
        crate::sys::set_nice(0);
        at(Step::Session, nix::unistd::setsid)?;
        self.take_streams()?;
        self.join_cgroup()?;
        self.enter_cwd()?;
        self.become_user()?;
        let (args, env) = (self.args.as_ptr(), self.env.as_ptr());
        // SAFETY: the path and both arrays are NUL- and NULL-terminated and
        // live in the child's copy of the parent. Needed because nix's execve
        // allocates its arrays.
        unsafe { libc::execve(self.program.path.as_ptr(), args, env) };
        Err((Step::Exec, Errno::last()))
    }

    /// The sources are above 2 (the runtime keeps 0 to 2 open), so no dup2
    /// overwrites a source, and each copy loses close-on-exec. Everything else
    /// closes on exec, also what this process inherited without that flag.
    fn take_streams(&self) -> ChildResult<()> {
        let (call, flag) = (libc::SYS_close_range, libc::CLOSE_RANGE_CLOEXEC);
        // SAFETY: close_range takes numbers and closes nothing here. Needed for
        // lack of a wrapper.
        at(Step::Streams, || Errno::result(unsafe { libc::syscall(call, 3u32, u32::MAX, flag) }))?;
        for (target, source) in (0..).zip(self.streams) {
            // SAFETY: dup2 takes no pointers. Needed because nix's takes owned
            // descriptors, which the child has none of.
            at(Step::Streams, || Errno::result(unsafe { libc::dup2(source, target) }))?;
        }
        if self.is_tty {
            // SAFETY: TIOCSCTTY takes a number. Needed for lack of a wrapper.
            let taken = || Errno::result(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) });
            at(Step::Streams, taken)?;
        }
        Ok(())
    }

    fn join_cgroup(&self) -> ChildResult<()> {
        let Some(procs) = self.cgroup else { return Ok(()) };
        // SAFETY: write reads one byte of a static string. Needed because the
        // child has a bare descriptor only.
        let written = || Errno::result(unsafe { libc::write(procs, c"0".as_ptr().cast(), 1) });
        at(Step::Cgroup, written)
    }

    /// As root, like runc: the user may start in a directory it could not reach.
    fn enter_cwd(&self) -> ChildResult<()> {
        let cwd: &CStr = &self.program.cwd;
        // SAFETY: the path is NUL-terminated. Needed because nix's chdir may
        // allocate for long paths.
        at(Step::Cwd, || Errno::result(unsafe { libc::chdir(cwd.as_ptr()) }))
    }

    fn become_user(&self) -> ChildResult<()> {
        let Program { uid, gid, groups, .. } = self.program;
        // SAFETY: setgroups reads `groups.len()` ids from a live array; the
        // others take numbers. Needed because nix's setgroups may allocate.
        at(Step::User, || unsafe {
            Errno::result(libc::setgroups(groups.len(), groups.as_ptr()))?;
            Errno::result(libc::setresgid(*gid, *gid, *gid))?;
            Errno::result(libc::setresuid(*uid, *uid, *uid))
        })
    }
}

fn at<T>(step: Step, call: impl FnOnce() -> nix::Result<T>) -> ChildResult<()> {
    call().map(drop).map_err(|errno| (step, errno))
}

/// Default dispositions (the runtime ignores SIGPIPE) and an empty mask.
fn reset_signals() {
    // SAFETY: the set is a local that sigemptyset fills before it is used;
    // SIG_DFL is no code of ours. Failures are of signals that cannot change.
    // Needed because nix's signal() knows no real-time signals.
    unsafe {
        for number in 1..=64 {
            libc::signal(number, libc::SIG_DFL);
        }
        let mut empty: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut empty);
        libc::sigprocmask(libc::SIG_SETMASK, &empty, std::ptr::null_mut());
    }
}
