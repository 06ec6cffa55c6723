//! A revocation flag that can be tested without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Says whether one capability still holds. Clones share the same flag, also across threads.
///
/// Once it is off it never comes back: a slot's next life has a token of its own.
#[derive(Clone, Debug)]
pub struct Live(Arc<AtomicBool>);

impl Live {
    /// A token that is on.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    /// Whether the capability still holds.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Ends it, for every clone.
    pub fn end(&self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Default for Live {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ending_one_clone_ends_all() {
        let token = Live::new();
        let other = token.clone();
        assert!(other.is_live());
        token.end();
        assert!(!other.is_live());
    }
}
