//! The folder of the host below an overlay: only looked at, never through a symbolic link.

use super::{Status, Times};
use nix::dir::Dir;
use nix::errno::Errno as HostErrno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use wasmtime_wasi::p1::types::{Errno, Filetype};

#[derive(Debug)]
pub(crate) struct Base(OwnedFd);

/// One name of a directory.
pub(crate) struct Listed {
    pub name: String,
    pub ino: u64,
    pub kind: Filetype,
}

impl Base {
    pub fn open(folder: &Path) -> io::Result<Self> {
        let mut options = File::options();
        let dir = options.read(true).custom_flags(nix::libc::O_DIRECTORY).open(folder)?;
        Ok(Self(dir.into()))
    }

    /// What is at `path`, if anything is.
    pub fn status(&self, path: &Path) -> Result<Option<Status>, Errno> {
        match self.at(path, OFlag::O_PATH) {
            Ok(fd) => Ok(Some(status(&fstat(&fd).map_err(errno)?))),
            Err(HostErrno::ENOENT | HostErrno::ENOTDIR) => Ok(None),
            Err(error) => Err(errno(error)),
        }
    }

    pub fn file(&self, path: &Path) -> Result<File, Errno> {
        self.at(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK).map(File::from).map_err(errno)
    }

    /// Where the symbolic link at `path` leads.
    pub fn target(&self, path: &Path) -> Result<String, Errno> {
        let link = self.at(path, OFlag::O_PATH).map_err(errno)?;
        let target = readlinkat(&link, "").map_err(errno)?;
        target.into_string().map_err(|_| Errno::Ilseq)
    }

    /// The names in the directory at `path`, without `.` and `..` and those that are not UTF-8.
    pub fn names(&self, path: &Path) -> Result<Vec<Listed>, Errno> {
        let fd = self.at(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY).map_err(errno)?;
        let mut names = Vec::new();
        for entry in Dir::from_fd(fd).map_err(errno)?.iter() {
            let entry = entry.map_err(errno)?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name != "." && name != ".." {
                let kind = entry.file_type().map_or(Filetype::Unknown, listed_kind);
                names.push(Listed { name: name.to_owned(), ino: entry.ino(), kind });
            }
        }
        Ok(names)
    }

    fn at(&self, path: &Path, flags: OFlag) -> Result<OwnedFd, HostErrno> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        // As the last name, O_PATH opens a symbolic link itself.
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        openat2(&self.0, path, OpenHow::new().flags(flags).mode(Mode::empty()).resolve(resolve))
    }
}

fn status(stat: &FileStat) -> Status {
    let time = |seconds: i64, nanos: i64| {
        let seconds = u64::try_from(seconds).unwrap_or(0);
        seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(nanos).unwrap_or(0))
    };
    Status {
        kind: kind(SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits())),
        ino: stat.st_ino,
        links: stat.st_nlink,
        len: u64::try_from(stat.st_size).unwrap_or(0),
        times: Times {
            read_ns: time(stat.st_atime, stat.st_atime_nsec),
            changed_ns: time(stat.st_mtime, stat.st_mtime_nsec),
        },
    }
}

fn kind(flags: SFlag) -> Filetype {
    match flags {
        SFlag::S_IFDIR => Filetype::Directory,
        SFlag::S_IFREG => Filetype::RegularFile,
        SFlag::S_IFLNK => Filetype::SymbolicLink,
        SFlag::S_IFCHR => Filetype::CharacterDevice,
        SFlag::S_IFBLK => Filetype::BlockDevice,
        _ => Filetype::Unknown,
    }
}

fn listed_kind(kind: nix::dir::Type) -> Filetype {
    match kind {
        nix::dir::Type::Directory => Filetype::Directory,
        nix::dir::Type::File => Filetype::RegularFile,
        nix::dir::Type::Symlink => Filetype::SymbolicLink,
        nix::dir::Type::CharacterDevice => Filetype::CharacterDevice,
        nix::dir::Type::BlockDevice => Filetype::BlockDevice,
        _ => Filetype::Unknown,
    }
}

fn errno(error: HostErrno) -> Errno {
    match error {
        HostErrno::ENOENT => Errno::Noent,
        HostErrno::ENOTDIR => Errno::Notdir,
        HostErrno::EACCES | HostErrno::EPERM => Errno::Acces,
        HostErrno::ELOOP | HostErrno::EXDEV => Errno::Loop,
        HostErrno::EMFILE | HostErrno::ENFILE => Errno::Nfile,
        _ => Errno::Io,
    }
}
