//! One run of an admitted module or component.

use crate::component::Command;
use crate::exec::call::{self, CallLimits, Function};
use crate::exec::drive::drive;
use crate::exec::module::{AdmittedModule, Link};
use crate::exec::outcome::Outcome;
use crate::exec::reclaim;
use crate::hostcalls::component::Wasi;
use crate::hostcalls::context::{Attached, PrepareError, Spec, Waits, quota};
use crate::hostcalls::nn::{Models, Unread};
use crate::hostcalls::state::State;
use crate::preempt;
use crate::preempt::cancel::{CancelHandle, CancelReason};
use crate::program::compiled::Form;
use crate::program::{Admitted, Program};
use crate::sched::{Priority, Report, Scheduler, SchedulerConfig};
use exocell_xgate::{Kind, Table};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use wasmtime::Store;

/// Makes admitted modules ready to run.
pub struct Isolate;

impl Isolate {
    /// Opens everything that needs the host's authority: the folders, streams and models that
    /// `holder` has capabilities for in `table`. Nothing of the module or of a model is looked
    /// into.
    ///
    /// # Errors
    /// [`PrepareError`] names the capability.
    pub fn open(
        form: Form,
        table: &Table,
        holder: &str,
        spec: Spec,
    ) -> Result<Opened, PrepareError> {
        let quotas = Quotas::of(table, holder)?;
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        // Of a component's files some operations take another thread. One is enough.
        let runtime = runtime.enable_all().max_blocking_threads(1).build()?;
        let inside = runtime.enter();
        let opening = match form {
            Form::Module => {
                let models = spec.models.clone();
                let (attached, unread) = Attached::unread(table, holder, spec, Waits::Here)?;
                Opening::Module { attached, unread, models }
            }
            Form::Component => Opening::Component(Box::new(Wasi::open(table, holder, spec)?)),
        };
        drop(inside);
        Ok(Opened { runtime, quotas, opening })
    }

    /// Opens all of it for an admitted module at once. Nothing of the module runs yet.
    ///
    /// # Errors
    /// [`PrepareError`] names the capability.
    pub fn prepare(
        admitted: &Admitted,
        table: &Table,
        holder: &str,
        spec: Spec,
    ) -> Result<Ready, PrepareError> {
        Self::open(admitted.form(), table, holder, spec)?.ready(admitted)
    }
}

/// What an isolate is granted in numbers.
#[derive(Clone, Copy)]
struct Quotas {
    memory_bytes: u64,
    fuel: u64,
    /// Beside the first.
    threads: u32,
    workers: usize,
    deadline: Option<Duration>,
}

impl Quotas {
    fn of(table: &Table, holder: &str) -> Result<Self, PrepareError> {
        let quota = |kind| quota(table, holder, kind);
        let missing = || PrepareError::Missing { holder: holder.to_owned(), kind: Kind::Memory };
        let threads = quota(Kind::Processes).unwrap_or(1).saturating_sub(1);
        Ok(Self {
            memory_bytes: quota(Kind::Memory).ok_or_else(missing)?,
            fuel: quota(Kind::Fuel).unwrap_or(0),
            threads: u32::try_from(threads).unwrap_or(u32::MAX),
            workers: quota(Kind::Cpu).map_or(1, |count| count as usize),
            deadline: quota(Kind::Time).map(Duration::from_nanos),
        })
    }
}

/// An isolate's reach, opened before there is a module. The caller may enter its jail now.
pub struct Opened {
    runtime: Runtime,
    quotas: Quotas,
    opening: Opening,
}

enum Opening {
    Module { attached: Attached, unread: Vec<Unread>, models: Models },
    Component(Box<Wasi>),
}

impl Opened {
    /// Joins it with its module or component. The models are read here, so a caller that has a
    /// jail is in it by now.
    ///
    /// # Errors
    /// [`PrepareError`]: a file that is not a model, an engine that refuses.
    pub fn ready(self, admitted: &Admitted) -> Result<Ready, PrepareError> {
        let Self { runtime, quotas, opening } = self;
        let inside = runtime.enter();
        let (start, cancel) = match (opening, &admitted.0) {
            (Opening::Module { mut attached, unread, models }, Program::Module(module)) => {
                attached.read(&models, unread)?;
                ready_module(module, attached, quotas)?
            }
            (Opening::Component(wasi), Program::Component(component)) => {
                let command = Command::new(component, *wasi, quotas.memory_bytes, quotas.fuel)?;
                let cancel = command.cancel_handle().clone();
                (Start::Component(command), cancel)
            }
            _ => {
                let message = "it was opened for a module and is a component, or the other way";
                return Err(PrepareError::Engine { message: message.to_owned() });
            }
        };
        drop(inside);
        preempt::install()?;
        Ok(Ready { cancel, start, runtime, deadline: quotas.deadline })
    }
}

fn ready_module(
    module: &Arc<AdmittedModule>,
    attached: Attached,
    quotas: Quotas,
) -> Result<(Start, CancelHandle), PrepareError> {
    let command = Function::of(module, "_start").ok_or(PrepareError::NoStart)?;
    let cancel = CancelHandle::new(Some(Arc::clone(&module.code)), module.epochs());
    let Quotas { memory_bytes, fuel, threads, workers, .. } = quotas;
    let state = State::new(Some(attached), cancel.clone(), memory_bytes, None);
    let refused = |error| PrepareError::Engine { message: format!("{error:#}") };
    let start = match &module.link {
        Link::Single(_) => {
            Start::Single(command, call::store(&module.host, state, fuel).map_err(refused)?)
        }
        Link::Threaded(_) => {
            let limits = CallLimits { memory_bytes, deadline: None, cpu_ns: None, threads, fuel };
            Start::Threaded(command, Box::new(state), limits, workers)
        }
    };
    Ok((start, cancel))
}

/// An isolate with everything open and its module joined.
pub struct Ready {
    cancel: CancelHandle,
    start: Start,
    runtime: Runtime,
    deadline: Option<Duration>,
}

/// What a run starts from.
enum Start {
    /// The one thread's store.
    Single(Function, Store<State>),
    /// What the first of several threads gets, and how many may run at once.
    Threaded(Function, Box<State>, CallLimits, usize),
    Component(Command),
}

impl Ready {
    /// What ends this isolate from another thread.
    #[must_use]
    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancel.clone()
    }

    /// Instantiates the module and calls `_start` on this thread, until it ends or is ended.
    /// Modules with threads run on workers instead, one for each processor that is granted.
    #[must_use]
    pub fn run(self) -> Outcome {
        if let Some(reason) = self.cancel.reason() {
            return Outcome::Ended(reason);
        }
        let Self { cancel, start, runtime, deadline } = self;
        match start {
            Start::Single(command, store) => {
                run_alone(&command, store, &runtime, deadline, &cancel)
            }
            Start::Threaded(command, state, limits, workers) => {
                run_threaded(command, *state, limits, workers, &runtime, deadline)
                    .unwrap_or_else(|error| Outcome::Trap(format!("cannot run threads: {error}")))
            }
            Start::Component(command) => command.run(&runtime, deadline),
        }
    }
}

fn run_alone(
    command: &Function,
    mut store: Store<State>,
    runtime: &Runtime,
    deadline: Option<Duration>,
    cancel: &CancelHandle,
) -> Outcome {
    let Link::Single(instance) = &command.module.link else {
        return Outcome::Trap("there is no memory".to_owned());
    };
    let call = async {
        let instance = preempt::instantiate(instance, &mut store)?;
        let result = call::run(command, &instance, &mut store, None, &[]).await;
        reclaim::decommit(&command.module, &instance, &mut store).await;
        result
    };
    match drive(call, runtime, cancel, deadline) {
        Ok(Ok(_)) => Outcome::Exited(0),
        Ok(Err(error)) => call::outcome(store.data(), &error),
        Err(error) => Outcome::Trap(format!("cannot watch the deadline: {error}")),
    }
}

fn run_threaded(
    command: Function,
    mut state: State,
    mut limits: CallLimits,
    workers: usize,
    runtime: &Runtime,
    deadline: Option<Duration>,
) -> Result<Outcome, Box<dyn std::error::Error>> {
    let config = SchedulerConfig::default();
    let workers = config.workers.min(workers);
    // Other commands run beside this one.
    let config = SchedulerConfig { workers, own_processors: false, ..config };
    let scheduler = Scheduler::new(&config)?;
    let tenant = scheduler.tenant(command.owner(), 1, Priority::Normal);
    let end = deadline.and_then(|deadline| Instant::now().checked_add(deadline));
    (state.deadline, limits.deadline) = (end, end);
    let (send, ended) = tokio::sync::oneshot::channel();
    let done = move |report: Report| drop(send.send(report.outcome));
    scheduler.submitter().start(&tenant, command, Vec::new(), state, limits, done)?;
    // Meanwhile this thread waits for the streams, which were opened on it.
    Ok(runtime.block_on(ended).unwrap_or(Outcome::Ended(CancelReason::Stopped)))
}
