//! What workers, callers and wakers share.
//!
//! Waking a thread that sleeps costs its processor some 20 us, so it is not done without need:
//! a worker that is between two time slices takes what it has just queued itself, and one that ran
//! threads looks for the next ones a little while before it sleeps.
//!
//! With short calls the lock and all that it guards goes from one worker's processor to the other's
//! with each call, line by line of their caches. So it is taken once a call: what a worker is given
//! between two time slices ([`KEPT`]) is queued when it takes its next one. And not once a call
//! where a tenant calls again as soon as a call is over: the worker goes on with that call by
//! itself for a small part of a slice ([`IN_A_ROW`]), and accounts for all of them together.

use crate::exec::outcome::Outcome;
use crate::preempt;
use crate::sched::inlet::Inlet;
use crate::sched::queue::{Queue, TenantId};
use crate::sched::slices::{CachePadded, RunningSlices};
use crate::sched::task::Task;
use crate::sched::{SchedulerConfig, Stats, nanoseconds};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
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
/// waits in between. A thread that has the lock waits for nothing, and a sleep takes some 20 us.
const LOCK_TRIES: u32 = 25;
const LOCK_SPINS: u32 = 8;

/// Part of a slice after which a worker that goes on with its tenant's calls asks whose time slice
/// it is.
const IN_A_ROW: u64 = 50;

thread_local! {
    /// Whose worker this thread is, if it is between two time slices, by address.
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
    /// Those that wait at the inlet and were not told that there is something else.
    at_inlet: Vec<usize>,
    /// The worker that looks for work before it sleeps, if one does, by the number of its look.
    looks: Option<u64>,
    looks_begun: u64,
    pub workers: usize,
    /// How many preempted calls may wait resident.
    resident_max: usize,
    pub closing: bool,
}

pub(super) struct Shared {
    state: CachePadded<Mutex<State>>,
    /// Changed under the lock of the state, but for calls in a row.
    running: RunningSlices,
    work: Condvar,
    /// Where idle workers wait, once there is one.
    inlet: OnceLock<Inlet>,
    /// The last look that something was queued for.
    look_found: AtomicU64,
    slice_ns: AtomicU64,
    /// Whether so much waits that a tenant may have as much as it is allowed.
    is_long: AtomicBool,
    waiting_max: usize,
    workers: usize,
}

/// Why a call is not queued.
pub(super) enum Refusal {
    /// No more time slices begin.
    Closing,
    /// Its tenant has as many waiting as it may.
    Full {
        /// How many.
        waiting: usize,
    },
}

/// A time slice to come.
pub(super) struct Next {
    pub task: Arc<Task>,
    pub slice_ns: u64,
    pub now_ns: u64,
    /// Whether nothing else waits.
    pub alone: bool,
    /// Whether a timer is to look at it meanwhile.
    pub watched: bool,
    /// Whether it is to be hibernated if it is preempted, because many wait.
    pub crowded: bool,
    /// Whether the worker slept before it.
    pub waited: bool,
    /// What the calls before it in a row came to.
    pub before: Stats,
}

/// How a call ended, as far as statistics tell.
#[derive(Clone, Copy)]
pub(super) enum Ending {
    Exited,
    Trap,
    Limit,
    Ended,
}

/// What a time slice came to.
pub(super) enum Verdict {
    /// The call is over, in this way.
    Done(Ending),
    /// It was preempted, or woken while it ran.
    Again,
    /// It waits.
    Parked,
}

/// A time slice that is over.
pub(super) struct Spent {
    pub task: Arc<Task>,
    pub slice_ns: u64,
    pub used_ns: u64,
    pub crowded: bool,
    pub verdict: Verdict,
    /// What the calls before it in a row came to.
    pub before: Stats,
}

impl Shared {
    pub fn new(config: &SchedulerConfig) -> Self {
        let slice_ns = nanoseconds(config.slice);
        let state = State {
            queue: Queue::new(config.begun_max, slice_ns),
            parked: HashMap::new(),
            stats: Vec::new(),
            idle_workers: 0,
            at_inlet: Vec::with_capacity(config.workers),
            looks: None,
            looks_begun: 0,
            workers: 0,
            resident_max: config.resident_max,
            closing: false,
        };
        Self {
            state: CachePadded(Mutex::new(state)),
            running: RunningSlices::new(config.workers),
            work: Condvar::new(),
            inlet: OnceLock::new(),
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
    /// time slices of others.
    pub fn submit(&self, task: Arc<Task>) -> Result<(), Refusal> {
        if self.is_between_slices() && !self.is_long.load(Ordering::Relaxed) && !KEEPS.replace(true)
        {
            // If no time slice begins any more, it is queued and drained.
            KEPT.set(Some(task));
            return Ok(());
        }
        let mut state = self.lock();
        if self.is_between_slices() {
            // What came before it is before it.
            state.queue_kept();
        }
        if state.closing {
            return Err(Refusal::Closing);
        }
        let tenant = task.tenant;
        let waiting = state.queue.waiting(tenant);
        if waiting >= self.waiting_max {
            return Err(Refusal::Full { waiting });
        }
        let first = state.queue.is_idle(tenant).then_some(tenant);
        state.queue.push(tenant, task);
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
        let queued = !state.closing && state.queue.push_begun(task.tenant, task);
        if queued {
            self.measure(&state);
            self.tell(state, None);
        }
        queued
    }

    /// Work between two time slices of this worker: the first that it queues is its own next time
    /// slice.
    pub fn between_slices(&self, work: impl FnOnce()) {
        BETWEEN.set(self.address());
        work();
        BETWEEN.set(0);
    }

    fn is_between_slices(&self) -> bool {
        BETWEEN.get() == self.address()
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// A worker that looks or sleeps is told of what was queued; if there is none, a time slice may
    /// be shortened. `first` is the tenant of what was queued if it has nothing else.
    fn tell(&self, mut state: MutexGuard<'_, State>, first: Option<TenantId>) {
        if self.is_between_slices() && !KEEPS.replace(true) {
            return;
        }
        if let Some(look) = state.looks.take() {
            self.look_found.store(look, Ordering::Release);
            return;
        }
        let told = state.at_inlet.pop();
        let idle = told.is_some() || state.idle_workers > 0;
        let behind =
            |task: &Task| first.is_some_and(|tenant| state.queue.is_before(tenant, task.tenant));
        let shortened = if idle { None } else { self.running.shorten(behind, self.slice_ns()) };
        drop(state);
        match (told, self.inlet.get()) {
            (Some(worker), Some(inlet)) => inlet.tell(worker),
            _ if idle => self.work.notify_one(),
            _ => {}
        }
        if let Some((task, due_ns, was_endless)) = shortened {
            let is_unwatched = was_endless && self.leaves_alone();
            task.cancel.shorten_slice(due_ns, first.is_some() || is_unwatched);
        }
    }

    /// Whether no timer looks at a time slice without end. The thread that shortens it sends a
    /// signal instead. A process with an inlet is one of many, and what comes in is short, most
    /// likely: a timer would wake a worker that has long had its answer out.
    fn leaves_alone(&self) -> bool {
        self.inlet.get().is_some()
    }

    /// A parked task was woken.
    pub fn unpark(&self, task: Arc<Task>) {
        let mut state = self.lock();
        if state.closing {
            return;
        }
        state.parked.remove(&address(&task));
        state.queue.push_woken(task.tenant, task);
        self.measure(&state);
        self.tell(state, None);
    }

    /// Accounts for `worker`'s last time slice and waits for its next; `None` when it is time to
    /// go.
    pub fn next(&self, worker: usize, spent: Option<Spent>) -> Option<Next> {
        if let Some(next) = spent.as_ref().and_then(|spent| self.go_on(worker, spent)) {
            return Some(next);
        }
        // Freed when others have the lock again.
        let mut over = None;
        let mut state = self.lock();
        let mut looks = spent.as_ref().is_some_and(|spent| spent.task.has_threads());
        if let Some(spent) = spent {
            over = state.settle(spent);
        }
        let mut kept = state.take_kept();
        let mut waited = false;
        loop {
            if state.closing {
                return None;
            }
            if let Some((_, task)) = state.queue.pop(self.slice_ns()) {
                self.measure(&state);
                let next = self.begin(&state, worker, task, waited);
                if kept && !next.alone {
                    // Something else was before what was kept for this worker.
                    self.tell(state, None);
                }
                return Some(next);
            }
            self.running.end(worker);
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
            let Some(inlet) = self.inlet.get() else {
                state.idle_workers += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle_workers -= 1;
                continue;
            };
            state.at_inlet.push(worker);
            drop(state);
            let has_come = inlet.wait(worker);
            state = self.lock();
            state.at_inlet.retain(|waiting| *waiting != worker);
            if has_come {
                drop(state);
                self.between_slices(&inlet.take);
                state = self.lock();
                kept |= state.take_kept();
            }
        }
    }

    /// Has workers that have nothing to do wait there.
    pub fn open(&self, inlet: Inlet) -> Option<&Inlet> {
        {
            // No worker is between its look for an inlet and its sleep.
            let _state = self.lock();
            self.inlet.set(inlet).ok()?;
        }
        self.work.notify_all();
        self.inlet.get()
    }

    fn begin(&self, state: &State, worker: usize, task: Arc<Task>, waited: bool) -> Next {
        let alone = state.queue.is_empty();
        let crowded = state.queue.begun_waiting() >= state.resident_max;
        let now_ns = preempt::now_ns();
        task.prepare();
        self.running.begin(worker, &task, now_ns, alone);
        let (before, watched) = (Stats::default(), !(alone && self.leaves_alone()));
        Next { task, slice_ns: self.slice_ns(), now_ns, alone, watched, crowded, waited, before }
    }

    /// The next call in a row: the end of the one that is over queued it, its tenant has not had
    /// the worker for long, and nobody waits for the end of this time slice.
    fn go_on(&self, worker: usize, spent: &Spent) -> Option<Next> {
        let Verdict::Done(ending) = spent.verdict else { return None };
        let Spent { slice_ns, crowded, .. } = *spent;
        let mut before = spent.before;
        before.count_slice(spent, Some(ending));
        if before.cpu_ns >= slice_ns / IN_A_ROW {
            return None;
        }
        let task = KEPT.take()?;
        let now_ns = preempt::now_ns();
        task.prepare();
        let in_a_row = task.tenant == spent.task.tenant
            && !spent.task.has_threads()
            && !task.has_threads()
            && self.running.go_on(worker, &task, now_ns);
        if !in_a_row {
            KEPT.set(Some(task));
            return None;
        }
        KEEPS.set(false);
        let (alone, watched, waited) = (false, true, false);
        Some(Next { task, slice_ns, now_ns, alone, watched, crowded, waited, before })
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

    /// No new time slices from here on, and those that have begun end.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closing = true;
        self.running.close();
        drop(state);
        self.work.notify_all();
        if let Some(inlet) = self.inlet.get() {
            (0..self.workers).for_each(|worker| inlet.tell(worker));
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
        let idle = self.idle_workers + self.at_inlet.len();
        (idle + usize::from(self.looks.is_some()), self.workers)
    }

    /// The same as [`State::queue_kept`], after which this worker keeps nothing; whether it did.
    fn take_kept(&mut self) -> bool {
        self.queue_kept();
        KEEPS.replace(false)
    }

    /// What this worker was given since its last time slice.
    fn queue_kept(&mut self) {
        if let Some(task) = KEPT.take() {
            self.queue.push(task.tenant, task);
        }
    }

    /// The worker is still `RUNNING` the task as far as wakers see, until its state is set here.
    /// Answers with one that is over.
    fn settle(&mut self, spent: Spent) -> Option<Arc<Task>> {
        let tenant = spent.task.tenant;
        let cut = matches!(spent.verdict, Verdict::Again);
        let used_ns = spent.before.cpu_ns.saturating_add(spent.used_ns);
        self.queue.settle(tenant, spent.slice_ns, used_ns, cut);
        let ending = match spent.verdict {
            Verdict::Done(ending) => Some(ending),
            _ => None,
        };
        if let Some((_, stats)) = self.stats.get_mut(tenant.index()) {
            stats.add(&spent.before);
            stats.count_slice(&spent, ending);
        }
        let Spent { task, verdict, .. } = spent;
        match verdict {
            Verdict::Done(_) => {
                self.queue.ended(task.tenant);
                return Some(task);
            }
            Verdict::Again => self.again(task),
            // It is parked under the lock, so that a wake-up finds it among the parked.
            Verdict::Parked if task.park() => drop(self.parked.insert(address(&task), task)),
            Verdict::Parked => self.again(task),
        }
        None
    }

    fn again(&mut self, task: Arc<Task>) {
        task.set_queued();
        self.queue.push_again(task.tenant, task);
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
    /// One more time slice, and how its task ended if it did.
    fn count_slice(&mut self, spent: &Spent, ending: Option<Ending>) {
        self.cpu_ns += spent.used_ns;
        let Some(ending) = ending else { return };
        self.preemptions += spent.task.preemptions.load(Ordering::Relaxed);
        if spent.task.is_thread {
            return;
        }
        self.calls += 1;
        match ending {
            Ending::Exited => {}
            Ending::Trap => self.traps += 1,
            Ending::Limit => self.limits += 1,
            Ending::Ended => self.ended += 1,
        }
    }

    fn add(&mut self, more: &Self) {
        let Self { calls, cpu_ns, traps, limits, ended, preemptions } = more;
        self.calls += calls;
        self.cpu_ns += cpu_ns;
        self.traps += traps;
        self.limits += limits;
        self.ended += ended;
        self.preemptions += preemptions;
    }
}

impl TenantId {
    fn index(self) -> usize {
        self.0
    }
}
