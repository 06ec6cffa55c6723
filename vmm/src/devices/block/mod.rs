//! virtio-blk over one file (virtio 1.2, section 5.2).
//!
//! Reads, writes, flush, identity, discard and write-zeroes; the last two punch
//! holes. A full host disk is an I/O error for the guest and nothing more.

mod device;
mod metrics;
mod request;
mod windows;

use std::fs::File;

pub(crate) use device::Block;
pub use metrics::BlockMetrics;
pub use windows::{Window, Windows};

/// What a disk is made of.
#[derive(Debug)]
pub struct BlockConfig {
    /// The contents. Its length when the device is made is the disk's size,
    /// rounded down to whole sectors of 512 bytes; it must not shrink.
    pub file: File,
    /// Refuse every request that would change the file.
    pub read_only: bool,
    /// What the guest sees as the serial number; the first 20 bytes count.
    pub id: String,
    /// More files behind it, which come and go; only for a disk that is read-only.
    pub windows: Option<Windows>,
}
