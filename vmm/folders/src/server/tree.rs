//! Names: made, moved and removed.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, Mode, RenameFlags};
use rustix::io::Errno;

use super::xattr::attribute_bytes;
use super::{Server, is_held};
use crate::host::{self, Ident};
use crate::quota::Removed;
use crate::wire::{Fields, Head};

impl Server {
    /// What was made in `head`'s directory as `name`, given to who made it.
    fn made(&mut self, head: &Head, name: &[u8]) -> Result<(), Errno> {
        self.quota.made();
        let ident = host::look(&self.nodes.dir(head.node)?.fd, name).map(|stat| Ident::of(&stat));
        self.put_made(head, name).inspect_err(|_| {
            if let Ok(ident) = ident {
                self.unmake(head.node, name, ident);
            }
        })
    }

    /// Removes `ident`, which was just made as `name` and of which the guest cannot be told.
    pub(super) fn unmake(&mut self, dir: u64, name: &[u8], ident: Ident) {
        let Ok(dir) = self.nodes.dir(dir) else { return };
        let Ok(stat) = host::look(&dir.fd, name) else { return };
        let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let flags = if is_dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        if Ident::of(&stat) == ident && rustix::fs::unlinkat(&dir.fd, name, flags).is_ok() {
            self.quota.unmade();
        }
    }

    fn put_made(&mut self, head: &Head, name: &[u8]) -> Result<(), Errno> {
        let held = host::hold(&self.nodes.dir(head.node)?.fd, name)?;
        let stat = self.give_new(head, &held)?;
        let number = self.known(held, &stat, Some((head.node, name)))?;
        self.put_entry(number, &stat)
    }

    /// A name that is about to be made.
    fn new_name<'a>(&mut self, name: &'a [u8]) -> Result<&'a [u8], Errno> {
        self.check_tree()?;
        self.quota.check_names()?;
        self.nodes.check_room()?;
        self.name(name)
    }

    pub(super) fn mkdir(&mut self, head: &Head, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let mode = fields.u32()?;
        fields.skip(4)?;
        let name = self.new_name(fields.text()?)?;
        // The directory's group bit comes from the one above, not from the guest.
        let mode = Mode::from_raw_mode(mode & 0o1777);
        rustix::fs::mkdirat(&self.nodes.dir(head.node)?.fd, name, mode)?;
        self.made(head, name)
    }

    /// Regular files, fifos and sockets; devices would be the host's.
    pub(super) fn mknod(&mut self, head: &Head, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let mode = fields.u32()?;
        fields.skip(12)?;
        let name = self.new_name(fields.text()?)?;
        let kind = FileType::from_raw_mode(mode);
        if !matches!(kind, FileType::RegularFile | FileType::Fifo | FileType::Socket) {
            return Err(self.deny(Errno::PERM));
        }
        let mode = Mode::from_raw_mode(host::permitted_mode(mode & 0o7777, false));
        rustix::fs::mknodat(&self.nodes.dir(head.node)?.fd, name, kind, mode, 0)?;
        self.made(head, name)
    }

    pub(super) fn symlink(&mut self, head: &Head, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let (name, target) = (fields.text()?, fields.text()?);
        let name = self.new_name(name)?;
        rustix::fs::symlinkat(target, &self.nodes.dir(head.node)?.fd, name)?;
        self.made(head, name)
    }

    pub(super) fn link(&mut self, dir: u64, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let number = fields.u64()?;
        let name = self.new_name(fields.text()?)?;
        self.nodes.wake(number)?;
        let node = self.nodes.get(number)?;
        if node.is_device() {
            return Err(self.deny(Errno::PERM));
        }
        // To the file that is held, and no further if that is a symlink.
        let held = self.descriptors.name(&node.fd);
        let to = &self.nodes.dir(dir)?.fd;
        let flags = AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(self.descriptors.dir(), &*held, to, name, flags)?;
        self.quota.made();
        let stat = rustix::fs::fstat(&self.nodes.get(number)?.fd)?;
        self.nodes.find(Ident::of(&stat), Some((dir, name))).ok_or(Errno::STALE)?;
        self.put_entry(number, &stat)
    }

    pub(super) fn unlink(&mut self, dir: u64, name: &[u8], is_dir: bool) -> Result<(), Errno> {
        self.check_tree()?;
        let name = self.name(name)?;
        let flags = if is_dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        let Self { nodes, handles, quota, descriptors, .. } = self;
        let dir = &nodes.dir(dir)?.fd;
        let is_held = |ident| is_held(nodes, handles, ident);
        let attributes = |file: &OwnedFd| attribute_bytes(descriptors, file);
        let remove = || rustix::fs::unlinkat(dir, name, flags);
        quota.remove(dir, Removed::Named(name), is_held, attributes, remove)
    }

    /// `struct fuse_rename_in`, or with flags `struct fuse_rename2_in`; two names.
    pub(super) fn rename(
        &mut self,
        dir: u64,
        fields: &mut Fields<'_>,
        has_flags: bool,
    ) -> Result<(), Errno> {
        let new_dir = fields.u64()?;
        let flags = if has_flags { fields.u32()? } else { 0 };
        fields.skip(if has_flags { 4 } else { 0 })?;
        self.check_tree()?;
        let (name, new_name) = (self.name(fields.text()?)?, self.name(fields.text()?)?);
        let known = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE;
        let flags = RenameFlags::from_bits(flags).filter(|flags| known.contains(*flags));
        let flags = flags.ok_or(Errno::INVAL)?;
        self.nodes.wake(new_dir)?;
        let Self { nodes, handles, quota, descriptors, .. } = self;
        let (from, to) = (&nodes.dir(dir)?.fd, &nodes.dir(new_dir)?.fd);
        let rename = || rustix::fs::renameat_with(from, name, to, new_name, flags);
        if flags.is_empty() {
            let is_held = |ident| is_held(nodes, handles, ident);
            let attributes = |file: &OwnedFd| attribute_bytes(descriptors, file);
            quota.remove(to, Removed::Replaced(new_name), is_held, attributes, rename)?;
        } else {
            rename()?;
        }
        let (there, here) = (host::look(to, new_name), host::look(from, name));
        for (stat, place) in [(there, (new_dir, new_name)), (here, (dir, name))] {
            if let Ok(stat) = stat {
                nodes.moved(Ident::of(&stat), place);
            }
        }
        Ok(())
    }

    pub(super) fn readlink(&mut self, number: u64) -> Result<(), Errno> {
        let node = self.nodes.get(number)?;
        if node.kind != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        let target = rustix::fs::readlinkat(&node.fd, c"", Vec::new())?;
        self.body.put(target.to_bytes());
        Ok(())
    }
}
