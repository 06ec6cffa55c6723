//! Opening, creating, reading and writing files, and listing directories.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::fs::{FileType, OFlags, RawDir, RawDirEntry, SeekFrom};
use rustix::io::Errno;

use super::Server;
use crate::fids::{Fid, Open};
use crate::gate::{ACCESS, APPEND, READ_WRITE, TRUNCATE, WRITE_ONLY};
use crate::host::{self, Ident, Node};
use crate::quota::Quota;
use crate::wire::Reply;
use crate::{Metrics, host::Name};

/// Open flags that are carried over to the host (`P9_DOTL_*`).
const EXCLUSIVE: u32 = 0o200;
const DSYNC: u32 = 0o10000;
const DIRECTORY: u32 = 0o200_000;
const SYNC: u32 = 0o4_000_000;

/// Bytes of `qid[13] offset[8] type[1] name[s]` beside the name.
const ENTRY_HEAD_LEN: usize = 24;

impl Server {
    pub(super) fn lopen(&mut self, fid: u32, flags: u32, reply: &mut Reply) -> Result<(), Errno> {
        let held = self.fids.get(fid)?;
        if held.open.is_some() {
            return Err(Errno::INVAL);
        }
        let file = self.open_node(&held.node, flags)?;
        truncate_opened(&mut self.quota, &held.node, &file, flags)?;
        let qid = host::qid(&rustix::fs::fstat(&file)?, self.root.ident);
        self.fids.get_mut(fid)?.open = Some(Open::new(file, flags));
        reply.qid(qid);
        reply.u32(0);
        Ok(())
    }

    /// A file without its name can still be opened while some fid has it open,
    /// as the guest does for /proc/self/fd.
    fn open_node(&self, node: &Node, flags: u32) -> Result<Rc<OwnedFd>, Errno> {
        if flags & DIRECTORY != 0 && !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        if !matches!(
            node.file_type,
            FileType::RegularFile | FileType::Directory | FileType::Symlink
        ) {
            return Err(self.deny(Errno::ACCESS));
        }
        let file = match node.open(host_flags(flags)?) {
            Err(Errno::STALE) => self.fids.opened(node.ident, flags).ok_or(Errno::STALE)?,
            opened => Rc::new(opened?),
        };
        Ok(file)
    }

    pub(super) fn lcreate(
        &mut self,
        dir: u32,
        name: &[u8],
        flags: u32,
        mode: u32,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let name = self.name(name)?;
        if self.fids.get(dir)?.open.is_some() {
            return Err(Errno::INVAL);
        }
        let (node, file, is_new) = self.create_or_open(self.fids.dir(dir)?, name, flags, mode)?;
        match is_new {
            true => self.quota.made(),
            false => truncate_opened(&mut self.quota, &node, &file, flags)?,
        }
        let qid = host::qid(&rustix::fs::fstat(&file)?, self.root.ident);
        *self.fids.get_mut(dir)? = Fid { node, open: Some(Open::new(file, flags)) };
        reply.qid(qid);
        reply.u32(0);
        Ok(())
    }

    fn create_or_open(
        &self,
        dir: &Node,
        name: Name<'_>,
        flags: u32,
        mode: u32,
    ) -> Result<(Node, Rc<OwnedFd>, bool), Errno> {
        let created = match self.quota.check_names() {
            Ok(()) => dir.create(name, host_flags(flags)?, host::permitted_mode(mode, false)),
            // One that is there can be opened all the same.
            Err(errno) => dir.child(name).map_err(|_| errno).and(Err(Errno::EXIST)),
        };
        match created {
            Err(Errno::EXIST) if flags & EXCLUSIVE == 0 => {
                let (node, _) = dir.child(name)?;
                let file = self.open_node(&node, flags)?;
                Ok((node, file, false))
            }
            created => created.map(|(node, file)| (node, file, true)),
        }
    }

    pub(super) fn read(
        &mut self,
        fid: u32,
        offset: u64,
        count: u32,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let file = self.fids.get(fid)?.file()?;
        let filled = reply.block(count as usize, |room| host::read_at(file, room, offset))?;
        Metrics::add(&self.metrics.bytes_read, filled);
        Ok(())
    }

    pub(super) fn write(
        &mut self,
        fid: u32,
        offset: u64,
        data: &[u8],
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let file = self.fids.get(fid)?.file()?;
        let written = self.quota.change(file, true, || host::write_at(file, data, offset))?;
        Metrics::add(&self.metrics.bytes_written, written);
        reply.u32(written as u32);
        Ok(())
    }

    pub(super) fn fsync(&mut self, fid: u32, data_only: bool) -> Result<(), Errno> {
        let file = self.fids.get(fid)?.file()?;
        if data_only { rustix::fs::fdatasync(file) } else { rustix::fs::fsync(file) }
    }

    /// Reads as many host entries as are sure to fit: 6 bytes of the host's
    /// take at most 7 of ours. What does not fit all the same is read again.
    pub(super) fn readdir(
        &mut self,
        fid: u32,
        offset: u64,
        count: u32,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let held = self.fids.get_mut(fid)?;
        let (node, open) = (&held.node, held.open.as_mut().ok_or(Errno::BADF)?);
        if !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        if open.position != Some(offset) {
            rustix::fs::seek(&open.file, SeekFrom::Start(offset))?;
        }
        open.position = None;
        let limit = (count as usize).min(reply.room().saturating_sub(4));
        let chunk = (limit / 7 * 6).clamp(512, self.entries.len());
        let entries = RawDir::new(&open.file, &mut self.entries[..chunk]);
        let listing = Listing { dir: node.ident, root: self.root.ident, position: Some(offset) };
        reply.block(limit, |room| {
            let (filled, position) = listing.pack(entries, room)?;
            open.position = position;
            Ok(filled)
        })?;
        Ok(())
    }
}

/// The flags of the host's open; those that only matter to the guest's own
/// kernel are left out.
fn host_flags(flags: u32) -> Result<OFlags, Errno> {
    let access = match flags & ACCESS {
        0 => OFlags::RDONLY,
        WRITE_ONLY => OFlags::WRONLY,
        READ_WRITE => OFlags::RDWR,
        _ => return Err(Errno::INVAL),
    };
    let carried = [(APPEND, OFlags::APPEND), (DSYNC, OFlags::DSYNC), (SYNC, OFlags::SYNC)];
    let set = carried.into_iter().filter(|(bit, _)| flags & bit != 0);
    Ok(set.fold(access, |all, (_, flag)| all | flag))
}

/// Packs host entries into the body of an Rreaddir.
struct Listing {
    dir: Ident,
    root: Ident,
    /// Where the host's read position is; `None` once an entry was dropped.
    position: Option<u64>,
}

impl Listing {
    /// Packs one batch of the host's. Returns the bytes filled and where the
    /// host's read position is, if it is where the guest will go on.
    ///
    /// # Errors
    /// EINVAL if there is an entry but no room for it.
    fn pack(
        mut self,
        mut entries: RawDir<'_, &Rc<OwnedFd>>,
        room: &mut [u8],
    ) -> Result<(usize, Option<u64>), Errno> {
        let mut filled = 0;
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let len = ENTRY_HEAD_LEN + entry.file_name().count_bytes();
            match room.get_mut(filled..filled + len) {
                Some(room) => self.write(&entry, room),
                None if filled == 0 => return Err(Errno::INVAL),
                None => return Ok((filled, None)),
            }
            filled += len;
            self.position = Some(entry.next_entry_cookie());
            if entries.is_buffer_empty() {
                break;
            }
        }
        Ok((filled, self.position))
    }

    /// The folder's own parent is hidden: its `..` is itself.
    fn write(&self, entry: &RawDirEntry<'_>, room: &mut [u8]) {
        let name = entry.file_name().to_bytes();
        let hides_parent = self.dir == self.root && name == b"..";
        let ident = if hides_parent { self.root } else { self.dir.sibling(entry.ino()) };
        let (head, tail) = room.split_at_mut(ENTRY_HEAD_LEN);
        head[0] = host::qid_kind(entry.file_type());
        head[1..5].fill(0);
        head[5..13].copy_from_slice(&ident.path(self.root).to_le_bytes());
        head[13..21].copy_from_slice(&entry.next_entry_cookie().to_le_bytes());
        head[21] = dirent_type(entry.file_type());
        head[22..24].copy_from_slice(&(name.len() as u16).to_le_bytes());
        tail.copy_from_slice(name);
    }
}

/// Empties a file that was opened for that.
fn truncate_opened(
    quota: &mut Quota,
    node: &Node,
    file: &Rc<OwnedFd>,
    flags: u32,
) -> Result<(), Errno> {
    match flags & TRUNCATE != 0 && !node.is_dir() {
        true => quota.change(file, false, || rustix::fs::ftruncate(file, 0)),
        false => Ok(()),
    }
}

/// The type byte of a directory entry (`DT_*`).
fn dirent_type(file_type: FileType) -> u8 {
    match file_type {
        FileType::Fifo => libc::DT_FIFO,
        FileType::CharacterDevice => libc::DT_CHR,
        FileType::Directory => libc::DT_DIR,
        FileType::BlockDevice => libc::DT_BLK,
        FileType::RegularFile => libc::DT_REG,
        FileType::Symlink => libc::DT_LNK,
        FileType::Socket => libc::DT_SOCK,
        FileType::Unknown => libc::DT_UNKNOWN,
    }
}
