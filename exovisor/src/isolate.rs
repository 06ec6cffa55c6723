//! One run of an admitted module or component.

use crate::admission::{Admitted, AdmittedModule, Link, Program};
use crate::builtins::Heap;
use crate::call::{self, CallLimits, Function};
use crate::compiled::Form;
use crate::component::{Command, Wasi};
use crate::ending::{Cause, Stopper};
use crate::gate::{Gate, STREAMS};
use crate::limits::Limits;
use crate::nn::{Inference, Models, Unread};
use crate::overlay::{Layers, Overlays};
use crate::preempt::{self, Allowance, Turn};
use crate::sched::{Priority, Report, Scheduler, SchedulerConfig};
use crate::sockets::{Network, Sockets};
use crate::stdio::Stream;
use crate::teardown;
use crate::threads::Team;
use exocell_xgate::{Capability, Handle, Kind, Live, Rights, Scope, Table, format_bytes};
use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use wasmtime::{Engine, Memory, Store};
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::{FsPerms, WasiCtxBuilder};

/// What the host keeps for one isolate.
pub(crate) struct State {
    /// `None` if the module imports nothing that needs it.
    pub attached: Option<Attached>,
    /// Once the program wanted memory from the host.
    pub heap: Option<Box<Heap>>,
    pub stopper: Stopper,
    pub limits: Limits,
    /// When a hostcall that waits is ended, unless a watch sees to it.
    pub deadline: Option<Instant>,
    /// The threads of an isolate that may have some.
    pub team: Option<Arc<Team>>,
    /// Whether a loop of the host calls the program back.
    pub inside: bool,
    /// The memory that is packed while the call is dormant, once there is one.
    pub memory: Option<Memory>,
    /// What a component's calls act on.
    pub wasi: Option<Box<Wasi>>,
}

impl State {
    pub fn new(
        attached: Option<Attached>,
        stopper: Stopper,
        bytes_max: u64,
        deadline: Option<Instant>,
    ) -> Self {
        let limits = Limits::new(bytes_max);
        Self {
            attached,
            heap: None,
            stopper,
            limits,
            deadline,
            team: None,
            inside: false,
            memory: None,
            wasi: None,
        }
    }

    /// A call is over: lets go of what was its own.
    pub fn forget(&mut self) {
        (self.attached, self.heap, self.team, self.memory) = (None, None, None, None);
    }

    /// What a component's calls act on; nothing, if it was given nothing.
    pub fn wasi(&mut self) -> &mut Wasi {
        self.wasi.get_or_insert_default()
    }

    /// For an instance that no tenant sees.
    pub fn detached(engine: &Engine) -> Self {
        Self::new(None, Stopper::new(None, Some(engine.clone())), 0, None)
    }
}

/// What a run is given beside its capabilities.
#[derive(Default)]
pub struct Spec {
    /// Arguments; the first is the program's name.
    pub args: Vec<String>,
    /// Environment, all of it: nothing is inherited.
    pub env: Vec<(String, String)>,
    /// Standard input; without one it is at its end. Ignored unless stdio is granted, like the
    /// two others.
    pub stdin: Option<OwnedFd>,
    /// Standard output; without one it is swallowed.
    pub stdout: Option<OwnedFd>,
    /// Standard error; without one it is swallowed.
    pub stderr: Option<OwnedFd>,
    /// What the tenant has changed so far in folders that it sees privately. Without one it
    /// begins with the folders as they are, and its changes go with the isolate.
    pub layers: Layers,
    /// Models that were read before; those of the capabilities come to them.
    pub models: Models,
    /// What its sockets reach others through; without one they reach nobody. Ignored unless a
    /// network is granted.
    pub network: Option<Arc<dyn Network>>,
}

/// Why an isolate could not be made ready.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// A capability without which nothing runs.
    #[error("{holder} has no capability `{kind}`, without which an isolate does not run")]
    Missing {
        /// Who should hold it.
        holder: String,
        /// What is missing.
        kind: Kind,
    },
    /// A folder of the grant cannot be opened.
    #[error("cannot open the folder {host} of capability `{capability}`: {message}")]
    Folder {
        /// Name of the capability.
        capability: String,
        /// The folder on the host.
        host: String,
        /// What the host says.
        message: String,
    },
    /// A model of the grant cannot be had.
    #[error("cannot take the model {file} of capability `{capability}`: {message}")]
    Model {
        /// Name of the capability.
        capability: String,
        /// The file on the host.
        file: String,
        /// What is wrong with it.
        message: String,
    },
    /// A stream or the event loop cannot be set up.
    #[error("cannot set up the isolate's streams: {0}")]
    Host(#[from] std::io::Error),
    /// There is nothing to call.
    #[error("this Wasm module exports no function `_start`; only commands can be run")]
    NoStart,
    /// The engine refuses the fuel or the store.
    #[error("cannot set up the isolate: {message}")]
    Engine {
        /// What it says.
        message: String,
    },
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It returned (0) or called `proc_exit`.
    Exited(i32),
    /// It trapped; the words are wasmtime's.
    Trap(String),
    /// Its memory limit stopped it.
    OutOfMemory {
        /// The limit, in bytes.
        limit: u64,
    },
    /// Its instructions were used up.
    OutOfFuel,
    /// It was ended from outside.
    Ended(Cause),
}

impl Outcome {
    /// The exit status a shell would show: a trap is 134 (128 + SIGABRT), all that ends it from
    /// outside or by a limit is 137 (128 + SIGKILL).
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exited(code) => *code as u8,
            Self::Trap(_) => 134,
            Self::OutOfMemory { .. } | Self::OutOfFuel | Self::Ended(_) => 137,
        }
    }

    /// What happened, if it was not the program's own end.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Exited(_) => None,
            Self::Trap(text) => Some(text.clone()),
            Self::OutOfMemory { limit } => {
                Some(format!("the memory limit of {} was reached", format_bytes(*limit)))
            }
            Self::OutOfFuel => Some("the instructions granted by `fuel` are used up".to_owned()),
            Self::Ended(Cause::Deadline) => {
                Some("the deadline granted by `time` is over".to_owned())
            }
            Self::Ended(Cause::Revoked) => Some("a capability it needs was revoked".to_owned()),
            Self::Ended(Cause::Stopped) => Some("it was stopped".to_owned()),
            Self::Ended(Cause::CpuTime) => Some("its CPU time is used up".to_owned()),
        }
    }
}

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
        let reach = match form {
            Form::Module => {
                let models = spec.models.clone();
                let (attached, unread) = Attached::unread(table, holder, spec, Waits::Here)?;
                Opening::Module { attached, unread, models }
            }
            Form::Component => Opening::Component(Box::new(Wasi::open(table, holder, spec)?)),
        };
        drop(inside);
        Ok(Opened { runtime, quotas, reach })
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
    reach: Opening,
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
    /// [`PrepareError`]: a model that is none, an engine that refuses.
    pub fn ready(self, admitted: &Admitted) -> Result<Ready, PrepareError> {
        let Self { runtime, quotas, reach } = self;
        let inside = runtime.enter();
        let (start, stopper) = match (reach, &admitted.0) {
            (Opening::Module { mut attached, unread, models }, Program::Module(module)) => {
                attached.read(&models, unread)?;
                ready_module(module, attached, quotas)?
            }
            (Opening::Component(wasi), Program::Component(component)) => {
                let command = Command::new(component, *wasi, quotas.memory_bytes, quotas.fuel)?;
                let stopper = command.stopper().clone();
                (Start::Component(command), stopper)
            }
            _ => {
                let message = "it was opened for a module and is a component, or the other way";
                return Err(PrepareError::Engine { message: message.to_owned() });
            }
        };
        drop(inside);
        preempt::install()?;
        Ok(Ready { stopper, start, runtime, deadline: quotas.deadline })
    }
}

fn ready_module(
    module: &Arc<AdmittedModule>,
    attached: Attached,
    quotas: Quotas,
) -> Result<(Start, Stopper), PrepareError> {
    let command = Function::of(module, "_start").ok_or(PrepareError::NoStart)?;
    let stopper = Stopper::new(Some(Arc::clone(&module.code)), module.epochs());
    let Quotas { memory_bytes, fuel, threads, workers, .. } = quotas;
    let state = State::new(Some(attached), stopper.clone(), memory_bytes, None);
    let refused = |error| PrepareError::Engine { message: format!("{error:#}") };
    let start = match &module.link {
        Link::Alone(_) => {
            Start::Alone(command, call::store(&module.host, state, fuel).map_err(refused)?)
        }
        Link::Team(_) => {
            let limits = CallLimits { memory_bytes, deadline: None, cpu_ns: None, threads, fuel };
            Start::Team(command, Box::new(state), limits, workers)
        }
    };
    Ok((start, stopper))
}

/// Where an operation on a file may keep a thread waiting.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    /// On the isolate's own thread.
    Here,
    /// On threads for that purpose, so that other isolates go on.
    Elsewhere,
}

/// The host's side of an isolate: its streams and folders, opened. Its threads share it.
#[derive(Clone)]
pub struct Attached(pub(crate) Arc<tokio::sync::Mutex<Reach>>);

/// What hostcalls act on, and what they may.
pub(crate) struct Reach {
    pub wasi: WasiP1Ctx,
    pub gate: Gate,
    pub overlays: Overlays,
    pub inference: Inference,
    pub sockets: Sockets,
    /// Standard input, output and error, where they are attached.
    pub streams: [Option<Stream>; 3],
}

impl Attached {
    /// Opens what `holder` has capabilities for in `table`, and reads its models. Must be called
    /// inside a tokio runtime.
    pub(crate) fn open(
        table: &Table,
        holder: &str,
        spec: Spec,
        waits: Waits,
    ) -> Result<Self, PrepareError> {
        let models = spec.models.clone();
        let (mut attached, unread) = Self::unread(table, holder, spec, waits)?;
        attached.read(&models, unread)?;
        Ok(attached)
    }

    /// The same with models that are only opened.
    fn unread(
        table: &Table,
        holder: &str,
        spec: Spec,
        waits: Waits,
    ) -> Result<(Self, Vec<Unread>), PrepareError> {
        let held = held(table, holder);
        let mut wasi = WasiCtxBuilder::new();
        wasi.args(&spec.args).envs(&spec.env).allow_blocking_current_thread(waits == Waits::Here);
        let disk_bytes = quota(table, holder, Kind::Disk).unwrap_or(0);
        let mut overlays = Overlays::new(spec.layers.clone(), disk_bytes, waits);
        let folders = open_folders(&mut wasi, &mut overlays, &held)?;
        let unread = open_models(&held)?;
        let inference = Inference::new(waits);
        let sockets = Sockets::new(spec.network.clone());
        let streams = match quota(table, holder, Kind::Stdio) {
            Some(_) => attach(&mut wasi, spec)?,
            None => Default::default(),
        };
        let handles: Vec<Handle> = held.iter().map(|(handle, _)| *handle).collect();
        let gate = Gate::new(table, &handles, &folders);
        let wasi = wasi.build_p1();
        let reach = Reach { wasi, gate, overlays, inference, sockets, streams };
        Ok((Self(Arc::new(tokio::sync::Mutex::new(reach))), unread))
    }

    /// Makes models ready that nobody shares yet.
    fn read(&mut self, models: &Models, unread: Vec<Unread>) -> Result<(), PrepareError> {
        let Some(reach) = Arc::get_mut(&mut self.0) else { return Ok(()) };
        let inference = &mut reach.get_mut().inference;
        unread.into_iter().try_for_each(|unread| {
            let (capability, file) = (format!("model:{}", unread.name()), unread.path().to_owned());
            inference.grant(models, unread).map_err(|error| PrepareError::Model {
                capability,
                file: file.display().to_string(),
                message: error.to_string(),
            })
        })
    }
}

pub(crate) fn held<'a>(table: &'a Table, holder: &str) -> Vec<(Handle, &'a Capability)> {
    table.iter().filter(|(_, capability)| capability.holder() == holder).collect()
}

pub(crate) fn quota(table: &Table, holder: &str, kind: Kind) -> Option<u64> {
    let held = held(table, holder);
    let found = held.iter().find(|(_, capability)| capability.kind() == kind);
    found.map(|(_, capability)| capability.quota().0)
}

fn attach(wasi: &mut WasiCtxBuilder, spec: Spec) -> std::io::Result<[Option<Stream>; 3]> {
    let stdin = spec.stdin.map(Stream::input).transpose()?;
    let stdout = spec.stdout.map(Stream::output).transpose()?;
    let stderr = spec.stderr.map(Stream::output).transpose()?;
    if let Some(stream) = &stdin {
        wasi.stdin(stream.clone());
    }
    if let Some(stream) = &stdout {
        wasi.stdout(stream.clone());
    }
    if let Some(stream) = &stderr {
        wasi.stderr(stream.clone());
    }
    Ok([stdin, stdout, stderr])
}

fn open_models(held: &[(Handle, &Capability)]) -> Result<Vec<Unread>, PrepareError> {
    let mut opened = Vec::new();
    for (_, capability) in held.iter().filter(|(_, held)| held.kind() == Kind::Model) {
        opened.extend(Unread::open(capability).map_err(|error| PrepareError::Model {
            capability: capability.name().to_owned(),
            file: capability.scope().to_string(),
            message: error.to_string(),
        })?);
    }
    Ok(opened)
}

/// What a folder's capability lets its isolate do with the folder itself.
pub(crate) fn folder_perms(capability: &Capability) -> FsPerms {
    match capability.rights().contains(Rights::WRITE) {
        true => FsPerms::ReadWrite,
        false => FsPerms::ReadOnly,
    }
}

/// Preopens each folder, in the order of the table, and answers with their tokens.
fn open_folders(
    wasi: &mut WasiCtxBuilder,
    overlays: &mut Overlays,
    held: &[(Handle, &Capability)],
) -> Result<Vec<Live>, PrepareError> {
    let mut tokens = Vec::new();
    for (_, capability) in held {
        let Scope::Folder(folder) = capability.scope() else { continue };
        let refused = |message: String| PrepareError::Folder {
            capability: capability.name().to_owned(),
            host: folder.host.display().to_string(),
            message,
        };
        let rights = folder_perms(capability);
        let guest = folder.guest.to_string_lossy();
        wasi.preopened_dir(&folder.host, guest, rights)
            .map_err(|error| refused(format!("{error:#}")))?;
        if capability.rights().contains(Rights::OVERLAY) {
            let fd = STREAMS.end + tokens.len() as u32;
            overlays.preopen(fd, &folder.host).map_err(|error| refused(error.to_string()))?;
        }
        tokens.push(capability.live());
    }
    Ok(tokens)
}

/// An isolate with everything open and its module joined.
pub struct Ready {
    stopper: Stopper,
    start: Start,
    runtime: Runtime,
    deadline: Option<Duration>,
}

/// What a run starts from.
enum Start {
    /// The one thread's store.
    Alone(Function, Store<State>),
    /// What the first of several threads gets, and how many may run at once.
    Team(Function, Box<State>, CallLimits, usize),
    Component(Command),
}

impl Ready {
    /// What ends this isolate from another thread.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Instantiates the module and calls `_start` on this thread, until it ends or is ended.
    /// Modules with threads run on workers instead, one for each processor that is granted.
    #[must_use]
    pub fn run(self) -> Outcome {
        if let Some(cause) = self.stopper.cause() {
            return Outcome::Ended(cause);
        }
        let Self { stopper, start, runtime, deadline } = self;
        match start {
            Start::Alone(command, store) => {
                run_alone(&command, store, &runtime, deadline, &stopper)
            }
            Start::Team(command, state, limits, workers) => {
                run_team(command, *state, limits, workers, &runtime, deadline)
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
    stopper: &Stopper,
) -> Outcome {
    let Link::Alone(instance) = &command.module.link else {
        return Outcome::Trap("there is no memory".to_owned());
    };
    let call = async {
        let instance = call::instantiate(instance, &mut store)?;
        let result = call::run(command, &instance, &mut store, None, &[]).await;
        teardown::give_back(&command.module, &instance, &mut store).await;
        result
    };
    match drive(call, runtime, stopper, deadline) {
        Ok(Ok(_)) => Outcome::Exited(0),
        Ok(Err(error)) => call::outcome(store.data(), &error),
        Err(error) => Outcome::Trap(format!("cannot watch the deadline: {error}")),
    }
}

/// Runs a call of guest code on this thread until it is done, whatever signals come. Who ends it
/// makes it done.
///
/// # Errors
/// When its end cannot be watched for.
pub(crate) fn drive<T>(
    call: impl Future<Output = T>,
    runtime: &Runtime,
    stopper: &Stopper,
    deadline: Option<Duration>,
) -> std::io::Result<T> {
    preempt::unblock()?;
    let watch = stopper.watch(deadline)?;
    stopper.runs_on(preempt::this_thread());
    let mut call = Box::pin(call);
    let result = runtime.block_on(poll_fn(|cx| {
        loop {
            let turn = stopper.guest().map(|guest| Turn::begin(guest, 0, Allowance::ENDLESS));
            let poll = call.as_mut().poll(cx);
            drop(turn);
            // A signal came: either it was ended, which the next poll tells it, or not.
            if poll.is_pending() && preempt::left() {
                continue;
            }
            return poll;
        }
    }));
    stopper.runs_on(0);
    drop((watch, call));
    Ok(result)
}

fn run_team(
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
    Ok(runtime.block_on(ended).unwrap_or(Outcome::Ended(Cause::Stopped)))
}
