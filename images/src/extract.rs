//! Unpacking an archive into a directory of the host, for the operator who asked for these files.
//!
//! Nothing is followed: each part of a name is opened in the directory before it. Files,
//! directories and links are made, and nothing else; nobody gets rights by them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, fchmod, futimens, linkat,
    mkdirat, openat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;

use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::tar::{EntryKind, Extent, TarEntry, TarReader};
use crate::tree::{Meta, Timestamp, split};

/// Permissions without set-id and sticky bits.
const MODE_KEPT: u16 = 0o777;
/// Of directories that the archive has files in, but does not list.
const MODE_IMPLICIT: u16 = 0o755;
/// Of directories while files are put into them.
const MODE_OPEN: u32 = 0o700;

/// Unpacks the archive `from` into `directory`, which nobody else uses.
///
/// # Errors
/// What is wrong with the archive, or with the host's disk. What was unpacked until then stays.
pub fn extract(from: &mut dyn Read, directory: &OwnedFd, limits: &ImportLimits) -> Result<()> {
    let mut tar = TarReader::new(from, limits);
    let mut made = Extraction {
        root: directory.as_fd(),
        limits,
        directories: BTreeMap::new(),
        last: None,
        entries: 0,
        bytes: 0,
    };
    while let Some(entry) = tar.next_entry()? {
        made.entry(&entry, &mut tar)?;
    }
    tar.drain()?;
    made.close()
}

struct Extraction<'a> {
    root: BorrowedFd<'a>,
    limits: &'a ImportLimits,
    /// What directories are to have in the end.
    directories: BTreeMap<Vec<u8>, (u16, Option<Timestamp>)>,
    /// The directory that was used last.
    last: Option<(Vec<u8>, Rc<OwnedFd>)>,
    entries: u64,
    bytes: u64,
}

impl Extraction<'_> {
    fn entry(&mut self, entry: &TarEntry, content: &mut dyn Read) -> Result<()> {
        self.entries += 1;
        if self.entries > self.limits.entries_max {
            let max = self.limits.entries_max;
            return Err(ImageError::limit("the number of files", "entries_max", max));
        }
        let TarEntry { path, kind, meta } = entry;
        let parts = split(path)?;
        let Some((name, above)) = parts.split_last() else { return Ok(()) };
        if above.len() > self.limits.depth_max {
            let max = self.limits.depth_max as u64;
            return Err(ImageError::limit(format!("`{}`", shown(path)), "depth_max", max));
        }
        let failed = |errno: Errno| write_error(path, errno.into());
        match kind {
            EntryKind::Directory => {
                self.open(path, &parts)?;
                let about = (meta.mode & MODE_KEPT, Some(meta.mtime));
                self.directories.insert(parts.join(&b'/'), about);
                Ok(())
            }
            EntryKind::File { size, extents } => {
                self.count_bytes(path, *size)?;
                let directory = self.open(path, above)?;
                let file = new_file(&directory, name).map_err(failed)?;
                fill(path, file, *size, extents, meta, content)
            }
            EntryKind::Symlink(target) => {
                let directory = self.open(path, above)?;
                clear(&directory, name)
                    .and_then(|()| symlinkat(&**target, &directory, *name))
                    .map_err(failed)
            }
            EntryKind::HardLink(target) => self.link(path, above, name, target),
            // A fifo or a device of a guest's is of no use on the host.
            EntryKind::Fifo | EntryKind::Device { .. } => Ok(()),
        }
    }

    fn count_bytes(&mut self, path: &[u8], size: u64) -> Result<()> {
        self.bytes = self.bytes.saturating_add(size);
        match self.bytes > self.limits.apparent_bytes_max {
            true => {
                let max = self.limits.apparent_bytes_max;
                Err(ImageError::limit(format!("`{}`", shown(path)), "apparent_bytes_max", max))
            }
            false => Ok(()),
        }
    }

    /// The directory at `parts`, made where it is missing.
    fn open(&mut self, path: &[u8], parts: &[&[u8]]) -> Result<Rc<OwnedFd>> {
        let whole = parts.join(&b'/');
        if let Some((_, directory)) = self.last.as_ref().filter(|(last, _)| *last == whole) {
            return Ok(directory.clone());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let failed = |errno: Errno| match errno {
            Errno::NOTDIR | Errno::LOOP => {
                let parent = shown(&whole);
                ImageError::ParentNotDirectory { path: shown(path), parent }
            }
            errno => write_error(path, errno.into()),
        };
        let mut here = openat(self.root, c".", flags, Mode::empty()).map_err(failed)?;
        let mut so_far = Vec::new();
        for part in parts {
            so_far.extend_from_slice(part);
            here = match openat(&here, *part, flags, Mode::empty()) {
                Err(Errno::NOENT) => {
                    mkdirat(&here, *part, Mode::from_raw_mode(MODE_OPEN)).map_err(failed)?;
                    self.directories.entry(so_far.clone()).or_insert((MODE_IMPLICIT, None));
                    openat(&here, *part, flags, Mode::empty()).map_err(failed)?
                }
                opened => opened.map_err(failed)?,
            };
            so_far.push(b'/');
        }
        let here = Rc::new(here);
        self.last = Some((whole, here.clone()));
        Ok(here)
    }

    fn link(&mut self, path: &[u8], above: &[&[u8]], name: &[u8], target: &[u8]) -> Result<()> {
        let failed = |errno: Errno| write_error(path, errno.into());
        let bad = |why| ImageError::BadHardLink { path: shown(path), target: shown(target), why };
        let parts = split(target)?;
        let (known, folder) = parts.split_last().ok_or_else(|| bad("which is a directory"))?;
        let from = self.open(path, folder)?;
        let stat = statat(&from, *known, AtFlags::SYMLINK_NOFOLLOW);
        let stat = stat.map_err(|_| bad("which is not in the archive"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(bad("which is no file"));
        }
        let to = self.open(path, above)?;
        if parts.iter().eq(above.iter().chain([&name])) {
            return Err(bad("itself"));
        }
        clear(&to, name)
            .and_then(|()| linkat(&from, *known, &to, name, AtFlags::empty()))
            .map_err(failed)
    }

    /// Gives directories the permissions and times that they are to have, the deepest first.
    fn close(mut self) -> Result<()> {
        self.last = None;
        let directories = std::mem::take(&mut self.directories);
        for (path, (mode, mtime)) in directories.iter().rev() {
            let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
            let directory = self.open(path, &parts)?;
            fchmod(&directory, Mode::from_raw_mode(u32::from(*mode)))
                .and_then(|()| mtime.map_or(Ok(()), |mtime| futimens(&directory, &times(mtime))))
                .map_err(|errno| write_error(path, errno.into()))?;
        }
        Ok(())
    }
}

fn write_error(path: &[u8], error: io::Error) -> ImageError {
    ImageError::io(format!("cannot write `{}`", shown(path)), error)
}

fn times(mtime: Timestamp) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec: mtime.seconds, tv_nsec: mtime.nanos.into() },
    }
}

/// Takes away what an earlier entry put there; a directory stays, and is an error later.
fn clear(directory: &OwnedFd, name: &[u8]) -> std::result::Result<(), Errno> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::NOENT | Errno::ISDIR) => Ok(()),
        other => other,
    }
}

fn new_file(directory: &OwnedFd, name: &[u8]) -> std::result::Result<File, Errno> {
    clear(directory, name)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(directory, name, flags, Mode::from_raw_mode(0o600)).map(File::from)
}

fn fill(
    path: &[u8],
    mut file: File,
    size: u64,
    extents: &[Extent],
    meta: &Meta,
    content: &mut dyn Read,
) -> Result<()> {
    let failed = |error: io::Error| write_error(path, error);
    for Extent { offset, length } in extents {
        file.seek(SeekFrom::Start(*offset)).map_err(failed)?;
        let copied = io::copy(&mut content.take(*length), &mut file).map_err(failed)?;
        if copied != *length {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
    }
    file.set_len(size).map_err(failed)?;
    fchmod(&file, Mode::from_raw_mode(u32::from(meta.mode & MODE_KEPT)))
        .and_then(|()| futimens(&file, &times(meta.mtime)))
        .map_err(|errno| failed(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::Path;
    use tar::EntryType::{self, Char, Directory, Fifo, Link, Regular, Symlink};

    fn entry(kind: EntryType, name: &str, link: &str, mode: u32, data: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_mtime(1_000);
        header.set_size(data.len() as u64);
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }

    fn extracted(to: &Path, entries: &[Vec<u8>]) -> Result<()> {
        let directory = OwnedFd::from(File::open(to).unwrap());
        extract(&mut &*entries.concat(), &directory, &ImportLimits::default())
    }

    #[test]
    fn files_directories_and_links_come_without_special_bits() {
        let to = tempfile::tempdir().unwrap();
        let entries = [
            entry(Directory, "d/", "", 0o6555, b""),
            entry(Regular, "d/su", "", 0o6751, b"program"),
            entry(Link, "d/also", "d/su", 0o644, b""),
            entry(Symlink, "d/to", "/etc/passwd", 0o777, b""),
            entry(Regular, "e/f/implicit", "", 0o600, b"x"),
            entry(Char, "d/tty", "", 0o666, b""),
            entry(Fifo, "d/fifo", "", 0o666, b""),
        ];
        extracted(to.path(), &entries).unwrap();
        let at = |name: &str| to.path().join(name);
        let mode = |name: &str| fs::symlink_metadata(at(name)).unwrap().mode() & 0o7777;
        assert_eq!((mode("d"), mode("d/su"), mode("e/f")), (0o555, 0o751, 0o755));
        assert_eq!(fs::metadata(at("d/also")).unwrap().nlink(), 2);
        assert_eq!(fs::metadata(at("d")).unwrap().mtime(), 1_000);
        assert_eq!(fs::read_link(at("d/to")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(fs::read_dir(at("d")).unwrap().count(), 3, "no device and no fifo");
        fs::set_permissions(at("d"), fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn nothing_lands_outside() {
        let place = tempfile::tempdir().unwrap();
        let to = place.path().join("to");
        fs::create_dir(&to).unwrap();
        fs::write(place.path().join("kept"), "kept").unwrap();
        for hostile in [
            vec![entry(Regular, "../x", "", 0o644, b"x")],
            vec![entry(Regular, "/tmp/x", "", 0o644, b"x")],
            vec![entry(Symlink, "s", "..", 0o777, b""), entry(Regular, "s/x", "", 0o644, b"x")],
            vec![entry(Link, "h", "../kept", 0o644, b"")],
            vec![entry(Symlink, "t", "../kept", 0o777, b""), entry(Link, "h", "t", 0o644, b"")],
            vec![entry(Link, "h", "missing", 0o644, b"")],
        ] {
            extracted(&to, &hostile).unwrap_err();
        }
        // What follows a link of that name takes its place.
        let over =
            [entry(Symlink, "l", "../kept", 0o777, b""), entry(Regular, "l", "", 0o644, b"new")];
        extracted(&to, &over).unwrap();
        assert_eq!(fs::read(to.join("l")).unwrap(), b"new");
        assert_eq!(fs::read(place.path().join("kept")).unwrap(), b"kept");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2);
    }
}
