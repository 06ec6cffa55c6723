//! What a folder's device counts; the folder itself counts requests.

use std::sync::Arc;

use crate::devices::metrics::TransportMetrics;

/// Counters of a folder's device.
#[derive(Debug, Default)]
pub struct FsMetrics {
    /// Connection and rings.
    pub transport: Arc<TransportMetrics>,
}
