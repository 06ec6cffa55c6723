//! How fast a cell may move bytes: a bucket that fills with time.

use std::time::Instant;

/// The bucket holds what comes in in a fifth of a second.
const DEPTH_DIVISOR: u64 = 5;
/// Never less than this, or a slow cell would not move a whole packet.
const DEPTH_BYTES_MIN: u64 = 16 << 10;

/// Bytes that may be moved now.
#[derive(Debug)]
pub struct Rate {
    /// Bytes a second; `None` is no limit.
    limit: Option<u64>,
    left: u64,
    filled: Instant,
}

impl Rate {
    pub fn new(limit: Option<u64>, now: Instant) -> Self {
        Self { limit, left: limit.map_or(0, depth), filled: now }
    }

    /// Adds what time has brought.
    pub fn fill(&mut self, now: Instant) {
        let Some(limit) = self.limit else { return };
        let passed = now.saturating_duration_since(self.filled).as_micros() as u64;
        let gained = limit.saturating_mul(passed) / 1_000_000;
        if gained > 0 {
            self.left = self.left.saturating_add(gained).min(depth(limit));
            self.filled = now;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.limit.is_some() && self.left == 0
    }

    /// How many of `wanted` bytes may be moved.
    pub fn share(&self, wanted: usize) -> usize {
        match self.limit {
            Some(_) => wanted.min(usize::try_from(self.left).unwrap_or(usize::MAX)),
            None => wanted,
        }
    }

    pub fn spend(&mut self, bytes: usize) {
        if self.limit.is_some() {
            self.left = self.left.saturating_sub(bytes as u64);
        }
    }
}

fn depth(limit: u64) -> u64 {
    (limit / DEPTH_DIVISOR).max(DEPTH_BYTES_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn no_limit_is_never_empty() {
        let mut rate = Rate::new(None, Instant::now());
        rate.spend(usize::MAX);
        assert!(!rate.is_empty());
        assert_eq!(rate.share(1 << 40), 1 << 40);
    }

    #[test]
    fn a_limit_is_kept_over_time() {
        let start = Instant::now();
        let mut rate = Rate::new(Some(1_000_000), start);
        let mut moved = 0;
        for millisecond in 0..2000 {
            rate.fill(start + Duration::from_millis(millisecond));
            let share = rate.share(1 << 20);
            rate.spend(share);
            moved += share;
        }
        assert!((2_000_000..2_300_000).contains(&moved), "{moved}");
        assert!(rate.is_empty());
    }
}
