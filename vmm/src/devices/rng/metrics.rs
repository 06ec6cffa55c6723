//! What the entropy device counts.

use std::sync::Arc;

use crate::devices::metrics::{Counter, TransportMetrics};

/// Counters of the entropy device.
#[derive(Debug, Default)]
pub struct RngMetrics {
    /// Connection and rings.
    pub transport: Arc<TransportMetrics>,
    /// Random bytes given.
    pub bytes: Counter,
    /// Requests that got nothing.
    pub errors: Counter,
}
