//! Messages in a stream of bytes: a flag, four bytes of length, the message.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

use super::{Code, Result, Status};

/// Bytes before a message.
const HEAD_BYTES: usize = 5;

/// Finds messages in what comes bit by bit.
#[derive(Debug)]
pub struct Deframer {
    waiting: BytesMut,
    bytes_max: usize,
}

impl Deframer {
    /// For messages of at most `bytes_max`.
    pub fn new(bytes_max: usize) -> Self {
        Self { waiting: BytesMut::new(), bytes_max }
    }

    /// Takes more of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.waiting.extend_from_slice(bytes);
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The next message, once all of it is there.
    ///
    /// # Errors
    /// It is compressed or too long; nothing that comes behind it can be read.
    pub fn take(&mut self) -> Result<Option<Bytes>> {
        let Some((head, _)) = self.waiting.split_at_checked(HEAD_BYTES) else { return Ok(None) };
        let mut head = head;
        if head.get_u8() != 0 {
            return Err(Status::unsupported("a compressed message", "send it plain"));
        }
        let length = head.get_u32() as usize;
        if length > self.bytes_max {
            return Err(Status::new(
                Code::ResourceExhausted,
                format!("a message has {length} bytes, and at most {} are taken", self.bytes_max),
            ));
        }
        if self.waiting.len() < HEAD_BYTES + length {
            return Ok(None);
        }
        self.waiting.advance(HEAD_BYTES);
        Ok(Some(self.waiting.split_to(length).freeze()))
    }
}

/// A message as it is sent.
pub fn framed<M: Message>(message: &M) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(HEAD_BYTES + length);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    // There is room for all of it.
    let _ = message.encode(&mut bytes);
    bytes.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_are_found_however_they_are_cut() {
        let (one, two) = ("one".to_owned(), String::new());
        let stream = [framed(&one), framed(&two), framed(&one)].concat();
        for size in 1..stream.len() {
            let mut found = Deframer::new(16);
            let mut messages = Vec::new();
            for chunk in stream.chunks(size) {
                found.push(chunk);
                while let Some(message) = found.take().unwrap() {
                    messages.push(String::decode(message).unwrap());
                }
            }
            assert!(found.is_empty());
            assert_eq!(messages, ["one", "", "one"]);
        }
    }

    #[test]
    fn long_and_compressed_ones_are_refused_before_they_are_there() {
        let mut found = Deframer::new(16);
        found.push(&[0, 0, 0, 0, 17]);
        assert_eq!(found.take().unwrap_err().code, Code::ResourceExhausted);
        let mut found = Deframer::new(16);
        found.push(&[1, 0, 0, 0, 1]);
        assert_eq!(found.take().unwrap_err().code, Code::Unimplemented);
    }

    proptest! {
        #[test]
        fn no_stream_is_a_panic(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..20)) {
            let mut found = Deframer::new(64);
            for chunk in chunks {
                found.push(&chunk);
                while let Ok(Some(message)) = found.take() {
                    prop_assert!(message.len() <= 64);
                }
            }
        }
    }
}
