//! The depot of a cell: what of the host its containers have, below one directory.
//!
//! ```text
//! /run/exocell-containerd/KEY.depot      a file system in memory, in the shim's mount namespace
//!   └─ c1 ┬─ root    the root file system that containerd handed over
//!         └─ m0, m1  what the specification binds: files and directories of the host
//! ```
//! One device of the guest serves it. It is a shared mount, so that what is mounted in it later, for
//! the next container of a pod, comes to the process that serves it. Devices and set-id bits count
//! for nothing there, as in any folder of a cell, and what is bound read-only cannot be written by
//! that process.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use containerd_shim_protos::api::Mount;
use exocell_cell::agent::DEPOT_ROOT;
use exocell_cell::vmm::jail::Tree;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::bundle::Bundle;
use crate::error::{Result, ShimError};
use crate::mounts;
use crate::refusal::refused;
use crate::spec::Bind;

/// The depot of one cell.
#[derive(Debug)]
pub struct Depot {
    path: PathBuf,
    made: AtomicU32,
}

/// A container's directory in it.
#[derive(Debug)]
pub struct Place {
    pub name: String,
    path: PathBuf,
    mounted: Vec<PathBuf>,
}

/// How something of the host is there.
#[derive(Debug, Clone, Copy)]
struct Flags {
    writable: bool,
    /// With what is mounted below.
    recursive: bool,
    /// With what the host mounts below later.
    follows: bool,
}

impl Depot {
    /// Makes it at `path`; the caller is in a mount namespace of its own.
    ///
    /// # Errors
    /// The host's.
    pub fn make(path: &Path) -> Result<Self> {
        let failed = || ShimError::host(format!("cannot make the depot {}", path.display()));
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(failed()(error));
            }
            _ => {}
        }
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let none = None::<&str>;
        mount(Some("depot"), path, Some("tmpfs"), flags, Some("mode=755,size=4m"))
            .and_then(|()| mount(none, path, none, MsFlags::MS_SHARED, none))
            .map_err(ShimError::host(format!("cannot mount the depot {}", path.display())))?;
        Ok(Self { path: path.to_owned(), made: AtomicU32::new(0) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Has in it what the container of `bundle` has of the host: the file systems `rootfs`, or the
    /// directory that its specification names, and what that binds.
    ///
    /// # Errors
    /// What cannot be mounted, or is nothing that a cell can have.
    pub fn add(&self, bundle: &Bundle, rootfs: &[Mount]) -> Result<Place> {
        let name = format!("c{}", self.made.fetch_add(1, Ordering::Relaxed) + 1);
        let mut place = Place { path: self.path.join(&name), name, mounted: Vec::new() };
        place.make(DEPOT_ROOT, true)?;
        place.add_root(bundle, rootfs)?;
        for bind in &bundle.wanted.binds {
            place.add_bind(bind)?;
        }
        Ok(place)
    }
}

impl Drop for Depot {
    fn drop(&mut self) {
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
        let _ = fs::remove_dir(&self.path);
    }
}

impl Place {
    /// A place for a mount.
    fn make(&self, name: &str, is_directory: bool) -> Result<PathBuf> {
        let path = self.path.join(name);
        let made = match is_directory {
            true => fs::create_dir_all(&path),
            false => File::create_new(&path).map(drop),
        };
        made.map_err(ShimError::host(format!("cannot make {}", path.display())))?;
        Ok(path)
    }

    /// Mounted where containerd has a directory for it, and from there put into the depot with the
    /// flags that it has there: those would not come along later.
    fn add_root(&mut self, bundle: &Bundle, rootfs: &[Mount]) -> Result<()> {
        let at = &bundle.wanted.root;
        if !at.is_dir() && !rootfs.is_empty() {
            fs::create_dir(at).map_err(ShimError::host(format!("cannot make {}", at.display())))?;
        }
        mounts::mount_all(rootfs, at)?;
        let whole = Flags { writable: true, recursive: true, follows: false };
        let put = self.put(at, DEPOT_ROOT, whole);
        mounts::unmount(at, rootfs.len());
        put
    }

    fn add_bind(&mut self, bind: &Bind) -> Result<()> {
        let Bind { name, source, destination, writable, recursive, follows } = bind;
        let found = fs::canonicalize(source)
            .and_then(|real| Ok((fs::metadata(&real)?.file_type(), real)))
            .map_err(ShimError::host(format!("cannot bind {} on {destination}", source.display())));
        let (kind, real) = found?;
        let of_kernel = ["/proc", "/sys", "/dev"].iter().any(|own| real.starts_with(own))
            && !real.starts_with("/dev/shm");
        if of_kernel {
            return Err(refused(
                format_args!("the bind of {} on {destination}", real.display()),
                "it is the host's kernel's; a guest has a kernel of its own",
            ));
        }
        if kind.is_socket() || kind.is_fifo() || kind.is_block_device() || kind.is_char_device() {
            return Err(refused(
                format_args!("the bind of {} on {destination}", real.display()),
                "it is a socket, pipe or device of the host, which no cell reaches; bind a file or \
                 a directory",
            ));
        }
        self.make(name, kind.is_dir())?;
        let (writable, recursive, follows) = (*writable, *recursive, *follows);
        self.put(&real, name, Flags { writable, recursive, follows })
    }

    fn put(&mut self, source: &Path, name: &str, flags: Flags) -> Result<()> {
        let target = self.path.join(name);
        let taken = if flags.recursive { Tree::take(source) } else { Tree::take_alone(source) };
        // The depot is shared with those who serve it: what lies in it follows the host in their
        // mounts, too, or in none.
        let kept = |tree: &Tree| if flags.follows { Ok(()) } else { tree.keep() };
        taken
            .and_then(|tree| tree.restrict(flags.writable).map(|()| tree))
            .and_then(|tree| kept(&tree).map(|()| tree))
            .and_then(|tree| tree.put(&target))
            .map_err(ShimError::host(format!("cannot mount {}", source.display())))?;
        self.mounted.push(target);
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for path in self.mounted.drain(..).rev() {
            let _ = umount2(&path, MntFlags::MNT_DETACH);
        }
        // Places of mounts, and nothing else: what is still in use stays.
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let _ = if path.is_dir() { fs::remove_dir(&path) } else { fs::remove_file(&path) };
        }
        let _ = fs::remove_dir(&self.path);
    }
}
