//! Extended attributes.

use rustix::buffer::spare_capacity;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::Server;
use crate::wire::Fields;
use crate::xattr_name::{guests, names};

/// The most bytes of a value, and of a list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const SIZE_MAX: usize = 64 << 10;

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
        let path = self.descriptors.path(&node.fd);
        rustix::fs::setxattr(&*path, &*name, value, flags)
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
        rustix::fs::removexattr(&*self.descriptors.path(&node.fd), &*name)
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
