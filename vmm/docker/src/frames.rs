//! The agent's frames over tokio streams, and the API's frames around output.

use std::io;

use bytes::Bytes;
use exocell_cell::agent::{FRAME_BYTES_MAX, Frame, FrameReader, FrameWriter, Kind};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The next frame; `None` at a clean end of the stream. Not to be cancelled.
pub async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Frame>> {
    let mut bytes = vec![0; 5];
    if stream.read(&mut bytes[..1]).await? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut bytes[1..]).await?;
    let length = u32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes.resize(5 + length, 0);
    stream.read_exact(&mut bytes[5..]).await?;
    FrameReader::new(bytes.as_slice()).read().map_err(io::Error::other)
}

/// Writes `payload` as frames of `kind`.
pub async fn write_frame(
    stream: &mut (impl AsyncWrite + Unpin),
    kind: Kind,
    payload: &[u8],
) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(payload.len() + 16);
    FrameWriter::new(&mut bytes).write(kind, payload).map_err(io::Error::other)?;
    stream.write_all(&bytes).await
}

/// Writes `value` as one JSON frame.
pub async fn write_json(
    stream: &mut (impl AsyncWrite + Unpin),
    kind: Kind,
    value: &impl Serialize,
) -> io::Result<()> {
    let mut bytes = Vec::new();
    FrameWriter::new(&mut bytes).write_json(kind, value).map_err(io::Error::other)?;
    stream.write_all(&bytes).await
}

/// A piece of a program's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    pub stderr: bool,
    pub bytes: Bytes,
}

impl Chunk {
    /// The output in `frame`, if it is some.
    pub fn of(frame: Frame) -> Option<Self> {
        match frame.kind {
            Kind::Stdout => Some(Self { stderr: false, bytes: frame.payload.into() }),
            Kind::Stderr => Some(Self { stderr: true, bytes: frame.payload.into() }),
            _ => None,
        }
    }

    /// Words of the server's own, as standard output.
    pub fn text(text: String) -> Self {
        Self { stderr: false, bytes: text.into() }
    }

    /// As the API sends it: as it is for a terminal, else behind a header of
    /// stream number, three zeros and the length (big endian).
    pub fn encoded(&self, tty: bool) -> Bytes {
        if tty {
            return self.bytes.clone();
        }
        let mut bytes = Vec::with_capacity(8 + self.bytes.len());
        bytes.extend([if self.stderr { 2 } else { 1 }, 0, 0, 0]);
        bytes.extend((self.bytes.len() as u32).to_be_bytes());
        bytes.extend(&self.bytes);
        bytes.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_cross_and_hostile_ones_are_errors() {
        let mut wire = Vec::new();
        write_frame(&mut wire, Kind::Stderr, b"oh").await.unwrap();
        let mut stream = wire.as_slice();
        let chunk = Chunk::of(read_frame(&mut stream).await.unwrap().unwrap()).unwrap();
        assert_eq!(&chunk.encoded(false)[..], b"\x02\0\0\0\0\0\0\x02oh");
        assert_eq!(&chunk.encoded(true)[..], b"oh");
        assert!(read_frame(&mut stream).await.unwrap().is_none());
        for hostile in [&[5, 1, 0, 1, 0][..], &[99, 0, 0, 0, 0], &[5, 4, 0, 0, 0, 1], &[5, 4]] {
            let mut stream = hostile;
            assert!(read_frame(&mut stream).await.is_err(), "{hostile:?}");
        }
    }
}
