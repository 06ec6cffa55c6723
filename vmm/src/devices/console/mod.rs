//! virtio-console with one port (virtio 1.2, 5.3): `/dev/hvc0` of the guest.

mod device;
mod metrics;

use std::io::Write;
use std::os::unix::net::UnixStream;

pub(crate) use device::Console;
pub use metrics::ConsoleMetrics;

/// Where a console leads.
pub struct ConsoleConfig {
    /// Takes what the guest prints; called on the device thread, so it must not
    /// wait for long.
    pub sink: Box<dyn Write + Send>,
    /// Bytes the sink gets at most; what follows is counted and dropped.
    pub output_bytes_max: u64,
    /// What the guest reads, if it is to read anything. It gets it after it has
    /// printed its first byte; before, its driver would drop it.
    pub input: Option<UnixStream>,
}
