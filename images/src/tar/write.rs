//! Writing an archive in one form alone, GNU's: each name once, in a field that every reader takes
//! for it, and nothing that an earlier writer put in between.

use std::io::{self, Read, Write};

use super::header::BLOCK_BYTES;
use super::sparse::DESCRIPTOR_BYTES;
use super::{EntryKind, Extent};
use crate::tree::Meta;

/// The name of a header that holds a long name.
const LONG_NAME: &[u8] = b"././@LongLink";
/// The longest name that a header holds itself.
const NAME_BYTES: usize = 100;
const MAGIC: &[u8] = b"ustar  \0";
const NAME: usize = 0;
const LINK: usize = 157;
/// Parts of a sparse file in its header, and in each block behind it.
const HEADER_PARTS: usize = 4;
const BLOCK_PARTS: usize = 21;

/// Writes entries to `to`.
pub(crate) struct TarWriter<W> {
    to: W,
}

impl<W: Write> TarWriter<W> {
    pub fn new(to: W) -> Self {
        Self { to }
    }

    /// An entry; `content` has the data of a file's extents one after the other. The empty path
    /// is the directory that the archive is of.
    ///
    /// # Errors
    /// What the writer says, and `content`, which may not be shorter.
    pub fn entry(
        &mut self,
        path: &[u8],
        kind: &EntryKind,
        meta: &Meta,
        content: &mut dyn Read,
    ) -> io::Result<()> {
        let mut header = [0; BLOCK_BYTES];
        put(&mut header, 100, format!("{:07o}\0", meta.mode).as_bytes());
        number(&mut header[108..116], meta.uid.into());
        number(&mut header[116..124], meta.gid.into());
        number(&mut header[136..148], meta.mtime.seconds);
        put(&mut header, 257, MAGIC);
        let mut data = 0;
        let mut map = Vec::new();
        header[156] = match kind {
            EntryKind::Directory => b'5',
            EntryKind::Fifo => b'6',
            EntryKind::Symlink(target) => {
                self.name(&mut header, LINK, target)?;
                b'2'
            }
            EntryKind::HardLink(target) => {
                self.name(&mut header, LINK, target)?;
                b'1'
            }
            EntryKind::Device { char, major, minor } => {
                number(&mut header[329..337], signed(*major)?);
                number(&mut header[337..345], signed(*minor)?);
                if *char { b'3' } else { b'4' }
            }
            EntryKind::File { size, extents } => {
                data = extents.iter().map(|extent| extent.length).sum();
                if *extents == [Extent::whole(*size)] || *size == 0 {
                    b'0'
                } else {
                    map = sparse_map(&mut header, *size, extents)?;
                    b'S'
                }
            }
        };
        number(&mut header[124..136], signed(data)?);
        self.name(&mut header, NAME, if path.is_empty() { b"./" } else { path })?;
        seal(&mut header);
        self.to.write_all(&header)?;
        self.to.write_all(&map)?;
        let copied = io::copy(&mut content.take(data), &mut self.to)?;
        if copied != data {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let padding = (data.wrapping_neg() % BLOCK_BYTES as u64) as usize;
        self.to.write_all(&[0; BLOCK_BYTES][..padding])
    }

    /// As [`Self::entry`], with the attributes of `meta`, in the form that every writer of layers
    /// has for them (`SCHILY.xattr`).
    ///
    /// # Errors
    /// As of [`Self::entry`].
    pub fn whole_entry(
        &mut self,
        path: &[u8],
        kind: &EntryKind,
        meta: &Meta,
        content: &mut dyn Read,
    ) -> io::Result<()> {
        let mut records = Vec::new();
        for (name, value) in &meta.xattrs {
            record(&mut records, &[b"SCHILY.xattr.", &name[..]].concat(), value);
        }
        if !records.is_empty() {
            self.before(b'x', b"././@PaxHeader", &records)?;
        }
        self.entry(path, kind, meta, content)
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// What the writer says.
    pub fn finish(self) -> io::Result<()> {
        self.into_inner().map(drop)
    }

    /// The same; where it was written to.
    ///
    /// # Errors
    /// What the writer says.
    pub fn into_inner(mut self) -> io::Result<W> {
        self.to.write_all(&[0; 2 * BLOCK_BYTES])?;
        self.to.flush()?;
        Ok(self.to)
    }

    /// Puts `name` into the field of `header` at `place`, behind a header of its own if it is
    /// longer than the field.
    fn name(
        &mut self,
        header: &mut [u8; BLOCK_BYTES],
        place: usize,
        name: &[u8],
    ) -> io::Result<()> {
        let short = &name[..name.len().min(NAME_BYTES)];
        put(header, place, short);
        if short.len() == name.len() {
            return Ok(());
        }
        let kind = if place == LINK { b'K' } else { b'L' };
        self.before(kind, LONG_NAME, &[name, b"\0"].concat())
    }

    /// A header that says something about the next entry.
    fn before(&mut self, kind: u8, name: &[u8], content: &[u8]) -> io::Result<()> {
        let mut before = [0; BLOCK_BYTES];
        put(&mut before, NAME, name);
        put(&mut before, 100, b"0000644\0");
        put(&mut before, 108, b"0000000\0");
        put(&mut before, 116, b"0000000\0");
        number(&mut before[124..136], signed(content.len() as u64)?);
        number(&mut before[136..148], 0);
        before[156] = kind;
        put(&mut before, 257, MAGIC);
        seal(&mut before);
        self.to.write_all(&before)?;
        let mut content = content.to_vec();
        content.resize(content.len().next_multiple_of(BLOCK_BYTES), 0);
        self.to.write_all(&content)
    }
}

/// A record of an extension: its length, which counts its own digits, a name and a value.
fn record(to: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    // A blank, an equals sign and the end of the line.
    let bare = name.len() + value.len() + 3;
    let mut length = bare;
    while length != bare + length.to_string().len() {
        length = bare + length.to_string().len();
    }
    to.extend(length.to_string().as_bytes());
    for part in [b" ", name, b"=", value, b"\n"] {
        to.extend(part);
    }
}

fn put(header: &mut [u8], place: usize, bytes: &[u8]) {
    header[place..place + bytes.len()].copy_from_slice(bytes);
}

fn signed(value: u64) -> io::Result<i64> {
    i64::try_from(value).map_err(|_| io::ErrorKind::FileTooLarge.into())
}

/// Octal digits and a NUL byte; what does not fit is in base 256.
fn number(field: &mut [u8], value: i64) {
    let digits = field.len() - 1;
    let octal = format!("{value:0digits$o}\0");
    if value >= 0 && octal.len() == field.len() {
        return field.copy_from_slice(octal.as_bytes());
    }
    let bytes = value.to_be_bytes();
    let sign = if value < 0 { 0xff } else { 0 };
    field.fill(sign);
    let start = field.len().saturating_sub(bytes.len());
    let kept = bytes.len().min(field.len());
    field[start..].copy_from_slice(&bytes[bytes.len() - kept..]);
    field[0] = if value < 0 { 0xff } else { field[0] | 0x80 };
}

/// Puts the parts of a sparse file into its header; the blocks of those that do not fit there.
fn sparse_map(
    header: &mut [u8; BLOCK_BYTES],
    size: u64,
    extents: &[Extent],
) -> io::Result<Vec<u8>> {
    let mut parts = extents.to_vec();
    let end = parts.last().map_or(0, |last| last.offset + last.length);
    if end < size {
        // Readers take the end of the last part for the end of the file.
        parts.push(Extent { offset: size, length: 0 });
    }
    let write = |place: &mut [u8], parts: &[Extent]| -> io::Result<()> {
        for (field, part) in place.chunks_exact_mut(DESCRIPTOR_BYTES).zip(parts) {
            let (offset, length) = field.split_at_mut(DESCRIPTOR_BYTES / 2);
            number(offset, signed(part.offset)?);
            number(length, signed(part.length)?);
        }
        Ok(())
    };
    let (first, rest) = parts.split_at(parts.len().min(HEADER_PARTS));
    write(&mut header[386..386 + HEADER_PARTS * DESCRIPTOR_BYTES], first)?;
    header[482] = u8::from(!rest.is_empty());
    number(&mut header[483..495], signed(size)?);
    let count = rest.len().div_ceil(BLOCK_PARTS);
    let mut blocks = vec![0; count * BLOCK_BYTES];
    let places = blocks.chunks_exact_mut(BLOCK_BYTES).zip(rest.chunks(BLOCK_PARTS));
    for (at, (block, parts)) in places.enumerate() {
        write(&mut block[..BLOCK_PARTS * DESCRIPTOR_BYTES], parts)?;
        block[BLOCK_PARTS * DESCRIPTOR_BYTES] = u8::from(at + 1 < count);
    }
    Ok(blocks)
}

/// Writes the header's checksum.
fn seal(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    put(header, 148, format!("{sum:06o}\0 ").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ImportLimits;
    use crate::tar::{TarEntry, TarReader};
    use crate::tree::Timestamp;

    #[test]
    fn what_is_written_is_read_again() {
        let meta = |mode, uid, seconds| Meta {
            mode,
            uid,
            gid: 7,
            mtime: Timestamp { seconds, nanos: 0 },
            ..Meta::default()
        };
        let parts = |count: u64| {
            let extents = (0..count).map(|at| Extent { offset: 2 + at * 1000, length: 512 });
            extents.collect::<Vec<_>>()
        };
        let sparse = |count: u64, more: u64| {
            let mut extents = parts(count);
            let size = 2 + count * 1000 + more;
            extents.push(Extent { offset: size, length: 0 });
            EntryKind::File { size, extents }
        };
        let whole = |size| EntryKind::File { size, extents: vec![Extent::whole(size)] };
        let long = vec![b'n'; 300];
        let entries = [
            (b"d".to_vec(), EntryKind::Directory, meta(0o755, 0, 1)),
            (b"d/f".to_vec(), whole(700), meta(0o4600, 1 << 31, -5)),
            (long.clone(), whole(0), meta(0o600, 2, 1 << 40)),
            (b"l".to_vec(), EntryKind::Symlink(long.clone()), meta(0o777, 0, 0)),
            (b"h".to_vec(), EntryKind::HardLink(long), meta(0o777, 0, 0)),
            (b"p".to_vec(), EntryKind::Fifo, meta(0o777, 0, 0)),
            (b"t".to_vec(), EntryKind::Device { char: true, major: 4, minor: 1 }, meta(0, 0, 0)),
            (b"s".to_vec(), sparse(3, 9), meta(0, 0, 0)),
            (b"s2".to_vec(), sparse(4, 9), meta(0, 0, 0)),
            (b"s3".to_vec(), sparse(60, 1 << 40), meta(0, 0, 0)),
            (b"hole".to_vec(), sparse(0, 9), meta(0, 0, 0)),
        ];
        let mut bytes = Vec::new();
        let mut writer = TarWriter::new(&mut bytes);
        for (path, kind, meta) in &entries {
            writer.entry(path, kind, meta, &mut io::repeat(b'x')).unwrap();
        }
        writer.finish().unwrap();
        let mut reader = TarReader::new(&*bytes, &ImportLimits::default());
        for (path, kind, meta) in entries {
            assert_eq!(reader.next_entry().unwrap(), Some(TarEntry { path, kind, meta }));
        }
        assert_eq!(reader.next_entry().unwrap(), None);
        // Another reader sees the same names.
        let mut other = tar::Archive::new(&*bytes);
        assert_eq!(other.entries().unwrap().filter(Result::is_ok).count(), 11);
    }

    #[test]
    fn attributes_come_through_whole() {
        let xattrs =
            (90..110).map(|count| (format!("user.{count}").into_bytes(), vec![b'\n'; count]));
        let meta = Meta { mode: 0o755, xattrs: xattrs.collect(), ..Meta::default() };
        let (path, kind) = (vec![b'n'; 200], EntryKind::Directory);
        let mut bytes = Vec::new();
        let mut writer = TarWriter::new(&mut bytes);
        writer.whole_entry(&path, &kind, &meta, &mut io::empty()).unwrap();
        writer.finish().unwrap();
        let mut reader = TarReader::new(&*bytes, &ImportLimits::default());
        assert_eq!(reader.next_entry().unwrap(), Some(TarEntry { path, kind, meta }));
    }

    #[test]
    fn what_is_too_short_is_no_entry() {
        let kind = EntryKind::File { size: 9, extents: vec![Extent::whole(9)] };
        let entry = TarWriter::new(io::sink()).entry(b"f", &kind, &Meta::default(), &mut &b"x"[..]);
        assert_eq!(entry.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
