//! What a network device counts.

use crate::devices::metrics::counted;

counted! {
    /// Counters of a network device.
    NetMetrics over transport {
        /// Packets taken from the guest.
        sent_packets,
        /// Their bytes.
        sent_bytes,
        /// Packets given to the guest.
        received_packets,
        /// Their bytes.
        received_bytes,
        /// Frames of the guest that hold no IP packet or are too long.
        dropped_frames,
    }
}
