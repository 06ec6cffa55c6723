//! Cuts a byte stream into messages. Memory is one buffer of the agreed size.

use std::io::{ErrorKind, Read};

use crate::FolderError;
use crate::wire::HEADER_LEN;

/// The reading half of a connection.
pub struct Frames {
    buf: Vec<u8>,
    filled: usize,
    /// Length of the message handed out last; it is dropped by the next call.
    taken: usize,
}

/// One message without its size: its number, its tag and its fields.
pub struct Frame<'a> {
    pub number: u8,
    pub tag: u16,
    pub body: &'a [u8],
}

impl Frames {
    pub fn new(size_max: usize) -> Self {
        Self { buf: vec![0; size_max], filled: 0, taken: 0 }
    }

    /// Changes the size no message may exceed. Only called right after a
    /// Tversion, when a client that waits for the answer has sent no more.
    pub fn resize(&mut self, size_max: usize) {
        self.buf.resize(size_max.max(self.filled), 0);
    }

    /// The next message, or `None` where the stream ends between messages.
    ///
    /// # Errors
    /// A size out of bounds, a stream that ends inside a message, or a
    /// failed read.
    pub fn next(&mut self, stream: &mut impl Read) -> Result<Option<Frame<'_>>, FolderError> {
        self.drop_taken();
        if !self.fill(stream, HEADER_LEN)? {
            return Ok(None);
        }
        let size = self.size()?;
        self.fill(stream, size)?;
        self.taken = size;
        match &self.buf[4..size] {
            [number, low, high, body @ ..] => {
                let tag = u16::from_le_bytes([*low, *high]);
                Ok(Some(Frame { number: *number, tag, body }))
            }
            _ => Err(FolderError::Size { size: size as u32, max: self.buf.len() }),
        }
    }

    fn drop_taken(&mut self) {
        self.buf.copy_within(self.taken..self.filled, 0);
        self.filled -= self.taken;
        self.taken = 0;
    }

    /// The checked size of the message at the start of the buffer.
    fn size(&self) -> Result<usize, FolderError> {
        let size = u32::from_le_bytes([self.buf[0], self.buf[1], self.buf[2], self.buf[3]]);
        let in_bounds = HEADER_LEN..=self.buf.len();
        match usize::try_from(size) {
            Ok(len) if in_bounds.contains(&len) => Ok(len),
            _ => Err(FolderError::Size { size, max: self.buf.len() }),
        }
    }

    /// Reads until `len` bytes are there; false if the stream ended at 0.
    fn fill(&mut self, stream: &mut impl Read, len: usize) -> Result<bool, FolderError> {
        while self.filled < len {
            match stream.read(&mut self.buf[self.filled..]) {
                Ok(0) if self.filled == 0 => return Ok(false),
                Ok(0) => return Err(FolderError::Cut),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(FolderError::Stream(error)),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_arrive_together_come_out_one_by_one() {
        let mut bytes: &[u8] = &[8, 0, 0, 0, 120, 1, 0, 9, 7, 0, 0, 0, 100, 255, 255];
        let mut frames = Frames::new(64);
        let first = frames.next(&mut bytes).unwrap().unwrap();
        assert_eq!((first.number, first.tag, first.body), (120, 1, &[9][..]));
        let second = frames.next(&mut bytes).unwrap().unwrap();
        assert_eq!((second.number, second.tag, second.body.len()), (100, 0xffff, 0));
        assert!(frames.next(&mut bytes).unwrap().is_none());
    }

    #[test]
    fn sizes_out_of_bounds_are_refused() {
        for size in [0u32, 6, 65, u32::MAX] {
            let bytes = [size.to_le_bytes().as_slice(), &[0; 8]].concat();
            let error = Frames::new(64).next(&mut bytes.as_slice()).err().unwrap();
            assert!(matches!(error, FolderError::Size { size: s, max: 64 } if s == size));
        }
    }

    #[test]
    fn a_stream_that_ends_inside_a_message_is_an_error() {
        for cut in 1..8 {
            let bytes = [8, 0, 0, 0, 120, 1, 0, 9];
            let mut frames = Frames::new(64);
            let result = frames.next(&mut &bytes[..cut]);
            assert!(matches!(result, Err(FolderError::Cut)), "cut at {cut}");
        }
    }
}
