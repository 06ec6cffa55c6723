//! Calls that wait long for their next time slice, made small.
//!
//! ```text
//! resident --its time slice is over, and many wait--> hibernated --its next time slice, or its end--> resident
//! ```
//! A preempted call has a stack, an arena with its store ([`crate::memory::call_arena`]), and pages
//! of a memory, and most of their words are zero or addresses near others. While it is hibernated,
//! these are packed ([`pack`]) and the pages are the host's again; they come back to the same
//! addresses. It takes time, so it is done only where more calls wait than
//! [`crate::SchedulerConfig::resident_max`], and only in compact slots.
//!
//! What it rests on:
//! - A call is hibernated only where it was preempted. Its fiber stands in the yield function,
//!   and as long as that function's future lives, the fiber does not run, its stack is not
//!   another's, and the store with the memory is the call's alone. A call that waits in a
//!   hostcall stays as it is: it may have told others where its own state lies.
//! - The signal handler, which looks at the store of the call whose time slice it is, sees it
//!   resident.
//! - Below the stack pointer nothing is in use. The engine's fibers keep it 16 bytes below their
//!   top while they do not run (`unix.rs` of wasmtime-internal-fiber 48).
//! - Memories in compact slots do not move, and are private mappings.

#![allow(unsafe_code)]

mod pack;

use crate::memory::call_arena::CallArena;
use crate::memory::compact_pool::{self, PAGE_BYTES};
use pack::{pack, take, unpack};
use std::cell::Cell;
use std::ops::Range;
use std::pin::Pin;
use std::slice;
use std::task::{Context, Poll};

/// A stack that is used more deeply stays as it is, in bytes.
const STACK_MAX: usize = 16 << 10;
/// Of a memory no more than this is looked at, in bytes from its beginning.
const MEMORY_MAX: usize = 1 << 20;
/// A page that takes more bytes than this stays as it is.
const PAGE_MAX: usize = PAGE_BYTES * 3 / 4;
/// How far from an address that the yield function used the stack pointer may be, in bytes.
const HOOK_MAX: usize = 4 << 10;
const WORD: usize = size_of::<u64>();

/// What a call holds that has just been preempted.
struct Held {
    stack: Range<usize>,
    /// An address that was in use on it.
    used: usize,
    memory: Range<usize>,
}

thread_local! {
    /// What the call holds that this thread polls, if it leaves because it is preempted.
    static HELD: Cell<Option<Held>> = const { Cell::new(None) };
}

/// The yield function leaves, on the fiber whose stack this is.
pub(crate) fn leaves(stack_at: impl FnOnce(usize) -> Option<Range<usize>>, memory: Range<usize>) {
    let mark = 0u8;
    let used = (&raw const mark).addr();
    HELD.set(stack_at(used).map(|stack| Held { stack, used, memory }));
}

/// A yield function's future is gone.
pub(crate) fn returns() {
    HELD.set(None);
}

/// The call itself: it runs when it is polled.
pub(crate) type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A call in the course of its time slices.
pub(crate) struct Fiber<T> {
    /// Before the work: it comes back before the work ends, which may run the fiber.
    hibernated: Option<Hibernated>,
    /// If its last poll ended because it was preempted.
    held: Option<Held>,
    work: Work<T>,
    /// Where the work lies, if it has an arena.
    arena: Option<CallArena>,
    /// Whether all that lies there is reached through the work alone.
    arena_packs: bool,
}

impl<T> Fiber<T> {
    pub fn new(work: Work<T>) -> Self {
        Self { hibernated: None, held: None, work, arena: None, arena_packs: false }
    }

    /// With a call that lies in an arena. It is packed, too, if it is `usual`: of the fingerprint
    /// that was found to be the call's alone.
    pub fn in_arena(work: Work<T>, arena: CallArena, usual: bool) -> Self {
        Self { arena: Some(arena), arena_packs: usual, ..Self::new(work) }
    }

    /// What the arena holds.
    #[cfg(test)]
    pub fn arena(&self) -> Option<Range<usize>> {
        self.arena.as_ref().map(CallArena::used)
    }

    /// Puts all back. It is to be done before the call's next time slice begins: the signal handler
    /// looks at the store and the stack of whose time slice it is.
    pub fn make_resident(&mut self) {
        self.hibernated = None;
    }

    /// Goes on with the call, which is resident.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<T> {
        self.make_resident();
        self.held = None;
        HELD.set(None);
        let poll = self.work.as_mut().poll(context);
        self.held = HELD.take();
        poll
    }
}

/// Hibernates those of the calls whose last poll ended because they were preempted. To take
/// pages away, all processors that run isolates are told of it, which costs some 20 us where the
/// host is virtual itself; so several calls rest together.
pub(crate) fn hibernate<'a, T: 'a>(fibers: impl Iterator<Item = &'a mut Fiber<T>>) {
    let (mut bytes, mut pages) = (Vec::with_capacity(PAGE_BYTES), Vec::new());
    for fiber in fibers {
        if let Some(held) = fiber.held.take() {
            let arena = fiber.arena.as_ref().filter(|_| fiber.arena_packs).map(CallArena::used);
            // SAFETY: the yield function left in the last poll of this work, and its future was
            // not dropped since, or `returns` had forgotten it. So the fiber that it is on is
            // suspended, and is until the work is polled or dropped, which `hibernated` goes
            // before; and the caller has it borrowed until the pages are given back. What lies in
            // the arena is reached through the work alone, in the same way.
            fiber.hibernated = unsafe { Hibernated::new(&held, arena, &mut bytes, &mut pages) };
        }
    }
    // SAFETY: as above; what was in use is packed.
    unsafe { compact_pool::decommit(&pages) };
}

/// What a hibernated call had in its pages: addresses, numbers of words, and these packed. Dropping
/// it puts all back.
struct Hibernated(Box<[u8]>);

impl Hibernated {
    /// Packs, in `bytes`, and adds the pages that the host may have.
    ///
    /// # Safety
    /// The stack is that of a suspended fiber, the memory of its store in a compact slot, and the
    /// arena the call's own; the fiber is not resumed and none of them accessed before this is
    /// dropped.
    unsafe fn new(
        held: &Held,
        arena: Option<Range<usize>>,
        bytes: &mut Vec<u8>,
        pages: &mut Vec<Range<usize>>,
    ) -> Option<Self> {
        bytes.clear();
        // SAFETY: as the caller promises.
        unsafe {
            add(stack_in_use(held)?, bytes);
            pages.push(held.stack.clone());
            if let Some(arena) = arena {
                pages.push(arena.start..arena.end.next_multiple_of(PAGE_BYTES));
                add(arena, bytes);
            }
            for page in compact_pool::resident(&held.memory, MEMORY_MAX) {
                let before = bytes.len();
                add(page.clone(), bytes);
                if bytes.len() - before > PAGE_MAX {
                    bytes.truncate(before);
                } else {
                    pages.push(page);
                }
            }
        }
        Some(Self(Box::from(&bytes[..])))
    }
}

impl Drop for Hibernated {
    fn drop(&mut self) {
        let mut bytes = &self.0[..];
        while let (Some(start), Some(count)) = (take(&mut bytes), take(&mut bytes)) {
            let (start, count) = (usize::from_le_bytes(start), u32::from_le_bytes(count) as usize);
            // SAFETY: the range is one of those that `new` packed, which are still the call's,
            // mapped, aligned, and not accessed otherwise as long as this lives.
            let words = unsafe { slice::from_raw_parts_mut(start as *mut u64, count) };
            match unpack(bytes, words) {
                Some(rest) => bytes = rest,
                // These are the bytes that `add` made.
                None => return,
            }
        }
    }
}

/// Adds a range of words.
///
/// # Safety
/// It is mapped and aligned, and nobody writes there meanwhile.
unsafe fn add(range: Range<usize>, bytes: &mut Vec<u8>) {
    let count = range.len() / WORD;
    bytes.extend(range.start.to_le_bytes());
    bytes.extend((count as u32).to_le_bytes());
    // SAFETY: as the caller promises; what is there was written by compiled code and the host,
    // or is zero. Padding of values in an arena is what the page held, and comes back as that.
    let words = unsafe { slice::from_raw_parts(range.start as *const u64, count) };
    pack(words, bytes);
}

/// From the stack pointer of a suspended fiber to its top; `None` if it is not where it is
/// expected, or far.
///
/// # Safety
/// As of [`Hibernated::new`].
unsafe fn stack_in_use(held: &Held) -> Option<Range<usize>> {
    let top = held.stack.end;
    // SAFETY: as the caller promises; it is within the top page of the stack.
    let stack_pointer = unsafe { *((top - 2 * WORD) as *const usize) };
    // The yield function was there, or deeper, and its caller suspends the fiber.
    let near = held.used.saturating_sub(HOOK_MAX)..held.used.saturating_add(HOOK_MAX);
    let fits = near.contains(&stack_pointer)
        && held.stack.contains(&stack_pointer)
        && stack_pointer.is_multiple_of(WORD)
        && top - stack_pointer <= STACK_MAX;
    fits.then_some(stack_pointer..top)
}
