//! The host's file system as the server may touch it: one component at a time, relative to a
//! descriptor that it holds, never through a symlink and never by a path of the guest's.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatVfsMountFlags};
use rustix::io::Errno;

/// The longest file name, in bytes (`NAME_MAX`).
const NAME_MAX: usize = 255;

/// Permission bits that a guest may set: no set-id bits on anything but the group bit of a
/// directory, which only passes the group on.
pub fn permitted_mode(mode: u32, is_dir: bool) -> u32 {
    mode & if is_dir { 0o3777 } else { 0o1777 }
}

/// Checks that `bytes` are exactly one component of a path.
///
/// # Errors
/// EACCES for a name that could lead elsewhere (`.`, `..`, one with a slash), ENAMETOOLONG over
/// 255 bytes, EINVAL for an empty one.
pub fn name(bytes: &[u8]) -> Result<&[u8], Errno> {
    match bytes {
        b"." | b".." => Err(Errno::ACCESS),
        _ if bytes.contains(&b'/') => Err(Errno::ACCESS),
        _ if bytes.is_empty() || bytes.contains(&0) => Err(Errno::INVAL),
        _ if bytes.len() > NAME_MAX => Err(Errno::NAMETOOLONG),
        _ => Ok(bytes),
    }
}

/// What tells two files of the host apart while both are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ident {
    pub dev: u64,
    pub ino: u64,
    /// Whether it was found below a mount that is read-only. What is held there is never written, so
    /// the same file is another one where it may be.
    pub is_fixed: bool,
}

impl Ident {
    pub fn of(stat: &Stat) -> Self {
        Self { dev: stat.st_dev, ino: stat.st_ino, is_fixed: false }
    }

    /// That of `held`, found in the directory `dir`.
    ///
    /// # Errors
    /// The host's.
    pub fn of_found(held: impl AsFd, stat: &Stat, dir: Ident) -> Result<Self, Errno> {
        let is_fixed = match stat.st_dev == dir.dev {
            true => dir.is_fixed,
            // Something is mounted here.
            false => rustix::fs::fstatvfs(held)?.f_flag.contains(StatVfsMountFlags::RDONLY),
        };
        Ok(Self { is_fixed, ..Self::of(stat) })
    }

    /// The same file below mounts of the other kind.
    pub fn other(self) -> Self {
        Self { is_fixed: !self.is_fixed, ..self }
    }

    /// A number that is the inode's on the folder's own device and differs from it on devices
    /// mounted below.
    pub fn number(self, root: Ident) -> u64 {
        self.ino ^ (self.dev ^ root.dev).rotate_left(40)
    }
}

/// The file of that name in `dir`, held without being opened; a symlink is itself.
///
/// # Errors
/// The host's.
pub fn hold(dir: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

/// What the name means now, without following a symlink.
///
/// # Errors
/// The host's.
pub fn look(dir: impl AsFd, name: &[u8]) -> Result<Stat, Errno> {
    rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// This process's own descriptors as files: what is held is opened through them, which nothing
/// else of the host's can take the place of.
#[derive(Debug)]
pub struct Descriptors {
    dir: OwnedFd,
    /// By which a path names an entry of `dir`.
    prefix: &'static str,
}

impl Descriptors {
    /// For a process whose working directory is `dir`, its own /proc/self/fd.
    pub fn of_jail(dir: OwnedFd) -> Self {
        Self { dir, prefix: "" }
    }

    /// For a process that sees /proc.
    ///
    /// # Errors
    /// The host's, where it does not.
    pub fn of_host() -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open("/proc/self/fd", flags, Mode::empty())?;
        Ok(Self { dir, prefix: "/proc/self/fd/" })
    }

    pub fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// The name of `held` in [`Self::dir`]; it leads to the file itself and no further.
    pub fn name(&self, held: impl AsFd) -> CString {
        CString::new(held.as_fd().as_raw_fd().to_string()).unwrap_or_default()
    }

    /// A path to the file itself.
    pub fn path(&self, held: impl AsFd) -> CString {
        let path = format!("{}{}", self.prefix, held.as_fd().as_raw_fd());
        CString::new(path).unwrap_or_default()
    }

    /// Opens what is held; only for regular files and directories: others may wait or act.
    ///
    /// # Errors
    /// The host's.
    pub fn open(&self, held: impl AsFd, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        let name: &CStr = &self.name(held);
        rustix::fs::openat(&self.dir, name, flags, Mode::empty())
    }

    /// Another hold of the same file.
    ///
    /// # Errors
    /// The host's.
    pub fn hold(&self, opened: impl AsFd) -> Result<OwnedFd, Errno> {
        self.open(opened, OFlags::PATH)
    }
}

/// File systems that are not of files: their entries act, or are the host's processes.
const CLOSED: [i64; 13] = [
    0x9fa0,      // PROC_SUPER_MAGIC
    0x6265_6572, // SYSFS_MAGIC
    0x1cd1,      // DEVPTS_SUPER_MAGIC
    0x6462_6720, // DEBUGFS_MAGIC
    0x7472_6163, // TRACEFS_MAGIC
    0x7363_6673, // SECURITYFS_MAGIC
    0xf97c_ff8c, // SELINUX_MAGIC
    0x0027_e0eb, // CGROUP_SUPER_MAGIC
    0x6367_7270, // CGROUP2_SUPER_MAGIC
    0xcafe_4a11, // BPF_FS_MAGIC
    0x6265_6570, // CONFIGFS_MAGIC
    0xde5e_81e4, // EFIVARFS_MAGIC
    0x4249_4e4d, // BINFMTFS_MAGIC
];

/// Whether what lies on `held`'s file system belongs to a folder.
///
/// # Errors
/// The host's.
pub fn is_open(held: impl AsFd) -> Result<bool, Errno> {
    let kind = rustix::fs::fstatfs(held)?.f_type;
    Ok(!CLOSED.contains(&kind))
}

/// The type byte of a directory entry (`DT_*`), or of a mode.
pub fn dirent_type(file_type: FileType) -> u32 {
    let kind = match file_type {
        FileType::Fifo => libc::DT_FIFO,
        FileType::CharacterDevice => libc::DT_CHR,
        FileType::Directory => libc::DT_DIR,
        FileType::BlockDevice => libc::DT_BLK,
        FileType::RegularFile => libc::DT_REG,
        FileType::Symlink => libc::DT_LNK,
        FileType::Socket => libc::DT_SOCK,
        FileType::Unknown => libc::DT_UNKNOWN,
    };
    kind.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_component() {
        for bad in [&b""[..], b".", b"..", b"/", b"a/b", b"../x", b"/etc", b"a\0b", &[b'n'; 256]] {
            assert!(name(bad).is_err(), "{bad:?}");
        }
        for good in [&b"a"[..], b"...", b"..a", b" ", b"\xff\xfe", &[b'n'; 255]] {
            assert!(name(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn set_id_bits_are_dropped() {
        assert_eq!(permitted_mode(0o106_755, false), 0o755);
        assert_eq!(permitted_mode(0o1777, true), 0o1777);
        assert_eq!(permitted_mode(0o6755, true), 0o2755);
    }

    #[test]
    fn inodes_of_other_devices_have_other_numbers() {
        let ident = |dev, ino| Ident { dev, ino, is_fixed: false };
        let root = ident(0xfe01, 2);
        assert_eq!(ident(0xfe01, 77).number(root), 77);
        assert_ne!(ident(0xfe02, 77).number(root), 77);
    }

    #[test]
    fn a_process_of_the_host_is_no_file() {
        assert_eq!(is_open(std::fs::File::open("/proc/self").unwrap()), Ok(false));
        assert_eq!(is_open(tempfile::tempfile().unwrap()), Ok(true));
    }
}
