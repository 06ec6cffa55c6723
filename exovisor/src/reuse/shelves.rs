//! Where what is kept of a module lies: what a worker used is in its processor's cache, and goes to
//! the same worker's next call. From one processor to another a store, an instance and their pages
//! are some tens of cache lines, of which each takes as long as a tenth of a short call.

use crate::reuse::Made;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Kept by one worker.
const KEPT_MAX: usize = 4;
/// Workers beyond share shelves with others.
const SHELVES_MAX: usize = 16;

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
struct Shelf(Mutex<Vec<Made>>);

impl Shelf {
    fn kept(&self) -> MutexGuard<'_, Vec<Made>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One shelf a worker.
pub(super) struct Shelves(Box<[Shelf]>);

impl Shelves {
    pub fn new(count: usize) -> Self {
        let count = count.clamp(1, SHELVES_MAX);
        Self(std::iter::repeat_with(Shelf::default).take(count).collect())
    }

    /// From the calling worker's shelf first.
    fn near(&self) -> impl Iterator<Item = &Shelf> {
        let first = WORKER.get() % self.0.len().max(1);
        let (before, from) = self.0.split_at(first);
        from.iter().chain(before)
    }

    /// One of the calling worker's, or of another if it has none.
    pub fn take(&self) -> Option<Made> {
        self.near().find_map(|shelf| shelf.kept().pop())
    }

    /// Keeps it for the calling worker; answers with it if there are enough.
    pub fn keep(&self, made: Made) -> Option<Made> {
        let Some(shelf) = self.near().next() else { return Some(made) };
        let mut kept = shelf.kept();
        if kept.len() >= KEPT_MAX {
            return Some(made);
        }
        kept.push(made);
        None
    }

    /// All of them.
    pub fn release(&self) -> Vec<Made> {
        self.0.iter().flat_map(|shelf| std::mem::take(&mut *shelf.kept())).collect()
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.0.iter().map(|shelf| shelf.kept().len()).sum()
    }
}
