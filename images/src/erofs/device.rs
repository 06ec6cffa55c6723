//! The file system of an image as it lies in the store: one file, or one and deltas over it, each of
//! which has what a step has changed.
//!
//! ```text
//! base     | super | data ............ | metadata ............ |
//! delta 1  | super |                     |*| |*|               | data | metadata | table
//! delta 2  | super |                         |*|               |                 | data | ...
//! what a guest has: of each block the uppermost
//! ```
//! A delta is as sparse as it looks: its blocks are at the same place in the file as in the whole,
//! and there is nothing where the files below it show. It has a superblock, blocks of metadata in
//! which an inode has changed (`*`), and behind all that is below new data and new inodes. So all
//! that reads an image (the kernel of a guest, [`super::Reader`]) finds one ordinary file system.
//! [`super::delta`] writes them.
//!
//! The beginning of a delta's superblock block, which erofs leaves free, says what it is over.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::format::BLOCK_BYTES;
use crate::error::{ImageError, Result};

const BLOCK: u64 = BLOCK_BYTES as u64;
const MAGIC: &[u8; 8] = b"EXODELTA";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 32;
/// Blocks that one delta may have changed: more than the metadata of the largest image has.
const CHANGED_MAX: u32 = 1 << 20;

fn broken(why: &str) -> ImageError {
    ImageError::malformed("the image's file system", why)
}

/// What a delta says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    /// Blocks of all that is below it.
    pub below: u64,
    /// The same with its own.
    pub blocks: u64,
    /// Blocks below that show as it has them, in their order.
    pub changed: Vec<u32>,
}

impl Head {
    /// The bytes that it begins with, and those behind its last block.
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let mut head = MAGIC.to_vec();
        head.extend(VERSION.to_le_bytes());
        head.extend((self.changed.len() as u32).to_le_bytes());
        head.extend(self.below.to_le_bytes());
        head.extend(self.blocks.to_le_bytes());
        (head, self.changed.iter().flat_map(|block| block.to_le_bytes()).collect())
    }

    /// That of `file`, which is over `below` bytes. Whoever wrote it is not believed.
    fn read(file: &File, below: u64) -> Result<Self> {
        let failed = |error| ImageError::io("cannot read the image's file system", error);
        let mut head = [0; HEAD_BYTES];
        file.read_exact_at(&mut head, 0).map_err(failed)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
        let long = |at| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if !head.starts_with(MAGIC) || word(8) != VERSION {
            return Err(broken("a delta does not begin as one"));
        }
        let (count, own_below, blocks) = (word(12), long(16), long(24));
        let bytes = file.metadata().map_err(failed)?.len();
        let wanted =
            blocks.checked_mul(BLOCK).and_then(|end| end.checked_add(u64::from(count) * 4));
        let is_over = own_below.checked_mul(BLOCK) == Some(below) && own_below <= blocks;
        if count > CHANGED_MAX || wanted != Some(bytes) || !is_over {
            return Err(broken("a delta is over another file system"));
        }
        let mut table = vec![0; count as usize * 4];
        file.read_exact_at(&mut table, blocks * BLOCK).map_err(failed)?;
        let changed = table.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]);
        let changed: Vec<u32> = changed.map(u32::from_le_bytes).collect();
        let is_sorted = changed.windows(2).all(|pair| pair[0] < pair[1]);
        let is_within = changed.iter().all(|block| *block > 0 && u64::from(*block) < own_below);
        match is_sorted && is_within {
            true => Ok(Self { below: own_below, blocks, changed }),
            false => Err(broken("a delta has blocks where there are none")),
        }
    }

    /// Where it shows, in bytes: from, to.
    fn ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges = vec![(0, BLOCK)];
        let blocks = self.changed.iter().map(|block| u64::from(*block)..u64::from(*block) + 1);
        for own in
            blocks.chain(std::iter::once(self.below..self.blocks)).filter(|own| !own.is_empty())
        {
            let (from, to) = (own.start * BLOCK, own.end * BLOCK);
            match ranges.last_mut() {
                Some(last) if last.1 == from => last.1 = to,
                _ => ranges.push((from, to)),
            }
        }
        ranges
    }
}

/// What shows from `start` on, up to the next piece: the bytes of a file at the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// In bytes.
    pub start: u64,
    /// Which of the files.
    pub file: usize,
}

/// The files of an image's file system, the lowest first.
#[derive(Debug)]
pub struct Rootfs {
    files: Vec<File>,
    pieces: Vec<Piece>,
    bytes: u64,
    /// What they are called in the store, if they are of one.
    pub(crate) names: Vec<String>,
}

impl Rootfs {
    /// The most files of one. Each is a descriptor of whoever has the image.
    pub const FILES_MAX: usize = 32;

    /// The file system that `files` make, the lowest first.
    ///
    /// # Errors
    /// They are not deltas one over the other, or cannot be read.
    pub fn of(files: Vec<File>) -> Result<Self> {
        let failed = |error| ImageError::io("cannot read the image's file system", error);
        let Some((base, deltas)) = files.split_first() else {
            return Err(broken("it has no file"));
        };
        if files.len() > Self::FILES_MAX {
            return Err(broken("it has too many files"));
        }
        let mut bytes = base.metadata().map_err(failed)?.len();
        let mut pieces = BTreeMap::from([(0, 0)]);
        for (at, delta) in deltas.iter().enumerate() {
            let head = Head::read(delta, bytes)?;
            bytes = head.blocks * BLOCK;
            for (from, to) in head.ranges() {
                cover(&mut pieces, from, to, at + 1, bytes);
            }
        }
        let pieces = pieces.into_iter().map(|(start, file)| Piece { start, file }).collect();
        Ok(Self { files, pieces, bytes, names: Vec::new() })
    }

    /// In bytes, as a guest sees it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The file that is this image's alone, whose lock is that of the image.
    pub fn own(&self) -> Option<&File> {
        self.files.last()
    }

    /// The files, and what shows where.
    pub fn into_parts(self) -> (Vec<File>, Vec<Piece>, u64) {
        (self.files, self.pieces, self.bytes)
    }

    /// The same files once more.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn try_clone(&self) -> Result<Self> {
        let files = self.files.iter().map(File::try_clone).collect::<io::Result<_>>();
        let files = files.map_err(|error| ImageError::io("cannot share an image", error))?;
        let Self { pieces, bytes, names, .. } = self;
        Ok(Self { files, pieces: pieces.clone(), bytes: *bytes, names: names.clone() })
    }

    /// What the files take on their disk.
    pub(crate) fn disk_bytes(&self) -> io::Result<u64> {
        self.files.iter().map(|file| Ok(file.metadata()?.blocks() * 512)).sum()
    }

    /// The file that shows at `at`, and where its piece ends.
    fn at(&self, at: u64) -> (&File, u64) {
        let next = self.pieces.partition_point(|piece| piece.start <= at);
        let end = self.pieces.get(next).map_or(self.bytes, |piece| piece.start);
        // The first piece begins at 0.
        (&self.files[self.pieces[next - 1].file], end)
    }

    pub(crate) fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        if at >= self.bytes {
            return Ok(0);
        }
        let (file, end) = self.at(at);
        let count = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
        file.read_at(&mut buffer[..count], at)
    }

    pub(crate) fn read_exact_at(&self, mut buffer: &mut [u8], mut at: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.read_at(buffer, at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    buffer = &mut buffer[count..];
                    at += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Where the next bytes are from `at` on that are no hole, and how far, up to `end`.
    pub(super) fn data(&self, at: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
        let Some(from) = self.next_data(at, end)? else { return Ok(None) };
        let mut to = from;
        while to < end {
            let (file, piece_end) = self.at(to);
            let hole = seek(file, SeekFrom::Hole(to))?;
            if hole < piece_end {
                to = hole;
                break;
            }
            to = piece_end;
            if self.next_data(to, end)? != Some(to) {
                break;
            }
        }
        Ok(Some((from, to.min(end))))
    }

    fn next_data(&self, mut at: u64, end: u64) -> io::Result<Option<u64>> {
        let end = end.min(self.bytes);
        while at < end {
            let (file, piece_end) = self.at(at);
            match seek(file, SeekFrom::Data(at)) {
                Ok(from) if from < piece_end.min(end) => return Ok(Some(from)),
                Ok(_) | Err(Errno::NXIO) => at = piece_end,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}

/// Has `file` show from `from` to `to`, of `bytes` in all.
fn cover(pieces: &mut BTreeMap<u64, usize>, from: u64, to: u64, file: usize, bytes: u64) {
    let after = pieces.range(..=to).next_back().map(|(_, file)| *file);
    let covered: Vec<u64> = pieces.range(from..to).map(|(start, _)| *start).collect();
    for start in covered {
        pieces.remove(&start);
    }
    pieces.insert(from, file);
    if let Some(after) = after.filter(|_| to < bytes) {
        pieces.insert(to, after);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A delta whose blocks are all `byte`.
    fn delta(head: &Head, byte: u8) -> File {
        let file = tempfile::tempfile().unwrap();
        let (begin, end) = head.encode();
        for (from, to) in head.ranges() {
            file.write_all_at(&vec![byte; (to - from) as usize], from).unwrap();
        }
        file.write_all_at(&begin, 0).unwrap();
        file.set_len(head.blocks * BLOCK).unwrap();
        file.write_all_at(&end, head.blocks * BLOCK).unwrap();
        file
    }

    fn base(blocks: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(blocks * BLOCK).unwrap();
        file
    }

    #[test]
    fn the_uppermost_file_shows() {
        let first = Head { below: 6, blocks: 8, changed: vec![2, 3, 5] };
        let second = Head { below: 8, blocks: 9, changed: vec![3, 7] };
        let rootfs = Rootfs::of(vec![base(6), delta(&first, b'a'), delta(&second, b'b')]).unwrap();
        assert_eq!(rootfs.bytes(), 9 * BLOCK);
        let mut all = vec![0; 9 * BLOCK_BYTES];
        rootfs.read_exact_at(&mut all, 0).unwrap();
        let shown: Vec<u8> = all.chunks(BLOCK_BYTES).map(|block| block[100]).collect();
        assert_eq!(shown, *b"b\0ab\0aabb");
        // Data and holes are seen across the files.
        assert_eq!(rootfs.data(BLOCK, 9 * BLOCK).unwrap(), Some((2 * BLOCK, 4 * BLOCK)));
        assert_eq!(rootfs.data(4 * BLOCK, 9 * BLOCK).unwrap(), Some((5 * BLOCK, 9 * BLOCK)));
        assert_eq!(rootfs.data(BLOCK, 2 * BLOCK).unwrap(), None);
        assert!(rootfs.read_exact_at(&mut [0; 2], 9 * BLOCK - 1).is_err());
    }

    #[test]
    fn what_is_no_delta_of_it_is_refused() {
        let good = Head { below: 4, blocks: 6, changed: vec![1, 3] };
        Rootfs::of(vec![base(4), delta(&good, 1)]).unwrap();
        assert!(Rootfs::of(Vec::new()).is_err());
        assert!(Rootfs::of(vec![base(5), delta(&good, 1)]).is_err());
        assert!(Rootfs::of(vec![base(4), base(6)]).is_err());
        let many = (0..=Rootfs::FILES_MAX).map(|_| base(1)).collect();
        assert!(Rootfs::of(many).is_err());
        for changed in [vec![3, 1], vec![1, 1], vec![0], vec![4]] {
            let bad = Head { changed, ..good.clone() };
            assert!(Rootfs::of(vec![base(4), delta(&bad, 1)]).is_err(), "{bad:?}");
        }
        let cut = delta(&good, 1);
        cut.set_len(6 * BLOCK).unwrap();
        assert!(Rootfs::of(vec![base(4), cut]).is_err());
    }
}
