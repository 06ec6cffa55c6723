//! One call on its way through the scheduler.
//!
//! ```text
//!          submit           worker takes it          Ready
//!  (new) ────────> QUEUED ──────────────────> RUNNING ─────> (done)
//!                    ^ ^        preempted        │  │
//!                    │ └─────────────────────────┘  │ waits in a hostcall
//!                    │ woken                        v
//!                    └────────────────────────── PARKED
//! ```
//! A wake-up that comes while it runs is kept (NOTIFIED) and puts it back into the queue.

use crate::call::{self, Function, Value};
use crate::ending::Stopper;
use crate::isolate::{Outcome, State};
use crate::sched::queue::Seat;
use crate::sched::shared::Shared;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake};
use std::time::Duration;

const QUEUED: u8 = 0;
const RUNNING: u8 = 1;
const NOTIFIED: u8 = 2;
const PARKED: u8 = 3;

/// How a call ended and what it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// How it ended.
    pub outcome: Outcome,
    /// What it returned, if it did.
    pub results: Vec<Value>,
    /// CPU time on the workers, instantiation included.
    pub cpu: Duration,
    /// How often the CPU was taken from it.
    pub preemptions: u64,
}

/// The call itself, once it runs.
type Work = Pin<Box<dyn Future<Output = (Outcome, Vec<Value>)> + Send>>;
/// Who wants to know.
pub(super) type Done = Box<dyn FnOnce(Report) + Send>;

/// What a call starts from. Little waits with a queued call; the store and all else is made on
/// the worker, where it is in the cache when it is used.
pub(super) struct Plan {
    pub function: Function,
    pub arguments: Vec<Value>,
    pub state: State,
    pub fuel: u64,
}

/// How far a call has come.
enum Stage {
    Planned(Plan),
    Started(Work),
    Over,
}

pub(super) struct Body {
    stage: Stage,
    done: Option<Done>,
}

impl Body {
    /// Starts the call or goes on with it.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<(Outcome, Vec<Value>)> {
        if let Stage::Planned(_) = self.stage
            && let Stage::Planned(plan) = std::mem::replace(&mut self.stage, Stage::Over)
        {
            self.stage = Stage::Started(Box::pin(plan.run()));
        }
        match &mut self.stage {
            Stage::Started(work) => work.as_mut().poll(context),
            _ => Poll::Pending,
        }
    }

    /// Whom to tell. The call's memory and fiber are gone after this.
    pub fn finish(&mut self) -> Option<Done> {
        self.stage = Stage::Over;
        self.done.take()
    }
}

impl Plan {
    async fn run(self) -> (Outcome, Vec<Value>) {
        let Self { function, arguments, state, fuel } = self;
        if let Some(cause) = state.stopper.cause() {
            return (Outcome::Ended(cause), Vec::new());
        }
        let mut store = match call::store(&function.module, state, fuel) {
            Ok(store) => store,
            Err(error) => return (Outcome::Trap(format!("{error:#}")), Vec::new()),
        };
        match call::run(&function, &mut store, &arguments).await {
            Ok(results) => (Outcome::Exited(0), results),
            Err(error) => (call::outcome(store.data(), &error), Vec::new()),
        }
    }
}

pub(super) struct Task {
    pub seat: Seat,
    pub stopper: Stopper,
    pub deadline_ns: u64,
    pub cpu_limit_ns: u64,
    pub cpu_ns: AtomicU64,
    pub preemptions: AtomicU64,
    state: AtomicU8,
    body: Mutex<Body>,
    shared: Weak<Shared>,
}

impl Task {
    pub fn new(
        seat: Seat,
        stopper: Stopper,
        limits: &crate::call::CallLimits,
        plan: Plan,
        done: Done,
        shared: Weak<Shared>,
    ) -> Self {
        Self {
            seat,
            stopper,
            deadline_ns: limits.deadline.map_or(u64::MAX, super::shared::monotonic_ns),
            cpu_limit_ns: limits.cpu_ns.unwrap_or(u64::MAX),
            cpu_ns: AtomicU64::new(0),
            preemptions: AtomicU64::new(0),
            state: AtomicU8::new(QUEUED),
            body: Mutex::new(Body { stage: Stage::Planned(plan), done: Some(done) }),
            shared,
        }
    }

    pub fn body(&self) -> MutexGuard<'_, Body> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_running(&self) {
        self.state.store(RUNNING, Ordering::Release);
    }

    pub fn set_queued(&self) {
        self.state.store(QUEUED, Ordering::Release);
    }

    /// Parks it unless it was woken meanwhile.
    pub fn park(&self) -> bool {
        self.state.compare_exchange(RUNNING, PARKED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Ends it from the outside: its fiber, if it has one, is unwound here.
    pub fn abandon(&self) {
        let Some(done) = self.body().finish() else { return };
        let cause = self.stopper.cause().unwrap_or(crate::ending::Cause::Stopped);
        done(self.report(Outcome::Ended(cause), Vec::new()));
    }

    pub fn report(&self, outcome: Outcome, results: Vec<Value>) -> Report {
        let cpu = Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed));
        Report { outcome, results, cpu, preemptions: self.preemptions.load(Ordering::Relaxed) }
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let woken =
            self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| match state {
                PARKED => Some(QUEUED),
                RUNNING => Some(NOTIFIED),
                _ => None,
            });
        if woken == Ok(PARKED)
            && let Some(shared) = self.shared.upgrade()
        {
            shared.unpark(self);
        }
    }
}
