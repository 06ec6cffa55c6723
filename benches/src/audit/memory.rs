//! What the guest kernel believes: its records of host processes, and its page tables,
//! read from its memory while it stands.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::host::Mapping;
use super::layout::{Layout, words};
use crate::BenchError;

pub const PAGE: u64 = 4096;
const ENTRIES: u64 = 512;
/// Of the four levels of a page table, from the top.
const SHIFTS: [u32; 4] = [39, 30, 21, 12];
/// A list that is longer goes round in circles.
const LONGEST: usize = 100_000;

/// A part of a host process's address space that is of one piece in the memory file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Run {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    pub access: Access,
}

/// What may be done with a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Access {
    pub read: bool,
    pub write: bool,
    pub execute: bool,
}

impl Access {
    /// UM_PROT_READ, UM_PROT_WRITE, UM_PROT_EXEC of the guest kernel.
    fn of_bits(bits: u64) -> Self {
        Self { read: bits & 1 != 0, write: bits & 2 != 0, execute: bits & 4 != 0 }
    }

    /// Whether it is no more than `other`.
    pub fn is_within(self, other: Self) -> bool {
        self.read <= other.read && self.write <= other.write && self.execute <= other.execute
    }
}

/// What a page table says of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    None,
    /// It has changed, and the host process is to follow before it runs user code.
    Changed,
    Page(u64, Access),
}

/// A host process, as the guest kernel knows it.
#[derive(Debug)]
pub struct Process {
    /// In the cell's pid namespace; negative if it is dead.
    pub inner_pid: i32,
    /// Of its page table, if it has one.
    pub mm: Option<u64>,
    /// What it has mapped, if all of that is known.
    pub runs: Option<Vec<Run>>,
    /// Whether it has done all that it was told.
    pub has_settled: bool,
}

/// Memory of a guest kernel.
pub struct Memory {
    file: File,
    pub layout: Layout,
    pub is_fused: bool,
    pub reserved: u64,
    pub task_size: u64,
    pub stub_start: u64,
    physmem: u64,
    /// Where the image is, in the guest kernel; 0 if it is nowhere.
    image: u64,
    tables: RefCell<HashMap<u64, Vec<u64>>>,
}

impl Memory {
    /// Of the process `kernel`.
    pub fn of(kernel: i32) -> Result<Self, BenchError> {
        let executable = format!("/proc/{kernel}/exe");
        let layout = Layout::of_kernel(Path::new(&executable))?;
        let path = format!("/proc/{kernel}/mem");
        let file = File::open(&path).map_err(BenchError::host(&path))?;
        let mut memory = Self {
            file,
            layout,
            is_fused: false,
            reserved: 0,
            task_size: 0,
            stub_start: 0,
            physmem: 0,
            image: 0,
            tables: RefCell::default(),
        };
        memory.read_variables().map_err(BenchError::host(&path))?;
        Ok(memory)
    }

    fn read_variables(&mut self) -> io::Result<()> {
        self.is_fused = self.half(self.layout.fused)? != 0;
        self.reserved = self.word(self.layout.reserved)?;
        self.task_size = self.word(self.layout.task_size)?;
        self.stub_start = self.word(self.layout.stub_start)?;
        self.physmem = self.word(self.layout.physmem)?;
        self.image = self.word(self.layout.image)?;
        Ok(())
    }

    fn bytes<const N: usize>(&self, address: u64) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, address)?;
        Ok(bytes)
    }

    fn word(&self, address: u64) -> io::Result<u64> {
        self.bytes(address).map(u64::from_le_bytes)
    }

    fn half(&self, address: u64) -> io::Result<u32> {
        self.bytes(address).map(u32::from_le_bytes)
    }

    fn words(&self, address: u64, count: u64) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; (count * 8) as usize];
        self.file.read_exact_at(&mut bytes, address)?;
        Ok(words(&bytes))
    }

    /// All host processes of guest address spaces. What was read of page tables before may
    /// have changed since.
    pub fn processes(&self) -> io::Result<Vec<Process>> {
        self.tables.borrow_mut().clear();
        let mut found = Vec::new();
        let mut at = self.word(self.layout.all_mapped)?;
        while at != 0 && found.len() < LONGEST {
            found.push(self.process(at)?);
            at = self.word(at + self.layout.next)?;
        }
        Ok(found)
    }

    /// The one whose `struct mapped` is at `at`.
    fn process(&self, at: u64) -> io::Result<Process> {
        let mm = self.word(at + self.layout.mm)?;
        let runs = match self.half(at + self.layout.is_partial)? {
            0 => Some(self.runs(at)?),
            _ => None,
        };
        Ok(Process {
            inner_pid: self.half(self.word(at + self.layout.pid)?)? as i32,
            mm: (mm != 0).then_some(mm),
            runs,
            has_settled: self.is_fused || self.has_settled(at - self.layout.stub)?,
        })
    }

    /// The mappings of a process of the guest with the image's files as the guest numbers their
    /// pages: behind its memory. `kernel` has the mappings of the guest kernel, of which those of
    /// the image say which file it has where.
    pub fn place_image(
        &self,
        mappings: Vec<Mapping>,
        kernel: &[Mapping],
        memory: &str,
    ) -> Vec<Mapping> {
        let is_image = |mapping: &Mapping| {
            let image = kernel.iter().filter(|other| other.run.start >= self.image);
            let mut same = image.filter(|other| other.file == mapping.file);
            same.any(|other| {
                other.run.offset == other.run.start - self.image
                    && mapping.run.offset >= other.run.offset
                    && mapping.run.offset + (mapping.run.end - mapping.run.start)
                        <= other.run.offset + (other.run.end - other.run.start)
            })
        };
        let place = |mut mapping: Mapping| {
            if self.image != 0 && mapping.run.start < self.task_size && is_image(&mapping) {
                mapping.run.offset += self.image - self.physmem;
                memory.clone_into(&mut mapping.file);
            }
            mapping
        };
        mappings.into_iter().map(place).collect()
    }

    /// `struct mapped_run`: start, end, offset, access and descriptor.
    fn runs(&self, at: u64) -> io::Result<Vec<Run>> {
        let count = self.half(at + self.layout.nr)?;
        let words = self.words(self.word(at + self.layout.runs)?, u64::from(count) * 4)?;
        let run = |run: &[u64]| Run {
            start: run[0],
            end: run[1],
            offset: match run[3] >> 32 >= self.layout.image_fd {
                true => run[2] + (self.image - self.physmem),
                false => run[2],
            },
            access: Access::of_bits(run[3] & 0xffff_ffff),
        };
        Ok(words.chunks_exact(4).map(run).collect())
    }

    /// As is_executed() of the guest kernel has it, of the `struct stub` at `stub`.
    fn has_settled(&self, stub: u64) -> io::Result<bool> {
        let ctl = self.word(stub + self.layout.ctl)?;
        let (queued, asked) =
            (self.half(stub + self.layout.queued)?, self.half(stub + self.layout.asked)?);
        let (tail, done) = (self.half(ctl + self.layout.tail)?, self.half(ctl + self.layout.done)?);
        Ok(queued == tail
            && queued.wrapping_sub(asked) <= 1
            && done.wrapping_sub(asked) as i32 >= 0)
    }

    /// What each stub process has mapped for gates.
    pub fn gate_rooms(&self) -> io::Result<Vec<Run>> {
        let words = self.words(self.layout.gate_rooms, 4 * 4)?;
        let room = |room: &[u64]| Run {
            start: room[0],
            end: room[0] + room[1],
            offset: room[2],
            access: Access::of_bits(room[3] & 0xffff_ffff),
        };
        Ok(words.chunks_exact(4).filter(|room| room[1] != 0).map(room).collect())
    }

    /// The pages of code that are mapped as copies: (page, address) -> copy.
    pub fn copies(&self) -> io::Result<HashMap<(u64, u64), u64>> {
        let layout = &self.layout;
        let pages = self.word(layout.pages)?;
        let mut found = HashMap::new();
        for first in self.words(layout.texts, layout.nr_texts_lists)? {
            let mut node = first;
            while node != 0 && found.len() < LONGEST {
                let text = node - layout.node;
                let page = (self.word(text + layout.phys)?, self.word(text + layout.addr)?);
                let copy = self.word(text + layout.copy)?.wrapping_sub(pages) / layout.sizeof_page;
                found.insert(page, copy * PAGE);
                node = self.word(node)?;
            }
        }
        Ok(found)
    }

    /// What the page table of `mm` says of `address`.
    pub fn entry(&self, mm: u64, address: u64) -> io::Result<Entry> {
        let is_pending = self.word(mm + self.layout.sync_from)? <= address
            && address < self.word(mm + self.layout.sync_to)?;
        let mut table = self.word(mm + self.layout.pgd)?;
        let mut entry = 0;
        for shift in SHIFTS {
            entry = self.table_entry(table, address >> shift & (ENTRIES - 1))?;
            if entry & self.layout.is_present == 0 {
                break;
            }
            table = self.physmem + (entry & !(PAGE - 1));
        }
        Ok(self.meaning(entry, is_pending))
    }

    fn meaning(&self, entry: u64, is_pending: bool) -> Entry {
        let layout = &self.layout;
        let has = |bits: u64| entry & bits != 0;
        // Of those that are only marked, nobody would take notice.
        if has(layout.needs_sync) && is_pending {
            return Entry::Changed;
        }
        if !has(layout.is_present) && !has(layout.is_none_present) {
            return Entry::None;
        }
        let read = !has(layout.is_none_present);
        let access = Access {
            read,
            write: read && has(layout.write) && has(layout.used) && has(layout.dirty),
            execute: read && !has(layout.no_exec),
        };
        Entry::Page(entry & !(PAGE - 1), access)
    }

    fn table_entry(&self, table: u64, index: u64) -> io::Result<u64> {
        if let Some(words) = self.tables.borrow().get(&table) {
            return Ok(words[index as usize]);
        }
        let words = self.words(table, ENTRIES)?;
        let entry = words[index as usize];
        self.tables.borrow_mut().insert(table, words);
        Ok(entry)
    }
}
