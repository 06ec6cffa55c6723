//! The scheduler: many isolates on few threads.
//!
//! Calls are fibers. A worker gives each a time slice; it ends when the call does, when it waits in
//! a hostcall (which frees the worker), or when its slice is over and a signal takes the CPU from
//! it ([`crate::preempt`]). [`queue`] decides which call is next: fair shares of CPU time among
//! tenants, by weight. A preempted call may go on on another thread.
//!
//! Start reading at [`Scheduler::submit`], then `worker.rs`.

mod inlet;
mod queue;
mod shared;
mod slices;
mod start;
mod task;
mod worker;

pub use inlet::Take;
pub use queue::Priority;
pub use task::Report;

use crate::exec::call::{self, ArgumentError, CallLimits, Function, Value};
use crate::exec::module::Link;
use crate::hostcalls::context::{Attached, PrepareError, Spec, Waits};
use crate::hostcalls::state::State;
use crate::preempt;
use crate::preempt::cancel::CancelHandle;
use exocell_xgate::Table;
use inlet::Inlet;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use queue::TenantId;
use shared::{Refusal, Shared};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use task::{GroupPlan, Plan, Task, TaskContext};

/// How the scheduler is set up.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Threads that run isolates; the machine's cores by default.
    pub workers: usize,
    /// The longest time slice while others wait.
    pub slice: Duration,
    /// Calls of one tenant that may wait at once.
    pub waiting_max: usize,
    /// Calls and threads of one tenant that may be begun and not over at once. Each holds an
    /// instance and a stack of the pool.
    pub begun_max: usize,
    /// Preempted calls that wait for their next time slice as they are. Where more wait, and slots
    /// are compact, those preempted from then on are hibernated: what they use of their stacks,
    /// stores and memories is packed until that time slice, which takes some 10 us.
    pub resident_max: usize,
    /// Whether each worker has a processor of its own, where there are as many as workers. Some
    /// hosts run a thread that is woken on the processor of the one that woke it: then two
    /// threads of a loop share one while the other idles. For a process that has the machine.
    pub own_processors: bool,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, Into::into);
        Self {
            workers,
            slice: Duration::from_millis(1),
            waiting_max: 10_000,
            begun_max: 250,
            resident_max: 250,
            own_processors: true,
        }
    }
}

/// Why a call is not taken.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The arguments do not fit.
    #[error(transparent)]
    Arguments(#[from] ArgumentError),
    /// The module belongs to another tenant.
    #[error("the function belongs to another tenant than {tenant}")]
    NotOwner {
        /// Who called.
        tenant: String,
    },
    /// Too much waits already.
    #[error("{tenant} has {waiting} calls waiting, which is the limit; call again later")]
    Full {
        /// Who called.
        tenant: String,
        /// How many wait.
        waiting: usize,
    },
    /// The module imports host functions, so the call needs an isolate with capabilities.
    #[error("the module imports host functions; its call must be prepared with capabilities")]
    NeedsCapabilities,
    /// The scheduler is shutting down.
    #[error("the scheduler is shutting down")]
    Closing,
}

/// Why there is no scheduler.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the scheduler: {0}")]
pub struct SchedulerError(#[from] std::io::Error);

/// What a tenant's calls came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls that are over, however they ended.
    pub calls: u64,
    /// CPU time, in nanoseconds.
    pub cpu_ns: u64,
    /// Calls that trapped.
    pub traps: u64,
    /// Calls that ran out of memory or fuel.
    pub limits: u64,
    /// Calls ended from outside: deadlines, CPU time, stops.
    pub ended: u64,
    /// How often the CPU was taken from a call that is over.
    pub preemptions: u64,
}

/// Whose calls these are. Clones are the same tenant.
#[derive(Clone, Debug)]
pub struct Tenant(Arc<TenantState>);

/// What all calls of a tenant hold on to. They hold this and not the scheduler, whose count of
/// holders would be on its way from one worker to the other all the time.
#[derive(Debug)]
pub(crate) struct TenantState {
    name: Box<str>,
    id: TenantId,
    shared: Weak<Shared>,
}

impl Tenant {
    /// Its name, which modules are owned by.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

/// One call, to be submitted.
pub struct Call {
    /// What is called.
    pub function: Function,
    /// With what.
    pub arguments: Vec<Value>,
    /// How far it may go.
    pub limits: CallLimits,
    /// Its streams and folders, if it imports host functions ([`Scheduler::attach`]).
    pub attached: Option<Attached>,
}

impl Call {
    /// A call of a function whose module imports nothing.
    #[must_use]
    pub fn new(function: &Function, arguments: &[Value], limits: CallLimits) -> Self {
        let (function, arguments) = (function.clone(), arguments.to_vec());
        Self { function, arguments, limits, attached: None }
    }

    /// The same with streams and folders.
    #[must_use]
    pub fn with(self, attached: Attached) -> Self {
        Self { attached: Some(attached), ..self }
    }
}

/// Workers and their queue. Dropping it ends all calls.
pub struct Scheduler {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    reactor: Option<tokio::runtime::Runtime>,
}

impl Scheduler {
    /// Starts the workers and the thread that waits for their descriptors and timers.
    ///
    /// # Errors
    /// [`SchedulerError`] when threads, timers or the signal handler cannot be had.
    pub fn new(config: &SchedulerConfig) -> Result<Self, SchedulerError> {
        preempt::install()?;
        let reactor = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("reactor")
            .enable_all()
            .build()?;
        let workers = config.workers.max(1);
        let shared = Arc::new(Shared::new(&SchedulerConfig { workers, ..config.clone() }));
        let mut scheduler = Self { shared, workers: Vec::new(), reactor: Some(reactor) };
        let processors = if config.own_processors { processors(workers) } else { Vec::new() };
        for index in 0..workers {
            scheduler.start_worker(index, processors.get(index).copied())?;
        }
        Ok(scheduler)
    }

    fn start_worker(
        &mut self,
        index: usize,
        processor: Option<usize>,
    ) -> Result<(), SchedulerError> {
        let shared = Arc::clone(&self.shared);
        let reactor = self.reactor.as_ref().map(|reactor| reactor.handle().clone());
        let reactor = reactor.ok_or_else(|| std::io::Error::other("the reactor is gone"))?;
        let (told, ready) = mpsc::sync_channel(1);
        let body = move || {
            // A host that refuses moves it about.
            let _ = processor.map(stay_on);
            // The starter waits for it.
            worker::run(index, &shared, &reactor, |result| drop(told.send(result)));
        };
        let worker = std::thread::Builder::new().name(format!("worker-{index}")).spawn(body)?;
        self.workers.push(worker);
        self.shared.lock().workers = self.workers.len();
        let dead = |_| std::io::Error::other("a worker died at its start");
        Ok(ready.recv().map_err(dead)??)
    }

    /// A new tenant with a weight among others and a class.
    #[must_use]
    pub fn tenant(&self, name: &str, weight: u32, priority: Priority) -> Tenant {
        let mut state = self.shared.lock();
        let id = state.queue.add(weight, priority);
        state.stats.push((name.to_owned(), Stats::default()));
        Tenant(Arc::new(TenantState {
            name: name.into(),
            id,
            shared: Arc::downgrade(&self.shared),
        }))
    }

    /// Opens the streams and folders that `holder` has capabilities for in `table`, for one call.
    /// While the call waits for them, its worker runs others.
    ///
    /// # Errors
    /// [`PrepareError`] names the capability.
    pub fn attach(
        &self,
        table: &Table,
        holder: &str,
        spec: Spec,
    ) -> Result<Attached, PrepareError> {
        let _inside = self.reactor.as_ref().map(tokio::runtime::Runtime::enter);
        Attached::open(table, holder, spec, Waits::Elsewhere)
    }

    /// Sets the longest time slice from now on.
    pub fn set_slice(&self, slice: Duration) {
        self.shared.set_slice_ns(nanoseconds(slice));
    }

    /// What each tenant's calls came to, by name. Calls that a worker runs one after the other are
    /// counted together, when it is another's time slice.
    #[must_use]
    pub fn stats(&self) -> Vec<(String, Stats)> {
        self.shared.lock().stats.clone()
    }

    /// Queues a call of `tenant`. `done` is told on a worker thread how it ended; it must not
    /// wait.
    ///
    /// # Errors
    /// [`SubmitError`]; then nothing was queued.
    pub fn submit(
        &self,
        tenant: &Tenant,
        call: Call,
        done: impl FnOnce(Report) + Send + 'static,
    ) -> Result<CancelHandle, SubmitError> {
        self.submitter().submit(tenant, call, done)
    }

    /// Queues a call and waits for its end.
    ///
    /// # Errors
    /// As [`Scheduler::submit`].
    pub fn run(&self, tenant: &Tenant, call: Call) -> Result<Report, SubmitError> {
        let (send, receive) = mpsc::sync_channel(1);
        self.submit(tenant, call, move |report| drop(send.send(report)))?;
        receive.recv().map_err(|_| SubmitError::Closing)
    }

    /// Has calls come in at `from`: a worker that has nothing to do waits there, and takes what
    /// comes by `take`. While none does, the caller does, which must stay here; it comes back when
    /// `is_over` says so after something came. The scheduler is to be dropped then: workers go on
    /// to see that `from` has an end.
    ///
    /// # Errors
    /// No descriptors, or there is such a place already.
    pub fn attend(
        &self,
        from: BorrowedFd<'_>,
        take: Take,
        is_over: impl Fn() -> bool,
    ) -> io::Result<()> {
        let inlet = Inlet::new(from, self.workers.len(), take)?;
        let inlet = self.shared.open(inlet).ok_or(io::ErrorKind::AlreadyExists)?;
        while !is_over() {
            inlet.wait_last();
            (inlet.take)();
        }
        Ok(())
    }

    /// A handle that submits from other threads, also from within `done`.
    #[must_use]
    pub fn submitter(&self) -> Submitter {
        Submitter { shared: Arc::clone(&self.shared) }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.shared.close();
        for worker in self.workers.drain(..) {
            // A worker that panicked has said so on standard error.
            let _ = worker.join();
        }
        let reactor = self.reactor.take();
        let entered = reactor.as_ref().map(tokio::runtime::Runtime::enter);
        for task in self.shared.drain() {
            task.abandon();
        }
        drop(entered);
        if let Some(reactor) = reactor {
            // What still blocks in a file operation is not waited for.
            reactor.shutdown_background();
        }
    }
}

/// Submits calls to a scheduler, from any thread.
#[derive(Clone)]
pub struct Submitter {
    shared: Arc<Shared>,
}

impl Submitter {
    /// As [`Scheduler::submit`].
    ///
    /// # Errors
    /// [`SubmitError`]; then nothing was queued.
    pub fn submit(
        &self,
        tenant: &Tenant,
        call: Call,
        done: impl FnOnce(Report) + Send + 'static,
    ) -> Result<CancelHandle, SubmitError> {
        let Call { function, arguments, limits, attached } = call;
        if function.owner() != tenant.name() {
            return Err(SubmitError::NotOwner { tenant: tenant.name().to_owned() });
        }
        function.check(&arguments)?;
        if function.module.uses_host && attached.is_none() {
            return Err(SubmitError::NeedsCapabilities);
        }
        let state = call::state(&function, &limits, attached);
        self.start(tenant, function, arguments, state, limits, done)
    }

    /// Queues a call whose function and arguments fit.
    ///
    /// # Errors
    /// [`SubmitError`]; then nothing was queued.
    pub(crate) fn start(
        &self,
        tenant: &Tenant,
        function: Function,
        arguments: Vec<Value>,
        state: State,
        limits: CallLimits,
        done: impl FnOnce(Report) + Send + 'static,
    ) -> Result<CancelHandle, SubmitError> {
        let cancel = state.cancel.clone();
        let threaded = matches!(function.module.link, Link::Threaded(_));
        let context = TaskContext {
            owner: Arc::clone(&tenant.0),
            deadline_ns: limits.deadline.map_or(u64::MAX, shared::monotonic_ns),
            cpu_limit_ns: limits.cpu_ns.unwrap_or(u64::MAX),
            cpu_ns: threaded.then(Arc::default),
        };
        let fuel = limits.fuel;
        let group = threaded.then(|| Box::new(GroupPlan { limits, context: context.clone() }));
        let plan = Plan { function, arguments, state, fuel, group };
        let task = Arc::new(Task::call(context, plan, Box::new(done)));
        self.shared.submit(task).map_err(|refusal| match refusal {
            Refusal::Closing => SubmitError::Closing,
            Refusal::Full { waiting } => {
                SubmitError::Full { tenant: tenant.name().to_owned(), waiting }
            }
        })?;
        Ok(cancel)
    }
}

/// The processors that this process may use, if they are `count`.
fn processors(count: usize) -> Vec<usize> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return Vec::new() };
    let all = (0..CpuSet::count()).filter(|index| set.is_set(*index).unwrap_or(false));
    let all: Vec<usize> = all.collect();
    if all.len() == count { all } else { Vec::new() }
}

/// Keeps the calling thread on one processor.
fn stay_on(processor: usize) -> nix::Result<()> {
    let mut set = CpuSet::new();
    set.set(processor)?;
    sched_setaffinity(Pid::from_raw(0), &set)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).max(1_000)
}
