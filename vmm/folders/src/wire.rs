//! The fields of FUSE messages (kernel: include/uapi/linux/fuse.h), taken from and put into bytes
//! one by one: nothing of the guest's is ever looked at as a structure.

use rustix::io::Errno;

/// Bytes of `struct fuse_in_header` and `struct fuse_out_header`.
pub const REQUEST_HEAD_LEN: usize = 40;
pub const REPLY_HEAD_LEN: usize = 16;

/// Operations (`enum fuse_opcode`).
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
    pub const COPY_FILE_RANGE_64: u32 = 53;
    /// Not FUSE's: tell what others do to the file (patch 0505 of the guest kernel's series).
    pub const WATCH: u32 = 8192;
    /// Not FUSE's: what others have done to those files.
    pub const EVENTS: u32 = 8193;
}

/// `struct fuse_in_header`.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub len: u32,
    pub opcode: u32,
    pub unique: u64,
    pub node: u64,
    pub uid: u32,
    pub gid: u32,
}

impl Head {
    /// # Errors
    /// None: any bytes are a head.
    pub fn parse(bytes: &[u8; REQUEST_HEAD_LEN]) -> Result<Self, Errno> {
        let mut fields = Fields::new(bytes);
        Ok(Self {
            len: fields.u32()?,
            opcode: fields.u32()?,
            unique: fields.u64()?,
            node: fields.u64()?,
            uid: fields.u32()?,
            gid: fields.u32()?,
        })
    }
}

/// The fields of a request that are still to be taken. Each taker fails with EINVAL where the
/// request ends before the field does.
#[derive(Debug)]
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (field, rest) = self.0.split_first_chunk().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(*field)
    }

    pub fn u32(&mut self) -> Result<u32, Errno> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Errno> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn i64(&mut self) -> Result<i64, Errno> {
        self.array().map(i64::from_le_bytes)
    }

    pub fn skip(&mut self, bytes: usize) -> Result<(), Errno> {
        self.0 = self.0.get(bytes..).ok_or(Errno::INVAL)?;
        Ok(())
    }

    /// Bytes up to a NUL, which is dropped.
    pub fn text(&mut self) -> Result<&'a [u8], Errno> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or(Errno::INVAL)?;
        let (text, rest) = self.0.split_at(end);
        self.0 = rest.get(1..).unwrap_or_default();
        Ok(text)
    }

    /// So many bytes.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Errno> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(bytes)
    }
}

/// The body of a reply.
#[derive(Debug, Default)]
pub struct Body(Vec<u8>);

impl Body {
    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub fn zeros(&mut self, count: usize) {
        self.0.resize(self.0.len() + count, 0);
    }

    /// Zeros up to the next multiple of 8.
    pub fn pad(&mut self) {
        self.zeros(self.0.len().next_multiple_of(8) - self.0.len());
    }

    /// Takes away what was put behind the first `len` bytes.
    pub fn cut(&mut self, len: usize) {
        self.0.truncate(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_ends_too_soon_is_refused() {
        let mut fields = Fields::new(&[1, 0, 0, 0, b'a', 0, b'b']);
        assert_eq!(fields.u32(), Ok(1));
        assert_eq!(fields.text(), Ok(&b"a"[..]));
        assert_eq!(fields.text(), Err(Errno::INVAL));
        assert_eq!(fields.u32(), Err(Errno::INVAL));
        assert_eq!(fields.bytes(2), Err(Errno::INVAL));
        assert_eq!(fields.bytes(1), Ok(&b"b"[..]));
    }

    #[test]
    fn entries_are_padded() {
        let mut body = Body::default();
        body.put(b"abc");
        body.pad();
        assert_eq!(body.bytes(), b"abc\0\0\0\0\0");
        body.pad();
        assert_eq!(body.len(), 8);
    }
}
