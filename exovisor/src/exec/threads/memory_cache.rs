//! Memories that an isolate has used and the next one of the same module can, with the instances
//! that were made on them.
//!
//! To map gigabytes of address space, to link a module to them and to unmap them again takes some
//! 40 us; to give back what was touched takes a few.

use crate::exec::reuse::PooledInstance;
use crate::exec::threads::template::Bound;
use crate::memory::zero::zero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Kept of one module.
const KEPT_MAX: usize = 4;
/// Kept in the process: each is three mappings and gigabytes of its address space.
const ALL_MAX: usize = 512;

static ALL: AtomicUsize = AtomicUsize::new(0);

#[derive(Default)]
pub(crate) struct MemoryCache(Mutex<Vec<Bound>>);

impl MemoryCache {
    /// One that may grow to `maximum` pages and no further.
    pub fn take(&self, maximum: u64) -> Option<Bound> {
        let mut kept = self.kept();
        let fits = |bound: &Bound| bound.memory.ty().maximum() == Some(maximum);
        let found = kept.iter().position(fits)?;
        ALL.fetch_sub(1, Ordering::Relaxed);
        Some(kept.swap_remove(found))
    }

    /// Keeps one that nobody uses any more, if it can be made as new: what has grown cannot
    /// shrink. False if it is not kept.
    pub fn keep(&self, bound: Bound, is_zero: bool) -> bool {
        let memory = &bound.memory;
        if memory.size() != memory.ty().minimum()
            || !(is_zero || zero(memory, 0..memory.data_size()))
        {
            return false;
        }
        let mut kept = self.kept();
        let one_more = |all| (all < ALL_MAX).then_some(all + 1);
        let room = kept.len() < KEPT_MAX
            && ALL.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok();
        if room {
            kept.push(bound);
        }
        room
    }

    /// All instances.
    pub fn release(&self) -> Vec<PooledInstance> {
        self.kept().iter_mut().flat_map(|bound| std::mem::take(&mut bound.idle)).collect()
    }

    #[cfg(test)]
    pub fn instances(&self) -> usize {
        self.kept().iter().map(|bound| bound.idle.len()).sum()
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Bound>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for MemoryCache {
    fn drop(&mut self) {
        let kept = self.kept().len();
        ALL.fetch_sub(kept, Ordering::Relaxed);
    }
}
