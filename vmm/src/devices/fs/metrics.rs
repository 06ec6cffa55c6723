//! What a folder's device counts; the folder itself counts requests.

use crate::devices::metrics::counted;

counted! {
    /// Counters of a folder's device.
    FsMetrics over transport {}
}
