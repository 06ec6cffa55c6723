//! The Pager's protocol over a ring in shared memory with a doorbell, for a guest
//! kernel that cannot call the host's (`include/pager_ring.h`, which both sides share).
//!
//! ```text
//! guest kernel ── entries, put ──> [ ring ] ── Ask, Give, Bind, Unbind ──> Backing, Credit
//!              ── doorbell ──────> [ host ]
//!              <── answers, done ─ [      ]
//! ```
//! All that the guest writes is an allegation that may change at any time. The host
//! keeps its own count of what it has taken, reads each word once, and checks that. It
//! reads nothing back that it has written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileMemoryError};

use crate::{Backing, BudgetError};

/// Requests that may wait.
pub const ENTRIES: u32 = 256;
/// The longest range of one request, in pages.
pub const PAGES_MAX: u64 = 32_768;
/// Bytes of the ring, with its two counts.
pub const RING_BYTES: usize = ENTRIES_AT + ENTRIES as usize * ENTRY_BYTES;

const PUT_AT: usize = 0;
const DONE_AT: usize = 64;
const ENTRIES_AT: usize = 128;
const ENTRY_BYTES: usize = 32;
const ANSWER_AT: usize = 24;

const ASK: u64 = 1;
const GIVE: u64 = 2;
const BIND: u64 = 4;
const UNBIND: u64 = 5;

/// Pages that are bound and unbound before others get their turn.
const TURN_PAGES_MAX: u64 = 65_536;

/// Why a ring is not served any more.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The guest's fault.
    #[error("its kernel broke the Pager's protocol: {0}")]
    Broken(&'static str),
    #[error(transparent)]
    Budget(#[from] BudgetError),
    #[error("cannot use the Pager's ring: {0}")]
    Host(#[from] io::Error),
}

impl From<Errno> for RingError {
    fn from(errno: Errno) -> Self {
        Self::Host(errno.into())
    }
}

impl From<VolatileMemoryError> for RingError {
    fn from(error: VolatileMemoryError) -> Self {
        Self::Host(io::Error::other(error))
    }
}

/// What a guest kernel says, once it was checked. Ranges are of pages in its memory file.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Ask(u64),
    Give(u64),
    Bind(Range<u64>),
    Unbind(Range<u64>),
}

impl Request {
    /// Of an entry's words, for a guest with so many pages.
    fn parse([kind, first, pages]: [u64; 3], all: u64) -> Result<Self, RingError> {
        let range = || match first.checked_add(pages) {
            Some(end) if end <= all && (1..=PAGES_MAX).contains(&pages) => Ok(first..end),
            _ => Err(RingError::Broken("a range that is empty, too long or not in its memory")),
        };
        match (kind, first) {
            (ASK, 0) => Ok(Self::Ask(pages)),
            (GIVE, 0) => Ok(Self::Give(pages)),
            (BIND, _) => range().map(Self::Bind),
            (UNBIND, _) => range().map(Self::Unbind),
            _ => Err(RingError::Broken("an unknown request")),
        }
    }

    /// Does it; the answer, and how many pages were looked at.
    fn serve(self, backing: &mut Backing) -> Result<(u64, u64), BudgetError> {
        let pages = |range: &Range<u64>| range.end - range.start;
        let all = |done: bool, pages: u64| if done { pages } else { 0 };
        match self {
            Self::Ask(pages) => Ok((backing.ask(pages)?, 0)),
            Self::Give(pages) => backing.give(pages).map(|()| (0, 0)),
            Self::Bind(range) => {
                let pages = pages(&range);
                Ok((all(backing.bind(range)?, pages), pages))
            }
            Self::Unbind(range) => {
                let pages = pages(&range);
                Ok((all(backing.unbind(range)?, pages), pages))
            }
        }
    }
}

/// The host's end.
#[derive(Debug)]
pub struct Ring {
    file: File,
    mapped: MmapRegion,
    doorbell: EventFd,
    /// Requests taken; the low bits say which entry is next.
    taken: u32,
}

impl Ring {
    /// An empty ring. Its memory is there for good, so no access to it faults.
    ///
    /// # Errors
    /// The host's.
    pub fn new() -> Result<Self, RingError> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create("exocell-pager-ring", flags)?);
        fallocate(&file, FallocateFlags::empty(), 0, RING_BYTES as i64)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        let whole = FileOffset::new(file.try_clone()?, 0);
        let mapped = MmapRegion::from_file(whole, RING_BYTES).map_err(io::Error::other)?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let doorbell = EventFd::from_value_and_flags(0, flags)?;
        Ok(Self { file, mapped, doorbell, taken: 0 })
    }

    /// The memory that the guest maps. Who may do more with it than that could take its
    /// pages away: for the platform, never for a guest.
    pub fn memory(&self) -> &File {
        &self.file
    }

    /// An eventfd(2); the platform rings it for the guest (KVM: KVM_IOEVENTFD).
    pub fn doorbell(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    /// Whether it is rung within `limit`.
    ///
    /// # Errors
    /// The host's.
    pub fn await_ring(&self, limit: Duration) -> Result<bool, RingError> {
        let mut waited = [PollFd::new(self.doorbell.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        match poll(&mut waited, limit) {
            Ok(0) | Err(Errno::EINTR) => return Ok(false),
            Ok(_) => {}
            Err(errno) => return Err(errno.into()),
        }
        match self.doorbell.read() {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Serves what waits, for one turn; whether there is more.
    ///
    /// # Errors
    /// The guest broke the protocol, and has to end; the budget's; the host's.
    pub fn serve(&mut self, backing: &mut Backing) -> Result<bool, RingError> {
        let ring = self.mapped.as_volatile_slice();
        let put: u32 = ring.load(PUT_AT, Ordering::Acquire)?;
        let mut waiting = put.wrapping_sub(self.taken);
        if waiting > ENTRIES {
            return Err(RingError::Broken("more requests than entries"));
        }
        let mut left = TURN_PAGES_MAX;
        while waiting > 0 && left > 0 {
            let entry = ENTRIES_AT + (self.taken % ENTRIES) as usize * ENTRY_BYTES;
            let word = |index: usize| ring.load::<u64>(entry + index * 8, Ordering::Relaxed);
            let words = [word(0)?, word(1)?, word(2)?];
            let (answer, pages) = Request::parse(words, backing.pages())?.serve(backing)?;
            self.taken = self.taken.wrapping_add(1);
            ring.store(answer, entry + ANSWER_AT, Ordering::Relaxed)?;
            ring.store(self.taken, DONE_AT, Ordering::Release)?;
            waiting -= 1;
            left = left.saturating_sub(pages);
        }
        Ok(waiting > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = include_str!("../include/pager_ring.h");

    #[test]
    fn requests_are_read_and_anything_else_refused() {
        let parse = |words| Request::parse(words, 1 << 20).ok();
        assert_eq!(parse([ASK, 0, u64::MAX]), Some(Request::Ask(u64::MAX)));
        assert_eq!(parse([GIVE, 0, 0]), Some(Request::Give(0)));
        assert_eq!(parse([BIND, 5, 7]), Some(Request::Bind(5..12)));
        let last = (1 << 20) - PAGES_MAX;
        assert_eq!(parse([UNBIND, last, PAGES_MAX]), Some(Request::Unbind(last..1 << 20)));
        for wrong in [
            [0, 0, 0],
            [3, 0, 1],
            [ASK, 1, 1],
            [ASK | 1 << 32, 0, 1],
            [BIND, 0, 0],
            [BIND, 0, PAGES_MAX + 1],
            [BIND, (1 << 20) - 1, 2],
            [UNBIND, u64::MAX, 2],
            [UNBIND, 1 << 20, 1],
        ] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn the_guest_kernels_header_says_the_same() {
        for (name, value) in [
            ("ENTRIES", u64::from(ENTRIES)),
            ("PAGES_MAX", PAGES_MAX),
            ("ASK", ASK),
            ("GIVE", GIVE),
            ("BIND", BIND),
            ("UNBIND", UNBIND),
        ] {
            let line = HEADER.lines().find_map(|line| {
                let mut words = line.strip_prefix("#define PAGER_RING_")?.split_whitespace();
                (words.next() == Some(name)).then(|| words.next())?
            });
            assert_eq!(line, Some(value.to_string().as_str()), "{name}");
        }
    }
}
