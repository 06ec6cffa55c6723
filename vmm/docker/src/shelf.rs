//! The volumes of a state root on disk: a folder for each, and what is noted of it beside.
//!
//! ```text
//! docker/volumes/NAME             its files; guests have what is in it, and may lock that, too
//! docker/volume-notes/NAME.json   what is noted of it
//! docker/volume-notes/NAME.lock   flock(2) shared: a cell is made with it, which no list shows yet;
//!                                 exclusive: it is looked at who has it, and it goes
//! ```

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use exocell_cell::images::{private, walk};
use exocell_cell::{CellSpec, Layout};

use crate::admit::MountPoint;
use crate::notes::Notes;

/// How often it is tried to have a volume alone.
const ALONE_AGAIN: Duration = Duration::from_millis(20);

/// See the module's head.
#[derive(Debug, Clone)]
pub struct Shelf {
    root: PathBuf,
}

/// A volume that nobody removes until this is dropped: a cell is made with it.
#[derive(Debug)]
pub struct Held(File);

/// A volume with which nobody makes a cell until this is dropped.
#[derive(Debug)]
pub struct Alone {
    _held: Held,
}

impl Drop for Held {
    fn drop(&mut self) {
        // A process that was cloned meanwhile has the file open as well.
        let _ = self.0.unlock();
    }
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

    fn lock_path(&self, name: &str) -> PathBuf {
        self.root.join("volume-notes").join(format!("{name}.lock"))
    }

    /// The file that is locked, as `lock` does it; it goes with the volume.
    fn lock(&self, name: &str, lock: impl Fn(&File) -> io::Result<()>) -> io::Result<Held> {
        let path = self.lock_path(name);
        path.parent().map_or(Ok(()), private::folder)?;
        loop {
            let mut options = File::options();
            let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let file = options.open(&path)?;
            lock(&file)?;
            let held = Held(file);
            match path.metadata() {
                Ok(there) if there.ino() == held.0.metadata()?.ino() => return Ok(held),
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                // Whoever had it before has removed the volume, and this file with it.
                _ => {}
            }
        }
    }

    /// Waits so long until no cell is made with the volume `name`; `None` where one still is.
    ///
    /// # Errors
    /// There is no such volume; the host's.
    pub fn alone(&self, name: &str, patience: Duration) -> io::Result<Option<Alone>> {
        let until = Instant::now() + patience;
        loop {
            // No lock is left of a volume that there is not.
            self.path(name).symlink_metadata()?;
            match self.lock(name, |file| file.try_lock().map_err(io::Error::from)) {
                Ok(held) => return Ok(Some(Alone { _held: held })),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if Instant::now() < until => std::thread::sleep(ALONE_AGAIN),
                Err(_) => return Ok(None),
            }
        }
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

    /// Makes the volume `name`, unless it is there: then it stays what it is. Nobody removes it
    /// until what this returns is dropped: whoever makes a cell with it holds that until the cell
    /// is listed.
    ///
    /// # Errors
    /// As of mkdir(2).
    pub fn make(&self, name: &str, notes: &Notes) -> io::Result<Held> {
        let held = self.lock(name, File::lock_shared)?;
        let path = self.path(name);
        if path.exists() {
            return Ok(held);
        }
        private::folder(&self.folder())?;
        notes.write(&self.notes_path(name))?;
        // The folder above is closed; whoever is given this one finds it as docker makes it.
        match DirBuilder::new().mode(0o755).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(held),
            made => made.map(|()| held),
        }
    }

    /// Removes a volume, as deep as its containers have made it, and what is noted of it.
    ///
    /// # Errors
    /// The host's.
    pub fn discard(&self, name: &str, alone: Alone) -> io::Result<()> {
        match walk::remove(&self.path(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Notes of a volume that is gone say nothing.
        let _ = fs::remove_file(self.notes_path(name));
        let _ = fs::remove_file(self.lock_path(name));
        drop(alone);
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
