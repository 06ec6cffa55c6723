//! The time slice that each worker runs. A thread that queues a call looks here for one to shorten.
//!
//! Each worker has a lock of its own here, which nobody else takes while calls are short: so it may
//! go on with its tenant's next call without the one that all share.

use crate::sched::task::Task;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The part of the longest slice that a time slice has at least when another comes. To take the CPU
/// costs some 25 us; and earlier than this, signals more often find host code, and come in vain.
const SHORTENED: u64 = 24;

/// A value in cache lines of its own: a thread that reads its neighbours does not wait for it.
/// Processors fetch two lines together.
#[repr(align(128))]
#[derive(Default)]
pub(super) struct CachePadded<T>(pub T);

/// A time slice that has begun.
struct Running {
    task: Arc<Task>,
    since_ns: u64,
    /// Nothing waited when it was taken, and so far nothing does: it has no end.
    endless: bool,
    /// Made short for one that came.
    short: bool,
}

/// One a worker.
pub(super) struct RunningSlices(Box<[CachePadded<Mutex<Option<Running>>>]>);

impl RunningSlices {
    pub fn new(workers: usize) -> Self {
        Self(std::iter::repeat_with(CachePadded::default).take(workers).collect())
    }

    fn of(&self, worker: usize) -> Option<MutexGuard<'_, Option<Running>>> {
        let CachePadded(slice) = self.0.get(worker)?;
        Some(slice.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// `worker` runs `task` from now on, without end if nothing waits.
    pub fn begin(&self, worker: usize, task: &Arc<Task>, since_ns: u64, endless: bool) {
        let Some(mut slice) = self.of(worker) else { return };
        let task = Arc::clone(task);
        let before = slice.replace(Running { task, since_ns, endless, short: false });
        drop(slice);
        // A task takes a while to free, if this was its last holder.
        drop(before);
    }

    /// The same with the next call in a row; false if the time slice was shortened or ended
    /// meanwhile, which may not have reached the call before.
    pub fn go_on(&self, worker: usize, task: &Arc<Task>, since_ns: u64) -> bool {
        let Some(mut slice) = self.of(worker) else { return false };
        let Some(running) = slice.as_mut().filter(|running| !running.short) else { return false };
        running.since_ns = since_ns;
        running.endless = false;
        let before = std::mem::replace(&mut running.task, Arc::clone(task));
        drop(slice);
        drop(before);
        true
    }

    /// `worker` runs nothing.
    pub fn end(&self, worker: usize) {
        let before = self.of(worker).and_then(|mut slice| slice.take());
        drop(before);
    }

    /// Ends all of them.
    pub fn close(&self) {
        for running in (0..self.0.len()).filter_map(|worker| self.of(worker)?.take()) {
            running.task.cancel.shorten_slice(0, true);
        }
    }

    /// Which time slice ends sooner because something was queued, and when: one without end after a
    /// slice, or one that is `behind` what was queued, soon. And whether it had no end.
    pub fn shorten(
        &self,
        behind: impl Fn(&Task) -> bool,
        slice_ns: u64,
    ) -> Option<(Arc<Task>, u64, bool)> {
        let since = |worker| {
            let slice = self.of(worker)?;
            let slice = slice.as_ref().filter(|slice| !slice.short)?;
            (slice.endless || behind(&slice.task)).then_some(slice.since_ns)
        };
        let workers = (0..self.0.len()).filter_map(|worker| Some((since(worker)?, worker)));
        let (_, worker) = workers.min()?;
        let mut slice = self.of(worker)?;
        let slice = slice.as_mut()?;
        slice.short = behind(&slice.task);
        let was_endless = std::mem::take(&mut slice.endless);
        let span_ns = if slice.short { slice_ns / SHORTENED } else { slice_ns };
        Some((Arc::clone(&slice.task), slice.since_ns.saturating_add(span_ns), was_endless))
    }
}
