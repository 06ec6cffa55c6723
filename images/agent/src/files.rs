//! Files of a guest, one at a time: the host's side of it. What is asked and told is in `entry`;
//! for whole trees there are archives ([`crate::client::upload`]).
//!
//! The guest does it as root, in the namespaces of the container's programs: walls are around a
//! guest, not within. A user is named for the home in which relative paths begin, and as the
//! owner of what is made.

use std::io::{self, Read, Write};

use crate::client::{ClientError, receive_data, reply_of};
use crate::{FrameReader, FrameWriter, Kind, Reply, Request};

pub use crate::entry::{
    ENTRIES_MAX, FileAction, FileChange, FileEntry, FileEvent, FileKind, FileRequest,
    LISTING_BYTES_MAX, METADATA_BYTES_MAX, METADATA_MAX, METADATA_PREFIX, PATH_BYTES_MAX,
};

/// The longest line of a listing: paths and metadata that JSON makes longer.
const LINE_BYTES_MAX: usize = 256 << 10;

fn entry(reply: Reply) -> Result<FileEntry, ClientError> {
    match reply {
        Reply::Entry(entry) => Ok(*entry),
        _ => Err(ClientError::UnexpectedReply { request: "file" }),
    }
}

/// Asks for an action that is answered by an entry.
///
/// # Errors
/// The guest's, and those of the stream.
pub fn act(
    read: impl Read,
    write: impl Write,
    wanted: &FileRequest,
) -> Result<FileEntry, ClientError> {
    entry(crate::client::request(read, write, &Request::File(wanted.clone()))?)
}

/// Asks for an action that is answered by `Done`.
///
/// # Errors
/// As [`act`]'s.
pub fn done(read: impl Read, write: impl Write, wanted: &FileRequest) -> Result<(), ClientError> {
    match crate::client::request(read, write, &Request::File(wanted.clone()))? {
        Reply::Done => Ok(()),
        _ => Err(ClientError::UnexpectedReply { request: "file" }),
    }
}

/// Asks for a listing.
///
/// # Errors
/// As [`act`]'s; and the guest says what is none, or too much of it.
pub fn list(
    read: impl Read,
    write: impl Write,
    wanted: &FileRequest,
) -> Result<Vec<FileEntry>, ClientError> {
    let mut all = Vec::new();
    list_each(read, write, wanted, |entry| {
        all.push(entry);
        true
    })?;
    Ok(all)
}

/// Asks for a listing, of which `take` has one entry after the other. It says whether it wants more;
/// false if it does not.
///
/// # Errors
/// As [`list`]'s.
pub fn list_each(
    read: impl Read,
    write: impl Write,
    wanted: &FileRequest,
    take: impl FnMut(FileEntry) -> bool,
) -> Result<bool, ClientError> {
    FrameWriter::new(write).write_json(Kind::Request, &Request::File(wanted.clone()))?;
    let mut lines = Lines { line: Vec::new(), left: ENTRIES_MAX, take, broken: None };
    let received = receive_data(&mut FrameReader::new(read), &mut lines, LISTING_BYTES_MAX);
    match (received, lines.broken) {
        (_, Some(error)) => Err(crate::FrameError::Json(error).into()),
        (Err(ClientError::Local(_)), None) => Ok(false),
        (received, None) => received.map(|_| true),
    }
}

/// The entries of a listing, of which little is kept.
struct Lines<F> {
    line: Vec<u8>,
    left: usize,
    take: F,
    broken: Option<serde_json::Error>,
}

impl<F: FnMut(FileEntry) -> bool> Lines<F> {
    /// Whether more is wanted.
    fn take(&mut self) -> bool {
        let Some(left) = self.left.checked_sub(1) else { return true };
        self.left = left;
        match serde_json::from_slice(&self.line) {
            Ok(entry) => (self.take)(entry),
            Err(error) => {
                self.broken = Some(error);
                false
            }
        }
    }
}

impl<F: FnMut(FileEntry) -> bool> Write for Lines<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.line.len() + piece.len() > LINE_BYTES_MAX {
                self.broken = Some(serde::de::Error::custom("a line is too long"));
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.line.extend_from_slice(piece);
            if !piece.ends_with(b"\n") {
                break;
            }
            if self.line.len() > 1 && !self.take() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            self.line.clear();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a file: what it is, and the reader of its bytes for [`receive_data`].
///
/// # Errors
/// As [`act`]'s.
pub fn read<R: Read>(
    read: R,
    write: impl Write,
    wanted: &FileRequest,
) -> Result<(FileEntry, FrameReader<R>), ClientError> {
    FrameWriter::new(write).write_json(Kind::Request, &Request::File(wanted.clone()))?;
    let mut reader = FrameReader::new(read);
    let told = entry(reply_of(&mut reader)?)?;
    Ok((told, reader))
}

/// Writes what `from` has into a file.
///
/// # Errors
/// As [`act`]'s; [`ClientError::Local`] for those of `from`, after which the guest has a part.
pub fn write(
    read: impl Read,
    write: impl Write,
    wanted: &FileRequest,
    from: &mut impl Read,
) -> Result<FileEntry, ClientError> {
    let mut reader = FrameReader::new(read);
    let mut writer = FrameWriter::new(write);
    let sent = (|| {
        writer.write_json(Kind::Request, &Request::File(wanted.clone()))?;
        crate::client::copy_chunks(from, |chunk| Ok(writer.write(Kind::Data, chunk)?))?;
        Ok(writer.write(Kind::DataEof, &[])?)
    })();
    if let Err(ClientError::Frame(_)) = &sent {
        // The guest may have said why it stopped listening.
        reply_of(&mut reader)?;
    }
    sent?;
    entry(reply_of(&mut reader)?)
}

impl FileEvent {
    /// `name` is relative to the watched directory.
    #[must_use]
    pub fn of(name: &std::path::Path, change: FileChange) -> Self {
        Self { name: name.to_string_lossy().into_owned(), change }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_read_line_by_line() {
        let wanted = FileRequest {
            user: String::new(),
            path: "/".to_owned(),
            action: FileAction::List { depth: 1 },
        };
        let line = |name: &str| {
            let entry = serde_json::json!({
                "name": name, "path": name, "kind": "file", "size": 0, "mode": 0, "owner": "",
                "group": "", "modified_s": 0, "modified_ns": 0,
            });
            format!("{entry}\n")
        };
        let sent = |text: &str| {
            let mut wire = Vec::new();
            let mut writer = FrameWriter::new(&mut wire);
            for piece in text.as_bytes().chunks(7) {
                writer.write(Kind::Data, piece).unwrap();
            }
            writer.write(Kind::DataEof, &[]).unwrap();
            wire
        };
        let wire = sent(&[line("a"), line("b"), line("c")].concat());
        let listed = list(wire.as_slice(), io::sink(), &wanted).unwrap();
        assert_eq!(listed.iter().map(|it| it.name.as_str()).collect::<String>(), "abc");
        let mut count = 0;
        let is_whole = list_each(wire.as_slice(), io::sink(), &wanted, |_| {
            count += 1;
            count < 2
        });
        assert!(!is_whole.unwrap() && count == 2);
        for broken in ["{}\n", &"x".repeat(LINE_BYTES_MAX + 1)] {
            let failed = list(sent(broken).as_slice(), io::sink(), &wanted).unwrap_err();
            assert!(matches!(failed, ClientError::Frame(_)), "{failed}");
        }
    }
}
