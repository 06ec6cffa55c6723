//! What is asked of a guest's files, and what is told of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

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
