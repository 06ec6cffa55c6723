//! Files of a guest, one at a time: the host's side of it. What is asked and told is in `entry`;
//! for whole trees there are archives ([`crate::client::upload`]).
//!
//! The guest does it as root, in the namespaces of the container's programs: walls are around a
//! guest, not within. A user is named for the home in which relative paths begin, and as the
//! owner of what is made.

use std::io::{Read, Write};

use crate::client::{ClientError, receive_data, reply_of};
use crate::{FrameReader, FrameWriter, Kind, Reply, Request};

pub use crate::entry::{
    ENTRIES_MAX, FileAction, FileChange, FileEntry, FileEvent, FileKind, FileRequest,
    LISTING_BYTES_MAX, METADATA_BYTES_MAX, METADATA_MAX, METADATA_PREFIX, PATH_BYTES_MAX,
};

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
    FrameWriter::new(write).write_json(Kind::Request, &Request::File(wanted.clone()))?;
    let (mut reader, mut text) = (FrameReader::new(read), Vec::new());
    receive_data(&mut reader, &mut text, LISTING_BYTES_MAX)?;
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let read = |line| serde_json::from_slice(line).map_err(crate::FrameError::Json);
    Ok(lines.take(ENTRIES_MAX).map(read).collect::<Result<_, _>>()?)
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
