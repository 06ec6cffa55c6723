//! virtio-rng: the host's random numbers for the guest (virtio 1.2, 5.4).

mod device;
mod metrics;

pub(crate) use device::Rng;
pub use metrics::RngMetrics;
