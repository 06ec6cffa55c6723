//! What can go wrong for the caller of the devices; guest faults are counted
//! in the metrics instead.

use std::io;

/// A device could not be made or its loop could not run.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The memory file can shrink under the mapping, which would be a `SIGBUS`
    /// in the device thread.
    #[error(
        "the guest memory file is not sealed against shrinking: make it with memfd_create(MFD_ALLOW_SEALING) and add F_SEAL_SHRINK"
    )]
    MemoryNotSealed,
    /// A host system call failed while a device was made.
    #[error("cannot {what}: {source}")]
    Host {
        /// The step, as a verb phrase.
        what: &'static str,
        /// The host's answer.
        source: io::Error,
    },
    /// The event loop could not be made or broke.
    #[error("the device event loop failed: {0}")]
    Loop(#[from] event_manager::Error),
    /// The block file is too small to be a disk.
    #[error("the disk file has {bytes} bytes; a disk needs at least one sector of 512")]
    DiskTooSmall {
        /// The file's length in bytes.
        bytes: u64,
    },
    /// It is larger than any file behind another disk may be, or there were too many of them.
    #[error("the disk file with {bytes} bytes has no place behind the guest's disk")]
    NoWindow {
        /// The file's length in bytes.
        bytes: u64,
    },
}

impl DeviceError {
    /// A [`DeviceError::Host`] that names the step; for `map_err`.
    pub(crate) fn host<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Host { what, source: source.into() }
    }
}
