//! The host's file system as the server may touch it: one component at a time,
//! relative to a descriptor it holds, never through a symlink and never by
//! path. There is no /proc in the jail, so an `O_PATH` descriptor cannot be
//! reopened through it: a file is opened again by its directory and name, and
//! the result is compared with what the descriptor holds.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::sys;
use crate::wire::Qid;

/// The longest file name, in bytes (`NAME_MAX`).
const NAME_MAX: usize = 255;

/// Flags of every open: no symlink, no terminal, and no waiting for a fifo.
const SAFE: OFlags =
    OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NOCTTY).union(OFlags::NONBLOCK);

/// How the kernel itself keeps a lookup inside, whatever the name says.
const INSIDE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// A file name that is exactly one component of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a>(&'a [u8]);

impl<'a> Name<'a> {
    /// # Errors
    /// EACCES for a name that could lead elsewhere (`.`, `..`, one with a
    /// slash), ENAMETOOLONG over 255 bytes, EINVAL for an empty one or a NUL.
    pub fn new(bytes: &'a [u8]) -> Result<Self, Errno> {
        match bytes {
            b"." | b".." => Err(Errno::ACCESS),
            _ if bytes.contains(&b'/') => Err(Errno::ACCESS),
            _ if bytes.is_empty() || bytes.contains(&0) => Err(Errno::INVAL),
            _ if bytes.len() > NAME_MAX => Err(Errno::NAMETOOLONG),
            _ => Ok(Self(bytes)),
        }
    }

    pub fn bytes(self) -> &'a [u8] {
        self.0
    }
}

/// What tells two files of the host apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ident {
    dev: u64,
    ino: u64,
}

impl Ident {
    pub fn of(stat: &Stat) -> Self {
        Self { dev: stat.st_dev, ino: stat.st_ino }
    }

    /// The ident of another file on the same device.
    pub fn sibling(self, ino: u64) -> Self {
        Self { ino, ..self }
    }

    /// A number that is the inode's on the folder's own device and differs
    /// from it on devices mounted below.
    pub fn path(self, root: Ident) -> u64 {
        self.ino ^ (self.dev ^ root.dev).rotate_left(40)
    }
}

/// Where a file was found: a directory and the name in it.
#[derive(Clone, Debug)]
pub struct Place {
    pub dir: Rc<OwnedFd>,
    pub dir_ident: Ident,
    pub name: Rc<[u8]>,
}

/// A file of the folder, held by an `O_PATH` descriptor, so it stays the same
/// file whatever happens to its name.
#[derive(Clone, Debug)]
pub struct Node {
    fd: Rc<OwnedFd>,
    pub file_type: FileType,
    pub ident: Ident,
    /// `None` for the folder itself.
    pub place: Option<Place>,
    resolve: ResolveFlags,
}

impl Node {
    /// The folder itself. What is mounted below it belongs to it only with
    /// `submounts`.
    pub fn root(dir: Rc<OwnedFd>, submounts: bool) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(&dir)?;
        let beyond = if submounts { ResolveFlags::empty() } else { ResolveFlags::NO_XDEV };
        Ok(Self {
            fd: dir,
            file_type: FileType::from_raw_mode(stat.st_mode),
            ident: Ident::of(&stat),
            place: None,
            resolve: INSIDE | beyond,
        })
    }

    /// The file behind `fd`, which was found in this directory as `name`.
    fn found(&self, name: Name<'_>, fd: Rc<OwnedFd>, stat: &Stat) -> Self {
        Self {
            fd,
            file_type: FileType::from_raw_mode(stat.st_mode),
            ident: Ident::of(stat),
            place: Some(self.place_of(name)),
            resolve: self.resolve,
        }
    }

    pub fn is_dir(&self) -> bool {
        self.file_type == FileType::Directory
    }

    pub fn is_device(&self) -> bool {
        matches!(self.file_type, FileType::BlockDevice | FileType::CharacterDevice)
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub fn stat(&self) -> Result<Stat, Errno> {
        rustix::fs::fstat(&self.fd)
    }

    /// A name in this directory, as a place.
    pub fn place_of(&self, name: Name<'_>) -> Place {
        Place { dir: self.fd.clone(), dir_ident: self.ident, name: name.bytes().into() }
    }

    /// The file of that name in this directory; a symlink is itself.
    ///
    /// # Errors
    /// EXDEV for what is mounted there, unless mounts belong to the folder.
    pub fn child(&self, name: Name<'_>) -> Result<(Self, Stat), Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat2(&self.fd, name.bytes(), flags, Mode::empty(), self.resolve)?;
        let stat = rustix::fs::fstat(&fd)?;
        Ok((self.found(name, Rc::new(fd), &stat), stat))
    }

    /// Creates a regular file that must not exist yet, open with `access`.
    pub fn create(
        &self,
        name: Name<'_>,
        access: OFlags,
        mode: u32,
    ) -> Result<(Self, Rc<OwnedFd>), Errno> {
        let flags = SAFE | OFlags::CREATE | OFlags::EXCL | access;
        let fd = rustix::fs::openat(&self.fd, name.bytes(), flags, Mode::from_raw_mode(mode))?;
        let stat = rustix::fs::fstat(&fd)?;
        if stat.st_mode & 0o7777 != mode {
            rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode))?;
        }
        let fd = Rc::new(fd);
        Ok((self.found(name, fd.clone(), &stat), fd))
    }

    /// Opens a regular file or a directory for reading or writing.
    ///
    /// # Errors
    /// ELOOP for a symlink, EACCES for a device, fifo or socket, ESTALE where
    /// the name now means another file.
    pub fn open(&self, access: OFlags) -> Result<OwnedFd, Errno> {
        match self.file_type {
            FileType::Directory => {
                let flags = SAFE | OFlags::DIRECTORY | access;
                rustix::fs::openat(&self.fd, c".", flags, Mode::empty())
            }
            FileType::RegularFile => self.open_by_place(access),
            FileType::Symlink => Err(Errno::LOOP),
            _ => Err(Errno::ACCESS),
        }
    }

    /// The look before the open keeps a device or fifo that has taken the
    /// name from being opened; the look after it decides.
    fn open_by_place(&self, access: OFlags) -> Result<OwnedFd, Errno> {
        let place = self.current_place()?;
        let fd = rustix::fs::openat(&place.dir, &*place.name, SAFE | access, Mode::empty())
            .map_err(gone)?;
        match Ident::of(&rustix::fs::fstat(&fd)?) == self.ident {
            true => Ok(fd),
            false => Err(Errno::STALE),
        }
    }

    /// The place of this file if it is still found there.
    ///
    /// # Errors
    /// ESTALE if it is not, EBUSY for the folder itself.
    pub fn current_place(&self) -> Result<&Place, Errno> {
        let place = self.place.as_ref().ok_or(Errno::BUSY)?;
        let stat = rustix::fs::statat(&place.dir, &*place.name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(gone)?;
        match Ident::of(&stat) == self.ident {
            true => Ok(place),
            false => Err(Errno::STALE),
        }
    }

    /// Changes the permission bits. Where the host kernel cannot do this on
    /// an `O_PATH` descriptor (before 6.6) the file is opened for it.
    pub fn chmod(&self, mode: u32) -> Result<(), Errno> {
        if self.file_type == FileType::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        match sys::chmod(&self.fd, mode) {
            Err(Errno::NOSYS) => {
                let fd = self.open(OFlags::RDONLY).or_else(|_| self.open(OFlags::WRONLY))?;
                rustix::fs::fchmod(fd, Mode::from_raw_mode(mode))
            }
            result => result,
        }
    }
}

/// A name that vanished or became a symlink no longer means the file.
fn gone(errno: Errno) -> Errno {
    match errno {
        Errno::NOENT | Errno::LOOP => Errno::STALE,
        other => other,
    }
}

/// The permission bits a guest may set: no set-id bits on anything but the
/// group bit of a directory, which only passes the group on.
pub fn permitted_mode(mode: u32, is_dir: bool) -> u32 {
    mode & if is_dir { 0o3777 } else { 0o1777 }
}

/// Seconds and nanoseconds folded into the version of a qid: it changes when
/// the file does, and when its inode number is given to another file.
fn version(stat: &Stat) -> u32 {
    let nanos = (stat.st_ctime as u64).wrapping_mul(1_000_000_000).wrapping_add(stat.st_ctime_nsec);
    (nanos ^ (nanos >> 32)) as u32
}

/// The type byte of a qid (`P9_QT*`).
pub fn qid_kind(file_type: FileType) -> u8 {
    match file_type {
        FileType::Directory => 0x80,
        FileType::Symlink => 0x02,
        _ => 0,
    }
}

/// The qid of a file whose state is `stat`, in the folder `root`.
pub fn qid(stat: &Stat, root: Ident) -> Qid {
    let kind = qid_kind(FileType::from_raw_mode(stat.st_mode));
    Qid { kind, version: version(stat), path: Ident::of(stat).path(root) }
}

/// Reads at `offset` without moving the descriptor.
pub fn read_at(fd: impl AsFd, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
    rustix::io::retry_on_intr(|| rustix::io::pread(&fd, &mut *buf, offset))
}

/// Writes at `offset` (at the end for a file opened for appending).
pub fn write_at(fd: impl AsFd, data: &[u8], offset: u64) -> Result<usize, Errno> {
    rustix::io::retry_on_intr(|| rustix::io::pwrite(&fd, data, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_component() {
        for bad in [&b""[..], b".", b"..", b"/", b"a/b", b"../x", b"/etc", b"a\0b", &[b'n'; 256]] {
            assert!(Name::new(bad).is_err(), "{bad:?}");
        }
        for good in [&b"a"[..], b"...", b"..a", b" ", b"\xff\xfe", &[b'n'; 255]] {
            assert!(Name::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn set_id_bits_are_dropped() {
        assert_eq!(permitted_mode(0o106755, false), 0o755);
        assert_eq!(permitted_mode(0o1777, true), 0o1777);
        assert_eq!(permitted_mode(0o6755, true), 0o2755);
    }

    #[test]
    fn inodes_of_other_devices_have_other_paths() {
        let root = Ident { dev: 0xfe01, ino: 2 };
        assert_eq!(root.sibling(77).path(root), 77);
        assert_ne!(Ident { dev: 0xfe02, ino: 77 }.path(root), 77);
    }
}
