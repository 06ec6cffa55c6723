//! The volumes of a state root on disk: a folder for each, and what is noted of it beside.
//!
//! One without a name of its own was made for a container. It goes with that if the container
//! removes itself, or its operator says so; whoever is killed in between leaves it to the next who
//! sweeps.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use exocell_cell::images::{private, walk};
use exocell_cell::{CellError, CellSpec, Layout, Record, now_ms};

use crate::admit::MountPoint;
use crate::containers::{Container, Containers};
use crate::error::ApiResult;
use crate::notes::Notes;

/// Milliseconds in which a volume's cell comes to be on the slowest host.
const BIRTH_MAX_MS: u64 = 10 * 60 * 1000;
/// The same where an operator asks for volumes of cells that are gone.
const BIRTH_USUAL_MS: u64 = 10 * 1000;

/// See the module's head.
#[derive(Debug, Clone)]
pub struct Shelf {
    layout: Layout,
    root: PathBuf,
}

impl Shelf {
    #[must_use]
    pub fn of(layout: &Layout) -> Self {
        Self { layout: layout.clone(), root: Containers::root(layout) }
    }

    /// Where they lie.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.root.join("volumes")
    }

    /// Where the files of volume `name` are.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    fn notes_path(&self, name: &str) -> PathBuf {
        self.root.join("volume-notes").join(format!("{name}.json"))
    }

    pub fn notes(&self, name: &str) -> Notes {
        Notes::read(&self.notes_path(name))
    }

    /// All names, in their order.
    ///
    /// # Errors
    /// As of readdir(3).
    pub fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(self.folder()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.collect();
        names.sort();
        Ok(names)
    }

    /// Makes the volume `name`, unless it is there: then it stays what it is.
    ///
    /// # Errors
    /// As of mkdir(2).
    pub fn make(&self, name: &str, notes: &Notes) -> io::Result<()> {
        let path = self.path(name);
        if path.exists() {
            return Ok(());
        }
        private::folder(&self.folder())?;
        notes.write(&self.notes_path(name))?;
        // The folder above is closed; whoever is given this one finds it as docker makes it.
        match DirBuilder::new().mode(0o755).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    /// Removes a volume, as deep as its containers have made it, and what is noted of it.
    ///
    /// # Errors
    /// There is none; the host's.
    pub fn discard(&self, name: &str) -> io::Result<()> {
        let path = self.path(name);
        path.symlink_metadata().and_then(|_| walk::remove(&path))?;
        // Notes of a volume that is gone say nothing.
        let _ = fs::remove_file(self.notes_path(name));
        Ok(())
    }

    /// The folders of a cell by its grant; which of them are volumes.
    pub fn mounts_of(&self, spec: &CellSpec) -> Vec<MountPoint> {
        let caps = exocell_cell::xgate::CapabilitySet::parse(&spec.capabilities, Path::new("/"));
        let Ok(caps) = caps else { return Vec::new() };
        let volumes = self.folder();
        let point = |folder: &exocell_cell::xgate::Folder| MountPoint {
            volume: folder
                .host
                .strip_prefix(&volumes)
                .ok()
                .and_then(|name| name.to_str())
                .filter(|name| !name.is_empty() && !name.contains('/'))
                .map(str::to_owned),
            source: folder.host.clone(),
            target: folder.guest.display().to_string(),
            writable: folder.rights.contains(exocell_cell::xgate::Rights::WRITE),
            ..MountPoint::default()
        };
        caps.folders().iter().map(point).collect()
    }

    /// The names of volumes that containers have.
    ///
    /// # Errors
    /// As of [`Containers::all`].
    pub fn used(&self) -> ApiResult<BTreeSet<String>> {
        let all = Containers::of(&self.layout).all()?;
        let mounts = all.into_iter().flat_map(|seen| seen.container.mounts);
        Ok(mounts.filter_map(|mount| mount.volume).collect())
    }

    /// Removes the volumes without names that were made for `container`, which is gone; not those
    /// that another has got. Their names.
    pub fn discard_of(&self, container: &Container) -> Vec<String> {
        let names = container.mounts.iter().filter_map(|mount| mount.volume.clone());
        self.discard_among(names, container.id())
    }

    /// The same, whatever its mounts are.
    pub fn discard_owned(&self, owner: &str) {
        self.discard_among(self.names().unwrap_or_default().into_iter(), owner);
    }

    fn discard_among(&self, names: impl Iterator<Item = String>, owner: &str) -> Vec<String> {
        let is_own = |name: &String| self.notes(name).owner.as_deref() == Some(owner);
        let own: Vec<String> = names.filter(is_own).collect();
        if own.is_empty() {
            return own;
        }
        let Ok(used) = self.used() else { return Vec::new() };
        own.into_iter().filter(|name| !used.contains(name) && self.discard(name).is_ok()).collect()
    }

    /// Removes volumes that were to go with containers which are gone: whoever was to remove them
    /// was ended before, or there was nobody.
    pub fn sweep(&self) {
        let is_left = |name: &String| {
            let notes = self.notes(name);
            let owner = notes.owner.as_deref().filter(|_| notes.ends_with_owner);
            notes.created_ms.saturating_add(BIRTH_MAX_MS) < now_ms()
                && owner.is_some_and(|owner| !self.exists(owner))
        };
        let left: Vec<String> =
            self.names().unwrap_or_default().into_iter().filter(is_left).collect();
        if left.is_empty() {
            return;
        }
        let Ok(used) = self.used() else { return };
        for name in left.iter().filter(|name| !used.contains(*name)) {
            // The next one tries again.
            let _ = self.discard(name);
        }
    }

    fn exists(&self, id: &str) -> bool {
        Record::exists(&self.layout, id) || Containers::of(&self.layout).read(id).is_ok()
    }

    /// Removes the volumes without names that no cell has; how many.
    ///
    /// # Errors
    /// [`CellError`]: the cells cannot be listed, or a volume cannot be removed.
    pub fn prune(&self) -> Result<usize, CellError> {
        let used = self.used().map_err(|error| CellError::Usage(error.message))?;
        let mut count = 0;
        for name in self.names().map_err(CellError::host("cannot list the volumes"))? {
            let notes = self.notes(&name);
            let is_young = notes.created_ms.saturating_add(BIRTH_USUAL_MS) > now_ms()
                && notes.owner.as_deref().is_some_and(|owner| !self.exists(owner));
            if notes.is_anonymous && !is_young && !used.contains(&name) {
                let failed = CellError::host(format!("cannot remove the volume {name}"));
                self.discard(&name).map_err(failed)?;
                count += 1;
            }
        }
        Ok(count)
    }
}
