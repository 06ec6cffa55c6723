//! Attributes of files and of the file system, and locks.

use rustix::fs::{
    AtFlags, Gid, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
};
use rustix::io::Errno;

use super::Server;
use crate::fids::Fid;
use crate::host;
use crate::request::{Change, LockRange};
use crate::wire::Reply;

/// Every field of struct stat is valid (`P9_STATS_BASIC`).
const STATS_BASIC: u64 = 0x7ff;

/// What statfs reports as the file system's type (`V9FS_MAGIC`).
const V9FS_MAGIC: u32 = 0x0102_1997;

/// `P9_LOCK_SUCCESS` and `P9_LOCK_TYPE_UNLCK`.
const LOCK_SUCCESS: u8 = 0;
const LOCK_TYPE_UNLOCKED: u8 = 2;

/// Bits of [`Change::valid`] (`P9_ATTR_*`).
mod valid {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_SET: u32 = 1 << 7;
    pub const MTIME_SET: u32 = 1 << 8;
}

impl Server {
    pub(super) fn getattr(&mut self, fid: u32, reply: &mut Reply) -> Result<(), Errno> {
        let stat = self.fids.get(fid)?.node.stat()?;
        reply.u64(STATS_BASIC);
        reply.qid(host::qid(&stat, self.root.ident));
        write_stat(&stat, reply);
        Ok(())
    }

    /// A device of the host keeps the attributes the host gave it.
    /// Owner first (it clears set-id bits), times last (the others touch them).
    pub(super) fn setattr(&mut self, fid: u32, change: &Change) -> Result<(), Errno> {
        let fid = self.fids.get(fid)?;
        if fid.node.is_device() {
            return Err(self.deny(Errno::PERM));
        }
        let has = |bits| change.valid & bits != 0;
        let times = times(change)?;
        if has(valid::UID | valid::GID) {
            chown(fid, change)?;
        }
        if has(valid::MODE) {
            chmod(fid, change.mode)?;
        }
        if has(valid::SIZE) {
            self.quota.change(fid.node.fd(), false, || truncate(fid, change.size))?;
        }
        if has(valid::ATIME | valid::MTIME) {
            rustix::fs::utimensat(fid.node.fd(), c"", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    }

    pub(super) fn statfs(&mut self, fid: u32, reply: &mut Reply) -> Result<(), Errno> {
        let stat = rustix::fs::fstatvfs(self.fids.get(fid)?.node.fd())?;
        reply.u32(V9FS_MAGIC);
        reply.u32(u32::try_from(stat.f_bsize).unwrap_or(4096));
        for value in
            [stat.f_blocks, stat.f_bfree, stat.f_bavail, stat.f_files, stat.f_ffree, stat.f_fsid]
        {
            reply.u64(value);
        }
        reply.u32(stat.f_namemax as u32);
        Ok(())
    }

    pub(super) fn lock(&mut self, fid: u32, reply: &mut Reply) -> Result<(), Errno> {
        self.fids.get(fid)?;
        reply.u8(LOCK_SUCCESS);
        Ok(())
    }

    pub(super) fn getlock(
        &mut self,
        fid: u32,
        range: &LockRange<'_>,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        self.fids.get(fid)?;
        reply.u8(LOCK_TYPE_UNLOCKED);
        reply.u64(range.start);
        reply.u64(range.len);
        reply.u32(range.pid);
        reply.string(range.client);
        Ok(())
    }
}

/// The fields of Rgetattr after the qid; creation time, generation and data
/// version are not known and zero.
fn write_stat(stat: &Stat, reply: &mut Reply) {
    for value in [stat.st_mode, stat.st_uid, stat.st_gid] {
        reply.u32(value);
    }
    let values = [
        stat.st_nlink,
        stat.st_rdev,
        stat.st_size as u64,
        stat.st_blksize as u64,
        stat.st_blocks as u64,
        stat.st_atime as u64,
        stat.st_atime_nsec,
        stat.st_mtime as u64,
        stat.st_mtime_nsec,
        stat.st_ctime as u64,
        stat.st_ctime_nsec,
    ];
    values.into_iter().chain([0; 4]).for_each(|value| reply.u64(value));
}

fn chown(fid: &Fid, change: &Change) -> Result<(), Errno> {
    let id = |bit, id| match (change.valid & bit != 0, id) {
        (true, u32::MAX) => Err(Errno::INVAL),
        (set, id) => Ok(set.then_some(id)),
    };
    let owner = id(valid::UID, change.uid)?.map(Uid::from_raw);
    let group = id(valid::GID, change.gid)?.map(Gid::from_raw);
    rustix::fs::chownat(fid.node.fd(), c"", owner, group, AtFlags::EMPTY_PATH)
}

/// Through the file the guest has open, if any: it may have no name any more.
fn chmod(fid: &Fid, mode: u32) -> Result<(), Errno> {
    let mode = host::permitted_mode(mode, fid.node.is_dir());
    match fid.file() {
        Ok(file) => rustix::fs::fchmod(file, Mode::from_raw_mode(mode)),
        Err(_) => fid.node.chmod(mode),
    }
}

/// Through the file the guest has open if that allows it, else through one
/// opened for this.
fn truncate(fid: &Fid, size: u64) -> Result<(), Errno> {
    match fid.file().and_then(|file| rustix::fs::ftruncate(file, size)) {
        Err(Errno::BADF | Errno::INVAL) => {
            rustix::fs::ftruncate(fid.node.open(OFlags::WRONLY)?, size)
        }
        result => result,
    }
}

fn times(change: &Change) -> Result<Timestamps, Errno> {
    let time = |bit, set_bit, time| match (change.valid & bit != 0, change.valid & set_bit != 0) {
        (false, _) => Ok(Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }),
        (true, false) => Ok(Timespec { tv_sec: 0, tv_nsec: UTIME_NOW }),
        (true, true) => timespec(time),
    };
    Ok(Timestamps {
        last_access: time(valid::ATIME, valid::ATIME_SET, change.atime)?,
        last_modification: time(valid::MTIME, valid::MTIME_SET, change.mtime)?,
    })
}

fn timespec((seconds, nanos): (u64, u64)) -> Result<Timespec, Errno> {
    if nanos > 999_999_999 {
        return Err(Errno::INVAL);
    }
    Ok(Timespec { tv_sec: seconds as i64, tv_nsec: nanos as _ })
}
