//! The 512-byte header block of a tar entry.

use std::ops::Range;

use crate::error::{ImageError, Result};

pub(crate) const BLOCK_BYTES: usize = 512;

const NAME: Range<usize> = 0..100;
const MODE: Range<usize> = 100..108;
const UID: Range<usize> = 108..116;
const GID: Range<usize> = 116..124;
const SIZE: Range<usize> = 124..136;
const MTIME: Range<usize> = 136..148;
const CHECKSUM: Range<usize> = 148..156;
const TYPE: usize = 156;
const LINK: Range<usize> = 157..257;
const MAGIC: Range<usize> = 257..265;
const DEVICE_MAJOR: Range<usize> = 329..337;
const DEVICE_MINOR: Range<usize> = 337..345;
const PREFIX: Range<usize> = 345..500;
const SPARSE: Range<usize> = 386..482;
const SPARSE_EXTENDED: usize = 482;
const SPARSE_SIZE: Range<usize> = 483..495;

/// A header block whose checksum is right.
pub(super) struct Header([u8; BLOCK_BYTES]);

impl Header {
    pub fn new(block: [u8; BLOCK_BYTES]) -> Result<Self> {
        let header = Self(block);
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        let own: u64 = header.field(CHECKSUM).iter().map(|byte| u64::from(*byte)).sum();
        let spaces = CHECKSUM.len() as u64 * u64::from(b' ');
        if number(header.field(CHECKSUM)).ok() != i64::try_from(sum - own + spaces).ok() {
            return Err(ImageError::malformed(
                "the archive",
                "an entry header's checksum is wrong",
            ));
        }
        Ok(header)
    }

    fn field(&self, range: Range<usize>) -> &[u8] {
        &self.0[range]
    }

    pub fn kind(&self) -> u8 {
        self.0[TYPE]
    }

    /// Whether blocks of data follow. Links and directories may carry a size
    /// that means nothing.
    pub fn has_data(&self) -> bool {
        !matches!(self.kind(), b'1'..=b'6')
    }

    pub fn path(&self) -> Vec<u8> {
        let name = text(self.field(NAME));
        let prefix = text(self.field(PREFIX));
        if self.field(MAGIC) != b"ustar\x0000" || prefix.is_empty() {
            return name.to_vec();
        }
        [prefix, b"/", name].concat()
    }

    pub fn link(&self) -> Vec<u8> {
        text(self.field(LINK)).to_vec()
    }

    pub fn mode(&self) -> Result<u16> {
        Ok((number(self.field(MODE))? & 0o7777) as u16)
    }

    pub fn uid(&self) -> Result<u64> {
        unsigned(self.field(UID))
    }

    pub fn gid(&self) -> Result<u64> {
        unsigned(self.field(GID))
    }

    pub fn size(&self) -> Result<u64> {
        unsigned(self.field(SIZE))
    }

    /// Seconds since 1970.
    pub fn mtime(&self) -> Result<i64> {
        number(self.field(MTIME))
    }

    pub fn device_major(&self) -> Result<u64> {
        unsigned(self.field(DEVICE_MAJOR))
    }

    pub fn device_minor(&self) -> Result<u64> {
        unsigned(self.field(DEVICE_MINOR))
    }

    pub fn sparse_size(&self) -> Result<u64> {
        unsigned(self.field(SPARSE_SIZE))
    }

    pub fn sparse_descriptors(&self) -> &[u8] {
        self.field(SPARSE)
    }

    pub fn sparse_is_extended(&self) -> bool {
        self.0[SPARSE_EXTENDED] != 0
    }
}

/// A string field: up to the first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

pub(super) fn unsigned(field: &[u8]) -> Result<u64> {
    u64::try_from(number(field)?)
        .map_err(|_| ImageError::malformed("an entry header", "a number is negative"))
}

/// A number field: octal digits, or GNU base-256 if its top bit is set.
fn number(field: &[u8]) -> Result<i64> {
    match field.first() {
        Some(first) if first & 0x80 != 0 => base_256(field),
        _ => octal(field),
    }
}

fn octal(field: &[u8]) -> Result<i64> {
    let digits = text(field).trim_ascii();
    let mut value = 0i64;
    for digit in digits {
        let digit = match digit {
            b'0'..=b'7' => i64::from(digit - b'0'),
            _ => return Err(ImageError::malformed("an entry header", "a number is not octal")),
        };
        value =
            value.checked_mul(8).and_then(|value| value.checked_add(digit)).ok_or_else(too_big)?;
    }
    Ok(value)
}

/// Big-endian two's complement after the marker bit.
fn base_256(field: &[u8]) -> Result<i64> {
    let negative = field.first().is_some_and(|first| first & 0x40 != 0);
    let mut value: i128 = if negative { -1 } else { 0 };
    for (index, byte) in field.iter().enumerate() {
        let byte = if index == 0 && !negative { byte & 0x7f } else { *byte };
        value = (value << 8) | i128::from(byte);
        if i64::try_from(value).is_err() {
            return Err(too_big());
        }
    }
    i64::try_from(value).map_err(|_| too_big())
}

fn too_big() -> ImageError {
    ImageError::malformed("an entry header", "a number does not fit 64 bits")
}
