//! Paths through what programs of a container have made: init goes them with rights that those
//! programs have not, at the next start too.
//!
//! ```text
//! /home/ann/.cache/pip ── one name at a time, each by a descriptor ──> what is there
//!               └─ a link: root's, or the image's own ──> on it goes, below the container's root
//!                          anybody else's ──────────────> refused, in words
//! ```
//! Otherwise who owns a directory on the way would choose what a volume covers: /etc, say.
//!
//! A file that init reads or writes is looked at before it is opened: no pipe is waited for, and no
//! device is taken for a file.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, fstat, fstatfs, mkdirat, openat, openat2,
    readlinkat, unlinkat,
};
use rustix::io::Errno;

use crate::error::InitError;
use crate::own_proc;

/// Links that are followed on one way, as the kernel has it.
const LINKS_MAX: usize = 40;
const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// statfs(2): what another machine or cell may change, and what cannot be changed.
pub const FUSE: u64 = 0x6573_5546;
const EROFS: u64 = 0xe0f5_e1e2;
/// What the kernel shows of itself.
const KERNELS: [(u64, &str); 4] = [
    (0x9fa0, "the kernel's /proc"),
    (0x6265_6572, "the kernel's /sys"),
    (0x6367_7270, "the kernel's control groups"),
    (0x1cd1, "the kernel's terminals"),
];

/// What to make where there is nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    Nothing,
    Directory,
    /// Its directories are made too.
    File,
}

/// Finds mount points in the root of a container.
pub struct MountPoints<'a> {
    root: File,
    /// What the container's image holds, out of reach of programs; `None` where nobody's links are
    /// followed but root's.
    image: Option<&'a File>,
}

impl<'a> MountPoints<'a> {
    /// Those in this thread's root.
    pub fn new(image: Option<&'a File>) -> io::Result<Self> {
        Ok(Self { root: File::from(openat(rustix::fs::CWD, c"/", LOOK, Mode::empty())?), image })
    }

    /// Where `path` leads, made as `missing` says; `None` where there is nothing and that says so.
    ///
    /// # Errors
    /// It leads over a link that is not followed, or to the kernel's own; or as of the calls.
    pub fn find(&self, path: &str, missing: Missing) -> Result<Option<File>, InitError> {
        let mut walk = Walk { points: self, here: Vec::new(), left: Vec::new(), link_count: 0 };
        walk.follow(Path::new(path));
        let found = match walk.go(missing) {
            Err(Stop::Link(at)) => {
                return Err(InitError::invalid(format!(
                    "the mount point {path} leads over {at}, a symbolic link that is neither \
                     root's nor the image's, or lies in a folder: whoever made it would choose \
                     what is covered; remove the link, or give another path"
                )));
            }
            Err(Stop::Io(error)) if error.raw_os_error() == Some(libc::EROFS) => {
                let what = if missing == Missing::File { "file" } else { "directory" };
                return Err(InitError::invalid(format!(
                    "the image has no {what} {path} and its root is read-only; add the {what} to \
                     the image or let the cell write"
                )));
            }
            Err(Stop::Io(error)) => {
                return Err(InitError::io(format!("the mount point {path}"), &error));
            }
            Ok(None) => return Ok(None),
            Ok(Some(found)) => found,
        };
        match walk.kernels(&found) {
            None => Ok(Some(found)),
            Some(what) => Err(InitError::invalid(format!(
                "the mount point {path} is in {what}, where nothing is mounted; give another path"
            ))),
        }
    }

    /// The directory `path`, made if it is missing.
    pub fn directory(&self, path: &str) -> Result<File, InitError> {
        let found = self.find(path, Missing::Directory)?;
        found.ok_or_else(|| InitError::guest(format!("the mount point {path} is not there")))
    }

    /// The file `path`, made if it is missing.
    pub fn file(&self, path: &str) -> Result<File, InitError> {
        let found = self.find(path, Missing::File)?;
        found.ok_or_else(|| InitError::guest(format!("the mount point {path} is not there")))
    }
}

/// Why a way ends.
enum Stop {
    /// At a link that is not followed.
    Link(String),
    Io(io::Error),
}

impl<E: Into<io::Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Io(error.into())
    }
}

struct Walk<'a> {
    points: &'a MountPoints<'a>,
    /// The names of directories from the root to here, none of them a link's, and each open.
    here: Vec<(OsString, File)>,
    /// Names that are left, the last first.
    left: Vec<OsString>,
    link_count: usize,
}

impl Walk<'_> {
    /// Goes on by `path`.
    fn follow(&mut self, path: &Path) {
        if path.is_absolute() {
            self.here.clear();
        }
        let names = path.as_os_str().as_bytes().split(|byte| *byte == b'/').rev();
        let names = names.filter(|name| !name.is_empty() && *name != b".");
        self.left.extend(names.map(|name| OsStr::from_bytes(name).to_owned()));
    }

    fn at(&self) -> &File {
        self.here.last().map_or(&self.points.root, |(_, directory)| directory)
    }

    /// The path of `name` here, from the root.
    fn path_of(&self, name: &OsStr) -> OsString {
        let mut path = OsString::new();
        for part in self.here.iter().map(|(name, _)| name.as_os_str()).chain([name]) {
            path.push("/");
            path.push(part);
        }
        path
    }

    fn go(&mut self, missing: Missing) -> Result<Option<File>, Stop> {
        while let Some(name) = self.left.pop() {
            if name == ".." {
                self.here.pop();
                continue;
            }
            let found = match openat(self.at(), &name, LOOK, Mode::empty()) {
                Err(Errno::NOENT) if missing == Missing::Nothing => return Ok(None),
                Err(Errno::NOENT) => self.make(&name, missing == Missing::File)?,
                found => File::from(found?),
            };
            match FileType::from_raw_mode(fstat(&found)?.st_mode) {
                FileType::Symlink => self.follow_link(&name, &found)?,
                FileType::Directory => self.here.push((name, found)),
                _ if self.left.is_empty() => {
                    self.here.push((name, found.try_clone()?));
                    return Ok(Some(found));
                }
                _ => return Err(Errno::NOTDIR.into()),
            }
        }
        Ok(Some(self.at().try_clone()?))
    }

    fn make(&self, name: &OsStr, is_file: bool) -> Result<File, Stop> {
        let made = if is_file && self.left.is_empty() {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            openat(self.at(), name, flags, Mode::from_raw_mode(0o644)).map(drop)
        } else {
            mkdirat(self.at(), name, Mode::from_raw_mode(0o755))
        };
        match made {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(openat(self.at(), name, LOOK, Mode::empty())?.into())
    }

    fn follow_link(&mut self, name: &OsStr, link: &File) -> Result<(), Stop> {
        let target = readlinkat(link, c"", Vec::new())?;
        if !self.is_trusted(name, link, target.as_bytes())? {
            return Err(Stop::Link(self.path_of(name).display().to_string()));
        }
        self.link_count += 1;
        if self.link_count > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        self.follow(Path::new(OsStr::from_bytes(target.as_bytes())));
        Ok(())
    }

    fn is_trusted(&self, name: &OsStr, link: &File, target: &[u8]) -> Result<bool, Stop> {
        match kind_of(link)? {
            FUSE => return Ok(false),
            EROFS => return Ok(true),
            _ if link.metadata()?.uid() == 0 => return Ok(true),
            _ => {}
        }
        let Some(image) = self.points.image else { return Ok(false) };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        let path = self.path_of(name);
        let Ok(own) = openat2(image, &path, LOOK, Mode::empty(), resolve) else { return Ok(false) };
        Ok(readlinkat(&own, c"", Vec::new()).is_ok_and(|own| own.as_bytes() == target))
    }

    /// Which of the kernel's own trees it is in, by where it is and not by what it is called.
    fn kernels(&self, found: &File) -> Option<&'static str> {
        let first = self.here.first().map(|(name, _)| name.as_os_str());
        match first.and_then(OsStr::to_str) {
            // Mounted with each program.
            Some("proc") => return Some("the kernel's /proc"),
            Some("dev") if self.here.len() == 1 => return Some("the kernel's /dev"),
            _ => {}
        }
        let kind = kind_of(found).ok()?;
        KERNELS.into_iter().find(|(known, _)| *known == kind).map(|(_, what)| what)
    }
}

/// The number of the kind of file system that it is in (statfs(2)).
pub fn kind_of(found: &File) -> io::Result<u64> {
    Ok(fstatfs(found)?.f_type as u64)
}

/// Reads the file `path`, at most so many bytes of it.
///
/// # Errors
/// There is none: what is no regular file is not opened. Or as of the calls.
pub fn read(path: &str, bytes_max: u64) -> io::Result<Vec<u8>> {
    let found = openat(rustix::fs::CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let found = File::from(found);
    if !found.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut bytes = Vec::new();
    own_proc::reopen(&found)?.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Makes `content` what the file `name` in the directory `directory` holds. What is there and is no
/// regular file, a link say, is removed.
pub fn write(directory: &str, name: &str, content: &[u8]) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = openat(rustix::fs::CWD, directory, flags, Mode::empty())?;
    let mut file = match openat(&directory, name, LOOK, Mode::empty()).map(File::from) {
        Ok(found) if found.metadata()?.is_file() => own_proc::reopen_to_write(&found)?,
        found => {
            if found.is_ok() {
                unlinkat(&directory, name, AtFlags::empty())?;
            }
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            openat(&directory, name, flags, Mode::from_raw_mode(0o644))?.into()
        }
    };
    file.write_all(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{chown, lchown, symlink};

    fn pipe(path: &Path) {
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    }

    fn places() -> (tempfile::TempDir, File, File) {
        let place = tempfile::tempdir().unwrap();
        for name in ["root", "image"] {
            fs::create_dir_all(place.path().join(name).join("home/ann")).unwrap();
            fs::create_dir_all(place.path().join(name).join("run/deep")).unwrap();
        }
        let open = |name: &str| File::open(place.path().join(name)).unwrap();
        let (root, image) = (open("root"), open("image"));
        (place, root, image)
    }

    #[test]
    fn a_way_stays_below_the_root_and_is_made() {
        let (place, root, image) = places();
        let inside = |path: &str| place.path().join("root").join(path);
        let points = MountPoints { root: root.try_clone().unwrap(), image: Some(&image) };
        let is = |found: File, path: &str| {
            let (found, other) = (found.metadata().unwrap(), fs::metadata(inside(path)).unwrap());
            (found.dev(), found.ino()) == (other.dev(), other.ino())
        };
        assert!(is(points.directory("/a/b").unwrap(), "a/b"));
        assert!(is(points.file("/a/c/file").unwrap(), "a/c/file"));
        assert!(inside("a/c/file").is_file());
        assert!(points.find("/none/x", Missing::Nothing).unwrap().is_none());
        assert!(!inside("none").exists());
        assert!(is(points.directory("/../../a/./b/..//").unwrap(), "a"));
        assert!(points.directory("/a/c/file/x").is_err());
        // A pipe is found and not opened.
        pipe(&inside("pipe"));
        assert!(is(points.file("/pipe").unwrap(), "pipe"));
        for path in ["/proc", "/proc/1", "/dev"] {
            assert!(points.directory(path).unwrap_err().to_string().contains("kernel"), "{path}");
        }
        assert!(is(points.directory("/dev/x").unwrap(), "dev/x"));
    }

    #[test]
    fn links_are_followed_that_are_roots_or_the_images() {
        let (place, root, image) = places();
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let inside = |path: &str| place.path().join("root").join(path);
        let points = MountPoints { root: root.try_clone().unwrap(), image: Some(&image) };
        fs::create_dir_all(inside("var")).unwrap();
        symlink("/run", inside("var/run")).unwrap();
        symlink("../../run/deep", inside("var/deep")).unwrap();
        let ino = |file: File| file.metadata().unwrap().ino();
        let of = |path: &str| fs::metadata(inside(path)).unwrap().ino();
        assert_eq!(ino(points.directory("/var/run").unwrap()), of("run"));
        assert_eq!(ino(points.directory("/var/deep/x").unwrap()), of("run/deep/x"));
        // An ordinary user's, over what is root's.
        let link = inside("home/ann/cache");
        symlink("/run", &link).unwrap();
        lchown(&link, Some(1000), Some(1000)).unwrap();
        let refused = points.directory("/home/ann/cache/pip").unwrap_err().to_string();
        for word in ["/home/ann/cache/pip", "over /home/ann/cache,", "neither root's"] {
            assert!(refused.contains(word), "{refused}");
        }
        assert!(points.file("/home/ann/cache").is_err());
        assert!(!inside("run/pip").exists());
        // The image's own leads where it does in the image, and nowhere else.
        let of_image = place.path().join("image/home/ann/cache");
        symlink("/etc", &of_image).unwrap();
        assert!(points.directory("/home/ann/cache").is_err());
        fs::remove_file(&of_image).unwrap();
        symlink("/run", &of_image).unwrap();
        assert_eq!(ino(points.directory("/home/ann/cache").unwrap()), of("run"));
        chown(inside("run"), Some(1000), None).unwrap();
        symlink("loop", inside("loop")).unwrap();
        assert!(points.directory("/loop").is_err());
    }

    #[test]
    fn what_is_no_file_is_neither_opened_nor_written_to() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
        pipe(&place.path().join("pipe"));
        symlink("/dev/zero", path("zero")).unwrap();
        assert!(read(&path("pipe"), 9).is_err() && read(&path("zero"), 9).is_err());
        let directory = place.path().to_str().unwrap();
        fs::write(path("kept"), "kept").unwrap();
        symlink(path("kept"), path("link")).unwrap();
        for name in ["pipe", "zero", "link", "new"] {
            write(directory, name, b"content").unwrap();
            assert_eq!(read(&path(name), 4).unwrap(), b"cont", "{name}");
        }
        write(directory, "kept", b"k").unwrap();
        assert_eq!(read(&path("kept"), 9).unwrap(), b"k");
        fs::create_dir(path("directory")).unwrap();
        assert!(write(directory, "directory", b"").is_err());
    }
}
