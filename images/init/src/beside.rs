//! The root of a container beside the cell's own program.
//!
//! ```text
//! first root ── /private ── containers/NAME ┬─ image: erofs, a loop device over a piece of the disk
//!                                           ├─ upper, work: what the container changes
//!                                           └─ root: overlay of both ──> becomes the root
//! ```
//! With a depot, the root is a directory of that ([`crate::depot`]).
//!
//! All of it is mounted in the container's own namespace, by a thread that then leaves everything
//! else of that namespace behind (pivot_root(2)): nothing of the cell's own program is there, and
//! the mounts end with the container's last program.

use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use exocell_agent::Contain;
use exocell_agent::oci::Spec;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{fchdir, sethostname};

use crate::cgroup::Group;
use crate::container::Container;
use crate::depot;
use crate::error::{Context, InitError};
use crate::mounting::switch;
use crate::mounts::Binds;
use crate::root::{Cell, Named};
use crate::transfer::UPPER;
use crate::{container, dev, log, network, removal, root, sys};

/// Where all of them are on the private disk.
pub const CONTAINERS: &str = "containers";
/// The private disk, from the first root.
const PRIVATE: &str = "private";
/// The longest name of one.
const NAME_BYTES_MAX: usize = 64;
/// Loop devices for images; programs have those of lower numbers.
const LOOPS: std::ops::Range<u32> = 512..576;

/// What a thread has that is in a container's new namespaces.
pub struct Entered {
    /// The root of its file system of terminals.
    pub terminals: Arc<File>,
    /// What its image holds; `None` where that is all of its root.
    pub image: Option<File>,
    /// What its specification binds; `None` where that is in its root.
    pub binds: Option<Binds>,
}

/// What one is made of.
pub struct Beside {
    wanted: Contain,
    keeps_files: AtomicBool,
    /// The control group of its programs.
    pub group: Group,
    /// The root of its file system of terminals, once it has one.
    terminals: Mutex<Option<Arc<File>>>,
    /// The root of its image, where it has changes over that.
    image: Mutex<Option<File>>,
}

impl Beside {
    /// Makes room for `wanted`.
    ///
    /// # Errors
    /// The cell cannot have it.
    pub fn new(cell: &Cell, wanted: Contain) -> Result<Self, InitError> {
        check_name(&wanted.name)?;
        if wanted.depot.is_some() != cell.boot.depot.is_some() {
            return Err(InitError::invalid("a container's root is in the depot if there is one"));
        }
        wanted.depot.as_deref().map_or(Ok(()), check_name)?;
        if cell.private.is_none() && wanted.depot.is_none() {
            return Err(InitError::invalid(
                "the cell cannot be written, so that it has no place for another container",
            ));
        }
        let group = cell.groups.add(&group_name(wanted.container))?;
        let keeps_files = AtomicBool::new(wanted.keeps_files);
        let (terminals, image) = (Mutex::default(), Mutex::default());
        Ok(Self { wanted, keeps_files, group, terminals, image })
    }

    pub fn name(&self) -> &str {
        &self.wanted.name
    }

    /// Where its changes are on the private disk; `None` if it can make none.
    pub fn upper(&self) -> Option<String> {
        let upper = || format!("{CONTAINERS}/{}/{UPPER}", self.wanted.name);
        (!self.wanted.read_only && self.wanted.depot.is_none()).then(upper)
    }

    /// The root of its file system of terminals.
    ///
    /// # Errors
    /// It has none yet.
    pub fn terminals(&self) -> Result<Arc<File>, InitError> {
        let held = self.terminals.lock().unwrap_or_else(PoisonError::into_inner).clone();
        held.ok_or_else(|| InitError::guest("the container's program does not run"))
    }

    /// The root of its image, which lies out of sight.
    ///
    /// # Errors
    /// Its program has not been started, or nothing can change.
    pub fn image(&self) -> Result<File, InitError> {
        let held = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        let held = held.as_ref().map(File::try_clone).transpose().context(|| "the image")?;
        held.ok_or_else(|| InitError::guest("the container's program does not run"))
    }

    /// The name of the container whose IPC and host name it has.
    pub fn shares_with(&self) -> Option<&str> {
        self.wanted.shares_with.as_deref()
    }

    /// Whether its programs and those of that one see each other.
    pub fn shares_pids(&self) -> bool {
        self.wanted.shares_pids
    }

    /// Has this thread be in new namespaces whose root is the container's, for a program of `spec`,
    /// and in those of `shared`, the container that it shares with.
    ///
    /// # Errors
    /// What the kernel does not do.
    pub fn enter(
        &self,
        cell: &Cell,
        spec: &Spec,
        shared: Option<&Container>,
    ) -> Result<Entered, InitError> {
        let wanted = &self.wanted;
        // A working directory comes along into new namespaces; a descriptor does not.
        unshare(CloneFlags::CLONE_FS).context(|| "making a working directory of its own")?;
        fchdir(&cell.bottom).context(|| "the first root")?;
        container::enter_new()?;
        if let Some(name) = &self.wanted.depot {
            let binds = depot::enter(name, spec, cell.boot.network.as_ref())?;
            match shared {
                Some(shared) => shared.share()?,
                None => self.name_host()?,
            }
            return Ok(Entered {
                terminals: self.open_terminals()?,
                image: None,
                binds: Some(binds),
            });
        }
        let home = format!("{PRIVATE}/{CONTAINERS}/{}", wanted.name);
        let (image, merged) = (format!("{home}/image"), format!("{home}/root"));
        for directory in [&image, &merged] {
            fs::create_dir_all(directory).context(|| "making the container's directory")?;
        }
        let image = if wanted.read_only {
            self.show_image(cell, &home, &merged)?;
            None
        } else {
            self.show_image(cell, &home, &image)?;
            root::mount_overlay(&image, &home, &merged)?;
            let opened = File::open(&image).context(|| "the container's image")?;
            let kept = opened.try_clone().context(|| "the container's image")?;
            *self.image.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
            Some(opened)
        };
        switch(&merged).context(|| "switching to the container's root")?;
        self.name_host()?;
        dev::mount_beside(image.as_ref())?;
        let named = Named { hostname: &wanted.hostname, domain_name: &wanted.domain_name };
        root::name_host(&named, &cell.boot, wanted.read_only)?;
        if let Some(setup) = &cell.boot.network {
            network::show(setup, wanted.read_only)?;
        }
        Ok(Entered { terminals: self.open_terminals()?, image, binds: None })
    }

    fn name_host(&self) -> Result<(), InitError> {
        let name = &self.wanted.hostname;
        sethostname(name).context(|| format!("setting the host name {name}"))
    }

    fn open_terminals(&self) -> Result<Arc<File>, InitError> {
        let terminals = Arc::new(File::open("/dev/pts").context(|| "/dev/pts")?);
        *self.terminals.lock().unwrap_or_else(PoisonError::into_inner) = Some(terminals.clone());
        Ok(terminals)
    }

    /// Mounts the image on `target`, by nodes in the directory `home`, which nobody else sees.
    fn show_image(&self, cell: &Cell, home: &str, target: &str) -> Result<(), InitError> {
        let node = |name: &str, kind, major, minor| {
            let path = format!("{home}/{name}");
            match mknod(path.as_str(), kind, Mode::from_bits_truncate(0o600), makedev(major, minor))
            {
                Ok(()) | Err(Errno::EEXIST) => Ok(path),
                Err(errno) => Err(errno),
            }
        };
        let disk = cell.disk.as_ref().ok_or_else(|| InitError::guest("there is no disk"))?;
        let show = || -> nix::Result<()> {
            let control = node("control", SFlag::S_IFCHR, 10, 237)?;
            let control = File::options().read(true).write(true).open(control).map_err(errno)?;
            let set = |number: u32| {
                sys::add_loop(&control, number)?;
                let path = node(&format!("loop{number}"), SFlag::S_IFBLK, 7, number.into())?;
                let held = File::open(&path).map_err(errno)?;
                let (at, length) = (self.wanted.offset_bytes, self.wanted.length_bytes);
                sys::set_loop(&held, disk, at, length).map(|()| (path, held))
            };
            // One that another container has, or had just now, is busy.
            let free = LOOPS.map(set).find(|tried| !matches!(tried, Err(Errno::EBUSY)));
            let (path, _held) = free.unwrap_or(Err(Errno::EBUSY))?;
            mount(Some(path.as_str()), target, Some("erofs"), MsFlags::MS_RDONLY, None::<&str>)
        };
        show().context(|| "mounting the container's image")
    }

    /// Takes away what the container has, once none of its programs is left.
    pub fn remove(&self, cell: &Cell) {
        self.terminals.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.image.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Err(error) = cell.groups.remove(&group_name(self.wanted.container)) {
            log::warn(format_args!("the control group of a container stays: {error}"));
        }
        if self.wanted.depot.is_some() {
            // Whoever looks at the files next finds all that its programs have written.
            depot::flush(cell);
        } else if !self.keeps_files.load(Ordering::Relaxed) {
            remove_kept(cell, &self.wanted.name);
        }
    }

    /// What it has changed goes with it.
    pub fn keep_nothing(&self) {
        self.keeps_files.store(false, Ordering::Relaxed);
    }
}

/// Removes what containers called `name` have changed.
pub fn remove_kept(cell: &Cell, name: &str) {
    if let Some(private) = &cell.private {
        removal::begin(private, CONTAINERS, name);
    }
}

/// Whether a container can be called so.
///
/// # Errors
/// It cannot.
pub fn check_name(name: &str) -> Result<(), InitError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric();
    match !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.bytes().all(plain) {
        true => Ok(()),
        false => Err(InitError::invalid("a container's name is of letters and digits")),
    }
}

/// Removes what containers of a guest before this one have left: it did not end in order.
pub fn sweep(cell: &Cell) {
    if let Some(private) = &cell.private {
        removal::sweep(private, CONTAINERS);
    }
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

fn group_name(number: u32) -> String {
    format!("c{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_nowhere_else() {
        for bad in ["", ".", "..", "a/b", "a b", "a\0", &"a".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        check_name(&"0f".repeat(32)).unwrap();
    }
}
