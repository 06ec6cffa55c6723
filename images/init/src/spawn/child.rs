//! What a process does by itself to be the program: nothing of it allocates or takes a lock.

use std::convert::Infallible;
use std::ffi::CStr;
use std::os::fd::RawFd;

use nix::errno::Errno;

use super::{Program, READY, Step};
use crate::capabilities::{self, Sets};
use crate::mounts::InChild;

pub(super) type ChildResult<T> = Result<T, (Step, Errno)>;

/// How a process that init holds goes on.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    /// Where it says that it is ready, and what failed.
    pub report: RawFd,
    /// Where init lets it go on, by a byte a step.
    pub go: RawFd,
}

impl Steps {
    /// Waits until init says so; one that init has given up goes no further.
    pub fn wait(self) -> ChildResult<()> {
        let mut word = 0_u8;
        // SAFETY: read fills a live local. Needed because the descriptor is nobody's here.
        match unsafe { libc::read(self.go, (&raw mut word).cast(), 1) } {
            1 => Ok(()),
            _ => Err((Step::Session, Errno::ECANCELED)),
        }
    }

    pub fn say_ready(self) {
        // SAFETY: write reads a live local. Needed because the descriptor stays open.
        unsafe { libc::write(self.report, [READY].as_ptr().cast(), 1) };
    }
}

/// The program, with what execve(2) takes.
pub(super) struct Child<'a> {
    program: &'a Program,
    args: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    is_tty: bool,
}

impl<'a> Child<'a> {
    pub fn new(program: &'a Program, is_tty: bool) -> Self {
        let pointers = |strings: &[std::ffi::CString]| {
            strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
        };
        Self { program, args: pointers(&program.args), env: pointers(&program.env), is_tty }
    }

    /// Becomes the program where this process is, a fork of the agent's.
    pub fn become_here(&self, streams: [RawFd; 3]) -> ChildResult<Infallible> {
        reset_signals();
        crate::sys::set_nice(0);
        close_on_exec()?;
        take_streams(streams)?;
        self.begin_session()?;
        self.take_limits(|_| true)?;
        self.enter_cwd()?;
        self.become_user()?;
        self.execute()
    }

    /// The same, as the first process of new namespaces, in a fork of the agent's, of whose
    /// descriptors it keeps none.
    pub fn become_first_of_fork(
        &self,
        streams: [RawFd; 3],
        steps: Steps,
        mounts: &[InChild],
    ) -> ChildResult<Infallible> {
        reset_signals();
        crate::sys::set_nice(0);
        take_streams(streams)?;
        close_but([steps.report, steps.go])?;
        steps.wait()?;
        self.become_first(steps, mounts)
    }

    /// The same, as the first process of namespaces that it mounts for. All of them are there,
    /// and nothing has run in them, when it says READY and waits.
    pub fn become_first(&self, steps: Steps, mounts: &[InChild]) -> ChildResult<Infallible> {
        self.begin_session()?;
        // SAFETY: unshare takes a number. Needed because nix's takes flags that it checks.
        at(Step::Cgroup, || Errno::result(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) }))?;
        steps.say_ready();
        steps.wait()?;
        mount_inside(mounts)?;
        self.take_limits(|_| true)?;
        self.enter_cwd()?;
        self.become_user()?;
        if self.program.init {
            self.leave_first()?;
        }
        self.execute()
    }

    /// Has of the program's what takes rights that the program may not have. All that makes its
    /// process what the program is comes before the process is where programs see it.
    pub fn prepare(&self) -> ChildResult<()> {
        self.take_limits(|number| number != libc::RLIMIT_NPROC)?;
        self.enter_cwd()?;
        self.become_user()
    }

    /// Becomes the program, in a process that a prepared one has made.
    pub fn become_prepared(&self) -> ChildResult<Infallible> {
        self.begin_session()?;
        // This process is one more of the user's: with the limit it might not have been made.
        self.take_limits(|number| number == libc::RLIMIT_NPROC)?;
        self.execute()
    }

    fn execute(&self) -> ChildResult<Infallible> {
        if self.program.no_new_privileges {
            self.take_filter()?;
        }
        let (args, env) = (self.args.as_ptr(), self.env.as_ptr());
        // SAFETY: the path and both arrays are NUL- and NULL-terminated and live in this process.
        // Needed because nix's execve allocates its arrays.
        unsafe { libc::execve(self.program.path.as_ptr(), args, env) };
        Err((Step::Exec, Errno::last()))
    }

    fn begin_session(&self) -> ChildResult<()> {
        at(Step::Session, nix::unistd::setsid)?;
        if self.is_tty {
            // SAFETY: TIOCSCTTY takes a number. Needed for lack of a wrapper.
            let taken = || Errno::result(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) });
            at(Step::Streams, taken)?;
        }
        Ok(())
    }

    fn take_limits(&self, is_wanted: impl Fn(u32) -> bool) -> ChildResult<()> {
        for limit in self.program.limits.iter().filter(|limit| is_wanted(limit.number)) {
            let wanted = libc::rlimit { rlim_cur: limit.soft, rlim_max: limit.hard };
            // SAFETY: setrlimit reads a local. Needed because nix's knows the limits by an
            // enumeration of its own.
            at(Step::Limits, || Errno::result(unsafe { libc::setrlimit(limit.number, &wanted) }))?;
        }
        // SAFETY: umask takes a number and cannot fail. Needed because nix's takes flags.
        unsafe { libc::umask(self.program.umask) };
        Ok(())
    }

    /// As root, like runc: the user may start in a directory it could not reach. One that is not
    /// below this process's root is refused: a link of /proc may lead there.
    fn enter_cwd(&self) -> ChildResult<()> {
        let cwd: &CStr = &self.program.cwd;
        let mut path = [0_u8; libc::PATH_MAX as usize];
        // SAFETY: the path is NUL-terminated, and getcwd fills a live local of that size. Needed
        // because nix's chdir may allocate for long paths, and the C library's getcwd may not tell
        // what the kernel does.
        at(Step::Cwd, || unsafe {
            Errno::result(libc::chdir(cwd.as_ptr()))?;
            Errno::result(libc::syscall(libc::SYS_getcwd, path.as_mut_ptr(), path.len()))
        })?;
        match path {
            [b'/', ..] => Ok(()),
            _ => Err((Step::Cwd, Errno::ENOENT)),
        }
    }

    /// From here on the kernel asks the program's filter about each system call, if it has one.
    fn take_filter(&self) -> ChildResult<()> {
        let filter = &self.program.filter;
        if filter.is_empty() {
            return Ok(());
        }
        // An instruction is its 8 bytes, as they are in memory (linux/filter.h).
        const { assert!(size_of::<libc::sock_filter>() == size_of::<u64>()) };
        let length = u16::try_from(filter.len()).map_err(|_| (Step::Filter, Errno::E2BIG))?;
        let program = libc::sock_fprog { len: length, filter: filter.as_ptr().cast_mut().cast() };
        let mode = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
        // SAFETY: prctl reads the structure, which is a local, and so many instructions, which are
        // borrowed. Needed for lack of a wrapper.
        let taken = || unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) };
        at(Step::Filter, || Errno::result(taken()))
    }

    fn become_user(&self) -> ChildResult<()> {
        // Without `no_new_privileges` that is a right of root's, which it may not have later; then
        // the filter is right before the program (`execute`).
        if !self.program.no_new_privileges {
            self.take_filter()?;
        }
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
        // As any program: it holds nothing but what its child is started with.
        libc::prctl(libc::PR_SET_DUMPABLE, 1);
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

/// Everything above the standard streams closes on exec, also what this process inherited
/// without that flag.
pub(super) fn close_on_exec() -> ChildResult<()> {
    let (call, flag) = (libc::SYS_close_range, libc::CLOSE_RANGE_CLOEXEC);
    // SAFETY: close_range takes numbers and closes nothing here. Needed for lack of a wrapper.
    at(Step::Streams, || Errno::result(unsafe { libc::syscall(call, 3u32, u32::MAX, flag) }))
}

/// Closes everything above the standard streams but `kept`; those close on exec.
fn close_but(kept: [RawFd; 2]) -> ChildResult<()> {
    close_on_exec()?;
    let close = |first: RawFd, last: u32| {
        let Ok(first) = u32::try_from(first) else { return };
        if first <= last {
            // SAFETY: close_range takes numbers, and nothing of this process uses a descriptor
            // but those that stay. Needed for lack of a wrapper.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0u32) };
        }
    };
    let before = |fd: RawFd| u32::try_from(fd - 1).unwrap_or(0);
    let [low, high] = [kept[0].min(kept[1]), kept[0].max(kept[1])];
    close(3, before(low));
    close(low + 1, before(high));
    close(high + 1, u32::MAX);
    Ok(())
}

/// The sources are above 2 (the runtime keeps 0 to 2 open), so no dup2 overwrites a source, and
/// each copy loses close-on-exec.
pub(super) fn take_streams(streams: [RawFd; 3]) -> ChildResult<()> {
    for (target, source) in (0..).zip(streams) {
        // SAFETY: dup2 takes no pointers. Needed because nix's takes owned descriptors, which
        // the child has none of.
        at(Step::Streams, || Errno::result(unsafe { libc::dup2(source, target) }))?;
    }
    Ok(())
}

/// Says on `report` what failed, and ends.
pub(super) fn fail(report: RawFd, (step, errno): (Step, Errno)) -> ! {
    let [a, b, c, d] = (errno as i32).to_ne_bytes();
    let message = [step as u8, a, b, c, d];
    // SAFETY: write reads a live local; _exit ends the child without the parent's exit
    // handlers. Needed because std's exit runs them.
    unsafe {
        libc::write(report, message.as_ptr().cast(), message.len());
        libc::_exit(127)
    }
}

/// Mounts what only this process can.
fn mount_inside(mounts: &[InChild]) -> ChildResult<()> {
    mounts.iter().try_for_each(|mount| at(Step::Mounts, || do_mount(mount)))
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

pub(super) fn at<T>(step: Step, call: impl FnOnce() -> nix::Result<T>) -> ChildResult<()> {
    call().map(drop).map_err(|errno| (step, errno))
}

/// Default dispositions (the runtime ignores SIGPIPE) and an empty mask.
pub(super) fn reset_signals() {
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
