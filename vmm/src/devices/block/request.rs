//! One block request: its header, its range, its answer.

use virtio_bindings::bindings::virtio_blk::*;

/// Bytes in a sector, the unit of every position (virtio 1.2, 5.2.6).
pub(super) const SECTOR: u64 = 512;
/// Segments of one discard or write-zeroes request.
pub(super) const ERASE_SEGMENTS_MAX: usize = 32;
/// Bytes of one segment: sector 8, sectors 4, flags 4.
pub(super) const ERASE_SEGMENT: usize = 16;
/// Sectors of one such segment: 1 GiB.
pub(super) const ERASE_SECTORS_MAX: u32 = 1 << 21;

/// Why a request failed, as the guest is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Out of range, refused, or the host failed.
    Io,
    /// Not a request this device knows.
    Unsupported,
}

/// The byte that ends every request.
pub(super) fn status(result: Result<usize, Failure>) -> u8 {
    let status = match result {
        Ok(_) => VIRTIO_BLK_S_OK,
        Err(Failure::Io) => VIRTIO_BLK_S_IOERR,
        Err(Failure::Unsupported) => VIRTIO_BLK_S_UNSUPP,
    };
    status as u8
}

/// The first 16 bytes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: u32,
    pub sector: u64,
}

impl Header {
    pub fn parse(bytes: [u8; 16]) -> Self {
        let bits = u128::from_le_bytes(bytes);
        Self { kind: bits as u32, sector: (bits >> 64) as u64 }
    }
}

/// One range of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Erase {
    pub sector: u64,
    pub sectors: u32,
    pub flags: u32,
}

impl Erase {
    pub fn parse(bytes: [u8; ERASE_SEGMENT]) -> Self {
        let bits = u128::from_le_bytes(bytes);
        Self { sector: bits as u64, sectors: (bits >> 64) as u32, flags: (bits >> 96) as u32 }
    }
}

/// The byte offset of `len` bytes at `sector` on a disk of `capacity` sectors.
pub(super) fn locate(sector: u64, len: u64, capacity: u64) -> Result<u64, Failure> {
    let end = sector.checked_add(len / SECTOR).ok_or(Failure::Io)?;
    if !len.is_multiple_of(SECTOR) || end > capacity {
        return Err(Failure::Io);
    }
    sector.checked_mul(SECTOR).ok_or(Failure::Io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_ends_inside_the_disk() {
        assert_eq!(locate(7, 512, 8), Ok(7 * 512));
        assert_eq!(locate(8, 0, 8), Ok(8 * 512));
        assert_eq!(locate(8, 512, 8), Err(Failure::Io));
        assert_eq!(locate(0, 511, 8), Err(Failure::Io));
        assert_eq!(locate(u64::MAX, 512, 8), Err(Failure::Io));
        assert_eq!(locate(u64::MAX, 0, u64::MAX), Err(Failure::Io));
    }

    #[test]
    fn headers_are_little_endian() {
        let mut bytes = [0; 16];
        bytes[0] = 4;
        bytes[8] = 9;
        assert_eq!(Header::parse(bytes), Header { kind: 4, sector: 9 });
        bytes[8..12].copy_from_slice(&2_u32.to_le_bytes());
        bytes[12] = 1;
        assert_eq!(Erase::parse(bytes), Erase { sector: 4, sectors: 2, flags: 1 });
    }
}
