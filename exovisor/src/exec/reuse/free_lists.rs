//! Lists of a module's kept instances, one a worker. What a worker used is in its processor's
//! cache, and goes to the same worker's next call. A store, an instance and their pages are some
//! tens of cache lines. To move one of these lines between processors takes as long as a tenth of a
//! short call.

use crate::exec::reuse::PooledInstance;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Kept by one worker.
const KEPT_MAX: usize = 4;
/// Workers beyond these share lists with others.
const LISTS_MAX: usize = 16;

thread_local! {
    static WORKER: Cell<usize> = const { Cell::new(0) };
}

/// Says which of its scheduler's workers the calling thread is.
pub(crate) fn set_worker(index: usize) {
    WORKER.set(index);
}

/// Two cache lines, which processors fetch together.
#[repr(align(128))]
#[derive(Default)]
struct FreeList(Mutex<Vec<PooledInstance>>);

impl FreeList {
    fn kept(&self) -> MutexGuard<'_, Vec<PooledInstance>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One list a worker.
pub(super) struct FreeLists(Box<[FreeList]>);

impl FreeLists {
    pub fn new(count: usize) -> Self {
        let count = count.clamp(1, LISTS_MAX);
        Self(std::iter::repeat_with(FreeList::default).take(count).collect())
    }

    /// From the calling worker's list first.
    fn near(&self) -> impl Iterator<Item = &FreeList> {
        let first = WORKER.get() % self.0.len().max(1);
        let (before, from) = self.0.split_at(first);
        from.iter().chain(before)
    }

    /// One of the calling worker's, or of another if it has none.
    pub fn take(&self) -> Option<PooledInstance> {
        self.near().find_map(|list| list.kept().pop())
    }

    /// Keeps it for the calling worker; answers with it if there are enough.
    pub fn keep(&self, made: PooledInstance) -> Option<PooledInstance> {
        let Some(list) = self.near().next() else { return Some(made) };
        let mut kept = list.kept();
        if kept.len() >= KEPT_MAX {
            return Some(made);
        }
        kept.push(made);
        None
    }

    /// All of them.
    pub fn release(&self) -> Vec<PooledInstance> {
        self.0.iter().flat_map(|list| std::mem::take(&mut *list.kept())).collect()
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.0.iter().map(|list| list.kept().len()).sum()
    }
}
