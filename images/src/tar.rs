//! A tar reader for hostile archives: every size is bounded before memory is
//! taken for it, sparse files keep their holes, and binary values of PAX
//! records come through whole.
//!
//! Formats: POSIX ustar and pax (IEEE 1003.1, `pax`, "ustar Interchange
//! Format" and "pax Extended Header"), GNU (long names, base-256 numbers, old
//! sparse files) and GNU.sparse 1.0 in pax.

mod header;
mod pass;
mod pax;
mod sparse;
#[cfg(test)]
mod tests;
mod write;

use std::io::{self, Read};

use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::tree::{Meta, Timestamp};
pub(crate) use header::BLOCK_BYTES;
use header::Header;
pub use pass::{FirstEntry, first_entry, pass};
use pax::Extensions;
pub(crate) use sparse::Extent;
pub(crate) use write::TarWriter;

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// A file of `size` bytes, whose data lie in `extents`.
    File {
        size: u64,
        extents: Vec<Extent>,
    },
    Directory,
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    Fifo,
    Device {
        char: bool,
        major: u64,
        minor: u64,
    },
}

/// One entry of an archive, all its extensions applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TarEntry {
    pub path: Vec<u8>,
    pub kind: EntryKind,
    pub meta: Meta,
}

/// Reads the entries of a tar stream in their order.
pub(crate) struct TarReader<R> {
    stream: R,
    limits: ImportLimits,
    /// Bytes of the current entry's data not read yet.
    data_left: u64,
    /// Zero bytes that fill up its last block.
    padding: u64,
    /// Bytes of the stream before the current position.
    position: u64,
}

impl<R: Read> TarReader<R> {
    pub fn new(stream: R, limits: &ImportLimits) -> Self {
        Self { stream, limits: limits.clone(), data_left: 0, padding: 0, position: 0 }
    }

    /// The next entry, or `None` at the end of the archive. What is left of
    /// the entry before is passed over.
    pub fn next_entry(&mut self) -> Result<Option<TarEntry>> {
        let mut extensions = Extensions::default();
        let mut headers = 0u64;
        loop {
            self.skip_data()?;
            let Some(header) = self.read_header()? else {
                return if extensions.is_empty() { Ok(None) } else { Err(cut()) };
            };
            headers += 1;
            if headers > EXTENSION_HEADERS_MAX {
                return Err(ImageError::malformed("the archive", "too many extension headers"));
            }
            match header.kind() {
                b'x' => pax::parse(&self.read_extension(&header)?, &mut extensions)?,
                // Global records would apply to all entries; only comments are met in practice.
                b'g' => drop(self.read_extension(&header)?),
                b'L' => extensions.path = Some(self.read_long_name(&header)?),
                b'K' => extensions.link = Some(self.read_long_name(&header)?),
                _ => return self.entry(&header, extensions).map(Some),
            }
        }
    }

    /// Offset in the stream of the current entry's data.
    pub fn data_position(&self) -> u64 {
        self.position
    }

    /// Reads on to the end of the stream, so that all of it is hashed.
    pub fn drain(&mut self) -> Result<()> {
        self.skip_data()?;
        io::copy(&mut self.stream, &mut io::sink()).map_err(read_error)?;
        Ok(())
    }

    /// The stream below.
    pub fn into_inner(self) -> R {
        self.stream
    }

    fn entry(&mut self, header: &Header, mut extensions: Extensions) -> Result<TarEntry> {
        let stored = extensions.size.map_or_else(|| header.size(), Ok)?;
        let path = extensions.path.take().unwrap_or_else(|| header.path());
        if path.len() > self.limits.path_bytes_max {
            let max = self.limits.path_bytes_max as u64;
            return Err(ImageError::limit(format!("`{}`", shown(&path)), "path_bytes_max", max));
        }
        self.set_data(if header.has_data() { stored } else { 0 });
        let kind = self.entry_kind(header, &mut extensions, &path, stored)?;
        let path = extensions.sparse_name.take().unwrap_or(path);
        let meta = meta(header, extensions).map_err(|why| at(&path, &why))?;
        Ok(TarEntry { path, kind, meta })
    }

    fn entry_kind(
        &mut self,
        header: &Header,
        extensions: &mut Extensions,
        path: &[u8],
        stored: u64,
    ) -> Result<EntryKind> {
        let link =
            |extensions: &mut Extensions| extensions.link.take().unwrap_or_else(|| header.link());
        Ok(match header.kind() {
            b'0' | 0 | b'7' if path.ends_with(b"/") => EntryKind::Directory,
            b'0' | 0 | b'7' => self.file(extensions, stored).map_err(|why| at(path, &why))?,
            b'S' => self.old_sparse(header, stored).map_err(|why| at(path, &why))?,
            b'1' => EntryKind::HardLink(link(extensions)),
            b'2' => EntryKind::Symlink(link(extensions)),
            b'3' => device(header, true)?,
            b'4' => device(header, false)?,
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            other => {
                let why = format!("its entry type {:?} is not known", char::from(other));
                return Err(ImageError::malformed(format!("`{}`", shown(path)), why));
            }
        })
    }

    fn file(&mut self, extensions: &Extensions, stored: u64) -> Result<EntryKind> {
        match extensions.sparse_version()? {
            None => Ok(EntryKind::File { size: stored, extents: vec![Extent::whole(stored)] }),
            Some(size) => {
                let extents = sparse::read_pax_map(self, size, stored)?;
                Ok(EntryKind::File { size, extents })
            }
        }
    }

    fn old_sparse(&mut self, header: &Header, stored: u64) -> Result<EntryKind> {
        let size = header.sparse_size()?;
        let extents_max = self.limits.extension_bytes_max / sparse::DESCRIPTOR_BYTES;
        let mut extents = sparse::descriptors(header.sparse_descriptors())?;
        let mut extended = header.sparse_is_extended();
        // The blocks of the map lie between the header and the data, uncounted.
        while extended {
            let block = self.read_block()?.ok_or_else(cut)?;
            extents.extend(sparse::descriptors(sparse::extension_descriptors(&block))?);
            extended = sparse::extension_is_extended(&block);
            if extents.len() > extents_max {
                return Err(ImageError::malformed("the sparse map", "it is too long"));
            }
        }
        sparse::check(&extents, size, stored)?;
        Ok(EntryKind::File { size, extents })
    }

    fn set_data(&mut self, bytes: u64) {
        self.data_left = bytes;
        self.padding = bytes.wrapping_neg() % BLOCK_BYTES as u64;
    }

    fn read_header(&mut self) -> Result<Option<Header>> {
        let Some(block) = self.read_block()? else { return Ok(None) };
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        Header::new(block).map(Some)
    }

    /// The next 512 bytes, or `None` at the end of the stream.
    fn read_block(&mut self) -> Result<Option<[u8; BLOCK_BYTES]>> {
        let mut block = [0; BLOCK_BYTES];
        let mut filled = 0;
        while let Some(rest) = block.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.stream.read(rest) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(cut()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(error)),
            }
        }
        self.position += BLOCK_BYTES as u64;
        Ok(Some(block))
    }

    fn read_extension(&mut self, header: &Header) -> Result<Vec<u8>> {
        let size = header.size()?;
        let max = self.limits.extension_bytes_max as u64;
        if size > max {
            return Err(ImageError::limit("a header extension", "extension_bytes_max", max));
        }
        self.set_data(size);
        let mut bytes = Vec::new();
        Read::take(&mut *self, size).read_to_end(&mut bytes).map_err(read_error)?;
        Ok(bytes)
    }

    /// A GNU long name: its bytes up to the first NUL.
    fn read_long_name(&mut self, header: &Header) -> Result<Vec<u8>> {
        let mut name = self.read_extension(header)?;
        if let Some(end) = name.iter().position(|byte| *byte == 0) {
            name.truncate(end);
        }
        Ok(name)
    }

    fn skip_data(&mut self) -> Result<()> {
        let left = self.data_left + self.padding;
        let skipped = io::copy(&mut Read::take(&mut self.stream, left), &mut io::sink())
            .map_err(read_error)?;
        // Some writers leave out the padding of the last entry.
        if skipped < self.data_left {
            return Err(cut());
        }
        self.position += skipped;
        (self.data_left, self.padding) = (0, 0);
        Ok(())
    }
}

/// Whether an archive may begin with `block`.
pub(crate) fn is_header(block: &[u8]) -> bool {
    let block: Option<[u8; BLOCK_BYTES]> = block.try_into().ok();
    block.is_some_and(|block| block.iter().any(|byte| *byte != 0) && Header::new(block).is_ok())
}

/// Reads the data of the current entry.
impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer.len().min(usize::try_from(self.data_left).unwrap_or(usize::MAX));
        let Some(buffer) = buffer.get_mut(..want).filter(|buffer| !buffer.is_empty()) else {
            return Ok(0);
        };
        let count = self.stream.read(buffer)?;
        if count == 0 {
            return Err(cut().into());
        }
        self.data_left -= count as u64;
        self.position += count as u64;
        Ok(count)
    }
}

/// Extension headers before one entry.
const EXTENSION_HEADERS_MAX: u64 = 16;

fn device(header: &Header, char: bool) -> Result<EntryKind> {
    Ok(EntryKind::Device { char, major: header.device_major()?, minor: header.device_minor()? })
}

fn meta(header: &Header, extensions: Extensions) -> Result<Meta> {
    let narrow = |what: &str, value: u64| {
        u32::try_from(value)
            .map_err(|_| ImageError::malformed(what, format!("{value} does not fit 32 bits")))
    };
    Ok(Meta {
        mode: header.mode()?,
        uid: narrow("the uid", extensions.uid.map_or_else(|| header.uid(), Ok)?)?,
        gid: narrow("the gid", extensions.gid.map_or_else(|| header.gid(), Ok)?)?,
        mtime: match extensions.mtime {
            Some(mtime) => mtime,
            None => Timestamp { seconds: header.mtime()?, nanos: 0 },
        },
        xattrs: extensions.xattrs,
    })
}

/// Says at which entry a malformed thing was met.
fn at(path: &[u8], error: &ImageError) -> ImageError {
    match error {
        ImageError::Malformed { what, why } => {
            ImageError::malformed(format!("`{}`", shown(path)), format!("{what}: {why}"))
        }
        ImageError::LimitExceeded { limit, max, .. } => {
            ImageError::limit(format!("`{}`", shown(path)), limit, *max)
        }
        other => ImageError::malformed(format!("`{}`", shown(path)), other),
    }
}

fn cut() -> ImageError {
    ImageError::malformed("the archive", "it ends in the middle of an entry")
}

fn read_error(error: io::Error) -> ImageError {
    ImageError::io("cannot read the archive", error)
}
