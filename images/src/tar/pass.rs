//! Passing an archive on to somebody who will unpack it on the host: entry for entry, without
//! what gives rights there, and without names that lead out.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io::{self, Read, Write};

use super::write::TarWriter;
use super::{EntryKind, TarEntry, TarReader};
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::tree::split;

/// Permissions without the set-id bits.
const MODE_KEPT: u16 = 0o1777;

/// Copies the archive `from` to `to`, each entry written anew. Set-id bits and extended attributes
/// are left out, and so are devices. No name leads out of where it is unpacked, by itself or by a
/// link before it, whoever unpacks it; with `base` all begin with that. With `strip` each name
/// loses its first part; the entry that has no other is `./`.
///
/// # Errors
/// What is wrong with the archive.
pub fn pass(
    from: &mut dyn Read,
    to: &mut dyn Write,
    base: Option<&[u8]>,
    strip: bool,
    limits: &ImportLimits,
) -> Result<()> {
    let mut tar = TarReader::new(from, limits);
    let mut writer = TarWriter::new(to);
    let mut names =
        Names { base, limits, seen: HashMap::new(), keys: RandomState::new(), count: 0 };
    while let Some(TarEntry { path, mut kind, mut meta }) = tar.next_entry()? {
        let parts = names.admit(&path, &kind)?;
        if matches!(kind, EntryKind::Device { .. }) {
            continue;
        }
        let kept =
            |parts: &[&[u8]]| parts.get(usize::from(strip)..).unwrap_or_default().join(&b'/');
        if let EntryKind::HardLink(target) = &mut kind {
            *target = kept(&split(target)?);
        }
        meta.mode &= MODE_KEPT;
        writer.entry(&kept(&parts), &kind, &meta, &mut tar).map_err(pass_error)?;
    }
    writer.finish().map_err(pass_error)
}

fn pass_error(error: io::Error) -> ImageError {
    ImageError::io("cannot pass the archive on", error)
}

/// What an entry is to those after it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    Directory,
    File,
    Other,
}

/// The names of an archive so far. Of each there is a hash alone, with keys that nobody knows.
struct Names<'a> {
    base: Option<&'a [u8]>,
    limits: &'a ImportLimits,
    seen: HashMap<u64, Seen>,
    keys: RandomState,
    count: u64,
}

impl Names<'_> {
    /// The parts of the name `path`, if an entry of that name may come now.
    fn admit<'p>(&mut self, path: &'p [u8], kind: &EntryKind) -> Result<Vec<&'p [u8]>> {
        self.count += 1;
        if self.count > self.limits.entries_max {
            let max = self.limits.entries_max;
            return Err(ImageError::limit("the number of files", "entries_max", max));
        }
        let parts = self.parts(path)?;
        let seen = match kind {
            EntryKind::Directory => Seen::Directory,
            EntryKind::File { .. } => Seen::File,
            EntryKind::HardLink(target) => self.link(path, target)?,
            _ => Seen::Other,
        };
        let Some((_, above)) = parts.split_last() else {
            return match seen {
                Seen::Directory => Ok(parts),
                _ => Err(ImageError::malformed(format!("`{}`", shown(path)), "it has no name")),
            };
        };
        for depth in 1..=above.len() {
            let parent = &parts[..depth];
            let known = self.seen.entry(self.keys.hash_one(parent)).or_insert(Seen::Directory);
            if *known != Seen::Directory {
                let parent = shown(&parent.join(&b'/'));
                return Err(ImageError::ParentNotDirectory { path: shown(path), parent });
            }
        }
        match self.seen.insert(self.keys.hash_one(&parts[..]), seen) {
            // Who unpacks the second may write through the first.
            Some(before) if (before, seen) != (Seen::Directory, Seen::Directory) => {
                Err(ImageError::malformed(format!("`{}`", shown(path)), "it is there twice"))
            }
            _ => Ok(parts),
        }
    }

    fn parts<'p>(&self, path: &'p [u8]) -> Result<Vec<&'p [u8]>> {
        let parts = split(path)?;
        if parts.len() > self.limits.depth_max + 1 {
            let max = self.limits.depth_max as u64;
            return Err(ImageError::limit(format!("`{}`", shown(path)), "depth_max", max));
        }
        match self.base {
            Some(base) if parts.first() != Some(&base) => {
                let why = format!("`{}` was asked for", shown(base));
                Err(ImageError::malformed(format!("`{}`", shown(path)), why))
            }
            _ => Ok(parts),
        }
    }

    /// A hard link is to a file that came before.
    fn link(&self, path: &[u8], target: &[u8]) -> Result<Seen> {
        let parts = self.parts(target)?;
        match self.seen.get(&self.keys.hash_one(&parts[..])) {
            Some(Seen::File) => Ok(Seen::File),
            _ => Err(ImageError::BadHardLink {
                path: shown(path),
                target: shown(target),
                why: "which is no file of the archive before it",
            }),
        }
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
        pass(&mut &*bytes, &mut out, Some(b"d"), strip, &ImportLimits::default()).map(|()| out)
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

    use super::super::header::BLOCK_BYTES;
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

    /// An entry whose names are what they are.
    fn raw(kind: tar::EntryType, name: &[u8], link: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(0);
        header.set_cksum();
        header.as_bytes().to_vec()
    }

    #[test]
    fn names_that_lead_out_are_not_passed_on() {
        let directory = raw(Directory, b"d", b"");
        for hostile in [
            vec![raw(Regular, b"../evil", b"")],
            vec![raw(Regular, b"/abs/evil", b"")],
            vec![raw(Regular, b"d/../../evil", b"")],
            vec![raw(Regular, b"", b"")],
            vec![raw(Regular, b"d/..", b"")],
            // Not what was asked for, or not below it.
            vec![raw(Regular, b".bashrc", b"")],
            vec![directory.clone(), raw(Regular, b".ssh/authorized_keys", b"")],
            // Through a link, as one reader or another would go.
            vec![raw(Symlink, b"d/l", b"/victim"), raw(Regular, b"d/l/evil", b"")],
            vec![raw(Symlink, b"d/l", b"/victim"), raw(Directory, b"d/l", b"")],
            vec![raw(Symlink, b"d/l", b"/victim"), raw(Regular, b"d/l", b"")],
            vec![raw(Symlink, b"d/./l", b"/victim"), raw(Regular, b"d//l/", b"")],
            vec![raw(Symlink, b"d", b"/victim"), raw(Regular, b"d/evil", b"")],
            vec![raw(Regular, b"d/x/f", b""), raw(Symlink, b"d/x", b"/victim")],
            // Hard links to what is there already.
            vec![raw(Link, b"d/h", b"../../../../etc/passwd")],
            vec![raw(Link, b"d/h", b"/etc/passwd")],
            vec![raw(Link, b"d/h", b"d/missing")],
            vec![raw(Symlink, b"d/l", b"/victim"), raw(Link, b"d/h", b"d/l")],
            vec![directory.clone(), raw(Link, b"d/h", b"d")],
        ] {
            let hostile = hostile.concat();
            let said = passed(&hostile, false).expect_err(&String::from_utf8_lossy(&hostile));
            assert!(!matches!(said, ImageError::Io { .. }), "{said}");
            passed(&hostile, true).unwrap_err();
        }
        // With no base any name is fine that leads nowhere.
        let bytes = [directory, raw(Symlink, b"l", b"../x"), raw(Regular, b"d/f", b"")].concat();
        let mut out = Vec::new();
        pass(&mut &*bytes, &mut out, None, false, &ImportLimits::default()).unwrap();
        assert_eq!(entries(&out).len(), 3);
    }

    #[test]
    fn one_reader_sees_the_names_that_another_sees() {
        // Some readers take this field for the beginning of a name in every form.
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..3].copy_from_slice(b"d/f");
        header.set_mode(0o644);
        header.set_size(0);
        header.as_mut_bytes()[345..350].copy_from_slice(b"../..");
        header.set_cksum();
        // And some the one name, some the other.
        let mut pax = tar::Builder::new(Vec::new());
        pax.append_pax_extensions([("path", &b"d/g"[..])]).unwrap();
        let mut pax = pax.into_inner().unwrap();
        pax.truncate(pax.len() - 2 * BLOCK_BYTES);
        let bytes = [header.as_bytes().to_vec(), pax, raw(Regular, b"../evil", b"")].concat();
        let out = passed(&bytes, false).unwrap();
        let names: Vec<_> = entries(&out).into_iter().map(|entry| entry.0).collect();
        assert_eq!(names, ["d/f", "d/g"]);
        assert!(!out.windows(2).any(|part| part == b".."), "a name that was not read came through");
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
