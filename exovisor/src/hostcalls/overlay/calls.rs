//! WASI's calls on descriptors of overlays.

use super::descriptors::{FIRST, Open, OpenDir, Overlays, Position};
use super::{Opened, PATH_BYTES_MAX, Status, Times, Wish};
use crate::hostcalls::context::Waits;
use crate::hostcalls::guest::{self, copy_out, fault, number, put};
use crate::imports::Wasi;
use std::sync::Arc;
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::p1::types::{
    Dirent, Errno, Fdflags, Fdstat, Filestat, Filetype, Fstflags, Oflags, Rights,
};
use wasmtime_wasi::p1::wasi_snapshot_preview1::WasiSnapshotPreview1 as _;
use wiggle::{GuestMemory, GuestPtr};

/// Bytes that one call reads or writes at most.
const PIECE_BYTES_MAX: usize = 1 << 20;
const FOLLOW: i64 = 1;

impl Overlays {
    /// Answers a call with its errno. `None`: it is WASI's, because none of its descriptors is
    /// one of these, or because WASI knows the answer.
    pub async fn call(
        &mut self,
        wasi: &mut WasiP1Ctx,
        call: Wasi,
        arguments: &[i64],
        memory: &mut GuestMemory<'_>,
    ) -> Option<i32> {
        if self.is_unused() {
            return None;
        }
        let result = match call {
            _ if call.is_on_descriptor() => self.on_descriptor(wasi, call, arguments, memory).await,
            _ if call.is_on_path() => self.on_path(call, arguments, memory).await,
            _ => None,
        }?;
        let errno = result.err().unwrap_or(Errno::Success);
        Some(i32::from(u16::from(errno)))
    }

    async fn on_descriptor(
        &mut self,
        wasi: &mut WasiP1Ctx,
        call: Wasi,
        arguments: &[i64],
        memory: &mut GuestMemory<'_>,
    ) -> Option<Result<(), Errno>> {
        let fd = arguments.first().map(|fd| number(*fd))?;
        if let (Wasi::fd_renumber, [_, to]) = (call, arguments) {
            return self.renumber(wasi, fd, number(*to), memory).await;
        }
        if !self.has(fd) {
            return None;
        }
        Some(match (call, &arguments[1..]) {
            (Wasi::fd_close, []) => match self.close(fd) {
                true => return None,
                false => Ok(()),
            },
            (Wasi::fd_prestat_get | Wasi::fd_prestat_dir_name, _) if fd < FIRST => return None,
            (Wasi::fd_prestat_get | Wasi::fd_prestat_dir_name, _) => Err(Errno::Badf),
            (Wasi::fd_advise | Wasi::fd_sync | Wasi::fd_datasync, _) => Ok(()),
            (Wasi::fd_fdstat_get, [out]) => self.stat(fd).and_then(|stat| put(memory, *out, stat)),
            (Wasi::fd_fdstat_set_flags, [flags]) => self.set_flags(fd, *flags),
            (Wasi::fd_filestat_get, [out]) => {
                self.status(fd).await.and_then(|status| put(memory, *out, filestat(status)))
            }
            (Wasi::fd_filestat_set_size, [len]) => self.set_len(fd, *len as u64),
            (Wasi::fd_filestat_set_times, [read, changed, flags]) => {
                self.set_times(fd, None, *read, *changed, *flags).await
            }
            (Wasi::fd_read, [buffers, count, out]) => {
                self.read(fd, None, (*buffers, *count, *out), memory).await
            }
            (Wasi::fd_pread, [buffers, count, offset, out]) => {
                self.read(fd, Some(*offset as u64), (*buffers, *count, *out), memory).await
            }
            (Wasi::fd_write, [buffers, count, out]) => {
                self.write(fd, None, (*buffers, *count, *out), memory).await
            }
            (Wasi::fd_pwrite, [buffers, count, offset, out]) => {
                self.write(fd, Some(*offset as u64), (*buffers, *count, *out), memory).await
            }
            (Wasi::fd_seek, [offset, whence, out]) => {
                self.seek(fd, *offset, *whence).and_then(|at| put(memory, *out, at))
            }
            (Wasi::fd_tell, [out]) => {
                self.file(fd).map(|file| file.offset).and_then(|at| put(memory, *out, at))
            }
            (Wasi::fd_readdir, [buffer, len, cookie, out]) => {
                self.list(fd, number(*buffer), number(*len), *cookie as u64, *out, memory).await
            }
            // Room is not set aside, and rights are the capability's.
            _ => Err(Errno::Notsup),
        })
    }

    async fn on_path(
        &mut self,
        call: Wasi,
        arguments: &[i64],
        memory: &mut GuestMemory<'_>,
    ) -> Option<Result<(), Errno>> {
        let fds = call.import().descriptors;
        let known =
            fds.iter().filter(|at| arguments.get(**at).is_some_and(|fd| self.has(number(*fd))));
        match known.count() {
            0 => None,
            count if count < fds.len() => Some(Err(Errno::Xdev)),
            _ => Some(self.path_call(call, arguments, memory).await),
        }
    }

    async fn path_call(
        &mut self,
        call: Wasi,
        arguments: &[i64],
        memory: &mut GuestMemory<'_>,
    ) -> Result<(), Errno> {
        let budget = self.budget.clone();
        match (call, arguments) {
            (Wasi::path_open, [fd, lookup, path, len, open, rights, _, flags, out]) => {
                let text = text(memory, *path, *len)?;
                let fd = self.open(number(*fd), text, *lookup, *open, *rights, *flags).await?;
                put(memory, *out, fd)
            }
            (Wasi::path_create_directory, [fd, path, len]) => {
                let (dir, text) = (self.dir(number(*fd))?, text(memory, *path, *len)?);
                self.away(move || dir.overlay.make_dir(&budget, &dir.path, &text)).await
            }
            (Wasi::path_filestat_get, [fd, lookup, path, len, out]) => {
                let (dir, text) = (self.dir(number(*fd))?, text(memory, *path, *len)?);
                let follow = lookup & FOLLOW != 0;
                let status =
                    self.away(move || dir.overlay.status(&dir.path, &text, follow)).await?;
                put(memory, *out, filestat(status))
            }
            (Wasi::path_filestat_set_times, [fd, lookup, path, len, read, changed, flags]) => {
                let text = text(memory, *path, *len)?;
                let path = Some((text, lookup & FOLLOW != 0));
                self.set_times(number(*fd), path, *read, *changed, *flags).await
            }
            (Wasi::path_link, [fd, lookup, old, old_len, to, new, new_len]) => {
                let (from, old) = (self.dir(number(*fd))?, text(memory, *old, *old_len)?);
                let (to, new) = (self.dir(number(*to))?, text(memory, *new, *new_len)?);
                same(&from, &to)?;
                let follow = lookup & FOLLOW != 0;
                self.away(move || {
                    let from_path = (&*from.path, old.as_str(), follow);
                    from.overlay.link(&budget, from_path, (&to.path, &new))
                })
                .await
            }
            (Wasi::path_readlink, [fd, path, len, buffer, size, out]) => {
                let (dir, text) = (self.dir(number(*fd))?, text(memory, *path, *len)?);
                let target = self.away(move || dir.overlay.read_link(&dir.path, &text)).await?;
                let count = target.len().min(number(*size) as usize);
                copy_out(memory, number(*buffer), &target.as_bytes()[..count])?;
                put(memory, *out, count as u32)
            }
            (Wasi::path_remove_directory, [fd, path, len]) => {
                let (dir, text) = (self.dir(number(*fd))?, text(memory, *path, *len)?);
                self.away(move || dir.overlay.remove_dir(&budget, &dir.path, &text)).await
            }
            (Wasi::path_rename, [fd, old, old_len, to, new, new_len]) => {
                let (from, old) = (self.dir(number(*fd))?, text(memory, *old, *old_len)?);
                let (to, new) = (self.dir(number(*to))?, text(memory, *new, *new_len)?);
                same(&from, &to)?;
                self.away(move || {
                    from.overlay.rename(&budget, (&from.path, &old), (&to.path, &new))
                })
                .await
            }
            (Wasi::path_symlink, [target, target_len, fd, path, len]) => {
                let target = text(memory, *target, *target_len)?;
                let (dir, text) = (self.dir(number(*fd))?, text(memory, *path, *len)?);
                self.away(move || dir.overlay.make_link(&budget, &target, &dir.path, &text)).await
            }
            (Wasi::path_unlink_file, [fd, path, len]) => {
                let (dir, text) = (self.dir(number(*fd))?, text(memory, *path, *len)?);
                self.away(move || dir.overlay.remove_file(&budget, &dir.path, &text)).await
            }
            _ => Err(Errno::Notsup),
        }
    }

    /// Does what may wait for the host's disk.
    async fn away<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Errno> + Send + 'static,
    ) -> Result<T, Errno> {
        match self.waits {
            Waits::Here => work(),
            Waits::Elsewhere => tokio::task::spawn_blocking(work).await.unwrap_or(Err(Errno::Io)),
        }
    }

    async fn open(
        &mut self,
        fd: u32,
        text: String,
        lookup: i64,
        open: i64,
        rights: i64,
        flags: i64,
    ) -> Result<u32, Errno> {
        let (dir, budget) = (self.dir(fd)?, self.budget.clone());
        let asked = Oflags::from_bits_truncate(open as u16);
        let rights = Rights::from_bits_truncate(rights as u64);
        let wish = Wish {
            follow: lookup & FOLLOW != 0,
            create: asked.contains(Oflags::CREAT),
            exclusive: asked.contains(Oflags::EXCL),
            truncate: asked.contains(Oflags::TRUNC),
            directory: asked.contains(Oflags::DIRECTORY),
            write: rights.contains(Rights::FD_WRITE),
        };
        self.has_room()?;
        let overlay = Arc::clone(&dir.overlay);
        let opened = self.away(move || dir.overlay.open(&budget, &dir.path, &text, wish)).await?;
        Ok(self.add(match opened {
            Opened::Dir(path) => Open::Dir(OpenDir { overlay, path: path.into() }),
            Opened::File(file) => Open::File(Box::new(Position {
                open: Arc::new(file),
                offset: 0,
                append: Fdflags::from_bits_truncate(flags as u16).contains(Fdflags::APPEND),
                read: rights.contains(Rights::FD_READ),
                write: wish.write,
            })),
        }))
    }

    /// As `dup2` does: `to` must be open, and is closed by it.
    async fn renumber(
        &mut self,
        wasi: &mut WasiP1Ctx,
        from: u32,
        to: u32,
        memory: &mut GuestMemory<'_>,
    ) -> Option<Result<(), Errno>> {
        match (self.has(from), self.has(to)) {
            (false, false) => None,
            (true, _) if from == to => Some(Ok(())),
            (true, is_own) => {
                if !is_own && wasi.fd_fdstat_get(memory, to.into()).await.is_err() {
                    return Some(Err(Errno::Badf));
                }
                self.rename(from, to);
                if from < FIRST {
                    // What was hidden goes with it.
                    let _ = wasi.fd_close(memory, from.into()).await;
                }
                Some(Ok(()))
            }
            (false, true) if to < FIRST => {
                self.close(to);
                None
            }
            (false, true) => Some(Err(Errno::Notsup)),
        }
    }

    fn stat(&self, fd: u32) -> Result<Fdstat, Errno> {
        let (fs_filetype, fs_flags, fs_rights_base) = match self.get(fd).ok_or(Errno::Badf)? {
            Open::Dir(_) => (Filetype::Directory, Fdflags::empty(), dir_rights()),
            Open::File(file) => {
                let flags = if file.append { Fdflags::APPEND } else { Fdflags::empty() };
                (Filetype::RegularFile, flags, file_rights(file.read, file.write))
            }
        };
        let fs_rights_inheriting = match fs_filetype {
            Filetype::Directory => dir_rights() | file_rights(true, true),
            _ => fs_rights_base,
        };
        Ok(Fdstat { fs_filetype, fs_flags, fs_rights_base, fs_rights_inheriting })
    }

    async fn status(&self, fd: u32) -> Result<Status, Errno> {
        match self.get(fd).ok_or(Errno::Badf)? {
            Open::File(file) => Ok(file.open.file.status()),
            Open::Dir(dir) => {
                let dir = dir.clone();
                self.away(move || dir.overlay.dir_status(&dir.path)).await
            }
        }
    }

    fn set_flags(&mut self, fd: u32, flags: i64) -> Result<(), Errno> {
        let flags = Fdflags::from_bits_truncate(flags as u16);
        self.file(fd)?.append = flags.contains(Fdflags::APPEND);
        Ok(())
    }

    fn set_len(&mut self, fd: u32, len: u64) -> Result<(), Errno> {
        let file = self.file(fd)?;
        match file.write {
            true => file.open.file.set_len(len),
            false => Err(Errno::Inval),
        }
    }

    /// Of the file or directory that is open, or of what `path` leads to.
    async fn set_times(
        &self,
        fd: u32,
        path: Option<(String, bool)>,
        read_ns: i64,
        changed_ns: i64,
        flags: i64,
    ) -> Result<(), Errno> {
        let flags = Fstflags::from_bits_truncate(flags as u16);
        let read = chosen(read_ns, flags, Fstflags::ATIM, Fstflags::ATIM_NOW)?;
        let changed = chosen(changed_ns, flags, Fstflags::MTIM, Fstflags::MTIM_NOW)?;
        let change = move |times: &mut Times| {
            times.read_ns = read.unwrap_or(times.read_ns);
            times.changed_ns = changed.unwrap_or(times.changed_ns);
        };
        match self.get(fd).ok_or(Errno::Badf)? {
            Open::File(_) if path.is_some() => Err(Errno::Notdir),
            Open::File(file) => {
                file.open.file.set_times(change);
                Ok(())
            }
            Open::Dir(dir) => {
                let (dir, budget) = (dir.clone(), self.budget.clone());
                self.away(move || {
                    let path = path.as_ref().map(|(text, follow)| (text.as_str(), *follow));
                    dir.overlay.set_times(&budget, &dir.path, path, change)
                })
                .await
            }
        }
    }

    fn seek(&mut self, fd: u32, offset: i64, whence: i64) -> Result<u64, Errno> {
        let file = self.file(fd)?;
        let from = match whence {
            0 => 0,
            1 => file.offset,
            2 => file.open.file.len(),
            _ => return Err(Errno::Inval),
        };
        let to = from.checked_add_signed(offset).filter(|to| i64::try_from(*to).is_ok());
        file.offset = to.ok_or(Errno::Inval)?;
        Ok(file.offset)
    }

    async fn read(
        &mut self,
        fd: u32,
        at: Option<u64>,
        (buffers, count, out): (i64, i64, i64),
        memory: &mut GuestMemory<'_>,
    ) -> Result<(), Errno> {
        let buffers = guest::buffers(memory, number(buffers), number(count))?;
        let len = buffers.iter().map(|(_, len)| *len as usize).sum::<usize>().min(PIECE_BYTES_MAX);
        let file = self.file(fd)?;
        if !file.read {
            return Err(Errno::Badf);
        }
        let (open, offset) = (Arc::clone(&file.open), at.unwrap_or(file.offset));
        let bytes = self
            .away(move || {
                let mut bytes = vec![0; len];
                let count = open.file.read_at(open.below.as_ref(), offset, &mut bytes)?;
                bytes.truncate(count);
                Ok(bytes)
            })
            .await?;
        guest::scatter(memory, buffers, &bytes)?;
        if at.is_none() {
            self.file(fd)?.offset = offset + bytes.len() as u64;
        }
        put(memory, out, bytes.len() as u32)
    }

    async fn write(
        &mut self,
        fd: u32,
        at: Option<u64>,
        (buffers, count, out): (i64, i64, i64),
        memory: &mut GuestMemory<'_>,
    ) -> Result<(), Errno> {
        let buffers = guest::buffers(memory, number(buffers), number(count))?;
        let bytes = guest::gather(memory, buffers, PIECE_BYTES_MAX)?;
        let file = self.file(fd)?;
        if !file.write {
            return Err(Errno::Badf);
        }
        let offset = match file.append && at.is_none() {
            true => None,
            false => Some(at.unwrap_or(file.offset)),
        };
        let (open, budget) = (Arc::clone(&file.open), self.budget.clone());
        let (count, end) = self
            .away(move || open.file.write_at(&budget, open.below.as_ref(), offset, &bytes))
            .await?;
        if at.is_none() {
            self.file(fd)?.offset = end;
        }
        put(memory, out, count as u32)
    }

    /// Fills the buffer with entries from the `cookie`th on; the last may be cut off.
    async fn list(
        &mut self,
        fd: u32,
        buffer: u32,
        len: u32,
        cookie: u64,
        out: i64,
        memory: &mut GuestMemory<'_>,
    ) -> Result<(), Errno> {
        let dir = self.dir(fd)?;
        let known = self.listed.as_ref().filter(|(known, _)| *known == fd && cookie > 0);
        let names = match known {
            Some((_, names)) => Arc::clone(names),
            None => {
                let names = Arc::new(self.away(move || dir.overlay.list(&dir.path)).await?);
                self.listed = Some((fd, Arc::clone(&names)));
                names
            }
        };
        let own = [".", ".."].map(|name| (name, 0, Filetype::Directory));
        let listed = names.iter().map(|listed| (listed.name.as_str(), listed.ino, listed.kind));
        let first = usize::try_from(cookie).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        for (index, (name, d_ino, d_type)) in own.into_iter().chain(listed).enumerate().skip(first)
        {
            if bytes.len() >= len as usize {
                break;
            }
            bytes.extend_from_slice(&entry(Dirent {
                d_next: index as u64 + 1,
                d_ino,
                d_namlen: name.len() as u32,
                d_type,
            })?);
            bytes.extend_from_slice(name.as_bytes());
        }
        bytes.truncate(len as usize);
        copy_out(memory, buffer, &bytes)?;
        put(memory, out, bytes.len() as u32)
    }
}

/// A directory entry as the guest reads it.
fn entry(entry: Dirent) -> Result<[u8; 24], Errno> {
    let mut bytes = [0; 24];
    GuestMemory::Unshared(&mut bytes).write(GuestPtr::new(0), entry).map_err(fault)?;
    Ok(bytes)
}

fn same(one: &OpenDir, other: &OpenDir) -> Result<(), Errno> {
    match Arc::ptr_eq(&one.overlay, &other.overlay) {
        true => Ok(()),
        false => Err(Errno::Xdev),
    }
}

fn dir_rights() -> Rights {
    Rights::PATH_CREATE_DIRECTORY
        | Rights::PATH_CREATE_FILE
        | Rights::PATH_LINK_SOURCE
        | Rights::PATH_LINK_TARGET
        | Rights::PATH_OPEN
        | Rights::FD_READDIR
        | Rights::PATH_READLINK
        | Rights::PATH_RENAME_SOURCE
        | Rights::PATH_RENAME_TARGET
        | Rights::PATH_SYMLINK
        | Rights::PATH_REMOVE_DIRECTORY
        | Rights::PATH_UNLINK_FILE
        | Rights::PATH_FILESTAT_GET
        | Rights::PATH_FILESTAT_SET_TIMES
        | Rights::FD_FILESTAT_GET
        | Rights::FD_FILESTAT_SET_TIMES
}

fn file_rights(read: bool, write: bool) -> Rights {
    let mut rights = Rights::FD_SEEK
        | Rights::FD_TELL
        | Rights::FD_ADVISE
        | Rights::FD_SYNC
        | Rights::FD_DATASYNC
        | Rights::FD_FDSTAT_SET_FLAGS
        | Rights::FD_FILESTAT_GET
        | Rights::FD_FILESTAT_SET_TIMES;
    rights.set(Rights::FD_READ, read);
    rights.set(Rights::FD_WRITE | Rights::FD_FILESTAT_SET_SIZE, write);
    rights
}

fn filestat(status: Status) -> Filestat {
    let Status { kind, ino, links, len, times } = status;
    Filestat {
        dev: 0,
        ino,
        filetype: kind,
        nlink: links,
        size: len,
        atim: times.read_ns,
        mtim: times.changed_ns,
        ctim: times.changed_ns,
    }
}

/// The time that is asked for, if one is.
fn chosen(ns: i64, flags: Fstflags, given: Fstflags, now: Fstflags) -> Result<Option<u64>, Errno> {
    match (flags.contains(given), flags.contains(now)) {
        (true, true) => Err(Errno::Inval),
        (true, false) => Ok(Some(ns as u64)),
        (false, true) => Ok(Some(Times::now().changed_ns)),
        (false, false) => Ok(None),
    }
}

fn text(memory: &GuestMemory<'_>, start: i64, len: i64) -> Result<String, Errno> {
    guest::text(memory, number(start), number(len), PATH_BYTES_MAX)
}
