//! The 9P2000.L encoding: little-endian integers, counted strings and qids
//! (9P2000 intro(5); Linux `net/9p/protocol.c`).

use crate::FolderError;

/// Bytes of `size[4] type[1] tag[2]`, the head of every message.
pub const HEADER_LEN: usize = 7;

/// What the 13 bytes of a qid say about a file: its type, a version that
/// changes with its content, and a number no other file of the folder has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qid {
    pub kind: u8,
    pub version: u32,
    pub path: u64,
}

/// Takes the fields of one request in order. Each failure names the field.
pub struct Fields<'a> {
    message: &'static str,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub fn new(message: &'static str, body: &'a [u8]) -> Self {
        Self { message, rest: body }
    }

    /// The error that says `field` is not what the protocol allows.
    pub fn malformed(&self, field: &'static str) -> FolderError {
        FolderError::Malformed { message: self.message, field }
    }

    pub fn u8(&mut self, field: &'static str) -> Result<u8, FolderError> {
        self.array(field).map(u8::from_le_bytes)
    }

    pub fn u16(&mut self, field: &'static str) -> Result<u16, FolderError> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub fn u32(&mut self, field: &'static str) -> Result<u32, FolderError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, field: &'static str) -> Result<u64, FolderError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A string: a 16-bit length and that many bytes.
    pub fn string(&mut self, field: &'static str) -> Result<&'a [u8], FolderError> {
        let len = self.u16(field)?;
        self.bytes(usize::from(len), field)
    }

    /// Exactly `len` bytes.
    pub fn bytes(&mut self, len: usize, field: &'static str) -> Result<&'a [u8], FolderError> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(self.malformed(field))?;
        self.rest = rest;
        Ok(head)
    }

    /// Every byte of the message must have been a field.
    pub fn end(&self) -> Result<(), FolderError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.malformed("size (bytes follow the last field)"))
        }
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], FolderError> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(self.malformed(field))?;
        self.rest = rest;
        Ok(*head)
    }
}

/// Builds one reply in a buffer that lives as long as the connection.
/// A reply that outgrows the buffer is remembered and never sent.
pub struct Reply {
    buf: Vec<u8>,
    len: usize,
    overflow: bool,
}

impl Reply {
    pub fn new(size_max: usize) -> Self {
        Self { buf: vec![0; size_max], len: HEADER_LEN, overflow: false }
    }

    /// Starts over with an empty body.
    pub fn reset(&mut self) {
        self.len = HEADER_LEN;
        self.overflow = false;
    }

    /// Changes the size no reply may exceed, in bytes with the header.
    pub fn resize(&mut self, size_max: usize) {
        self.buf.resize(size_max, 0);
    }

    pub fn overflowed(&self) -> bool {
        self.overflow
    }

    pub fn u8(&mut self, value: u8) {
        self.bytes(&[value]);
    }

    pub fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    pub fn string(&mut self, value: &[u8]) {
        match u16::try_from(value.len()) {
            Ok(len) => self.u16(len),
            Err(_) => self.overflow = true,
        }
        self.bytes(value);
    }

    pub fn qid(&mut self, qid: Qid) {
        self.u8(qid.kind);
        self.u32(qid.version);
        self.u64(qid.path);
    }

    pub fn bytes(&mut self, value: &[u8]) {
        match self.space().get_mut(..value.len()) {
            Some(room) => room.copy_from_slice(value),
            None => self.overflow = true,
        }
        self.advance(value.len());
    }

    /// How many bytes still fit.
    pub fn room(&self) -> usize {
        self.buf.len().saturating_sub(self.len)
    }

    /// A counted block of at most `len` bytes that `fill` writes in place;
    /// it returns how many bytes it wrote.
    pub fn block<E>(
        &mut self,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<usize, E> {
        let start = self.len;
        self.u32(0);
        let room = self.space();
        let len = len.min(room.len());
        let filled = fill(&mut room[..len])?.min(len);
        self.advance(filled);
        if let Some(count) = self.buf.get_mut(start..start + 4) {
            count.copy_from_slice(&(filled as u32).to_le_bytes());
        }
        Ok(filled)
    }

    /// The finished message.
    pub fn message(&mut self, kind: u8, tag: u16) -> &[u8] {
        let size = (self.len as u32).to_le_bytes();
        let tag = tag.to_le_bytes();
        let head = [size[0], size[1], size[2], size[3], kind, tag[0], tag[1]];
        self.buf[..HEADER_LEN].copy_from_slice(&head);
        &self.buf[..self.len]
    }

    fn space(&mut self) -> &mut [u8] {
        self.buf.get_mut(self.len..).unwrap_or_default()
    }

    fn advance(&mut self, len: usize) {
        self.len = self.len.saturating_add(len).min(self.buf.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_field_is_named() {
        let mut fields = Fields::new("Tclunk", &[1, 2, 3]);
        let error = fields.u32("fid").unwrap_err();
        assert_eq!(error.to_string(), "the guest sent a Tclunk whose fid is malformed");
    }

    #[test]
    fn a_string_longer_than_the_message_is_refused() {
        let mut fields = Fields::new("Tattach", &[255, 255, b'a']);
        assert!(fields.string("uname").is_err());
    }

    #[test]
    fn bytes_after_the_last_field_are_refused() {
        let mut fields = Fields::new("Tflush", &[1, 0, 9]);
        assert_eq!(fields.u16("oldtag").unwrap(), 1);
        assert!(fields.end().is_err());
    }

    #[test]
    fn a_reply_never_outgrows_its_buffer() {
        let mut reply = Reply::new(16);
        reply.bytes(&[7; 10]);
        assert!(reply.overflowed());
        assert!(reply.message(1, 2).len() <= 16);
        reply.reset();
        reply.u64(1);
        assert!(!reply.overflowed());
        assert_eq!(reply.message(5, 0x0102), [15, 0, 0, 0, 5, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_block_counts_what_was_filled() {
        let mut reply = Reply::new(20);
        let filled = reply.block(100, |room| Ok::<_, ()>(room.len().min(3))).unwrap();
        assert_eq!(filled, 3);
        assert_eq!(reply.message(1, 0)[7..11], [3, 0, 0, 0]);
    }
}
