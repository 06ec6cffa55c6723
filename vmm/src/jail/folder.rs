//! The root of a process that serves a folder: the folder itself, and nothing else of the host. Or
//! that of one that is to find a socket there.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::mounts::{attach, clone_tree, restrict_tree};
use super::{JailError, PathAccess, PathGrant};

/// Where the new root is mounted while it is made: it is there on every host.
const MOUNT_POINT: &str = "/proc";

/// What a process that serves a folder has once it is in its root.
#[derive(Debug)]
pub struct FolderRoot {
    /// The root: the folder, or for a file a directory with nothing in it.
    pub root: OwnedFd,
    /// What is not the root: a file, or a folder that is only held.
    pub file: Option<OwnedFd>,
    /// The process's own descriptors as files; also its working directory.
    pub descriptors: OwnedFd,
}

impl FolderRoot {
    /// Makes `path`, which is to be the same file as `planned`, the caller's root, or all that it
    /// has for one that is no directory. What is mounted below comes with it; devices and set-id
    /// bits count for nothing there, and without `writable` nothing can be changed. What the host
    /// mounts there later comes as well if it `grows`, with the flags that the host gives it.
    ///
    /// The caller is in mount and process namespaces of its own and has one thread.
    ///
    /// # Errors
    /// [`JailError::Root`] with the step that the host did not allow.
    pub fn enter(
        path: &Path,
        planned: &File,
        writable: bool,
        grows: bool,
    ) -> Result<Self, JailError> {
        Self::make(path, planned, writable, grows, true)
    }

    /// The same with an empty directory as the root. No path leads to the folder: it is held.
    ///
    /// # Errors
    /// As of [`Self::enter`].
    pub fn hold(path: &Path, planned: &File) -> Result<Self, JailError> {
        Self::make(path, planned, false, false, false)
    }

    fn make(
        path: &Path,
        planned: &File,
        writable: bool,
        grows: bool,
        shown: bool,
    ) -> Result<Self, JailError> {
        let none: Option<&str> = None;
        let kind = if grows { MsFlags::MS_SLAVE } else { MsFlags::MS_PRIVATE };
        step("make mounts its own", || mount(none, "/", none, MsFlags::MS_REC | kind, none))?;
        let at = path.display();
        let tree = step(&format!("take {at}"), || clone_tree(path))?;
        let is_same = |one: &File| -> io::Result<bool> {
            let (one, other) = (one.metadata()?, planned.metadata()?);
            Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
        };
        let held = File::from(tree);
        if !is_same(&held).unwrap_or(false) {
            let source = io::Error::other("another took its place; try again");
            return Err(JailError::Root { step: format!("take {at}"), source });
        }
        let is_root = shown && held.metadata().is_ok_and(|held| held.is_dir());
        let tree = OwnedFd::from(held);
        step(&format!("restrict {at}"), || restrict_tree(&tree, writable))?;
        let descriptors = step("take its descriptors", || clone_tree(Path::new("/proc/self/fd")))?;
        if is_root {
            step("mount it", || attach(&tree, Path::new(MOUNT_POINT)))?;
        } else {
            step("mount a tmpfs", || {
                let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_RDONLY;
                mount(Some("none"), MOUNT_POINT, Some("tmpfs"), flags, Some("mode=0555,size=4k"))
            })?;
        }
        step("enter it", || nix::unistd::chdir(MOUNT_POINT))?;
        match nix::unistd::pivot_root(".", ".") {
            // As in `root.rs`.
            Err(Errno::EINVAL) => return Err(JailError::Initramfs),
            pivoted => step("pivot into it", || pivoted)?,
        }
        step("detach the host's root", || umount2(".", MntFlags::MNT_DETACH))?;
        let root = step("open the root", || {
            let flags = libc::O_DIRECTORY | libc::O_PATH;
            File::options()
                .read(true)
                .custom_flags(flags)
                .open("/")
                .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
        })?;
        step("enter its descriptors", || nix::unistd::fchdir(&descriptors))?;
        Ok(Self { root: root.into(), file: (!is_root).then_some(tree), descriptors })
    }

    /// What it is to reach: the folder, or the file and the directory with nothing in it.
    pub fn grants(&self, access: PathAccess) -> Vec<PathGrant<'_>> {
        let root = |access| PathGrant { at: self.root.as_fd(), access };
        match &self.file {
            Some(file) => vec![root(PathAccess::Read), PathGrant { at: file.as_fd(), access }],
            None => vec![root(access)],
        }
    }
}

/// Closes all descriptors but `kept` and the standard streams.
///
/// # Errors
/// close_range(2).
pub fn close_all_but(kept: &[RawFd]) -> io::Result<()> {
    let mut kept: Vec<u32> = kept.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    kept.sort_unstable();
    let mut first = 3;
    for last in kept.into_iter().map(|fd| fd - 1).chain([u32::MAX]) {
        if first <= last {
            // SAFETY: close_range takes integers. What it closes is the caller's to name: a
            // process of its own closes what it was born with and does not know. Needed because
            // nix does not wrap it.
            if unsafe { libc::close_range(first, last, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        first = last.saturating_add(2).max(first);
    }
    Ok(())
}

fn step<T>(name: &str, run: impl FnOnce() -> nix::Result<T>) -> Result<T, JailError> {
    run().map_err(|errno| JailError::Root { step: name.to_owned(), source: errno.into() })
}
