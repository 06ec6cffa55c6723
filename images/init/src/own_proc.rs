//! Init's own /proc: a mount of the guest kernel's pid namespace that has never lain anywhere in the
//! file system, so that programs find neither it nor, by it, this process, and that nothing which
//! they prepare for the next start comes to be taken for it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::OnceLock;

use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::mount::MsFlags;
use nix::sys::stat::{Mode, fstatat, stat};
use nix::unistd::fchdir;

use crate::error::{Context, InitError};
use crate::mounting;

/// Its root, once it was made; in tests, /proc is the one.
static ROOT: OnceLock<File> = OnceLock::new();

/// Makes it, before anything that a program has had a hand in is looked at.
pub fn make() -> Result<(), InitError> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let root = mounting::make("proc", "proc", flags, "").context(|| "making a /proc of its own")?;
    ROOT.set(root).map_err(|_| InitError::guest("its own /proc was made before"))
}

/// Opens `path`, which is relative to /proc, to be read.
pub fn open(path: &str) -> io::Result<File> {
    open_with(path, OFlag::O_RDONLY)
}

fn open_with(path: &str, how: OFlag) -> io::Result<File> {
    let flags = how | OFlag::O_CLOEXEC;
    match ROOT.get() {
        Some(root) => Ok(openat(root.as_fd(), path, flags, Mode::empty())?.into()),
        None => File::options()
            .read(!how.contains(OFlag::O_WRONLY))
            .write(how.contains(OFlag::O_WRONLY))
            .custom_flags(how.bits())
            .open(format!("/proc/{path}")),
    }
}

/// Opens what `found` is, to be read, without waiting for anybody who holds it.
pub fn reopen(found: &File) -> io::Result<File> {
    let path = format!("self/fd/{}", found.as_raw_fd());
    open_with(&path, OFlag::O_RDONLY | OFlag::O_NONBLOCK)
}

/// Opens what `found` is, a device that nobody is waited for, as programs open it.
pub fn open_again(found: &File) -> io::Result<File> {
    open_with(&format!("self/fd/{}", found.as_raw_fd()), OFlag::O_RDONLY)
}

/// Opens what `found` is, to be written anew, without waiting for anybody who holds it.
pub fn reopen_to_write(found: &File) -> io::Result<File> {
    let path = format!("self/fd/{}", found.as_raw_fd());
    open_with(&path, OFlag::O_WRONLY | OFlag::O_TRUNC | OFlag::O_NONBLOCK)
}

/// Whether links `one` and `other` lead to the same file, which is not opened: whoever holds it
/// would be waited for.
pub fn is_same(one: &str, other: &str) -> bool {
    let identity = |path: &str| {
        let found = match ROOT.get() {
            Some(root) => fstatat(root.as_fd(), path, AtFlags::empty()),
            None => stat(format!("/proc/{path}").as_str()),
        };
        found.ok().map(|found| (found.st_dev, found.st_ino))
    };
    identity(one).is_some_and(|found| Some(found) == identity(other))
}

/// The pid by which process `pid` knows itself (proc_pid_status(5)).
pub fn innermost_pid(pid: i32) -> Option<i32> {
    let status = read(&format!("{pid}/status"));
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_whitespace().next_back()?.parse().ok()
}

/// What the kernel says in `path`; nothing where it does not say it.
pub fn read(path: &str) -> String {
    let mut text = String::new();
    // A kernel without it says nothing.
    let _ = open(path).and_then(|mut file| file.read_to_string(&mut text));
    text
}

/// The names in the directory `path`; none where it cannot be read.
pub fn names(path: &str) -> Vec<String> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let opened = match ROOT.get() {
        Some(root) => Dir::openat(root.as_fd(), path, flags, Mode::empty()),
        None => Dir::open(format!("/proc/{path}").as_str(), flags, Mode::empty()),
    };
    let entries = opened.into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !name.starts_with('.')).collect()
}

/// Writes `text` to `path`.
pub fn try_write(path: &str, text: &str) -> io::Result<()> {
    open_with(path, OFlag::O_WRONLY)?.write_all(text.as_bytes())
}

/// As [`try_write`], for a setting that a kernel may be without.
pub fn write(path: &str, text: &str) {
    let _ = try_write(path, text);
}

/// Makes it the working directory, for calls that take only paths.
pub fn enter() -> nix::Result<()> {
    ROOT.get().map_or(Ok(()), |root| fchdir(root.as_fd()))
}
