//! A worker thread: takes tasks and gives each a time slice.

use crate::exec::outcome::Outcome;
use crate::exec::reuse::set_worker;
use crate::memory::call_arena::ThreadCache;
use crate::preempt::cancel::CancelReason;
use crate::preempt::{self, Allowance, TimeSlice, Timer};
use crate::sched::shared::{Ending, Next, Shared, Spent, Verdict};
use crate::sched::task::{Done, Report, hibernate};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

/// Calls that are hibernated together.
const HIBERNATE_TOGETHER: usize = 16;

/// Runs until the scheduler closes. `ready` is told whether the thread can preempt.
pub(super) fn run(
    worker: usize,
    shared: &Shared,
    reactor: &tokio::runtime::Handle,
    ready: impl FnOnce(std::io::Result<()>),
) {
    let timer = preempt::unblock().and_then(|()| Timer::new());
    let _timer = match timer {
        Ok(timer) => {
            ready(Ok(()));
            timer
        }
        Err(error) => return ready(Err(error)),
    };
    set_worker(worker);
    let _reactor = reactor.enter();
    let _cache = ThreadCache::begin();
    let thread = preempt::this_thread();
    let mut clock = Clock::start();
    let (mut spent, mut preempted) = (None, Vec::with_capacity(HIBERNATE_TOGETHER));
    while let Some(next) = shared.next(worker, spent.take()) {
        if next.waited {
            clock = Clock::start();
        }
        clock.begin(next.now_ns);
        let SliceEnd { verdict, mut used_ns, notify } = run_slice(&next, thread, &mut clock);
        if let Some((done, report)) = notify {
            shared.between_slices(|| done(report));
        }
        let Next { task, slice_ns, crowded, before, .. } = next;
        if crowded && matches!(verdict, Verdict::Again) {
            preempted.push(Arc::clone(&task));
            if preempted.len() == HIBERNATE_TOGETHER {
                let begun_ns = preempt::now_ns();
                hibernate(&preempted);
                preempted.clear();
                used_ns += preempt::now_ns().saturating_sub(begun_ns);
            }
        }
        spent = Some(Spent { task, slice_ns, used_ns, crowded, verdict, before });
    }
}

/// CPU time, told mostly by the wall clock: to read a thread's CPU time is a system call of half a
/// microsecond, and the wall clock is read without one.
struct Clock {
    wall_ns: u64,
    cpu_ns: u64,
}

/// Slices between two looks of the timer while time slices end by themselves.
const TICK_SLICES: u64 = 4;
/// Time slices that took longer are measured exactly.
const EXACT_FROM_NS: u64 = 200_000;

impl Clock {
    fn start() -> Self {
        Self { wall_ns: preempt::now_ns(), cpu_ns: preempt::thread_cpu_ns() }
    }

    /// A time slice begins. What lies between this and the last reading is never long.
    fn begin(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.wall_ns) >= EXACT_FROM_NS {
            *self = Self::start();
        }
    }

    /// CPU time since `since_ns` of the wall clock, when the time slice began. While another
    /// program had the CPU, no tenant used it.
    fn used_ns(&mut self, since_ns: u64) -> u64 {
        let now = preempt::now_ns();
        let time_slice = now.saturating_sub(since_ns);
        if time_slice < EXACT_FROM_NS {
            return time_slice;
        }
        let cpu_now = preempt::thread_cpu_ns();
        let cpu = cpu_now.saturating_sub(self.cpu_ns);
        let before = since_ns.saturating_sub(self.wall_ns);
        *self = Self { wall_ns: now, cpu_ns: cpu_now };
        cpu.saturating_sub(before).min(time_slice)
    }
}

struct SliceEnd {
    verdict: Verdict,
    used_ns: u64,
    /// Whom to tell what, if the call is over.
    notify: Option<(Done, Report)>,
}

/// One time slice, at most a slice long unless nothing waits.
fn run_slice(next: &Next, thread: i32, clock: &mut Clock) -> SliceEnd {
    let task = &next.task;
    let mut body = task.body();
    task.set_running();
    // Before there is a signal for it: the handler looks at its store and its stack.
    body.make_resident();
    task.cancel.runs_on(thread);
    let allowance = allowance(next);
    let waker = Waker::from(Arc::clone(task));
    let mut context = Context::from_waker(&waker);
    let time_slice = task.cancel.wasm().map(|wasm| TimeSlice::begin(wasm, next.now_ns, allowance));
    // Another came while it began.
    let is_over = time_slice.as_ref().is_some_and(|time_slice| time_slice.is_over);
    // A panic of a host function comes out here; it must not take the worker with it.
    let poll = (!is_over).then(|| catch_unwind(AssertUnwindSafe(|| body.poll(&mut context))));
    drop(time_slice);
    task.cancel.runs_on(0);
    let left = preempt::left();
    let used_ns = clock.used_ns(next.now_ns).saturating_add(task.cancel.take_elsewhere_ns());
    task.cpu_ns().fetch_add(used_ns, Ordering::Relaxed);
    task.cancel.leave_cpu(task.cpu_left_ns());
    let goes_on = |verdict| SliceEnd { verdict, used_ns, notify: None };
    let (outcome, results) = match poll {
        None => {
            task.preemptions.fetch_add(1, Ordering::Relaxed);
            return goes_on(Verdict::Again);
        }
        Some(Ok(Poll::Ready(done))) => done,
        Some(Ok(Poll::Pending)) if left => {
            task.preemptions.fetch_add(1, Ordering::Relaxed);
            return goes_on(Verdict::Again);
        }
        Some(Ok(Poll::Pending)) => return goes_on(Verdict::Parked),
        Some(Err(_)) => (Outcome::Trap("a host function failed".to_owned()), Vec::new()),
    };
    let verdict = Verdict::Done(Ending::from(&outcome));
    let notify = body.finish().map(|done| (done, task.report(outcome, results)));
    SliceEnd { verdict, used_ns, notify }
}

/// When the time slice is over; at once if its task is.
fn allowance(next: &Next) -> Allowance {
    let Next { task, slice_ns, now_ns, alone, watched, .. } = next;
    let left_ns = task.cpu_left_ns();
    if left_ns == 0 {
        task.cancel.request(CancelReason::CpuTime);
    }
    if *now_ns >= task.deadline_ns {
        task.cancel.request(CancelReason::Deadline);
    }
    let hard_ns = match task.cancel.is_over() {
        // It learns of its end at once, most likely: a signal is not worth it.
        true => now_ns.saturating_add(preempt::RETRY_NS),
        false => now_ns.saturating_add(left_ns).min(task.deadline_ns),
    };
    let slice_end = if *alone { preempt::NEVER } else { now_ns.saturating_add(*slice_ns) };
    let period_ns = if *watched { slice_ns.saturating_mul(TICK_SLICES) } else { preempt::NEVER };
    Allowance { due_ns: slice_end.min(hard_ns), hard_ns, period_ns }
}
