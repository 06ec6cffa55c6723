//! virtio-blk over a file, or pieces of several (virtio 1.2, section 5.2).
//!
//! Reads, writes, flush, identity, discard and write-zeroes; the last two punch
//! holes. A full host disk is an I/O error for the guest and nothing more; `reserve` sees to it
//! that it is full for the guest before it is for the host.

mod contents;
mod device;
mod metrics;
mod request;
mod reserve;
mod windows;

pub use contents::{Contents, Pages};
pub(crate) use device::Block;
pub use metrics::BlockMetrics;
pub use windows::{Window, Windows};

/// What a disk is made of.
#[derive(Debug)]
pub struct BlockConfig {
    /// What it holds. Its length when the device is made is the disk's size.
    pub contents: Contents,
    /// Refuse every request that would change it. What can be changed is one file.
    pub read_only: bool,
    /// What the guest sees as the serial number; the first 20 bytes count.
    pub id: String,
    /// More files behind it, which come and go; only for a disk that is read-only.
    pub windows: Option<Windows>,
}
