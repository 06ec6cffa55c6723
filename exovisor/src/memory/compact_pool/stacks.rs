//! Stacks of fibers.

use super::{CompactPool, Slot, advise, page_bytes};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use wasmtime::{Error, Result, StackCreator, StackMemory, format_err};

/// madvise(2): pages that cannot be touched, without a mapping of their own (Linux 6.13).
const MADV_GUARD_INSTALL: libc::c_int = 102;

/// What a stack keeps of its memory when its call is over, in bytes from its top. Of most no
/// more was touched.
const KEEP_BYTES: usize = 8 << 10;

/// All stacks of one engine: each a guard page, and the stack above it.
pub(crate) struct Stacks(Arc<CompactPool>);

impl Stacks {
    /// Room for `count` stacks of `bytes`.
    ///
    /// # Errors
    /// When the host has not so much address space.
    pub fn new(count: usize, bytes: usize) -> io::Result<Self> {
        let page = page_bytes();
        let slot = bytes.max(1).next_multiple_of(page).saturating_add(page);
        Ok(Self(CompactPool::new(count, slot)?))
    }

    /// The stack that an address lies in, without its guard.
    pub fn stack_at(&self, address: usize) -> Option<Range<usize>> {
        let slot = self.0.slot_at(address)?;
        let stack = slot.start + page_bytes()..slot.end;
        stack.contains(&address).then_some(stack)
    }
}

// SAFETY: each stack is memory of its own until it is dropped, page aligned, above a guard page.
// It may hold what another left there, which only compiled and host code could read, and they do
// not read what they did not write.
unsafe impl StackCreator for Stacks {
    fn new_stack(&self, size: usize, zeroed: bool) -> Result<Box<dyn StackMemory>, Error> {
        let page = page_bytes();
        let all = || format_err!("all {} stacks are taken; policy sets their number", self.0.slots);
        let (slot, new) = self.0.take().ok_or_else(all)?;
        if zeroed || size.saturating_add(page) > slot.bytes() {
            return Err(format_err!("a stack of {size} bytes, zeroed: {zeroed}, is not to be had"));
        }
        if new {
            guard(slot.start(), page)?;
        }
        Ok(Box::new(Stack { slot, page }))
    }
}

/// Makes a page inaccessible. The marker stays when the slot is used again.
fn guard(start: usize, page: usize) -> io::Result<()> {
    if advise(start, page, MADV_GUARD_INSTALL).is_ok() {
        return Ok(());
    }
    // SAFETY: the page is in a slot that nobody had before.
    match unsafe { libc::mprotect(start as *mut libc::c_void, page, libc::PROT_NONE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

struct Stack {
    slot: Slot,
    page: usize,
}

// SAFETY: as above.
unsafe impl StackMemory for Stack {
    fn top(&self) -> *mut u8 {
        self.range().end as *mut u8
    }

    fn range(&self) -> Range<usize> {
        let start = self.slot.start();
        start + self.page..start + self.slot.bytes()
    }

    fn guard_range(&self) -> Range<*mut u8> {
        let start = self.slot.start();
        start as *mut u8..(start + self.page) as *mut u8
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let range = self.range();
        let deep = range.len().saturating_sub(KEEP_BYTES);
        if deep > 0 {
            // If it is refused, the pages stay in use, and nothing else happens.
            let _ = advise(range.start, deep, libc::MADV_DONTNEED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(address: usize) {
        // SAFETY: tests name bytes of stacks that they hold.
        unsafe { (address as *mut u8).write_volatile(1) };
    }

    #[test]
    fn stacks_are_of_the_size_that_is_asked_for_and_as_many() {
        let stacks = Stacks::new(2, 64 << 10).unwrap();
        let one = stacks.new_stack(64 << 10, false).unwrap();
        let two = stacks.new_stack(64 << 10, false).unwrap();
        for stack in [&one, &two] {
            let range = stack.range();
            assert_eq!(range.len(), 64 << 10);
            assert_eq!(stack.guard_range().end.addr(), range.start);
            assert_eq!(stack.top().addr(), range.end);
            touch(range.start);
            touch(range.end - 1);
        }
        assert!(stacks.new_stack(64 << 10, false).is_err());
        drop(one);
        assert!(stacks.new_stack((64 << 10) + 1, false).is_err());
        assert!(stacks.new_stack(64 << 10, true).is_err());
        assert!(stacks.new_stack(64 << 10, false).is_ok());
    }

    #[test]
    fn the_guard_cannot_be_touched_not_even_when_the_stack_is_used_again() {
        let stacks = Stacks::new(1, 64 << 10).unwrap();
        drop(stacks.new_stack(64 << 10, false).unwrap());
        let stack = stacks.new_stack(64 << 10, false).unwrap();
        let guard = stack.guard_range();
        for address in [guard.start.addr(), guard.end.addr() - 1] {
            let pipe = std::io::pipe().unwrap();
            let fd = std::os::fd::AsRawFd::as_raw_fd(&pipe.1);
            // SAFETY: write(2) reads one byte, or answers EFAULT where that cannot be read.
            let written = unsafe { libc::write(fd, address as *const libc::c_void, 1) };
            assert_eq!(
                (written, io::Error::last_os_error().raw_os_error()),
                (-1, Some(libc::EFAULT))
            );
        }
    }

    #[test]
    fn what_was_deep_in_a_stack_is_given_back() {
        let stacks = Stacks::new(1, 64 << 10).unwrap();
        let stack = stacks.new_stack(64 << 10, false).unwrap();
        let range = stack.range();
        touch(range.start);
        touch(range.end - 1);
        drop(stack);
        let stack = stacks.new_stack(64 << 10, false).unwrap();
        let read = |address: usize| {
            // SAFETY: as in `touch`.
            unsafe { (address as *const u8).read_volatile() }
        };
        assert_eq!((read(range.start), read(range.end - 1)), (0, 1));
        drop(stack);
    }
}
