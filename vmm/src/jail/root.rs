//! The empty root of a cell: a small tmpfs with a few read-only files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::FsFlags;

use super::JailError;

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
        let target = self.path.join(name);
        step(&format!("create /{name}"), || io_to_errno(File::create(&target)))?;
        bind(source, &target, &format!("/{name}"), false)
    }

    /// Makes the host's file or directory `source` visible at its own place, to be read, and
    /// changed if it is `writable`.
    pub fn show(&self, source: &Path, writable: bool) -> Result<(), JailError> {
        let at = source.display();
        let place = source.strip_prefix("/").unwrap_or(source);
        let target = self.path.join(place);
        let is_directory = source.is_dir();
        step(&format!("create {at}"), || {
            let parent = if is_directory { Some(target.as_path()) } else { target.parent() };
            io_to_errno(parent.map_or(Ok(()), fs::create_dir_all))?;
            // Below a directory that is shown it is the host's own file.
            if is_directory || target.exists() {
                return Ok(());
            }
            io_to_errno(File::create_new(&target)).map(drop)
        })?;
        bind(source, &target, &at.to_string(), writable)
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

fn bind(source: &Path, target: &Path, name: &str, writable: bool) -> Result<(), JailError> {
    let none: Option<&str> = None;
    step(&format!("bind {}", source.display()), || {
        mount(Some(source), target, none, MsFlags::MS_BIND, none)
    })?;
    step(&format!("restrict {name}"), || {
        // What the host's own mount forbids stays forbidden: it is not ours to take away.
        let kept = nix::sys::statvfs::statvfs(target)?.flags();
        let kept = [
            (FsFlags::ST_RDONLY, MsFlags::MS_RDONLY),
            (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
            (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
            (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
            (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
        ]
        .into_iter()
        .filter(|(flag, _)| kept.contains(*flag));
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID;
        // Who names a device has it; nobody finds one below a folder.
        let is_device = fs::metadata(target).is_ok_and(|it| it.file_type().is_char_device());
        let flags = if is_device { flags } else { flags | MsFlags::MS_NODEV };
        let flags = if writable { flags } else { flags | MsFlags::MS_RDONLY };
        let flags = kept.fold(flags, |flags, (_, flag)| flags | flag);
        mount(none, target, none, flags, none)
    })
}

fn step<T>(name: &str, run: impl FnOnce() -> nix::Result<T>) -> Result<T, JailError> {
    run().map_err(|errno| JailError::Root { step: name.to_owned(), source: errno.into() })
}

fn io_to_errno<T>(result: io::Result<T>) -> nix::Result<T> {
    result.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}
