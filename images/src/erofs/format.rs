//! On-disk structures, little endian (fs/erofs/erofs_fs.h).

use crate::tree::Timestamp;

pub(super) const BLOCK_BYTES: usize = 4096;
pub(super) const BLOCK_BITS: u8 = 12;
/// Inodes start at multiples of this; a nid counts these.
pub(super) const SLOT_BYTES: usize = 32;
pub(super) const COMPACT_BYTES: usize = 32;
pub(super) const EXTENDED_BYTES: usize = 64;
pub(super) const SUPER_OFFSET: usize = 1024;
pub(super) const MAGIC: u32 = 0xE0F5_E1E2;
const COMPAT_SB_CHKSUM: u32 = 1;
const COMPAT_MTIME: u32 = 2;

pub(super) const FLAT_PLAIN: u16 = 0;
pub(super) const FLAT_INLINE: u16 = 2;

/// What the superblock says.
pub(super) struct Super {
    pub root_nid: u16,
    pub inodes: u64,
    pub epoch: Timestamp,
    pub blocks: u32,
    pub meta_block: u32,
    pub uuid: [u8; 16],
}

impl Super {
    /// Block 0 of the image.
    pub fn encode(&self) -> Vec<u8> {
        let mut fields = Vec::with_capacity(128);
        put32(&mut fields, MAGIC);
        put32(&mut fields, 0);
        put32(&mut fields, COMPAT_SB_CHKSUM | COMPAT_MTIME);
        fields.extend([BLOCK_BITS, 0]);
        put16(&mut fields, self.root_nid);
        put64(&mut fields, self.inodes);
        put64(&mut fields, self.epoch.seconds as u64);
        put32(&mut fields, self.epoch.nanos);
        put32(&mut fields, self.blocks);
        put32(&mut fields, self.meta_block);
        put32(&mut fields, 0);
        fields.extend(self.uuid);
        let mut block = vec![0; BLOCK_BYTES];
        block[SUPER_OFFSET..SUPER_OFFSET + fields.len()].copy_from_slice(&fields);
        let checksum = crc32c(&block[SUPER_OFFSET..]);
        block[SUPER_OFFSET + 4..SUPER_OFFSET + 8].copy_from_slice(&checksum.to_le_bytes());
        block
    }
}

/// What an on-disk inode says.
pub(super) struct DiskInode {
    /// File type and permissions.
    pub mode: u16,
    pub links: u32,
    pub size: u64,
    pub start_block: u32,
    pub inline: bool,
    pub xattr_bytes: usize,
    /// 32-bit inode number, unique.
    pub number: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Timestamp,
}

impl DiskInode {
    /// Whether the 32-byte form can hold it: small numbers, and the time that
    /// the superblock gives to all compact inodes.
    pub fn is_compact(&self, epoch: Timestamp) -> bool {
        self.mtime == epoch
            && self.links <= u32::from(u16::MAX)
            && self.uid <= u32::from(u16::MAX)
            && self.gid <= u32::from(u16::MAX)
            && self.size <= u64::from(u32::MAX)
    }

    pub fn encode(&self, compact: bool) -> Vec<u8> {
        let layout = if self.inline { FLAT_INLINE } else { FLAT_PLAIN };
        let mut out = Vec::with_capacity(EXTENDED_BYTES);
        put16(&mut out, (layout << 1) | u16::from(!compact));
        put16(&mut out, super::xattr::icount(self.xattr_bytes));
        put16(&mut out, self.mode);
        match compact {
            true => self.encode_compact(&mut out),
            false => self.encode_extended(&mut out),
        }
        out
    }

    fn encode_compact(&self, out: &mut Vec<u8>) {
        put16(out, self.links as u16);
        put32(out, self.size as u32);
        put32(out, 0);
        put32(out, self.start_block);
        put32(out, self.number);
        put16(out, self.uid as u16);
        put16(out, self.gid as u16);
        put32(out, 0);
    }

    fn encode_extended(&self, out: &mut Vec<u8>) {
        put16(out, 0);
        put64(out, self.size);
        put32(out, self.start_block);
        put32(out, self.number);
        put32(out, self.uid);
        put32(out, self.gid);
        put64(out, self.mtime.seconds as u64);
        put32(out, self.mtime.nanos);
        put32(out, self.links);
        out.extend([0; 16]);
    }
}

pub(super) fn put16(out: &mut Vec<u8>, value: u16) {
    out.extend(value.to_le_bytes());
}

pub(super) fn put32(out: &mut Vec<u8>, value: u32) {
    out.extend(value.to_le_bytes());
}

pub(super) fn put64(out: &mut Vec<u8>, value: u64) {
    out.extend(value.to_le_bytes());
}

/// CRC-32C seeded with all ones and not inverted at the end, as the kernel's
/// `crc32c(~0, ...)`.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82F6_3B78;
    bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (POLYNOMIAL & (crc & 1).wrapping_neg())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_matches_the_check_value() {
        assert_eq!(!crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn inodes_have_their_sizes() {
        let inode = DiskInode {
            mode: 0o100644,
            links: 1,
            size: 5,
            start_block: 0,
            inline: true,
            xattr_bytes: 0,
            number: 1,
            uid: 0,
            gid: 0,
            mtime: Timestamp { seconds: 7, nanos: 0 },
        };
        assert_eq!(inode.encode(true).len(), COMPACT_BYTES);
        assert_eq!(inode.encode(false).len(), EXTENDED_BYTES);
        assert!(inode.is_compact(Timestamp { seconds: 7, nanos: 0 }));
        assert!(!inode.is_compact(Timestamp { seconds: 7, nanos: 1 }));
    }
}
