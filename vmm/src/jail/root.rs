//! The empty root of a cell: a small tmpfs with a few read-only files.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, mkdirat};

use super::JailError;
use super::mounts::{attach_to, clone_mount, restrict_mount};
use super::stage::Shown;

/// A root under construction. Files and sockets are added while the host's
/// file system is still in sight; [`JailRoot::seal`] leaves it behind.
#[derive(Debug)]
pub struct JailRoot {
    path: PathBuf,
}

impl JailRoot {
    /// Mounts a tmpfs over `mount_point` in the caller's own mount namespace
    /// and makes it the working directory.
    pub fn new(mount_point: &Path) -> Result<Self, JailError> {
        let none: Option<&str> = None;
        step("make mounts private", || {
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        })?;
        step("mount a tmpfs", || {
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
            mount(Some("cell"), mount_point, Some("tmpfs"), flags, Some("mode=0755,size=256k"))
        })?;
        step("enter it", || nix::unistd::chdir(mount_point))?;
        Ok(Self { path: mount_point.to_owned() })
    }

    /// Makes the host file `source` visible as `/name`, read-only.
    pub fn bind_file(&self, source: &Path, name: &str) -> Result<(), JailError> {
        let held = step(&format!("find {}", source.display()), || hold(source, true))?;
        let target = step(&format!("create /{name}"), || self.target(Path::new(name), false))?;
        bind(&held, &target, &format!("/{name}"), false)
    }

    /// Makes the host's file or directory visible at its own place. What is mounted below a
    /// directory does not come with it.
    pub fn show(&self, Shown { path, writable, follows }: &Shown) -> Result<(), JailError> {
        let at = path.display();
        let held = step(&format!("find {at}"), || hold(path, *follows))?;
        let kind = step(&format!("find {at}"), || io_to_errno(held.metadata()))?.file_type();
        let target = step(&format!("create {at}"), || self.target(path, kind.is_dir()))?;
        bind(&held, &target, &at.to_string(), *writable)
    }

    /// Where the host's `path` comes in this root. Below a directory that is shown that is the
    /// host's own, which others may change: a link there is not followed.
    fn target(&self, path: &Path, is_directory: bool) -> nix::Result<File> {
        let place = path.strip_prefix("/").unwrap_or(path);
        let inside = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        let mut here = hold(&self.path, true)?;
        let mut parts = place.components().peekable();
        while let Some(part) = parts.next() {
            let part = Path::new(part.as_os_str());
            here = match held_at(&here, part, inside) {
                Err(Errno::ENOENT) => {
                    make(&here, part, is_directory || parts.peek().is_some())?;
                    held_at(&here, part, inside)?
                }
                held => held?,
            };
        }
        Ok(here)
    }

    /// A unix socket that listens as `/name`, open to the guest kernel's id.
    pub fn listen(&self, name: &str) -> Result<UnixListener, JailError> {
        // Relative to the working directory: a socket's path is at most 107
        // bytes, and the cell's directory may be deeper than that.
        let listener = UnixListener::bind(name)
            .and_then(|listener| {
                fs::set_permissions(name, fs::Permissions::from_mode(0o666)).map(|()| listener)
            })
            .map_err(|source| JailError::Root { step: format!("listen on /{name}"), source })?;
        Ok(listener)
    }

    /// Makes the tmpfs the root, detaches the host's file system and turns
    /// everything read-only. Descriptors opened before stay usable.
    pub fn seal(self) -> Result<(), JailError> {
        let none: Option<&str> = None;
        match nix::unistd::pivot_root(".", ".") {
            // pivot_root(2), ERRORS: of what it means by this only the initial ramfs is left,
            // as all mounts are private, this is one, and namespaces are not had in a chroot.
            Err(Errno::EINVAL) => return Err(JailError::Initramfs),
            pivoted => step("pivot into it", || pivoted)?,
        }
        step("detach the host's root", || umount2(".", MntFlags::MNT_DETACH))?;
        step("enter the root", || nix::unistd::chdir("/"))?;
        step("make the root read-only", || {
            let flags = MsFlags::MS_REMOUNT
                | MsFlags::MS_RDONLY
                | MsFlags::MS_NOSUID
                | MsFlags::MS_NODEV
                | MsFlags::MS_BIND;
            mount(none, "/", none, flags, none)
        })
    }
}

/// Finds `path`, to be named and no more.
fn hold(path: &Path, follows: bool) -> nix::Result<File> {
    let links = if follows { ResolveFlag::empty() } else { ResolveFlag::RESOLVE_NO_SYMLINKS };
    held_at(AT_FDCWD, path, links | ResolveFlag::RESOLVE_NO_MAGICLINKS)
}

fn held_at(at: impl AsFd, path: &Path, resolve: ResolveFlag) -> nix::Result<File> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    openat2(at, path, OpenHow::new().flags(flags).resolve(resolve)).map(File::from)
}

/// Makes the directory or the file `name` in `parent`.
fn make(parent: &File, name: &Path, is_directory: bool) -> nix::Result<()> {
    let mode = Mode::from_bits_truncate(0o755);
    if is_directory {
        return mkdirat(parent, name, mode);
    }
    let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    openat(parent, name, flags, mode).map(drop)
}

/// Mounts what `held` names on `target`, which is called `name` in errors.
fn bind(held: &File, target: &File, name: &str, writable: bool) -> Result<(), JailError> {
    let mount = step(&format!("take {name}"), || clone_mount(held))?;
    // Who names a device has it; nobody finds one below a folder.
    let kind = step(&format!("take {name}"), || io_to_errno(held.metadata()))?.file_type();
    let devices = kind.is_char_device();
    step(&format!("restrict {name}"), || restrict_mount(&mount, writable, devices))?;
    step(&format!("bind {name}"), || attach_to(&mount, target))
}

fn step<T>(name: &str, run: impl FnOnce() -> nix::Result<T>) -> Result<T, JailError> {
    run().map_err(|errno| JailError::Root { step: name.to_owned(), source: errno.into() })
}

fn io_to_errno<T>(result: io::Result<T>) -> nix::Result<T> {
    result.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}
