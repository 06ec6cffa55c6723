//! A `vm` cell's guest: its jail, its devices, its kernel, its program.
//!
//! ```text
//! jail root -> fork: guest kernel -> threads: devices, folders, boot -> ready
//!           -> exec session
//! ```
//! The guest kernel is forked while there is one thread; its device sockets
//! listen already, so it finds them whenever it connects.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use exocell_agent::client::{self, ExecEvent};
use exocell_agent::{AGENT_PORT, FrameError, NetworkSetup, Patient};
use exocell_network::plug::Plug;
use exocell_network::switch::Port;
use exocell_pager::{Account, Member, Mode, Pressure};
use exocell_vmm::devices::vsock::CONNECTIONS_MAX;
use exocell_vmm::devices::{BlockMetrics, VsockHandle, Windows};
use exocell_vmm::jail::{self, Group, IdentityMap, JailRoot, ThreadClass};
use exocell_vmm::limits::Limits;
use exocell_vmm::platform::{GuestKernel, INITRAMFS_FILE, KERNEL_FILE};
use exocell_xgate::{Capability, Kind as CapabilityKind, Quota, Scope, Table};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid};
use tracing::info;

use super::clients::{self, Services};
use super::console::ConsoleLog;
use super::contained::{self, Contained};
use super::devices::{self, Counted, Devices};
use super::program::Program;
use super::sockets::{self, Served};
use super::{Event, Shared, boot, credit, memory, pressure, restrict_paths, thread};
use crate::control::{Contain, Counters};
use crate::folder::Access;
use crate::launch::Inheritance;
use crate::limits::Limits as Changed;
use crate::plan::VmPlan;
use crate::plan::device::Device;
use crate::record::Status;
use crate::socket::Socket;
use crate::{CellError, apart, network};

/// How long a guest may take to detach a mount.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// The holder's name in the capability table.
const HOLDER: &str = "cell";
/// What it can lose while it runs: all that is asked of the host. A guest has the rest.
const REVOCABLE: [CapabilityKind; 2] = [CapabilityKind::Folder, CapabilityKind::Network];

/// A guest that was started; [`boot`] says when it is ready.
pub(crate) struct Guest {
    kernel: Pid,
    reach: Arc<Reach>,
    start: Box<exocell_agent::Start>,
    stdio: bool,
    keeps_disk: bool,
    gone: Arc<(Mutex<bool>, Condvar)>,
    pub(super) console: ConsoleLog,
    requested: Instant,
    ready: AtomicBool,
}

/// What clients can reach of a guest.
struct Reach {
    network: Option<network::Control>,
    plug: Option<Plug>,
    agent: VsockHandle,
    memory: File,
    /// Bytes; never more than the memory file's.
    memory_limit: AtomicU64,
    /// Whether its kernel was told to keep to a limit.
    has_pager: bool,
    limits: Limits,
    group: Option<Arc<Group>>,
    credit: Option<Arc<Account>>,
    /// Its place in the budget, held while it lives; one with a credit has it there.
    _aside: Option<Member>,
    disk: Option<File>,
    /// Behind the image's disk, where other containers may have theirs.
    windows: Option<Windows>,
    /// Containers that there have been in the depot.
    contained_count: AtomicU32,
    blocks: Vec<Arc<BlockMetrics>>,
    counted: Counted,
    folders: Folders,
}

impl Services for Reach {
    fn contain(&self, wanted: Contain, image: Vec<OwnedFd>) -> Result<Contained, String> {
        if wanted.depot.is_some() {
            let number = self.contained_count.fetch_add(1, Ordering::Relaxed) + 1;
            return Contained::begin_in_depot(&self.agent, number, wanted);
        }
        let windows = self.windows.as_ref().ok_or(
            "the cell cannot be written (--read-only), so that it has no place for another \
             container",
        )?;
        Contained::begin(&self.agent, windows, wanted, image)
    }

    fn forget(&self, id: &str) -> Result<(), String> {
        contained::forget(&self.agent, id)
    }

    fn connect(&self) -> Result<UnixStream, String> {
        self.agent.connect(AGENT_PORT).map_err(|error| error.to_string())
    }

    fn revoke(&self, name: &str) -> Result<(), String> {
        self.folders.revoke(name, &self.agent)?;
        if let Some(network) =
            self.network.as_ref().filter(|_| name == CapabilityKind::Network.name())
        {
            network.end();
        }
        Ok(())
    }

    fn change_network(&self, allow: &[String], deny: &[String]) -> Result<Vec<String>, String> {
        let network = self.network.as_ref().ok_or(
            "the cell has no network device; grant it something of the network when it starts",
        )?;
        let mut table = self.folders.table.lock().unwrap_or_else(PoisonError::into_inner);
        let name = CapabilityKind::Network.name();
        let scope = network.change(allow, deny)?;
        let rules = scope.connect.iter().map(ToString::to_string).collect();
        // What was derived from the rules before ends with them.
        if let Some(handle) = table.find(HOLDER, name) {
            table.revoke(handle).map_err(|error| error.to_string())?;
        }
        let rights = scope.rights();
        let scope = Scope::Network(scope);
        let changed =
            Capability::new(name, HOLDER, CapabilityKind::Network, rights, scope, Quota::UNCOUNTED);
        table.insert(changed).map(|_| rules).map_err(|error| error.to_string())
    }

    fn join(&self, port: Port) -> Result<(), String> {
        let network = self.network.as_ref().ok_or(
            "the cell was started without a network, and none comes into a guest that runs; start it \
             with exocell run --network NAME, or --allow-net",
        )?;
        let address = network::joined(&port);
        let place = network.join(port)?;
        let told = match connect(&self.agent, ANSWER_MAX) {
            Ok(stream) => client::address(&stream, &stream, place, Some(address)),
            Err(error) => Err(FrameError::from(error).into()),
        };
        told.map_err(|error| {
            network.leave_place(place);
            format!("the guest did not take its address: {error}")
        })
    }

    fn plug(&self, setup: &NetworkSetup, device: OwnedFd) -> Result<(), String> {
        let plug =
            self.plug.as_ref().ok_or("the cell was not made to be plugged into a network")?;
        plug.put(device).map_err(|error| error.to_string())?;
        let stream = connect(&self.agent, ANSWER_MAX).map_err(|error| error.to_string())?;
        client::plug(&stream, &stream, setup).map_err(|error| error.to_string())
    }

    fn leave(&self, network: &str) -> Result<(), String> {
        let place = self.network.as_ref().and_then(|own| own.leave(network));
        let place = place.ok_or_else(|| format!("the cell is not in the network {network}"))?;
        // A guest that keeps the address gains nothing.
        if let Ok(stream) = connect(&self.agent, ANSWER_MAX) {
            let _ = client::address(&stream, &stream, place, None);
        }
        Ok(())
    }

    fn lost_networks(&self) -> BTreeMap<String, Ipv4Addr> {
        self.network.as_ref().map_or_else(BTreeMap::new, network::Control::lost)
    }

    fn pause(&self, pause: bool) -> Result<(), String> {
        use nix::sys::signal::Signal;
        let signal = if pause { Signal::SIGSTOP } else { Signal::SIGCONT };
        // All of the pid namespace but its first process, which this is: the
        // guest kernel, what carries its programs, and the dialer.
        nix::sys::signal::kill(Pid::from_raw(-1), signal)
            .map_err(|errno| format!("cannot send the guest {signal}: {errno}"))
    }

    fn change_memory(&self, limit_bytes: u64) -> Result<bool, String> {
        let granted = self.memory.metadata().map_err(|error| error.to_string())?.len();
        memory::check(limit_bytes, granted)?;
        if !self.has_pager {
            return Err(memory::NO_PAGER.to_owned());
        }
        let before = self.memory_limit.load(Ordering::Relaxed);
        if limit_bytes > before {
            self.hold_to(limit_bytes)?;
        }
        self.set_credit_limit(limit_bytes);
        let mut applied = memory::change(&self.agent, &self.memory, limit_bytes)
            .inspect_err(|_| self.set_credit_limit(before))?;
        self.memory_limit.store(limit_bytes, Ordering::Relaxed);
        // What the guest says of itself is a claim; from here on it is held to it. While it has
        // more, the host may refuse: then the change is under way.
        if applied && limit_bytes < before {
            applied = self.hold_to(limit_bytes).is_ok();
        }
        Ok(applied)
    }

    fn limit(&self, limits: &Changed) -> Result<(), String> {
        if let Some(bytes) = limits.memory_bytes {
            self.change_memory(bytes)?;
        }
        let stream = memory::connect(&self.agent)?;
        let limited = client::limit(&stream, &stream, &limits.resources(false));
        limited.map_err(|error| error.to_string())
    }

    fn counters(&self) -> Counters {
        let allocated = |file: &File| exocell_pager::allocated_bytes(file).unwrap_or(0);
        Counters {
            memory_allocated_bytes: allocated(&self.memory),
            memory_limit_bytes: self.memory_limit.load(Ordering::Relaxed),
            memory_credit_bytes: self
                .credit
                .as_ref()
                .map_or(0, |credit| credit.granted.load(Ordering::Relaxed)),
            memory_guarantee_bytes: self.credit.as_ref().map_or(0, |credit| credit.guarantee),
            block_read_bytes: self.blocks.iter().map(|block| block.read_bytes.get()).sum(),
            block_written_bytes: self.blocks.iter().map(|block| block.written_bytes.get()).sum(),
            disk_allocated_bytes: self.disk.as_ref().map_or(0, allocated),
            devices: devices::told(&self.counted),
        }
    }
}

impl Reach {
    /// Bounds what the host gives the guest, where it has a control group.
    fn hold_to(&self, limit_bytes: u64) -> Result<(), String> {
        let bytes_max = limit_bytes.saturating_add(self.limits.beside_bytes_max());
        match &self.group {
            None => Ok(()),
            Some(group) => group
                .limit(bytes_max)
                .map_err(|error| format!("cannot change the guest's control group: {error}")),
        }
    }

    fn set_credit_limit(&self, bytes: u64) {
        if let Some(credit) = &self.credit {
            credit.limit.store(bytes, Ordering::Relaxed);
        }
    }
}

/// The folders of a cell and its sockets: what was granted, and whether it still is.
struct Folders {
    table: Mutex<Table>,
    folders: Vec<Access>,
    sockets: Vec<Served>,
}

/// Starts everything up to the point where programs can run.
pub(crate) fn start(
    inheritance: &Inheritance,
    mut plan: VmPlan,
    shared: &Shared,
    status: &mut Status,
    deadline: Option<Instant>,
) -> Result<Guest, CellError> {
    let since = |at: Instant| at.elapsed().as_micros() as u64;
    apart::set_priority(plan.cpu_weight);
    let network = plan.network.take().map(network::start).transpose()?;
    let beside = inheritance.group.as_ref().map_or(0, |_| plan.limits.beside_bytes_max());
    let mut aside = Member::join(&plan.budget, plan.guarantee_bytes, beside)
        .map_err(|error| CellError::Usage(error.to_string()))?;
    let by_credit = plan.pager == Mode::Credit;
    let credit = by_credit.then(|| credit::Reserved::new(plan.guarantee_bytes, aside.take()));
    let credit = credit.transpose()?;
    let pressure = host_pressure(plan.pager)?;
    let listeners = enter_jail(inheritance, &plan)?;
    status.times.jailed_us = since(inheritance.requested);
    info!(at_us = status.times.jailed_us, "jailed");
    let (console_read, console_write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)
        .map_err(|errno| CellError::host("cannot make the console pipe")(errno.into()))?;
    let lender = credit.as_ref().map(|credit| credit.guest_end.as_fd());
    let kernel = fork_kernel(inheritance, &plan, &console_write, lender)?;
    drop(console_write);
    status.times.kernel_started_us = since(inheritance.requested);
    status.guest_kernel_inner_pid = kernel.as_raw();
    info!(at_us = status.times.kernel_started_us, "guest kernel started");

    // Threads with a list of their own come first: what is started after the
    // main thread is restricted inherits its list.
    let console = ConsoleLog::new(File::from(console_read))?;
    let log = console.clone();
    let credit = credit.map(|credit| credit.grant(plan.memory.file(), ender(kernel, log)));
    let (credit, wanted) = credit.transpose()?.unzip();
    let (hello, hellos) = channel();
    let planned = plan.devices.into_iter().zip(listeners).collect();
    let streams_max = CONNECTIONS_MAX + plan.sockets.len() * (sockets::CONNECTIONS_MAX + 1);
    let served = (plan.platform.kind(), plan.memory.file());
    let devices = Devices::start(planned, served, console.clone(), hello, streams_max)?;
    let doors = plan.sockets.into_iter().map(Socket::hand_over).collect::<Result<Vec<_>, _>>()?;
    let sockets = doors.into_iter().map(Served::new).collect();
    let folders = grant(inheritance, devices.folders, sockets)?;
    let mut counted = devices.counted;
    let (mut plug, mut started) = (None, None);
    if let Some(listener) = devices.network {
        let device = "network".to_owned();
        if let Some(network) = network {
            let (control, decisions, counts) = devices::start_network(network, listener, served)?;
            counted.push((device, counts));
            started = Some((control, decisions));
        } else {
            let (own, link) =
                Plug::pair().map_err(CellError::host("cannot make a link to plug in"))?;
            counted.push((device, devices::start_plug(link, listener, served)?));
            plug = Some(own);
        }
    }
    let (network, decisions) = started.unzip();
    jail::restrict_calls(ThreadClass::Control)?;
    if let Some(decisions) = decisions {
        thread("audit", move || network::Log::here().write(&decisions))?;
    }
    let pumped = console.clone();
    thread("console", move || pumped.pump())?;
    if let Some(wanted) = wanted {
        credit::pass_on(devices.vsock.clone(), wanted)?;
    }
    if let Some(host) = pressure {
        pressure::watch(host, devices.vsock.clone())?;
    }
    let gone = Arc::new((Mutex::new(false), Condvar::new()));
    reap(kernel, inheritance.group.clone(), shared.events.clone(), gone.clone())?;
    boot::begin(hellos, plan.boot, shared.events.clone(), deadline)?;
    Ok(Guest {
        kernel,
        reach: Arc::new(Reach {
            network,
            plug,
            agent: devices.vsock,
            memory: plan.memory.file().try_clone().map_err(CellError::host("dup"))?,
            memory_limit: AtomicU64::new(plan.memory.bytes()),
            has_pager: plan.pager != Mode::Off,
            limits: plan.limits,
            group: inheritance.group.clone(),
            credit,
            _aside: aside,
            disk: devices.disk,
            windows: devices.windows,
            contained_count: AtomicU32::new(0),
            blocks: devices.blocks,
            counted,
            folders,
        }),
        start: Box::new(plan.start),
        stdio: plan.stdio,
        keeps_disk: plan.keeps_disk,
        gone,
        console,
        requested: inheritance.requested,
        ready: AtomicBool::new(false),
    })
}

/// To be looked at for guests whose free memory goes back.
fn host_pressure(pager: Mode) -> Result<Option<Pressure>, CellError> {
    let opened = (pager != Mode::Off).then(Pressure::open).transpose();
    opened.map_err(CellError::host("cannot read how much memory the host has"))
}

/// The sockets that the plan's devices listen on, in their order.
fn enter_jail(inheritance: &Inheritance, plan: &VmPlan) -> Result<Vec<UnixListener>, CellError> {
    let root = JailRoot::new(inheritance.record.directory())?;
    root.bind_file(&plan.kernel, KERNEL_FILE)?;
    root.bind_file(&plan.initramfs, INITRAMFS_FILE)?;
    let listen = |device: &Device| root.listen(device.name());
    let listeners = plan.devices.iter().map(listen).collect::<Result<Vec<_>, _>>()?;
    root.seal()?;
    nix::unistd::fchdir(&inheritance.record_dir)
        .map_err(|errno| CellError::host("cannot enter the record")(errno.into()))?;
    restrict_paths(inheritance, &[])?;
    Ok(listeners)
}

fn fork_kernel(
    inheritance: &Inheritance,
    plan: &VmPlan,
    console: &OwnedFd,
    lender: Option<BorrowedFd>,
) -> Result<Pid, CellError> {
    let devices: Vec<_> = plan.devices.iter().map(Device::socket).collect();
    let identity = u32::from(inheritance.identity == IdentityMap::CallerAndCell);
    let kernel = GuestKernel {
        memory: &plan.memory,
        vcpus: plan.vcpus,
        pager: plan.pager,
        blocks: plan.blocks,
        mappings_max: plan.mappings_max,
        lender,
        intra: plan.intra,
        devices: &devices,
        image: plan.shared_image(),
        console: console.as_fd(),
        identity,
        limits: plan.limits,
        group: inheritance.group.as_deref(),
    };
    match jail::fork_into(kernel.group) {
        Ok(ForkResult::Parent { child }) => Ok(child),
        Ok(ForkResult::Child) => {
            let error = plan.platform.become_guest(&kernel);
            let mut console = File::from(match console.try_clone() {
                Ok(console) => console,
                Err(_) => std::process::exit(125),
            });
            let _ = writeln!(console, "{error}");
            std::process::exit(125)
        }
        Err(error) => Err(CellError::host("cannot fork the guest kernel")(error)),
    }
}

/// Ends a guest kernel, and says why on its console.
fn ender(kernel: Pid, mut console: ConsoleLog) -> credit::End {
    Box::new(move |why| {
        let _ = writeln!(console, "exocell: ended by its supervisor: {why}");
        let _ = nix::sys::signal::kill(kernel, nix::sys::signal::Signal::SIGKILL);
    })
}

/// Reaps every child, and tells when it was the guest kernel.
fn reap(
    kernel: Pid,
    group: Option<Arc<Group>>,
    events: Sender<Event>,
    gone: Arc<(Mutex<bool>, Condvar)>,
) -> Result<(), CellError> {
    let reaper = thread("reaper", move || {
        loop {
            let (pid, mut how) = match waitpid(None, None) {
                Ok(WaitStatus::Exited(pid, code)) => (pid, format!("exited with status {code}")),
                Ok(WaitStatus::Signaled(pid, signal, _)) => {
                    (pid, format!("was killed by {signal}"))
                }
                Ok(_) | Err(nix::errno::Errno::EINTR) => continue,
                Err(_) => return,
            };
            if pid == kernel {
                if let Some(group) = group.as_ref().filter(|group| group.oom_kills() > 0) {
                    let most = group.bytes_max >> 20;
                    how.push_str(&format!(
                        " (the guest took all of the {most} MiB of the host that it may)"
                    ));
                }
                *gone.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = true;
                gone.1.notify_all();
                info!("guest kernel {how}");
                let _ = events.send(Event::GuestKernel(how));
                return;
            }
        }
    });
    reaper.map(drop)
}

/// What was granted, and with it what ends access to the cell's folders and sockets.
fn grant(
    inheritance: &Inheritance,
    folders: Vec<Access>,
    sockets: Vec<Served>,
) -> Result<Folders, CellError> {
    let mut table = Table::new(Table::CAPACITY_MAX);
    let install = inheritance.caps.install(&mut table, HOLDER);
    install.map_err(|error| CellError::Usage(format!("the capability table: {error}")))?;
    Ok(Folders { table: Mutex::new(table), folders, sockets })
}

impl Guest {
    pub fn services(&self) -> Arc<dyn Services> {
        self.reach.clone()
    }

    /// Runs the plan's program once, unheard, as a warm guest's first; one that
    /// fails or does not end costs nothing but the warmth.
    pub fn warm_up(&self) {
        let Ok(stream) = connect(&self.reach.agent, ANSWER_MAX) else { return };
        let until = Instant::now() + ANSWER_MAX;
        if let Ok(mut session) = client::start(&stream, &stream, &self.start) {
            let goes_on = |event| !matches!(event, Ok(ExecEvent::Exited(_)) | Err(_));
            while goes_on(session.output.event()) && Instant::now() < until {}
        }
    }

    /// Gives a warm guest its program, which was requested now, and may want the disk again.
    pub fn take(&mut self, start: exocell_agent::Start, keeps_disk: bool) {
        (self.start, self.requested) = (Box::new(start), Instant::now());
        self.keeps_disk = keeps_disk && self.reach.disk.is_some();
    }

    /// Lets programs connect to the host's sockets, as the guest is ready.
    pub fn open_sockets(&self) -> Result<(), CellError> {
        let agent = &self.reach.agent;
        self.reach.folders.sockets.iter().try_for_each(|socket| socket.begin(agent.clone()))
    }

    /// Starts the cell's program and a thread that follows it.
    pub fn run_program(&self, shared: &Shared) -> Result<(), CellError> {
        let agent = self.reach.agent.clone();
        let program = Program {
            agent: Arc::new(move || agent.connect(AGENT_PORT)),
            start: self.start.clone(),
            stdio: self.stdio,
            requested: self.requested,
        };
        program.run(shared)
    }

    /// The guest can run programs, and be asked to end in order.
    pub(super) fn is_ready_now(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// Ends the guest: in order, within `orderly_max`, where it has something to write
    /// back, at once otherwise. Returns when its kernel process is reaped.
    pub fn end(&self, orderly_max: Duration) {
        let writes_back = self.keeps_disk || self.reach.folders.are_writable();
        let ready = self.ready.load(Ordering::Relaxed);
        if writes_back && ready && !self.is_gone(Duration::ZERO) {
            let until = Instant::now() + orderly_max;
            // One that is paused could not write anything back.
            let _ = self.reach.pause(false);
            // Whatever still runs is killed, as the rest of a PID namespace is whose first process
            // has ended (pid_namespaces(7)): a kill must run no handler of SIGTERM.
            let ends = connect(&self.reach.agent, orderly_max)
                .is_ok_and(|stream| client::shutdown(&stream, &stream, 0).is_ok());
            // One that does not answer would not end either.
            if ends {
                self.is_gone(until.saturating_duration_since(Instant::now()));
            }
        }
        let _ = nix::sys::signal::kill(self.kernel, nix::sys::signal::Signal::SIGKILL);
        self.is_gone(Duration::from_secs(10));
        self.reach.folders.folders.iter().for_each(Access::finish);
        self.reach.folders.sockets.iter().for_each(Served::end);
        self.console.settle();
    }

    fn is_gone(&self, wait: Duration) -> bool {
        let gone = self.gone.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match self.gone.1.wait_timeout_while(gone, wait, |gone| !*gone) {
            Ok((gone, _)) => *gone,
            Err(poisoned) => *poisoned.into_inner().0,
        }
    }
}

/// A stream to the guest's agent, which has `limit` to answer.
pub(super) fn connect(agent: &VsockHandle, limit: Duration) -> std::io::Result<Patient> {
    agent.connect(AGENT_PORT).map(|stream| Patient::new(stream, limit))
}

impl Folders {
    fn are_writable(&self) -> bool {
        self.folders.iter().any(|folder| folder.writable)
    }

    /// Ends the capability `name`: its mount answers errors from now on, and
    /// is then detached in the guest.
    fn revoke(&self, name: &str, agent: &VsockHandle) -> Result<(), String> {
        let mut table = self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        clients::revoke(&mut table, HOLDER, name, &REVOCABLE)?;
        drop(table);
        for folder in self.folders.iter().filter(|folder| folder.name == name) {
            let ended = folder.end();
            let path = folder.guest.to_string_lossy();
            // A guest that keeps the dead mount gains nothing.
            if let Ok(stream) = connect(agent, ANSWER_MAX) {
                let _ = client::unmount(&stream, &stream, &path);
            }
            ended?;
        }
        for socket in self.sockets.iter().filter(|socket| socket.name() == name) {
            socket.end();
            socket.close_in(agent);
        }
        Ok(())
    }
}
