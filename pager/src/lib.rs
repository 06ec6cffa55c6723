//! What a cell costs its host in memory, how it gives memory back ([`Mode`]), how
//! cells share what there is (`budget.rs`), and when a host has too little ([`Pressure`]);
//! what a guest kernel's Pager says ([`abi`], [`ring`]) and what that costs it ([`Credit`]).
//!
//! Two figures that add up without counting anything twice: the guest's memory
//! file, by the blocks the host has allocated for it ([`allocated_bytes`]), and
//! the private memory of the cell's processes ([`ProcessMemory`]).
#![forbid(unsafe_code)]

pub mod abi;
mod backing;
pub mod blocks;
mod budget;
mod credit;
mod mode;
mod pressure;
pub mod ring;
mod share;

pub use backing::{Backing, Figures};
pub use budget::{BudgetError, Member, Standing};
pub use credit::{Account, Credit, Overdrawn};
pub use mode::Mode;
pub use pressure::Pressure;
pub use share::{Share, guarantee_bytes_min};

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;

/// Bytes the host has allocated for `file` (stat(2) st_blocks).
pub fn allocated_bytes(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.blocks() * 512)
}

/// Memory of one process, in bytes (proc_pid_smaps(5), smaps_rollup).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct ProcessMemory {
    /// Resident, with every shared page counted in full.
    pub resident_bytes: u64,
    /// Resident, with each shared page divided by its number of users.
    pub proportional_bytes: u64,
    /// The anonymous part of `proportional_bytes`: what no file could give
    /// back, and not the guest's memory file.
    pub anonymous_bytes: u64,
    /// All pages that no other process maps.
    pub private_bytes: u64,
}

impl ProcessMemory {
    /// The memory of process `pid` as it is now.
    ///
    /// # Errors
    /// The process is gone, or belongs to someone else.
    pub fn of(pid: i32) -> io::Result<Self> {
        Ok(Self::parse(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?))
    }

    fn parse(text: &str) -> Self {
        let mut memory = Self::default();
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            let (Some(name), Some(Ok(kib))) = (words.next(), words.next().map(str::parse::<u64>))
            else {
                continue;
            };
            let bytes = kib * 1024;
            match name {
                "Rss:" => memory.resident_bytes = bytes,
                "Pss:" => memory.proportional_bytes = bytes,
                "Private_Clean:" | "Private_Dirty:" => memory.private_bytes += bytes,
                "Pss_Anon:" => memory.anonymous_bytes = bytes,
                _ => {}
            }
        }
        memory
    }
}

impl std::ops::Add for ProcessMemory {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            resident_bytes: self.resident_bytes + other.resident_bytes,
            proportional_bytes: self.proportional_bytes + other.proportional_bytes,
            anonymous_bytes: self.anonymous_bytes + other.anonymous_bytes,
            private_bytes: self.private_bytes + other.private_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollup_is_read() {
        let text = "55d0-7ffe ---p 0 00:00 0 [rollup]\nRss: 100 kB\nPss: 60 kB\nPss_Anon: 40 kB\n\
                    Private_Clean: 8 kB\nPrivate_Dirty: 32 kB\n";
        let memory = ProcessMemory::parse(text);
        assert_eq!(memory.resident_bytes, 100 << 10);
        assert_eq!(memory.private_bytes, 40 << 10);
        assert_eq!(memory.anonymous_bytes, 40 << 10);
    }

    #[test]
    fn a_hole_costs_nothing_and_a_page_costs_a_page() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 30).unwrap();
        assert_eq!(allocated_bytes(&file).unwrap(), 0);
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], 1 << 20).unwrap();
        assert!(allocated_bytes(&file).unwrap() >= 4096);
    }

    #[test]
    fn this_process_has_memory() {
        assert!(ProcessMemory::of(std::process::id() as i32).unwrap().resident_bytes > 0);
    }
}
