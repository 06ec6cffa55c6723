//! Stacks and memories of many isolates, side by side in one mapping each.
//!
//! What has a mapping of its own counts against what the host permits a process (sysctl
//! vm.max_map_count, 65,530 by default), and a stack has two, its guard and itself. Here all
//! stacks are one mapping and all memories another, however many there are: guards are markers in
//! the page tables where the host has them (MADV_GUARD_INSTALL, Linux 6.13), else mappings.

#![allow(unsafe_code)]

mod memories;
mod stacks;

pub(crate) use memories::Memories;
pub(crate) use stacks::Stacks;

use std::io;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// Slots of one size, in address space that is reserved once. Only what is touched is memory.
pub(super) struct CompactPool {
    base: usize,
    slot_bytes: usize,
    slots: usize,
    free: Mutex<Free>,
}

/// Which slots nobody has. The one that was given back last is the next: it is in the cache.
#[derive(Default)]
struct Free {
    /// From this one on none was ever used.
    unused: usize,
    freed: Vec<u32>,
}

impl CompactPool {
    /// Reserves address space; `slot_bytes` must be a multiple of the host's page.
    ///
    /// # Errors
    /// The host's, where it has not so much address space (vm.overcommit_memory, RLIMIT_AS).
    fn new(slots: usize, slot_bytes: usize) -> io::Result<Arc<Self>> {
        let too_much = || io::Error::new(io::ErrorKind::InvalidInput, "more slots than addresses");
        let bytes = slots.max(1).checked_mul(slot_bytes).ok_or_else(too_much)?;
        u32::try_from(slots).map_err(|_| too_much())?;
        // SAFETY: a new mapping at an address of the host's choice touches nothing that exists.
        // Nothing safe reserves memory that is not counted before it is touched.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let pool = Self { base: base.addr(), slot_bytes, slots, free: Mutex::default() };
        // A page that is touched must not make two megabytes resident. Hosts without huge pages
        // refuse, and need not be told.
        let _ = advise(pool.base, bytes, libc::MADV_NOHUGEPAGE);
        Ok(Arc::new(pool))
    }

    /// The slot that an address lies in.
    fn slot_at(&self, address: usize) -> Option<Range<usize>> {
        let index = address.checked_sub(self.base)? / self.slot_bytes;
        let start = self.base + index * self.slot_bytes;
        (index < self.slots).then_some(start..start + self.slot_bytes)
    }

    /// A slot, and whether nobody had it before; `None` if all are taken.
    fn take(self: &Arc<Self>) -> Option<(Slot, bool)> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = |index| Slot { pool: Arc::clone(self), index };
        if let Some(index) = free.freed.pop() {
            return Some((slot(index), false));
        }
        if free.unused == self.slots {
            return None;
        }
        free.unused += 1;
        let index = u32::try_from(free.unused - 1).ok()?;
        Some((slot(index), true))
    }
}

impl Drop for CompactPool {
    fn drop(&mut self) {
        // SAFETY: the mapping is the pool's, and every slot keeps the pool.
        unsafe {
            libc::munmap(self.base as *mut libc::c_void, self.slots.max(1) * self.slot_bytes)
        };
    }
}

/// One slot; dropping it gives it back as it is.
struct Slot {
    pool: Arc<CompactPool>,
    index: u32,
}

impl Slot {
    fn start(&self) -> usize {
        self.pool.base + self.index as usize * self.pool.slot_bytes
    }

    fn bytes(&self) -> usize {
        self.pool.slot_bytes
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.freed.push(self.index);
    }
}

/// The host's pages that slots consist of, as far as calls are hibernated.
pub(crate) const PAGE_BYTES: usize = 4096;

/// The calling process, where a descriptor of a process is wanted (PIDFD_SELF, Linux 6.14).
const PIDFD_SELF: libc::c_long = -10_000;

/// Gives ranges of whole pages back to the host; they are zero afterwards, or as they were if the
/// host refuses. Hosts from Linux 6.16 on take them all at once.
///
/// # Safety
/// They are the caller's, in slots, and no value of Rust lies there that is still used.
pub(crate) unsafe fn decommit(pages: &[Range<usize>]) {
    /// As many as the host takes (UIO_MAXIOV).
    const AT_ONCE: usize = 1024;
    for pages in pages.chunks(AT_ONCE) {
        let vector = |range: &Range<usize>| libc::iovec {
            iov_base: range.start as *mut libc::c_void,
            iov_len: range.len(),
        };
        let vectors: Vec<libc::iovec> = pages.iter().map(vector).collect();
        let bytes: usize = pages.iter().map(ExactSizeIterator::len).sum();
        // SAFETY: the host reads the vectors; the pages are the caller's to give.
        let given = unsafe {
            let (first, count) = (vectors.as_ptr(), vectors.len());
            let call = libc::SYS_process_madvise;
            libc::syscall(call, PIDFD_SELF, first, count, libc::MADV_DONTNEED, 0)
        };
        if usize::try_from(given) != Ok(bytes) {
            for range in pages {
                let _ = advise(range.start, range.len(), libc::MADV_DONTNEED);
            }
        }
    }
}

/// The pages of the first `bytes_max` bytes of a slot's `range` that are in memory at this moment.
pub(crate) fn resident(
    range: &Range<usize>,
    bytes_max: usize,
) -> impl Iterator<Item = Range<usize>> + use<> {
    const AT_ONCE: usize = 64;
    let (start, end) = (range.start, range.start + range.len().min(bytes_max));
    let end = if page_bytes() == PAGE_BYTES { end } else { start };
    (start..end).step_by(AT_ONCE * PAGE_BYTES).flat_map(move |first| {
        let bytes = (end - first).min(AT_ONCE * PAGE_BYTES);
        let mut pages = [0u8; AT_ONCE];
        // SAFETY: it writes a byte for each page of the range, which are not more than these.
        let told = unsafe { libc::mincore(first as *mut _, bytes, pages.as_mut_ptr()) };
        let found = move |(index, page): (usize, u8)| {
            let start = first + index * PAGE_BYTES;
            (told == 0 && page & 1 != 0).then_some(start..start + PAGE_BYTES)
        };
        pages.into_iter().take(bytes / PAGE_BYTES).enumerate().filter_map(found)
    })
}

/// madvise(2) of pages that are a pool's.
fn advise(start: usize, bytes: usize, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: callers name pages of their own slot or pool, in which no value of Rust lies.
    match unsafe { libc::madvise(start as *mut libc::c_void, bytes, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The host's page size, in bytes.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: it reads a constant.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_apart_and_counted() {
        let pool = CompactPool::new(3, 4096).unwrap();
        let slots: Vec<_> = (0..3).map(|_| pool.take().unwrap()).collect();
        assert!(slots.iter().all(|(_, new)| *new));
        let mut starts: Vec<_> = slots.iter().map(|(slot, _)| slot.start()).collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 4096));
        assert!(pool.take().is_none());
        let (last, _) = slots.into_iter().next_back().unwrap();
        let start = last.start();
        drop(last);
        let (again, new) = pool.take().unwrap();
        assert!(!new && again.start() == start);
    }

    #[test]
    fn an_address_is_in_the_slot_that_it_lies_in() {
        let pool = CompactPool::new(3, 8192).unwrap();
        for (address, slot) in
            [(0, Some(0)), (8191, Some(0)), (8192, Some(1)), (3 * 8192 - 1, Some(2))]
        {
            let slot = slot.map(|index| pool.base + index * 8192);
            assert_eq!(pool.slot_at(pool.base + address).map(|slot| slot.start), slot);
        }
        assert!(pool.slot_at(pool.base - 1).is_none());
        assert!(pool.slot_at(pool.base + 3 * 8192).is_none());
    }

    #[test]
    fn pages_that_are_given_back_are_zero_and_not_resident() {
        let (slot, _) = CompactPool::new(1, 100 * PAGE_BYTES).unwrap().take().unwrap();
        let page = |index: usize| slot.start() + index * PAGE_BYTES;
        // SAFETY: the slot is this test's, and the pages are in it.
        let byte = |index: usize| unsafe { &mut *(page(index) as *mut u8) };
        let touched = [0, 1, 63, 64, 99];
        touched.iter().for_each(|index| *byte(*index) = 7);
        let all = slot.start()..slot.start() + slot.bytes();
        let resident = |bytes_max| -> Vec<usize> {
            let pages = resident(&all, bytes_max);
            pages.map(|found| (found.start - page(0)) / PAGE_BYTES).collect()
        };
        assert_eq!(resident(usize::MAX), touched);
        assert_eq!(resident(64 * PAGE_BYTES), [0, 1, 63]);
        // SAFETY: as above; nothing is used there but the bytes that are looked at below.
        unsafe { decommit(&[page(0)..page(1), page(60)..page(65)]) };
        assert_eq!(resident(usize::MAX), [1, 99]);
        let left = touched.map(|index| *byte(index));
        assert_eq!(left, [0, 7, 0, 0, 7]);
    }

    #[test]
    fn a_slot_keeps_its_pool() {
        let (slot, _) = CompactPool::new(1, 4096).unwrap().take().unwrap();
        // SAFETY: the slot is this test's, and as large as its pool says.
        unsafe { (slot.start() as *mut u8).add(slot.bytes() - 1).write(1) };
    }

    #[test]
    fn more_than_there_are_addresses_is_refused() {
        assert!(CompactPool::new(usize::MAX, 4096).is_err());
        assert!(CompactPool::new(1 << 31, 1 << 40).is_err());
    }
}
