//! Which pages of a memory were written to. A memory is made as new by writing over these.

#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

const PAGE_BYTES: usize = 4096;
/// Up to so many bytes are compared with what they began with. That takes less than to ask the
/// host, which walks its page tables for it: a call that writes to a memory of that size takes
/// 2.2 us so and 3.1 us otherwise, on an AMD machine.
const COMPARED_MAX: usize = 64 << 10;
/// Stretches of pages that the host says at once.
const REGIONS: usize = 32;
/// What is looked through at once: so many pages that are there, which takes 13 ns each on an AMD
/// machine, or 37 where a file's are to be told; and so many bytes, 3 ns for a page that is not.
const PART_PAGES: u64 = 1024;
const PART_BYTES: usize = 16 << 20;

/// Categories of pages (linux/fs.h, `PAGE_IS_*`).
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO: u64 = 1 << 5;

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    pages_max: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

nix::ioctl_readwrite!(pagemap_scan, b'f', 16, Scan);

/// A child of this process sees its parent's pages there.
static IS_CHILD: AtomicBool = AtomicBool::new(false);
static PAGEMAP: LazyLock<Option<File>> = LazyLock::new(|| {
    extern "C" fn is_child() {
        IS_CHILD.store(true, Ordering::Relaxed);
    }
    // SAFETY: the handler only stores a word, which any thread may do after fork(2). There is no
    // safe way to learn of one.
    let noted = unsafe { libc::pthread_atfork(None, None, Some(is_child)) } == 0;
    let file = File::open("/proc/self/pagemap").ok().filter(|_| noted)?;
    Part::find(&file, 0..0, ZERO).map(|_| file)
});

/// Whether the host says which pages were written to (Linux 6.7). Opens what is asked.
pub(crate) fn can_be_found() -> bool {
    PAGEMAP.is_some()
}

/// Makes a memory as it began: an image, and zeros after it. A large one a part at a time, so that
/// others run in between.
pub(crate) struct Reset {
    /// `None` if it is small.
    search: Option<Search>,
    bytes_left: usize,
}

/// The memory cannot be made as it began: too much was written to, or the host does not say.
/// Nothing is known of its content.
pub(crate) struct Refused;

impl Reset {
    /// At most `bytes_max` are written over, of a memory that begins with `image`.
    pub fn new(memory: &[u8], image: &[u8], bytes_max: usize) -> Self {
        let is_small = memory.len() <= bytes_max.min(COMPARED_MAX);
        let search = (!is_small).then(|| Search::new(memory.as_ptr_range(), image.len()));
        Self { search, bytes_left: bytes_max }
    }

    /// Goes on with the same memory and image; whether that was all.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn go_on(&mut self, memory: &mut [u8], image: &[u8]) -> Result<bool, Refused> {
        let Some(search) = &mut self.search else {
            compare(memory, image);
            return Ok(true);
        };
        let Some(part) = search.next() else { return Ok(true) };
        let part = part.map_err(|Silent| Refused)?;
        self.bytes_left = self.bytes_left.checked_sub(part.bytes()).ok_or(Refused)?;
        for range in part.written() {
            let from = range.start;
            let pages = memory.get_mut(range).ok_or(Refused)?;
            let (content, first, zeros) = parts(pages, image, from);
            content.copy_from_slice(first);
            zeros.fill(0);
        }
        Ok(search.is_over())
    }
}

/// Makes a small memory as it began: each page is looked at, and written over if it differs.
/// Pages that were never written to are one page of the host's, which is soon looked at.
fn compare(memory: &mut [u8], image: &[u8]) {
    for (page, from) in memory.chunks_mut(PAGE_BYTES).zip((0..).step_by(PAGE_BYTES)) {
        let (content, first, zeros) = parts(page, image, from);
        if content != first {
            content.copy_from_slice(first);
        }
        if !are_zero(zeros) {
            zeros.fill(0);
        }
    }
}

/// Whether all bytes are zero. With the processor's wide registers that takes two thirds of what
/// memcmp(3) takes, for that reads zeros as well.
fn are_zero(bytes: &[u8]) -> bool {
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what the function is compiled for. It has no other needs.
        return unsafe { are_zero_avx2(bytes) };
    }
    are_zero_in_blocks(bytes)
}

#[target_feature(enable = "avx2")]
fn are_zero_avx2(bytes: &[u8]) -> bool {
    are_zero_in_blocks(bytes)
}

/// Blocks have no branch inside, so that they become wide operations.
#[inline(always)]
fn are_zero_in_blocks(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    let (blocks, words) = words.as_chunks::<32>();
    let any = |all: u64, word: &[u8; 8]| all | u64::from_ne_bytes(*word);
    blocks.iter().all(|block| block.iter().fold(0, any) == 0)
        && words.iter().fold(0, any) == 0
        && rest.iter().all(|byte| *byte == 0)
}

/// What of some bytes, which begin at `from` of a memory, the image reaches; what it has there;
/// and what is zero.
fn parts<'a, 'b>(
    bytes: &'a mut [u8],
    image: &'b [u8],
    from: usize,
) -> (&'a mut [u8], &'b [u8], &'a mut [u8]) {
    let first = image.get(from..).unwrap_or_default();
    let first = &first[..first.len().min(bytes.len())];
    let (content, zeros) = bytes.split_at_mut(first.len());
    (content, first, zeros)
}

/// The host does not say what was written to.
pub(crate) struct Silent;

/// Looks for what was written to, from the beginning to the end, a part at a time.
pub(crate) struct Search {
    start: usize,
    /// Up to here pages may be a file's.
    image_end: usize,
    end: usize,
    /// From here on it was not looked at.
    next: usize,
}

impl Search {
    /// Through `addresses`, of which the first `image_bytes` may be mapped from a file.
    pub fn new(addresses: Range<*const u8>, image_bytes: usize) -> Self {
        let (start, end) = (addresses.start.addr(), addresses.end.addr());
        let image_end = start.saturating_add(image_bytes).next_multiple_of(PAGE_BYTES);
        let image_end = if image_bytes == 0 { start } else { image_end };
        Self { start, image_end, end, next: start }
    }

    /// Whether all was looked at.
    pub fn is_over(&self) -> bool {
        self.next >= self.end
    }

    /// How many bytes were looked at.
    pub fn looked_at(&self) -> usize {
        self.next.min(self.end) - self.start
    }
}

impl Iterator for Search {
    type Item = Result<Part, Silent>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over() {
            return None;
        }
        let from_file = self.next < self.image_end;
        let end = if from_file { self.end.min(self.image_end) } else { self.end };
        let asked = self.next..end.min(self.next.saturating_add(PART_BYTES));
        // To tell a file's pages the host looks at more than the page table.
        let as_before = if from_file { FILE | ZERO } else { ZERO };
        let pagemap = PAGEMAP.as_ref().filter(|_| !IS_CHILD.load(Ordering::Relaxed));
        let found = pagemap.and_then(|pagemap| Part::find(pagemap, asked, as_before));
        let Some((part, looked_to)) = found.filter(|(_, looked_to)| *looked_to > self.next) else {
            self.next = self.end;
            return Some(Err(Silent));
        };
        self.next = looked_to;
        Some(Ok(Part { start: self.start, ..part }))
    }
}

/// What of a part of a memory was written to.
///
/// A page that is not there, or the host's page of zeros, or that of a file which is mapped
/// there, is as it was (`PAGEMAP_SCAN`, admin-guide/mm/pagemap.rst).
pub(crate) struct Part {
    /// Where the memory begins.
    start: usize,
    /// The addresses that were asked for.
    asked: Range<usize>,
    regions: [Region; REGIONS],
    count: usize,
    /// Categories of pages that are as they were.
    as_before: u64,
}

impl Part {
    /// Finds it, and up to which address; `None` if the host does not say. Pages that were only
    /// read are asked for as well, so that their number ends it, too.
    fn find(pagemap: &File, asked: Range<usize>, as_before: u64) -> Option<(Self, usize)> {
        let Range { start, end } = asked;
        let (regions, count) = ([Region::default(); REGIONS], 0);
        let mut part = Self { start, asked, regions, count, as_before };
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start: (start / PAGE_BYTES * PAGE_BYTES) as u64,
            end: end.checked_next_multiple_of(PAGE_BYTES)? as u64,
            regions: part.regions.as_mut_ptr().addr() as u64,
            regions_len: REGIONS as u64,
            pages_max: PART_PAGES,
            any_of: PRESENT | SWAPPED,
            returned: as_before,
            ..Scan::default()
        };
        // SAFETY: the host writes to `scan` and to as many regions as there are; both are borrowed
        // for that. Reading flags of pages changes nothing else.
        let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &raw mut scan) }.ok()?;
        part.count = usize::try_from(count).ok().filter(|count| *count <= REGIONS)?;
        Some((part, usize::try_from(scan.walk_end).ok()?))
    }

    /// The stretches that were written to, from where the memory begins.
    pub fn written(&self) -> impl Iterator<Item = Range<usize>> {
        let (start, Range { start: first, end }) = (self.start, self.asked.clone());
        let clip = move |address: u64| (address as usize).clamp(first, end) - start;
        let regions = self.regions.iter().take(self.count);
        let written = regions.filter(|region| region.categories & self.as_before == 0);
        written.map(move |region| clip(region.start)..clip(region.end))
    }

    /// How many bytes that are.
    pub fn bytes(&self) -> usize {
        self.written().map(|range| range.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wasmtime::{Config, Engine, Instance, Memory, MemoryType, Module, Store};

    const MEMORY_BYTES: usize = 1 << 20;

    fn memory(store: &mut Store<()>) -> Memory {
        Memory::new(&mut *store, MemoryType::new(16, None)).unwrap()
    }

    /// Makes it as it began, in how many parts; `None` if that is refused.
    fn reset(memory: &mut [u8], image: &[u8], bytes_max: usize) -> Option<usize> {
        let mut reset = Reset::new(memory, image, bytes_max);
        for parts in 1.. {
            if reset.go_on(memory, image).ok()? {
                return Some(parts);
            }
        }
        None
    }

    fn is(bytes: &[u8], image: &[u8]) -> bool {
        bytes[..image.len()] == *image && bytes[image.len()..].iter().all(|byte| *byte == 0)
    }

    #[test]
    fn what_was_written_is_as_it_began() {
        if !can_be_found() {
            return;
        }
        let mut store = Store::<()>::default();
        let memory = memory(&mut store);
        let bytes = memory.data_mut(&mut store);
        for image in [&b""[..], b"first content", &[7; PAGE_BYTES], &[9; 5 * PAGE_BYTES + 1]] {
            bytes[..image.len()].copy_from_slice(image);
            for at in [0, 3 * PAGE_BYTES - 1, 5 * PAGE_BYTES + 1, 99_999, MEMORY_BYTES - 1] {
                bytes[at] = 0xff;
            }
            assert!(reset(bytes, image, 32 * PAGE_BYTES).is_some());
            assert!(is(bytes, image), "{}", image.len());
            bytes[..image.len()].fill(0);
        }
    }

    #[test]
    fn a_small_memory_is_as_it_began_whatever_the_host_says() {
        let mut store = Store::<()>::default();
        let memory = Memory::new(&mut store, MemoryType::new(1, None)).unwrap();
        let bytes = memory.data_mut(&mut store);
        for image in [&b""[..], b"first content", &[7; PAGE_BYTES], &[9; 5 * PAGE_BYTES + 1]] {
            bytes[..image.len()].copy_from_slice(image);
            for at in [0, 12, PAGE_BYTES - 1, 5 * PAGE_BYTES, 5 * PAGE_BYTES + 1, 65535] {
                bytes[at] = 0xff;
            }
            assert_eq!(reset(bytes, image, COMPARED_MAX), Some(1));
            assert!(is(bytes, image), "{}", image.len());
            bytes[..image.len()].fill(0);
        }
    }

    #[test]
    fn one_byte_anywhere_is_not_zero() {
        let mut bytes = vec![0; 1000];
        for (start, end) in [(0, 1000), (1, 999), (7, 263), (8, 264), (3, 3), (5, 6), (0, 256)] {
            assert!(are_zero(&bytes[start..end]) && are_zero_in_blocks(&bytes[start..end]));
            for at in start..end {
                bytes[at] = 0x80;
                assert!(!are_zero(&bytes[start..end]), "{at} of {start}..{end}");
                assert!(!are_zero_in_blocks(&bytes[start..end]), "{at} of {start}..{end}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn more_than_is_to_be_written_over_is_refused() {
        if !can_be_found() {
            return;
        }
        for (pages, step, is_reset) in
            [(8, 1, true), (9, 1, false), (8, 2, true), (9, 2, false), (0, 1, true)]
        {
            let mut store = Store::<()>::default();
            let memory = memory(&mut store);
            let bytes = memory.data_mut(&mut store);
            // What was only read is as it was.
            assert!(bytes.iter().all(|byte| *byte == 0));
            (0..pages).for_each(|page| bytes[page * step * PAGE_BYTES] = 1);
            assert_eq!(reset(bytes, &[], 8 * PAGE_BYTES).is_some(), is_reset, "{pages} {step}");
            if is_reset {
                assert!(is(bytes, &[]));
            }
        }
    }

    #[test]
    fn a_large_memory_is_looked_through_in_parts() {
        const WORDS_APART: usize = 2 * PAGE_BYTES;
        if !can_be_found() {
            return;
        }
        let mut store = Store::<()>::default();
        let memory = Memory::new(&mut store, MemoryType::new(1024, None)).unwrap();
        let bytes = memory.data_mut(&mut store);
        // Where nothing was touched, only its length counts.
        assert_eq!(reset(bytes, &[], 0), Some((64 << 20) / PART_BYTES));
        // More stretches than the host says at once.
        let at = || (0..4 * REGIONS).map(|stretch| stretch * WORDS_APART);
        at().for_each(|at| bytes[at] = 1);
        assert!(reset(bytes, &[], 4 * REGIONS * PAGE_BYTES).unwrap() >= 4);
        assert!(is(bytes, &[]));
        at().for_each(|at| bytes[at] = 1);
        assert_eq!(reset(bytes, &[], (4 * REGIONS - 1) * PAGE_BYTES), None);
    }

    #[test]
    fn first_content_that_is_mapped_is_not_copied_before_it_is_written_to() {
        if !can_be_found() {
            return;
        }
        let engine = Engine::new(Config::new().memory_init_cow(true)).unwrap();
        let text = "(module (memory (export \"m\") 4)
          (data (i32.const 0) \"a\") (data (i32.const 70000) \"b\"))";
        let module = Module::new(&engine, text).unwrap();
        let mut store = Store::new(&engine, ());
        let instance = Instance::new(&mut store, &module, &[]).unwrap();
        let bytes = instance.get_memory(&mut store, "m").unwrap().data_mut(&mut store);
        let image = bytes[..70_001].to_vec();
        assert_eq!((image[0], image[70_000]), (b'a', b'b'));
        // None of the pages is its own, so that none is too many.
        assert!(reset(bytes, &image, 0).is_some());
        bytes[0] = b'x';
        assert!(reset(bytes, &image, 0).is_none());
        assert!(reset(bytes, &image, PAGE_BYTES).is_some());
        assert!(is(bytes, &image));
    }
}
