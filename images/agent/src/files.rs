//! Files of a guest, one at a time: what is asked of them, what is told of them, and the host's
//! side of it. For whole trees there are archives ([`crate::client::upload`]).
//!
//! The guest does it as root, in the namespaces of the container's programs: walls are around a
//! guest, not within. A user is named for the home in which relative paths begin, and as the
//! owner of what is made.

use std::collections::BTreeMap;
use std::io::{Read, Write};

use serde::{Deserialize, Serialize};

use crate::client::{ClientError, receive_data, reply_of};
use crate::{FrameReader, FrameWriter, Kind, Reply, Request};

/// Entries of one listing; a directory that has more is refused.
pub const ENTRIES_MAX: usize = 100_000;
/// What a listing may take, in bytes.
pub const LISTING_BYTES_MAX: u64 = 32 << 20;
/// Attributes that are told of a file, and bytes of them.
pub const METADATA_MAX: usize = 64;
pub const METADATA_BYTES_MAX: usize = 8 << 10;
/// Extended attributes of this prefix are a file's metadata.
pub const METADATA_PREFIX: &str = "user.e2b.";
/// The longest path (limits.h, PATH_MAX).
pub const PATH_BYTES_MAX: usize = 4096;

/// What to do with a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRequest {
    /// As a program's ([`crate::Exec::user`]).
    pub user: String,
    /// Absolute, or below the user's home; `~` is that home.
    pub path: String,
    pub action: FileAction,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FileAction {
    /// Answered by an `Entry`.
    Stat,
    /// So many levels of a directory: `Data`* `DataEof`, a line of JSON for each entry.
    List { depth: u32 },
    /// Make a directory, and those above it; answered by its `Entry`.
    MakeDir,
    /// Answered by the `Entry` of what is at `to` then.
    Move { to: String },
    /// Remove a file, or a directory and all below it. What is not there is removed.
    Remove,
    /// Answered by an `Entry`, then `Data`* `DataEof`.
    Read,
    /// The host sends `Data`* `DataEof`, and is answered by an `Entry`. What is `metadata` of it
    /// is kept as extended attributes.
    Write { metadata: BTreeMap<String, String> },
    /// Tell what happens in a directory, from `Done` on until the host hangs up: `Data`, a line of
    /// JSON for each [`FileEvent`].
    Watch { recursive: bool },
}

/// What kind of file something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Directory,
    /// A pipe, a socket or a device.
    Other,
}

/// A file, as the guest tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub name: String,
    /// Absolute.
    pub path: String,
    /// For a link what it leads to; `None` for a link that leads nowhere.
    pub kind: Option<FileKind>,
    pub size: u64,
    /// Permissions, with the bits for set-user-ID and its like.
    pub mode: u32,
    /// Names, or numbers that have none.
    pub owner: String,
    pub group: String,
    pub modified_s: i64,
    pub modified_ns: u32,
    /// Of a symbolic link, where it leads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// What happened to an entry of a watched directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileChange {
    Created,
    Written,
    Removed,
    Renamed,
    Attributes,
    /// More happened than the guest's kernel has kept (inotify(7), IN_Q_OVERFLOW).
    Lost,
    /// The directory itself is gone: nothing more is told.
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEvent {
    /// Relative to the watched directory.
    pub name: String,
    pub change: FileChange,
}

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
