//! Places records in metadata blocks: best fit, 32-byte slots.

use super::format::{BLOCK_BYTES, SLOT_BYTES};

const SLOTS: usize = BLOCK_BYTES / SLOT_BYTES;

/// Hands out slots. A record of at most a block never crosses into the next
/// one, so inline tails may follow their inodes; larger ones get whole blocks.
pub(super) struct Slots {
    blocks: u64,
    /// By free slots: the blocks that have so many left, at their ends.
    open: Vec<Vec<u64>>,
}

impl Slots {
    /// The first slot stays unused: inode number 0 confuses user programs.
    pub fn new() -> Self {
        let mut open = vec![Vec::new(); SLOTS];
        open[SLOTS - 1].push(0);
        Self { blocks: 1, open }
    }

    /// The nid of a place for `bytes`.
    pub fn place(&mut self, bytes: usize) -> u64 {
        let need = bytes.div_ceil(SLOT_BYTES);
        if need >= SLOTS {
            let block = self.blocks;
            self.blocks += need.div_ceil(SLOTS) as u64;
            return block * SLOTS as u64;
        }
        let (block, free) = self.fit(need);
        if free > need {
            self.open[free - need].push(block);
        }
        (block + 1) * SLOTS as u64 - free as u64
    }

    fn fit(&mut self, need: usize) -> (u64, usize) {
        for free in need..SLOTS {
            if let Some(block) = self.open[free].pop() {
                return (block, free);
            }
        }
        self.blocks += 1;
        (self.blocks - 1, SLOTS)
    }

    /// Blocks to write. The last one is never full: fsck.erofs 1.5 looks for
    /// attributes behind an inode that has none.
    pub fn blocks(&self) -> u64 {
        let last = self.blocks - 1;
        let has_room = self.open.iter().flatten().any(|block| *block == last);
        if has_room { self.blocks } else { self.blocks + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_share_blocks_and_never_cross() {
        let mut slots = Slots::new();
        assert_eq!(slots.place(64), 1);
        assert_eq!(slots.place(4064), 128);
        assert_eq!(slots.place(96), 3);
        assert_eq!(slots.place(5000), 256);
        assert_eq!(slots.place(32), 255);
        assert_eq!(slots.blocks(), 4 + 1);
        assert_eq!(slots.place(4000), 512);
        assert_eq!(slots.blocks(), 5);
    }
}
