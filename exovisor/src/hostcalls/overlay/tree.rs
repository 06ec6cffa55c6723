//! What a tenant changed: directories, files, links, and what it removed of the base.

use super::base::{Base, Listed};
use super::file::File;
use super::usage::{Budget, Charge};
use super::{Status, Times};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use wasmtime_wasi::p1::types::{Errno, Filetype};

/// Most names in a path, links resolved: trees are walked by recursion.
pub(crate) const DEPTH_MAX: usize = 256;
/// What an entry is charged beside its name.
const ENTRY_CHARGE: u64 = 512;
/// Numbers of files that the base does not have.
const FIRST_INO: u64 = 1 << 63;

pub(crate) type Name = Box<str>;

#[derive(Debug)]
pub(crate) struct Tree {
    root: Dir,
    ino_next: u64,
}

#[derive(Debug)]
struct Dir {
    /// The directory of the base that shows through.
    below: Option<PathBuf>,
    entries: BTreeMap<Name, Slot>,
    ino: u64,
    times: Times,
}

/// An entry and what it is charged.
#[derive(Debug)]
struct Slot {
    entry: Entry,
    _charge: Charge,
}

#[derive(Debug)]
enum Entry {
    /// The base has something there that is removed.
    Gone,
    Dir(Dir),
    File(Arc<File>),
    Link(Link),
}

#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub target: String,
    ino: u64,
    times: Times,
}

/// What is at a path.
pub(crate) enum Found {
    Dir(Status),
    File(Arc<File>),
    Link(Link),
    /// In the base, and not changed.
    Below(PathBuf, Status),
}

impl Found {
    pub fn is_dir(&self) -> bool {
        matches!(self, Self::Dir(_))
    }

    pub fn status(&self) -> Status {
        match self {
            Self::Dir(status) | Self::Below(_, status) => *status,
            Self::File(file) => file.status(),
            Self::Link(link) => link.status(),
        }
    }
}

impl Link {
    fn status(&self) -> Status {
        let (kind, len) = (Filetype::SymbolicLink, self.target.len() as u64);
        Status { kind, ino: self.ino, links: 1, len, times: self.times }
    }
}

impl Dir {
    fn over(below: Option<PathBuf>, ino: u64, times: Times) -> Self {
        Self { below, entries: BTreeMap::new(), ino, times }
    }

    fn status(&self) -> Status {
        let (kind, links) = (Filetype::Directory, 1);
        Status { kind, ino: self.ino, links, len: 0, times: self.times }
    }

    fn below(&self, name: &str) -> Option<PathBuf> {
        self.below.as_ref().map(|below| below.join(name))
    }

    /// What is under `name`, as a private entry. What the base has there is taken as it is.
    fn own(&mut self, base: &Base, budget: &Budget, name: &Name) -> Result<&mut Entry, Errno> {
        if !self.entries.contains_key(name) {
            let below = self.below(name).ok_or(Errno::Noent)?;
            let status = base.status(&below)?.ok_or(Errno::Noent)?;
            let Status { ino, times, .. } = status;
            let entry = match status.kind {
                Filetype::Directory => Entry::Dir(Dir::over(Some(below), ino, times)),
                Filetype::RegularFile => {
                    Entry::File(Arc::new(File::over(&below, &status, budget.charge(0)?)))
                }
                Filetype::SymbolicLink => {
                    Entry::Link(Link { target: base.target(&below)?, ino, times })
                }
                _ => return Err(Errno::Notsup),
            };
            self.entries.insert(name.clone(), Slot::new(entry, name, budget)?);
        }
        match self.entries.get_mut(name).map(|slot| &mut slot.entry) {
            Some(Entry::Gone) | None => Err(Errno::Noent),
            Some(entry) => Ok(entry),
        }
    }

    /// How many directories lie in each other here.
    fn height(&self) -> usize {
        let below = self.entries.values().filter_map(|slot| match &slot.entry {
            Entry::Dir(dir) => Some(dir.height()),
            _ => None,
        });
        1 + below.max().unwrap_or(0)
    }
}

/// A directory on the way to a path: changed ones, or one of the base.
enum At<'a> {
    Own(&'a Dir),
    Below(PathBuf),
}

impl Tree {
    pub fn new() -> Self {
        let root = Dir::over(Some(PathBuf::new()), FIRST_INO, Times::now());
        Self { root, ino_next: FIRST_INO + 1 }
    }

    fn ino(&mut self) -> u64 {
        self.ino_next += 1;
        self.ino_next
    }

    /// What is at `path`, whose directories are no links.
    pub fn look(&self, base: &Base, path: &[Name]) -> Result<Option<Found>, Errno> {
        let Some((name, dirs)) = path.split_last() else {
            return Ok(Some(Found::Dir(self.root.status())));
        };
        let below = match self.walk(dirs)? {
            At::Own(dir) => match dir.entries.get(name) {
                Some(slot) => return Ok(slot.found()),
                None => dir.below(name),
            },
            At::Below(dir) => Some(dir.join(&**name)),
        };
        let Some(below) = below else { return Ok(None) };
        Ok(base.status(&below)?.map(|status| match status.kind {
            Filetype::Directory => Found::Dir(status),
            _ => Found::Below(below, status),
        }))
    }

    fn walk(&self, dirs: &[Name]) -> Result<At<'_>, Errno> {
        let mut at = At::Own(&self.root);
        for name in dirs {
            at = match at {
                At::Own(dir) => match dir.entries.get(name).map(|slot| &slot.entry) {
                    Some(Entry::Dir(dir)) => At::Own(dir),
                    Some(Entry::Gone) => return Err(Errno::Noent),
                    Some(_) => return Err(Errno::Notdir),
                    None => At::Below(dir.below(name).ok_or(Errno::Noent)?),
                },
                At::Below(dir) => At::Below(dir.join(&**name)),
            };
        }
        Ok(at)
    }

    /// The names in the directory at `path`, sorted.
    pub fn list(&self, base: &Base, path: &[Name]) -> Result<Vec<Listed>, Errno> {
        let mut names = BTreeMap::new();
        let at = self.walk(path)?;
        let below = match &at {
            At::Own(dir) => dir.below.as_deref(),
            At::Below(dir) => Some(dir.as_path()),
        };
        for listed in below.map(|below| base.names(below)).transpose()?.unwrap_or_default() {
            names.insert(listed.name.clone(), listed);
        }
        if let At::Own(dir) = at {
            for (name, slot) in &dir.entries {
                match slot.found() {
                    Some(found) => {
                        let Status { kind, ino, .. } = found.status();
                        names.insert(name.to_string(), Listed { name: name.to_string(), ino, kind })
                    }
                    None => names.remove(&**name),
                };
            }
        }
        Ok(names.into_values().collect())
    }

    /// Whether the directory at `path` has no names.
    pub fn is_empty(&self, base: &Base, path: &[Name]) -> Result<bool, Errno> {
        Ok(self.list(base, path)?.is_empty())
    }

    /// The directory at `path`, with those on the way, as private ones.
    fn dir(&mut self, base: &Base, budget: &Budget, path: &[Name]) -> Result<&mut Dir, Errno> {
        let mut dir = &mut self.root;
        for name in path {
            dir = match dir.own(base, budget, name)? {
                Entry::Dir(dir) => dir,
                _ => return Err(Errno::Notdir),
            };
        }
        Ok(dir)
    }

    /// What is at `path`, as a private entry of which nothing is changed yet.
    fn own(&mut self, base: &Base, budget: &Budget, path: &[Name]) -> Result<&mut Entry, Errno> {
        let (name, dirs) = path.split_last().ok_or(Errno::Inval)?;
        self.dir(base, budget, dirs)?.own(base, budget, name)
    }

    /// The file at `path`, to be written to.
    ///
    /// # Errors
    /// [`Errno::Notsup`] for what is no file.
    pub fn file(
        &mut self,
        base: &Base,
        budget: &Budget,
        path: &[Name],
    ) -> Result<Arc<File>, Errno> {
        match self.own(base, budget, path)? {
            Entry::File(file) => Ok(Arc::clone(file)),
            _ => Err(Errno::Notsup),
        }
    }

    pub fn set_times(
        &mut self,
        base: &Base,
        budget: &Budget,
        path: &[Name],
        change: impl FnOnce(&mut Times),
    ) -> Result<(), Errno> {
        if path.is_empty() {
            change(&mut self.root.times);
            return Ok(());
        }
        match self.own(base, budget, path)? {
            Entry::Dir(dir) => change(&mut dir.times),
            Entry::Link(link) => change(&mut link.times),
            Entry::File(file) => file.set_times(change),
            Entry::Gone => return Err(Errno::Noent),
        }
        Ok(())
    }

    /// Makes the file at `path`, where nothing is.
    pub fn add_file(
        &mut self,
        base: &Base,
        budget: &Budget,
        path: &[Name],
    ) -> Result<Arc<File>, Errno> {
        let ino = self.ino();
        let file = Arc::new(File::new(ino, budget.charge(0)?));
        self.put(base, budget, path, Entry::File(Arc::clone(&file)))?;
        Ok(file)
    }

    /// Another name for `file`.
    pub fn add_name(
        &mut self,
        base: &Base,
        budget: &Budget,
        path: &[Name],
        file: Arc<File>,
    ) -> Result<(), Errno> {
        self.put(base, budget, path, Entry::File(Arc::clone(&file)))?;
        file.linked(true);
        Ok(())
    }

    pub fn add_dir(&mut self, base: &Base, budget: &Budget, path: &[Name]) -> Result<(), Errno> {
        let dir = Dir::over(None, self.ino(), Times::now());
        self.put(base, budget, path, Entry::Dir(dir))
    }

    pub fn add_link(
        &mut self,
        base: &Base,
        budget: &Budget,
        path: &[Name],
        target: String,
    ) -> Result<(), Errno> {
        let link = Link { target, ino: self.ino(), times: Times::now() };
        self.put(base, budget, path, Entry::Link(link))
    }

    fn put(
        &mut self,
        base: &Base,
        budget: &Budget,
        path: &[Name],
        entry: Entry,
    ) -> Result<(), Errno> {
        let (name, dirs) = path.split_last().ok_or(Errno::Exist)?;
        let slot = Slot::new(entry, name, budget)?;
        let dir = self.dir(base, budget, dirs)?;
        dir.times = Times::now();
        dir.entries.insert(name.clone(), slot);
        Ok(())
    }

    /// Takes away what is at `path`.
    pub fn remove(&mut self, base: &Base, budget: &Budget, path: &[Name]) -> Result<(), Errno> {
        let gone = self.gone(base, budget, path)?;
        let removed = self.take(base, budget, path, gone)?;
        if let Some(Slot { entry: Entry::File(file), .. }) = removed {
            file.linked(false);
        }
        Ok(())
    }

    /// Moves what is at `from` to `to`, where it replaces what is there.
    pub fn rename(
        &mut self,
        base: &Base,
        budget: &Budget,
        from: &[Name],
        to: &[Name],
    ) -> Result<(), Errno> {
        let (name, dirs) = to.split_last().ok_or(Errno::Inval)?;
        // All that may be refused comes before what shows.
        let height = match self.own(base, budget, from)? {
            Entry::Dir(dir) => dir.height(),
            _ => 0,
        };
        if to.len() + height > DEPTH_MAX {
            return Err(Errno::Nametoolong);
        }
        self.dir(base, budget, dirs)?;
        let charge = budget.charge(ENTRY_CHARGE + name.len() as u64)?;
        let gone = self.gone(base, budget, from)?;
        let moved = self.take(base, budget, from, gone)?.ok_or(Errno::Noent)?;
        let dir = self.dir(base, budget, dirs)?;
        dir.times = Times::now();
        let slot = Slot { entry: moved.entry, _charge: charge };
        if let Some(Slot { entry: Entry::File(file), .. }) = dir.entries.insert(name.clone(), slot)
        {
            file.linked(false);
        }
        Ok(())
    }

    /// What hides the base's entry at `path`, if it has one.
    fn gone(&mut self, base: &Base, budget: &Budget, path: &[Name]) -> Result<Option<Slot>, Errno> {
        let (name, dirs) = path.split_last().ok_or(Errno::Inval)?;
        let below = self.dir(base, budget, dirs)?.below(name);
        let shows = below.map(|below| base.status(&below)).transpose()?.flatten();
        shows.map(|_| Slot::new(Entry::Gone, name, budget)).transpose()
    }

    /// The entry at `path`, in whose place comes `gone`.
    fn take(
        &mut self,
        base: &Base,
        budget: &Budget,
        path: &[Name],
        gone: Option<Slot>,
    ) -> Result<Option<Slot>, Errno> {
        let (name, dirs) = path.split_last().ok_or(Errno::Inval)?;
        let dir = self.dir(base, budget, dirs)?;
        dir.times = Times::now();
        Ok(match gone {
            Some(gone) => dir.entries.insert(name.clone(), gone),
            None => dir.entries.remove(name),
        })
    }
}

impl Slot {
    fn new(entry: Entry, name: &str, budget: &Budget) -> Result<Self, Errno> {
        let target = match &entry {
            Entry::Link(link) => link.target.len(),
            _ => 0,
        };
        let _charge = budget.charge(ENTRY_CHARGE + (name.len() + target) as u64)?;
        Ok(Self { entry, _charge })
    }

    /// `None` for what is removed.
    fn found(&self) -> Option<Found> {
        match &self.entry {
            Entry::Gone => None,
            Entry::Dir(dir) => Some(Found::Dir(dir.status())),
            Entry::File(file) => Some(Found::File(Arc::clone(file))),
            Entry::Link(link) => Some(Found::Link(link.clone())),
        }
    }
}
