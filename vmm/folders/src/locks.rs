//! Locks that the guest's programs hold: as locks of this process on the host, where they exclude
//! those of the host's programs and of other cells.
//!
//! A program of the guest that locks bytes of a file has a description of that file for itself
//! here, so that its locks are its own. Nothing waits: a guest asks again.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;

use crate::host::Descriptors;
use crate::nodes::Node;
use crate::sys::{self, Lock};
use crate::wire::{Body, Fields};

/// `F_RDLCK`, `F_WRLCK`, `F_UNLCK`.
const SHARED: u32 = libc::F_RDLCK as u32;
const EXCLUSIVE: u32 = libc::F_WRLCK as u32;
const UNLOCKED: u32 = libc::F_UNLCK as u32;
/// `FUSE_LK_FLOCK`.
const WHOLE_FILE: u32 = 1;
/// The end of a lock that has none (`OFFSET_MAX`).
const END_MAX: u64 = i64::MAX as u64;

/// `struct fuse_lk_in`.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub handle: u64,
    owner: u64,
    start: u64,
    end: u64,
    kind: u32,
    flags: u32,
}

impl Wanted {
    pub fn parse(fields: &mut Fields<'_>) -> Result<Self, Errno> {
        let (handle, owner) = (fields.u64()?, fields.u64()?);
        let (start, end, kind) = (fields.u64()?, fields.u64()?, fields.u32()?);
        fields.skip(4)?;
        Ok(Self { handle, owner, start, end, kind, flags: fields.u32()? })
    }

    /// flock(2)'s.
    pub fn is_of_whole_file(&self) -> bool {
        self.flags & WHOLE_FILE != 0
    }

    fn lock(&self) -> Result<Lock, Errno> {
        let kind = match self.kind {
            SHARED | EXCLUSIVE | UNLOCKED => self.kind as i16,
            _ => return Err(Errno::INVAL),
        };
        let start = i64::try_from(self.start).map_err(|_| Errno::INVAL)?;
        let len = match self.end {
            end if end >= END_MAX => 0,
            end => (end as i64).checked_sub(start).map_or(0, |span| span + 1),
        };
        if self.end < self.start { Err(Errno::INVAL) } else { Ok(Lock { kind, start, len }) }
    }

    /// Locks the file as flock(2) does.
    pub fn of_whole_file(&self, file: &OwnedFd) -> Result<(), Errno> {
        let operation = match self.kind {
            SHARED => FlockOperation::NonBlockingLockShared,
            EXCLUSIVE => FlockOperation::NonBlockingLockExclusive,
            UNLOCKED => FlockOperation::NonBlockingUnlock,
            _ => return Err(Errno::INVAL),
        };
        rustix::fs::flock(file, operation)
    }
}

/// Descriptions by file and by who holds locks through them.
#[derive(Debug)]
pub struct Lockers {
    held: BTreeMap<(u64, u64), OwnedFd>,
    max: usize,
}

impl Lockers {
    pub fn new(max: usize) -> Self {
        Self { held: BTreeMap::new(), max }
    }

    pub fn clear(&mut self) {
        self.held.clear();
    }

    fn of(
        &mut self,
        descriptors: &Descriptors,
        number: u64,
        node: &Node,
        wanted: &Wanted,
        writes: bool,
    ) -> Result<&OwnedFd, Errno> {
        let crowded = self.held.len() >= self.max;
        match self.held.entry((number, wanted.owner)) {
            std::collections::btree_map::Entry::Occupied(held) => Ok(held.into_mut()),
            std::collections::btree_map::Entry::Vacant(_) if crowded => Err(Errno::NOLCK),
            std::collections::btree_map::Entry::Vacant(place) => {
                let access = if writes && !node.is_dir() { OFlags::RDWR } else { OFlags::RDONLY };
                Ok(place.insert(descriptors.open(&node.fd, access)?))
            }
        }
    }

    /// Sets or gives up a lock; `writes`: whether the folder may be written.
    ///
    /// # Errors
    /// EAGAIN where another holds one in the way, EBADF for an exclusive one on what is only read.
    pub fn set(
        &mut self,
        descriptors: &Descriptors,
        number: u64,
        node: &Node,
        wanted: &Wanted,
        writes: bool,
    ) -> Result<(), Errno> {
        let lock = wanted.lock()?;
        if wanted.kind == UNLOCKED && !self.held.contains_key(&(number, wanted.owner)) {
            return Ok(());
        }
        sys::set_lock(self.of(descriptors, number, node, wanted, writes)?, lock)
    }

    /// Tells what would be in the way (`struct fuse_file_lock`).
    ///
    /// # Errors
    /// The host's.
    pub fn find(
        &mut self,
        descriptors: &Descriptors,
        number: u64,
        node: &Node,
        wanted: &Wanted,
        writes: bool,
        body: &mut Body,
    ) -> Result<(), Errno> {
        let lock = wanted.lock()?;
        let found = sys::find_lock(self.of(descriptors, number, node, wanted, writes)?, lock)?;
        let start = found.start.max(0);
        let end = if found.len == 0 { i64::MAX } else { start.saturating_add(found.len - 1) };
        body.u64(start as u64);
        body.u64(end as u64);
        body.u32(found.kind as u32);
        // Whose it is nobody can say: it may be the host's.
        body.u32(0);
        Ok(())
    }

    /// Ends the locks of `owner` on a file.
    pub fn release(&mut self, number: u64, owner: u64) {
        self.held.remove(&(number, owner));
    }

    /// Ends all locks on a file.
    pub fn forget(&mut self, number: u64) {
        let held: Vec<(u64, u64)> =
            self.held.range((number, 0)..=(number, u64::MAX)).map(|(key, _)| *key).collect();
        for key in held {
            self.held.remove(&key);
        }
    }
}
