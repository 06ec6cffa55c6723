//! What workers, callers and wakers share.
//!
//! Waking a thread that sleeps costs its processor some 20 us, so it is not done without need:
//! a worker that is between two turns takes what it has just queued itself, and one that ran
//! threads looks for the next ones a little while before it sleeps.
//!
//! With short calls the lock and all that it guards goes from one worker's processor to the other's
//! with each call, line by line of their caches. So it is taken once a call: what a worker is given
//! between two turns ([`KEPT`]) is queued when it takes its next one.

use crate::isolate::Outcome;
use crate::preempt;
use crate::sched::queue::{Queue, Seat};
use crate::sched::task::Task;
use crate::sched::{SchedulerConfig, Stats, nanoseconds};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An `Instant` as nanoseconds of CLOCK_MONOTONIC, which is what it counts too.
pub(super) fn monotonic_ns(at: Instant) -> u64 {
    static BASE: LazyLock<(Instant, u64)> = LazyLock::new(|| (Instant::now(), preempt::now_ns()));
    let (base, base_ns) = *BASE;
    let nanoseconds = |span: Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
    match at.checked_duration_since(base) {
        Some(after) => base_ns.saturating_add(nanoseconds(after)),
        None => base_ns.saturating_sub(nanoseconds(base.duration_since(at))),
    }
}

/// How long a worker that ran threads looks for others before it sleeps, in nanoseconds.
const LOOK_NS: u64 = 50_000;

/// How often a thread looks whether the lock is free before it sleeps until it is, and how long it
/// waits in between. Nobody waits for anything who has it, and a sleep takes some 20 us.
const LOCK_TRIES: u32 = 25;
const LOCK_SPINS: u32 = 8;

/// Part of a slice that a turn has at least when another comes. To take the CPU costs some 25 us;
/// and earlier than this, signals more often find host code, and come in vain.
const SHORTENED: u64 = 24;

thread_local! {
    /// Whose worker this thread is, if it is between two turns, by address.
    static BETWEEN: Cell<usize> = const { Cell::new(0) };
    /// Whether it has queued something there that nobody else was told of.
    static KEEPS: Cell<bool> = const { Cell::new(false) };
    /// That, if it is not in the queue yet.
    static KEPT: Cell<Option<Arc<Task>>> = const { Cell::new(None) };
}

pub(super) struct State {
    pub queue: Queue<Arc<Task>>,
    /// Tasks that wait in a hostcall, by address.
    parked: HashMap<usize, Arc<Task>>,
    pub stats: Vec<(String, Stats)>,
    idle_workers: usize,
    /// The worker that looks for work before it sleeps, if one does, by the number of its look.
    looks: Option<u64>,
    looks_begun: u64,
    pub workers: usize,
    /// How many preempted calls may wait awake.
    awake_max: usize,
    /// What each worker runs.
    turns: Vec<Option<Running>>,
    pub closing: bool,
}

/// A turn that has begun.
struct Running {
    task: Arc<Task>,
    since_ns: u64,
    /// Nothing waited when it was taken, and so far nothing does: it has no end.
    endless: bool,
    /// Made short for one that came.
    short: bool,
}

pub(super) struct Shared {
    state: Apart<Mutex<State>>,
    work: Condvar,
    /// The last look that something was queued for.
    look_found: AtomicU64,
    slice_ns: AtomicU64,
    /// Whether so much waits that a tenant may have as much as it is allowed.
    is_long: AtomicBool,
    waiting_max: usize,
    workers: usize,
}

/// In cache lines of its own, two of which processors fetch together: who looks at what lies beside
/// it does not wait for it.
#[repr(align(128))]
struct Apart<T>(T);

/// Why a call is not queued.
pub(super) enum Refusal {
    /// No more turns begin.
    Closing,
    /// Its tenant has as many waiting as it may.
    Full {
        /// How many.
        waiting: usize,
    },
}

/// A turn to come.
pub(super) struct Next {
    pub task: Arc<Task>,
    pub slice_ns: u64,
    pub now_ns: u64,
    /// Whether nothing else waits.
    pub alone: bool,
    /// Whether it is to be dormant if it is preempted, because many wait.
    pub crowded: bool,
    /// Whether the worker slept before it.
    pub waited: bool,
}

/// How a call ended, as far as statistics tell.
#[derive(Clone, Copy)]
pub(super) enum Ending {
    Exited,
    Trap,
    Limit,
    Ended,
}

/// What a turn came to.
pub(super) enum Verdict {
    /// The call is over, in this way.
    Done(Ending),
    /// It was preempted, or woken while it ran.
    Again,
    /// It waits.
    Parked,
}

/// A turn that is over.
pub(super) struct Spent {
    pub task: Arc<Task>,
    pub slice_ns: u64,
    pub used_ns: u64,
    pub verdict: Verdict,
}

impl Shared {
    pub fn new(config: &SchedulerConfig) -> Self {
        let slice_ns = nanoseconds(config.slice);
        let state = State {
            queue: Queue::new(config.begun_max, slice_ns),
            parked: HashMap::new(),
            stats: Vec::new(),
            idle_workers: 0,
            looks: None,
            looks_begun: 0,
            workers: 0,
            awake_max: config.awake_max,
            turns: Vec::new(),
            closing: false,
        };
        Self {
            state: Apart(Mutex::new(state)),
            work: Condvar::new(),
            look_found: AtomicU64::new(0),
            slice_ns: AtomicU64::new(slice_ns),
            is_long: AtomicBool::new(false),
            waiting_max: config.waiting_max,
            workers: config.workers,
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        for _ in 0..LOCK_TRIES {
            if let Ok(state) = self.state.0.try_lock() {
                return state;
            }
            (0..LOCK_SPINS).for_each(|_| std::hint::spin_loop());
        }
        self.state.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn slice_ns(&self) -> u64 {
        self.slice_ns.load(Ordering::Relaxed)
    }

    pub fn set_slice_ns(&self, slice_ns: u64) {
        self.slice_ns.store(slice_ns, Ordering::Relaxed);
    }

    /// Queues a new call. One of a tenant that had nothing to do does not wait for the ends of
    /// turns of others.
    pub fn submit(&self, task: Arc<Task>) -> Result<(), Refusal> {
        if self.is_between_turns() && !self.is_long.load(Ordering::Relaxed) && !KEEPS.replace(true)
        {
            // If no turn begins any more, it is queued and drained.
            KEPT.set(Some(task));
            return Ok(());
        }
        let mut state = self.lock();
        if self.is_between_turns() {
            // What came before it is before it.
            state.queue_kept();
        }
        if state.closing {
            return Err(Refusal::Closing);
        }
        let seat = task.seat;
        let waiting = state.queue.waiting(seat);
        if waiting >= self.waiting_max {
            return Err(Refusal::Full { waiting });
        }
        let first = state.queue.is_idle(seat).then_some(seat);
        state.queue.push(seat, task);
        self.measure(&state);
        self.tell(state, first);
        Ok(())
    }

    /// Notes how much waits, where that has changed enough. Each worker may keep one more.
    fn measure(&self, state: &State) {
        let is_long = state.queue.len() + self.workers >= self.waiting_max;
        if is_long != self.is_long.load(Ordering::Relaxed) {
            self.is_long.store(is_long, Ordering::Relaxed);
        }
    }

    /// Queues a new thread of a call that runs; false if its tenant may have no more.
    pub fn push_thread(&self, task: Arc<Task>) -> bool {
        let mut state = self.lock();
        let queued = !state.closing && state.queue.push_begun(task.seat, task);
        if queued {
            self.measure(&state);
            self.tell(state, None);
        }
        queued
    }

    /// Work between two turns of this worker: the first that it queues is its own next turn.
    pub fn between_turns(&self, work: impl FnOnce()) {
        BETWEEN.set(self.address());
        work();
        BETWEEN.set(0);
    }

    fn is_between_turns(&self) -> bool {
        BETWEEN.get() == self.address()
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// A worker that looks or sleeps is told of what was queued; if there is none, a turn may be
    /// shortened. `first` is the tenant of what was queued if it has nothing else.
    fn tell(&self, mut state: MutexGuard<'_, State>, first: Option<Seat>) {
        if self.is_between_turns() && !KEEPS.replace(true) {
            return;
        }
        if let Some(look) = state.looks.take() {
            self.look_found.store(look, Ordering::Release);
            return;
        }
        let idle = state.idle_workers > 0;
        let shortened = if idle { None } else { state.shorten(first, self.slice_ns()) };
        drop(state);
        if idle {
            self.work.notify_one();
        }
        if let Some((task, due_ns)) = shortened {
            task.stopper.hurry(due_ns, first.is_some());
        }
    }

    /// A parked task was woken.
    pub fn unpark(&self, task: Arc<Task>) {
        let mut state = self.lock();
        if state.closing {
            return;
        }
        state.parked.remove(&address(&task));
        state.queue.push_woken(task.seat, task);
        self.measure(&state);
        self.tell(state, None);
    }

    /// Accounts for `worker`'s last turn and waits for its next; `None` when it is time to go.
    pub fn next(&self, worker: usize, spent: Option<Spent>) -> Option<Next> {
        // Freed when others have the lock again.
        let mut over = None;
        let mut state = self.lock();
        let mut looks = spent.as_ref().is_some_and(|spent| spent.task.has_threads());
        if let Some(spent) = spent {
            over = state.settle(worker, spent);
        }
        state.queue_kept();
        let kept = KEEPS.replace(false);
        let mut waited = false;
        loop {
            if state.closing {
                return None;
            }
            let slice_ns = self.slice_ns();
            if let Some((_, task)) = state.queue.pop(slice_ns) {
                self.measure(&state);
                let next = state.begin(worker, task, slice_ns, waited);
                if kept && !next.alone {
                    // Something else was before what was kept for this worker.
                    self.tell(state, None);
                }
                return Some(next);
            }
            if std::mem::take(&mut looks) && state.looks.is_none() {
                state = self.look(state, over.take());
                continue;
            }
            if over.is_some() {
                drop(state);
                over = None;
                state = self.lock();
                continue;
            }
            waited = true;
            state.idle_workers += 1;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle_workers -= 1;
        }
    }

    /// Waits a little without sleeping, and frees what is over.
    fn look<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        over: Option<Arc<Task>>,
    ) -> MutexGuard<'a, State> {
        state.looks_begun += 1;
        let look = state.looks_begun;
        state.looks = Some(look);
        drop(state);
        drop(over);
        let end_ns = preempt::now_ns().saturating_add(LOOK_NS);
        while self.look_found.load(Ordering::Acquire) < look && preempt::now_ns() < end_ns {
            std::hint::spin_loop();
        }
        let mut state = self.lock();
        if state.looks == Some(look) {
            state.looks = None;
        }
        state
    }

    /// No new turns from here on, and those that have begun end.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closing = true;
        let running: Vec<_> = state.turns.drain(..).flatten().collect();
        drop(state);
        self.work.notify_all();
        for turn in running {
            turn.task.stopper.hurry(0, true);
        }
    }

    /// What was queued or parked when the last worker had gone.
    pub fn drain(&self) -> Vec<Arc<Task>> {
        let mut state = self.lock();
        let mut tasks = state.queue.drain();
        tasks.extend(state.parked.drain().map(|(_, task)| task));
        tasks
    }
}

fn address(task: &Arc<Task>) -> usize {
    Arc::as_ptr(task).addr()
}

impl State {
    /// How many workers wait for work, and how many there are.
    pub fn workers(&self) -> (usize, usize) {
        (self.idle_workers + usize::from(self.looks.is_some()), self.workers)
    }

    /// What this worker was given since its last turn.
    fn queue_kept(&mut self) {
        if let Some(task) = KEPT.take() {
            self.queue.push(task.seat, task);
        }
    }

    fn begin(&mut self, worker: usize, task: Arc<Task>, slice_ns: u64, waited: bool) -> Next {
        let alone = self.queue.is_empty();
        let crowded = self.queue.begun_waiting() >= self.awake_max;
        let now_ns = preempt::now_ns();
        if let Some(guest) = task.stopper.guest() {
            guest.prepare();
        }
        let running =
            Running { task: Arc::clone(&task), since_ns: now_ns, endless: alone, short: false };
        if self.turns.len() <= worker {
            self.turns.resize_with(worker + 1, || None);
        }
        if let Some(turn) = self.turns.get_mut(worker) {
            *turn = Some(running);
        }
        Next { task, slice_ns, now_ns, alone, crowded, waited }
    }

    /// The worker is still `RUNNING` the task as far as wakers see, until its state is set here.
    /// Answers with one that is over.
    fn settle(&mut self, worker: usize, spent: Spent) -> Option<Arc<Task>> {
        if let Some(turn) = self.turns.get_mut(worker) {
            *turn = None;
        }
        let Spent { task, slice_ns, used_ns, verdict } = spent;
        let cut = matches!(verdict, Verdict::Again);
        self.queue.settle(task.seat, slice_ns, used_ns, cut);
        if let Some((_, stats)) = self.stats.get_mut(task.seat.index()) {
            stats.cpu_ns += used_ns;
            if let Verdict::Done(ending) = verdict {
                stats.preemptions += task.preemptions.load(Ordering::Relaxed);
                if !task.is_thread {
                    stats.count(ending);
                }
            }
        }
        match verdict {
            Verdict::Done(_) => {
                self.queue.ended(task.seat);
                return Some(task);
            }
            Verdict::Again => self.again(task),
            // It is parked under the lock, so that a wake-up finds it among the parked.
            Verdict::Parked if task.park() => drop(self.parked.insert(address(&task), task)),
            Verdict::Parked => self.again(task),
        }
        None
    }

    /// Which turn ends sooner because something was queued, and when: one without end after a
    /// slice, or for `first`, whose tenant was idle, one of others that are behind it, soon.
    fn shorten(&mut self, first: Option<Seat>, slice_ns: u64) -> Option<(Arc<Task>, u64)> {
        let Self { turns, queue, .. } = self;
        let behind =
            |turn: &Running| first.is_some_and(|first| queue.is_before(first, turn.task.seat));
        let running = turns.iter_mut().flatten();
        let candidates = running.filter(|turn| !turn.short && (turn.endless || behind(turn)));
        let turn = candidates.min_by_key(|turn| turn.since_ns)?;
        turn.short = behind(turn);
        let span_ns = if turn.short { slice_ns / SHORTENED } else { slice_ns };
        turn.endless = false;
        Some((Arc::clone(&turn.task), turn.since_ns.saturating_add(span_ns)))
    }

    fn again(&mut self, task: Arc<Task>) {
        task.set_queued();
        self.queue.push_again(task.seat, task);
    }
}

impl From<&Outcome> for Ending {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Exited(_) => Self::Exited,
            Outcome::Trap(_) => Self::Trap,
            Outcome::OutOfMemory { .. } | Outcome::OutOfFuel => Self::Limit,
            Outcome::Ended(_) => Self::Ended,
        }
    }
}

impl Stats {
    fn count(&mut self, ending: Ending) {
        self.calls += 1;
        match ending {
            Ending::Exited => {}
            Ending::Trap => self.traps += 1,
            Ending::Limit => self.limits += 1,
            Ending::Ended => self.ended += 1,
        }
    }
}

impl Seat {
    fn index(self) -> usize {
        self.0
    }
}
