//! What the vsock device counts.

use crate::devices::metrics::counted;

counted! {
    /// Counters of the vsock device.
    VsockMetrics over transport {
        /// Streams opened, by either side.
        opened,
        /// Streams ended, in whatever way.
        closed,
        /// Streams refused: no listener, too many, or the device not ready.
        refused,
        /// Payload bytes from the guest.
        from_guest_bytes,
        /// Payload bytes to the guest.
        to_guest_bytes,
        /// Packets with a bad header, without a stream, or against the protocol.
        bad_packets,
        /// Resets not sent because too many were waiting already.
        dropped_resets,
    }
}
