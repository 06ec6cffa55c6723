//! Counters that other threads may read while the device thread adds to them.
//!
//! [`counted!`] declares a device's counters, so that none is left out of what is reported.

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

/// What a device counts.
pub trait Metrics: Send + Sync {
    /// Tells `to` the name and the count of each counter.
    fn each(&self, to: &mut dyn FnMut(&'static str, u64));
}

/// Declares a struct of counters, after those of its connection if it has one, and reports them all.
macro_rules! counted {
    (@transport $self:ident $to:ident) => {};
    (@transport $self:ident $to:ident $transport:ident) => {
        $crate::devices::metrics::Metrics::each(&*$self.$transport, $to);
    };
    (
        $(#[$about:meta])*
        $name:ident $(over $transport:ident)? {
            $($(#[$what:meta])* $field:ident,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Debug, Default)]
        pub struct $name {
            $(
                /// Connection and rings.
                pub $transport: std::sync::Arc<$crate::devices::metrics::TransportMetrics>,
            )?
            $($(#[$what])* pub $field: $crate::devices::metrics::Counter,)*
        }

        impl $crate::devices::metrics::Metrics for $name {
            fn each(&self, to: &mut dyn FnMut(&'static str, u64)) {
                counted!(@transport self to $($transport)?);
                $(to(stringify!($field), self.$field.get());)*
            }
        }
    };
}
pub(crate) use counted;

counted! {
    /// What every device counts: its connection and its rings.
    TransportMetrics {
        /// Frontends that connected (0 or 1).
        connected,
        /// Frontends that went away again (0 or 1).
        disconnected,
        /// Vhost-user messages that were refused or broke the protocol.
        control_faults,
        /// Doorbells from the guest.
        kicks,
        /// Used-ring signals sent to the guest.
        interrupts,
        /// Descriptor chains taken from the rings and well-formed.
        chains,
        /// Descriptor chains refused: bad address, order, loop or length.
        malformed_chains,
        /// Rings that were stopped because the ring itself was broken.
        ring_faults,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_counters_are_told_by_name() {
        counted! {
            /// A device.
            Both over transport {
                /// One of its own.
                own,
            }
        }
        let both = Both::default();
        both.transport.kicks.add(2);
        both.own.inc();
        let mut told = std::collections::BTreeMap::new();
        both.each(&mut |name, count| {
            told.insert(name, count);
        });
        assert_eq!((told.len(), told["kicks"], told["own"]), (9, 2, 1));
    }
}
