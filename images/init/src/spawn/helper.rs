//! This program as a helper: what init executes to make the process of another program.

use std::convert::Infallible;
use std::ffi::CStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};

use super::Step;
use super::child::{self, Child, ChildResult, Steps, at};
use super::order::{self, Order};
use super::pids::PAGE_BYTES;

/// The first argument of a helper.
pub(super) const VERB: &CStr = c"start";

/// Is a helper if `arguments` say so; returns if they do not.
pub fn run(arguments: &[String]) {
    let [_, verb, numbers @ ..] = arguments else { return };
    let numbers: Option<Vec<RawFd>> = numbers.iter().map(|number| number.parse().ok()).collect();
    let Some(&[order, page, report, go, namespace, place]) = numbers.as_deref() else { return };
    if verb.as_bytes() != VERB.to_bytes() {
        return;
    }
    let owned = |number: RawFd| {
        // SAFETY: init has opened it for this process, which knows it by this number alone.
        // Needed because it comes as a number.
        (number > 2).then(|| unsafe { OwnedFd::from_raw_fd(number) })
    };
    let (Some(order), Some(page), Some(go)) = (owned(order), owned(page), owned(go)) else {
        return;
    };
    let Ok(place) = usize::try_from(place) else { return };
    let shared = Shared { order, page, place };
    let Err(failed) = help(shared, report, File::from(go), owned(namespace));
    child::fail(report, failed)
}

/// What init hands over.
struct Shared {
    /// The end of a pipe.
    order: OwnedFd,
    /// Where the pid goes, and where there.
    page: OwnedFd,
    place: usize,
}

fn help(
    shared: Shared,
    report: RawFd,
    go: File,
    namespace: Option<OwnedFd>,
) -> ChildResult<Infallible> {
    // Nobody but who may trace anything has a look at it; execve(2) takes that back.
    hide();
    child::close_on_exec()?;
    let Shared { order, page, place } = shared;
    let mut made = PidOfMade::share(page.as_fd(), place).map_err(|errno| (Step::Session, errno))?;
    drop(page);
    let order = read_order(order)?;
    let child = Child::new(&order.program, order.is_tty);
    match &namespace {
        Some(namespace) => {
            at(Step::Session, || setns(namespace.as_fd(), CloneFlags::CLONE_NEWPID))?
        }
        None => at(Step::Session, || unshare(CloneFlags::CLONE_NEWPID))?,
    }
    drop(namespace);
    if order.mounts.is_none() {
        child.prepare()?;
        // It is another user's now.
        hide();
    }
    // Only init holds the other end of `go`, so that nobody else lets this process go on.
    let steps = Steps { report, go: go.as_raw_fd() };
    steps.say_ready();
    steps.wait()?;
    if made.fork().map_err(|errno| (Step::Session, errno))? {
        // SAFETY: _exit takes a number. Needed because std's exit would run handlers.
        unsafe { libc::_exit(0) }
    }
    steps.wait()?;
    match &order.mounts {
        Some(mounts) => child.become_first(steps, mounts),
        None => child.become_prepared(),
    }
}

/// What init wants; the descriptor is closed.
fn read_order(pipe: OwnedFd) -> ChildResult<Order> {
    let mut bytes = Vec::new();
    at(Step::Session, || File::from(pipe).read_to_end(&mut bytes).map_err(|_| Errno::EIO))?;
    order::read(&bytes).ok_or((Step::Session, Errno::EBADMSG))
}

fn hide() {
    // SAFETY: prctl takes numbers. Needed for lack of a wrapper.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
}

/// Where init reads the pid of the process that this one makes: memory that the process itself
/// does not have.
struct PidOfMade(*mut libc::pid_t);

impl PidOfMade {
    /// At `place` of the page.
    fn share(shared: BorrowedFd<'_>, place: usize) -> nix::Result<Self> {
        if place > PAGE_BYTES - size_of::<libc::pid_t>() {
            return Err(Errno::EINVAL);
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let (null, shared) = (std::ptr::null_mut(), shared.as_raw_fd());
        // SAFETY: a new mapping of a file of that length, in which a pid at `place` ends; it is
        // never unmapped, and a child does not inherit it. Needed because no safe wrapper maps.
        unsafe {
            let page = libc::mmap(null, PAGE_BYTES, access, libc::MAP_SHARED, shared, 0);
            if page == libc::MAP_FAILED {
                return Err(Errno::last());
            }
            Errno::result(libc::madvise(page, PAGE_BYTES, libc::MADV_DONTFORK))?;
            Ok(Self(page.byte_add(place).cast()))
        }
    }

    /// Makes a child of this process's parent; whether this is still the one that made it.
    fn fork(&mut self) -> nix::Result<bool> {
        let flags = libc::CLONE_PARENT | libc::CLONE_PARENT_SETTID | libc::SIGCHLD;
        let none = std::ptr::null::<libc::c_void>();
        // SAFETY: without a stack of its own the child goes on as fork's does, in a process of one
        // thread; the kernel writes its pid to a mapping that lives for good. Needed because
        // no wrapper makes a child of the parent's.
        let pid = unsafe { libc::syscall(libc::SYS_clone, flags, none, self.0, none, none) };
        Errno::result(pid).map(|pid| pid != 0)
    }
}
