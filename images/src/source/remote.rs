//! Documents and blobs that another process hands over: whoever reads them opens no file and
//! talks to nobody.
//!
//! ```text
//! reader                                    server
//! length u16, name ──────────────────────>  opens it
//!       <── length u32, so many bytes, ...  0: the end; MAX: length u32, a refusal as JSON
//! ```
//! Each side takes what the other says for a claim: names are checked before they are opened, and
//! lengths before there is room for them. The reader waits as long as its socket does (SO_RCVTIMEO).

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use super::oci::{Blobs, Descriptor};
use super::{Input, LayerPlan};
use crate::error::{ImageError, Refusal, Result};

/// The longest name: of a manifest by a tag.
const NAME_BYTES_MAX: usize = 512;
/// The longest refusal.
const REFUSAL_BYTES_MAX: u32 = 16 << 10;
const CHUNK_BYTES: usize = 128 << 10;
const END: u32 = 0;
const REFUSED: u32 = u32::MAX;

/// Answers what the other side of `stream` asks for by `open`, until it is gone.
///
/// # Errors
/// The other side broke the protocol.
pub(super) fn serve<'a>(
    stream: &UnixStream,
    mut open: impl FnMut(&str) -> Result<Box<dyn Read + 'a>>,
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Some(name) = next_name(stream)? {
        let sent = match open(&name) {
            Ok(mut content) => send_all(stream, &mut *content, &mut chunk)?,
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            refuse(stream, &error)?;
        }
    }
    Ok(())
}

fn next_name(mut stream: &UnixStream) -> io::Result<Option<String>> {
    let mut length = [0; 2];
    match stream.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = usize::from(u16::from_le_bytes(length));
    if length > NAME_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut name = vec![0; length];
    stream.read_exact(&mut name)?;
    String::from_utf8(name).map(Some).map_err(io::Error::other)
}

/// Sends `content`; what stopped it, if that was the content.
fn send_all(
    mut stream: &UnixStream,
    content: &mut dyn Read,
    chunk: &mut [u8],
) -> io::Result<Result<()>> {
    loop {
        let count = match content.read(chunk) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Ok(Err(ImageError::io("cannot read a blob", error))),
        };
        stream.write_all(&(count as u32).to_le_bytes())?;
        if count == 0 {
            return Ok(Ok(()));
        }
        stream.write_all(&chunk[..count])?;
    }
}

fn refuse(mut stream: &UnixStream, error: &ImageError) -> io::Result<()> {
    let text = serde_json::to_vec(&error.refusal())?;
    let length = u32::try_from(text.len()).ok().filter(|length| *length <= REFUSAL_BYTES_MAX);
    let length = length.ok_or(io::ErrorKind::InvalidData)?;
    stream.write_all(&REFUSED.to_le_bytes())?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(&text)
}

/// The reader's side. One blob is read at a time, to its end.
pub(super) struct Remote {
    stream: UnixStream,
    /// Whether the last blob was read to its end.
    is_idle: RefCell<bool>,
}

impl Remote {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, is_idle: RefCell::new(true) }
    }

    pub fn open(&self, name: &str) -> Result<Box<dyn Read + '_>> {
        if !self.is_idle.replace(false) {
            return Err(ImageError::malformed("the blob before", "it was not read to its end"));
        }
        let failed = |error| ImageError::io("cannot ask for a blob", error);
        let length =
            u16::try_from(name.len()).map_err(|_| failed(io::ErrorKind::InvalidInput.into()))?;
        let mut stream = &self.stream;
        stream
            .write_all(&length.to_le_bytes())
            .and_then(|()| stream.write_all(name.as_bytes()))
            .map_err(failed)?;
        let mut blob = RemoteBlob { remote: self, left: 0, ended: false };
        // A refusal is the answer to the question, not to the first read.
        blob.begin_chunk().map_err(failed)?;
        Ok(Box::new(blob))
    }
}

struct RemoteBlob<'a> {
    remote: &'a Remote,
    left: usize,
    ended: bool,
}

impl RemoteBlob<'_> {
    fn number(&self) -> io::Result<u32> {
        let mut bytes = [0; 4];
        (&self.remote.stream).read_exact(&mut bytes).map_err(stalled)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn begin_chunk(&mut self) -> io::Result<()> {
        match self.number()? {
            END => {
                self.ended = true;
                self.remote.is_idle.replace(true);
            }
            REFUSED => {
                let length = self.number()?;
                if length > REFUSAL_BYTES_MAX {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let mut text = vec![0; length as usize];
                (&self.remote.stream).read_exact(&mut text).map_err(stalled)?;
                self.ended = true;
                self.remote.is_idle.replace(true);
                let refusal: Refusal = serde_json::from_slice(&text)?;
                return Err(ImageError::Refused(refusal).into());
            }
            length => self.left = length as usize,
        }
        Ok(())
    }
}

/// The error of a wait that was too long.
fn stalled(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ImageError::Stalled.into(),
        _ => error,
    }
}

impl Read for RemoteBlob<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !self.ended && !buffer.is_empty() {
            self.begin_chunk()?;
        }
        let want = buffer.len().min(self.left);
        if want == 0 {
            return Ok(0);
        }
        let count = (&self.remote.stream).read(&mut buffer[..want]).map_err(stalled)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= count;
        Ok(count)
    }
}

/// The documents and blobs of a registry's repository.
pub(super) struct Distant(pub Remote);

impl Input for Distant {
    fn open_layer(&self, layer: &LayerPlan) -> Result<Box<dyn Read + '_>> {
        let digest = layer.blob.map_or(layer.diff_id, |(digest, _)| digest);
        self.0.open(&format!("blobs/{digest}"))
    }
}

impl Blobs for Distant {
    fn manifest(&self, descriptor: &Descriptor) -> Result<Box<dyn Read + '_>> {
        self.0.open(&format!("manifests/{}", descriptor.digest))
    }

    fn blob(&self, descriptor: &Descriptor) -> Result<Box<dyn Read + '_>> {
        self.0.open(&format!("blobs/{}", descriptor.digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(open: impl FnMut(&str) -> Result<Box<dyn Read>> + Send + 'static) -> Remote {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || serve(&theirs, open));
        Remote::new(ours)
    }

    #[test]
    fn blobs_and_refusals_come_whole() {
        let remote = remote(|name| match name {
            "empty" => Ok(Box::new(io::empty())),
            "large" => Ok(Box::new(io::repeat(7).take(1_000_000))),
            _ => Err(ImageError::NotFound { name: name.to_owned() }),
        });
        let length = |name| {
            let mut bytes = Vec::new();
            remote.open(name).map(|mut blob| blob.read_to_end(&mut bytes).unwrap())
        };
        assert_eq!((length("empty").unwrap(), length("large").unwrap()), (0, 1_000_000));
        let refused = length("missing").unwrap_err();
        assert!(matches!(refused, ImageError::Refused(_)), "{refused:?}");
        assert!(refused.to_string().contains("no image `missing`"), "{refused}");
        assert_eq!(length("large").unwrap(), 1_000_000, "a refusal ends nothing");
    }

    #[test]
    fn who_says_nothing_is_not_waited_for() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(std::time::Duration::from_millis(10))).unwrap();
        let remote = Remote::new(ours.try_clone().unwrap());
        let said = remote.open("x").map(drop).unwrap_err().to_string();
        assert!(said.contains("nothing came"), "{said}");
        let remote = Remote::new(ours);
        theirs.write_all(&10_u32.to_le_bytes()).unwrap();
        let mut blob = remote.open("x").unwrap();
        theirs.write_all(b"five!").unwrap();
        let mut bytes = Vec::new();
        let said = blob.read_to_end(&mut bytes).unwrap_err().to_string();
        assert!(bytes == b"five!" && said.contains("nothing came"), "{said}");
    }

    #[test]
    fn who_breaks_the_protocol_is_an_error() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&u16::MAX.to_le_bytes()).unwrap();
        assert!(serve(&ours, |_| Ok(Box::new(io::empty()))).is_err());
        let (ours, theirs) = UnixStream::pair().unwrap();
        let remote = Remote::new(ours);
        (&theirs).write_all(&[REFUSED.to_le_bytes(), u32::MAX.to_le_bytes()].concat()).unwrap();
        assert!(remote.open("x").is_err());
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(Remote::new(ours).open("x").is_err());
    }
}
