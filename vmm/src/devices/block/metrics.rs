//! What a disk counts.

use crate::devices::metrics::counted;

counted! {
    /// Counters of one disk.
    BlockMetrics over transport {
        /// Requests of every kind.
        requests,
        /// Bytes the guest read.
        read_bytes,
        /// Bytes the guest wrote.
        written_bytes,
        /// Bytes discarded or zeroed.
        erased_bytes,
        /// Flushes that reached the file.
        flushes,
        /// Requests answered with an error.
        errors,
    }
}
