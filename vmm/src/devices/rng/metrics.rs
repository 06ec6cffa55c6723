//! What the entropy device counts.

use crate::devices::metrics::counted;

counted! {
    /// Counters of the entropy device.
    RngMetrics over transport {
        /// Random bytes given.
        bytes,
        /// Requests that got nothing.
        errors,
    }
}
