//! Call arenas: a call's store, instance and future lie side by side in one.
//!
//! ```text
//! free --take--> in scope: what the thread allocates lies in the arena --drop--> free again,
//!                once the last piece in it is freed, by whichever thread
//! ```
//! The engine makes a store of a dozen pieces of the heap, 4 KB together, most of which stay
//! empty. In an arena they are a page or two that nothing else shares, so that a call that is
//! hibernated can have them packed like its stack ([`crate::memory::hibernation`]). Here is the
//! allocator for that: the system's, except for a thread in the scope of an arena, and for pieces
//! that lie in arenas. An executable that serves calls sets it ([`Allocator`]); in one that does
//! not, arenas stay empty and stores are not packed.
//!
//! What it rests on:
//! - An arena is another's only when all that was allocated in it is freed: each piece counts. So
//!   only packing depends on which call owns the pieces of an arena.
//! - What is packed must be reached through the call alone. An arena's [`Fingerprint`] is of every
//!   piece that was allocated in it, in order. Making the same isolate once more, and dropping it,
//!   shows whether all of these are the isolate's own: then the arena is empty again
//!   (`sched/start.rs` does that once a module). A call is packed whole only if its arena has the
//!   fingerprint of that trial. If the engine or the library of the language allocates something
//!   once, or for longer than the call, the fingerprint is another.

#![allow(unsafe_code)]

use crate::memory::compact_pool::{PAGE_BYTES, page_bytes};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// An arena's addresses, in bytes. What does not fit lies in the heap.
const ARENA_BYTES: usize = 4 * PAGE_BYTES;
/// Rooms of a process. Only what is touched of them is memory.
const ARENAS: usize = 1 << 20;
/// The count of an arena is this much too high while a scope fills it, so that it is not free
/// before they are known.
const IN_SCOPE: u32 = 1 << 30;
/// The index of no arena.
const NONE: u32 = u32::MAX;

/// The allocator of processes in which calls are hibernated. It is for the executable to set:
///
/// ```no_run
/// #[global_allocator]
/// static ALLOCATOR: exocell_exovisor::Allocator = exocell_exovisor::Allocator;
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct Allocator;

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Bytes of all arenas, once there are any, and where they begin.
static BYTES: AtomicUsize = AtomicUsize::new(0);
static BASE: AtomicUsize = AtomicUsize::new(0);
/// `None` if the host has not so much address space, or other pages.
static RECORDS: OnceLock<Option<&'static [Record]>> = OnceLock::new();
static FREE: Mutex<Free> = Mutex::new(Free { unused: 0, first: NONE });

/// What is known of an arena.
struct Record {
    /// Pieces that lie in it, and its owner.
    count: AtomicU32,
    /// The next free one.
    next: AtomicU32,
}

struct Free {
    /// From this one on none was ever used.
    unused: u32,
    /// The one that was freed last.
    first: u32,
}

thread_local! {
    static CURRENT: Current = const { Current::new() };
    /// The arena that this thread had last, if it keeps one.
    static KEPT: Cell<Kept> = const { Cell::new(Kept::No) };
}

#[derive(Clone, Copy)]
enum Kept {
    /// The thread keeps none.
    No,
    Empty,
    Arena(u32),
}

/// The arena in whose scope a thread is.
struct Current {
    /// Where the next piece lies; 0 while there is no arena.
    next: Cell<usize>,
    start: Cell<usize>,
    pieces: Cell<u32>,
    fingerprint: Cell<u64>,
}

/// Sizes and order of all pieces that were allocated and freed in the scope of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(u64);

/// One arena. When it is dropped, others may have it as soon as nothing lies in it any more.
pub(crate) struct CallArena {
    index: u32,
    used_bytes: u32,
}

impl CallArena {
    /// An arena that nobody has; `None` if there is none.
    pub fn take() -> Option<Self> {
        let records = (*RECORDS.get_or_init(reserve))?;
        let index = match KEPT.get() {
            Kept::Arena(index) => {
                KEPT.set(Kept::Empty);
                index
            }
            _ => take_free(records)?,
        };
        records.get(index as usize)?.count.store(1, Ordering::Relaxed);
        Some(Self { index, used_bytes: 0 })
    }

    /// Does `work`. What this thread allocates meanwhile lies in the arena, as far as it fits. An
    /// arena has one scope, and scopes are not nested.
    pub fn scope<T>(&mut self, work: impl FnOnce() -> T) -> (T, Fingerprint) {
        self.count().fetch_add(IN_SCOPE, Ordering::Relaxed);
        let scope = Scope::begin(self);
        let made = work();
        let fingerprint = CURRENT.with(|current| Fingerprint(current.fingerprint.get()));
        drop(scope);
        (made, fingerprint)
    }

    /// Whether nothing lies in it.
    pub fn is_empty(&self) -> bool {
        self.count().load(Ordering::Acquire) == 1
    }

    /// The part of it that is in use, in whole words.
    pub fn used(&self) -> Range<usize> {
        let start = start_of(self.index);
        start..start + (self.used_bytes as usize).next_multiple_of(size_of::<u64>())
    }

    fn count(&self) -> &'static AtomicU32 {
        &record(self.index).count
    }
}

impl Drop for CallArena {
    fn drop(&mut self) {
        release(self.index, 1);
    }
}

/// As long as this lives, what the thread allocates lies in the arena.
struct Scope<'a>(&'a mut CallArena);

impl<'a> Scope<'a> {
    fn begin(arena: &'a mut CallArena) -> Self {
        let start = start_of(arena.index);
        CURRENT.with(|current| {
            current.pieces.set(0);
            current.fingerprint.set(0);
            current.start.set(start);
            current.next.set(start);
        });
        Self(arena)
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        CURRENT.with(|current| {
            let end = current.next.replace(0);
            self.0.used_bytes = (end - current.start.get()) as u32;
            release(self.0.index, IN_SCOPE - current.pieces.get());
        });
    }
}

/// The calling thread keeps the arena that it had last for its next call, as long as this lives:
/// it is in its cache.
pub(crate) struct ThreadCache;

impl ThreadCache {
    pub fn begin() -> Self {
        KEPT.set(Kept::Empty);
        Self
    }
}

impl Drop for ThreadCache {
    fn drop(&mut self) {
        if let Kept::Arena(index) = KEPT.replace(Kept::No) {
            free(index);
        }
    }
}

/// Address space for all arenas and their records.
fn reserve() -> Option<&'static [Record]> {
    if page_bytes() != PAGE_BYTES {
        return None;
    }
    let bytes = ARENAS * ARENA_BYTES;
    // SAFETY: a new mapping at an address of the host's choice touches nothing that exists. It is
    // never unmapped.
    let base = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let base =
            libc::mmap(null_mut(), bytes + ARENAS * size_of::<Record>(), access, flags, -1, 0);
        if base == libc::MAP_FAILED {
            return None;
        }
        // A page that is touched must not make two megabytes resident.
        libc::madvise(base, bytes, libc::MADV_NOHUGEPAGE);
        base
    };
    // SAFETY: behind the arenas there is so much, page aligned, and zeros are records.
    let records = unsafe { std::slice::from_raw_parts(base.byte_add(bytes).cast(), ARENAS) };
    BASE.store(base.addr(), Ordering::Relaxed);
    BYTES.store(bytes, Ordering::Release);
    Some(records)
}

fn take_free(records: &[Record]) -> Option<u32> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let index = free.first;
    match records.get(index as usize) {
        Some(record) => {
            free.first = record.next.load(Ordering::Relaxed);
            Some(index)
        }
        None if (free.unused as usize) < ARENAS => {
            free.unused += 1;
            Some(free.unused - 1)
        }
        None => None,
    }
}

/// Subtracts from an arena's count. The arena is free when nothing is left.
fn release(index: u32, count: u32) {
    if record(index).count.fetch_sub(count, Ordering::AcqRel) != count {
        return;
    }
    match KEPT.get() {
        Kept::Empty => KEPT.set(Kept::Arena(index)),
        _ => free(index),
    }
}

fn free(index: u32) {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    record(index).next.store(free.first, Ordering::Relaxed);
    free.first = index;
}

/// Of an arena that was taken once.
fn record(index: u32) -> &'static Record {
    static NOBODYS: Record = Record { count: AtomicU32::new(0), next: AtomicU32::new(NONE) };
    let records = RECORDS.get().copied().flatten();
    records.and_then(|records| records.get(index as usize)).unwrap_or(&NOBODYS)
}

fn start_of(index: u32) -> usize {
    BASE.load(Ordering::Relaxed) + index as usize * ARENA_BYTES
}

/// The arena that an address lies in.
fn arena_at(address: usize) -> Option<u32> {
    let bytes = BYTES.load(Ordering::Acquire);
    let offset = address.wrapping_sub(BASE.load(Ordering::Relaxed));
    (offset < bytes).then_some((offset / ARENA_BYTES) as u32)
}

impl Current {
    const fn new() -> Self {
        let (next, start) = (Cell::new(0), Cell::new(0));
        Self { next, start, pieces: Cell::new(0), fingerprint: Cell::new(0) }
    }

    /// Where a new piece lies; `None` if it is the system's.
    fn place(&self, layout: Layout) -> Option<*mut u8> {
        if self.next.get() == 0 { None } else { self.place_here(layout) }
    }

    fn place_here(&self, layout: Layout) -> Option<*mut u8> {
        self.note(layout.size() << 8 | layout.align());
        let address = self.next.get().next_multiple_of(layout.align());
        let end = address.checked_add(layout.size())?;
        if end > self.start.get() + ARENA_BYTES {
            return None;
        }
        self.next.set(end);
        self.pieces.set(self.pieces.get() + 1);
        Some(address as *mut u8)
    }

    /// Frees a piece of the arena in scope; false if the piece lies elsewhere.
    fn free_here(&self, address: usize, bytes: usize) -> bool {
        if self.next.get() == 0 || !(self.start.get()..self.next.get()).contains(&address) {
            return false;
        }
        self.note(bytes << 8);
        if address + bytes == self.next.get() {
            self.next.set(address);
        }
        self.pieces.set(self.pieces.get() - 1);
        true
    }

    fn note(&self, what: usize) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let fingerprint = (self.fingerprint.get() ^ what as u64).wrapping_mul(ODD);
        self.fingerprint.set(fingerprint.rotate_left(23));
    }
}

// SAFETY: pieces of an arena are aligned, do not overlap, and lie in an arena that is not another's
// before all of them are freed; all others are the system allocator's, before and after, which
// their address tells. Nothing here allocates or unwinds. There is no safe way to say where the
// engine's allocations lie.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        CURRENT
            .with(|current| current.place(layout))
            .unwrap_or_else(|| unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match CURRENT.with(|current| current.place(layout)) {
            Some(piece) => {
                // SAFETY: the piece is as large, and nobody else's.
                unsafe { piece.write_bytes(0, layout.size()) };
                piece
            }
            // SAFETY: as the caller promises.
            None => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        let Some(index) = arena_at(piece.addr()) else {
            // SAFETY: as the caller promises, and it is not in an arena.
            return unsafe { System.dealloc(piece, layout) };
        };
        if !CURRENT.with(|current| current.free_here(piece.addr(), layout.size())) {
            release(index, 1);
        }
    }

    unsafe fn realloc(&self, piece: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if arena_at(piece.addr()).is_none() {
            // SAFETY: as the caller promises, and it is not in an arena.
            return unsafe { System.realloc(piece, layout, bytes) };
        }
        // SAFETY: as the caller promises: `bytes` is not 0, nor too many for the alignment. The
        // new piece is another one, and as much is copied as both have.
        unsafe {
            let new = self.alloc(Layout::from_size_align_unchecked(bytes, layout.align()));
            if !new.is_null() {
                piece.copy_to_nonoverlapping(new, layout.size().min(bytes));
                self.dealloc(piece, layout);
            }
            new
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn is_in<T: ?Sized>(arena: &CallArena, value: &T) -> bool {
        arena_at(std::ptr::from_ref(value).addr()) == Some(arena.index)
    }

    #[repr(align(256))]
    struct Aligned(#[expect(dead_code)] u8);

    #[test]
    fn what_is_made_lies_in_the_arena_until_it_is_freed() {
        let mut arena = CallArena::take().unwrap();
        let make = || (vec![7u8; 101], Box::new(Aligned(1)), vec![0u64; 20]);
        let (made, _) = arena.scope(make);
        let outside = Box::new([1u8; 101]);
        assert!(
            is_in(&arena, &made.0[..]) && is_in(&arena, &*made.1) && is_in(&arena, &made.2[..])
        );
        assert!(!is_in(&arena, &*outside) && (&raw const *made.1).is_aligned());
        assert_eq!((&made.0[..], &made.2[..]), (&[7u8; 101][..], &[0u64; 20][..]));
        assert!(arena.used().contains(&made.2.as_ptr_range().end.addr().wrapping_sub(1)));
        drop(made.0);
        assert!(!arena.is_empty());
        std::thread::spawn(move || drop((made.1, made.2))).join().unwrap();
        assert!(arena.is_empty());
    }

    #[test]
    fn an_arena_is_anothers_when_the_last_in_it_is_freed() {
        let keeping = ThreadCache::begin();
        let mut arena = CallArena::take().unwrap();
        let (piece, _) = arena.scope(|| Box::new(7u64));
        let index = arena.index;
        drop(arena);
        let other = CallArena::take().unwrap();
        assert_ne!(other.index, index);
        drop(piece);
        assert_eq!(CallArena::take().unwrap().index, index);
        drop((other, keeping));
    }

    #[test]
    fn what_grows_later_leaves_the_arena() {
        let mut arena = CallArena::take().unwrap();
        let (mut grows, _) = arena.scope(|| vec![1u8, 2, 3]);
        grows.extend([4; 1000]);
        assert!(!is_in(&arena, &grows[..]) && arena.is_empty());
        assert_eq!((grows.len(), &grows[..4]), (1003, &[1, 2, 3, 4][..]));
    }

    #[test]
    fn what_does_not_fit_lies_in_the_heap() {
        let mut arena = CallArena::take().unwrap();
        let make = || (0u8..9).map(|n| vec![n; ARENA_BYTES / 4]).collect::<Vec<_>>();
        let (made, _) = arena.scope(make);
        assert_eq!(made.iter().filter(|piece| is_in(&arena, &piece[..])).count(), 3);
        assert!((0u8..9).zip(&made).all(|(n, piece)| piece.iter().all(|byte| *byte == n)));
        drop(made);
        assert!(arena.is_empty());
    }

    #[test]
    fn one_piece_more_is_another_trace() {
        let fingerprint = |work: fn()| CallArena::take().unwrap().scope(work).1;
        let usual = fingerprint(|| drop((vec![1u8; 10], vec![2u8; 20])));
        assert_eq!(fingerprint(|| drop((vec![3u8; 10], vec![4u8; 20]))), usual);
        assert_ne!(fingerprint(|| drop((vec![3u8; 10], vec![4u8; 21]))), usual);
        assert_ne!(fingerprint(|| drop((vec![3u8; 10], vec![4u8; 20], Box::new(1)))), usual);
        assert_ne!(fingerprint(|| std::mem::forget((vec![3u8; 10], vec![4u8; 20]))), usual);
    }

    #[test]
    fn who_panics_furnishes_no_more() {
        let mut arena = CallArena::take().unwrap();
        let panics = AssertUnwindSafe(|| arena.scope(|| std::panic::resume_unwind(Box::new(()))));
        let ended: Result<((), Fingerprint), _> = catch_unwind(panics);
        drop(ended);
        let outside = Box::new(7u64);
        assert!(!is_in(&arena, &*outside) && arena.is_empty());
    }
}
