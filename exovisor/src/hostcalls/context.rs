//! What an isolate is given, opened: its streams, folders, models and network.

use crate::hostcalls::gate::{Gate, STREAMS};
use crate::hostcalls::nn::{Inference, Models, Unread};
use crate::hostcalls::overlay::{Layers, Overlays};
use crate::hostcalls::sockets::{Network, Sockets};
use crate::hostcalls::stdio::Stream;
use exocell_xgate::{Capability, Handle, Kind, Live, Rights, Scope, Table};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::{FsPerms, WasiCtxBuilder};

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
pub struct Attached(pub(crate) Arc<tokio::sync::Mutex<HostState>>);

/// What hostcalls act on, and what they may.
pub(crate) struct HostState {
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
    pub(crate) fn unread(
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
        let host_state = HostState { wasi, gate, overlays, inference, sockets, streams };
        Ok((Self(Arc::new(tokio::sync::Mutex::new(host_state))), unread))
    }

    /// Makes models ready that nobody shares yet.
    pub(crate) fn read(
        &mut self,
        models: &Models,
        unread: Vec<Unread>,
    ) -> Result<(), PrepareError> {
        let Some(host_state) = Arc::get_mut(&mut self.0) else { return Ok(()) };
        let inference = &mut host_state.get_mut().inference;
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
