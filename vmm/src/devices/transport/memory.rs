//! The guest memory that a frontend names with SET_MEM_TABLE.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use crate::devices::DeviceError;

/// virtio_uml sends one region; two leave room for a kernel image of its own.
const REGIONS_MAX: usize = 2;
const PAGE: u64 = 4096;

/// Which file is the cell's memory; a frontend may name no other.
///
/// A frontend that could choose the file could shrink it later, and the next
/// access by the device thread would be a `SIGBUS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryFile {
    device: u64,
    inode: u64,
}

impl MemoryFile {
    /// Accepts a memfd that is sealed against shrinking.
    pub fn new(file: &File) -> Result<Self, DeviceError> {
        let seals = fcntl(file, FcntlArg::F_GET_SEALS).unwrap_or(0);
        if !SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_SHRINK) {
            return Err(DeviceError::MemoryNotSealed);
        }
        Self::of(file).map_err(DeviceError::host("look at the guest memory file"))
    }

    fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// Guest memory as one frontend has described it.
#[derive(Debug)]
pub(crate) struct MappedMemory {
    /// What the device reads and writes, by guest physical address.
    pub guest: GuestMemoryMmap,
    /// Start in the frontend, bytes, guest physical start.
    windows: Vec<(u64, u64, u64)>,
}

impl MappedMemory {
    /// Maps the regions; `None` where one is not a page-aligned part of the
    /// cell's memory file.
    pub fn map(
        allowed: MemoryFile,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
    ) -> Option<Self> {
        if regions.is_empty() || regions.len() > REGIONS_MAX || regions.len() != files.len() {
            return None;
        }
        let mut ranges = Vec::new();
        let mut windows = Vec::new();
        for (region, file) in regions.iter().zip(files) {
            let (start, size) = (region.guest_phys_addr, region.memory_size);
            let aligned = (start | size | region.mmap_offset).is_multiple_of(PAGE);
            // A mapping past the end would be a SIGBUS when it is used.
            let inside = region.mmap_offset.checked_add(size)? <= file.metadata().ok()?.len();
            if !aligned || !inside || MemoryFile::of(&file).ok()? != allowed {
                return None;
            }
            let file = FileOffset::new(file, region.mmap_offset);
            ranges.push((GuestAddress(start), usize::try_from(size).ok()?, Some(file)));
            windows.push((region.user_addr, size, start));
        }
        ranges.sort_by_key(|range| range.0);
        let guest = GuestMemoryMmap::from_ranges_with_files(&ranges).ok()?;
        Some(Self { guest, windows })
    }

    /// Where an address of the frontend lies in guest physical memory.
    pub fn translate(&self, address: u64) -> Option<u64> {
        self.windows.iter().find_map(|&(user, size, guest)| {
            let offset = address.checked_sub(user)?;
            (offset < size).then(|| guest.checked_add(offset))?
        })
    }
}
