//! The maps of sparse files (GNU tar manual, "Storing Sparse Files").

use std::io::Read;

use super::header::{BLOCK_BYTES, unsigned};
use super::{TarReader, pax, read_error};
use crate::error::{ImageError, Result};

/// Bytes of one `offset, length` pair in the old format.
pub(super) const DESCRIPTOR_BYTES: usize = 24;
const EXTENSION_DESCRIPTORS: usize = 21;

/// A run of data in a file; the stream holds the runs one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub offset: u64,
    pub length: u64,
}

impl Extent {
    pub fn whole(length: u64) -> Self {
        Self { offset: 0, length }
    }
}

/// Reads pairs of the old format, up to the first unused one.
pub(super) fn descriptors(bytes: &[u8]) -> Result<Vec<Extent>> {
    let mut extents = Vec::new();
    for pair in bytes.chunks_exact(DESCRIPTOR_BYTES) {
        let (offset, length) = pair.split_at(DESCRIPTOR_BYTES / 2);
        if pair.first() == Some(&0) {
            break;
        }
        extents.push(Extent { offset: unsigned(offset)?, length: unsigned(length)? });
    }
    Ok(extents)
}

/// The pairs in an extension block of the old format.
pub(super) fn extension_descriptors(block: &[u8; BLOCK_BYTES]) -> &[u8] {
    &block[..EXTENSION_DESCRIPTORS * DESCRIPTOR_BYTES]
}

pub(super) fn extension_is_extended(block: &[u8; BLOCK_BYTES]) -> bool {
    block[EXTENSION_DESCRIPTORS * DESCRIPTOR_BYTES] != 0
}

/// Extents must ascend, stay inside the file and add up to the stored bytes.
pub(super) fn check(extents: &[Extent], size: u64, stored: u64) -> Result<()> {
    let mut end = 0;
    let mut sum = 0u64;
    for extent in extents {
        if extent.offset < end {
            return Err(malformed("its parts overlap or are out of order"));
        }
        end = extent
            .offset
            .checked_add(extent.length)
            .ok_or_else(|| malformed("a part is too long"))?;
        sum = sum.saturating_add(extent.length);
    }
    if end > size || sum != stored {
        return Err(malformed("its parts do not fit the file"));
    }
    Ok(())
}

/// Reads the map at the beginning of a GNU.sparse 1.0 file's data: decimal
/// lines (count, then offset and length of each), filled up to a whole block.
pub(super) fn read_pax_map<R: Read>(
    tar: &mut TarReader<R>,
    size: u64,
    stored: u64,
) -> Result<Vec<Extent>> {
    let mut lines = MapLines { block: Vec::new(), tar, bytes: 0 };
    let count = lines.number()?;
    let mut extents = Vec::new();
    for _ in 0..count {
        extents.push(Extent { offset: lines.number()?, length: lines.number()? });
    }
    let map_bytes = lines.bytes;
    check(&extents, size, stored.checked_sub(map_bytes).ok_or_else(|| malformed("it is cut"))?)?;
    Ok(extents)
}

struct MapLines<'a, R> {
    /// What is not used yet of the last block read.
    block: Vec<u8>,
    tar: &'a mut TarReader<R>,
    bytes: u64,
}

impl<R: Read> MapLines<'_, R> {
    fn number(&mut self) -> Result<u64> {
        loop {
            if let Some(end) = self.block.iter().position(|byte| *byte == b'\n') {
                let rest = self.block.split_off(end + 1);
                let line = std::mem::replace(&mut self.block, rest);
                return pax::decimal(line.strip_suffix(b"\n").unwrap_or(&line));
            }
            self.fill()?;
        }
    }

    fn fill(&mut self) -> Result<()> {
        let mut block = [0; BLOCK_BYTES];
        self.tar.read_exact(&mut block).map_err(read_error)?;
        self.bytes += BLOCK_BYTES as u64;
        if self.bytes > self.tar.limits.extension_bytes_max as u64 {
            return Err(malformed("it is too long"));
        }
        self.block.extend_from_slice(&block);
        Ok(())
    }
}

fn malformed(why: &str) -> ImageError {
    ImageError::malformed("the sparse map", why)
}
