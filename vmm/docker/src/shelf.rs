//! The volumes of a state root on disk: a folder for each, and what is noted of it beside.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use exocell_cell::images::{private, walk};
use exocell_cell::{CellSpec, Layout};

use crate::admit::MountPoint;
use crate::notes::Notes;

/// See the module's head.
#[derive(Debug, Clone)]
pub struct Shelf {
    root: PathBuf,
}

/// Where a server's own files lie.
#[must_use]
pub fn root(layout: &Layout) -> PathBuf {
    layout.root().join("docker")
}

impl Shelf {
    #[must_use]
    pub fn of(layout: &Layout) -> Self {
        Self { root: root(layout) }
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

    /// Notes that the container which volume `name` was made for is gone.
    ///
    /// # Errors
    /// The host's.
    pub fn disown(&self, name: &str) -> io::Result<()> {
        let notes = Notes { owner: None, ends_with_owner: false, ..self.notes(name) };
        notes.write(&self.notes_path(name))
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
}
