//! Serves a host folder to a guest as 9P2000.L on a byte stream, under a
//! capability: read and write rights, and a revocation that acts at once.
//!
//! The main path is [`serve`]: `frames` cuts the stream into messages,
//! `request` parses one, `gate` checks it against the rights, and
//! `server` carries it out with the operations of `host`.
//!
//! What holds for a hostile guest:
//! - Nothing outside the folder can be named. Every name is one component,
//!   never `..`, and is opened relative to a directory descriptor without
//!   following symlinks, so neither symlinks nor races lead out. (A directory
//!   the *host* moves out of the folder stays reachable through a fid that
//!   already holds it, as it would for any process that has it open.)
//! - What is mounted below the folder stays out, unless [`Folder::submounts`].
//! - Host devices, fifos and sockets are seen but cannot be opened, and
//!   devices cannot be made.
//! - Descriptors are bounded by [`Limits::fids_max`] (at most three each) and
//!   memory by the message size, for each connection: accept one per folder. A
//!   message that breaks the protocol ends the connection; nothing panics.
//! - The host's disk is bounded by [`Limits::grown_bytes_max`] and [`Limits::made_max`].
//!
//! Every host operation acts with the identity of the serving process: new
//! files belong to it, whatever ids the guest names, and the host's own
//! permission checks apply to it. Files of others appear with their ids. A
//! chown the host refuses fails with the host's error. Set-id bits are dropped
//! from files the guest makes or changes: they would act on the host. (Serve
//! without CAP_FSETID, so that the host also drops those of files written to.)
//!
//! Locks are granted without asking the host: one guest kernel settles them
//! among its own processes, and they do not hold between cells. There are no
//! extended attributes. Requests are carried out in order, one at a time.
#![deny(unsafe_code)]

mod fids;
mod frames;
mod gate;
mod host;
mod quota;
mod request;
mod server;
mod sys;
mod wire;

pub use sys::SYSCALLS;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use frames::Frames;
use request::{Request, kind};
use server::Server;
use wire::Reply;

/// The largest message either side may send, in bytes.
pub const MSIZE_MAX: u32 = 512 * 1024;

/// The smallest message size the Linux client works with, in bytes.
pub const MSIZE_MIN: u32 = 4096;

/// Size of messages before the guest has proposed one, in bytes.
const MSIZE_START: usize = 8192;

/// Whether the capability still holds. Asked before every request, so it must
/// be cheap; once it has answered false it is not asked again.
pub type Live = Arc<dyn Fn() -> bool + Send + Sync>;

/// A host folder and what its holder may do with it.
pub struct Folder {
    /// The folder, opened as a directory (`O_PATH` is enough).
    pub dir: OwnedFd,
    pub rights: Rights,
    pub live: Live,
    pub limits: Limits,
    /// Whether what the host has mounted below the folder belongs to it. Off
    /// unless asked for: it may be a /proc, and with it the server itself.
    pub submounts: bool,
    /// Shared with whoever watches the cell.
    pub metrics: Arc<Metrics>,
}

impl Folder {
    /// A folder with the default limits and metrics of its own.
    pub fn new(dir: OwnedFd, rights: Rights, live: Live) -> Self {
        Self {
            dir,
            rights,
            live,
            limits: Limits::default(),
            submounts: false,
            metrics: Arc::default(),
        }
    }
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

/// What one connection may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Files and directories the guest may hold at once. A fid over it fails
    /// with ENFILE. The process needs up to three descriptors for each, so keep
    /// three times this, over all folders, well below its RLIMIT_NOFILE. The
    /// Linux client holds one for each file in use, and with `cache=loose` or
    /// `fscache` one for each file in its dentry cache as well: use `none` or
    /// `mmap`.
    pub fids_max: usize,
    /// Largest message, in bytes; taken into [`MSIZE_MIN`]..=[`MSIZE_MAX`].
    pub msize_max: u32,
    /// By how many bytes files may grow, less what was given back. Over it, writing fails with
    /// EDQUOT.
    pub grown_bytes_max: u64,
    /// How many names may be made, less those that were removed; EDQUOT over it too.
    pub made_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { fids_max: 4096, msize_max: MSIZE_MAX, grown_bytes_max: 64 << 30, made_max: 4 << 20 }
    }
}

/// Counters of one folder, over all its connections.
#[derive(Debug, Default)]
pub struct Metrics {
    pub requests: AtomicU64,
    /// Bytes of file content that went to the guest.
    pub bytes_read: AtomicU64,
    /// Bytes of file content that came from the guest.
    pub bytes_written: AtomicU64,
    /// Requests refused by the capability or by the folder's own rules, as
    /// opposed to those the host's file system refused.
    pub denials: AtomicU64,
}

impl Metrics {
    fn add(counter: &AtomicU64, amount: usize) {
        counter.fetch_add(amount as u64, Ordering::Relaxed);
    }
}

/// Why a connection ended before the guest closed it.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The caller's error.
    #[error("the folder's descriptor is not a directory; open the folder with O_DIRECTORY")]
    NotADirectory,
    /// The caller's error.
    #[error("the folder's descriptor cannot be examined: {0}; check that it is still open")]
    Root(#[source] std::io::Error),
    /// The stream broke.
    #[error("the folder's stream failed: {0}; the guest must mount it again")]
    Stream(#[source] std::io::Error),
    /// The stream ended inside a message.
    #[error("the folder's stream ended inside a message; the guest must mount it again")]
    Cut,
    /// The guest's fault.
    #[error("the guest sent a message of {size} bytes; allowed are 7 to {max}")]
    Size { size: u32, max: usize },
    /// The guest's fault.
    #[error("the guest sent a {message} whose {field} is malformed")]
    Malformed { message: &'static str, field: &'static str },
    /// The guest's fault.
    #[error("the guest sent message number {number} before agreeing on a version")]
    NoVersion { number: u8 },
}

/// Serves `folder` on `stream` until the stream ends. Blocking, on the calling
/// thread only; to end it from outside, shut the stream down.
///
/// After revocation every open file is closed and every request but clunk and
/// flush is answered with EACCES.
///
/// # Errors
/// [`FolderError`]; all but the first two are the guest's fault or its end.
pub fn serve(folder: Folder, mut stream: UnixStream) -> Result<(), FolderError> {
    let mut server = Server::new(folder)?;
    let mut frames = Frames::new(MSIZE_START);
    let mut reply = Reply::new(MSIZE_START);
    while let Some(frame) = frames.next(&mut stream)? {
        let (number, tag) = (frame.number, frame.tag);
        let request = Request::parse(number, frame.body)?;
        if server.msize().is_none() && number != kind::VERSION {
            return Err(FolderError::NoVersion { number });
        }
        let message = answer(&mut server, number, tag, &request, &mut reply)?;
        stream.write_all(message).map_err(FolderError::Stream)?;
        if let (kind::VERSION, Some(msize)) = (number, server.msize()) {
            frames.resize(msize);
            reply.resize(msize);
        }
    }
    Ok(())
}

/// Carries out one request and builds the message that answers it.
fn answer<'a>(
    server: &mut Server,
    number: u8,
    tag: u16,
    request: &Request<'_>,
    reply: &'a mut Reply,
) -> Result<&'a [u8], FolderError> {
    reply.reset();
    let errno = match server.handle(request, reply) {
        Ok(()) if !reply.overflowed() => return Ok(reply.message(number.wrapping_add(1), tag)),
        Ok(()) => rustix::io::Errno::OVERFLOW,
        Err(server::Failure::Errno(errno)) => errno,
        Err(server::Failure::Fatal(error)) => return Err(error),
    };
    reply.reset();
    reply.u32(errno.raw_os_error() as u32);
    Ok(reply.message(kind::RLERROR, tag))
}
