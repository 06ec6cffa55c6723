//! SHA-256 digests, the names of everything content-addressed.

use std::fmt;
use std::io::{self, Read, Write};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{ImageError, Result};

/// A SHA-256 digest, written `sha256:<64 hex digits>` (OCI image-spec,
/// descriptor.md; other algorithms are refused).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The 64 hex digits without the algorithm.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The first 12 hex digits, for tables.
    pub fn short(&self) -> String {
        self.hex().chars().take(12).collect()
    }

    /// From 64 lower-case hex digits.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let digits = hex.as_bytes();
        if digits.len() != 64 || !digits.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')) {
            return None;
        }
        let mut bytes = [0u8; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self> {
        text.strip_prefix("sha256:").and_then(Self::from_hex).ok_or_else(|| {
            ImageError::malformed(
                format!("the digest `{}`", crate::error::shown(text.as_bytes())),
                "it must be sha256: and 64 lower-case hex digits",
            )
        })
    }
}

impl TryFrom<String> for Digest {
    type Error = ImageError;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// A reader that hashes and counts what goes through it.
pub struct Hashing<R> {
    inner: R,
    hasher: Sha256,
    bytes: u64,
}

impl<R: Read> Hashing<R> {
    pub fn new(inner: R) -> Self {
        Self { inner, hasher: Sha256::new(), bytes: 0 }
    }

    /// What it reads from.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    /// Bytes read so far.
    pub fn byte_count(&self) -> u64 {
        self.bytes
    }

    /// The digest of what was read so far.
    pub fn digest(&self) -> Digest {
        Digest(self.hasher.clone().finalize().into())
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if let Some(read) = buffer.get(..count) {
            self.hasher.update(read);
        }
        self.bytes += count as u64;
        Ok(count)
    }
}

/// A writer that hashes and counts what goes through it.
pub(crate) struct HashingWriter<W> {
    inner: W,
    hasher: Sha256,
    bytes: u64,
}

impl<W: Write> HashingWriter<W> {
    pub fn new(inner: W) -> Self {
        Self { inner, hasher: Sha256::new(), bytes: 0 }
    }

    pub fn byte_count(&self) -> u64 {
        self.bytes
    }

    /// The digest of what was written, and where it went.
    pub fn finish(self) -> (Digest, W) {
        (Digest(self.hasher.finalize().into()), self.inner)
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Fails with [`ImageError::DigestMismatch`] unless the digests are equal.
pub(crate) fn expect(what: impl Into<String>, expected: Digest, found: Digest) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(ImageError::DigestMismatch { what: what.into(), expected, found })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_written_and_read() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert_eq!(empty.parse::<Digest>().unwrap(), Digest::of(b""));
    }

    #[test]
    fn other_forms_are_refused() {
        for text in ["", "sha256:", "sha512:00", "sha256:../../etc", &"A".repeat(64)] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
        assert!(Digest::from_hex(&"é".repeat(32)).is_none());
    }

    #[test]
    fn hashing_counts_and_hashes() {
        let mut reader = Hashing::new(&b"hello"[..]);
        io::copy(&mut reader, &mut io::sink()).unwrap();
        assert_eq!((reader.byte_count(), reader.digest()), (5, Digest::of(b"hello")));
    }
}
