//! virtio-fs (virtio 1.2, 5.11): FUSE requests of the guest for one folder of the host.
//!
//! The device is in a process of its own, which serves that folder alone. What it is told besides
//! comes by a socket: that access ends ([`END`]), which it confirms; or that whoever held the other
//! end is gone.

mod device;
mod exchange;
mod metrics;

use std::os::unix::net::UnixStream;

use exocell_folders::Server;

pub(crate) use device::Fs;
pub use exchange::Message;
pub use metrics::FsMetrics;

/// The word by which access ends, and by which that is confirmed.
pub const END: u8 = b'E';
/// The longest tag, in bytes (virtio 1.2, 5.11.4).
pub const TAG_LEN_MAX: usize = 36;

/// What a folder's device is made of.
pub struct FsConfig {
    pub server: Server,
    /// By which the guest mounts it.
    pub tag: String,
    /// From which it is told of the end.
    pub control: UnixStream,
    /// Called when the other end of that is gone.
    pub gone: Box<dyn FnMut() + Send>,
}
