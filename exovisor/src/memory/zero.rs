//! Pages of memories that go back to the host.

#![allow(unsafe_code)]

use crate::memory::dirty_pages::Part;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use wasmtime::SharedMemory;

const PAGE_BYTES: usize = 4096;
/// Pages that the host is asked for at once: some 2 us.
const LOOK_MAX: usize = 512;

/// Makes `range` of `memory` zero: whole pages go back to the host, which answers with zeros when
/// they are touched again, and only the rest is written. False if the range is not all inside.
pub(crate) fn zero(memory: &SharedMemory, range: Range<usize>) -> bool {
    let Some(bytes) = memory.data().get(range) else { return false };
    let start = bytes.as_ptr().addr();
    let pages = whole_pages(start, bytes.len());
    let (before, rest) = bytes.split_at(pages.start);
    let (pages, after) = rest.split_at(pages.len());
    if !decommit_shared(pages) {
        write_zeros(pages);
    }
    write_zeros(before);
    write_zeros(after);
    true
}

/// Makes what was written to in a `part` of some bytes zero, and keeps its pages.
pub(crate) fn write_over(bytes: &[UnsafeCell<u8>], part: &Part) {
    part.written().filter_map(|range| bytes.get(range)).for_each(write_zeros);
}

/// The part of `length` bytes from address `start` on that consists of whole pages.
fn whole_pages(start: usize, length: usize) -> Range<usize> {
    let first = (start.next_multiple_of(PAGE_BYTES) - start).min(length);
    let last = (start + length) / PAGE_BYTES * PAGE_BYTES;
    first..last.saturating_sub(start).max(first)
}

/// How much of `addresses`, from its beginning, has as many bytes in memory as are given, and no
/// more: so long does it take to free it. Something, if there is anything.
pub(crate) fn stretch(addresses: Range<*const u8>, bytes_max: usize) -> usize {
    let (start, end) = (addresses.start.addr(), addresses.end.addr());
    let length = end.saturating_sub(start);
    let mut left = (bytes_max / PAGE_BYTES).max(1);
    // Where all was touched a short look is enough.
    let (mut next, mut look) = (start / PAGE_BYTES * PAGE_BYTES, left.min(LOOK_MAX));
    while next < end {
        let mut pages = [0u8; LOOK_MAX];
        let count = (end - next).div_ceil(PAGE_BYTES).min(look);
        // SAFETY: it writes a byte for each page of the range, which are not more than these.
        if unsafe { libc::mincore(next as *mut _, count * PAGE_BYTES, pages.as_mut_ptr()) } != 0 {
            return length.min(bytes_max);
        }
        for page in pages.iter().take(count) {
            if page & 1 != 0 && left == 0 {
                return (next - start).min(length);
            }
            left -= usize::from(page & 1);
            next += PAGE_BYTES;
        }
        look = LOOK_MAX;
    }
    length
}

/// Gives back the whole pages of a memory whose content nobody wants any more: what is read there
/// afterwards is what the memory began with, or zeros. If the host refuses, all stays as it is.
pub(crate) fn decommit(bytes: &mut [u8]) {
    let pages = whole_pages(bytes.as_ptr().addr(), bytes.len());
    let Some(pages) = bytes.get_mut(pages) else { return };
    // SAFETY: the pages are the caller's alone, and lie in private mappings as all of the engine's
    // memories do, so that they are zeros or the first content afterwards: bytes, whatever they
    // are.
    unsafe { libc::madvise(pages.as_mut_ptr().cast(), pages.len(), libc::MADV_DONTNEED) };
}

fn decommit_shared(pages: &[UnsafeCell<u8>]) -> bool {
    // SAFETY: the memory is a private anonymous mapping of the engine's (shared memories get no
    // image), and these whole pages lie in its accessible part, which the borrow keeps mapped.
    // Reading zeros afterwards is what the caller wants; a thread that reads meanwhile sees one or
    // the other, as with writes. There is no other way to free pages that stay mapped.
    unsafe {
        libc::madvise(pages.as_ptr().cast_mut().cast(), pages.len(), libc::MADV_DONTNEED) == 0
    }
}

fn write_zeros(bytes: &[UnsafeCell<u8>]) {
    const WORD: usize = size_of::<u64>();
    let before = bytes.as_ptr().addr().wrapping_neg() % WORD;
    let (before, rest) = bytes.split_at(before.min(bytes.len()));
    let (words, after) = rest.as_chunks::<WORD>();
    store_zeros(words);
    for byte in before.iter().chain(after) {
        // SAFETY: as above; a byte begins anywhere.
        unsafe { AtomicU8::from_ptr(byte.get()) }.store(0, Ordering::Relaxed);
    }
}

/// Stores each word at once, as other threads may access them.
fn store_zeros(words: &[[UnsafeCell<u8>; 8]]) {
    // SAFETY: the words are valid for writes as long as they are borrowed, and begin where a word
    // does. The instruction stores each of them as a store of its own would, in any order, which is
    // what relaxed atomic stores are; a loop of those takes about twice as long on an AMD machine.
    unsafe {
        std::arch::asm!(
            "rep stosq",
            inout("rcx") words.len() => _,
            inout("rdi") words.as_ptr().cast_mut() => _,
            in("rax") 0,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::dirty_pages::{Search, can_be_found};
    use wasmtime::{Config, Engine, Memory, MemoryType, Store};

    #[test]
    fn pages_are_whole() {
        assert_eq!(whole_pages(4096, 8192), 0..8192);
        assert_eq!(whole_pages(4097, 8192), 4095..4095 + 4096);
        assert_eq!(whole_pages(4097, 4094), 4094..4094);
        assert_eq!(whole_pages(4097, 100), 100..100);
        assert_eq!(whole_pages(8192, 0), 0..0);
    }

    #[test]
    fn a_stretch_has_so_many_pages_in_memory_and_no_more() {
        const PAGES: usize = 3 * LOOK_MAX;
        let mut store = Store::<()>::default();
        let pages_of_wasm = (PAGES * PAGE_BYTES / 65536) as u64;
        let memory = Memory::new(&mut store, MemoryType::new(pages_of_wasm as u32, None)).unwrap();
        let bytes = memory.data_mut(&mut store);
        // Where the host has large pages, it has more in memory than was touched.
        let all = PAGES * PAGE_BYTES;
        let of = |bytes: &[u8], pages: usize| stretch(bytes.as_ptr_range(), pages * PAGE_BYTES);
        assert_eq!((of(bytes, 1), of(&bytes[..0], 1)), (all, 0));
        bytes.fill(1);
        assert_eq!(
            (of(bytes, 1), of(bytes, LOOK_MAX + 5)),
            (PAGE_BYTES, (LOOK_MAX + 5) * PAGE_BYTES)
        );
        assert_eq!((of(&bytes[100..], 1), of(&bytes[100..200], 1)), (PAGE_BYTES - 100, 100));
        decommit(&mut bytes[PAGE_BYTES..(2 * LOOK_MAX + 1) * PAGE_BYTES]);
        assert_eq!(of(bytes, 2), (2 * LOOK_MAX + 2) * PAGE_BYTES);
        assert_eq!(of(bytes, PAGES), all);
    }

    #[test]
    fn the_range_is_zero_and_nothing_else() {
        let engine = Engine::new(Config::new().shared_memory(true)).unwrap();
        let memory = SharedMemory::new(&engine, MemoryType::shared(1, 2)).unwrap();
        let cell = |at: usize| {
            // SAFETY: no other thread has this memory.
            unsafe { AtomicU8::from_ptr(memory.data()[at].get()) }
        };
        for range in [100..20_000, 0..65536, 4096..8192, 5000..5001, 7..7] {
            (0..65536).for_each(|at| cell(at).store(1, Ordering::Relaxed));
            assert!(zero(&memory, range.clone()));
            let zero = |at: &usize| cell(*at).load(Ordering::Relaxed) == 0;
            assert!((0..65536).all(|at| zero(&at) == range.contains(&at)), "{range:?}");
        }
        assert!(!zero(&memory, 65530..65537) && !zero(&memory, usize::MAX - 1..usize::MAX));
    }

    #[test]
    fn what_was_written_to_is_written_over_and_nothing_else() {
        if !can_be_found() {
            return;
        }
        let engine = Engine::new(Config::new().shared_memory(true)).unwrap();
        for (range, bytes) in
            [(0..65536, 8192), (5..4091, 4086), (4096..65535, 4096), (9..9, 0), (5000..13000, 712)]
        {
            let memory = SharedMemory::new(&engine, MemoryType::shared(1, 1)).unwrap();
            // SAFETY: no other thread has this memory.
            let cell = |at: usize| unsafe { AtomicU8::from_ptr(memory.data()[at].get()) };
            let written = (0..4096).chain(12288..16384);
            written.clone().for_each(|at| cell(at).store(1, Ordering::Relaxed));
            let asked = &memory.data()[range.clone()];
            let Range { start, end } = asked.as_ptr_range();
            let mut found = 0;
            for part in Search::new(start.cast()..end.cast(), 0) {
                let part = part.ok().unwrap();
                found += part.bytes();
                write_over(asked, &part);
            }
            assert_eq!(found, bytes, "{range:?}");
            let is_one = |at: &usize| cell(*at).load(Ordering::Relaxed) == 1;
            assert!(written.clone().all(|at| is_one(&at) != range.contains(&at)), "{range:?}");
        }
    }

    #[test]
    fn whole_pages_are_given_back_and_no_byte_more() {
        let mut store = Store::<()>::default();
        let memory = Memory::new(&mut store, MemoryType::new(1, None)).unwrap();
        let bytes = memory.data_mut(&mut store);
        bytes.fill(7);
        decommit(&mut bytes[100..20_000]);
        let released = |at: &usize| (PAGE_BYTES..4 * PAGE_BYTES).contains(at);
        assert!((0..65536).all(|at| (bytes[at] == 0) == released(&at)));
    }
}
