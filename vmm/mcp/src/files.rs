//! Files of a sandbox, one at a time. The guest does it as its root, in the namespaces of the
//! sandbox' programs.

use std::io::{self, Write};
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use exocell_cell::agent::client::{ClientError, receive_data};
use exocell_cell::agent::files::{self, FileAction, FileEntry, FileKind, FileRequest};
use exocell_cell::agent::{Patient, TRANSFER_MAX};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Refusal;
use crate::sandbox::Sandbox;

/// Bytes of a file that are told where nobody says, and at most.
const READ_DEFAULT: u64 = 256 << 10;
pub const READ_MAX: u64 = 4 << 20;
/// What is before it is read, too.
const OFFSET_MAX: u64 = 128 << 20;
/// Levels of a listing.
const DEPTH_MAX: u32 = 16;
/// Entries that are told: an agent reads them all.
const LISTED_MAX: usize = 2000;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadFile {
    /// The sandbox' id.
    pub sandbox: String,
    pub path: String,
    /// Where to begin, in bytes, at most 134217728. Default: at the beginning.
    #[serde(default)]
    pub offset: u64,
    /// Bytes to read. Default: 262144.
    #[schemars(range(min = 1, max = 4_194_304))]
    pub length: Option<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct FileRead {
    pub path: String,
    /// Of the whole file, in bytes.
    pub size: u64,
    /// `utf-8`, or `base64` where the bytes are none.
    pub encoding: Encoding,
    pub content: String,
    /// Whether there is more of the file after this.
    pub more: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Encoding {
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    #[serde(rename = "base64")]
    Base64,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteFile {
    /// The sandbox' id.
    pub sandbox: String,
    /// Directories on the way to it are made.
    pub path: String,
    pub content: String,
    /// How `content` is written down. Default: utf-8.
    #[serde(default)]
    pub encoding: Encoding,
    /// Whose the file is. Default: root.
    pub user: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListFiles {
    /// The sandbox' id.
    pub sandbox: String,
    pub path: String,
    /// Levels below it, 1 to 16. Default: 1.
    #[schemars(range(min = 1, max = 16))]
    pub depth: Option<u32>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct Listing {
    pub entries: Vec<Entry>,
    /// Entries that are not told because there are too many.
    pub left_out: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct Entry {
    pub path: String,
    pub kind: EntryKind,
    pub size: u64,
    pub owner: String,
    /// Permissions in octal, like 0755.
    pub mode: String,
    /// Where a symbolic link leads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    File,
    Directory,
    Symlink,
    /// A pipe, a socket or a device.
    Other,
}

impl From<FileEntry> for Entry {
    fn from(entry: FileEntry) -> Self {
        let kind = match (&entry.link, &entry.kind) {
            (Some(_), _) => EntryKind::Symlink,
            (None, Some(FileKind::File)) => EntryKind::File,
            (None, Some(FileKind::Directory)) => EntryKind::Directory,
            (None, _) => EntryKind::Other,
        };
        Self {
            path: entry.path,
            kind,
            size: entry.size,
            owner: entry.owner,
            mode: format!("{:04o}", entry.mode & 0o7777),
            link: entry.link,
        }
    }
}

fn request(path: String, action: FileAction) -> FileRequest {
    FileRequest { user: String::new(), path, action }
}

/// A part of what is written to it; it breaks off the writer once it has enough.
struct Window {
    skip: u64,
    most: u64,
    bytes: Vec<u8>,
    more: bool,
}

impl Write for Window {
    fn write(&mut self, chunk: &[u8]) -> io::Result<usize> {
        let skipped = self.skip.min(chunk.len() as u64) as usize;
        self.skip -= skipped as u64;
        let rest = chunk.get(skipped..).unwrap_or_default();
        let room = (self.most - self.bytes.len() as u64).min(rest.len() as u64) as usize;
        let (taken, left) = rest.split_at(room);
        self.bytes.extend_from_slice(taken);
        if left.is_empty() {
            return Ok(chunk.len());
        }
        self.more = true;
        Err(io::Error::other("enough"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a part of a file.
///
/// # Errors
/// The guest's, and a part that is too long.
pub async fn read(sandbox: &Arc<Sandbox>, wanted: ReadFile) -> Result<FileRead, Refusal> {
    let most = match wanted.length.unwrap_or(READ_DEFAULT) {
        length @ 1..=READ_MAX => length,
        length => return Err(Refusal::new(format!("length: {length} is not 1 to {READ_MAX}"))),
    };
    let (path, skip) = (wanted.path, wanted.offset);
    if skip > OFFSET_MAX {
        return Err(Refusal::new(format!(
            "offset: {skip} is more than {OFFSET_MAX}; cut the file in the sandbox (tail -c, dd)"
        )));
    }
    sandbox
        .ask(move |guest, _| {
            let guest = guest.within(TRANSFER_MAX);
            let wanted = request(path, FileAction::Read);
            let (entry, mut rest) = files::read(&guest, &guest, &wanted)?;
            let mut window = Window { skip, most, bytes: Vec::new(), more: false };
            let received = receive_data(&mut rest, &mut window, u64::MAX);
            if let Err(error) = received
                && !window.more
            {
                return Err(error.into());
            }
            Ok(told(entry, window))
        })
        .await
}

fn told(entry: FileEntry, window: Window) -> FileRead {
    let (encoding, content) = match String::from_utf8(window.bytes) {
        Ok(text) => (Encoding::Utf8, text),
        Err(error) => (Encoding::Base64, STANDARD.encode(error.as_bytes())),
    };
    FileRead { path: entry.path, size: entry.size, encoding, content, more: window.more }
}

/// Writes a whole file.
///
/// # Errors
/// The guest's, and what is no base64.
pub async fn write(sandbox: &Arc<Sandbox>, wanted: WriteFile) -> Result<Entry, Refusal> {
    let bytes = match wanted.encoding {
        Encoding::Utf8 => wanted.content.into_bytes(),
        Encoding::Base64 => STANDARD
            .decode(wanted.content.trim())
            .map_err(|error| Refusal::new(format!("content is no base64: {error}")))?,
    };
    let mut request = request(wanted.path, FileAction::Write { metadata: Default::default() });
    request.user = wanted.user.unwrap_or_default();
    let written = move |guest: Patient| -> Result<FileEntry, ClientError> {
        let guest = guest.within(TRANSFER_MAX);
        files::write(&guest, &guest, &request, &mut bytes.as_slice())
    };
    sandbox.ask(move |guest, _| Ok(written(guest)?.into())).await
}

/// Lists a directory.
///
/// # Errors
/// The guest's, and a depth that there is not.
pub async fn list(sandbox: &Arc<Sandbox>, wanted: ListFiles) -> Result<Listing, Refusal> {
    let depth = match wanted.depth.unwrap_or(1) {
        depth @ 1..=DEPTH_MAX => depth,
        depth => return Err(Refusal::new(format!("depth: {depth} is not 1 to {DEPTH_MAX}"))),
    };
    let path = wanted.path;
    sandbox
        .ask(move |guest, _| {
            let wanted = request(path, FileAction::List { depth });
            let all = files::list(&guest, &guest, &wanted)?;
            let left_out = all.len().saturating_sub(LISTED_MAX);
            let entries = all.into_iter().take(LISTED_MAX).map(Entry::from).collect();
            Ok(Listing { entries, left_out })
        })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(skip: u64, most: u64, chunks: &[&str]) -> Window {
        let mut window = Window { skip, most, bytes: Vec::new(), more: false };
        for chunk in chunks {
            if window.write_all(chunk.as_bytes()).is_err() {
                break;
            }
        }
        window
    }

    #[test]
    fn a_window_is_a_part_of_a_file() {
        let part = window(2, 4, &["a", "bcd", "efg"]);
        assert_eq!((part.bytes.as_slice(), part.more), (&b"cdef"[..], true));
        let end = window(5, 4, &["abc", "defg"]);
        assert_eq!((end.bytes.as_slice(), end.more), (&b"fg"[..], false));
        let whole = window(0, 3, &["abc"]);
        assert_eq!((whole.bytes.as_slice(), whole.more), (&b"abc"[..], false));
        assert!(window(9, 3, &["abc"]).bytes.is_empty());
    }
}
