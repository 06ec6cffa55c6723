//! The second half of an image: directories, inodes, superblock.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt;

use super::data::DataArea;
use super::directory::{self, Target};
use super::format::{BLOCK_BYTES, COMPACT_BYTES, DiskInode, EXTENDED_BYTES, SLOT_BYTES, Super};
use super::read::Shape;
use super::slots::Slots;
use super::xattr;
use crate::tree::{InodeId, Kind, Origin, Timestamp, Tree};

/// Type bits of `mode` and the FT_* number of each kind.
fn types(kind: &Kind) -> (u16, u8) {
    match kind {
        Kind::File(_) => (0o100000, 1),
        Kind::Directory(_) => (0o040000, 2),
        Kind::Fifo => (0o010000, 5),
        Kind::Socket => (0o140000, 6),
        Kind::Symlink(_) => (0o120000, 7),
    }
}

/// What becomes of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is written where there is room.
    New,
    /// It is written over what it was in the image below.
    InPlace,
    /// It stays in the image below as it is.
    Kept,
}

/// Where an inode goes.
#[derive(Clone, Copy)]
struct Placed {
    /// Among the new ones if it is new.
    nid: u64,
    number: u32,
    parent: InodeId,
    fate: Fate,
    compact: bool,
    inline: bool,
    /// Block of the directory or of a symlink that has no room inline.
    start_block: u32,
}

pub(super) struct Writer<'a> {
    tree: &'a Tree,
    pub area: &'a mut DataArea,
    pub shape: Shape,
    /// By inode; none where all are new.
    fates: Vec<Fate>,
    slots: Slots,
    order: Vec<InodeId>,
    placed: Vec<Option<Placed>>,
    next_number: u32,
    /// The nid of the first new one.
    shift: u64,
    /// Blocks of the image below that are changed.
    pub changed: BTreeMap<u64, Vec<u8>>,
}

/// Completes the image; its uuid is the beginning of `uuid`. Returns the
/// length of the image in bytes.
pub(crate) fn finish(tree: &Tree, area: &mut DataArea, uuid: [u8; 16]) -> io::Result<u64> {
    area.fetch(tree.files())?;
    let shape = Shape { epoch: commonest_mtime(tree), ..Shape::default() };
    let mut writer = Writer::new(tree, area, shape, Vec::new(), 1);
    writer.place_all()?;
    let meta_block = writer.take_meta_blocks();
    writer.shape.meta_block = narrow(meta_block)?;
    let root = writer.nid(InodeId::ROOT);
    writer.shape.root_nid = u16::try_from(root).map_err(io::Error::other)?;
    let blocks = writer.area.next_block();
    writer.area.image().set_len(blocks * BLOCK_BYTES as u64)?;
    writer.write_inodes()?;
    let superblock = writer.superblock(uuid)?;
    writer.area.image().write_all_at(&superblock.encode(), 0)?;
    Ok(blocks * BLOCK_BYTES as u64)
}

fn narrow(value: u64) -> io::Result<u32> {
    u32::try_from(value).map_err(io::Error::other)
}

/// The time that most inodes have; they can use the short form.
fn commonest_mtime(tree: &Tree) -> Timestamp {
    let mut counts: BTreeMap<Timestamp, usize> = BTreeMap::new();
    for index in reachable(tree) {
        *counts.entry(tree.inode(index).meta.mtime).or_default() += 1;
    }
    counts
        .into_iter()
        .rev()
        .max_by_key(|(_, count)| *count)
        .map(|(mtime, _)| mtime)
        .unwrap_or_default()
}

/// Every name's inode, in the order of the tree; the root first.
pub(super) fn reachable(tree: &Tree) -> Vec<InodeId> {
    let mut found = vec![InodeId::ROOT];
    let mut next = 0;
    while let Some(id) = found.get(next).copied() {
        next += 1;
        if let Some(children) = tree.children(id) {
            found.extend(children.values().map(|entry| entry.inode));
        }
    }
    found
}

/// The inode as it lies in the file, but for where its data and its name are.
pub(super) fn disk_inode(tree: &Tree, id: InodeId, size: u64) -> DiskInode {
    let inode = tree.inode(id);
    let below = tree.children(id).into_iter().flatten();
    let below = below.filter(|(_, entry)| tree.inode(entry.inode).is_directory());
    DiskInode {
        mode: types(&inode.kind).0 | inode.meta.mode,
        links: match inode.is_directory() {
            true => 2 + below.count() as u32,
            false => inode.links,
        },
        size,
        start_block: 0,
        inline: false,
        xattr_bytes: xattr::body_bytes(&inode.meta.xattrs),
        number: 0,
        uid: inode.meta.uid,
        gid: inode.meta.gid,
        mtime: inode.meta.mtime,
    }
}

/// Bytes of what an inode is called to its reader: all but what lies at it.
pub(super) fn size_of(tree: &Tree, id: InodeId) -> u64 {
    match &tree.inode(id).kind {
        Kind::File(data) => data.size,
        Kind::Symlink(target) => target.len() as u64,
        // Where the two dots lead makes no difference.
        Kind::Directory(_) => directory::layout(names(tree, id, id).into_keys()).1,
        Kind::Fifo | Kind::Socket => 0,
    }
}

/// All names of a directory, the two dots included, which sort like any.
fn names(tree: &Tree, id: InodeId, parent: InodeId) -> BTreeMap<&[u8], InodeId> {
    let children = tree.children(id).into_iter().flatten();
    let dots = [(&b"."[..], id), (&b".."[..], parent)];
    children.map(|(name, entry)| (&**name, entry.inode)).chain(dots).collect()
}

/// Bytes of an inode and its attributes.
pub(super) fn head_bytes(inode: &DiskInode, epoch: Timestamp) -> usize {
    let own = if inode.is_compact(epoch) { COMPACT_BYTES } else { EXTENDED_BYTES };
    own + inode.xattr_bytes
}

impl<'a> Writer<'a> {
    pub fn new(
        tree: &'a Tree,
        area: &'a mut DataArea,
        shape: Shape,
        fates: Vec<Fate>,
        next_number: u32,
    ) -> Self {
        let placed = vec![None; tree.len()];
        Self {
            tree,
            area,
            shape,
            fates,
            slots: Slots::new(),
            order: Vec::new(),
            placed,
            next_number,
            shift: 0,
            changed: BTreeMap::new(),
        }
    }

    pub fn place_all(&mut self) -> io::Result<()> {
        self.place(InodeId::ROOT, InodeId::ROOT)?;
        let mut next = 0;
        while let Some(id) = self.order.get(next).copied() {
            next += 1;
            let Some(children) = self.tree.children(id) else { continue };
            for entry in children.values() {
                if self.placed[entry.inode.index()].is_none() {
                    self.place(entry.inode, id)?;
                }
            }
        }
        Ok(())
    }

    fn place(&mut self, id: InodeId, parent: InodeId) -> io::Result<()> {
        let inode = self.tree.inode(id);
        let fate = self.fates.get(id.index()).copied().unwrap_or(Fate::New);
        let origin = inode.origin.filter(|_| fate != Fate::New);
        let mut placed = Placed {
            nid: origin.map_or(0, |origin| origin.nid),
            number: origin.map_or(self.next_number, |origin| origin.number),
            parent,
            fate,
            compact: true,
            inline: false,
            start_block: 0,
        };
        self.next_number += u32::from(origin.is_none());
        if fate != Fate::Kept {
            let size = size_of(self.tree, id);
            let found = disk_inode(self.tree, id, size);
            let tail = (size % BLOCK_BYTES as u64) as usize;
            placed.compact = found.is_compact(self.shape.epoch);
            if let Some(origin) = &origin {
                // The long form where it has room: whoever changes it next has no less.
                let at_it = if matches!(inode.kind, Kind::File(_)) { tail } else { 0 };
                let long = EXTENDED_BYTES + found.xattr_bytes + at_it;
                placed.compact &= !fits(origin, long);
            }
            let own = if placed.compact { COMPACT_BYTES } else { EXTENDED_BYTES };
            let head = own + found.xattr_bytes;
            let has_room = match origin {
                None => head + tail <= BLOCK_BYTES,
                Some(origin) => fits(&origin, head + tail),
            };
            placed.inline = match &inode.kind {
                Kind::File(data) => data.tail.is_some(),
                _ => tail > 0 && has_room,
            };
            if matches!(inode.kind, Kind::Directory(_) | Kind::Symlink(_)) {
                let whole = if placed.inline { size - tail as u64 } else { size };
                let block = self.area.take_blocks(whole.div_ceil(BLOCK_BYTES as u64));
                placed.start_block = narrow(block)?;
            }
            if origin.is_none() {
                placed.nid = self.slots.place(head + if placed.inline { tail } else { 0 });
            }
        }
        self.placed[id.index()] = Some(placed);
        self.order.push(id);
        Ok(())
    }

    /// Makes room for the new inodes, which are counted from its first block.
    pub fn take_meta_blocks(&mut self) -> u64 {
        self.area.take_blocks(self.slots.blocks())
    }

    /// The new inodes begin at this block.
    pub fn begin_at(&mut self, block: u64) {
        let slots = (BLOCK_BYTES / SLOT_BYTES) as u64;
        self.shift = (block - u64::from(self.shape.meta_block)) * slots;
    }

    pub fn superblock(&self, uuid: [u8; 16]) -> io::Result<Super> {
        Ok(Super {
            root_nid: self.shape.root_nid,
            inodes: self.order.len() as u64,
            epoch: self.shape.epoch,
            blocks: narrow(self.area.next_block())?,
            meta_block: self.shape.meta_block,
            uuid,
        })
    }

    pub fn write_inodes(&mut self) -> io::Result<()> {
        std::mem::take(&mut self.order).into_iter().try_for_each(|id| self.write_inode(id))
    }

    fn nid(&self, id: InodeId) -> u64 {
        self.placed[id.index()].map_or(0, |placed| match placed.fate {
            Fate::New => placed.nid + self.shift,
            Fate::InPlace | Fate::Kept => placed.nid,
        })
    }

    fn write_inode(&mut self, id: InodeId) -> io::Result<()> {
        let Some(placed) = self.placed[id.index()] else { return Ok(()) };
        if placed.fate == Fate::Kept {
            return Ok(());
        }
        let mut found = disk_inode(self.tree, id, size_of(self.tree, id));
        (found.inline, found.number) = (placed.inline, placed.number);
        found.start_block = match &self.tree.inode(id).kind {
            Kind::File(data) => data.start_block,
            _ => placed.start_block,
        };
        let mut record = found.encode(placed.compact);
        xattr::encode(&self.tree.inode(id).meta.xattrs, &mut record);
        let content = self.content(id)?;
        let whole =
            if placed.inline { content.len() - content.len() % BLOCK_BYTES } else { content.len() };
        let (blocks, tail) = content.split_at(whole);
        self.area
            .image()
            .write_all_at(blocks, u64::from(placed.start_block) * BLOCK_BYTES as u64)?;
        record.extend(tail);
        let at = self.shape.meta_offset() + self.nid(id) * SLOT_BYTES as u64;
        match placed.fate {
            Fate::InPlace => self.change(&record, at),
            _ => self.area.image().write_all_at(&record, at),
        }
    }

    /// Writes over what the image below has at `at`.
    fn change(&mut self, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            let (block, within) = (at / BLOCK_BYTES as u64, (at % BLOCK_BYTES as u64) as usize);
            let count = bytes.len().min(BLOCK_BYTES - within);
            if !self.changed.contains_key(&block) {
                let mut before = vec![0; BLOCK_BYTES];
                let under = self.area.under().ok_or(io::ErrorKind::NotFound)?;
                under.read_exact_at(&mut before, block * BLOCK_BYTES as u64)?;
                self.changed.insert(block, before);
            }
            let place = self.changed.get_mut(&block).ok_or(io::ErrorKind::NotFound)?;
            place[within..within + count].copy_from_slice(&bytes[..count]);
            (bytes, at) = (&bytes[count..], at + count as u64);
        }
        Ok(())
    }

    /// What is still to be written of an inode: of a file, only its tail.
    fn content(&self, id: InodeId) -> io::Result<Vec<u8>> {
        match &self.tree.inode(id).kind {
            Kind::File(data) => self.area.tail(data),
            Kind::Symlink(target) => Ok(target.to_vec()),
            Kind::Directory(_) => Ok(directory::encode(&self.targets(id))),
            Kind::Fifo | Kind::Socket => Ok(Vec::new()),
        }
    }

    fn targets(&self, id: InodeId) -> BTreeMap<&[u8], Target> {
        let parent = self.placed[id.index()].map_or(id, |placed| placed.parent);
        let target = |id| (self.nid(id), types(&self.tree.inode(id).kind).1);
        names(self.tree, id, parent).into_iter().map(|(name, id)| (name, target(id))).collect()
    }
}

/// Whether so many bytes have room where an inode lies, and what lies at it is in its block.
pub(super) fn fits(origin: &Origin, bytes: usize) -> bool {
    let within = (origin.nid % (BLOCK_BYTES / SLOT_BYTES) as u64) as usize * SLOT_BYTES;
    bytes <= origin.room && within + bytes <= BLOCK_BYTES
}
