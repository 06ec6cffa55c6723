//! Serves a folder of the host to a guest by FUSE messages, under rights: read and write, and a
//! revocation that acts at once.
//!
//! The main path is [`Server::serve`]: `wire` takes a message apart, `server` checks it against the
//! rights and carries it out with the operations of `host`, for files that `nodes` holds. Messages
//! come by virtio-fs (`vmm/src/devices/fs`); [`Exchange`] is what this crate wants of that.
//!
//! What holds for a hostile guest:
//! - Nothing outside the folder can be named. Every name is one component, never `..`, and is
//!   looked up relative to a directory that is held, without following symlinks, so neither
//!   symlinks nor races lead out. (A directory that the *host* moves out of the folder stays
//!   reachable for a guest that holds it, as for any process that has it open.) The process that
//!   serves has the folder as its root besides.
//! - What the host has mounted below the folder belongs to it, but not where that is no file system
//!   of files (/proc, /sys).
//! - Devices, fifos and sockets of the host are seen and never opened; devices cannot be made.
//! - Descriptors and memory are bounded by [`Limits`]; a message that is not FUSE's is answered
//!   with an error, or not at all; nothing panics and nothing waits for others of the host.
//! - A file is flushed to the host's disk (fsync), never all that the host has to flush (syncfs).
//! - The host's disk is bounded by [`Limits::grown_bytes_max`] and [`Limits::made_max`], over several
//!   servers too ([`Server::go_on`]).
//! - Set-id bits are dropped from files that the guest makes or changes, and file capabilities are
//!   kept where they act in guests only: both would act on the host.
#![deny(unsafe_code)]

mod host;
mod locks;
mod nodes;
mod owners;
mod quota;
mod server;
mod sys;
mod table;
mod tally;
mod watches;
mod wire;
mod xattr_name;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use host::Descriptors;
pub use owners::Owners;
pub use rustix::io::Errno;
pub use server::Server;

/// Bytes of the head of a message and of an answer.
pub const REQUEST_HEAD_LEN: usize = wire::REQUEST_HEAD_LEN;
pub const REPLY_HEAD_LEN: usize = wire::REPLY_HEAD_LEN;

/// The name of the one file in a folder that is one file.
pub const FILE_NAME: &str = "file";

/// One message and the room for its answer. Neither side's memory is ours: it may change at any
/// time.
pub trait Exchange {
    /// Bytes of the message that were not taken yet.
    fn left(&self) -> usize;
    /// Takes as many bytes as both hold, and says how many.
    fn take(&mut self, into: &mut [u8]) -> usize;
    /// Writes the next `count` bytes of the message to `file` at `offset`; how many it took.
    ///
    /// # Errors
    /// The host's.
    fn take_to(&mut self, file: BorrowedFd<'_>, offset: u64, count: usize) -> Result<usize, Errno>;
    /// Room for the body of the answer that was not filled yet.
    fn room(&self) -> usize;
    /// Puts `bytes` into the answer's body, as far as there is room; how many.
    fn put(&mut self, bytes: &[u8]) -> usize;
    /// Reads at most `count` bytes of `file` at `offset` into the answer's body; how many.
    ///
    /// # Errors
    /// The host's.
    fn put_from(&mut self, file: BorrowedFd<'_>, offset: u64, count: usize)
    -> Result<usize, Errno>;
    /// Puts the answer's head before its body; called last, and not at all where there is no
    /// answer.
    fn finish(&mut self, head: [u8; REPLY_HEAD_LEN]);
}

/// What is served, and what its holder may do with it.
pub struct Folder {
    pub what: What,
    pub rights: Rights,
    pub owners: Owners,
    pub limits: Limits,
    pub descriptors: Descriptors,
    /// Shared with whoever watches.
    pub metrics: Arc<Metrics>,
}

/// What a folder is of the host's.
pub enum What {
    /// A directory.
    Directory(OwnedFd),
    /// One file: the folder holds nothing else, under [`FILE_NAME`]. The directory is one that
    /// nothing is in.
    File { file: OwnedFd, empty: OwnedFd },
}

/// What the holder may do. Neither right means the folder is not even seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// Read files, directories and symlinks.
    pub read: bool,
    /// Create, change, rename and remove.
    pub write: bool,
}

impl Rights {
    pub const READ: Self = Self { read: true, write: false };
    pub const READ_WRITE: Self = Self { read: true, write: true };
}

/// What one guest may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Files that the guest may know at once. One over it is ENFILE.
    pub nodes_max: usize,
    /// Those of them that are held at once, each by a descriptor. One over it takes the place of
    /// another that is not open, where the host's file system tells when files were made; else it
    /// is ENFILE.
    pub held_max: usize,
    /// Files that it may have open at once; each takes one or two more.
    pub opened_max: usize,
    /// Holders of locks on a file; each takes one more. One over it is ENOLCK.
    pub lockers_max: usize,
    /// Locks of bytes of files, each of which the host's kernel keeps; ENOLCK over it.
    pub locks_max: usize,
    /// Those of one file, which the host's kernel keeps in a list.
    pub file_locks_max: usize,
    /// By how many bytes files and their attributes may grow, less what was given back. Over it, writing fails with
    /// EDQUOT.
    pub grown_bytes_max: u64,
    /// How many names may be made, less those that were removed; EDQUOT over it too.
    pub made_max: u64,
}

/// Files that a guest may know at once, however few descriptors there are: their names are kept,
/// in some 100 MiB at most.
const KNOWN_MAX: usize = 256 << 10;

impl Limits {
    /// Within `descriptors` of a process, where not all files are open to append (which takes two
    /// each).
    pub fn within(descriptors: usize) -> Self {
        let share = descriptors / 8;
        Self {
            nodes_max: (share * 4).max(KNOWN_MAX),
            held_max: (share * 4).max(16),
            opened_max: (share * 5 / 2).max(16),
            lockers_max: (share / 2).max(4),
            ..Self::default()
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            nodes_max: 4096,
            held_max: 4096,
            opened_max: 4096,
            lockers_max: 1024,
            locks_max: 16 << 10,
            file_locks_max: 4 << 10,
            grown_bytes_max: 64 << 30,
            made_max: 4 << 20,
        }
    }
}

/// Counters of one folder.
#[derive(Debug, Default)]
pub struct Metrics {
    pub requests: AtomicU64,
    /// Bytes of file content that went to the guest.
    pub bytes_read: AtomicU64,
    /// Bytes of file content that came from the guest.
    pub bytes_written: AtomicU64,
    /// Requests refused by the rights or by the folder's own rules, as opposed to those that the
    /// host's file system refused.
    pub denials: AtomicU64,
}

impl Metrics {
    fn add(counter: &AtomicU64, amount: usize) {
        counter.fetch_add(amount as u64, Ordering::Relaxed);
    }
}

/// Why a folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("the folder's descriptor is not a directory; open the folder with O_DIRECTORY")]
    NotADirectory,
    #[error("the file's descriptor is not a regular file; give a folder or a file")]
    NotAFile,
    #[error("the folder's descriptor cannot be examined: {0}; check that it is still open")]
    Root(#[source] std::io::Error),
    #[error("{0} is not of files on the host; give a folder that holds files")]
    NotOfFiles(&'static str),
}
