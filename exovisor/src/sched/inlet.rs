//! Where calls come in: a descriptor at which workers that have nothing to do wait by themselves.
//!
//! ```text
//!               ┌── worker 0 waits ── takes what came, runs the first of it itself
//!  descriptor ──┼── worker 1, if that one does not wait
//!               └── the thread in `attend`, if no worker waits
//! ```
//! So a call that comes alone wakes one thread, and that is the one that runs it. Each has an epoll
//! instance of its own, and of those that wait exclusively the host wakes the one that was there
//! first (epoll_ctl(2), `EPOLLEXCLUSIVE`).

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::BorrowedFd;

/// Takes what came at the descriptor and submits it; it does not wait. Several threads may call it
/// at once, and then what one of them sees may be gone for another.
pub type Take = Box<dyn Fn() + Send + Sync>;

const CAME: u64 = 0;
const TOLD: u64 = 1;

pub(super) struct Inlet {
    pub take: Take,
    points: Box<[WaitPoint]>,
    /// For the thread in [`crate::Scheduler::attend`].
    last: Epoll,
}

/// Where a worker waits.
struct WaitPoint {
    waits: Epoll,
    /// Wakes it for something else than what comes.
    told: EventFd,
}

impl Inlet {
    /// For so many workers.
    pub fn new(from: BorrowedFd<'_>, workers: usize, take: Take) -> io::Result<Self> {
        let exclusive = || {
            let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
            let waits = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
            waits.add(from, EpollEvent::new(flags, CAME))?;
            io::Result::Ok(waits)
        };
        let point = |_| {
            let waits = exclusive()?;
            let told = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
            waits.add(&told, EpollEvent::new(EpollFlags::EPOLLIN, TOLD))?;
            Ok(WaitPoint { waits, told })
        };
        let points = (0..workers).map(point).collect::<io::Result<_>>()?;
        Ok(Self { take, points, last: exclusive()? })
    }

    /// Waits as this worker until something comes, which it tells, or until [`Inlet::tell`].
    pub fn wait(&self, worker: usize) -> bool {
        let Some(WaitPoint { waits, told }) = self.points.get(worker) else { return false };
        let mut events = [EpollEvent::empty(); 2];
        let count = wait(waits, &mut events);
        let mut has_come = false;
        for event in events.iter().take(count) {
            match event.data() {
                CAME => has_come = true,
                // Told once or twice is the same.
                _ => drop(told.read()),
            }
        }
        has_come
    }

    /// Wakes a worker that waits, or is about to.
    pub fn tell(&self, worker: usize) {
        if let Some(point) = self.points.get(worker) {
            // One that was told so often already wakes.
            let _ = point.told.write(1);
        }
    }

    /// Waits until something comes while no worker waits.
    pub fn wait_last(&self) {
        wait(&self.last, &mut [EpollEvent::empty()]);
    }
}

/// How many of `events` there are. Signals end the wait, too.
fn wait(at: &Epoll, events: &mut [EpollEvent]) -> usize {
    match at.wait(events, EpollTimeout::NONE) {
        Ok(count) => count,
        Err(error) => {
            debug_assert_eq!(error, Errno::EINTR);
            0
        }
    }
}
