//! virtio-vsock: streams between guest and host (virtio 1.2, 5.10).
//!
//! ```text
//! host program <-- socketpair --> Connection <-- packets, credit --> guest socket
//! ```
//! `packet` is the header, `connection` one stream with its flow control,
//! `table` all streams and what the guest may do to them, `device` moves packets
//! between the table and the rings, `handle` opens streams from other threads.

mod connection;
mod device;
mod handle;
mod metrics;
mod packet;
mod table;

use std::collections::HashMap;
use std::os::unix::net::UnixStream;

pub(crate) use device::Vsock;
pub use handle::{StreamName, Successor, VsockHandle};
pub use metrics::VsockMetrics;

/// The guest's context id.
pub const GUEST_CID: u64 = 3;
/// The host's context id (`VMADDR_CID_HOST`).
pub const HOST_CID: u64 = 2;
/// Streams alive at once unless the configuration says otherwise.
pub const CONNECTIONS_MAX: usize = 256;

/// Takes the host's end of the stream that the guest opened; called on the device
/// thread, so it must not wait.
pub type VsockListener = Box<dyn FnOnce(UnixStream) + Send>;

/// What the guest may reach.
pub struct VsockConfig {
    /// Host ports the guest may connect to, each once: by the guest's init, before
    /// programs run. Every other port is refused, and so is a port that was connected
    /// to. All other streams are thus the host's.
    pub listeners: HashMap<u32, VsockListener>,
    /// Streams alive at once, in both directions together. Each holds up to
    /// 256 KiB for a host program that does not read.
    pub connections_max: usize,
}

impl Default for VsockConfig {
    fn default() -> Self {
        Self { listeners: HashMap::new(), connections_max: CONNECTIONS_MAX }
    }
}
