//! What a disk counts.

use std::sync::Arc;

use crate::devices::metrics::{Counter, TransportMetrics};

/// Counters of one disk.
#[derive(Debug, Default)]
pub struct BlockMetrics {
    /// Connection and rings.
    pub transport: Arc<TransportMetrics>,
    /// Requests of every kind.
    pub requests: Counter,
    /// Bytes the guest read.
    pub read_bytes: Counter,
    /// Bytes the guest wrote.
    pub written_bytes: Counter,
    /// Bytes discarded or zeroed.
    pub erased_bytes: Counter,
    /// Flushes that reached the file.
    pub flushes: Counter,
    /// Requests answered with an error.
    pub errors: Counter,
}
