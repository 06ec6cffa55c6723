//! A cell of strength `isolate`: a Wasm module under the same table, record
//! and supervisor as a `vm` cell.
//!
//! A jailed process checks and compiles the module ([`compile`], so that a
//! refusal comes before there is a cell); the supervisor opens what was granted,
//! enters its own jail, and only there loads the code, reads models, and runs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use exocell_agent::{Kind, Reply};
use exocell_exovisor::{
    Admission, CancelHandle, CancelReason, Compiled, Isolate, Jailed, Metering, Opened, Outcome,
    Policy, Ready, Spec, Use,
};
use exocell_network::switch::Port;
use exocell_vmm::jail::{self, JailRoot, ThreadClass};
use exocell_xgate::{CapabilitySet, Kind as CapabilityKind, Rights, Table};

use crate::compile::{Build, Code};
use crate::control::{Contain, Counters};
use crate::granted::Links;
use crate::launch::{Inheritance, Request};
use crate::layout::Layout;
use crate::limits::Limits;
use crate::network::{self, Control, Network, PlannedNetwork};
use crate::output::Output;
use crate::parent::Place;
use crate::plan::PlannedFolder;
use crate::record::Status;
use crate::relayed::Relaying;
use crate::supervisor::clients::{self, Services};
use crate::supervisor::contained::Contained;
use crate::supervisor::{Event, Shared, Signal, Sink, ending, restrict_paths, thread};
use crate::{CellError, CellSpec, granted};

/// Networks between cells carry packets, and isolates have none.
const NO_NETWORKS: &str = "networks between cells are for vm cells; leave out --network";

/// The stack of the thread that runs the module.
const STACK_BYTES: usize = 8 << 20;
/// What a supervisor may take of its own, in bytes: its engine, streams, buffers, stacks.
const OWN_BYTES: u64 = 256 << 20;
/// What it may take for each of a module's threads, in bytes: a stack of 1 MiB, and its store.
const THREAD_BYTES: u64 = 5 << 18;
/// What it may take for a model as it is made ready and computed, in bytes.
const MODEL_MEMORY_BYTES: u64 = 1 << 30;
/// The holder's name in the capability table.
const HOLDER: &str = "cell";
/// What it can lose while it runs: all that hostcalls ask for.
const REVOCABLE: [CapabilityKind; 7] = [
    CapabilityKind::Folder,
    CapabilityKind::Network,
    CapabilityKind::Clock,
    CapabilityKind::Random,
    CapabilityKind::Stdio,
    CapabilityKind::Processes,
    CapabilityKind::Model,
];

/// An isolate that can be started.
pub struct IsolatePlan {
    code: Code,
    /// With its engine made, so that the supervisor need not.
    admission: Admission,
    folders: Vec<PlannedFolder>,
    /// `None`: its sockets reach nobody.
    pub(crate) network: Option<PlannedNetwork>,
    args: Vec<String>,
    env: Vec<(String, String)>,
    place: Option<Place>,
}

impl IsolatePlan {
    /// Has the module checked against its grant and compiled.
    pub fn new(
        layout: &Layout,
        spec: &CellSpec,
        caps: &CapabilitySet,
        request: &Request,
    ) -> Result<Self, CellError> {
        refuse_vm_flags(spec)?;
        let path = Path::new(&spec.image);
        let (policy, metering) = (Policy::default(), Metering::of(caps));
        let admission = Admission::new(policy.clone());
        let build = Build {
            policy: &policy,
            wanted: Use::Command,
            metering,
            caps,
            deadline: request.deadline(caps),
        };
        let mut warm = Ok(());
        let code = build.compile(layout, &Links::outside(layout).module(path)?, || {
            warm = admission.warm(metering)
        })?;
        warm.map_err(|error| CellError::Module(error.to_string()))?;
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
        let args = std::iter::once(name).chain(spec.command.iter().cloned()).collect();
        if !spec.networks.is_empty() {
            return Err(CellError::Usage(NO_NETWORKS.to_owned()));
        }
        let network = PlannedNetwork::new(layout, spec, caps, Vec::new())?;
        let (folders, env) = (granted::open(layout, caps, &spec.locations)?, pairs(&spec.env));
        Ok(Self { code, admission, folders, network, args, env, place: Place::take()? })
    }
}

/// The path of a descriptor of this process.
fn held(dir: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
}

/// `NAME=value` entries; the last of a name wins.
fn pairs(entries: &[String]) -> Vec<(String, String)> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for (name, value) in entries.iter().filter_map(|entry| entry.split_once('=')) {
        pairs.retain(|(known, _)| known != name);
        pairs.push((name.to_owned(), value.to_owned()));
    }
    pairs
}

/// Flags that mean something only where there is a guest.
fn refuse_vm_flags(spec: &CellSpec) -> Result<(), CellError> {
    let given = [
        (spec.tty, "--tty"),
        (spec.entrypoint.is_some(), "--entrypoint"),
        (spec.user.is_some(), "--user"),
        (spec.hostname.is_some(), "--hostname"),
        (spec.working_dir.is_some(), "--workdir"),
    ];
    match given.iter().find(|(given, _)| *given) {
        Some((_, flag)) => Err(CellError::Usage(format!(
            "{flag} is for vm cells; an isolate has no guest to apply it to"
        ))),
        None => Ok(()),
    }
}

/// An isolate in its jail.
pub(crate) struct Running {
    ready: Mutex<Option<Started>>,
    reach: Arc<Reach>,
    /// Held until its supervisor ends.
    _place: Option<Place>,
}

struct Started {
    ready: Ready,
    /// The threads that carry the module's output away.
    pumps: Vec<JoinHandle<()>>,
    /// Those of its network.
    network: Vec<JoinHandle<()>>,
}

struct Reach {
    table: Mutex<Table>,
    memory_limit_bytes: u64,
    /// Until the module has ended.
    network: Mutex<Option<Control>>,
}

impl Reach {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn network(&self) -> MutexGuard<'_, Option<Control>> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens what was granted, enters the jail, loads the module and connects the standard streams.
/// The caller has one thread.
pub(crate) fn start(
    inheritance: &Inheritance,
    plan: IsolatePlan,
    shared: &Shared,
    status: &mut Status,
    deadline: Option<Instant>,
) -> Result<Running, CellError> {
    let network = plan.network.map(network::start).transpose()?;
    let (relaying, control) = network.map(Network::relay).transpose()?.unzip();
    let mut table = Table::new(Table::CAPACITY_MAX);
    // As they are held: by their paths a cell could have put others there meanwhile.
    let held = plan.folders.iter().map(|folder| held(&folder.dir));
    let install = inheritance.caps.clone().with_folder_hosts(held).install(&mut table, HOLDER);
    install.map_err(|error| CellError::Usage(format!("the capability table: {error}")))?;
    let streams = Streams::open(inheritance.spec.stdin)?;
    let spec = Spec {
        args: plan.args,
        env: plan.env,
        stdin: streams.stdin.0,
        stdout: Some(streams.stdout.1),
        stderr: Some(streams.stderr.1),
        network: relaying.as_ref().map(Relaying::network),
        ..Spec::default()
    };
    let opened = Isolate::open(plan.code.form, &table, HOLDER, spec)
        .map_err(|error| CellError::Module(error.to_string()))?;
    JailRoot::new(inheritance.record.directory())?.seal()?;
    nix::unistd::fchdir(&inheritance.record_dir)
        .map_err(|errno| CellError::host("cannot enter the record")(errno.into()))?;
    restrict_paths(inheritance, &plan.folders)?;
    // Files of the operator's stay open to it as they are to him, and that is all.
    jail::forgo_capabilities();
    jail::keep_capabilities(&[jail::Capability::DacOverride, jail::Capability::Fowner])
        .map_err(CellError::host("cannot give up capabilities"))?;
    limit_memory(&inheritance.caps, plan.code.file.bytes())?;
    status.times.jailed_us = inheritance.requested.elapsed().as_micros() as u64;
    jail::restrict_calls(ThreadClass::Loading)?;
    let ready = within(inheritance, deadline, || load(&plan.code, &plan.admission, opened))??;
    jail::restrict_calls(ThreadClass::Isolate)?;
    let pumps = vec![
        pump(streams.stdout.0, Kind::Stdout, &shared.output)?,
        pump(streams.stderr.0, Kind::Stderr, &shared.output)?,
    ];
    let network = relaying.map(Relaying::start).transpose()?.unwrap_or_default();
    let cancel = ready.cancel_handle();
    shared.input.open(Sink::Pipe(streams.stdin.1), ending_signal(shared, cancel));
    let memory_limit_bytes = inheritance.caps.memory_bytes().unwrap_or(0);
    let reach =
        Reach { table: Mutex::new(table), memory_limit_bytes, network: Mutex::new(control) };
    let started = Some(Started { ready, pumps, network });
    Ok(Running { ready: Mutex::new(started), reach: Arc::new(reach), _place: plan.place })
}

/// Bounds what this process may take, whatever becomes of it: the accounting of its memory is code
/// beside the module's own.
fn limit_memory(caps: &CapabilitySet, code_bytes: u64) -> Result<(), CellError> {
    let threads = u64::from(caps.process_max().unwrap_or(1));
    // Layers over folders are held in memory; without one there is nothing to hold.
    let has_layers = caps.folders().iter().any(|folder| folder.rights.contains(Rights::OVERLAY));
    let layers_bytes = caps.disk_bytes().filter(|_| has_layers).unwrap_or(0);
    let granted = [
        caps.memory_bytes().unwrap_or(0),
        layers_bytes,
        (caps.models().len() as u64).saturating_mul(MODEL_MEMORY_BYTES),
        threads.saturating_mul(THREAD_BYTES),
        // As it is read, and where it comes to lie.
        code_bytes.saturating_mul(2),
    ];
    let most = granted.into_iter().fold(OWN_BYTES, u64::saturating_add);
    let resource = nix::sys::resource::Resource::RLIMIT_DATA;
    let (_, allowed) = nix::sys::resource::getrlimit(resource)
        .map_err(|errno| CellError::host("cannot read limits")(errno.into()))?;
    let most = most.min(allowed);
    nix::sys::resource::setrlimit(resource, most, most)
        .map_err(|errno| CellError::host("cannot limit memory")(errno.into()))
}

/// Joins the code with what was opened; reads models. The first time that anything of a tenant's
/// is looked into outside of the process that compiled it.
fn load(code: &Code, admission: &Admission, opened: Opened) -> Result<Ready, CellError> {
    // SAFETY: this process is in its jail by now (`start`): it can reach what the module was
    // granted and its own record, no more, and is under the isolate's filter but for executable
    // memory. Needed because code that was compiled elsewhere has no safe form.
    let jailed = unsafe { Jailed::new() };
    let refused = |error: &dyn std::fmt::Display| CellError::Module(error.to_string());
    let compiled = Compiled::read(code.file.file());
    let compiled = compiled.map_err(|error| refused(&format!("its compiled form: {error}")))?;
    let admitted = admission.load("", &compiled, &jailed).map_err(|error| refused(&error))?;
    opened.ready(&admitted).map_err(|error| refused(&error))
}

/// Does `work`, and ends the cell if it is not done by `deadline`.
fn within<T>(
    inheritance: &Inheritance,
    deadline: Option<Instant>,
    work: impl FnOnce() -> T,
) -> Result<T, CellError> {
    let Some(deadline) = deadline else { return Ok(work()) };
    let (done, waits) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let watch = move || {
            let left = deadline.saturating_duration_since(Instant::now());
            if waits.recv_timeout(left) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                // Nothing ends the other thread but the end of the process.
                ending::fail(inheritance, &CellError::Deadline);
                std::process::exit(125);
            }
        };
        std::thread::Builder::new()
            .name("deadline".to_owned())
            .stack_size(256 << 10)
            .spawn_scoped(scope, watch)
            .map_err(CellError::host("cannot watch the deadline"))?;
        let result = work();
        drop(done);
        Ok(result)
    })
}

/// The module's streams as pipes, so that its output takes the same way as a
/// guest's: the module's end, and ours.
struct Streams {
    stdin: (Option<OwnedFd>, Option<File>),
    stdout: (OwnedFd, OwnedFd),
    stderr: (OwnedFd, OwnedFd),
}

impl Streams {
    fn open(interactive: bool) -> Result<Self, CellError> {
        let pipe = || {
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(|errno| {
                CellError::host("cannot connect the module's streams")(errno.into())
            })
        };
        let stdin = if interactive {
            let (read, write) = pipe()?;
            (Some(read), Some(File::from(write)))
        } else {
            (None, None)
        };
        Ok(Self { stdin, stdout: pipe()?, stderr: pipe()? })
    }
}

/// A module has no handlers: every signal ends it, with a program's exit code.
fn ending_signal(shared: &Shared, cancel: CancelHandle) -> Signal {
    let events = shared.events.clone();
    Arc::new(move |number| {
        let code = 128 + (number & 0x7f);
        let _ = events.send(Event::Program(Reply::exited(code)));
        cancel.request(CancelReason::Stopped);
        true
    })
}

fn pump(from: OwnedFd, kind: Kind, output: &Output) -> Result<JoinHandle<()>, CellError> {
    let output = output.clone();
    thread("output", move || {
        let mut from = File::from(from);
        let mut buffer = vec![0; 32 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            output.write(kind, &buffer[..count]);
        }
    })
}

impl Running {
    pub(crate) fn services(&self) -> Arc<dyn Services> {
        self.reach.clone()
    }

    /// Runs the module on a thread of its own.
    pub(crate) fn run_program(&self, shared: &Shared) -> Result<(), CellError> {
        let taken = self.ready.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Started { ready, pumps, network }) = taken else { return Ok(()) };
        let (shared, reach) = (shared.clone(), Arc::clone(&self.reach));
        std::thread::Builder::new()
            .name("isolate".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                shared.output.started(1);
                // Running it to its end closes its streams and sockets, and that ends the pumps
                // and, with the control over it, the network.
                let outcome = ready.run();
                drop(reach.network().take());
                for ended in pumps.into_iter().chain(network) {
                    // A thread that panicked has nothing left to carry.
                    let _ = ended.join();
                }
                let reply = reply(&outcome, &shared.output);
                let _ = shared.events.send(Event::Program(reply));
            })
            .map(drop)
            .map_err(CellError::host("cannot start the isolate's thread"))
    }
}

/// The program's end; what was not its own is said on standard error.
fn reply(outcome: &Outcome, output: &Output) -> Reply {
    if let Some(reason) = outcome.reason() {
        output.notice(&reason);
    }
    Reply::exited(outcome.exit_code())
}

impl Services for Reach {
    fn contain(&self, _: Contain, _: Vec<OwnedFd>) -> Result<Contained, String> {
        Err("an isolate has no guest in which another container could be".to_owned())
    }

    fn forget(&self, _: &str) -> Result<(), String> {
        Err("an isolate has no guest in which another container could be".to_owned())
    }

    fn connect(&self) -> Result<UnixStream, String> {
        Err("an isolate has no guest to reach into".to_owned())
    }

    fn revoke(&self, name: &str) -> Result<(), String> {
        let mut table = self.table();
        clients::revoke(&mut table, HOLDER, name, &REVOCABLE)?;
        if let Some(network) =
            self.network().as_ref().filter(|_| name == CapabilityKind::Network.name())
        {
            network.end();
        }
        Ok(())
    }

    fn join(&self, _: Port) -> Result<(), String> {
        Err(NO_NETWORKS.to_owned())
    }

    fn leave(&self, _: &str) -> Result<(), String> {
        Err(NO_NETWORKS.to_owned())
    }

    fn lost_networks(&self) -> BTreeMap<String, Ipv4Addr> {
        BTreeMap::new()
    }

    /// The capability stays: what it covers is the relay's and the dialer's to say.
    fn change_network(&self, allow: &[String], deny: &[String]) -> Result<Vec<String>, String> {
        let network = self.network();
        let network = network.as_ref().ok_or(
            "the isolate has no network; grant it something of the network when it starts",
        )?;
        let scope = network.change(allow, deny)?;
        Ok(scope.connect.iter().map(ToString::to_string).collect())
    }

    fn pause(&self, _: bool) -> Result<(), String> {
        Err("an isolate cannot be paused; stop it".to_owned())
    }

    fn change_memory(&self, _: u64) -> Result<bool, String> {
        Err("an isolate's memory is fixed when it starts".to_owned())
    }

    fn limit(&self, _: &Limits) -> Result<(), String> {
        Err("an isolate's limits are fixed when it starts".to_owned())
    }

    fn counters(&self) -> Counters {
        Counters { memory_limit_bytes: self.memory_limit_bytes, ..Counters::default() }
    }
}
