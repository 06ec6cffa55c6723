//! Writing what has changed of an image as a file over its files ([`super::device`]).
//!
//! An inode keeps its place, and with it its number and the names that lead to it, wherever it has
//! room there; what has not is a new one, and the directories that name it change. What no inode of
//! the tree names any more stays in the files below, and nobody finds it.

use std::io;
use std::os::unix::fs::FileExt;

use super::data::DataArea;
use super::device::Head;
use super::format::BLOCK_BYTES;
use super::meta::{Fate, Writer, disk_inode, fits, head_bytes, reachable, size_of};
use super::read::Shape;
use crate::tree::{InodeId, Kind, Timestamp, Tree};

/// Completes a delta over the image that `area` is behind, of which `tree` was read and `shape`.
/// `None` where it cannot be one: the root has no room where it is.
pub(crate) fn finish(
    tree: &Tree,
    area: &mut DataArea,
    shape: Shape,
    uuid: [u8; 16],
) -> io::Result<Option<u64>> {
    let Some(below) = area.under().map(|under| under.bytes() / BLOCK_BYTES as u64) else {
        return Ok(None);
    };
    let Some(fates) = fates(tree, shape.epoch) else { return Ok(None) };
    let numbers = reachable(tree).into_iter().filter_map(|id| tree.inode(id).origin);
    let last = numbers.map(|origin| origin.number).max().unwrap_or(0);
    let mut writer = Writer::new(tree, area, shape, fates, last.wrapping_add(1));
    writer.place_all()?;
    let first = writer.take_meta_blocks();
    writer.begin_at(first);
    let blocks = writer.area.next_block();
    writer.area.image().set_len(blocks * BLOCK_BYTES as u64)?;
    let mut superblock = writer.superblock(uuid)?.encode();
    writer.write_inodes()?;
    let changed = std::mem::take(&mut writer.changed);
    for (block, bytes) in &changed {
        writer.area.image().write_all_at(bytes, block * BLOCK_BYTES as u64)?;
    }
    let changed = changed.into_keys().map(u32::try_from).collect::<Result<_, _>>();
    let head = Head { below, blocks, changed: changed.map_err(io::Error::other)? };
    let (begin, end) = head.encode();
    superblock[..begin.len()].copy_from_slice(&begin);
    writer.area.image().write_all_at(&superblock, 0)?;
    writer.area.image().write_all_at(&end, blocks * BLOCK_BYTES as u64)?;
    Ok(Some(blocks * BLOCK_BYTES as u64))
}

/// What becomes of each inode; `None` where the root would have to move.
fn fates(tree: &Tree, epoch: Timestamp) -> Option<Vec<Fate>> {
    let all = reachable(tree);
    let mut fates = vec![Fate::Kept; tree.len()];
    let rewritten = |id: InodeId| {
        let inode = tree.inode(id);
        let Some(origin) = inode.origin else { return Fate::New };
        let found = disk_inode(tree, id, size_of(tree, id));
        let tail = match &inode.kind {
            Kind::File(data) if data.tail.is_some() => (data.size % BLOCK_BYTES as u64) as usize,
            _ => 0,
        };
        let bytes = head_bytes(&found, epoch) + tail;
        // Without a tail it may go on in the next block.
        let has_room = if tail > 0 { fits(&origin, bytes) } else { bytes <= origin.room };
        if has_room { Fate::InPlace } else { Fate::New }
    };
    for id in &all {
        let inode = tree.inode(*id);
        if inode.origin.is_none() || inode.changed {
            fates[id.index()] = rewritten(*id);
        }
    }
    // A directory changes with the places of what it names, and of the one that it is in.
    let has_moved = |fates: &[Fate], id: InodeId| {
        tree.inode(id).origin.is_some() && fates[id.index()] == Fate::New
    };
    loop {
        let mut more = Vec::new();
        for id in all.iter().filter(|id| tree.inode(**id).is_directory()) {
            let children =
                || tree.children(*id).into_iter().flatten().map(|(_, entry)| entry.inode);
            if fates[id.index()] == Fate::Kept && children().any(|child| has_moved(&fates, child)) {
                more.push(*id);
            }
            if has_moved(&fates, *id) {
                let is_kept = |child: &InodeId| fates[child.index()] == Fate::Kept;
                let below = children().filter(|child| tree.inode(*child).is_directory());
                more.extend(below.filter(is_kept));
            }
        }
        if more.is_empty() {
            break;
        }
        more.into_iter().for_each(|id| fates[id.index()] = rewritten(id));
    }
    (fates[InodeId::ROOT.index()] == Fate::InPlace || fates[InodeId::ROOT.index()] == Fate::Kept)
        .then_some(fates)
}
