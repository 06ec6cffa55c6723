//! `malloc` for programs that bring none: blocks of powers of two in pages of their own.
//!
//! ```text
//!  block: | class, 16 bytes | what the program gets; while free, the next free block |
//! ```
//! The list of free blocks lies in the isolate's memory. A program that writes there misleads
//! itself only: what is read from it is an address that is checked like any other.

use wiggle::{GuestError, GuestMemory, GuestPtr};

/// Bytes before what the program gets; they keep its alignment.
const HEADER_BYTES: u32 = 16;
/// The smallest block has 32 bytes, the largest 1 GiB.
const CLASSES: std::ops::RangeInclusive<u32> = 5..=30;
const PAGE_BYTES: u32 = 64 << 10;

/// Where the free memory of one isolate is.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    /// The first free block of each class; 0 for none.
    free: [u32; *CLASSES.end() as usize + 1],
    /// What is left of the pages that were added last.
    next: u32,
    end: u32,
}

/// What is to be done for an allocation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// It is there.
    At(u32),
    /// Memory has to grow by so many pages; then [`Heap::grown`] and again.
    Pages(u32),
    /// No block is that large.
    TooLarge,
}

/// The freed address is not that of a block.
#[derive(Debug, thiserror::Error)]
#[error("the program freed memory that it did not allocate")]
pub(crate) struct NotABlock;

impl Heap {
    /// Finds `bytes` bytes, aligned to 16.
    ///
    /// # Errors
    /// An address out of bounds, where the program has overwritten the list.
    pub fn find(&mut self, memory: &mut GuestMemory<'_>, bytes: u32) -> Result<Found, GuestError> {
        let Some(class) = class(bytes) else { return Ok(Found::TooLarge) };
        let size = 1u32 << class;
        let block = match self.free[class as usize] {
            0 if self.end - self.next < size => return Ok(Found::Pages(size.div_ceil(PAGE_BYTES))),
            0 => {
                self.next += size;
                self.next - size
            }
            block => {
                self.free[class as usize] = memory.read(word(block.wrapping_add(HEADER_BYTES)))?;
                block
            }
        };
        memory.write(word(block), class)?;
        Ok(Found::At(block.wrapping_add(HEADER_BYTES)))
    }

    /// Pages were added from `start` to `end`. What was left before is given up, unless it
    /// borders.
    pub fn grown(&mut self, start: u32, end: u32) {
        if self.end != start {
            self.next = start;
        }
        self.end = end;
    }

    /// Gives back what [`Heap::find`] found. Null is nothing.
    ///
    /// # Errors
    /// [`NotABlock`], or an address out of bounds.
    pub fn free(&mut self, memory: &mut GuestMemory<'_>, address: u32) -> wasmtime::Result<()> {
        if address == 0 {
            return Ok(());
        }
        let class = self.class_of(memory, address)?;
        let first = &mut self.free[class as usize];
        memory.write(word(address), *first)?;
        *first = address - HEADER_BYTES;
        Ok(())
    }

    /// How many bytes the block at `address` has room for.
    ///
    /// # Errors
    /// As [`Heap::free`].
    pub fn room(&self, memory: &GuestMemory<'_>, address: u32) -> wasmtime::Result<u32> {
        Ok((1 << self.class_of(memory, address)?) - HEADER_BYTES)
    }

    fn class_of(&self, memory: &GuestMemory<'_>, address: u32) -> wasmtime::Result<u32> {
        let block = address.checked_sub(HEADER_BYTES).ok_or(NotABlock)?;
        let class: u32 = memory.read(word(block))?;
        if !CLASSES.contains(&class) || !address.is_multiple_of(HEADER_BYTES) {
            return Err(NotABlock.into());
        }
        Ok(class)
    }
}

fn class(bytes: u32) -> Option<u32> {
    let size = bytes.checked_add(HEADER_BYTES)?.checked_next_power_of_two()?;
    let class = size.trailing_zeros().max(*CLASSES.start());
    CLASSES.contains(&class).then_some(class)
}

fn word(address: u32) -> GuestPtr<u32> {
    GuestPtr::new(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn find(heap: &mut Heap, bytes: &mut Vec<u8>, size: u32) -> u32 {
        loop {
            match heap.find(&mut GuestMemory::Unshared(bytes), size).unwrap() {
                Found::At(address) => return address,
                Found::Pages(pages) => {
                    let start = bytes.len() as u32;
                    bytes.resize(bytes.len() + (pages * PAGE_BYTES) as usize, 0);
                    heap.grown(start, bytes.len() as u32);
                }
                Found::TooLarge => panic!("{size} is too large"),
            }
        }
    }

    #[test]
    fn what_is_freed_is_used_again() {
        let (mut heap, mut bytes) = (Heap::default(), vec![0; 65536]);
        let first = find(&mut heap, &mut bytes, 100);
        heap.free(&mut GuestMemory::Unshared(&mut bytes), first).unwrap();
        assert_eq!(find(&mut heap, &mut bytes, 90), first);
        assert_ne!(find(&mut heap, &mut bytes, 90), first);
    }

    #[test]
    fn what_was_not_allocated_cannot_be_freed() {
        let (mut heap, mut bytes) = (Heap::default(), vec![0; 65536]);
        let mut memory = GuestMemory::Unshared(&mut bytes);
        for address in [1, 15, 16, 4096, 65535, u32::MAX] {
            assert!(heap.free(&mut memory, address).is_err(), "{address}");
        }
        heap.free(&mut memory, 0).unwrap();
        assert_eq!(heap.find(&mut memory, u32::MAX).unwrap(), Found::TooLarge);
    }

    #[test]
    fn an_overwritten_list_leads_to_an_error() {
        let (mut heap, mut bytes) = (Heap::default(), vec![0; 65536]);
        let first = find(&mut heap, &mut bytes, 100);
        let mut memory = GuestMemory::Unshared(&mut bytes);
        heap.free(&mut memory, first).unwrap();
        memory.write(word(first), u32::MAX - 3).unwrap();
        assert!(matches!(heap.find(&mut memory, 100), Ok(Found::At(_))));
        assert!(heap.find(&mut memory, 100).is_err());
    }

    proptest! {
        #[test]
        fn blocks_do_not_overlap(sizes in prop::collection::vec((0u32..100_000, any::<bool>()), 1..60)) {
            let (mut heap, mut bytes) = (Heap::default(), vec![0; 65536]);
            let mut live: Vec<(u32, u32)> = Vec::new();
            for (size, frees) in sizes {
                let start = find(&mut heap, &mut bytes, size);
                prop_assert_eq!(start % 16, 0);
                prop_assert!((start + size) as usize <= bytes.len());
                let apart = |&(other, length): &(u32, u32)| start + size <= other || other + length <= start;
                prop_assert!(live.iter().all(apart));
                live.push((start, size));
                if frees {
                    let (address, _) = live.swap_remove(0);
                    heap.free(&mut GuestMemory::Unshared(&mut bytes), address).unwrap();
                }
            }
        }
    }
}
