//! This program as a helper: what init executes to make the process of another program.

use std::convert::Infallible;
use std::ffi::CStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};

use super::child::{self, Child, ChildResult, at};
use super::order::{self, Order};
use super::{ORDER_AT, READY, Step};

/// The first argument of a helper.
pub(super) const VERB: &CStr = c"start";
const PAGE_BYTES: usize = 4096;

/// Is a helper if `arguments` say so; returns if they do not.
pub fn run(arguments: &[String]) {
    let [_, verb, numbers @ ..] = arguments else { return };
    let numbers: Option<Vec<RawFd>> = numbers.iter().map(|number| number.parse().ok()).collect();
    let Some(&[order, report, go, namespace]) = numbers.as_deref() else { return };
    if verb.as_bytes() != VERB.to_bytes() {
        return;
    }
    let owned = |number: RawFd| {
        // SAFETY: init has opened it for this process, which knows it by this number alone.
        // Needed because it comes as a number.
        (number > 2).then(|| unsafe { OwnedFd::from_raw_fd(number) })
    };
    let (Some(order), Some(go)) = (owned(order), owned(go)) else { return };
    let Err(failed) = help(order, report, File::from(go), owned(namespace));
    child::fail(report, failed)
}

fn help(
    shared: OwnedFd,
    report: RawFd,
    go: File,
    namespace: Option<OwnedFd>,
) -> ChildResult<Infallible> {
    // Nobody but who may trace anything has a look at it; execve(2) takes that back.
    hide();
    child::close_on_exec()?;
    let mut made = PidOfMade::share(shared.as_fd()).map_err(|errno| (Step::Session, errno))?;
    let order = read_order(shared)?;
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
    say(report, &[READY]);
    // Init is gone, or wants it no more.
    at(Step::Session, || (&go).read_exact(&mut [0]).map_err(|_| Errno::ECANCELED))?;
    if made.fork().map_err(|errno| (Step::Session, errno))? {
        // SAFETY: _exit takes a number. Needed because std's exit would run handlers.
        unsafe { libc::_exit(0) }
    }
    // Only init holds the other end, so that nobody else lets this process go on.
    while matches!((&go).read(&mut [0]), Ok(1..)) {}
    drop(go);
    match &order.mounts {
        Some(mounts) => child.become_first(mounts),
        None => child.become_prepared(),
    }
}

/// What init wants; the descriptor is closed.
fn read_order(shared: OwnedFd) -> ChildResult<Order> {
    let mut bytes = Vec::new();
    at(Step::Session, || File::from(shared).read_to_end(&mut bytes).map_err(|_| Errno::EIO))?;
    let order = bytes.get(ORDER_AT..).and_then(order::read);
    order.ok_or((Step::Session, Errno::EBADMSG))
}

fn hide() {
    // SAFETY: prctl takes numbers. Needed for lack of a wrapper.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
}

fn say(report: RawFd, bytes: &[u8]) {
    // SAFETY: write reads a live slice. Needed because the descriptor stays open for others.
    unsafe { libc::write(report, bytes.as_ptr().cast(), bytes.len()) };
}

/// Where init reads the pid of the process that this one makes: memory that the process itself
/// does not have.
struct PidOfMade(*mut libc::pid_t);

impl PidOfMade {
    fn share(shared: BorrowedFd<'_>) -> nix::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let (null, shared) = (std::ptr::null_mut(), shared.as_raw_fd());
        // SAFETY: a new mapping of a file that is longer than a pid; it is never unmapped, and a
        // child does not inherit it. Needed because no safe wrapper maps.
        unsafe {
            let page = libc::mmap(null, PAGE_BYTES, access, libc::MAP_SHARED, shared, 0);
            if page == libc::MAP_FAILED {
                return Err(Errno::last());
            }
            Errno::result(libc::madvise(page, PAGE_BYTES, libc::MADV_DONTFORK))?;
            Ok(Self(page.cast()))
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
