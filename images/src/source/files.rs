//! The files of a layout: in a directory, in a tar file read in place, or with another process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::read_document;
use super::remote::Remote;
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::tar::{EntryKind, TarReader};
use crate::tree::split;
use crate::walk::Directory;

/// Links followed for one name (old `docker save` links layers it repeats).
const HOPS_MAX: usize = 8;

pub(super) struct Files {
    path: PathBuf,
    place: Place,
}

enum Place {
    Folder,
    Archive(File, BTreeMap<Vec<u8>, Member>),
    Remote(Remote),
}

enum Member {
    File { offset: u64, size: u64 },
    Link(Vec<u8>),
}

impl Files {
    pub fn directory(path: &Path) -> Self {
        Self { path: path.to_path_buf(), place: Place::Folder }
    }

    /// Reads the table of a tar file.
    pub fn archive(file: File, path: &Path, limits: &ImportLimits) -> Result<Self> {
        let mut magic = [0; 4];
        let count = file.read_at(&mut magic, 0).map_err(|error| ImageError::read(path, error))?;
        if magic[..2] == [0x1f, 0x8b] || magic == [0x28, 0xb5, 0x2f, 0xfd] {
            let why = "it is compressed as a whole; unpack it with gunzip or unzstd first".into();
            return Err(ImageError::Unsupported { what: path.display().to_string(), why });
        }
        if count == 0 {
            return Err(ImageError::NotAnImage {
                path: path.to_path_buf(),
                why: "it is empty".into(),
            });
        }
        let members = index(&file, limits).map_err(|error| not_tar(path, error))?;
        Ok(Self { path: path.to_path_buf(), place: Place::Archive(file, members) })
    }

    /// Files that another process hands over.
    pub fn remote(remote: Remote, path: &Path) -> Self {
        Self { path: path.to_path_buf(), place: Place::Remote(remote) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn has(&self, name: &str) -> bool {
        match &self.place {
            Place::Archive(_, members) => members.contains_key(name.as_bytes()),
            Place::Folder => self.path.join(name).is_file(),
            Place::Remote(_) => false,
        }
    }

    /// Opens the file `name`, a path below the layout's root.
    pub fn open(&self, name: &str) -> Result<Box<dyn Read + '_>> {
        let components = split(name.as_bytes())?;
        let (file, members) = match &self.place {
            Place::Archive(file, members) => (file, members),
            Place::Remote(remote) => return remote.open(name),
            Place::Folder => {
                return Ok(Box::new(open_member(&self.path, name)?));
            }
        };
        let mut name = components.join(&b'/');
        for _ in 0..HOPS_MAX {
            match members.get(&name) {
                Some(Member::File { offset, size }) => {
                    return Ok(Box::new(Section { file, offset: *offset, left: *size }));
                }
                Some(Member::Link(target)) => name = beside(&name, target),
                None => break,
            }
        }
        let why = format!("it has no file `{}`", shown(&name));
        Err(ImageError::NotAnImage { path: self.path.clone(), why })
    }

    pub fn document(&self, name: &str, limits: &ImportLimits) -> Result<Vec<u8>> {
        read_document(&mut *self.open(name)?, name, limits)
    }
}

/// Opens a file of the layout in the folder `root`. Whoever made the layout chose what is there:
/// no link leads out of it, and what is not a regular file is neither waited for nor read.
pub(super) fn open_member(root: &Path, name: &str) -> Result<File> {
    let failed = |error: Errno| ImageError::read(&root.join(name), error.into());
    let folder = Directory::real(root).map_err(|error| ImageError::read(root, error))?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let file = match rustix::fs::openat2(&folder, name, flags, Mode::empty(), within) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP | Errno::XDEV) => return Err(irregular(root, name)),
        Err(error) => return Err(failed(error)),
    };
    let metadata = file.metadata().map_err(|error| ImageError::read(root, error))?;
    if metadata.is_file() { Ok(file) } else { Err(irregular(root, name)) }
}

fn irregular(root: &Path, name: &str) -> ImageError {
    let why =
        format!("its `{}` is not a regular file; make a copy that has one", shown(name.as_bytes()));
    ImageError::NotAnImage { path: root.to_path_buf(), why }
}

fn not_tar(path: &Path, error: ImageError) -> ImageError {
    match error {
        ImageError::Malformed { what, why } => {
            let why = format!("{what}: {why}");
            ImageError::NotAnImage { path: path.to_path_buf(), why }
        }
        other => other,
    }
}

fn index(file: &File, limits: &ImportLimits) -> Result<BTreeMap<Vec<u8>, Member>> {
    // From its beginning, wherever somebody else has read to.
    let whole = Section { file, offset: 0, left: u64::MAX };
    let mut tar = TarReader::new(BufReader::with_capacity(1 << 20, whole), limits);
    let mut members = BTreeMap::new();
    let mut count = 0;
    while let Some(entry) = tar.next_entry()? {
        count += 1;
        if count > limits.entries_max {
            return Err(ImageError::limit(
                "the number of files",
                "entries_max",
                limits.entries_max,
            ));
        }
        let name = split(&entry.path)?.join(&b'/');
        let member = match entry.kind {
            EntryKind::File { size, .. } => Member::File { offset: tar.data_position(), size },
            EntryKind::Symlink(target) => Member::Link(target),
            EntryKind::HardLink(target) => Member::Link([&b"/"[..], &target].concat()),
            _ => continue,
        };
        members.insert(name, member);
    }
    Ok(members)
}

/// `target` as seen from the directory of `name`, as text.
fn beside(name: &[u8], target: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = name.split(|byte| *byte == b'/').collect();
    parts.pop();
    if target.first() == Some(&b'/') {
        parts.clear();
    }
    for part in target.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join(&b'/')
}

/// A part of a file, read without moving its offset.
struct Section<'a> {
    file: &'a File,
    offset: u64,
    left: u64,
}

impl Read for Section<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = self.file.read_at(buffer.get_mut(..want).unwrap_or_default(), self.offset)?;
        self.offset += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_in_archives_are_text() {
        assert_eq!(beside(b"a/layer.tar", b"../b/layer.tar"), b"b/layer.tar");
        assert_eq!(beside(b"a/b", b"../../../../etc"), b"etc");
        assert_eq!(beside(b"a/b", b"/c"), b"c");
    }
}
