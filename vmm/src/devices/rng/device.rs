//! The entropy device itself.

use std::sync::Arc;

use super::RngMetrics;
use crate::devices::metrics::TransportMetrics;
use crate::devices::sys;
use crate::devices::transport::buffers::Chain;
use crate::devices::transport::{Device, Io};

/// The most random bytes for one request, whatever its size: 4 KiB cost the
/// host about 10 us.
const REQUEST_BYTES_MAX: usize = 4096;

/// A virtio-rng device.
pub(crate) struct Rng {
    metrics: Arc<RngMetrics>,
}

impl Rng {
    pub fn new(metrics: Arc<RngMetrics>) -> Self {
        Self { metrics }
    }

    fn request(&self, mut chain: Chain<'_>) -> u32 {
        let wanted = chain.writable.take(REQUEST_BYTES_MAX);
        let mut given = 0;
        for slice in wanted.slices() {
            match sys::random(slice) {
                Ok(bytes) => given += bytes,
                Err(_) => break,
            }
        }
        if given == 0 {
            self.metrics.errors.inc();
        }
        self.metrics.bytes.add(given as u64);
        given as u32
    }
}

impl Device for Rng {
    fn queues(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        0
    }

    fn config(&self) -> &[u8] {
        &[]
    }

    fn transport(&self) -> Arc<TransportMetrics> {
        self.metrics.transport.clone()
    }

    fn queue_event(&mut self, index: usize, io: &mut Io<'_, '_>) {
        if let Some(ring) = io.rings.get_mut(index) {
            ring.serve(io.mem, |chain| self.request(chain));
        }
    }
}
