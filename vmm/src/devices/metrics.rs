//! Counters that other threads may read while the device thread adds to them.

use std::sync::atomic::{AtomicU64, Ordering};

/// A count that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// The count now; counters are not read at one common moment.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn inc(&self) {
        self.add(1);
    }
}

/// What every device counts: its connection and its rings.
#[derive(Debug, Default)]
pub struct TransportMetrics {
    /// Frontends that connected (0 or 1).
    pub connected: Counter,
    /// Frontends that went away again (0 or 1).
    pub disconnected: Counter,
    /// Vhost-user messages that were refused or broke the protocol.
    pub control_faults: Counter,
    /// Doorbells from the guest.
    pub kicks: Counter,
    /// Used-ring signals sent to the guest.
    pub interrupts: Counter,
    /// Descriptor chains taken from the rings and well-formed.
    pub chains: Counter,
    /// Descriptor chains refused: bad address, order, loop or length.
    pub malformed_chains: Counter,
    /// Rings that were stopped because the ring itself was broken.
    pub ring_faults: Counter,
}
