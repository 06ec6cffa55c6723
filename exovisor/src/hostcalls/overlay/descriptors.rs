//! The descriptors of an isolate that lead into its overlays.
//!
//! A folder that is seen privately is preopened in WASI too, which keeps its number and its name
//! there; what is here under a number hides what WASI has. Files get numbers that WASI never
//! reaches, because each of its own is a descriptor of the host.

use super::base::Listed;
use super::usage::Budget;
use super::{Layers, Name, OpenFile, Overlay};
use crate::hostcalls::context::Waits;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use wasmtime_wasi::p1::types::Errno;

/// The first number of an opened file.
pub(super) const FIRST: u32 = 1 << 24;
/// Descriptors of one isolate that are open at once, folders aside.
const OPEN_MAX: usize = 1024;

pub(crate) struct Overlays {
    open: BTreeMap<u32, Open>,
    pub(super) layers: Layers,
    pub(super) budget: Budget,
    pub(super) waits: Waits,
    /// The directory that was listed last, and its names at that time.
    pub(super) listed: Option<(u32, Arc<Vec<Listed>>)>,
}

/// What a descriptor leads to.
#[derive(Clone)]
pub(super) enum Open {
    Dir(OpenDir),
    File(Box<Position>),
}

#[derive(Clone)]
pub(super) struct OpenDir {
    pub overlay: Arc<Overlay>,
    pub path: Arc<[Name]>,
}

/// A file, and where reading and writing go on.
#[derive(Clone)]
pub(super) struct Position {
    pub open: Arc<OpenFile>,
    pub offset: u64,
    pub append: bool,
    pub read: bool,
    pub write: bool,
}

impl Overlays {
    pub fn new(layers: Layers, bytes_max: u64, waits: Waits) -> Self {
        let budget = Budget::new(&layers.0.used, bytes_max);
        Self { open: BTreeMap::new(), layers, budget, waits, listed: None }
    }

    /// Puts the layer over `folder` in front of what WASI has under `fd`.
    pub fn preopen(&mut self, fd: u32, folder: &Path) -> io::Result<()> {
        let overlay = self.layers.over(folder)?;
        self.open.insert(fd, Open::Dir(OpenDir { overlay, path: Arc::from([]) }));
        Ok(())
    }

    pub(super) fn is_unused(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn has(&self, fd: u32) -> bool {
        self.open.contains_key(&fd)
    }

    pub(super) fn get(&self, fd: u32) -> Option<&Open> {
        self.open.get(&fd)
    }

    pub(super) fn dir(&self, fd: u32) -> Result<OpenDir, Errno> {
        match self.open.get(&fd) {
            Some(Open::Dir(dir)) => Ok(dir.clone()),
            Some(Open::File(_)) => Err(Errno::Notdir),
            None => Err(Errno::Badf),
        }
    }

    pub(super) fn file(&mut self, fd: u32) -> Result<&mut Position, Errno> {
        match self.open.get_mut(&fd) {
            Some(Open::File(file)) => Ok(file),
            Some(Open::Dir(_)) => Err(Errno::Isdir),
            None => Err(Errno::Badf),
        }
    }

    pub(super) fn has_room(&self) -> Result<(), Errno> {
        match self.open.range(FIRST..).count() < OPEN_MAX {
            true => Ok(()),
            false => Err(Errno::Nfile),
        }
    }

    /// Gives `open` the lowest number that is free.
    pub(super) fn add(&mut self, open: Open) -> u32 {
        let used = self.open.range(FIRST..).map(|(fd, _)| *fd);
        let free = (FIRST..).zip(used).find(|(free, used)| free != used);
        let fd = free.map_or_else(
            || self.open.range(FIRST..).next_back().map_or(FIRST, |(last, _)| last + 1),
            |(free, _)| free,
        );
        self.open.insert(fd, open);
        fd
    }

    /// Takes `fd` away; true if WASI has something under that number too.
    pub(super) fn close(&mut self, fd: u32) -> bool {
        self.open.remove(&fd);
        if self.listed.as_ref().is_some_and(|(listed, _)| *listed == fd) {
            self.listed = None;
        }
        fd < FIRST
    }

    /// Moves what is under `from` to `to`.
    pub(super) fn rename(&mut self, from: u32, to: u32) {
        if let Some(open) = self.open.remove(&from) {
            self.open.insert(to, open);
        }
        self.listed = None;
    }
}
