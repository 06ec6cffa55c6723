//! Attributes of files and of the file system.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, Mode, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;

use super::{Server, VALID_NS};
use crate::host::{self, Ident};
use crate::nodes::Node;
use crate::sys;
use crate::wire::Fields;

/// Bytes of `struct fuse_attr`, and of `struct fuse_entry_out`, which ends with one.
pub const ATTR_LEN: usize = 88;
pub const ENTRY_LEN: usize = 40 + ATTR_LEN;

/// What a change is of (`FATTR_*`).
mod valid {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const HANDLE: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// `struct fuse_setattr_in`.
struct Change {
    valid: u32,
    handle: u64,
    size: u64,
    atime: (u64, u32),
    mtime: (u64, u32),
    mode: u32,
    uid: u32,
    gid: u32,
}

impl Change {
    fn parse(fields: &mut Fields<'_>) -> Result<Self, Errno> {
        let valid = fields.u32()?;
        fields.skip(4)?;
        let (handle, size) = (fields.u64()?, fields.u64()?);
        fields.skip(8)?;
        let (atime, mtime) = (fields.u64()?, fields.u64()?);
        fields.skip(8)?;
        let (atime, mtime) = ((atime, fields.u32()?), (mtime, fields.u32()?));
        fields.skip(4)?;
        let mode = fields.u32()?;
        fields.skip(4)?;
        let (uid, gid) = (fields.u32()?, fields.u32()?);
        Ok(Self { valid, handle, size, atime, mtime, mode, uid, gid })
    }

    fn has(&self, bits: u32) -> bool {
        self.valid & bits != 0
    }

    fn times(&self) -> Result<Timestamps, Errno> {
        let time = |bit, now, time| match (self.has(bit), self.has(now)) {
            (false, _) => Ok(Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }),
            (true, true) => Ok(Timespec { tv_sec: 0, tv_nsec: UTIME_NOW }),
            (true, false) => timespec(time),
        };
        Ok(Timestamps {
            last_access: time(valid::ATIME, valid::ATIME_NOW, self.atime)?,
            last_modification: time(valid::MTIME, valid::MTIME_NOW, self.mtime)?,
        })
    }
}

fn timespec((seconds, nanos): (u64, u32)) -> Result<Timespec, Errno> {
    match nanos {
        0..1_000_000_000 => {
            Ok(Timespec { tv_sec: seconds.cast_signed(), tv_nsec: i64::from(nanos) })
        }
        _ => Err(Errno::INVAL),
    }
}

impl Server {
    /// The times for which names and attributes are taken as known (`struct fuse_entry_out`).
    pub(super) fn put_valid_entry(&mut self) {
        let (seconds, nanos) = valid_for();
        self.body.u64(seconds);
        self.body.u64(seconds);
        self.body.u32(nanos);
        self.body.u32(nanos);
    }

    /// `struct fuse_entry_out`.
    pub(super) fn put_entry(&mut self, number: u64, stat: &Stat) -> Result<(), Errno> {
        self.body.u64(number);
        self.body.u64(0);
        self.put_valid_entry();
        self.put_attr(number, stat)
    }

    /// `struct fuse_attr`.
    fn put_attr(&mut self, number: u64, stat: &Stat) -> Result<(), Errno> {
        let owner = self.owner(self.nodes.get(number)?.fd.as_fd(), stat);
        let body = &mut self.body;
        body.u64(Ident::of(stat).number(self.root));
        body.u64(stat.st_size.cast_unsigned());
        body.u64(stat.st_blocks.cast_unsigned());
        for seconds in [stat.st_atime, stat.st_mtime, stat.st_ctime] {
            body.u64(seconds as u64);
        }
        for nanos in [stat.st_atime_nsec, stat.st_mtime_nsec, stat.st_ctime_nsec] {
            body.u32(nanos as u32);
        }
        body.u32(stat.st_mode);
        body.u32(u32::try_from(stat.st_nlink).unwrap_or(u32::MAX));
        body.u32(owner.uid);
        body.u32(owner.gid);
        body.u32(device_number(stat.st_rdev));
        body.u32(u32::try_from(stat.st_blksize).unwrap_or(4096));
        body.u32(0);
        Ok(())
    }

    /// `struct fuse_attr_out`.
    fn put_attr_out(&mut self, number: u64, stat: &Stat) -> Result<(), Errno> {
        let (seconds, nanos) = valid_for();
        self.body.u64(seconds);
        self.body.u32(nanos);
        self.body.u32(0);
        self.put_attr(number, stat)
    }

    /// `struct fuse_getattr_in`.
    pub(super) fn getattr(&mut self, number: u64, _: &mut Fields<'_>) -> Result<(), Errno> {
        let stat = rustix::fs::fstat(&self.nodes.get(number)?.fd)?;
        self.put_attr_out(number, &stat)
    }

    /// A device of the host keeps the attributes that the host gave it. The owner comes first (it
    /// clears set-id bits), times last (the others touch them).
    pub(super) fn setattr(&mut self, number: u64, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let change = Change::parse(fields)?;
        let times = change.times()?;
        let node = self.nodes.get(number)?;
        if node.is_device() || (self.file.is_some() && node.is_dir()) {
            return Err(self.deny(Errno::PERM));
        }
        if change.has(valid::UID | valid::GID) {
            let stat = rustix::fs::fstat(&node.fd)?;
            let id = |bit, id| change.has(bit).then_some(id);
            let (uid, gid) = (id(valid::UID, change.uid), id(valid::GID, change.gid));
            self.owners.give(&self.descriptors, node.fd.as_fd(), &stat, uid, gid)?;
        }
        if change.has(valid::MODE) {
            self.chmod(node, change.mode)?;
        }
        if change.has(valid::SIZE) {
            let opened = change.has(valid::HANDLE).then_some(change.handle);
            self.truncate(number, opened, change.size)?;
        }
        let node = self.nodes.get(number)?;
        if change.has(valid::ATIME | valid::MTIME) {
            rustix::fs::utimensat(&node.fd, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        let stat = rustix::fs::fstat(&node.fd)?;
        self.put_attr_out(number, &stat)
    }

    fn chmod(&self, node: &Node, mode: u32) -> Result<(), Errno> {
        if node.kind == FileType::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        let mode = host::permitted_mode(mode & 0o7777, node.is_dir());
        let name = self.descriptors.name(&node.fd);
        let change = || {
            let mode = Mode::from_raw_mode(mode);
            rustix::fs::chmodat(self.descriptors.dir(), &*name, mode, AtFlags::empty())
        };
        if mode & libc::S_ISGID != 0 { sys::with_group_bit(change) } else { change() }
    }

    /// `struct fuse_kstatfs`.
    pub(super) fn statfs(&mut self, number: u64) -> Result<(), Errno> {
        let held = match &self.file {
            Some(file) => file,
            None => &self.nodes.get(number)?.fd,
        };
        let stat = rustix::fs::fstatvfs(held)?;
        for value in [stat.f_blocks, stat.f_bfree, stat.f_bavail, stat.f_files, stat.f_ffree] {
            self.body.u64(value);
        }
        self.body.u32(u32::try_from(stat.f_bsize).unwrap_or(4096));
        self.body.u32(u32::try_from(stat.f_namemax).unwrap_or(255));
        self.body.u32(u32::try_from(stat.f_frsize).unwrap_or(4096));
        self.body.zeros(4 + 24);
        Ok(())
    }
}

/// Seconds and the rest of a second.
fn valid_for() -> (u64, u32) {
    (u64::from(VALID_NS / 1_000_000_000), VALID_NS % 1_000_000_000)
}

/// A device's number as the kernel packs it into 32 bits (`new_encode_dev`).
fn device_number(device: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}
