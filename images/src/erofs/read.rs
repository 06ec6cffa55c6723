//! Reading an image that was written here, as a base for another one or as a source of files.
//!
//! Only the forms that are written are read. Whoever wrote the file may have been taken over by
//! the image it read, so nothing in it is believed: every number is held against the file.

use std::collections::HashMap;
use std::io::{self, Read};

use super::device::Rootfs;
use super::format::{
    BLOCK_BITS, BLOCK_BYTES, COMPACT_BYTES, EXTENDED_BYTES, FLAT_INLINE, FLAT_PLAIN, MAGIC,
    SLOT_BYTES, SUPER_OFFSET,
};
use super::xattr;
use crate::error::{ImageError, Result};
use crate::limits::ImportLimits;
use crate::tar::Extent;
use crate::tree::{FileData, InodeId, Kind, Meta, Origin, Timestamp, Tree};

/// Bytes that are read of the file at once.
const WINDOW_BYTES: u64 = 256 << 10;
/// Bytes of one directory: as many names as an image may have entries.
const DIRECTORY_BYTES_MAX: u64 = 1 << 30;
const SYMLINK_BYTES_MAX: u64 = 4095;
const DIRENT_BYTES: usize = 12;

/// An image that is open for reading.
pub(crate) struct Reader<'a> {
    file: &'a Rootfs,
    bytes: u64,
    window: (u64, Vec<u8>),
    shape: Shape,
}

/// What the superblock says that is the same of all deltas over a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Shape {
    /// The block from which inodes are counted.
    pub meta_block: u32,
    pub epoch: Timestamp,
    pub root_nid: u16,
}

impl Shape {
    pub fn meta_offset(&self) -> u64 {
        u64::from(self.meta_block) * BLOCK_BYTES as u64
    }
}

/// One inode as it lies in the file.
struct Found {
    mode: u16,
    size: u64,
    start_block: u32,
    meta: Meta,
    /// Where the part after the last whole block is, if it lies at the inode.
    tail: Option<u64>,
    origin: Origin,
}

fn broken(why: &str) -> ImageError {
    ImageError::malformed("the image's file system", why)
}

impl<'a> Reader<'a> {
    pub fn new(file: &'a Rootfs) -> Result<Self> {
        let (bytes, window, shape) = (file.bytes(), (0, Vec::new()), Shape::default());
        let mut reader = Self { file, bytes, window, shape };
        let block = reader.take(SUPER_OFFSET as u64, 64)?;
        let (magic, bits) = (u32_at(&block, 0), block.get(12).copied());
        if magic != MAGIC || bits != Some(BLOCK_BITS) {
            return Err(broken("it does not begin as one"));
        }
        reader.shape = Shape {
            root_nid: u16_at(&block, 14),
            epoch: Timestamp { seconds: u64_at(&block, 24) as i64, nanos: u32_at(&block, 32) },
            meta_block: u32_at(&block, 40),
        };
        Ok(reader)
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// All that it holds. Where a file's last part lies at its inode, [`FileData::tail`] is the
    /// place in this file.
    pub fn tree(&mut self, limits: &ImportLimits) -> Result<Tree> {
        let mut tree = Tree::new(limits.depth_max);
        let root_nid = u64::from(self.shape.root_nid);
        let root = self.inode(root_nid)?;
        if root.mode & 0o170_000 != 0o040_000 {
            return Err(broken("its root is no directory"));
        }
        tree.set_root_meta(root.meta.clone());
        tree.set_origin(InodeId::ROOT, root.origin);
        let mut known: HashMap<u64, Option<InodeId>> = HashMap::from([(root_nid, None)]);
        let mut waiting = vec![(InodeId::ROOT, root)];
        while let Some((directory, found)) = waiting.pop() {
            for (name, nid) in self.names(&found)? {
                match known.get(&nid) {
                    Some(Some(inode)) => {
                        tree.link(directory, &name, *inode);
                        continue;
                    }
                    Some(None) => return Err(broken("a directory has two names")),
                    None => {}
                }
                if tree.len() as u64 > limits.entries_max {
                    let max = limits.entries_max;
                    return Err(ImageError::limit("the number of files", "entries_max", max));
                }
                let inode = self.inode(nid)?;
                let kind = self.kind(&inode)?;
                let is_directory = matches!(kind, Kind::Directory(_));
                let made = tree.insert(directory, &name, inode.meta.clone(), kind);
                tree.set_origin(made, inode.origin);
                known.insert(nid, (!is_directory).then_some(made));
                if is_directory {
                    waiting.push((made, inode));
                }
            }
        }
        tree.settle();
        Ok(tree)
    }

    fn kind(&mut self, inode: &Found) -> Result<Kind> {
        Ok(match inode.mode & 0o170_000 {
            0o040_000 => Kind::Directory(Default::default()),
            0o100_000 => {
                let Found { size, start_block, tail, .. } = *inode;
                let whole = if tail.is_some() { size - size % BLOCK_BYTES as u64 } else { size };
                let end = (u64::from(start_block) * BLOCK_BYTES as u64).checked_add(whole);
                if end.is_none_or(|end| end > self.bytes) {
                    return Err(broken("a file lies behind its end"));
                }
                Kind::File(FileData { size, start_block, tail })
            }
            0o120_000 if inode.size <= SYMLINK_BYTES_MAX => {
                Kind::Symlink(self.content(inode)?.into())
            }
            0o010_000 => Kind::Fifo,
            0o140_000 => Kind::Socket,
            _ => return Err(broken("an inode is of no kind that is written here")),
        })
    }

    fn inode(&mut self, nid: u64) -> Result<Found> {
        let offset = nid
            .checked_mul(SLOT_BYTES as u64)
            .and_then(|offset| offset.checked_add(self.shape.meta_offset()))
            .ok_or_else(|| broken("an inode lies behind its end"))?;
        let head = self.take(offset, COMPACT_BYTES)?;
        let format = u16_at(&head, 0);
        let is_extended = format & 1 == 1;
        let xattr_bytes = xattr::body_of(u16_at(&head, 2));
        let (mode, layout) = (u16_at(&head, 4), format >> 1);
        let bytes = if is_extended { EXTENDED_BYTES } else { COMPACT_BYTES };
        let head = self.take(offset, bytes + xattr_bytes)?;
        let xattrs = xattr::decode(&head[bytes..]).ok_or_else(|| broken("attributes are cut"))?;
        let (size, start_block, uid, gid, mtime) = match is_extended {
            false => (
                u64::from(u32_at(&head, 8)),
                u32_at(&head, 16),
                u32::from(u16_at(&head, 24)),
                u32::from(u16_at(&head, 26)),
                self.shape.epoch,
            ),
            true => {
                let seconds = u64_at(&head, 32) as i64;
                let mtime = Timestamp { seconds, nanos: u32_at(&head, 40) };
                (u64_at(&head, 8), u32_at(&head, 16), u32_at(&head, 24), u32_at(&head, 28), mtime)
            }
        };
        let tail = match layout {
            FLAT_PLAIN => None,
            FLAT_INLINE => Some(offset + (bytes + xattr_bytes) as u64),
            _ => return Err(broken("an inode has a form that is not written here")),
        };
        let meta = Meta { mode: mode & 0o7777, uid, gid, mtime, xattrs };
        let tail_bytes = tail.map_or(0, |_| (size % BLOCK_BYTES as u64) as usize);
        let room = (bytes + xattr_bytes + tail_bytes).next_multiple_of(SLOT_BYTES);
        let origin = Origin { nid, room, number: u32_at(&head, 20) };
        Ok(Found { mode, size, start_block, meta, tail, origin })
    }

    /// All of what an inode holds that is no file.
    fn content(&mut self, inode: &Found) -> Result<Vec<u8>> {
        if inode.size > DIRECTORY_BYTES_MAX {
            return Err(broken("a directory is too long"));
        }
        let tail_bytes = match inode.tail {
            Some(_) => inode.size % BLOCK_BYTES as u64,
            None => 0,
        };
        let start = u64::from(inode.start_block) * BLOCK_BYTES as u64;
        let mut content = self.take(start, (inode.size - tail_bytes) as usize)?;
        if let Some(tail) = inode.tail {
            content.extend(self.take(tail, tail_bytes as usize)?);
        }
        Ok(content)
    }

    /// The names in a directory, without the two dots, and the nids that they lead to.
    fn names(&mut self, directory: &Found) -> Result<Vec<(Vec<u8>, u64)>> {
        let content = self.content(directory)?;
        let mut names = Vec::new();
        for block in content.chunks(BLOCK_BYTES) {
            let first = block.get(..DIRENT_BYTES).map_or(0, |first| u16_at(first, 8));
            let count = usize::from(first) / DIRENT_BYTES;
            let entries = block.get(..count * DIRENT_BYTES).unwrap_or_default();
            let offsets: Vec<usize> = entries
                .chunks_exact(DIRENT_BYTES)
                .map(|entry| usize::from(u16_at(entry, 8)))
                .collect();
            for (at, entry) in entries.chunks_exact(DIRENT_BYTES).enumerate() {
                let end = offsets.get(at + 1).copied().unwrap_or(block.len());
                let name = block.get(offsets[at]..end);
                let name = name.ok_or_else(|| broken("a name lies outside its directory"))?;
                let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                match name {
                    b"." | b".." => {}
                    _ if name.is_empty() || name.contains(&b'/') => {
                        return Err(broken("a name is none"));
                    }
                    _ => names.push((name.to_vec(), u64_at(entry, 0))),
                }
            }
        }
        Ok(names)
    }

    /// `count` bytes at `offset`.
    fn take(&mut self, offset: u64, count: usize) -> Result<Vec<u8>> {
        let end = offset.checked_add(count as u64).filter(|end| *end <= self.bytes);
        let end = end.ok_or_else(|| broken("it is cut"))?;
        let (start, window) = &self.window;
        if offset < *start || end > start + window.len() as u64 {
            let wanted = (count as u64).max(WINDOW_BYTES).min(self.bytes - offset);
            let mut bytes = vec![0; wanted as usize];
            self.file
                .read_exact_at(&mut bytes, offset)
                .map_err(|error| ImageError::io("cannot read the image's file system", error))?;
            self.window = (offset, bytes);
        }
        let (start, window) = &self.window;
        let from = (offset - start) as usize;
        Ok(window[from..from + count].to_vec())
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |field| u16::from_le_bytes([field[0], field[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// The bytes of a file in an image, holes as they are.
pub(crate) struct Content<'a> {
    image: &'a Rootfs,
    data: FileData,
    extents: std::slice::Iter<'a, Extent>,
    now: Extent,
}

/// Where the data of a file are that lies in `image`: what is no hole.
pub(crate) fn extents(image: &Rootfs, data: &FileData) -> io::Result<Vec<Extent>> {
    let tail = match data.tail {
        Some(_) => data.size % BLOCK_BYTES as u64,
        None => 0,
    };
    let (start, whole) = (u64::from(data.start_block) * BLOCK_BYTES as u64, data.size - tail);
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = start;
    while let Some((from, to)) = image.data(at, start + whole)? {
        extents.push(Extent { offset: from - start, length: to - from });
        at = to;
    }
    match (tail, extents.last_mut()) {
        (0, _) => {}
        (tail, Some(last)) if last.offset + last.length == whole => last.length += tail,
        (tail, _) => extents.push(Extent { offset: whole, length: tail }),
    }
    Ok(extents)
}

impl<'a> Content<'a> {
    /// What `extents` say of the file `data` in `image`, one after the other.
    pub fn new(image: &'a Rootfs, data: &FileData, extents: &'a [Extent]) -> Self {
        let none = Extent { offset: 0, length: 0 };
        Self { image, data: *data, extents: extents.iter(), now: none }
    }
}

impl Read for Content<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.now.length == 0 {
            let Some(next) = self.extents.next() else { return Ok(0) };
            self.now = *next;
        }
        let whole = match self.data.tail {
            Some(_) => self.data.size - self.data.size % BLOCK_BYTES as u64,
            None => self.data.size,
        };
        let at = self.now.offset;
        let (place, most) = match self.data.tail {
            Some(tail) if at >= whole => (tail + (at - whole), self.now.length),
            _ => {
                let start = u64::from(self.data.start_block) * BLOCK_BYTES as u64;
                (start + at, self.now.length.min(whole - at))
            }
        };
        let count = buffer.len().min(usize::try_from(most).unwrap_or(usize::MAX));
        let count = self.image.read_at(&mut buffer[..count], place)?;
        if count == 0 && !buffer.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.now.offset += count as u64;
        self.now.length -= count as u64;
        Ok(count)
    }
}
