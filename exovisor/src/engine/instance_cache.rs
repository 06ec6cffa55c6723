//! How many instances of one engine's modules are kept for their next calls, and which go first.

use crate::memory::dirty_pages;
use crate::policy::Policy;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A module of which instances may be kept.
pub(crate) trait Evictable: Send + Sync {
    /// Whether the cache knows that instances of it are kept.
    fn is_listed(&self) -> &AtomicBool;

    /// Drops the instances that are kept of it.
    fn evict(&self);
}

/// The instances that are kept of all modules of one engine.
pub(crate) struct InstanceCache {
    pub max: usize,
    /// Workers that a scheduler has unless it is told otherwise.
    pub workers: usize,
    /// Bytes of a memory that are written over at most; 0 where nothing is kept.
    pub bytes_max: usize,
    /// Instances that are kept, and those that were and serve a call.
    pub(crate) count: Arc<AtomicUsize>,
    /// Modules of which some may be kept, the longest known first.
    modules: Mutex<VecDeque<Weak<dyn Evictable>>>,
}

impl InstanceCache {
    /// Keeps no more than half of a pool, and nothing where stores have arenas of their own or
    /// first contents are copied. Where the host does not say what was written to, as in a jail,
    /// only what has a small memory is made as new ([`crate::memory::dirty_pages`]).
    pub fn new(policy: &Policy) -> Self {
        let pool = policy.pool.as_ref().filter(|_| policy.copy_on_write);
        // What is asked is opened here, before anything runs that could be in the way.
        dirty_pages::can_be_found();
        let max = pool.map_or(0, |pool| pool.kept_max() as usize);
        Self {
            max,
            workers: std::thread::available_parallelism().map_or(1, Into::into),
            bytes_max: pool.filter(|_| max > 0).map_or(0, |pool| pool.keep_resident_bytes),
            count: Arc::default(),
            modules: Mutex::default(),
        }
    }

    /// A slot for one more instance, if need be another module's.
    pub fn slot(&self) -> Option<CacheSlot> {
        let one_more = |count| (count < self.max).then_some(count + 1);
        let take = || {
            let taken = self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
            taken.ok().map(|_| CacheSlot(Arc::clone(&self.count)))
        };
        take().or_else(|| {
            self.evict_first();
            take()
        })
    }

    /// Drops what is kept of the module that is the longest known; false if there is none.
    fn evict_first(&self) -> bool {
        let Some(first) = self.modules().pop_front() else { return false };
        if let Some(module) = first.upgrade() {
            module.is_listed().store(false, Ordering::Release);
            module.evict();
        }
        true
    }

    /// Notes that something is kept of a module, so that it can be dropped for others' sake.
    pub fn list<M: Evictable + 'static>(&self, module: &Arc<M>) {
        // Most often it is known, which a look tells without taking the cache line from others.
        let listed = module.is_listed();
        if !listed.load(Ordering::Acquire) && !listed.swap(true, Ordering::AcqRel) {
            let mut modules = self.modules();
            modules.retain(|module| module.strong_count() > 0);
            let module = Arc::downgrade(module);
            modules.push_back(module as Weak<dyn Evictable>);
        }
    }

    /// Drops all that is kept.
    pub fn evict_all(&self) {
        while self.evict_first() {}
    }

    fn modules(&self) -> MutexGuard<'_, VecDeque<Weak<dyn Evictable>>> {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to keep one instance, for as long as this lives.
pub(crate) struct CacheSlot(Arc<AtomicUsize>);

impl Drop for CacheSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
