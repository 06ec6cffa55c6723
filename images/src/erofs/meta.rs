//! The second half of an image: directories, inodes, superblock.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt;

use super::data::DataArea;
use super::directory::{self, Target};
use super::format::{BLOCK_BYTES, COMPACT_BYTES, DiskInode, EXTENDED_BYTES, SLOT_BYTES, Super};
use super::slots::Slots;
use super::xattr;
use crate::tree::{InodeId, Kind, Timestamp, Tree};

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

/// Where an inode goes.
#[derive(Clone, Copy)]
struct Placed {
    nid: u64,
    number: u32,
    parent: InodeId,
    compact: bool,
    inline: bool,
    /// Block of the directory or of a symlink that has no room inline.
    start_block: u32,
}

struct Writer<'a> {
    tree: &'a Tree,
    area: &'a mut DataArea,
    epoch: Timestamp,
    slots: Slots,
    order: Vec<InodeId>,
    placed: Vec<Option<Placed>>,
}

/// Completes the image; its uuid is the beginning of `uuid`. Returns the
/// length of the image in bytes.
pub(crate) fn finish(tree: &Tree, area: &mut DataArea, uuid: [u8; 16]) -> io::Result<u64> {
    let epoch = commonest_mtime(tree);
    let placed = vec![None; tree.len()];
    let mut writer = Writer { tree, area, epoch, slots: Slots::new(), order: Vec::new(), placed };
    writer.place_all()?;
    writer.write_all(uuid)
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
fn reachable(tree: &Tree) -> Vec<InodeId> {
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

impl Writer<'_> {
    fn place_all(&mut self) -> io::Result<()> {
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
        let number = self.order.len() as u32 + 1;
        let mut placed =
            Placed { nid: 0, number, parent, compact: true, inline: false, start_block: 0 };
        let xattr_bytes = xattr::body_bytes(&self.tree.inode(id).meta.xattrs);
        let size = self.size(id);
        placed.compact = self.disk_inode(id, &placed).is_compact(self.epoch);
        let head = if placed.compact { COMPACT_BYTES } else { EXTENDED_BYTES } + xattr_bytes;
        let tail = (size % BLOCK_BYTES as u64) as usize;
        placed.inline = match &self.tree.inode(id).kind {
            Kind::File(data) => data.tail.is_some(),
            _ => tail > 0 && head + tail <= BLOCK_BYTES,
        };
        if matches!(self.tree.inode(id).kind, Kind::Directory(_) | Kind::Symlink(_)) {
            let whole = if placed.inline { size - tail as u64 } else { size };
            let block = self.area.take_blocks(whole.div_ceil(BLOCK_BYTES as u64));
            placed.start_block = u32::try_from(block).map_err(io::Error::other)?;
        }
        placed.nid = self.slots.place(head + if placed.inline { tail } else { 0 });
        self.placed[id.index()] = Some(placed);
        self.order.push(id);
        Ok(())
    }

    fn size(&self, id: InodeId) -> u64 {
        match &self.tree.inode(id).kind {
            Kind::File(data) => data.size,
            Kind::Symlink(target) => target.len() as u64,
            Kind::Directory(_) => directory::layout(self.names(id).into_keys()).1,
            Kind::Fifo | Kind::Socket => 0,
        }
    }

    /// All names of a directory, the two dots included, which sort like any.
    fn names(&self, id: InodeId) -> BTreeMap<&[u8], InodeId> {
        let parent = self.placed[id.index()].map_or(id, |placed| placed.parent);
        let children = self.tree.children(id).into_iter().flatten();
        let dots = [(&b"."[..], id), (&b".."[..], parent)];
        children.map(|(name, entry)| (&**name, entry.inode)).chain(dots).collect()
    }

    fn links(&self, id: InodeId) -> u32 {
        let inode = self.tree.inode(id);
        let Some(children) = self.tree.children(id) else { return inode.links };
        let below = children.values().filter(|entry| self.tree.inode(entry.inode).is_directory());
        2 + below.count() as u32
    }

    fn disk_inode(&self, id: InodeId, placed: &Placed) -> DiskInode {
        let inode = self.tree.inode(id);
        let start_block = match &inode.kind {
            Kind::File(data) => data.start_block,
            _ => placed.start_block,
        };
        DiskInode {
            mode: types(&inode.kind).0 | inode.meta.mode,
            links: self.links(id),
            size: self.size(id),
            start_block,
            inline: placed.inline,
            xattr_bytes: xattr::body_bytes(&inode.meta.xattrs),
            number: placed.number,
            uid: inode.meta.uid,
            gid: inode.meta.gid,
            mtime: inode.meta.mtime,
        }
    }

    fn write_all(mut self, uuid: [u8; 16]) -> io::Result<u64> {
        let meta_block = self.area.take_blocks(self.slots.blocks());
        let narrow = |value: u64| u32::try_from(value).map_err(io::Error::other);
        let blocks = self.area.next_block();
        let root = self.nid(InodeId::ROOT);
        let superblock = Super {
            root_nid: u16::try_from(root).map_err(io::Error::other)?,
            inodes: self.order.len() as u64,
            epoch: self.epoch,
            blocks: narrow(blocks)?,
            meta_block: narrow(meta_block)?,
            uuid,
        };
        self.area.image().set_len(blocks * BLOCK_BYTES as u64)?;
        for id in std::mem::take(&mut self.order) {
            self.write_inode(id, meta_block * BLOCK_BYTES as u64)?;
        }
        self.area.image().write_all_at(&superblock.encode(), 0)?;
        Ok(blocks * BLOCK_BYTES as u64)
    }

    fn nid(&self, id: InodeId) -> u64 {
        self.placed[id.index()].map_or(0, |placed| placed.nid)
    }

    fn write_inode(&mut self, id: InodeId, meta_offset: u64) -> io::Result<()> {
        let Some(placed) = self.placed[id.index()] else { return Ok(()) };
        let mut record = self.disk_inode(id, &placed).encode(placed.compact);
        xattr::encode(&self.tree.inode(id).meta.xattrs, &mut record);
        let content = self.content(id)?;
        let whole =
            if placed.inline { content.len() - content.len() % BLOCK_BYTES } else { content.len() };
        let (blocks, tail) = content.split_at(whole);
        self.area
            .image()
            .write_all_at(blocks, u64::from(placed.start_block) * BLOCK_BYTES as u64)?;
        record.extend(tail);
        self.area.image().write_all_at(&record, meta_offset + placed.nid * SLOT_BYTES as u64)
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
        let target = |id| (self.nid(id), types(&self.tree.inode(id).kind).1);
        self.names(id).into_iter().map(|(name, id)| (name, target(id))).collect()
    }
}
