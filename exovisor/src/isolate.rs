//! One run of an admitted module.

use crate::admission::Admitted;
use crate::ending::{Cause, Stopper};
use crate::gate::Gate;
use crate::limits::Limits;
use crate::stdio::Stream;
use exocell_xgate::{Capability, Handle, Kind, Live, Rights, Scope, Table, format_bytes};
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::runtime::Runtime;
use wasmtime::{InstancePre, Store, Trap, UpdateDeadline};
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::{FsPerms, I32Exit, WasiCtxBuilder};

/// What the host keeps for one isolate.
pub(crate) struct State {
    pub wasi: WasiP1Ctx,
    pub gate: Gate,
    pub runtime: Runtime,
    pub stopper: Stopper,
    pub limits: Limits,
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
        let held: Vec<(Handle, &Capability)> =
            table.iter().filter(|(_, capability)| capability.holder() == holder).collect();
        let quota = |kind: Kind| {
            let found = held.iter().find(|(_, capability)| capability.kind() == kind);
            found.map(|(_, capability)| capability.quota().0)
        };
        let missing = || PrepareError::Missing { holder: holder.to_owned(), kind: Kind::Memory };
        let memory = quota(Kind::Memory).ok_or_else(missing)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut wasi = context(&spec);
        let folders = open_folders(&mut wasi, &held)?;
        if quota(Kind::Stdio).is_some() {
            let _inside = runtime.enter();
            attach(&mut wasi, spec)?;
        }
        let handles: Vec<Handle> = held.iter().map(|(handle, _)| *handle).collect();
        let gate = Gate::new(table, &handles, &folders);
        let stopper = Stopper::new(admitted.module.module().engine());
        let wasi = wasi.build_p1();
        let state = State { wasi, gate, runtime, stopper, limits: Limits::new(memory) };
        let store = store(admitted.module.module().engine(), state, quota(Kind::Fuel))?;
        let deadline = quota(Kind::Time).map(Duration::from_nanos);
        Ok(Ready { module: admitted.module.clone(), store, deadline })
    }
}

fn context(spec: &Spec) -> WasiCtxBuilder {
    let mut wasi = WasiCtxBuilder::new();
    wasi.args(&spec.args).envs(&spec.env).allow_blocking_current_thread(true);
    wasi
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

fn store(
    engine: &wasmtime::Engine,
    state: State,
    fuel: Option<u64>,
) -> Result<Store<State>, PrepareError> {
    let stopper = state.stopper.clone();
    let mut store = Store::new(engine, state);
    store.limiter(|state| &mut state.limits);
    if let Some(fuel) = fuel {
        let refused = |error| PrepareError::Engine { message: format!("{error:#}") };
        store.set_fuel(fuel).map_err(refused)?;
    }
    // The epoch is the engine's: others' ends advance it too.
    store.epoch_deadline_callback(move |_| match stopper.cause() {
        Some(_) => Ok(UpdateDeadline::Interrupt),
        None => Ok(UpdateDeadline::Continue(1)),
    });
    store.set_epoch_deadline(1);
    Ok(store)
}

/// An isolate with everything open. The caller enters its jail, then calls [`Ready::run`].
pub struct Ready {
    module: InstancePre<State>,
    store: Store<State>,
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
        let watch = match self.deadline.map(|limit| stopper.watch(limit)).transpose() {
            Ok(watch) => watch,
            Err(error) => return Outcome::Trap(format!("cannot watch the deadline: {error}")),
        };
        let result = match stopper.cause() {
            Some(cause) => return Outcome::Ended(cause),
            None => self.call(),
        };
        drop(watch);
        match result {
            Ok(()) => Outcome::Exited(0),
            Err(error) => self.outcome(&error),
        }
    }

    fn call(&mut self) -> wasmtime::Result<()> {
        let instance = self.module.instantiate(&mut self.store)?;
        let start = instance.get_typed_func::<(), ()>(&mut self.store, "_start")?;
        start.call(&mut self.store, ())
    }

    fn outcome(&self, error: &wasmtime::Error) -> Outcome {
        let State { stopper, limits, .. } = self.store.data();
        if let Some(exit) = error.downcast_ref::<I32Exit>() {
            return Outcome::Exited(exit.0);
        }
        if let Some(cause) = stopper.cause() {
            return Outcome::Ended(cause);
        }
        match error.downcast_ref::<Trap>() {
            Some(Trap::OutOfFuel) => Outcome::OutOfFuel,
            // A program that cannot grow aborts; libc does it with `unreachable`.
            Some(Trap::UnreachableCodeReached) | None if limits.refused() => {
                Outcome::OutOfMemory { limit: limits.bytes_max() }
            }
            Some(trap) => Outcome::Trap(trap.to_string()),
            None => Outcome::Trap(format!("{:#}", error.root_cause())),
        }
    }
}
