//! Mounts by descriptors: nothing is looked for by its path twice.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use nix::NixPath;
use nix::errno::Errno;

/// A mount that lies nowhere yet.
#[derive(Debug)]
pub struct Tree(OwnedFd);

impl Tree {
    /// One more mount of what lies at `path`, and of what is mounted below it.
    ///
    /// # Errors
    /// The host's (open_tree(2)).
    pub fn take(path: &Path) -> std::io::Result<Self> {
        Ok(Self(clone_tree(path)?))
    }

    /// The same without what is mounted below.
    ///
    /// # Errors
    /// The host's.
    pub fn take_alone(path: &Path) -> std::io::Result<Self> {
        Ok(Self(open_tree(libc::AT_FDCWD, path, 0)?))
    }

    /// Takes set-id bits and devices from all of it, and without `writable` every change.
    ///
    /// # Errors
    /// The host's (mount_setattr(2)).
    pub fn restrict(&self, writable: bool) -> std::io::Result<()> {
        Ok(restrict_tree(&self.0, writable)?)
    }

    /// Has what others mount below what it was taken of not come into it, from now on.
    ///
    /// # Errors
    /// The host's (mount_setattr(2)).
    pub fn keep(&self) -> std::io::Result<()> {
        let private = Attributes { propagation: libc::MS_PRIVATE, ..Attributes::default() };
        Ok(set_attributes(&self.0, &private, libc::AT_RECURSIVE)?)
    }

    /// Has it lie at `target`.
    ///
    /// # Errors
    /// The host's (move_mount(2)).
    pub fn put(&self, target: &Path) -> std::io::Result<()> {
        Ok(attach(&self.0, target)?)
    }
}

/// A mount of `path` and of what is mounted below it, which is nowhere (open_tree(2)).
pub(super) fn clone_tree(path: &Path) -> nix::Result<OwnedFd> {
    open_tree(libc::AT_FDCWD, path, libc::AT_RECURSIVE)
}

/// A mount of `held` alone, which is nowhere.
pub(super) fn clone_mount(held: &File) -> nix::Result<OwnedFd> {
    open_tree(held.as_raw_fd(), Path::new(""), libc::AT_EMPTY_PATH)
}

fn open_tree(at: RawFd, path: &Path, flags: i32) -> nix::Result<OwnedFd> {
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | flags as u32;
    // SAFETY: the path outlives the call, which returns a new descriptor or -1. Needed because
    // nix does not wrap it.
    let tree = path.with_nix_path(|path| unsafe {
        libc::syscall(libc::SYS_open_tree, at, path.as_ptr(), flags)
    })?;
    let tree = Errno::result(tree)? as RawFd;
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(tree) })
}

/// Takes set-id bits and devices from all mounts of `tree`, and without `writable` every change.
pub(super) fn restrict_tree(tree: &OwnedFd, writable: bool) -> nix::Result<()> {
    restrict(tree, writable, libc::MOUNT_ATTR_NODEV, libc::AT_RECURSIVE)
}

/// The same for one mount; its devices are left to it if there `are_devices`.
pub(super) fn restrict_mount(mount: &OwnedFd, writable: bool, devices: bool) -> nix::Result<()> {
    restrict(mount, writable, if devices { 0 } else { libc::MOUNT_ATTR_NODEV }, 0)
}

/// `struct mount_attr`.
#[derive(Default)]
#[repr(C)]
struct Attributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Sets what holds for mounts; it takes nothing away that the host has set.
fn restrict(mount: &OwnedFd, writable: bool, set: u64, flags: i32) -> nix::Result<()> {
    let read_only = if writable { 0 } else { libc::MOUNT_ATTR_RDONLY };
    let set = libc::MOUNT_ATTR_NOSUID | read_only | set;
    set_attributes(mount, &Attributes { set, ..Attributes::default() }, flags)
}

/// mount_setattr(2) for what a descriptor holds.
fn set_attributes(mount: &OwnedFd, attributes: &Attributes, flags: i32) -> nix::Result<()> {
    // SAFETY: the path and the structure, whose true size is told, outlive the call. Needed
    // because nix does not wrap it.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | flags,
            std::ptr::from_ref(attributes),
            size_of::<Attributes>(),
        )
    };
    Errno::result(set).map(drop)
}

/// Mounts `tree` at `target` (move_mount(2)).
pub(super) fn attach(tree: &OwnedFd, target: &Path) -> nix::Result<()> {
    move_mount(tree, libc::AT_FDCWD, target, 0)
}

/// Mounts `tree` on what is held.
pub(super) fn attach_to(tree: &OwnedFd, target: &File) -> nix::Result<()> {
    let flags = libc::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(tree, target.as_raw_fd(), Path::new(""), flags)
}

fn move_mount(tree: &OwnedFd, at: RawFd, target: &Path, flags: u32) -> nix::Result<()> {
    let flags = libc::MOVE_MOUNT_F_EMPTY_PATH | flags;
    // SAFETY: both paths outlive the call. Needed because nix does not wrap it.
    let moved = target.with_nix_path(|target| unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            at,
            target.as_ptr(),
            flags,
        )
    })?;
    Errno::result(moved).map(drop)
}
