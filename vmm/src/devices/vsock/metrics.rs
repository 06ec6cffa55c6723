//! What the vsock device counts.

use std::sync::Arc;

use crate::devices::metrics::{Counter, TransportMetrics};

/// Counters of the vsock device.
#[derive(Debug, Default)]
pub struct VsockMetrics {
    /// Connection to the frontend and rings.
    pub transport: Arc<TransportMetrics>,
    /// Streams opened, by either side.
    pub opened: Counter,
    /// Streams ended, in whatever way.
    pub closed: Counter,
    /// Streams refused: no listener, too many, or the device not ready.
    pub refused: Counter,
    /// Payload bytes from the guest.
    pub from_guest_bytes: Counter,
    /// Payload bytes to the guest.
    pub to_guest_bytes: Counter,
    /// Packets with a bad header, without a stream, or against the protocol.
    pub bad_packets: Counter,
    /// Resets not sent because too many were waiting already.
    pub dropped_resets: Counter,
}
