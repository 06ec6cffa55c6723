//! Passing an archive on to somebody who will unpack it on the host: entry for entry, without
//! what gives rights there.

use std::io::{self, Read, Write};

use super::header::{BLOCK_BYTES, Header};
use super::{EntryKind, TarEntry, TarReader};
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::tree::split;

/// Permissions without the set-id bits.
const MODE_KEPT: u16 = 0o1777;
/// What names an extended attribute in a PAX record, and what takes its place: no reader knows it.
const XATTR_KEYS: [(&[u8], &[u8]); 2] =
    [(b" SCHILY.xattr.", b" EXOCELL.gone."), (b" LIBARCHIVE.xattr.", b" EXOCELL.gone.also.")];
/// The name of a header that holds a long name.
const LONG_NAME: &[u8] = b"././@LongLink";
/// The longest name that a header holds itself.
const NAME_BYTES: usize = 100;

/// Copies the archive `from` to `to`. Set-id bits and extended attributes are taken off, devices
/// are left out. With `strip` each name loses its first part; the entry that has no other is `./`.
///
/// # Errors
/// What is wrong with the archive.
pub fn pass(
    from: &mut dyn Read,
    to: &mut dyn Write,
    strip: bool,
    limits: &ImportLimits,
) -> Result<()> {
    let mut tar = TarReader::new(Recording { from, kept: None }, limits);
    loop {
        tar.skip_data()?;
        tar.stream.kept = Some(Vec::new());
        let entry = tar.next_entry()?;
        let headers = tar.stream.kept.take().unwrap_or_default();
        let Some(entry) = entry else {
            write(to, &[0; 2 * BLOCK_BYTES])?;
            return to.flush().map_err(write_error);
        };
        if matches!(entry.kind, EntryKind::Device { .. }) {
            continue;
        }
        write(to, &changed(headers, &entry, strip)?)?;
        let padding = tar.padding;
        io::copy(&mut tar, to)
            .map_err(|error| ImageError::io("cannot pass the archive on", error))?;
        write(to, &vec![0; padding as usize])?;
    }
}

fn write(to: &mut dyn Write, bytes: &[u8]) -> Result<()> {
    to.write_all(bytes).map_err(write_error)
}

fn write_error(error: io::Error) -> ImageError {
    ImageError::io("cannot pass the archive on", error)
}

/// The headers of an entry, and what was read of its data with them.
fn changed(mut headers: Vec<u8>, entry: &TarEntry, strip: bool) -> Result<Vec<u8>> {
    let (at, is_plain) = main_header(&headers)?;
    let (extensions, own) = headers.split_at_mut(at);
    XATTR_KEYS.iter().for_each(|(key, other)| replace(extensions, key, other));
    let (header, rest) = own.split_at_mut(BLOCK_BYTES);
    let mode = entry.meta.mode & MODE_KEPT;
    header[100..108].copy_from_slice(format!("{mode:07o}\0").as_bytes());
    if !strip {
        seal(header);
        return Ok(headers);
    }
    if !is_plain {
        let what = format!("`{}`", shown(&entry.path));
        let why = "its name is in a PAX header, which is not changed here".to_owned();
        return Err(ImageError::Unsupported { what, why });
    }
    let mut whole = Vec::new();
    if let EntryKind::HardLink(target) = &entry.kind {
        whole.extend(long_name(b'K', header, 157, &stripped(target)?));
    } else if let EntryKind::Symlink(target) = &entry.kind {
        whole.extend(long_name(b'K', header, 157, target));
    }
    whole.extend(long_name(b'L', header, 0, &stripped(&entry.path)?));
    // Only this form has the beginning of a name there.
    if &header[257..265] == b"ustar\x0000" {
        header[345..500].fill(0);
    }
    seal(header);
    whole.extend_from_slice(header);
    whole.extend_from_slice(rest);
    Ok(whole)
}

/// Where the entry's own header is behind those that only say more of it, and whether they are
/// long names alone.
fn main_header(headers: &[u8]) -> Result<(usize, bool)> {
    let (mut at, mut is_plain) = (0, true);
    loop {
        let block = headers.get(at..at + BLOCK_BYTES).and_then(|block| block.try_into().ok());
        let header = Header::new(block.ok_or_else(super::cut)?)?;
        match header.kind() {
            b'L' | b'K' => {}
            b'x' => is_plain = false,
            b'g' => {
                let why = "it has a header for all entries, which is not passed on";
                return Err(ImageError::malformed("the archive", why));
            }
            _ => return Ok((at, is_plain)),
        }
        let bytes = usize::try_from(header.size()?).map_err(|_| super::cut())?;
        at += BLOCK_BYTES + bytes.next_multiple_of(BLOCK_BYTES);
    }
}

fn replace(bytes: &mut [u8], what: &[u8], by: &[u8]) {
    let mut at = 0;
    while let Some(place) = bytes.get_mut(at..at + what.len()) {
        if place == what {
            place.copy_from_slice(by);
        }
        at += 1;
    }
}

fn stripped(path: &[u8]) -> Result<Vec<u8>> {
    let parts = split(path)?;
    match parts.get(1..) {
        Some(rest @ [_, ..]) => Ok(rest.join(&b'/')),
        _ => Ok(b"./".to_vec()),
    }
}

/// Puts `name` into the field of `header` at `place`; the header before it that a longer one needs.
fn long_name(kind: u8, header: &mut [u8], place: usize, name: &[u8]) -> Vec<u8> {
    let short = &name[..name.len().min(NAME_BYTES)];
    header[place..place + NAME_BYTES].fill(0);
    header[place..place + short.len()].copy_from_slice(short);
    if short.len() == name.len() {
        return Vec::new();
    }
    let mut before = vec![0; BLOCK_BYTES];
    before[..LONG_NAME.len()].copy_from_slice(LONG_NAME);
    before[100..108].copy_from_slice(b"0000644\0");
    before[108..116].copy_from_slice(b"0000000\0");
    before[116..124].copy_from_slice(b"0000000\0");
    before[124..136].copy_from_slice(format!("{:011o}\0", name.len() + 1).as_bytes());
    before[136..148].copy_from_slice(b"00000000000\0");
    before[156] = kind;
    before[257..265].copy_from_slice(b"ustar  \0");
    seal(&mut before);
    before.extend_from_slice(name);
    before.push(0);
    before.resize(before.len().next_multiple_of(BLOCK_BYTES), 0);
    before
}

/// Writes the header's checksum.
fn seal(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// Keeps what is read, while it is asked to.
struct Recording<'a> {
    from: &'a mut dyn Read,
    kept: Option<Vec<u8>>,
}

impl Read for Recording<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(&buffer[..count]);
        }
        Ok(count)
    }
}

/// What the first entry of an archive is.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FirstEntry {
    /// The last part of its name; empty for the root.
    pub name: String,
    /// Where it leads, if it is a link.
    pub link: String,
    /// As tar(5) has it: `0` a file, `5` a directory, `2` a symbolic link ...
    pub kind: char,
    /// Bytes of a file.
    pub size: u64,
    /// Permission, set-id and sticky bits.
    pub mode: u16,
    /// Seconds since 1970.
    pub mtime: i64,
}

/// The first entry of the archive that begins with `bytes`.
///
/// # Errors
/// What is wrong with it, or that there is none.
pub fn first_entry(bytes: &[u8], limits: &ImportLimits) -> Result<FirstEntry> {
    let mut tar = TarReader::new(bytes, limits);
    let TarEntry { path, kind, meta } = tar.next_entry()?.ok_or_else(super::cut)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (kind, size, link) = match kind {
        EntryKind::File { size, .. } => ('0', size, String::new()),
        EntryKind::HardLink(target) => ('1', 0, text(&target)),
        EntryKind::Symlink(target) => ('2', 0, text(&target)),
        EntryKind::Device { char: true, .. } => ('3', 0, String::new()),
        EntryKind::Device { .. } => ('4', 0, String::new()),
        EntryKind::Directory => ('5', 0, String::new()),
        EntryKind::Fifo => ('6', 0, String::new()),
    };
    let name = split(&path)?.last().map_or_else(String::new, |name| text(name));
    Ok(FirstEntry { name, link, kind, size, mode: meta.mode, mtime: meta.mtime.seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, tar::EntryType, u32, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, mode, content) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(*mode);
            header.set_mtime(1);
            if kind.is_symlink() || kind.is_hard_link() {
                header.set_size(0);
                builder.append_link(&mut header, name, content).unwrap();
            } else {
                header.set_size(content.len() as u64);
                builder.append_data(&mut header, name, content.as_bytes()).unwrap();
            }
        }
        builder.into_inner().unwrap()
    }

    fn passed(bytes: &[u8], strip: bool) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        pass(&mut &*bytes, &mut out, strip, &ImportLimits::default()).map(|()| out)
    }

    /// Name, link, mode and content of each.
    fn entries(bytes: &[u8]) -> Vec<(String, String, u32, String)> {
        let mut read = tar::Archive::new(bytes);
        let entries = read.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let link = entry.link_name().unwrap().map(|link| link.display().to_string());
            let mode = entry.header().mode().unwrap();
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            (name, link.unwrap_or_default(), mode, content)
        });
        entries.collect()
    }

    use tar::EntryType::{Block, Char, Directory, Link, Regular, Symlink};

    #[test]
    fn set_id_bits_attributes_and_devices_stay_behind() {
        let long = format!("d/{}", "n".repeat(150));
        let mut bytes = archive(&[
            ("d", Directory, 0o7755, ""),
            ("d/su", Regular, 0o6755, "program"),
            ("d/tty", Char, 0o666, ""),
            ("d/disk", Block, 0o666, ""),
            (&long, Regular, 0o4644, "x"),
        ]);
        // Two blocks of zeros end it.
        bytes.truncate(bytes.len() - 2 * BLOCK_BYTES);
        let mut more = tar::Builder::new(Vec::new());
        let capability = [("SCHILY.xattr.security.capability", &b"\x01"[..])];
        more.append_pax_extensions(capability).unwrap();
        bytes.extend(more.into_inner().unwrap());
        let at = bytes.len() - 2 * BLOCK_BYTES;
        bytes.splice(at.., archive(&[("d/ping", Regular, 0o755, "y")]));
        let out = passed(&bytes, false).unwrap();
        let own = |name: &str, mode, content: &str| {
            (name.to_owned(), String::new(), mode, content.to_owned())
        };
        let expected = [
            own("d", 0o1755, ""),
            own("d/su", 0o755, "program"),
            own(&long, 0o644, "x"),
            own("d/ping", 0o755, "y"),
        ];
        assert_eq!(entries(&out), expected);
        assert!(!out.windows(7).any(|part| part == b"SCHILY."), "an attribute came through");
        assert!(out.windows(8).any(|part| part == b"EXOCELL."), "its record was taken out");
    }

    #[test]
    fn the_contents_of_a_directory_stand_for_it() {
        let long = format!("d/{}", "n".repeat(150));
        let bytes = archive(&[
            ("d", Directory, 0o755, ""),
            ("d/f", Regular, 0o644, "x"),
            (&long, Regular, 0o644, "long"),
            ("d/h", Link, 0o644, &long),
            ("d/s", Symlink, 0o777, "d/f"),
        ]);
        let out = entries(&passed(&bytes, true).unwrap());
        let seen: Vec<_> =
            out.iter().map(|(name, link, _, content)| (&**name, &**link, &**content)).collect();
        let short = &long[2..];
        let expected = [
            ("./", "", ""),
            ("f", "", "x"),
            (short, "", "long"),
            ("h", short, ""),
            ("s", "d/f", ""),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn what_cannot_be_passed_on_whole_is_refused() {
        let bytes = archive(&[("d", Directory, 0o755, ""), ("d/f", Regular, 0o644, "content")]);
        assert!(passed(&bytes[..3 * BLOCK_BYTES / 2], false).is_err());
        assert!(passed(&bytes[..bytes.len() - 3 * BLOCK_BYTES], false).is_err(), "cut in the data");
        assert!(passed(b"no archive at all", false).is_err());
    }

    #[test]
    fn the_first_entry_is_told() {
        let first = |kind, content| {
            let bytes = archive(&[("a/name", kind, 0o4755, content)]);
            first_entry(&bytes, &ImportLimits::default()).unwrap()
        };
        let file = first(Regular, "abc");
        assert_eq!((&*file.name, file.kind, file.size, file.mode), ("name", '0', 3, 0o4755));
        assert_eq!((first(Symlink, "to").link.as_str(), file.mtime), ("to", 1));
        assert!(first_entry(b"", &ImportLimits::default()).is_err());
    }
}
