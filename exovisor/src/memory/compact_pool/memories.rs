//! Linear memories.

use super::{CompactPool, Slot, advise, page_bytes};
use std::io;
use std::sync::Arc;
use wasmtime::{LinearMemory, MemoryCreator, MemoryType, Result, format_err};

/// All memories of one engine, each as large as the largest may be, without guards between them
/// or behind a memory's end: compiled code must check each access against the memory's length.
pub(crate) struct Memories {
    pool: Arc<CompactPool>,
    keep_bytes: usize,
}

impl Memories {
    /// Room for `count` memories of `bytes`, each of which keeps `keep_bytes` when it goes: they
    /// are zeroed by hand.
    ///
    /// # Errors
    /// When the host has not so much address space.
    pub fn new(count: usize, bytes: usize, keep_bytes: usize) -> io::Result<Self> {
        let pool = CompactPool::new(count, bytes.max(1).next_multiple_of(page_bytes()))?;
        Ok(Self { pool, keep_bytes })
    }
}

// SAFETY: each memory is of its own until it is dropped, page aligned and zero: slots are zeroed
// before they are given back.
unsafe impl MemoryCreator for Memories {
    fn new_memory(
        &self,
        _: MemoryType,
        minimum: usize,
        _: Option<usize>,
        reserved: Option<usize>,
        guard: usize,
    ) -> Result<Box<dyn LinearMemory>, String> {
        if guard > 0 || reserved.is_some_and(|reserved| reserved > 0) {
            return Err("nothing is guarded here, so the engine must not rely on it".to_owned());
        }
        let room = self.pool.slot_bytes;
        if minimum > room {
            return Err(format!(
                "a memory of {minimum} bytes is more than the {room} that policy permits"
            ));
        }
        let all =
            || format!("all {} memories are taken; policy sets their number", self.pool.slots);
        let (slot, _) = self.pool.take().ok_or_else(all)?;
        Ok(Box::new(Memory { slot, bytes: minimum, keep_bytes: self.keep_bytes }))
    }
}

struct Memory {
    slot: Slot,
    bytes: usize,
    keep_bytes: usize,
}

// SAFETY: as above; what lies between `bytes` and the slot's end is never given out before
// `grow_to`, and stays zero.
unsafe impl LinearMemory for Memory {
    fn byte_size(&self) -> usize {
        self.bytes
    }

    fn byte_capacity(&self) -> usize {
        self.slot.bytes()
    }

    fn grow_to(&mut self, new_size: usize) -> Result<()> {
        if new_size > self.slot.bytes() {
            return Err(format_err!("policy permits memories of {} bytes", self.slot.bytes()));
        }
        self.bytes = self.bytes.max(new_size);
        Ok(())
    }

    fn as_ptr(&self) -> *mut u8 {
        self.slot.start() as *mut u8
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let keep = self.keep_bytes.min(self.bytes).next_multiple_of(page_bytes());
        let rest = self.bytes.saturating_sub(keep);
        if rest > 0 && advise(self.slot.start() + keep, rest, libc::MADV_DONTNEED).is_err() {
            zero(self.slot.start() + keep, rest);
        }
        zero(self.slot.start(), keep.min(self.bytes));
    }
}

/// Zeroes part of a slot that is about to be given back.
fn zero(start: usize, bytes: usize) {
    // SAFETY: the slot is the memory's, which nobody uses any more.
    unsafe { (start as *mut u8).write_bytes(0, bytes) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 64 << 10;

    fn new(memories: &Memories, minimum: usize) -> Result<Box<dyn LinearMemory>, String> {
        memories.new_memory(MemoryType::new(1, None), minimum, None, Some(0), 0)
    }

    fn bytes(memory: &mut dyn LinearMemory) -> &mut [u8] {
        // SAFETY: tests hold the memory, whose bytes these are, and look at them once at a time.
        unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), memory.byte_size()) }
    }

    #[test]
    fn a_memory_that_is_used_again_is_zero_whatever_is_kept() {
        for keep_bytes in [0, 100, 4096, PAGE, usize::MAX / 2] {
            let memories = Memories::new(1, 2 * PAGE, keep_bytes).unwrap();
            let mut memory = new(&memories, PAGE).unwrap();
            memory.grow_to(2 * PAGE).unwrap();
            let start = memory.as_ptr();
            bytes(&mut *memory).fill(7);
            drop(memory);
            let mut memory = new(&memories, PAGE).unwrap();
            memory.grow_to(2 * PAGE).unwrap();
            assert_eq!(memory.as_ptr(), start);
            assert!(bytes(&mut *memory).iter().all(|byte| *byte == 0), "{keep_bytes}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let memories = Memories::new(1, 2 * PAGE, 0).unwrap();
        assert!(new(&memories, 3 * PAGE).is_err());
        let mut memory = new(&memories, 2 * PAGE).unwrap();
        assert!(memory.grow_to(3 * PAGE).is_err());
        assert_eq!(memory.byte_size(), memory.byte_capacity());
        assert!(new(&memories, PAGE).is_err());
        drop(memory);
        assert!(new(&memories, PAGE).is_ok());
        let ty = || MemoryType::new(1, None);
        assert!(memories.new_memory(ty(), PAGE, None, Some(PAGE), 0).is_err());
        assert!(memories.new_memory(ty(), PAGE, None, Some(0), 4096).is_err());
    }
}
