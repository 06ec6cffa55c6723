//! Locks that the guest's programs hold: as locks of this process on the host, where they exclude
//! those of the host's programs and of other cells.
//!
//! A program of the guest that locks bytes of a file has a description of that file for itself
//! here, so that its locks are its own. Nothing waits: a guest asks again.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;

use crate::Limits;
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
    pub owner: u64,
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

    /// The bytes that it is of.
    fn range(&self) -> Range {
        Range { start: self.start, end: self.end.min(END_MAX), kind: self.kind }
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

/// Locks of one holder on one file, as the host's kernel keeps them: in their order, none over
/// another, and neighbours of one kind are one.
#[derive(Clone, Debug, Default)]
struct Ranges(Vec<Range>);

/// Up to `end`, which is locked too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
    kind: u32,
}

impl Ranges {
    /// The same after `set` was set or given up.
    fn with(&self, set: Range) -> Self {
        let mut ranges = Vec::with_capacity(self.0.len() + 2);
        for range in &self.0 {
            if range.end < set.start || range.start > set.end {
                ranges.push(*range);
                continue;
            }
            if range.start < set.start {
                ranges.push(Range { end: set.start - 1, ..*range });
            }
            if range.end > set.end {
                ranges.push(Range { start: set.end + 1, ..*range });
            }
        }
        if set.kind != UNLOCKED {
            ranges.push(set);
        }
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, range| {
            let joins = next.kind == range.kind && next.start == range.end.saturating_add(1);
            if joins {
                range.end = next.end;
            }
            joins
        });
        Self(ranges)
    }
}

/// A description of a file, and the locks through it.
#[derive(Debug)]
struct Held {
    file: OwnedFd,
    ranges: Ranges,
}

/// Descriptions by file and by who holds locks through them.
#[derive(Debug)]
pub struct Lockers {
    held: BTreeMap<(u64, u64), Held>,
    max: usize,
    /// Locks of bytes, which the host's kernel keeps; of all files and of one.
    locks_max: usize,
    file_locks_max: usize,
    locks: usize,
}

impl Lockers {
    pub fn new(limits: &Limits) -> Self {
        let Limits { lockers_max, locks_max, file_locks_max, .. } = *limits;
        Self { held: BTreeMap::new(), max: lockers_max, locks_max, file_locks_max, locks: 0 }
    }

    pub fn clear(&mut self) {
        self.held.clear();
        self.locks = 0;
    }

    /// Locks on one file.
    fn of_file(&self, number: u64) -> usize {
        let held = self.held.range((number, 0)..=(number, u64::MAX));
        held.map(|(_, held)| held.ranges.0.len()).sum()
    }

    fn of(
        &mut self,
        descriptors: &Descriptors,
        number: u64,
        node: &Node,
        wanted: &Wanted,
        writes: bool,
    ) -> Result<&mut Held, Errno> {
        let crowded = self.held.len() >= self.max;
        match self.held.entry((number, wanted.owner)) {
            std::collections::btree_map::Entry::Occupied(held) => Ok(held.into_mut()),
            std::collections::btree_map::Entry::Vacant(_) if crowded => Err(Errno::NOLCK),
            std::collections::btree_map::Entry::Vacant(place) => {
                let access = if writes && !node.is_dir() { OFlags::RDWR } else { OFlags::RDONLY };
                let file = descriptors.open(&node.fd, access)?;
                Ok(place.insert(Held { file, ranges: Ranges::default() }))
            }
        }
    }

    /// Sets or gives up a lock; `writes`: whether the folder may be written.
    ///
    /// # Errors
    /// EAGAIN where another holds one in the way, EBADF for an exclusive one on what is only read,
    /// ENOLCK where there are as many as there may be.
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
        let (all, own) = (self.locks, self.of_file(number));
        let (locks_max, file_locks_max) = (self.locks_max, self.file_locks_max);
        let held = self.of(descriptors, number, node, wanted, writes)?;
        let before = held.ranges.0.len();
        let ranges = held.ranges.with(wanted.range());
        let more = ranges.0.len().saturating_sub(before);
        // Giving a part up may leave two.
        if more > 0 && (all + more > locks_max || own + more > file_locks_max) {
            return Err(Errno::NOLCK);
        }
        sys::set_lock(&held.file, lock)?;
        held.ranges = ranges;
        self.locks = all - before + held.ranges.0.len();
        Ok(())
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
        let found = {
            let held = self.of(descriptors, number, node, wanted, writes)?;
            sys::find_lock(&held.file, lock)?
        };
        let start = found.start.max(0);
        let end = if found.len == 0 { i64::MAX } else { start.saturating_add(found.len - 1) };
        body.u64(start as u64);
        body.u64(end as u64);
        body.u32(found.kind as u32);
        // Whose it is nobody can say: it may be the host's.
        body.u32(0);
        Ok(())
    }

    /// Whether `owner` has, or had, locks on a file.
    pub fn holds(&self, number: u64, owner: u64) -> bool {
        self.held.contains_key(&(number, owner))
    }

    /// Ends the locks of `owner` on a file.
    pub fn release(&mut self, number: u64, owner: u64) {
        if let Some(held) = self.held.remove(&(number, owner)) {
            self.locks -= held.ranges.0.len();
        }
    }

    /// Ends all locks on a file.
    pub fn forget(&mut self, number: u64) {
        let held: Vec<(u64, u64)> =
            self.held.range((number, 0)..=(number, u64::MAX)).map(|(key, _)| *key).collect();
        for (_, owner) in held {
            self.release(number, owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_counted_as_the_kernel_keeps_them() {
        let set = |ranges: &Ranges, start, end, kind| ranges.with(Range { start, end, kind });
        let mut ranges = Ranges::default();
        let count = |ranges: &Ranges| ranges.0.len();
        ranges = set(&ranges, 0, 9, EXCLUSIVE);
        ranges = set(&ranges, 20, 29, EXCLUSIVE);
        assert_eq!(count(&ranges), 2);
        // Between the two: one. Again: still one.
        ranges = set(&ranges, 10, 19, EXCLUSIVE);
        ranges = set(&ranges, 10, 19, EXCLUSIVE);
        assert_eq!(ranges.0, [Range { start: 0, end: 29, kind: EXCLUSIVE }]);
        // One of another kind in the middle: three; given up: two.
        ranges = set(&ranges, 12, 14, SHARED);
        assert_eq!(count(&ranges), 3);
        ranges = set(&ranges, 12, 14, UNLOCKED);
        assert_eq!(count(&ranges), 2);
        ranges = set(&ranges, 0, END_MAX, UNLOCKED);
        assert_eq!(count(&ranges), 0);
        assert_eq!(count(&set(&ranges, 5, END_MAX, SHARED)), 1);
    }
}
