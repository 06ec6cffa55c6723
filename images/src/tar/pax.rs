//! PAX extended headers: `LENGTH KEY=VALUE\n` records.

use crate::error::{ImageError, Result};
use crate::tree::{Timestamp, Xattrs};

const XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";
const SPARSE_PREFIX: &[u8] = b"GNU.sparse.";

/// What the headers before an entry say about it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Extensions {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    pub mtime: Option<Timestamp>,
    pub xattrs: Xattrs,
    pub sparse_name: Option<Vec<u8>>,
    sparse_size: Option<u64>,
    sparse_major: Option<u64>,
    sparse_minor: Option<u64>,
    sparse: bool,
}

impl Extensions {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The size of a GNU.sparse 1.0 file, `None` for an ordinary one.
    pub fn sparse_version(&self) -> Result<Option<u64>> {
        match (self.sparse, self.sparse_major, self.sparse_minor, self.sparse_size) {
            (false, ..) => Ok(None),
            (true, Some(1), Some(0), Some(size)) => Ok(Some(size)),
            _ => Err(malformed("a sparse file must be in the GNU.sparse 1.0 form")),
        }
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        if let Some(name) = key.strip_prefix(XATTR_PREFIX) {
            self.xattrs.insert(name.to_vec(), value.to_vec());
            return Ok(());
        }
        if let Some(key) = key.strip_prefix(SPARSE_PREFIX) {
            return self.set_sparse(key, value);
        }
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(decimal(value)?),
            b"uid" => self.uid = Some(decimal(value)?),
            b"gid" => self.gid = Some(decimal(value)?),
            b"mtime" => self.mtime = Some(timestamp(value)?),
            _ => {}
        }
        Ok(())
    }

    fn set_sparse(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.sparse = true;
        match key {
            b"name" => self.sparse_name = Some(value.to_vec()),
            b"realsize" => self.sparse_size = Some(decimal(value)?),
            b"major" => self.sparse_major = Some(decimal(value)?),
            b"minor" => self.sparse_minor = Some(decimal(value)?),
            _ => {}
        }
        Ok(())
    }
}

/// Reads all records of one extended header.
pub(super) fn parse(mut records: &[u8], extensions: &mut Extensions) -> Result<()> {
    while !records.is_empty() && records.first() != Some(&0) {
        let space = records.iter().position(|byte| *byte == b' ');
        let space = space.ok_or_else(|| malformed("a record has no length"))?;
        let (digits, _) = records.split_at(space);
        let length = usize::try_from(decimal(digits)?).unwrap_or(usize::MAX);
        let record = records.get(space + 1..length).ok_or_else(|| malformed("a record is cut"))?;
        let body = record.strip_suffix(b"\n").ok_or_else(|| malformed("a record has no end"))?;
        let equals = body.iter().position(|byte| *byte == b'=');
        let (key, value) = body.split_at(equals.ok_or_else(|| malformed("a record has no `=`"))?);
        extensions.set(key, value.get(1..).unwrap_or_default())?;
        records = records.get(length..).unwrap_or_default();
    }
    Ok(())
}

pub(super) fn decimal(digits: &[u8]) -> Result<u64> {
    let number = std::str::from_utf8(digits).ok().filter(|text| !text.starts_with('+'));
    number
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| malformed("a number is not decimal or does not fit 64 bits"))
}

/// `SECONDS[.FRACTION]`, possibly negative; digits below 1 ns are dropped.
fn timestamp(value: &[u8]) -> Result<Timestamp> {
    let bad = || malformed("a time is not a number");
    let text = std::str::from_utf8(value).map_err(|_| bad())?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(bad());
    }
    let seconds: i64 = whole.parse().map_err(|_| bad())?;
    let nanos = format!("{fraction:0<9.9}").parse::<u32>().map_err(|_| bad())?;
    if nanos > 0 && whole.starts_with('-') {
        let seconds = seconds.checked_sub(1).ok_or_else(bad)?;
        return Ok(Timestamp { seconds, nanos: 1_000_000_000 - nanos });
    }
    Ok(Timestamp { seconds, nanos })
}

fn malformed(why: &str) -> ImageError {
    ImageError::malformed("a PAX header", why)
}
