//! The data area: file contents, written as they arrive.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};

use super::device::Rootfs;
use super::format::{BLOCK_BYTES, EXTENDED_BYTES};
use crate::disk::Reserve;
use crate::limits::ImportLimits;
use crate::tar::Extent;
use crate::tree::FileData;

const CHUNK_BYTES: usize = 256 << 10;
const ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// The growing image file, and beside it a spool of the last parts of files,
/// which go next to their inodes in the end.
pub(crate) struct DataArea {
    image: File,
    spool: File,
    spool_bytes: u64,
    next_block: u64,
    chunk: Vec<u8>,
    reserve: Reserve,
    /// An image whose files are not copied: what lies before its end is in it.
    under: Option<Rootfs>,
}

impl DataArea {
    /// `image` and `spool` are empty files open for reading and writing.
    pub fn new(image: File, spool: File, limits: &ImportLimits) -> Self {
        let (chunk, reserve) = (vec![0; CHUNK_BYTES], Reserve::new(limits));
        Self { image, spool, spool_bytes: 0, next_block: 1, chunk, reserve, under: None }
    }

    /// Leaves files in the image `base` where they are: they can be read, and what is written
    /// comes behind it.
    pub fn borrow(&mut self, base: Rootfs) {
        let bytes = base.bytes();
        self.next_block = bytes.div_ceil(BLOCK_BYTES as u64).max(1);
        self.spool_bytes = bytes;
        self.under = Some(base);
    }

    /// The image whose files are not copied.
    pub fn under(&self) -> Option<&Rootfs> {
        self.under.as_ref()
    }

    /// Copies `files` out of the image below, to the same places: what comes of it needs that no
    /// more.
    pub fn fetch<'t>(&mut self, files: impl Iterator<Item = &'t FileData>) -> io::Result<()> {
        let Some(under) = self.under.take() else { return Ok(()) };
        for data in files {
            let tail = match data.tail {
                Some(_) => data.size % BLOCK_BYTES as u64,
                None => 0,
            };
            let (size, start) = (data.size - tail, u64::from(data.start_block));
            if size == 0 || start * BLOCK_BYTES as u64 >= under.bytes() {
                continue;
            }
            let whole = FileData { size, start_block: data.start_block, tail: None };
            let extents = super::extents(&under, &whole)?;
            let mut content = super::Content::new(&under, &whole, &extents);
            for extent in &extents {
                self.copy(start * BLOCK_BYTES as u64, size, *extent, &mut content, &mut [])?;
            }
        }
        self.under = Some(under);
        Ok(())
    }

    pub(super) fn image(&self) -> &File {
        &self.image
    }

    pub(super) fn next_block(&self) -> u64 {
        self.next_block
    }

    /// Takes `count` blocks for something else than file data.
    pub(super) fn take_blocks(&mut self, count: u64) -> u64 {
        let first = self.next_block;
        self.next_block += count;
        first
    }

    /// Writes a file of `size` bytes: `extents` say where the bytes of
    /// `content` go; the rest is zeros. `xattr_bytes` is what its attributes
    /// take from the room next to the inode.
    pub fn add_file(
        &mut self,
        size: u64,
        extents: &[Extent],
        content: &mut dyn Read,
        xattr_bytes: usize,
    ) -> io::Result<FileData> {
        let tail_bytes = (size % BLOCK_BYTES as u64) as usize;
        let inline = tail_bytes > 0 && EXTENDED_BYTES + xattr_bytes + tail_bytes <= BLOCK_BYTES;
        let whole = if inline { size - tail_bytes as u64 } else { size };
        let start = self.take_blocks(whole.div_ceil(BLOCK_BYTES as u64));
        let start_block = u32::try_from(start).map_err(io::Error::other)?;
        let mut tail = vec![0; if inline { tail_bytes } else { 0 }];
        for extent in extents {
            self.copy(start * BLOCK_BYTES as u64, whole, *extent, content, &mut tail)?;
        }
        let tail = if inline { Some(self.spool(&tail)?) } else { None };
        Ok(FileData { size, start_block, tail })
    }

    fn copy(
        &mut self,
        base: u64,
        whole: u64,
        extent: Extent,
        content: &mut dyn Read,
        tail: &mut [u8],
    ) -> io::Result<()> {
        let mut offset = extent.offset;
        let end = extent.offset + extent.length;
        while offset < end {
            let edge = if offset < whole { whole.min(end) } else { end };
            let count = (edge - offset).min(CHUNK_BYTES as u64) as usize;
            let chunk = &mut self.chunk[..count];
            content.read_exact(chunk)?;
            if offset < whole {
                write_data(&self.image, base + offset, chunk, &mut self.reserve)?;
            } else {
                let at = (offset - whole) as usize;
                tail[at..at + count].copy_from_slice(chunk);
            }
            offset += count as u64;
        }
        Ok(())
    }

    fn spool(&mut self, bytes: &[u8]) -> io::Result<u64> {
        let offset = self.spool_bytes;
        self.reserve.spend(&self.spool, bytes.len())?;
        self.spool.write_all_at(bytes, offset)?;
        self.spool_bytes += bytes.len() as u64;
        Ok(offset)
    }

    /// The last part of a file, from the spool.
    pub(super) fn tail(&self, data: &FileData) -> io::Result<Vec<u8>> {
        let Some(offset) = data.tail else { return Ok(Vec::new()) };
        let mut bytes = vec![0; (data.size % BLOCK_BYTES as u64) as usize];
        self.read(&self.spool, &mut bytes, offset)?;
        Ok(bytes)
    }

    /// Reads the image below where that is, `own` else.
    fn read(&self, own: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.under {
            Some(under) if offset < under.bytes() => under.read_exact_at(buffer, offset),
            _ => own.read_exact_at(buffer, offset),
        }
    }

    /// All of a file.
    pub fn content(&self, data: &FileData) -> io::Result<Vec<u8>> {
        let tail = self.tail(data)?;
        let start = u64::from(data.start_block) * BLOCK_BYTES as u64;
        let mut bytes = vec![0; data.size as usize - tail.len()];
        self.read(&self.image, &mut bytes, start)?;
        bytes.extend(tail);
        Ok(bytes)
    }

    /// Gives the blocks of a file back to the host; a file system that cannot
    /// punch holes keeps them.
    pub fn discard(&self, data: &FileData) {
        let bytes = match data.tail {
            Some(_) => data.size - data.size % BLOCK_BYTES as u64,
            None => data.size.next_multiple_of(BLOCK_BYTES as u64),
        };
        if bytes > 0 {
            let start = u64::from(data.start_block) * BLOCK_BYTES as u64;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.image, flags, start, bytes).ok();
        }
    }
}

/// Writes `bytes`, leaving holes where whole pieces of a block are zero.
fn write_data(image: &File, offset: u64, bytes: &[u8], reserve: &mut Reserve) -> io::Result<()> {
    let mut write = |run: std::ops::Range<usize>| {
        reserve.spend(image, run.len())?;
        image.write_all_at(&bytes[run.clone()], offset + run.start as u64)
    };
    let mut run = 0..0;
    for piece in bytes.chunks(BLOCK_BYTES) {
        if piece == &ZEROS[..piece.len()] {
            write(run.clone())?;
            run = run.end + piece.len()..run.end + piece.len();
        } else {
            run.end += piece.len();
        }
    }
    write(run)
}
