//! What a console counts.

use crate::devices::metrics::counted;

counted! {
    /// Counters of one console.
    ConsoleMetrics over transport {
        /// Bytes that reached the sink.
        output_bytes,
        /// Bytes past the limit, or that the sink refused.
        dropped_bytes,
        /// Bytes the guest was given to read.
        input_bytes,
        /// Times the sink failed.
        sink_errors,
    }
}
