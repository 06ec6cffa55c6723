//! Decompression, and the guard against bombs.

use std::collections::BTreeSet;
use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;

use crate::Digest;
use crate::error::{ImageError, Result};
use crate::limits::ImportLimits;

const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const BZIP2_MAGIC: &[u8] = b"BZh";
const XZ_MAGIC: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z'];

/// Whether a stream that begins with `magic` is compressed.
pub(super) fn is_packed(magic: &[u8]) -> bool {
    magic.starts_with(GZIP_MAGIC) || magic.starts_with(ZSTD_MAGIC)
}

/// A stream with the count of packed bytes that it has used.
pub(super) struct Unpacked<'a> {
    stream: Box<dyn Read + 'a>,
    packed: std::rc::Rc<std::cell::Cell<u64>>,
}

/// Unpacks by the first bytes: media types are often wrong. Several gzip
/// members or zstd frames make one stream.
pub(super) fn unpack<'a, R: BufRead + 'a>(mut stream: R, what: &str) -> Result<Unpacked<'a>> {
    let read_error = |error| ImageError::io(format!("cannot read {what}"), error);
    let magic = stream.fill_buf().map_err(read_error)?.get(..6).unwrap_or_default().to_vec();
    let packed = std::rc::Rc::new(std::cell::Cell::new(0));
    let counted = Counting { inner: stream, used: packed.clone() };
    let stream: Box<dyn Read + 'a> = if magic.starts_with(GZIP_MAGIC) {
        Box::new(MultiGzDecoder::new(counted))
    } else if magic.starts_with(ZSTD_MAGIC) {
        Box::new(zstd::Decoder::with_buffer(counted).map_err(read_error)?)
    } else if magic.starts_with(BZIP2_MAGIC) || magic.starts_with(XZ_MAGIC) {
        let why = "layers may be plain, gzip or zstd; pack it again".to_owned();
        return Err(ImageError::Unsupported { what: what.to_owned(), why });
    } else {
        Box::new(counted)
    };
    Ok(Unpacked { stream, packed })
}

struct Counting<R> {
    inner: R,
    used: std::rc::Rc<std::cell::Cell<u64>>,
}

impl<R: BufRead> Read for Counting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.used.set(self.used.get() + count as u64);
        Ok(count)
    }
}

impl<R: BufRead> BufRead for Counting<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.inner.consume(count);
        self.used.set(self.used.get() + count as u64);
    }
}

/// What the layers of an image came to so far.
#[derive(Debug, Default)]
pub(crate) struct Spent {
    /// Unpacked bytes of all layers, however often each was listed.
    unpacked: u64,
    /// Packed bytes of those that were not there before.
    packed: u64,
    seen: BTreeSet<Digest>,
}

impl Spent {
    /// Adds a layer that unpacked to what `diff_id` says.
    pub fn add(&mut self, diff_id: Digest, unpacked: u64, packed: u64) {
        self.unpacked = self.unpacked.saturating_add(unpacked);
        if self.seen.insert(diff_id) {
            self.packed = self.packed.saturating_add(packed);
        }
    }
}

/// Stops a stream that unpacks to too much.
pub(super) struct Guard<'a> {
    inner: Unpacked<'a>,
    what: &'a str,
    limits: &'a ImportLimits,
    before: &'a Spent,
    /// Whether the layer was there before: its packed bytes do not count again.
    again: bool,
    bytes: u64,
}

impl<'a> Guard<'a> {
    /// `diff_id` is what the layer is said to be.
    pub fn new(
        inner: Unpacked<'a>,
        what: &'a str,
        limits: &'a ImportLimits,
        before: &'a Spent,
        diff_id: Option<Digest>,
    ) -> Self {
        let again = diff_id.is_some_and(|diff_id| before.seen.contains(&diff_id));
        Self { inner, what, limits, before, again, bytes: 0 }
    }

    /// Packed bytes that were read of the layer.
    pub fn packed(&self) -> u64 {
        self.inner.packed.get()
    }

    fn check(&self) -> Result<()> {
        let what = self.what.to_owned();
        let bytes = self.before.unpacked.saturating_add(self.bytes);
        if bytes > self.limits.bytes_max {
            return Err(ImageError::limit(what, "bytes_max", self.limits.bytes_max));
        }
        let ratio_max = self.limits.ratio_max;
        let own = if self.again { 0 } else { self.packed() };
        let packed = self.before.packed.saturating_add(own);
        let allowed = packed.max(1).saturating_mul(ratio_max);
        if bytes > self.limits.ratio_free_bytes && bytes > allowed {
            return Err(ImageError::Bomb { what, ratio_max, bytes });
        }
        Ok(())
    }
}

impl Read for Guard<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.stream.read(buffer)?;
        self.bytes += count as u64;
        self.check()?;
        Ok(count)
    }
}
