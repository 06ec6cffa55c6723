//! What a network device counts.

use std::sync::Arc;

use crate::devices::metrics::{Counter, TransportMetrics};

/// Counters of a network device.
#[derive(Debug, Default)]
pub struct NetMetrics {
    /// Connection and rings.
    pub transport: Arc<TransportMetrics>,
    /// Packets taken from the guest.
    pub sent_packets: Counter,
    /// Their bytes.
    pub sent_bytes: Counter,
    /// Packets given to the guest.
    pub received_packets: Counter,
    /// Their bytes.
    pub received_bytes: Counter,
    /// Frames of the guest that hold no IP packet or are too long.
    pub dropped_frames: Counter,
}
