//! Making, linking, renaming and removing names.

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::Server;
use crate::host::{self, Name, Node};
use crate::wire::Reply;

/// The flag of Tunlinkat that removes a directory (`P9_DOTL_AT_REMOVEDIR`).
const REMOVE_DIR: u32 = 0x200;

impl Server {
    pub(super) fn readlink(&mut self, fid: u32, reply: &mut Reply) -> Result<(), Errno> {
        let node = &self.fids.get(fid)?.node;
        if node.file_type != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        let target = rustix::fs::readlinkat(node.fd(), c"", Vec::new())?;
        reply.string(target.as_bytes());
        Ok(())
    }

    pub(super) fn symlink(
        &mut self,
        dir: u32,
        name: &[u8],
        target: &[u8],
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let (dir, name) = (self.fids.dir(dir)?, self.name(name)?);
        self.quota.check_names()?;
        rustix::fs::symlinkat(target, dir.fd(), name.bytes())?;
        self.quota.made();
        self.reply_with(dir, name, reply)
    }

    pub(super) fn mkdir(
        &mut self,
        dir: u32,
        name: &[u8],
        mode: u32,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let (dir, name) = (self.fids.dir(dir)?, self.name(name)?);
        let mode = host::permitted_mode(mode, true);
        self.quota.check_names()?;
        rustix::fs::mkdirat(dir.fd(), name.bytes(), Mode::from_raw_mode(mode))?;
        self.quota.made();
        undo_umask(dir, name, mode)?;
        self.reply_with(dir, name, reply)
    }

    /// Regular files, fifos and sockets; what a fifo or socket carries never
    /// reaches the host, since neither can be opened here. Devices are denied.
    pub(super) fn mknod(
        &mut self,
        dir: u32,
        name: &[u8],
        mode: u32,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let (dir, name) = (self.fids.dir(dir)?, self.name(name)?);
        let permitted = host::permitted_mode(mode, false);
        self.quota.check_names()?;
        match FileType::from_raw_mode(mode) {
            FileType::RegularFile => dir.create(name, OFlags::WRONLY, permitted).map(drop)?,
            file_type @ (FileType::Fifo | FileType::Socket) => {
                let mode = Mode::from_raw_mode(permitted);
                rustix::fs::mknodat(dir.fd(), name.bytes(), file_type, mode, 0)?;
            }
            _ => return Err(self.deny(Errno::PERM)),
        }
        self.quota.made();
        self.reply_with(dir, name, reply)
    }

    /// Links by name, as a link by descriptor needs privilege; the name may
    /// by then mean another file, but only one of the same directory.
    pub(super) fn link(&mut self, dir: u32, fid: u32, name: &[u8]) -> Result<(), Errno> {
        let (dir, name) = (self.fids.dir(dir)?, self.name(name)?);
        let from = self.fids.get(fid)?.node.current_place()?;
        self.quota.check_names()?;
        rustix::fs::linkat(&from.dir, &*from.name, dir.fd(), name.bytes(), AtFlags::empty())?;
        self.quota.made();
        Ok(())
    }

    pub(super) fn rename(&mut self, fid: u32, dir: u32, name: &[u8]) -> Result<(), Errno> {
        let from = self.fids.get(fid)?.node.current_place()?.clone();
        let to = self.fids.dir(dir)?.place_of(self.name(name)?);
        rustix::fs::renameat(&from.dir, &*from.name, &to.dir, &*to.name)?;
        self.fids.renamed(from.dir_ident, Name::new(&from.name)?, &to);
        Ok(())
    }

    pub(super) fn renameat(
        &mut self,
        dir: u32,
        name: &[u8],
        new_dir: u32,
        new_name: &[u8],
    ) -> Result<(), Errno> {
        let (from, name) = (self.fids.dir(dir)?, self.name(name)?);
        let to = self.fids.dir(new_dir)?.place_of(self.name(new_name)?);
        rustix::fs::renameat(from.fd(), name.bytes(), &to.dir, &*to.name)?;
        let from = from.ident;
        self.fids.renamed(from, name, &to);
        Ok(())
    }

    pub(super) fn unlinkat(&mut self, dir: u32, name: &[u8], flags: u32) -> Result<(), Errno> {
        let flags = match flags {
            0 => AtFlags::empty(),
            REMOVE_DIR => AtFlags::REMOVEDIR,
            _ => return Err(Errno::INVAL),
        };
        let (dir, name) = (self.fids.dir(dir)?, self.name(name)?);
        self.quota
            .remove(dir.fd(), name.bytes(), || rustix::fs::unlinkat(dir.fd(), name.bytes(), flags))
    }

    /// The fid is gone even if the file stays (remove(5)).
    pub(super) fn remove(&mut self, fid: u32) -> Result<(), Errno> {
        let node = self.fids.remove(fid)?.node;
        let place = node.current_place()?;
        let flags = if node.is_dir() { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        self.quota.remove(&place.dir, &place.name, || {
            rustix::fs::unlinkat(&place.dir, &*place.name, flags)
        })
    }

    /// Answers with the qid of the file just made.
    fn reply_with(&self, dir: &Node, name: Name<'_>, reply: &mut Reply) -> Result<(), Errno> {
        let (_, stat) = dir.child(name)?;
        reply.qid(host::qid(&stat, self.root.ident));
        Ok(())
    }
}

/// Gives a new directory the mode the guest chose, its own umask applied
/// already, whatever the serving process' umask took away.
fn undo_umask(dir: &Node, name: Name<'_>, mode: u32) -> Result<(), Errno> {
    let (node, stat) = dir.child(name)?;
    if node.is_dir() && stat.st_mode & 0o7777 != mode {
        node.chmod(mode)?;
    }
    Ok(())
}
