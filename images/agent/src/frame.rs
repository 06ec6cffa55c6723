//! Frames: the length-prefixed unit of every agent stream.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{FRAME_BYTES_MAX, REQUEST_BYTES_MAX};

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// JSON [`crate::Request`], host to guest, the first frame of a stream.
    Request = 1,
    /// JSON [`crate::Reply`], guest to host.
    Reply = 2,
    Stdin = 3,
    StdinEof = 4,
    Stdout = 5,
    Stderr = 6,
    /// JSON [`crate::TtySize`].
    Resize = 7,
    /// One byte: the signal number.
    Signal = 8,
    Data = 9,
    DataEof = 10,
    /// In a cell's log only: when the frame that follows was written, in
    /// milliseconds since 1970 (8 bytes, little endian).
    Time = 11,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Request,
            2 => Self::Reply,
            3 => Self::Stdin,
            4 => Self::StdinEof,
            5 => Self::Stdout,
            6 => Self::Stderr,
            7 => Self::Resize,
            8 => Self::Signal,
            9 => Self::Data,
            10 => Self::DataEof,
            11 => Self::Time,
            _ => return None,
        })
    }
}

/// One frame as it was read.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: Kind,
    pub payload: Vec<u8>,
}

impl Frame {
    /// The payload as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, FrameError> {
        serde_json::from_slice(&self.payload).map_err(FrameError::Json)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("the agent stream failed: {0}")]
    Io(io::Error),
    /// Of a stream that is waited for only so long ([`crate::Patient`]).
    #[error("{0}")]
    NoAnswer(io::Error),
    #[error("the agent stream ended in the middle of a frame")]
    Truncated,
    #[error("a frame of kind {0} is not known")]
    UnknownKind(u8),
    #[error("a frame of {bytes} bytes is longer than {bytes_max}")]
    TooLong { bytes: usize, bytes_max: usize },
    #[error("a frame is not the JSON it should be: {0}")]
    Json(serde_json::Error),
    #[error("expected a frame of kind {expected:?}, got {got:?}")]
    Unexpected { expected: Kind, got: Kind },
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::TimedOut => Self::NoAnswer(error),
            _ => Self::Io(error),
        }
    }
}

/// The longest payload of a frame of `kind`, where requests have `request_bytes_max`.
fn bytes_max(kind: Kind, request_bytes_max: usize) -> usize {
    if kind == Kind::Request { request_bytes_max } else { FRAME_BYTES_MAX }
}

/// Reads frames off a stream.
pub struct FrameReader<R> {
    stream: R,
    request_bytes_max: usize,
}

impl<R: Read> FrameReader<R> {
    /// Of a peer that is not trusted.
    pub fn new(stream: R) -> Self {
        Self { stream, request_bytes_max: FRAME_BYTES_MAX }
    }

    /// Of the operator's side, whose requests may have up to [`REQUEST_BYTES_MAX`].
    pub fn of_operator(stream: R) -> Self {
        Self { stream, request_bytes_max: REQUEST_BYTES_MAX }
    }

    pub fn get_ref(&self) -> &R {
        &self.stream
    }

    /// The next frame, or `None` at a clean end of the stream.
    pub fn read(&mut self) -> Result<Option<Frame>, FrameError> {
        let mut header = [0u8; 5];
        match read_full(&mut self.stream, &mut header)? {
            0 => return Ok(None),
            n if n < header.len() => return Err(FrameError::Truncated),
            _ => {}
        }
        let kind = Kind::from_byte(header[0]).ok_or(FrameError::UnknownKind(header[0]))?;
        let length = u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize;
        let bytes_max = bytes_max(kind, self.request_bytes_max);
        if length > bytes_max {
            return Err(FrameError::TooLong { bytes: length, bytes_max });
        }
        let mut payload = vec![0; length];
        if read_full(&mut self.stream, &mut payload)? < length {
            return Err(FrameError::Truncated);
        }
        Ok(Some(Frame { kind, payload }))
    }

    /// The next frame, which must be JSON of kind `expected`.
    pub fn expect<T: DeserializeOwned>(&mut self, expected: Kind) -> Result<T, FrameError> {
        let frame = self.read()?.ok_or(FrameError::Truncated)?;
        if frame.kind != expected {
            return Err(FrameError::Unexpected { expected, got: frame.kind });
        }
        frame.json()
    }
}

/// Writes frames to a stream, each with a single `write`.
pub struct FrameWriter<W>(W);

impl<W: Write> FrameWriter<W> {
    pub fn new(stream: W) -> Self {
        Self(stream)
    }

    pub fn get_ref(&self) -> &W {
        &self.0
    }

    /// Writes `payload`, split into as many frames as it needs.
    pub fn write(&mut self, kind: Kind, payload: &[u8]) -> Result<(), FrameError> {
        if payload.is_empty() {
            return self.write_one(kind, payload);
        }
        for chunk in payload.chunks(FRAME_BYTES_MAX) {
            self.write_one(kind, chunk)?;
        }
        Ok(())
    }

    /// Writes `value` as JSON in one frame.
    pub fn write_json<T: Serialize>(&mut self, kind: Kind, value: &T) -> Result<(), FrameError> {
        let payload = serde_json::to_vec(value).map_err(FrameError::Json)?;
        let bytes_max = bytes_max(kind, REQUEST_BYTES_MAX);
        if payload.len() > bytes_max {
            return Err(FrameError::TooLong { bytes: payload.len(), bytes_max });
        }
        self.write_one(kind, &payload)
    }

    fn write_one(&mut self, kind: Kind, payload: &[u8]) -> Result<(), FrameError> {
        let mut frame = Vec::with_capacity(5 + payload.len());
        frame.push(kind as u8);
        frame.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        frame.extend_from_slice(payload);
        self.0.write_all(&frame)?;
        self.0.flush()?;
        Ok(())
    }
}

/// Reads until `buffer` is full or the stream ends; the number of bytes read.
fn read_full(stream: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_a_round_trip_and_long_payloads_are_split() {
        let mut wire = Vec::new();
        let long = vec![7u8; FRAME_BYTES_MAX + 3];
        let mut writer = FrameWriter::new(&mut wire);
        writer.write(Kind::Stdout, &long).unwrap();
        writer.write(Kind::StdinEof, &[]).unwrap();
        let mut reader = FrameReader::new(wire.as_slice());
        assert_eq!(reader.read().unwrap().unwrap().payload.len(), FRAME_BYTES_MAX);
        assert_eq!(reader.read().unwrap().unwrap().payload, [7, 7, 7]);
        assert_eq!(reader.read().unwrap().unwrap().kind, Kind::StdinEof);
        assert!(reader.read().unwrap().is_none());
    }

    #[test]
    fn only_the_operator_may_ask_at_length() {
        let long = "y".repeat(FRAME_BYTES_MAX);
        let mut wire = Vec::new();
        FrameWriter::new(&mut wire).write_json(Kind::Request, &long).unwrap();
        let frame = FrameReader::of_operator(wire.as_slice()).read().unwrap().unwrap();
        assert_eq!(frame.json::<String>().unwrap(), long);
        let refused = FrameReader::new(wire.as_slice()).read();
        assert!(matches!(refused, Err(FrameError::TooLong { bytes_max: FRAME_BYTES_MAX, .. })));
        // All else of his is as short as it was.
        wire[0] = Kind::Stdin as u8;
        FrameReader::of_operator(wire.as_slice()).read().unwrap_err();
        FrameWriter::new(&mut wire).write_json(Kind::Reply, &long).unwrap_err();
        let endless = "y".repeat(REQUEST_BYTES_MAX);
        FrameWriter::new(&mut wire).write_json(Kind::Request, &endless).unwrap_err();
    }

    #[test]
    fn hostile_frames_are_errors() {
        let long = [5u8, 1, 0, 1, 0];
        let read = |bytes| FrameReader::new(bytes).read();
        assert!(matches!(read(&long[..]), Err(FrameError::TooLong { bytes: 65537, .. })));
        let unknown = [99u8, 0, 0, 0, 0];
        assert!(matches!(FrameReader::new(&unknown[..]).read(), Err(FrameError::UnknownKind(99))));
        let cut = [5u8, 4, 0, 0, 0, 1];
        assert!(matches!(FrameReader::new(&cut[..]).read(), Err(FrameError::Truncated)));
    }
}
