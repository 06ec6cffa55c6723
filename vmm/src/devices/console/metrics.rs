//! What a console counts.

use std::sync::Arc;

use crate::devices::metrics::{Counter, TransportMetrics};

/// Counters of one console.
#[derive(Debug, Default)]
pub struct ConsoleMetrics {
    /// Connection and rings.
    pub transport: Arc<TransportMetrics>,
    /// Bytes that reached the sink.
    pub output_bytes: Counter,
    /// Bytes past the limit, or that the sink refused.
    pub dropped_bytes: Counter,
    /// Bytes the guest was given to read.
    pub input_bytes: Counter,
    /// Times the sink failed.
    pub sink_errors: Counter,
}
