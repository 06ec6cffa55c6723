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

use crate::capabilities::{self, Sets};
use crate::container::{Container, Inside, within_new};
use crate::limits::Limit;
use crate::mounts::InChild;

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
    Exec,
}

impl Step {
    fn from_byte(byte: u8) -> Self {
        const ALL: [Step; 8] = [
            Step::Session,
            Step::Streams,
            Step::Cgroup,
            Step::Mounts,
            Step::Limits,
            Step::Cwd,
            Step::User,
            Step::Exec,
        ];
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

/// Forks a child for `program`; its process id. `cgroup` is a `cgroup.procs` file to join.
pub fn start(
    program: &Program,
    stdio: &Stdio,
    cgroup: Option<&File>,
    place: &Place<'_>,
) -> nix::Result<(i32, Starting)> {
    let (report_in, report_out) = pipe2(OFlag::O_CLOEXEC)?;
    let child = Child {
        program,
        args: pointers(&program.args),
        env: pointers(&program.env),
        streams: stdio.streams.each_ref().map(AsRawFd::as_raw_fd),
        is_tty: stdio.is_tty,
        cgroup: cgroup.map(AsRawFd::as_raw_fd),
        inside: match place {
            Place::New(inside) => Some(inside),
            Place::Here | Place::Beside(_) => None,
        },
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
    let pid = match place {
        Place::Here => fork()?,
        Place::Beside(container) => container.within(fork)?,
        Place::New(_) => within_new(fork)?,
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
    inside: Option<&'a Inside>,
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
        self.inside.map_or(Ok(()), mount_inside)?;
        self.take_limits()?;
        self.enter_cwd()?;
        self.become_user()?;
        if self.program.init {
            self.leave_first()?;
        }
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

    fn take_limits(&self) -> ChildResult<()> {
        for limit in &self.program.limits {
            let wanted = libc::rlimit { rlim_cur: limit.soft, rlim_max: limit.hard };
            // SAFETY: setrlimit reads a local. Needed because nix's knows the limits by an
            // enumeration of its own.
            at(Step::Limits, || Errno::result(unsafe { libc::setrlimit(limit.number, &wanted) }))?;
        }
        // SAFETY: umask takes a number and cannot fail. Needed because nix's takes flags.
        unsafe { libc::umask(self.program.umask) };
        Ok(())
    }

    /// As root, like runc: the user may start in a directory it could not reach.
    fn enter_cwd(&self) -> ChildResult<()> {
        let cwd: &CStr = &self.program.cwd;
        // SAFETY: the path is NUL-terminated. Needed because nix's chdir may
        // allocate for long paths.
        at(Step::Cwd, || Errno::result(unsafe { libc::chdir(cwd.as_ptr()) }))
    }

    fn become_user(&self) -> ChildResult<()> {
        let Program { uid, gid, groups, capabilities, no_new_privileges, .. } = self.program;
        if let Some(sets) = capabilities {
            bound(sets.bounding);
        }
        // SAFETY: setgroups reads `groups.len()` ids from a live array; the
        // others take numbers. Needed because nix's setgroups may allocate.
        at(Step::User, || unsafe {
            Errno::result(libc::setgroups(groups.len(), groups.as_ptr()))?;
            Errno::result(libc::setresgid(*gid, *gid, *gid))?;
            // What root may is to outlast it, until the sets are taken.
            libc::prctl(libc::PR_SET_KEEPCAPS, libc::c_ulong::from(capabilities.is_some()));
            Errno::result(libc::setresuid(*uid, *uid, *uid))
        })?;
        if let Some(sets) = capabilities {
            at(Step::User, || take_capabilities(sets))?;
        }
        if *no_new_privileges {
            // SAFETY: prctl takes numbers. Needed for lack of a wrapper that does not allocate.
            let set = || unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            at(Step::User, || Errno::result(set()))?;
        }
        Ok(())
    }

    /// Forks: the child goes on to be the program, and this process is the first of the pid
    /// namespace, which ends with it.
    fn leave_first(&self) -> ChildResult<()> {
        // SAFETY: the calls take numbers and locals; the process has one thread, and its child
        // goes on with async-signal-safe calls only. Needed for lack of wrappers that allocate
        // nothing.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::sigprocmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
            match libc::fork() {
                -1 => return Err((Step::Exec, Errno::last())),
                0 => {}
                child => be_first(child, &all),
            }
            if self.is_tty {
                // The terminal's signals are for the program. SIGTTOU is blocked here.
                libc::setpgid(0, 0);
                libc::tcsetpgrp(0, libc::getpid());
            }
        }
        reset_signals();
        Ok(())
    }
}

/// Passes signals on to `child`, reaps whatever ends, and ends as `child` does.
fn be_first(child: libc::pid_t, all: &libc::sigset_t) -> ! {
    // SAFETY: the calls take numbers, a static string and live locals; nothing of this process
    // uses a descriptor above 2 afterwards. Needed as above.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32);
        libc::prctl(libc::PR_SET_NAME, c"docker-init".as_ptr());
        loop {
            let number = libc::sigwaitinfo(all, std::ptr::null_mut());
            if number != libc::SIGCHLD {
                if number > 0 {
                    libc::kill(child, number);
                }
                continue;
            }
            let mut status = 0;
            loop {
                match libc::waitpid(-1, &mut status, libc::WNOHANG) {
                    ended if ended == child && libc::WIFSIGNALED(status) => {
                        libc::_exit(128 + libc::WTERMSIG(status))
                    }
                    ended if ended == child => libc::_exit(libc::WEXITSTATUS(status)),
                    ended if ended > 0 => {}
                    _ => break,
                }
            }
        }
    }
}

/// Enters a control group namespace of its own and mounts what only this process can.
fn mount_inside(inside: &Inside) -> ChildResult<()> {
    // SAFETY: unshare takes a number. Needed because nix's takes flags that it checks.
    at(Step::Cgroup, || Errno::result(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) }))?;
    inside.mounts.iter().try_for_each(|mount| at(Step::Mounts, || do_mount(mount)))
}

fn do_mount(mount: &InChild) -> nix::Result<()> {
    match mount {
        InChild::Mount { source, target, kind, flags, data } => {
            raw_mount(source, target, kind, *flags, data)
        }
        InChild::Mask(target) => {
            match raw_mount(c"/dev/null", target, c"", libc::MS_BIND, c"") {
                // It is a directory.
                Err(Errno::ENOTDIR) => raw_mount(c"tmpfs", target, c"tmpfs", libc::MS_RDONLY, c""),
                done => if_there(done),
            }
        }
        InChild::ReadOnly { target, flags } => {
            let bind = libc::MS_BIND | libc::MS_REC;
            match raw_mount(target, target, c"", bind, c"") {
                Ok(()) => {
                    let flags = flags | libc::MS_REMOUNT | libc::MS_BIND;
                    raw_mount(c"", target, c"", flags, c"")
                }
                failed => if_there(failed),
            }
        }
    }
}

/// What a kernel does not have needs no cover.
fn if_there(done: nix::Result<()>) -> nix::Result<()> {
    match done {
        Err(Errno::ENOENT) => Ok(()),
        done => done,
    }
}

fn raw_mount(
    source: &CStr,
    target: &CStr,
    kind: &CStr,
    flags: libc::c_ulong,
    data: &CStr,
) -> nix::Result<()> {
    // SAFETY: mount reads NUL-terminated strings for the length of the call. Needed because
    // nix's copies long ones.
    Errno::result(unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast())
    })
    .map(drop)
}

/// Drops from the bounding set what is not in `bounding`.
fn bound(bounding: u64) {
    for number in (0..capabilities::COUNT).filter(|number| bounding >> number & 1 == 0) {
        // SAFETY: prctl takes numbers. One that the kernel does not have need not be dropped.
        // Needed for lack of a wrapper.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(number)) };
    }
}

/// linux/capability.h, version 3.
#[repr(C)]
struct Header {
    version: u32,
    pid: libc::c_int,
}

#[repr(C)]
struct Half {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

fn take_capabilities(sets: &Sets) -> nix::Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    let half = |shift: u32| Half {
        effective: (sets.effective >> shift) as u32,
        permitted: (sets.permitted >> shift) as u32,
        inheritable: (sets.inheritable >> shift) as u32,
    };
    let (header, halves) = (Header { version: VERSION_3, pid: 0 }, [half(0), half(32)]);
    // SAFETY: capset reads the header and two halves, which are locals of their layout; prctl
    // takes numbers. Needed for lack of wrappers.
    unsafe {
        Errno::result(libc::syscall(libc::SYS_capset, &header, halves.as_ptr()))?;
        libc::prctl(libc::PR_SET_KEEPCAPS, 0 as libc::c_ulong);
        Errno::result(libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))?;
        for number in (0..capabilities::COUNT).filter(|number| sets.ambient >> number & 1 == 1) {
            let raise = libc::PR_CAP_AMBIENT_RAISE;
            Errno::result(libc::prctl(libc::PR_CAP_AMBIENT, raise, number as libc::c_ulong, 0, 0))?;
        }
    }
    Ok(())
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
