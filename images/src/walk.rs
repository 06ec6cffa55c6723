//! Trees of the host that somebody else may change at this moment: a cell, if it has the folder.
//!
//! ```text
//! Directory ── find ──> Found (O_PATH) ── fstat says what it is ──> file, directory, target
//!     └── enter, make, rename, merge, remove: by name in an open directory
//! ```
//! Nothing is looked at by its path and opened by it later. What lies in a directory is resolved
//! below it by the kernel (`openat2` with `RESOLVE_BENEATH` and `RESOLVE_NO_SYMLINKS`), so a link
//! that takes the place of a directory ends the walk and leads nowhere. Devices and FIFOs are
//! never opened.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, RenameFlags, ResolveFlags, mkdirat, openat2, readlinkat,
    renameat, renameat_with, unlinkat,
};
use rustix::io::Errno;

/// Neither out of the directory nor through a link.
const INSIDE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);
/// The name that a directory has while what is above it is removed.
const RAISED: &str = ".exocell-gone-";
/// Links followed for one path, as many as Linux follows (path_resolution(7)).
const LINKS_MAX: usize = 40;
/// How often a directory is emptied that somebody else fills at this moment.
const EMPTIED_MAX: usize = 8;

fn open(
    at: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let open = || openat2(at, path, flags, Mode::empty(), resolve);
    Ok(rustix::io::retry_on_intr(open)?)
}

/// What was found under a name: held, so that it stays what it is.
#[derive(Debug)]
pub struct Found {
    /// Opened for nothing but to hold it.
    held: File,
    metadata: Metadata,
}

impl AsFd for Found {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.held.as_fd()
    }
}

impl Found {
    fn new(held: OwnedFd) -> io::Result<Self> {
        let held = File::from(held);
        let metadata = held.metadata()?;
        Ok(Self { held, metadata })
    }

    /// What `path` names, a link if it is one. On the way links are followed: the path is the
    /// operator's.
    ///
    /// # Errors
    /// As of open(2).
    pub fn at(path: &Path) -> io::Result<Self> {
        Self::new(open(CWD, path, OFlags::PATH, ResolveFlags::empty())?)
    }

    /// What `path` leads to, if `may_follow` has nothing against the links on the way. It is told
    /// the directory and the name of each; what it has seen is what is followed. With `make` what
    /// is missing is made, as directories.
    ///
    /// # Errors
    /// As of open(2), and what `may_follow` says.
    pub fn resolve(
        path: &Path,
        make: bool,
        may_follow: &mut dyn FnMut(&Self, &OsStr) -> io::Result<()>,
    ) -> io::Result<Self> {
        let root = |path: &Path| Path::new(if path.is_absolute() { "/" } else { "." });
        let hold = |at: BorrowedFd<'_>, path: &Path| {
            Found::new(open(at, path, OFlags::PATH, ResolveFlags::NO_MAGICLINKS)?)
        };
        let mut here = hold(CWD, root(path))?;
        let mut waiting = parts(path);
        let mut links = 0;
        while let Some(name) = waiting.pop() {
            let found = match hold(here.held.as_fd(), Path::new(&name)) {
                Err(error) if make && error.kind() == io::ErrorKind::NotFound => {
                    match mkdirat(&here.held, &name, Mode::from_raw_mode(0o777)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(error.into()),
                    }
                    hold(here.held.as_fd(), Path::new(&name))?
                }
                found => found?,
            };
            if !found.metadata.is_symlink() {
                here = found;
                continue;
            }
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::LOOP.into());
            }
            may_follow(&here, &name)?;
            let target = PathBuf::from(OsString::from_vec(found.target()?));
            if target.is_absolute() {
                here = hold(CWD, root(&target))?;
            }
            waiting.extend(parts(&target));
        }
        Ok(here)
    }

    /// What is at `path`, where no part of the path is a link but the last: then it is that link.
    ///
    /// # Errors
    /// As of open(2); `ELOOP` for a link on the way.
    pub fn real(path: &Path) -> io::Result<Self> {
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        Self::new(open(CWD, path, OFlags::PATH, resolve)?)
    }

    /// What it is, asked when it was found.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.metadata.is_dir()
    }

    /// Where exactly this file is, however it is called now.
    fn place(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.held.as_raw_fd()))
    }

    /// Its path on the host, as it is now: no part of it is a link.
    ///
    /// # Errors
    /// There is no `/proc`.
    pub fn path(&self) -> io::Result<PathBuf> {
        fs::read_link(self.place())
    }

    /// The directory that this directory is in; of the root, itself.
    ///
    /// # Errors
    /// It is no directory.
    pub fn above(&self) -> io::Result<Self> {
        Self::new(open(self.held.as_fd(), Path::new(".."), OFlags::PATH, ResolveFlags::empty())?)
    }

    /// # Errors
    /// It is no directory, or cannot be read.
    pub fn directory(&self) -> io::Result<Directory> {
        open(self.held.as_fd(), Path::new("."), DIRECTORY, INSIDE).map(Directory)
    }

    /// # Errors
    /// It is no regular file, or cannot be read.
    pub fn file(&self) -> io::Result<File> {
        match self.metadata.is_file() {
            true => OpenOptions::new().read(true).open(self.place()),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file")),
        }
    }

    /// A directory or a regular file, the latter to be written to as well if `writable`.
    ///
    /// # Errors
    /// It is neither, or the caller may not.
    pub fn open(&self, writable: bool) -> io::Result<File> {
        if self.is_directory() {
            return self.directory().map(|directory| File::from(OwnedFd::from(directory)));
        }
        match self.metadata.is_file() {
            true => OpenOptions::new().read(true).write(writable).open(self.place()),
            false => {
                Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file and no folder"))
            }
        }
    }

    /// Where it leads.
    ///
    /// # Errors
    /// It is no symbolic link.
    pub fn target(&self) -> io::Result<Vec<u8>> {
        Ok(readlinkat(&self.held, "", Vec::new())?.into_bytes())
    }

    /// Its extended attributes; none where the file system has none.
    ///
    /// # Errors
    /// As of getxattr(2).
    pub(crate) fn xattrs(&self) -> io::Result<crate::tree::Xattrs> {
        use rustix::fs::{getxattr, listxattr};
        let place = self.place();
        let mut names = vec![0; 64 << 10];
        let count = match listxattr(&place, &mut names[..]) {
            Ok(count) => count,
            Err(Errno::OPNOTSUPP) => 0,
            Err(error) => return Err(error.into()),
        };
        names.truncate(count);
        let mut xattrs = crate::tree::Xattrs::new();
        for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let mut value = vec![0; 64 << 10];
            let count = getxattr(&place, name, &mut value[..])?;
            value.truncate(count);
            xattrs.insert(name.to_vec(), value);
        }
        Ok(xattrs)
    }
}

/// An open directory.
#[derive(Debug)]
pub struct Directory(OwnedFd);

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Directory> for OwnedFd {
    fn from(directory: Directory) -> Self {
        directory.0
    }
}

impl Directory {
    /// The one at `path`. Links are followed: the path is the operator's.
    ///
    /// # Errors
    /// As of open(2).
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self(rustix::fs::open(path, DIRECTORY | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// The one at `path`, as [`Found::resolve`] finds it.
    ///
    /// # Errors
    /// As of open(2), and what `may_follow` says.
    pub fn resolve(
        path: &Path,
        make: bool,
        may_follow: &mut dyn FnMut(&Found, &OsStr) -> io::Result<()>,
    ) -> io::Result<Self> {
        Found::resolve(path, make, may_follow)?.directory()
    }

    /// The one at `path`, where no part of the path is a link.
    ///
    /// # Errors
    /// As of open(2); `ELOOP` for a link.
    pub fn real(path: &Path) -> io::Result<Self> {
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        open(CWD, path, DIRECTORY, resolve).map(Self)
    }

    /// Where exactly it is for this process, however it is called now.
    #[must_use]
    pub fn place(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }

    /// Its path on the host, as it is now: no part of it is a link.
    ///
    /// # Errors
    /// There is no `/proc`.
    pub fn path(&self) -> io::Result<PathBuf> {
        fs::read_link(self.place())
    }

    /// # Errors
    /// As of fstat(2).
    pub fn metadata(&self) -> io::Result<Metadata> {
        File::from(self.0.try_clone()?).metadata()
    }

    /// What lies at `path` below. Nothing leads out, and no part is a link but the last.
    ///
    /// # Errors
    /// As of openat2(2).
    pub fn find(&self, path: impl AsRef<Path>) -> io::Result<Found> {
        Found::new(open(self.as_fd(), path.as_ref(), OFlags::PATH, INSIDE)?)
    }

    /// The directory at `path` below; the empty path is this one.
    ///
    /// # Errors
    /// As of openat2(2); `ELOOP` and `ENOTDIR` for a link.
    pub fn enter(&self, path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        open(self.as_fd(), path, DIRECTORY, INSIDE).map(Self)
    }

    /// Makes the directory `name` and opens it.
    ///
    /// # Errors
    /// As of mkdir(2), and of open(2).
    pub fn make(&self, name: &OsStr, mode: u32) -> io::Result<Self> {
        mkdirat(&self.0, name, Mode::from_raw_mode(mode))?;
        self.enter(name)
    }

    /// The names in it, in their order by bytes.
    ///
    /// # Errors
    /// As of readdir(3).
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.0)? {
            let name = entry?.file_name().to_bytes().to_vec();
            if !matches!(&name[..], b"." | b"..") {
                names.push(OsString::from_vec(name));
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Moves `name` to `to_name` in `to`: directories are merged, files replaced.
    ///
    /// # Errors
    /// As of rename(2). What was moved until then stays so.
    pub fn merge(&self, name: &OsStr, to: &Self, to_name: &OsStr) -> io::Result<()> {
        if !move_one(self, name, to, to_name)? {
            return Ok(());
        }
        let mut waiting = vec![(PathBuf::from(name), PathBuf::from(to_name))];
        while let Some((own, other)) = waiting.pop() {
            let (from, to) = (self.enter(&own)?, to.enter(&other)?);
            for name in from.names()? {
                if move_one(&from, &name, &to, &name)? {
                    waiting.push((own.join(&name), other.join(&name)));
                }
            }
        }
        Ok(())
    }

    /// Removes `name` and all below it, however deep that is. One that is not there is fine.
    ///
    /// # Errors
    /// As of unlink(2) and of rename(2). What was removed until then is gone.
    pub fn remove(&self, name: &OsStr) -> io::Result<()> {
        if !self.is_filled(name)? {
            return Ok(());
        }
        let top = self.clear(name)?;
        for _ in 0..EMPTIED_MAX {
            top.empty()?;
            match self.is_filled(name) {
                Ok(true) => {}
                other => return other.map(drop),
            }
        }
        Err(Errno::NOTEMPTY.into())
    }

    /// Removes what is in it. A directory that holds something is moved up to here first, so
    /// that one level is open at a time.
    fn empty(&self) -> io::Result<()> {
        let mut waiting = VecDeque::from(self.names()?);
        let mut raised = 0u64;
        while let Some(name) = waiting.pop_front() {
            if !self.is_filled(&name)? {
                continue;
            }
            let below = self.clear(&name)?;
            for inner in below.names()? {
                if below.is_filled(&inner)? {
                    // It may have to be written to: its way up changes.
                    drop(below.clear(&inner)?);
                    waiting.push_back(self.raise(&below, &inner, &mut raised)?);
                }
            }
            self.is_filled(&name)?;
        }
        Ok(())
    }

    /// Removes `name` unless it is a directory that holds something: that is true then.
    fn is_filled(&self, name: &OsStr) -> io::Result<bool> {
        match unlinkat(&self.0, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(false),
            Err(Errno::ISDIR) => {}
            Err(error) => return Err(error.into()),
        }
        match unlinkat(&self.0, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(false),
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// The directory `name`, which its owner may change from now on.
    fn clear(&self, name: &OsStr) -> io::Result<Self> {
        const OWNERS: u32 = 0o700;
        let found = self.find(name)?;
        let mode = found.metadata().mode();
        if found.is_directory() && mode & OWNERS != OWNERS {
            fs::set_permissions(found.place(), Permissions::from_mode(mode & 0o7777 | OWNERS))?;
        }
        found.directory()
    }

    fn raise(&self, from: &Self, name: &OsStr, raised: &mut u64) -> io::Result<OsString> {
        loop {
            let new = OsString::from(format!("{RAISED}{raised}"));
            *raised += 1;
            match renameat_with(&from.0, name, &self.0, &new, RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(new),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The parts of a path, the last one first.
fn parts(path: &Path) -> Vec<OsString> {
    let named = path.components().rev().filter_map(|part| match part {
        Component::Normal(_) | Component::ParentDir => Some(part.as_os_str().to_owned()),
        _ => None,
    });
    named.collect()
}

/// Moves an entry, unless both it and what is there are directories: that is true then.
fn move_one(from: &Directory, name: &OsStr, to: &Directory, to_name: &OsStr) -> io::Result<bool> {
    if from.find(name)?.is_directory() && to.find(to_name).is_ok_and(|there| there.is_directory()) {
        return Ok(true);
    }
    renameat(&from.0, name, &to.0, to_name)?;
    Ok(false)
}

/// Removes the tree at `path`, whose name alone is not followed. One that is not there is fine.
///
/// # Errors
/// As of [`Directory::remove`].
pub fn remove(path: &Path) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Directory::at(parent.unwrap_or(Path::new(".")))?.remove(name)
}

/// Goes through a tree: parents before children, names in byte order.
///
/// Entries are told by their paths below the root, the empty one first. Nothing is held of the
/// levels above, so a tree may be as deep as a path is long.
#[derive(Debug)]
pub struct Walk {
    root: Directory,
    waiting: Vec<PathBuf>,
}

impl Walk {
    /// Of what is in `root`, itself included.
    #[must_use]
    pub fn of(root: Directory) -> Self {
        Self { root, waiting: vec![PathBuf::new()] }
    }

    /// The path of the next entry, and what it is.
    #[allow(clippy::should_implement_trait, reason = "who reads it says where to go on")]
    pub fn next(&mut self) -> Option<(PathBuf, io::Result<Found>)> {
        let path = self.waiting.pop()?;
        let found = match path.as_os_str().is_empty() {
            true => self.root.find("."),
            false => self.root.find(&path),
        };
        Some((path, found))
    }

    /// What is in the directory `found`, which is at `path`, comes next.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn enter(&mut self, path: &Path, found: &Found) -> io::Result<()> {
        let names = found.directory()?.names()?;
        self.waiting.extend(names.into_iter().rev().map(|name| path.join(name)));
        Ok(())
    }
}

/// Bytes that the files below `path` take on their disk. What cannot be read counts as nothing.
#[must_use]
pub fn bytes(path: &Path) -> u64 {
    let Ok(root) = Directory::real(path) else { return 0 };
    let (mut walk, mut bytes) = (Walk::of(root), 0);
    while let Some((path, found)) = walk.next() {
        let Ok(found) = found else { continue };
        bytes += found.metadata().blocks() * 512;
        if found.is_directory() {
            let _ = walk.enter(&path, &found);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A folder that a cell may write, and the host's files beside it.
    fn place() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let place = tempfile::tempdir().unwrap();
        let (folder, host) = (place.path().join("folder"), place.path().join("host"));
        fs::create_dir(&folder).unwrap();
        fs::create_dir(&host).unwrap();
        fs::write(host.join("s"), "of the host").unwrap();
        (place, folder, host)
    }

    fn os(name: &str) -> &OsStr {
        OsStr::new(name)
    }

    #[test]
    fn a_link_that_takes_a_name_is_not_followed() {
        let (_place, folder, host) = place();
        fs::create_dir_all(folder.join("d/e")).unwrap();
        fs::write(folder.join("d/e/s"), "own").unwrap();
        let top = Directory::at(&folder).unwrap();
        let found = top.find("d/e/s").unwrap();
        let mut walk = Walk::of(Directory::at(&folder).unwrap());
        let mut seen = Vec::new();
        while let Some((path, found)) = walk.next() {
            let Ok(found) = found else {
                seen.push(format!("{} is gone", path.display()));
                continue;
            };
            seen.push(path.display().to_string());
            if found.is_directory() {
                walk.enter(&path, &found).unwrap();
            }
            // What the directory holds is known, and not opened yet.
            if path == Path::new("d/e") {
                fs::rename(folder.join("d/e"), folder.join("moved")).unwrap();
                symlink(&host, folder.join("d/e")).unwrap();
            }
        }
        assert_eq!(seen, ["", "d", "d/e", "d/e/s is gone"]);
        // What was found before stays what it was.
        assert_eq!(io::read_to_string(found.file().unwrap()).unwrap(), "own");
        top.find("d/e/s").unwrap_err();
        top.enter("d/e").unwrap_err();
        top.find("../host/s").unwrap_err();
        assert_eq!(top.find("d/e").unwrap().target().unwrap(), host.as_os_str().as_encoded_bytes());
        Directory::real(&folder.join("d/e")).unwrap_err();
        Directory::real(&folder.join("moved")).unwrap();
    }

    #[test]
    fn a_fifo_is_found_and_not_opened() {
        let (_place, folder, _host) = place();
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(CWD, folder.join("fifo"), kind, Mode::RUSR, 0).unwrap();
        let found = Directory::at(&folder).unwrap().find("fifo").unwrap();
        found.file().unwrap_err();
        found.directory().unwrap_err();
    }

    #[test]
    fn directories_are_merged_and_nothing_lands_behind_a_link() {
        let (_place, folder, host) = place();
        let from = folder.join("staging");
        for name in ["d/inner/a", "d/inner/s", "d/b"] {
            fs::create_dir_all(from.join(name).parent().unwrap()).unwrap();
            fs::write(from.join(name), "new").unwrap();
        }
        fs::create_dir_all(folder.join("d/inner")).unwrap();
        fs::write(folder.join("d/inner/a"), "old").unwrap();
        fs::write(folder.join("d/stays"), "old").unwrap();
        let (staging, to) = (Directory::at(&from).unwrap(), Directory::at(&folder).unwrap());
        staging.merge(os("d"), &to, os("d")).unwrap();
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        assert_eq!(
            (read("d/inner/a"), read("d/b"), read("d/stays")),
            ("new".into(), "new".into(), "old".into())
        );
        // The cell has put a link where the directory was.
        fs::create_dir_all(from.join("e/inner")).unwrap();
        fs::write(from.join("e/inner/s"), "evil").unwrap();
        fs::create_dir(folder.join("e")).unwrap();
        symlink(&host, folder.join("e/inner")).unwrap();
        staging.merge(os("e"), &to, os("e")).unwrap_err();
        assert_eq!(fs::read_to_string(host.join("s")).unwrap(), "of the host");
        // A link in what was staged is moved as one.
        symlink(&host, from.join("l")).unwrap();
        staging.merge(os("l"), &to, os("l")).unwrap();
        assert!(folder.join("l").is_symlink() && host.join("s").exists());
    }

    #[test]
    fn a_tree_goes_however_deep_it_is_and_links_lead_nowhere() {
        let (_place, folder, host) = place();
        // As a cell makes it: each time a level on top, so no path is long.
        fs::create_dir(folder.join("d")).unwrap();
        fs::write(folder.join("d/f"), "x").unwrap();
        symlink(&host, folder.join("d/l")).unwrap();
        for level in 0..3_000 {
            fs::create_dir(folder.join("n")).unwrap();
            if level % 1_000 == 0 {
                fs::create_dir(folder.join("n/.exocell-gone-1")).unwrap();
                fs::create_dir(folder.join("n/closed")).unwrap();
                fs::write(folder.join("n/closed/f"), "x").unwrap();
                fs::set_permissions(folder.join("n/closed"), Permissions::from_mode(0o000))
                    .unwrap();
            }
            fs::rename(folder.join("d"), folder.join("n/d")).unwrap();
            fs::rename(folder.join("n"), folder.join("d")).unwrap();
        }
        remove(&folder.join("d")).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        remove(&folder.join("d")).unwrap();
        // The name itself may be a link, too.
        symlink(&host, folder.join("d")).unwrap();
        remove(&folder.join("d")).unwrap();
        assert!(!folder.join("d").is_symlink() && host.join("s").exists());
    }

    #[test]
    fn who_opens_a_path_hears_of_each_link_on_it() {
        let (place, folder, host) = place();
        let base = place.path().canonicalize().unwrap();
        fs::create_dir(host.join("inner")).unwrap();
        symlink("../host/./inner", folder.join("relative")).unwrap();
        symlink(base.join("folder/relative"), folder.join("absolute")).unwrap();
        symlink("loop", folder.join("loop")).unwrap();
        let resolve = |path: &str| {
            let mut seen = Vec::new();
            let opened = Directory::resolve(&base.join(path), false, &mut |directory, name| {
                let link = directory.path().unwrap().join(name);
                seen.push(link.strip_prefix(&base).unwrap().display().to_string());
                Ok(())
            });
            opened.map(|opened| (opened.path().unwrap(), seen))
        };
        let (at, links) = resolve("folder/absolute").unwrap();
        assert_eq!(at, base.join("host/inner"));
        assert_eq!(links, ["folder/absolute", "folder/relative"]);
        assert_eq!(resolve("host/inner/../inner").unwrap(), (at, Vec::new()));
        let inner = Found::at(&base.join("host/inner")).unwrap();
        assert_eq!(inner.above().unwrap().path().unwrap(), host.canonicalize().unwrap());
        resolve("folder/loop").unwrap_err();
        resolve("host/s").unwrap_err();
        let refused = &mut |_: &Found, _: &OsStr| Err(io::ErrorKind::PermissionDenied.into());
        Directory::resolve(&base.join("folder/relative"), false, refused).unwrap_err();
        Directory::resolve(&base.join("host/inner"), false, refused).unwrap();
        Directory::resolve(&base.join("folder/relative/x/y"), true, &mut |_, _| Ok(())).unwrap();
        assert!(host.join("inner/x/y").is_dir());
    }
}
