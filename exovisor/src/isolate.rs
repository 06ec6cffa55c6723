//! One run of an admitted module.

use crate::admission::Admitted;
use crate::call::{self, Function};
use crate::ending::{Cause, Stopper};
use crate::gate::Gate;
use crate::limits::Limits;
use crate::preempt::{self, Allowance, Turn};
use crate::stdio::Stream;
use exocell_xgate::{Capability, Handle, Kind, Live, Rights, Scope, Table, format_bytes};
use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use wasmtime::{Engine, Store};
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::{FsPerms, WasiCtxBuilder};

/// What the host keeps for one isolate.
pub(crate) struct State {
    /// `None` if the module imports nothing.
    pub wasi: Option<Box<WasiP1Ctx>>,
    pub gate: Gate,
    pub stopper: Stopper,
    pub limits: Limits,
    /// When a hostcall that waits is ended, unless a watch sees to it.
    pub deadline: Option<Instant>,
}

impl State {
    /// For an instance that no tenant sees.
    pub fn detached(engine: &Engine) -> Self {
        let stopper = Stopper::new(None, Some(engine.clone()));
        Self { wasi: None, gate: Gate::default(), stopper, limits: Limits::new(0), deadline: None }
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
    /// Opens everything that needs the host's authority: the folders and streams that `holder`
    /// has capabilities for in `table`. Nothing of the module runs yet.
    ///
    /// # Errors
    /// [`PrepareError`] names the capability.
    pub fn prepare(
        admitted: &Admitted,
        table: &Table,
        holder: &str,
        spec: Spec,
    ) -> Result<Ready, PrepareError> {
        let quota = |kind| quota(table, holder, kind);
        let missing = || PrepareError::Missing { holder: holder.to_owned(), kind: Kind::Memory };
        let memory = quota(Kind::Memory).ok_or_else(missing)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let inside = runtime.enter();
        let Attached { wasi, gate } = Attached::open(table, holder, spec, Waits::Here)?;
        drop(inside);
        let module = &admitted.0;
        let command = Function::find(admitted, "_start").ok_or(PrepareError::NoStart)?;
        let stopper = Stopper::new(Some(Arc::clone(&module.code)), module.epochs());
        let wasi = Some(wasi);
        let limits = Limits::new(memory);
        let state = State { wasi, gate, stopper, limits, deadline: None };
        let refused = |error| PrepareError::Engine { message: format!("{error:#}") };
        let fuel = quota(Kind::Fuel).unwrap_or(0);
        let store = call::store(module, state, fuel).map_err(refused)?;
        let deadline = quota(Kind::Time).map(Duration::from_nanos);
        preempt::install()?;
        Ok(Ready { command, store, runtime, deadline })
    }
}

/// Where an operation on a file may keep a thread waiting.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    /// On the isolate's own thread.
    Here,
    /// On threads for that purpose, so that other isolates go on.
    Elsewhere,
}

/// The host's side of an isolate: its streams and folders, opened.
pub struct Attached {
    pub(crate) wasi: Box<WasiP1Ctx>,
    pub(crate) gate: Gate,
}

impl Attached {
    /// Opens what `holder` has capabilities for in `table`. Must be called inside a tokio runtime.
    pub(crate) fn open(
        table: &Table,
        holder: &str,
        spec: Spec,
        waits: Waits,
    ) -> Result<Self, PrepareError> {
        let held = held(table, holder);
        let mut wasi = WasiCtxBuilder::new();
        wasi.args(&spec.args).envs(&spec.env).allow_blocking_current_thread(waits == Waits::Here);
        let folders = open_folders(&mut wasi, &held)?;
        if quota(table, holder, Kind::Stdio).is_some() {
            attach(&mut wasi, spec)?;
        }
        let handles: Vec<Handle> = held.iter().map(|(handle, _)| *handle).collect();
        let gate = Gate::new(table, &handles, &folders);
        Ok(Self { wasi: Box::new(wasi.build_p1()), gate })
    }
}

fn held<'a>(table: &'a Table, holder: &str) -> Vec<(Handle, &'a Capability)> {
    table.iter().filter(|(_, capability)| capability.holder() == holder).collect()
}

fn quota(table: &Table, holder: &str, kind: Kind) -> Option<u64> {
    let held = held(table, holder);
    let found = held.iter().find(|(_, capability)| capability.kind() == kind);
    found.map(|(_, capability)| capability.quota().0)
}

fn attach(wasi: &mut WasiCtxBuilder, spec: Spec) -> std::io::Result<()> {
    if let Some(fd) = spec.stdin {
        wasi.stdin(Stream::input(fd)?);
    }
    if let Some(fd) = spec.stdout {
        wasi.stdout(Stream::output(fd)?);
    }
    if let Some(fd) = spec.stderr {
        wasi.stderr(Stream::output(fd)?);
    }
    Ok(())
}

/// Preopens each folder, in the order of the table, and answers with their tokens.
fn open_folders(
    wasi: &mut WasiCtxBuilder,
    held: &[(Handle, &Capability)],
) -> Result<Vec<Live>, PrepareError> {
    let mut tokens = Vec::new();
    for (_, capability) in held {
        let Scope::Folder(folder) = capability.scope() else { continue };
        let writable = capability.rights().contains(Rights::WRITE);
        let rights = if writable { FsPerms::ReadWrite } else { FsPerms::ReadOnly };
        let guest = folder.guest.to_string_lossy();
        wasi.preopened_dir(&folder.host, guest, rights).map_err(|error| PrepareError::Folder {
            capability: capability.name().to_owned(),
            host: folder.host.display().to_string(),
            message: format!("{error:#}"),
        })?;
        tokens.push(capability.live());
    }
    Ok(tokens)
}

/// An isolate with everything open. The caller enters its jail, then calls [`Ready::run`].
pub struct Ready {
    command: Function,
    store: Store<State>,
    runtime: Runtime,
    deadline: Option<Duration>,
}

impl Ready {
    /// What ends this isolate from another thread.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.store.data().stopper.clone()
    }

    /// Instantiates the module and calls `_start` on this thread, until it ends or is ended.
    #[must_use]
    pub fn run(mut self) -> Outcome {
        let stopper = self.stopper();
        let watch = match preempt::unblock().and_then(|()| stopper.watch(self.deadline)) {
            Ok(watch) => watch,
            Err(error) => return Outcome::Trap(format!("cannot watch the deadline: {error}")),
        };
        let result = match stopper.cause() {
            Some(cause) => return Outcome::Ended(cause),
            None => self.call(&stopper),
        };
        drop(watch);
        match result {
            Ok(()) => Outcome::Exited(0),
            Err(error) => call::outcome(self.store.data(), &error),
        }
    }

    fn call(&mut self, stopper: &Stopper) -> wasmtime::Result<()> {
        stopper.runs_on(preempt::this_thread());
        let call = call::run(&self.command, &mut self.store, &[]);
        let mut call = pin!(call);
        let result = self.runtime.block_on(poll_fn(|cx| {
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
        result.map(drop)
    }
}
