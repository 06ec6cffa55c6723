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

use crate::exec::call::{self, CallLimits, Function, Value};
use crate::exec::module::{Link, unlinked};
use crate::exec::outcome::Outcome;
use crate::exec::reclaim;
use crate::exec::reuse::PooledInstance;
use crate::exec::threads::{GuestThread, ThreadConfig, ThreadGroup, ThreadTask, Unbound, Workers};
use crate::hostcalls::state::State;
use crate::memory::hibernation;
use crate::preempt::cancel::CancelHandle;
use crate::sched::TenantState;
use crate::sched::queue::TenantId;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
    /// CPU time on the workers, instantiation included, and what models took on other threads.
    pub cpu: Duration,
    /// How often the CPU was taken from it.
    pub preemptions: u64,
}

/// What a call came to, and what it returned.
pub(super) type End = (Outcome, Vec<Value>);
/// The call itself, once it runs.
pub(super) type Work = hibernation::Work<End>;
pub(super) type Fiber = hibernation::Fiber<End>;
/// Is told how the call ended.
pub(super) type Done = Box<dyn FnOnce(Report) + Send>;

/// What a call starts from. Little waits with a queued call; the store and all else is made on
/// the worker, where it is in the cache when it is used.
pub(super) struct Plan {
    pub function: Function,
    pub arguments: Vec<Value>,
    pub state: State,
    pub fuel: u64,
    /// For a module whose threads share its memory.
    pub group: Option<Box<GroupPlan>>,
}

/// What the threads of a call are made with.
pub(super) struct GroupPlan {
    pub limits: CallLimits,
    pub context: TaskContext,
}

/// Where the threads of a call belong: to its tenant and its limits.
#[derive(Clone)]
pub(super) struct TaskContext {
    pub owner: Arc<TenantState>,
    pub deadline_ns: u64,
    pub cpu_limit_ns: u64,
    /// CPU time of a call with threads and all of these, in nanoseconds.
    pub cpu_ns: Option<Arc<AtomicU64>>,
}

impl Workers for TaskContext {
    /// Refused where the tenant may have no more, or the scheduler is closing.
    fn start(&self, thread: ThreadTask) -> bool {
        let Some(shared) = self.owner.shared.upgrade() else { return false };
        shared.push_thread(Arc::new(Task::thread(self.clone(), thread)))
    }

    fn count(&self) -> (usize, usize) {
        self.owner.shared.upgrade().map_or((0, 1), |shared| shared.lock().workers())
    }
}

/// How far a call has come.
enum Stage {
    Planned(Plan),
    /// A thread that has not begun. Its future is made by the worker that runs and frees it: what
    /// one thread of the host allocates and another frees, both lock the allocator for.
    Thread(GuestThread),
    Started(Fiber),
    Over,
}

pub(super) struct Body {
    stage: Stage,
    done: Option<Done>,
}

impl Body {
    /// Starts the call or goes on with it.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<(Outcome, Vec<Value>)> {
        if let Stage::Planned(_) | Stage::Thread(_) = self.stage {
            self.stage = match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Planned(plan) => Stage::Started(plan.start()),
                Stage::Thread(thread) => Stage::Started(Fiber::new(Box::pin(thread.run()))),
                begun => begun,
            };
        }
        match &mut self.stage {
            Stage::Started(fiber) => fiber.poll(context),
            _ => Poll::Pending,
        }
    }

    /// Makes it resident, if it was hibernated.
    pub fn make_resident(&mut self) {
        if let Some(fiber) = self.fiber() {
            fiber.make_resident();
        }
    }

    pub fn fiber(&mut self) -> Option<&mut Fiber> {
        match &mut self.stage {
            Stage::Started(fiber) => Some(fiber),
            _ => None,
        }
    }

    /// Whom to tell. The call's memory and fiber are gone after this.
    pub fn finish(&mut self) -> Option<Done> {
        self.stage = Stage::Over;
        self.done.take()
    }
}

impl Plan {
    /// The call as a future. What it needs is made here and not in there: a future keeps what it
    /// was given beside what it makes of it, for as long as it lives.
    fn start(self) -> Fiber {
        if let Some(reason) = self.state.cancel.reason() {
            return over(Outcome::Ended(reason));
        }
        match &self.function.module.link {
            Link::Single(_) => self.start_alone(),
            Link::Threaded(_) => Fiber::new(Box::pin(self.run_group())),
        }
    }

    /// As the first thread of a group; the others end with it.
    async fn run_group(self) -> (Outcome, Vec<Value>) {
        let Self { function, arguments, state, fuel, group } = self;
        let module = &function.module;
        let (Link::Threaded(template), Some(plan)) = (&module.link, group) else {
            return (Outcome::failed(&unlinked()), Vec::new());
        };
        let GroupPlan { limits, context } = *plan;
        let bound = match template.bind(limits.memory_bytes) {
            Ok(bound) => bound,
            Err(Unbound::TooLarge) => {
                return (Outcome::OutOfMemory { limit: limits.memory_bytes }, Vec::new());
            }
            Err(Unbound::Failed(error)) => return (Outcome::failed(&error), Vec::new()),
        };
        let config = ThreadConfig {
            attached: state.attached.clone(),
            memory_bytes: limits.memory_bytes,
            deadline: limits.deadline,
            fuel,
            threads_max: limits.threads,
        };
        let group =
            ThreadGroup::new(module, bound, config, Box::new(context), state.cancel.clone());
        let closing = group.closing();
        let mut made = match group.instance(state) {
            Ok(made) => made,
            Err(failed) => return (failed.outcome(), Vec::new()),
        };
        let PooledInstance { store, instance, reset_info } = &mut made;
        let entries = reset_info.as_mut().map(|reset_info| &mut reset_info.entries);
        let result = call::run(&function, instance, store, entries, &arguments).await;
        reclaim::decommit(module, instance, store).await;
        let (outcome, results) = ended(store.data(), result);
        match outcome {
            Outcome::Exited(_) => group.keep(made).await,
            _ => drop(made),
        }
        drop(closing);
        let failure = group.close().await;
        // Nothing can reach its memory any more.
        group.reset_memory().await;
        match failure {
            Some(failure) => (failure, Vec::new()),
            None => (outcome, results),
        }
    }
}

/// What a call came to.
pub(super) fn ended(state: &State, result: wasmtime::Result<Vec<Value>>) -> (Outcome, Vec<Value>) {
    match result {
        Ok(results) => (Outcome::Exited(0), results),
        Err(error) => (call::outcome(state, &error), Vec::new()),
    }
}

/// A call that is over before it runs.
pub(super) fn over(outcome: Outcome) -> Fiber {
    Fiber::new(Box::pin(std::future::ready((outcome, Vec::new()))))
}

/// Hibernates those of the tasks that were preempted and have not gone on since.
pub(super) fn hibernate(tasks: &[Arc<Task>]) {
    // One that is locked goes on at this moment, or rests with another worker's.
    let mut bodies: Vec<_> = tasks.iter().filter_map(|task| task.body.try_lock().ok()).collect();
    hibernation::hibernate(bodies.iter_mut().filter_map(|body| body.fiber()));
}

pub(super) struct Task {
    pub tenant: TenantId,
    pub cancel: CancelHandle,
    pub deadline_ns: u64,
    pub cpu_limit_ns: u64,
    cpu_ns: AtomicU64,
    /// Counts instead, if there are threads.
    group_cpu_ns: Option<Arc<AtomicU64>>,
    pub preemptions: AtomicU64,
    /// Whether it is a thread of a call and not a call of its own.
    pub is_thread: bool,
    state: AtomicU8,
    body: Mutex<Body>,
    owner: Arc<TenantState>,
}

impl Task {
    /// A call; `done` is told how it ended.
    pub fn call(context: TaskContext, plan: Plan, done: Done) -> Self {
        let cancel = plan.state.cancel.clone();
        Self::new(context, cancel, Stage::Planned(plan), Some(done))
    }

    /// A thread of a call, which hears of its end itself.
    pub fn thread(context: TaskContext, thread: ThreadTask) -> Self {
        let ThreadTask { cancel, thread } = thread;
        Self::new(context, cancel, Stage::Thread(thread), None)
    }

    fn new(context: TaskContext, cancel: CancelHandle, stage: Stage, done: Option<Done>) -> Self {
        let TaskContext { owner, deadline_ns, cpu_limit_ns, cpu_ns } = context;
        Self {
            tenant: owner.id,
            cancel,
            deadline_ns,
            cpu_limit_ns,
            cpu_ns: AtomicU64::new(0),
            group_cpu_ns: cpu_ns,
            preemptions: AtomicU64::new(0),
            is_thread: done.is_none(),
            state: AtomicU8::new(QUEUED),
            body: Mutex::new(Body { stage, done }),
            owner,
        }
    }

    /// CPU time so far, in nanoseconds.
    pub fn cpu_ns(&self) -> &AtomicU64 {
        self.group_cpu_ns.as_deref().unwrap_or(&self.cpu_ns)
    }

    /// CPU time that it may still use, in nanoseconds.
    pub fn cpu_left_ns(&self) -> u64 {
        self.cpu_limit_ns.saturating_sub(self.cpu_ns().load(Ordering::Relaxed))
    }

    /// Whether it is a thread, or a call that may have some.
    pub fn has_threads(&self) -> bool {
        self.group_cpu_ns.is_some()
    }

    /// A new time slice is to come, which may be shortened from now on.
    pub fn prepare(&self) {
        if let Some(wasm) = self.cancel.wasm() {
            wasm.prepare();
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
        let reason = self.cancel.reason().unwrap_or(crate::preempt::cancel::CancelReason::Stopped);
        done(self.report(Outcome::Ended(reason), Vec::new()));
    }

    pub fn report(&self, outcome: Outcome, results: Vec<Value>) -> Report {
        let cpu = Duration::from_nanos(self.cpu_ns().load(Ordering::Relaxed));
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
            && let Some(shared) = self.owner.shared.upgrade()
        {
            shared.unpark(self);
        }
    }
}
