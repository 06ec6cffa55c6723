//! Directory blocks: entries in byte order, then their names.

use std::collections::BTreeMap;

use super::format::{BLOCK_BYTES, put16, put64};

const DIRENT_BYTES: usize = 12;

/// Where a name leads: the nid and the FT_* type.
pub(super) type Target = (u64, u8);

/// How many names go into each block, and the bytes of all blocks.
pub(super) fn layout<'a>(names: impl Iterator<Item = &'a [u8]>) -> (Vec<usize>, u64) {
    let mut counts = Vec::new();
    let (mut count, mut used) = (0, 0);
    for name in names {
        let need = DIRENT_BYTES + name.len();
        if used + need > BLOCK_BYTES {
            counts.push(count);
            (count, used) = (0, 0);
        }
        count += 1;
        used += need;
    }
    let bytes = counts.len() * BLOCK_BYTES + used;
    counts.push(count);
    (counts, bytes as u64)
}

/// All blocks of a directory; the last is not filled up.
pub(super) fn encode(entries: &BTreeMap<&[u8], Target>) -> Vec<u8> {
    let (counts, bytes) = layout(entries.keys().copied());
    let mut out = Vec::with_capacity(bytes as usize);
    let mut entries = entries.iter();
    for count in counts {
        out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
        let block: Vec<_> = entries.by_ref().take(count).collect();
        let mut name_offset = block.len() * DIRENT_BYTES;
        for (name, (nid, file_type)) in &block {
            put64(&mut out, *nid);
            put16(&mut out, name_offset as u16);
            out.extend([*file_type, 0]);
            name_offset += name.len();
        }
        block.iter().for_each(|(name, _)| out.extend(**name));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fill_blocks_without_crossing() {
        let names: Vec<_> = (0..400).map(|i| format!("{i:0200}").into_bytes()).collect();
        let entries: BTreeMap<_, _> = names.iter().map(|name| (name.as_slice(), (7, 1))).collect();
        let (counts, bytes) = layout(entries.keys().copied());
        assert_eq!(counts.iter().sum::<usize>(), 400);
        assert_eq!(counts[0], BLOCK_BYTES / 212);
        assert_eq!(encode(&entries).len() as u64, bytes);
    }
}
