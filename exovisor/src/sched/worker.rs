//! A worker thread: takes tasks and gives each a turn.

use crate::ending::Cause;
use crate::isolate::Outcome;
use crate::preempt::{self, Allowance, Timer, Turn};
use crate::reuse::set_worker;
use crate::rooms::Keeping;
use crate::sched::shared::{Ending, Next, Shared, Spent, Verdict};
use crate::sched::task::{Done, Report, rest};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

/// Calls that are made dormant together.
const REST_TOGETHER: usize = 16;

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
    let _room = Keeping::begin();
    let thread = preempt::this_thread();
    let mut clock = Clock::start();
    let (mut spent, mut resting) = (None, Vec::with_capacity(REST_TOGETHER));
    while let Some(next) = shared.next(worker, spent.take()) {
        if next.waited {
            clock = Clock::start();
        }
        clock.begin(next.now_ns);
        let TurnEnd { verdict, mut used_ns, notify } = turn(&next, thread, &mut clock);
        if let Some((done, report)) = notify {
            shared.between_turns(|| done(report));
        }
        let Next { task, slice_ns, crowded, before, .. } = next;
        if crowded && matches!(verdict, Verdict::Again) {
            resting.push(Arc::clone(&task));
            if resting.len() == REST_TOGETHER {
                let begun_ns = preempt::now_ns();
                rest(&resting);
                resting.clear();
                used_ns += preempt::now_ns().saturating_sub(begun_ns);
            }
        }
        spent = Some(Spent { task, slice_ns, used_ns, crowded, verdict, before });
    }
}

/// CPU time, told mostly by the wall clock: reading a thread's CPU time is a system call of half
/// a microsecond, the wall clock is none.
struct Clock {
    wall_ns: u64,
    cpu_ns: u64,
}

/// Slices between two looks of the timer while turns end by themselves.
const TICK_SLICES: u64 = 4;
/// Turns that took longer are measured exactly.
const EXACT_FROM_NS: u64 = 200_000;

impl Clock {
    fn start() -> Self {
        Self { wall_ns: preempt::now_ns(), cpu_ns: preempt::thread_cpu_ns() }
    }

    /// A turn begins. What lies between this and the last reading is never long.
    fn begin(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.wall_ns) >= EXACT_FROM_NS {
            *self = Self::start();
        }
    }

    /// CPU time since `since_ns` of the wall clock, when the turn began. While another program
    /// had the CPU, no tenant used it.
    fn used_ns(&mut self, since_ns: u64) -> u64 {
        let now = preempt::now_ns();
        let turn = now.saturating_sub(since_ns);
        if turn < EXACT_FROM_NS {
            return turn;
        }
        let cpu_now = preempt::thread_cpu_ns();
        let cpu = cpu_now.saturating_sub(self.cpu_ns);
        let before = since_ns.saturating_sub(self.wall_ns);
        *self = Self { wall_ns: now, cpu_ns: cpu_now };
        cpu.saturating_sub(before).min(turn)
    }
}

struct TurnEnd {
    verdict: Verdict,
    used_ns: u64,
    /// Whom to tell what, if the call is over.
    notify: Option<(Done, Report)>,
}

/// One turn, at most a slice long unless nothing waits.
fn turn(next: &Next, thread: i32, clock: &mut Clock) -> TurnEnd {
    let task = &next.task;
    let mut body = task.body();
    task.set_running();
    // Before there is a signal for it: the handler looks at its store and its stack.
    body.wake();
    task.stopper.runs_on(thread);
    let allowance = allowance(next);
    let waker = Waker::from(Arc::clone(task));
    let mut context = Context::from_waker(&waker);
    let turn = task.stopper.guest().map(|guest| Turn::begin(guest, next.now_ns, allowance));
    // Another came while it began.
    let is_over = turn.as_ref().is_some_and(|turn| turn.is_over);
    // A panic of a host function comes out here; it must not take the worker with it.
    let poll = (!is_over).then(|| catch_unwind(AssertUnwindSafe(|| body.poll(&mut context))));
    drop(turn);
    task.stopper.runs_on(0);
    let left = preempt::left();
    let used_ns = clock.used_ns(next.now_ns).saturating_add(task.stopper.take_elsewhere_ns());
    task.cpu_ns().fetch_add(used_ns, Ordering::Relaxed);
    task.stopper.leave_cpu(task.cpu_left_ns());
    let goes_on = |verdict| TurnEnd { verdict, used_ns, notify: None };
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
    TurnEnd { verdict, used_ns, notify }
}

/// When the turn is over; at once if its task is.
fn allowance(next: &Next) -> Allowance {
    let Next { task, slice_ns, now_ns, alone, watched, .. } = next;
    let left_ns = task.cpu_left_ns();
    if left_ns == 0 {
        task.stopper.stop(Cause::CpuTime);
    }
    if *now_ns >= task.deadline_ns {
        task.stopper.stop(Cause::Deadline);
    }
    let hard_ns = match task.stopper.is_over() {
        // It learns of its end at once, most likely: a signal is not worth it.
        true => now_ns.saturating_add(preempt::RETRY_NS),
        false => now_ns.saturating_add(left_ns).min(task.deadline_ns),
    };
    let slice_end = if *alone { preempt::NEVER } else { now_ns.saturating_add(*slice_ns) };
    let period_ns = if *watched { slice_ns.saturating_mul(TICK_SLICES) } else { preempt::NEVER };
    Allowance { due_ns: slice_end.min(hard_ns), hard_ns, period_ns }
}
