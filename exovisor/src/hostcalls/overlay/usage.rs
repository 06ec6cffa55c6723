//! What private files hold, counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use wasmtime_wasi::p1::types::Errno;

/// Bytes held, and how many may be.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    used: Arc<AtomicU64>,
    bytes_max: u64,
}

impl Budget {
    pub fn new(used: &Arc<AtomicU64>, bytes_max: u64) -> Self {
        Self { used: Arc::clone(used), bytes_max }
    }

    /// Takes `bytes` until the charge is dropped.
    ///
    /// # Errors
    /// [`Errno::Nospc`].
    pub fn charge(&self, bytes: u64) -> Result<Charge, Errno> {
        let mut charge = Charge { used: Arc::clone(&self.used), bytes: 0 };
        charge.grow(self, bytes)?;
        Ok(charge)
    }
}

/// Bytes that are held.
#[derive(Debug)]
pub(crate) struct Charge {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Charge {
    /// # Errors
    /// [`Errno::Nospc`]; then nothing changed.
    pub fn grow(&mut self, budget: &Budget, bytes: u64) -> Result<(), Errno> {
        let more = |used: u64| used.checked_add(bytes).filter(|used| *used <= budget.bytes_max);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .map_err(|_| Errno::Nospc)?;
        self.bytes += bytes;
        Ok(())
    }

    pub fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.bytes -= bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_can_be_taken_again() {
        let used = Arc::default();
        let budget = Budget::new(&used, 100);
        let mut first = budget.charge(60).unwrap();
        assert!(budget.charge(41).is_err() && budget.charge(u64::MAX).is_err());
        first.grow(&budget, 40).unwrap();
        first.shrink(50);
        let second = budget.charge(50).unwrap();
        drop(first);
        assert_eq!(used.load(Ordering::Relaxed), 50);
        drop(second);
        assert_eq!(used.load(Ordering::Relaxed), 0);
    }
}
