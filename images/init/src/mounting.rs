//! Mounts by descriptors: made where they lie nowhere, and put where a directory is that was found
//! before ([`crate::paths`]). No path is looked up a second time.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::mount::{MntFlags, MsFlags, umount2};
use nix::unistd::{chdir, chroot, pivot_root};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

use crate::sys;

/// What the kernel has for the flags of mount(2) that are of a mount and not of its file system.
const OF_MOUNTS: [(MsFlags, MountAttrFlags); 7] = [
    (MsFlags::MS_RDONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
    (MsFlags::MS_NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
    (MsFlags::MS_NODEV, MountAttrFlags::MOUNT_ATTR_NODEV),
    (MsFlags::MS_NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
    (MsFlags::MS_NOATIME, MountAttrFlags::MOUNT_ATTR_NOATIME),
    (MsFlags::MS_STRICTATIME, MountAttrFlags::MOUNT_ATTR_STRICTATIME),
    (MsFlags::MS_NODIRATIME, MountAttrFlags::MOUNT_ATTR_NODIRATIME),
];
/// Of those, the ones of which a mount has one (mount_setattr(2)).
const TIMES: MsFlags = MsFlags::MS_NOATIME.union(MsFlags::MS_STRICTATIME);

/// A file system of `kind` that lies nowhere yet, with options as mount(8) has them; its root.
pub fn make(kind: &str, source: &str, flags: MsFlags, data: &str) -> io::Result<File> {
    let made = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(made.as_fd(), "source", source)?;
    for (flag, name) in [(MsFlags::MS_RDONLY, "ro"), (MsFlags::MS_SYNCHRONOUS, "sync")] {
        if flags.contains(flag) {
            fsconfig_set_flag(made.as_fd(), name)?;
        }
    }
    for option in data.split(',').filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some((key, value)) => fsconfig_set_string(made.as_fd(), key, value)?,
            None => fsconfig_set_flag(made.as_fd(), option)?,
        }
    }
    fsconfig_create(made.as_fd())?;
    let mounted = fsmount(made.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes(flags))?;
    Ok(mounted.into())
}

fn attributes(flags: MsFlags) -> MountAttrFlags {
    let set = OF_MOUNTS.into_iter().filter(|(flag, _)| flags.contains(*flag));
    set.fold(MountAttrFlags::empty(), |all, (_, attribute)| all | attribute)
}

/// One more mount of what `of` is, which lies nowhere yet; what lies below comes too, or not.
pub fn copy(of: impl AsFd, with_below: bool) -> io::Result<File> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    flags.set(OpenTreeFlags::AT_RECURSIVE, with_below);
    let copied: OwnedFd = open_tree(of.as_fd(), c"", flags)?;
    Ok(copied.into())
}

/// Gives a mount these flags in the stead of its own, but for its times where none are named.
pub fn change(mount: &File, flags: MsFlags) -> io::Result<()> {
    let own = OF_MOUNTS.into_iter().map(|(flag, _)| flag).filter(|flag| !TIMES.contains(*flag));
    let cleared = attributes(own.collect::<MsFlags>() - flags);
    let times = MountAttrFlags::MOUNT_ATTR__ATIME;
    let cleared = if flags.intersects(TIMES) { cleared | times } else { cleared };
    sys::set_mount(mount, attributes(flags).bits().into(), cleared.bits().into())
}

/// Has a mount lie on `target`.
pub fn put(mount: &File, target: &File) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount.as_fd(), c"", target.as_fd(), c"", flags)?)
}

/// Makes `merged`, a mount below the working directory, the root of this thread's namespace, and
/// detaches all the rest.
pub fn switch(merged: &str) -> nix::Result<()> {
    chroot(".")?;
    // What lies on it is the cell's own root.
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir(merged)?;
    // The old root comes to lie on the new one.
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_those_of_the_call_by_path() {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_SYNCHRONOUS;
        let expected = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        assert_eq!(attributes(flags), expected);
        assert!(attributes(MsFlags::MS_RELATIME).is_empty());
    }
}
