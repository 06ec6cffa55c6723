//! Extended attributes.

use std::ffi::CStr;
use std::os::fd::AsFd;

use rustix::buffer::spare_capacity;
use rustix::fs::{FileType, Stat, XattrFlags};
use rustix::io::Errno;

use super::Server;
use crate::host::Descriptors;
use crate::owners::OWNER;
use crate::wire::Fields;
use crate::xattr_name::{guests, names};

/// The most bytes of a value, and of a list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const SIZE_MAX: usize = 64 << 10;

/// Lists of who may what. A file that is made has that of its directory, which nobody counts, so
/// they are as short as on most disks (ext4's block).
const ACL: &[u8] = b"system.posix_acl_";
const ACL_LEN_MAX: usize = 4096;

/// Bytes of an attribute of the file at `path`, its name included; 0 where it has none.
fn attribute_len(path: &CStr, name: &[u8]) -> u64 {
    let mut value: Vec<u8> = Vec::with_capacity(SIZE_MAX);
    let found = rustix::fs::getxattr(path, name, spare_capacity(&mut value));
    found.map_or(0, |_| (name.len() + value.len()) as u64)
}

/// Bytes of all attributes of a file that its guest can have set, names included. That of its
/// owner is ours.
pub fn attribute_bytes(descriptors: &Descriptors, file: impl AsFd) -> u64 {
    let path = descriptors.path(file);
    let mut list: Vec<u8> = Vec::with_capacity(SIZE_MAX);
    if rustix::fs::listxattr(&*path, spare_capacity(&mut list)).is_err() {
        return 0;
    }
    let names = list.split(|byte| *byte == 0);
    let counted = names.filter(|name| name.starts_with(b"user.") && *name != OWNER);
    counted.map(|name| attribute_len(&path, name)).sum()
}

impl Server {
    /// `struct fuse_setxattr_in`, a name, a value.
    pub(super) fn setxattr(&mut self, number: u64, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let (size, flags) = (fields.u32()? as usize, fields.u32()?);
        fields.skip(if self.xattr_flags { 8 } else { 0 })?;
        let (name, value) = (names(fields.text()?)?.own, fields.bytes(size)?);
        let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let node = self.nodes.get(number)?;
        if node.is_device() {
            return Err(self.deny(Errno::PERM));
        }
        if name.starts_with(ACL) && value.len() > ACL_LEN_MAX {
            return Err(Errno::NOSPC);
        }
        let path = self.descriptors.path(&node.fd);
        let before = (rustix::fs::fstat(&node.fd)?, attribute_len(&path, &name));
        let after = (name.len() + value.len()) as u64;
        self.quota.check_attribute(before.1, after)?;
        rustix::fs::setxattr(&*path, &*name, value, flags)?;
        self.note_attribute(number, &before, after)
    }

    /// After an attribute of a file was changed, which takes bytes now and took others before.
    fn note_attribute(
        &mut self,
        number: u64,
        (stat, before): &(Stat, u64),
        after: u64,
    ) -> Result<(), Errno> {
        let node = self.nodes.get(number)?;
        self.quota.changed_attribute(*before, after);
        // Some file systems count an attribute as content.
        if node.kind == FileType::RegularFile {
            self.quota.changed(stat, &rustix::fs::fstat(&node.fd)?);
        }
        Ok(())
    }

    /// `struct fuse_getxattr_in`, a name; a size of 0 asks for the size.
    pub(super) fn getxattr(&mut self, number: u64, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let size = fields.u32()? as usize;
        fields.skip(4)?;
        let names = names(fields.text()?)?;
        let path = self.descriptors.path(&self.nodes.get(number)?.fd);
        let get = |name: &[u8]| -> Result<Vec<u8>, Errno> {
            let mut value = Vec::with_capacity(SIZE_MAX);
            rustix::fs::getxattr(&*path, name, spare_capacity(&mut value))?;
            Ok(value)
        };
        let value = match (get(&names.own), names.true_name) {
            (Err(Errno::NODATA | Errno::OPNOTSUPP), Some(name)) => get(&name),
            (value, _) => value,
        };
        self.put_sized(&value?, size)
    }

    pub(super) fn listxattr(&mut self, number: u64, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let size = fields.u32()? as usize;
        let path = self.descriptors.path(&self.nodes.get(number)?.fd);
        let mut list: Vec<u8> = Vec::with_capacity(SIZE_MAX);
        rustix::fs::listxattr(&*path, spare_capacity(&mut list))?;
        let mut told: Vec<&[u8]> = Vec::new();
        for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            if let Some(name) = guests(name)
                && !told.contains(&name)
            {
                told.push(name);
            }
        }
        let told: Vec<u8> = told.into_iter().flat_map(|name| [name, &[0]].concat()).collect();
        self.put_sized(&told, size)
    }

    pub(super) fn removexattr(
        &mut self,
        number: u64,
        fields: &mut Fields<'_>,
    ) -> Result<(), Errno> {
        let name = names(fields.text()?)?.own;
        let node = self.nodes.get(number)?;
        if node.is_device() {
            return Err(self.deny(Errno::PERM));
        }
        let path = self.descriptors.path(&node.fd);
        let before = (rustix::fs::fstat(&node.fd)?, attribute_len(&path, &name));
        rustix::fs::removexattr(&*path, &*name)?;
        self.note_attribute(number, &before, 0)
    }

    /// The bytes, or how many they are (`struct fuse_getxattr_out`).
    fn put_sized(&mut self, bytes: &[u8], size: usize) -> Result<(), Errno> {
        match size {
            0 => {
                self.body.u32(bytes.len() as u32);
                self.body.u32(0);
            }
            size if size < bytes.len() => return Err(Errno::RANGE),
            _ => self.body.put(bytes),
        }
        Ok(())
    }
}
