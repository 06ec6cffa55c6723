//! The files that a guest knows: each held, and counted as the guest counts its lookups of it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use crate::host::{Ident, is_open};
use crate::table::Table;

/// The number of the folder itself (`FUSE_ROOT_ID`).
pub const ROOT: u64 = 1;

/// A file of the folder, held by an `O_PATH` descriptor, so that it stays the same file whatever
/// happens to its name.
#[derive(Debug)]
pub struct Node {
    pub fd: OwnedFd,
    pub ident: Ident,
    pub kind: FileType,
    /// How often the guest was told of it, less what it has forgotten.
    lookups: u64,
    /// The content that the guest may have in its cache, by when it was changed and its length.
    pub cached: Option<Content>,
}

/// When a file was changed, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content(i64, u64, i64);

impl Content {
    pub fn of(stat: &Stat) -> Self {
        Self(stat.st_mtime, stat.st_mtime_nsec, stat.st_size)
    }
}

impl Node {
    pub fn new(fd: OwnedFd, stat: &Stat) -> Self {
        let kind = FileType::from_raw_mode(stat.st_mode);
        Self { fd, ident: Ident::of(stat), kind, lookups: 0, cached: None }
    }

    pub fn is_dir(&self) -> bool {
        self.kind == FileType::Directory
    }

    pub fn is_device(&self) -> bool {
        matches!(self.kind, FileType::BlockDevice | FileType::CharacterDevice)
    }
}

/// All of them, by the guest's number and by what they are.
#[derive(Debug)]
pub struct Nodes {
    table: Table<Node>,
    numbers: HashMap<Ident, u64>,
    /// Devices that were found to hold files.
    devices: Vec<u64>,
}

impl Nodes {
    /// # Errors
    /// The host's.
    pub fn new(root: Node, max: usize) -> Result<Self, Errno> {
        let mut table = Table::new(max.max(1));
        let (ident, devices) = (root.ident, vec![root.ident.dev]);
        let number = table.insert(root)?;
        Ok(Self { table, numbers: HashMap::from([(ident, number)]), devices })
    }

    /// # Errors
    /// ESTALE for a number that is nobody's.
    pub fn get(&self, number: u64) -> Result<&Node, Errno> {
        self.table.get(number).ok_or(Errno::STALE)
    }

    /// # Errors
    /// ESTALE for a number that is nobody's.
    pub fn get_mut(&mut self, number: u64) -> Result<&mut Node, Errno> {
        self.table.get_mut(number).ok_or(Errno::STALE)
    }

    /// # Errors
    /// ENOTDIR where it is none.
    pub fn dir(&self, number: u64) -> Result<&Node, Errno> {
        self.get(number).and_then(|node| if node.is_dir() { Ok(node) } else { Err(Errno::NOTDIR) })
    }

    /// Whether so much is held that what need not be is not.
    pub fn is_crowded(&self) -> bool {
        self.table.is_half_full()
    }

    /// The number of the file that is `ident`, if it is held; the guest is told of it once more.
    pub fn find(&mut self, ident: Ident) -> Option<u64> {
        let number = *self.numbers.get(&ident)?;
        let node = self.table.get_mut(number)?;
        node.lookups = node.lookups.saturating_add(1);
        Some(number)
    }

    /// The number of `node`, which the guest is told of.
    ///
    /// # Errors
    /// ENFILE where there are too many, EACCES for what is not a file system of files.
    pub fn add(&mut self, mut node: Node) -> Result<u64, Errno> {
        if let Some(number) = self.find(node.ident) {
            return Ok(number);
        }
        self.check_device(&node)?;
        node.lookups = 1;
        let ident = node.ident;
        let number = self.table.insert(node)?;
        self.numbers.insert(ident, number);
        Ok(number)
    }

    fn check_device(&mut self, node: &Node) -> Result<(), Errno> {
        let device = node.ident.dev;
        if self.devices.contains(&device) {
            return Ok(());
        }
        if !is_open(&node.fd)? {
            return Err(Errno::ACCESS);
        }
        self.devices.push(device);
        Ok(())
    }

    /// Lets go of all.
    pub fn forget_all(&mut self) {
        self.table.clear();
        self.numbers.clear();
    }

    /// Whether the file is one of them.
    pub fn holds(&self, ident: Ident) -> bool {
        self.numbers.contains_key(&ident)
    }

    /// The guest has forgotten `count` of its lookups; the file, if it is let go by that.
    pub fn forget(&mut self, number: u64, count: u64) -> Option<Node> {
        let node = self.table.get_mut(number).filter(|_| number != ROOT)?;
        node.lookups = node.lookups.saturating_sub(count);
        if node.lookups > 0 {
            return None;
        }
        let node = self.table.remove(number)?;
        self.numbers.remove(&node.ident);
        Some(node)
    }
}
