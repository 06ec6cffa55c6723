//! Open files: content, listings, room on the disk, locks.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, Mode, OFlags, RawDir, SeekFrom, Stat};
use rustix::io::Errno;

use super::{CONTENT_LEN_MAX, Server};
use crate::host::{self, Ident};
use crate::locks::Wanted;
use crate::nodes::{Content, Node};
use crate::wire::{Fields, Head};
use crate::{Exchange, Metrics, sys, xattr_name};

/// Bytes of `struct fuse_write_in`.
pub const WRITE_HEAD_LEN: usize = 40;
/// Bytes of `struct fuse_dirent` beside the name, and of `struct fuse_entry_out` before it.
const ENTRY_HEAD_LEN: usize = 24;
/// Bytes that one call copies from file to file, so that others get their turn.
const COPIED_LEN_MAX: u64 = 64 << 20;

/// Flags of an answer to an open (`FOPEN_*`).
const KEEP_CACHE: u32 = 1 << 1;
/// `FUSE_WRITE_CACHE`: pages of a mapping, through any description that may write.
const WRITE_CACHE: u32 = 1;
/// `FUSE_RELEASE_FLOCK_UNLOCK` needs no care: the lock ends with the description.
const ACCESS: u32 = libc::O_ACCMODE as u32;
const TRUNCATE: u32 = libc::O_TRUNC as u32;
const APPEND: u32 = libc::O_APPEND as u32;
const EXCLUSIVE: u32 = libc::O_EXCL as u32;

/// A file that the guest has opened.
#[derive(Debug)]
pub struct Handle {
    pub file: Arc<OwnedFd>,
    pub node: u64,
    pub ident: Ident,
    flags: u32,
    /// For a directory: where the host's read position is, if known.
    position: Option<u64>,
    /// For one that appends: one that does not, for pages of mappings.
    plain: Option<OwnedFd>,
    /// File capabilities of the guest's, which end with the first change.
    has_capabilities: bool,
    /// Who locked bytes through it.
    lockers: Vec<u64>,
}

impl Handle {
    /// Of the file `ident`, which the guest knows as `node`.
    fn new(file: OwnedFd, (node, ident): (u64, Ident), flags: u32) -> Self {
        let file = Arc::new(file);
        let lockers = Vec::new();
        let (position, plain, has_capabilities) = (None, None, false);
        Self { file, node, ident, flags, position, plain, has_capabilities, lockers }
    }

    /// What writing goes to, of pages of a mapping or not.
    fn writer(&self, mapped: bool) -> &OwnedFd {
        self.plain.as_ref().filter(|_| mapped).unwrap_or(&self.file)
    }
}

/// The flags of the host's open; those that only matter to the guest's own kernel are left out.
fn host_flags(flags: u32) -> Result<OFlags, Errno> {
    let access = match (flags & ACCESS).cast_signed() {
        libc::O_RDONLY => OFlags::RDONLY,
        libc::O_WRONLY => OFlags::WRONLY,
        libc::O_RDWR => OFlags::RDWR,
        _ => return Err(Errno::INVAL),
    };
    let carried = [
        (APPEND, OFlags::APPEND),
        (libc::O_DSYNC as u32, OFlags::DSYNC),
        (libc::O_SYNC as u32, OFlags::SYNC),
    ];
    let set = carried.into_iter().filter(|(bit, _)| flags & bit == *bit);
    Ok(set.fold(access, |all, (_, flag)| all | flag))
}

impl Server {
    fn handle(&self, number: u64) -> Result<&Handle, Errno> {
        self.handles.get(number).ok_or(Errno::BADF)
    }

    /// Whether the rights allow an open with `flags`.
    fn admit_open(&self, flags: u32) -> Result<(), Errno> {
        let access = flags & ACCESS;
        if (access != 0 || flags & TRUNCATE != 0) && !self.rights.write {
            return Err(self.deny(Errno::ROFS));
        }
        if access != libc::O_WRONLY as u32 && !self.rights.read {
            return Err(self.deny(Errno::ACCESS));
        }
        Ok(())
    }

    pub(super) fn open(&mut self, number: u64, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let flags = fields.u32()?;
        self.admit_open(flags)?;
        let node = self.nodes.get(number)?;
        if node.is_dir() {
            return Err(Errno::ISDIR);
        }
        let ident = node.ident;
        let file = self.open_node(node, host_flags(flags)?)?;
        let mut handle = Handle::new(file, (number, ident), flags);
        let writes = flags & ACCESS != 0;
        if writes || flags & TRUNCATE != 0 {
            handle.has_capabilities = self.has_capabilities(&handle.file);
        }
        let mut stat = rustix::fs::fstat(&handle.file)?;
        let kept = self.nodes.get(number)?.cached == Some(Content::of(&stat));
        if flags & TRUNCATE != 0 {
            self.drop_capabilities(&mut handle);
            match writes {
                true => rustix::fs::ftruncate(&handle.file, 0)?,
                // Emptied for who only reads it.
                false => {
                    let writer = self.open_node(self.nodes.get(number)?, OFlags::WRONLY)?;
                    rustix::fs::ftruncate(&writer, 0)?;
                }
            }
            let after = rustix::fs::fstat(&handle.file)?;
            self.quota.changed(&stat, &after);
            stat = after;
        }
        self.note_content(number, &stat);
        self.put_opened(handle, if kept { KEEP_CACHE } else { 0 })
    }

    pub(super) fn opendir(&mut self, number: u64) -> Result<(), Errno> {
        let flags = libc::O_DIRECTORY as u32;
        if !self.rights.read {
            return Err(self.deny(Errno::ACCESS));
        }
        let node = self.nodes.dir(number)?;
        let ident = node.ident;
        let file = self.open_node(node, OFlags::DIRECTORY)?;
        self.put_opened(Handle::new(file, (number, ident), flags), 0)
    }

    /// `struct fuse_open_out`.
    fn put_opened(&mut self, handle: Handle, flags: u32) -> Result<(), Errno> {
        let node = handle.node;
        let number = self.handles.insert(handle)?;
        if let Ok(node) = self.nodes.get_mut(node) {
            node.opens += 1;
        }
        self.body.u64(number);
        self.body.u32(flags);
        self.body.u32(0);
        Ok(())
    }

    /// `struct fuse_create_in`, a name; one that nobody sees where it is `unnamed`.
    pub(super) fn create(
        &mut self,
        head: &Head,
        fields: &mut Fields<'_>,
        unnamed: bool,
    ) -> Result<(), Errno> {
        let (flags, mode) = (fields.u32()?, fields.u32()?);
        fields.skip(8)?;
        self.admit_open(flags)?;
        self.check_tree()?;
        self.quota.check_names()?;
        self.nodes.check_room()?;
        if self.handles.is_full() {
            return Err(Errno::NFILE);
        }
        let name = fields.text()?;
        let dir = self.nodes.dir(head.node)?;
        let mode = Mode::from_raw_mode(host::permitted_mode(mode & 0o7777, false));
        let own = host_flags(flags)? | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = if unnamed {
            let own = own | OFlags::TMPFILE | OFlags::from_bits_retain(flags & EXCLUSIVE);
            rustix::fs::openat(&dir.fd, c".", own, mode)?
        } else {
            let own = own | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            match rustix::fs::openat(&dir.fd, self.name(name)?, own, mode) {
                // Somebody of the host's was faster. The guest is to look at what there is.
                Err(Errno::EXIST) if flags & EXCLUSIVE == 0 => return Err(Errno::STALE),
                opened => opened?,
            }
        };
        // One without a name takes a descriptor, and no name until it is linked.
        if unnamed {
            return self.put_created(head, file, None, flags);
        }
        self.quota.made();
        let made = rustix::fs::fstat(&file)?;
        self.put_created(head, file, Some(name), flags)
            .inspect_err(|_| self.unmake(head.node, name, Ident::of(&made)))
    }

    /// Tells of what was just made, and of it as an open file.
    fn put_created(
        &mut self,
        head: &Head,
        file: OwnedFd,
        name: Option<&[u8]>,
        flags: u32,
    ) -> Result<(), Errno> {
        let stat = self.give_new(head, &file)?;
        let held = self.descriptors.hold(&file)?;
        let number = self.known(held, &stat, name.map(|name| (head.node, name)))?;
        self.note_content(number, &stat);
        self.put_entry(number, &stat)?;
        let known = (number, Ident::of(&stat));
        self.put_opened(Handle::new(file, known, flags), KEEP_CACHE)
    }

    /// Gives what was just made to who made it; its state then.
    pub(super) fn give_new(&self, head: &Head, made: impl AsFd) -> Result<Stat, Errno> {
        let look = || rustix::fs::fstat(made.as_fd());
        let stat = look()?;
        if (head.uid, head.gid) == (stat.st_uid, stat.st_gid) {
            return Ok(stat);
        }
        // The group of a directory that passes its own on stays.
        let dir = rustix::fs::fstat(&self.nodes.dir(head.node)?.fd)?;
        let passes = dir.st_mode & libc::S_ISGID != 0;
        let gid = (!passes && head.gid != stat.st_gid).then_some(head.gid);
        let uid = (head.uid != stat.st_uid).then_some(head.uid);
        if uid.is_none() && gid.is_none() {
            return Ok(stat);
        }
        self.owners.give(&self.descriptors, made.as_fd(), &stat, uid, gid)?;
        look()
    }

    pub(super) fn read(
        &mut self,
        fields: &mut Fields<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<usize, Errno> {
        let (number, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
        let handle = self.handle(number)?;
        let count = size.min(CONTENT_LEN_MAX) as usize;
        let done = exchange.put_from(handle.file.as_fd(), offset, count.min(exchange.room()))?;
        Metrics::add(&self.metrics.bytes_read, done);
        Ok(done)
    }

    /// `struct fuse_write_in`, then the content, which is still in the exchange.
    pub(super) fn write(
        &mut self,
        fields: &mut Fields<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<(), Errno> {
        let (number, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
        let flags = fields.u32()?;
        let count = (size.min(CONTENT_LEN_MAX) as usize).min(exchange.left());
        let mapped = flags & WRITE_CACHE != 0;
        self.drop_capabilities_of(number)?;
        self.prepare_writer(number, mapped)?;
        let Self { handles, quota, nodes, metrics, body, .. } = self;
        let handle = handles.get(number).ok_or(Errno::BADF)?;
        let file = handle.writer(mapped);
        let before = quota.before(file, count as u64)?;
        let done = exchange.take_to(file.as_fd(), offset, count)?;
        let after = rustix::fs::fstat(file)?;
        quota.changed(&before, &after);
        // The guest's own cache has what it wrote, if it had all before.
        if let Ok(node) = nodes.get_mut(handle.node)
            && node.cached == Some(Content::of(&before))
        {
            node.cached = Some(Content::of(&after));
        }
        Metrics::add(&metrics.bytes_written, done);
        body.u32(done as u32);
        body.u32(0);
        Ok(())
    }

    /// Pages of a mapping go where they belong, also through a description that appends.
    fn prepare_writer(&mut self, number: u64, mapped: bool) -> Result<(), Errno> {
        let handle = self.handle(number)?;
        if mapped && handle.flags & APPEND != 0 && handle.plain.is_none() {
            let plain = self.open_node(self.nodes.get(handle.node)?, OFlags::WRONLY)?;
            self.handles.get_mut(number).ok_or(Errno::BADF)?.plain = Some(plain);
        }
        Ok(())
    }

    fn has_capabilities(&self, file: impl AsFd) -> bool {
        let name = xattr_name::CAPABILITY_KEPT;
        rustix::fs::fgetxattr(file, name, &mut [0_u8; 64][..]).is_ok_and(|len| len > 0)
    }

    /// A file that changes has no capabilities any more, as on any disk.
    fn drop_capabilities(&self, handle: &mut Handle) {
        if std::mem::take(&mut handle.has_capabilities) {
            let path = self.descriptors.path(&handle.file);
            let _ = rustix::fs::removexattr(&*path, xattr_name::CAPABILITY_KEPT);
        }
    }

    fn drop_capabilities_of(&mut self, number: u64) -> Result<(), Errno> {
        if self.handle(number)?.has_capabilities {
            let path = self.descriptors.path(&self.handle(number)?.file);
            let _ = rustix::fs::removexattr(&*path, xattr_name::CAPABILITY_KEPT);
            if let Some(handle) = self.handles.get_mut(number) {
                handle.has_capabilities = false;
            }
        }
        Ok(())
    }

    pub(super) fn release(&mut self, number: u64) -> Result<(), Errno> {
        let handle = self.handles.remove(number).ok_or(Errno::BADF)?;
        // Locks of a description of the guest's (F_OFD_SETLK) end with it, and no flush tells of
        // that. Those of its processes have ended by then, as each has closed the file.
        for owner in &handle.lockers {
            self.lockers.release(handle.node, *owner);
        }
        if let Ok(node) = self.nodes.get_mut(handle.node) {
            node.opens = node.opens.saturating_sub(1);
        }
        self.let_go(&handle.file, handle.ident);
        Ok(())
    }

    pub(super) fn fsync(&mut self, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let (number, flags) = (fields.u64()?, fields.u32()?);
        let file = &self.handle(number)?.file;
        if flags & 1 != 0 { rustix::fs::fdatasync(file) } else { rustix::fs::fsync(file) }
    }

    pub(super) fn flush(&mut self, number: u64, fields: &mut Fields<'_>) -> Result<(), Errno> {
        fields.skip(16)?;
        self.lockers.release(number, fields.u64()?);
        Ok(())
    }

    pub(super) fn fallocate(&mut self, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let (number, offset, len, mode) =
            (fields.u64()?, fields.i64()?, fields.i64()?, fields.u32()?);
        self.drop_capabilities_of(number)?;
        let Self { handles, quota, .. } = self;
        let handle = handles.get(number).ok_or(Errno::BADF)?;
        let punches = FallocateFlags::PUNCH_HOLE.bits();
        let by = if mode & punches == 0 { len.cast_unsigned() } else { 0 };
        if by > quota.left() {
            return Err(Errno::DQUOT);
        }
        let before = quota.before(&handle.file, by)?;
        let done = sys::allocate(&handle.file, mode, offset, len);
        let after = rustix::fs::fstat(&handle.file)?;
        self.quota.changed(&before, &after);
        done
    }

    pub(super) fn lseek(&mut self, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let (number, offset, whence) = (fields.u64()?, fields.u64()?, fields.u32()?);
        let position = match whence.cast_signed() {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            libc::SEEK_SET => SeekFrom::Start(offset),
            libc::SEEK_END => SeekFrom::End(offset.cast_signed()),
            _ => return Err(Errno::INVAL),
        };
        let at = rustix::fs::seek(&self.handle(number)?.file, position)?;
        self.body.u64(at);
        Ok(())
    }

    /// `struct fuse_copy_file_range_in`.
    pub(super) fn copy_range(&mut self, fields: &mut Fields<'_>, wide: bool) -> Result<(), Errno> {
        let (from, mut from_offset) = (fields.u64()?, fields.u64()?);
        fields.skip(8)?;
        let (to, mut to_offset, len) = (fields.u64()?, fields.u64()?, fields.u64()?);
        if !self.rights.read {
            return Err(self.deny(Errno::ACCESS));
        }
        self.drop_capabilities_of(to)?;
        let Self { handles, quota, .. } = self;
        let file = |number| handles.get(number).map(|handle| &handle.file).ok_or(Errno::BADF);
        let (from, target) = (file(from)?, file(to)?);
        let len = len.min(COPIED_LEN_MAX);
        let before = quota.before(target, len)?;
        let done = rustix::fs::copy_file_range(
            from,
            Some(&mut from_offset),
            target,
            Some(&mut to_offset),
            len as usize,
        )?;
        let after = rustix::fs::fstat(target)?;
        self.quota.changed(&before, &after);
        if wide {
            self.body.u64(done as u64);
        } else {
            self.body.u32(done as u32);
            self.body.u32(0);
        }
        Ok(())
    }

    pub(super) fn setlk(&mut self, number: u64, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let wanted = Wanted::parse(fields)?;
        let handle = self.handle(wanted.handle)?;
        if wanted.is_of_whole_file() {
            return wanted.of_whole_file(&handle.file);
        }
        let (node, writes) = (self.nodes.get(number)?, self.rights.write);
        self.check_lockable(node)?;
        self.lockers.set(&self.descriptors, number, node, &wanted, writes)?;
        let Self { handles, lockers, .. } = self;
        if let Some(handle) = handles.get_mut(wanted.handle)
            && handle.node == number
            && !handle.lockers.contains(&wanted.owner)
        {
            handle.lockers.retain(|owner| lockers.holds(number, *owner));
            handle.lockers.push(wanted.owner);
        }
        Ok(())
    }

    pub(super) fn getlk(&mut self, number: u64, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let wanted = Wanted::parse(fields)?;
        self.handle(wanted.handle)?;
        let (node, writes) = (self.nodes.get(number)?, self.rights.write);
        self.check_lockable(node)?;
        let Self { lockers, descriptors, body, .. } = self;
        lockers.find(descriptors, number, node, &wanted, writes, body)
    }

    fn check_lockable(&self, node: &Node) -> Result<(), Errno> {
        use rustix::fs::FileType::{Directory, RegularFile};
        match node.kind {
            RegularFile | Directory => Ok(()),
            _ => Err(self.deny(Errno::ACCESS)),
        }
    }

    /// `struct fuse_read_in`; entries, each with what a lookup would tell where it is `plus`.
    pub(super) fn readdir(
        &mut self,
        number: u64,
        fields: &mut Fields<'_>,
        room: usize,
        plus: bool,
    ) -> Result<(), Errno> {
        let (handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
        let room = (size as usize).min(room);
        let opened = self.handles.get_mut(handle).ok_or(Errno::BADF)?;
        let dir = self.nodes.dir(number)?;
        if opened.node != number {
            return Err(Errno::BADF);
        }
        if self.file.is_some() {
            return self.list_file(offset, room, plus);
        }
        if opened.position != Some(offset) {
            rustix::fs::seek(&opened.file, SeekFrom::Start(offset))?;
        }
        opened.position = None;
        let file = opened.file.clone();
        let (dir, own) = (dir.ident, dir.ident == self.root);
        let mut entries = std::mem::take(&mut self.entries);
        // As many as are likely to fit.
        let chunk = if plus { room / 5 } else { room / 2 * 2 };
        let chunk = chunk.clamp(1024, entries.len());
        let mut position = Some(offset);
        let mut listing = RawDir::new(&*file, entries.get_mut(..chunk).unwrap_or_default());
        let mut result = Ok(());
        while let Some(entry) = listing.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(errno) => {
                    result = if self.body.len() == 0 { Err(errno) } else { Ok(()) };
                    break;
                }
            };
            // The folder's own parent is hidden: its `..` is itself.
            let name = entry.file_name().to_bytes();
            let hides = own && name == b"..";
            let ident = host::Ident { ino: entry.ino(), ..dir };
            let ident = if hides { self.root } else { ident };
            let told =
                Told { name, ident, kind: entry.file_type(), next: entry.next_entry_cookie() };
            if !self.put_listed(number, &told, room, plus) {
                position = None;
                break;
            }
            position = Some(told.next);
            if listing.is_buffer_empty() {
                break;
            }
        }
        self.entries = entries;
        if let Some(opened) = self.handles.get_mut(handle) {
            opened.position = position;
        }
        result
    }

    /// The one file of a folder that is one.
    fn list_file(&mut self, offset: u64, room: usize, plus: bool) -> Result<(), Errno> {
        let Some(file) = &self.file else { return Ok(()) };
        let ident = host::Ident::of(&rustix::fs::fstat(file)?);
        if offset == 0 {
            let kind = rustix::fs::FileType::RegularFile;
            let name = crate::FILE_NAME.as_bytes();
            let told = Told { name, ident, kind, next: 1 };
            self.put_listed(crate::nodes::ROOT, &told, room, plus);
        }
        Ok(())
    }

    /// Puts an entry if there is room for it.
    fn put_listed(&mut self, dir: u64, told: &Told<'_>, room: usize, plus: bool) -> bool {
        let begin = self.body.len();
        let before = if plus { super::attr::ENTRY_LEN } else { 0 };
        let len = (before + ENTRY_HEAD_LEN + told.name.len()).next_multiple_of(8);
        if begin + len > room {
            return false;
        }
        if plus {
            let is_other = told.name != b"." && told.name != b"..";
            let entry = match is_other && !self.nodes.is_crowded() {
                true => self.find(dir, told.name),
                false => Err(Errno::NOENT),
            };
            let put = entry.and_then(|(number, stat)| self.put_entry(number, &stat));
            if put.is_err() {
                self.body.cut(begin);
                self.body.zeros(before);
            }
        }
        self.body.u64(told.ident.number(self.root));
        self.body.u64(told.next);
        self.body.u32(told.name.len() as u32);
        self.body.u32(host::dirent_type(told.kind));
        self.body.put(told.name);
        self.body.pad();
        true
    }

    /// Follows a change of a file's length by its name.
    pub(super) fn truncate(
        &mut self,
        number: u64,
        opened: Option<u64>,
        len: u64,
    ) -> Result<(), Errno> {
        let through = opened.and_then(|handle| self.handles.get(handle));
        let through = through.filter(|handle| handle.node == number && handle.flags & ACCESS != 0);
        let own;
        let file = match through {
            Some(handle) => &*handle.file,
            None => {
                own = self.open_node(self.nodes.get(number)?, OFlags::WRONLY)?;
                &own
            }
        };
        let before = self.quota.before(file, 0)?;
        rustix::fs::ftruncate(file, len)?;
        let after = rustix::fs::fstat(file)?;
        if self.has_capabilities(file) {
            let path = self.descriptors.path(file);
            let _ = rustix::fs::removexattr(&*path, xattr_name::CAPABILITY_KEPT);
        }
        self.quota.changed(&before, &after);
        Ok(())
    }
}

/// An entry as the host's directory tells it.
struct Told<'a> {
    name: &'a [u8],
    ident: host::Ident,
    kind: rustix::fs::FileType,
    next: u64,
}
