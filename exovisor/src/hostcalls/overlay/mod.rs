//! A folder of the host with a private layer over it, held in memory.
//!
//! ```text
//!   tenant a ── layer: changed files, block for block; names; what is gone ─┐
//!   tenant b ── layer ──────────────────────────────────────────────────────┴─ folder of the host, only read
//! ```
//! Paths are resolved here, name by name: a link is followed within the folder only, and `..`
//! never leads above the directory it began at. A layer lives as long as its owner's
//! [`Layers`]. What it holds is charged to the capability `disk`.
//!
//! A directory that is open is known by its path: when the tenant moves it, what is there
//! afterwards counts.

mod base;
mod calls;
mod descriptors;
mod file;
mod tree;
mod usage;

pub(crate) use descriptors::Overlays;

use base::{Base, Listed};
use file::File;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tree::{DEPTH_MAX, Found, Name, Tree};
use usage::Budget;
use wasmtime_wasi::p1::types::{Errno, Filetype};

/// The longest path, in bytes.
const PATH_BYTES_MAX: usize = 4096;
/// The longest name, in bytes.
const NAME_BYTES_MAX: usize = 255;
/// Most symbolic links on the way to a file.
const LINKS_MAX: usize = 40;

/// What a tenant has changed in the folders that it sees privately. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Layers(Arc<Held>);

#[derive(Debug, Default)]
struct Held {
    used: Arc<AtomicU64>,
    overlays: Mutex<BTreeMap<PathBuf, Arc<Overlay>>>,
}

impl Layers {
    /// Bytes that are held, entries and blocks included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// The layer over `folder`, opened where it is not known yet.
    fn over(&self, folder: &Path) -> io::Result<Arc<Overlay>> {
        let mut overlays = self.0.overlays.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(overlay) = overlays.get(folder) {
            return Ok(Arc::clone(overlay));
        }
        let overlay =
            Arc::new(Overlay { base: Base::open(folder)?, tree: Mutex::new(Tree::new()) });
        overlays.insert(folder.to_owned(), Arc::clone(&overlay));
        Ok(overlay)
    }
}

/// When something was read and changed, in nanoseconds of the epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub read_ns: u64,
    pub changed_ns: u64,
}

impl Times {
    fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        Self { read_ns: now, changed_ns: now }
    }
}

/// What is said of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Status {
    pub kind: Filetype,
    pub ino: u64,
    pub links: u64,
    /// In bytes.
    pub len: u64,
    pub times: Times,
}

/// One folder and the layer over it.
#[derive(Debug)]
pub(crate) struct Overlay {
    base: Base,
    tree: Mutex<Tree>,
}

/// Where a path leads: its names from the folder on, links resolved, and what is there.
struct Resolved {
    path: Vec<Name>,
    found: Option<Found>,
    /// It was written with a slash at its end.
    directory: bool,
}

impl Resolved {
    fn there(self) -> Result<(Vec<Name>, Found), Errno> {
        let found = self.found.ok_or(Errno::Noent)?;
        if self.directory && !found.is_dir() {
            return Err(Errno::Notdir);
        }
        Ok((self.path, found))
    }

    /// The path of something new.
    fn vacant(self) -> Result<Vec<Name>, Errno> {
        match self.found {
            Some(_) => Err(Errno::Exist),
            None => Ok(self.path),
        }
    }
}

/// A file that is read or written, as it was opened.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub file: Arc<File>,
    pub below: Option<std::fs::File>,
}

/// What opening asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub follow: bool,
    pub create: bool,
    pub exclusive: bool,
    pub truncate: bool,
    pub directory: bool,
    pub write: bool,
}

/// What was opened.
pub(crate) enum Opened {
    Dir(Vec<Name>),
    File(OpenFile),
}

impl Overlay {
    fn lock(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows `text` from the directory `start`, above which it never leads.
    fn resolve(
        &self,
        tree: &Tree,
        start: &[Name],
        text: &str,
        follow: bool,
    ) -> Result<Resolved, Errno> {
        let names = checked(text)?;
        let directory = text.ends_with('/');
        let mut path = start.to_vec();
        let mut todo: Vec<String> = names.rev().map(str::to_owned).collect();
        let mut links = 0;
        while let Some(name) = todo.pop() {
            match name.as_str() {
                "" | "." => continue,
                ".." if path.len() == start.len() => return Err(Errno::Perm),
                ".." => {
                    path.pop();
                    continue;
                }
                _ => path.push(name.into()),
            }
            if path.len() > DEPTH_MAX || path.last().is_some_and(|name| name.len() > NAME_BYTES_MAX)
            {
                return Err(Errno::Nametoolong);
            }
            let last = todo.iter().all(|name| name.is_empty());
            match tree.look(&self.base, &path)? {
                Some(Found::Dir(_)) => {}
                Some(found) if found.status().kind == Filetype::SymbolicLink => {
                    if last && !follow && !directory {
                        return Ok(Resolved { path, found: Some(found), directory });
                    }
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(Errno::Loop);
                    }
                    let target = self.target(&found)?;
                    path.pop();
                    todo.extend(checked(&target)?.rev().map(str::to_owned));
                }
                found if last => return Ok(Resolved { path, found, directory }),
                Some(_) => return Err(Errno::Notdir),
                None => return Err(Errno::Noent),
            }
        }
        let found = tree.look(&self.base, &path)?;
        Ok(Resolved { path, found, directory })
    }

    fn target(&self, found: &Found) -> Result<String, Errno> {
        match found {
            Found::Link(link) => Ok(link.target.clone()),
            Found::Below(path, status) if status.kind == Filetype::SymbolicLink => {
                self.base.target(path)
            }
            _ => Err(Errno::Inval),
        }
    }

    pub fn status(&self, start: &[Name], text: &str, follow: bool) -> Result<Status, Errno> {
        let (_, found) = self.resolve(&self.lock(), start, text, follow)?.there()?;
        Ok(found.status())
    }

    /// What the open directory `dir` is now.
    pub fn dir_status(&self, dir: &[Name]) -> Result<Status, Errno> {
        let found = self.lock().look(&self.base, dir)?.ok_or(Errno::Noent)?;
        Ok(found.status())
    }

    pub fn list(&self, dir: &[Name]) -> Result<Vec<Listed>, Errno> {
        self.lock().list(&self.base, dir)
    }

    pub fn open(
        &self,
        budget: &Budget,
        start: &[Name],
        text: &str,
        wish: Wish,
    ) -> Result<Opened, Errno> {
        let mut tree = self.lock();
        let exclusive = wish.create && wish.exclusive;
        let place = self.resolve(&tree, start, text, wish.follow && !exclusive)?;
        let (path, found) = match place {
            Resolved { found: Some(_), .. } if exclusive => return Err(Errno::Exist),
            Resolved { path, found: None, directory } if wish.create => {
                if directory || wish.directory {
                    return Err(Errno::Inval);
                }
                let file = tree.add_file(&self.base, budget, &path)?;
                return Ok(Opened::File(OpenFile { file, below: None }));
            }
            place => place.there()?,
        };
        let changes = wish.write || wish.truncate;
        let file = match found {
            Found::Dir(_) if changes => return Err(Errno::Isdir),
            Found::Dir(_) => return Ok(Opened::Dir(path)),
            _ if wish.directory => return Err(Errno::Notdir),
            Found::Link(_) => return Err(Errno::Loop),
            Found::Below(_, status) if status.kind == Filetype::SymbolicLink => {
                return Err(Errno::Loop);
            }
            Found::Below(_, status) if status.kind != Filetype::RegularFile => {
                return Err(Errno::Notsup);
            }
            Found::Below(below, status) if !changes => {
                Arc::new(File::over(&below, &status, budget.charge(0)?))
            }
            Found::File(file) => file,
            Found::Below(..) => tree.file(&self.base, budget, &path)?,
        };
        let below = file.below.as_deref().map(|below| self.base.file(below)).transpose()?;
        if wish.truncate {
            file.set_len(0)?;
        }
        Ok(Opened::File(OpenFile { file, below }))
    }

    pub fn make_dir(&self, budget: &Budget, start: &[Name], text: &str) -> Result<(), Errno> {
        let mut tree = self.lock();
        let path = self.resolve(&tree, start, text, false)?.vacant()?;
        tree.add_dir(&self.base, budget, &path)
    }

    pub fn make_link(
        &self,
        budget: &Budget,
        target: &str,
        start: &[Name],
        text: &str,
    ) -> Result<(), Errno> {
        // An absolute one would lead nowhere.
        checked(target)?;
        let mut tree = self.lock();
        let place = self.resolve(&tree, start, text, false)?;
        let directory = place.directory;
        let path = place.vacant()?;
        if directory {
            return Err(Errno::Noent);
        }
        tree.add_link(&self.base, budget, &path, target.to_owned())
    }

    pub fn read_link(&self, start: &[Name], text: &str) -> Result<String, Errno> {
        let (_, found) = self.resolve(&self.lock(), start, text, false)?.there()?;
        self.target(&found)
    }

    /// A second name for a file.
    pub fn link(
        &self,
        budget: &Budget,
        from: (&[Name], &str, bool),
        to: (&[Name], &str),
    ) -> Result<(), Errno> {
        let mut tree = self.lock();
        let (path, found) = self.resolve(&tree, from.0, from.1, from.2)?.there()?;
        if found.is_dir() {
            return Err(Errno::Perm);
        }
        let place = self.resolve(&tree, to.0, to.1, false)?;
        let directory = place.directory;
        let to = place.vacant()?;
        if directory {
            return Err(Errno::Noent);
        }
        let file = tree.file(&self.base, budget, &path)?;
        tree.add_name(&self.base, budget, &to, file)
    }

    pub fn rename(
        &self,
        budget: &Budget,
        from: (&[Name], &str),
        to: (&[Name], &str),
    ) -> Result<(), Errno> {
        let mut tree = self.lock();
        let (from, moved) = self.resolve(&tree, from.0, from.1, false)?.there()?;
        let place = self.resolve(&tree, to.0, to.1, false)?;
        if place.directory && !moved.is_dir() {
            return Err(Errno::Notdir);
        }
        let to = place.path;
        if from == to {
            return Ok(());
        }
        if from.is_empty() || to.starts_with(&from) {
            return Err(Errno::Inval);
        }
        match (moved, place.found) {
            (_, None) => {}
            (Found::Dir(_), Some(Found::Dir(_))) => {
                let empty = !from.starts_with(&to) && tree.is_empty(&self.base, &to)?;
                empty.then_some(()).ok_or(Errno::Notempty)?;
            }
            (Found::Dir(_), Some(_)) => return Err(Errno::Notdir),
            (_, Some(Found::Dir(_))) => return Err(Errno::Isdir),
            (Found::File(one), Some(Found::File(other))) if Arc::ptr_eq(&one, &other) => {
                return Ok(());
            }
            _ => {}
        }
        tree.rename(&self.base, budget, &from, &to)
    }

    pub fn remove_file(&self, budget: &Budget, start: &[Name], text: &str) -> Result<(), Errno> {
        let mut tree = self.lock();
        let (path, found) = self.resolve(&tree, start, text, false)?.there()?;
        match found.is_dir() {
            true => Err(Errno::Isdir),
            false => tree.remove(&self.base, budget, &path),
        }
    }

    pub fn remove_dir(&self, budget: &Budget, start: &[Name], text: &str) -> Result<(), Errno> {
        let mut tree = self.lock();
        let (path, found) = self.resolve(&tree, start, text, false)?.there()?;
        if !found.is_dir() {
            return Err(Errno::Notdir);
        }
        if path.len() <= start.len() {
            return Err(Errno::Inval);
        }
        if !tree.is_empty(&self.base, &path)? {
            return Err(Errno::Notempty);
        }
        tree.remove(&self.base, budget, &path)
    }

    pub fn set_times(
        &self,
        budget: &Budget,
        start: &[Name],
        text: Option<(&str, bool)>,
        change: impl FnOnce(&mut Times),
    ) -> Result<(), Errno> {
        let mut tree = self.lock();
        let path = match text {
            Some((text, follow)) => self.resolve(&tree, start, text, follow)?.there()?.0,
            None => start.to_vec(),
        };
        tree.set_times(&self.base, budget, &path, change)
    }
}

/// The names of a path that is relative and no longer than allowed.
fn checked(text: &str) -> Result<std::str::Split<'_, char>, Errno> {
    if text.is_empty() {
        return Err(Errno::Noent);
    }
    if text.len() > PATH_BYTES_MAX {
        return Err(Errno::Nametoolong);
    }
    if text.contains('\0') {
        return Err(Errno::Inval);
    }
    if text.starts_with('/') {
        return Err(Errno::Perm);
    }
    Ok(text.split('/'))
}

#[cfg(test)]
mod tests;
