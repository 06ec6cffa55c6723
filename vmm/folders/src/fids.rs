//! The guest's handles: a bounded table from fid numbers to files held open.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::io::Errno;

use crate::gate::{ACCESS, APPEND, READ_WRITE};
use crate::host::{Ident, Name, Node, Place};

/// The number that stands for no fid (`P9_NOFID`).
const NO_FID: u32 = u32::MAX;

/// One file the guest holds.
#[derive(Debug)]
pub struct Fid {
    pub node: Node,
    pub open: Option<Open>,
}

/// A file opened for I/O.
#[derive(Debug)]
pub struct Open {
    pub file: Rc<OwnedFd>,
    /// The open flags that decide what it can be used for.
    pub flags: u32,
    /// For a directory: where the host's read position is, if known.
    pub position: Option<u64>,
}

impl Open {
    pub fn new(file: Rc<OwnedFd>, flags: u32) -> Self {
        Self { file, flags, position: None }
    }

    /// Whether I/O for an open with `flags` may be done on this file.
    fn serves(&self, flags: u32) -> bool {
        let held = self.flags & ACCESS;
        let enough = held == READ_WRITE || held == flags & ACCESS;
        enough && self.flags & APPEND == flags & APPEND
    }
}

impl Fid {
    pub fn closed(node: Node) -> Self {
        Self { node, open: None }
    }

    /// The descriptor to do I/O on.
    pub fn file(&self) -> Result<&Rc<OwnedFd>, Errno> {
        self.open.as_ref().map(|open| &open.file).ok_or(Errno::BADF)
    }
}

/// The table of one connection.
pub struct Fids {
    table: BTreeMap<u32, Fid>,
    max: usize,
}

impl Fids {
    pub fn new(max: usize) -> Self {
        Self { table: BTreeMap::new(), max }
    }

    pub fn get(&self, fid: u32) -> Result<&Fid, Errno> {
        self.table.get(&fid).ok_or(Errno::BADF)
    }

    pub fn get_mut(&mut self, fid: u32) -> Result<&mut Fid, Errno> {
        self.table.get_mut(&fid).ok_or(Errno::BADF)
    }

    /// The directory that `fid` holds.
    pub fn dir(&self, fid: u32) -> Result<&Node, Errno> {
        let node = &self.get(fid)?.node;
        if node.is_dir() { Ok(node) } else { Err(Errno::NOTDIR) }
    }

    /// Fails if `fid` cannot be given a new file.
    ///
    /// # Errors
    /// EINVAL if the number is taken or reserved, ENFILE if the table is full.
    pub fn check_free(&self, fid: u32) -> Result<(), Errno> {
        if fid == NO_FID || self.table.contains_key(&fid) {
            return Err(Errno::INVAL);
        }
        if self.table.len() >= self.max {
            return Err(Errno::NFILE);
        }
        Ok(())
    }

    pub fn insert(&mut self, fid: u32, node: Node) -> Result<(), Errno> {
        self.check_free(fid)?;
        self.table.insert(fid, Fid::closed(node));
        Ok(())
    }

    pub fn remove(&mut self, fid: u32) -> Result<Fid, Errno> {
        self.table.remove(&fid).ok_or(Errno::BADF)
    }

    /// A file that some fid has open on `ident` and that serves for `flags`.
    /// All I/O is at given offsets, so fids can share it.
    pub fn opened(&self, ident: Ident, flags: u32) -> Option<Rc<OwnedFd>> {
        let of_file = self.table.values().filter(|fid| fid.node.ident == ident);
        let mut open = of_file.filter_map(|fid| fid.open.as_ref());
        open.find(|open| open.serves(flags)).map(|open| open.file.clone())
    }

    /// Closes everything.
    pub fn clear(&mut self) {
        self.table.clear();
    }

    /// Tells every fid of the file that was renamed where it is now, so that
    /// it can still be opened.
    pub fn renamed(&mut self, dir: Ident, name: Name<'_>, to: &Place) {
        for fid in self.table.values_mut() {
            let place = fid.node.place.as_mut();
            if let Some(place) = place.filter(|p| p.dir_ident == dir && *p.name == *name.bytes()) {
                *place = to.clone();
            }
        }
    }
}
