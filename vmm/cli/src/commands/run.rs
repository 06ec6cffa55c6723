//! `exocell run`: from flags to a cell, and its program's exit code.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use exocell_cell::agent::printable;
use exocell_cell::changes::Changes;
use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::granted::{Links, TEXT_BYTES_MAX};
use exocell_cell::images::Healthcheck;
use exocell_cell::images::walk::Directory;
use exocell_cell::intra::Intra;
use exocell_cell::isolate::IsolatePlan;
use exocell_cell::launch::{self, Launched, Request, Workload};
use exocell_cell::network::{Publish, authority_environment};
use exocell_cell::pager::Mode;
use exocell_cell::parent::Parent;
use exocell_cell::plan;
use exocell_cell::plan::kernel::{Wishes, automatic};
use exocell_cell::platform::PlatformKind;
use exocell_cell::secrets::Secret;
use exocell_cell::settings::{Node, Settings, Tmpfs, Ulimit};
use exocell_cell::signal::Signal;
use exocell_cell::warm::{self, Taken};
use exocell_cell::xgate::{CapabilitySet, Flags};
use exocell_cell::{
    CellError, CellSpec, Layout, Record, State, Strength, Within, granted, health, now_ms,
};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use super::docker::Named;
use super::{again, docker, image, mount, network, srt};
use crate::args::{HealthArgs, LogDriver, ProcessArgs, RunArgs, SettingsArgs, StrengthArg};
use crate::session::{self, Manner, Outcome, SendSignal, Signalled};
use crate::show::say;
use crate::terminal;

pub fn run(layout: &Layout, mut args: RunArgs) -> Result<u8, CellError> {
    let request = Request::begin();
    if args.tied {
        set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
            .map_err(|errno| CellError::host("cannot be tied to who runs this")(errno.into()))?;
    }
    // What is wrong with it is said before an image is pulled.
    docker::platform(&args)?;
    srt::apply(layout, &mut args)?;
    image::pull_as_told(layout, &args.image, args.pull)?;
    exocell_docker::sweep_volumes(layout);
    let id = CellSpec::new_id()?;
    let ended = run_as(layout, args, &id, request);
    // What was made for a cell that is gone, or never came to be, goes with it.
    if !Record::exists(layout, &id) {
        exocell_docker::discard_volumes(layout, &id);
    }
    ended
}

fn run_as(layout: &Layout, args: RunArgs, id: &str, request: Request) -> Result<u8, CellError> {
    let folders = mount::folders(layout, &args, Some((id, args.rm)))?;
    let caps = capabilities(layout, &args, &folders)?;
    let showing = Showing {
        detach: args.detach,
        json: args.json,
        manner: Manner {
            interactive: args.interactive,
            tty: args.tty,
            ends_input: true,
            proxies_signals: args.sig_proxy,
            detach_keys: args.detach_keys.clone(),
        },
    };
    let cidfile = args.cidfile.clone();
    let secrets = secrets(&args.secret)?;
    let mut spec = spec(layout, args, &caps, &secrets, id)?;
    spec.fills = folders.fills;
    spec.check_restart()?;
    let kept = !spec.restart.is_no();
    if spec.keeps_disk || (spec.within.is_some() && !spec.remove) {
        again::pin(layout, &mut spec, &caps)?;
    }
    let cidfile = cidfile.map(|path| IdFile::new(layout, path)).transpose()?;
    if secrets.is_empty()
        && let Some(taken) = warm::take(layout, &spec, &caps, terminal::size())?
    {
        let started = Started::from(taken);
        again::keep_started(layout, &started, kept)?;
        cidfile.map(|file| file.write(&started.record.id)).transpose()?;
        return show(layout, &started, &showing);
    }
    let (workload, caps) = match spec.strength {
        Strength::Vm => Workload::plan(layout, &mut spec, terminal::size(), secrets)?,
        Strength::Isolate => {
            let plan = IsolatePlan::new(layout, &spec, &caps, &request)?;
            (Workload::Isolate(Box::new(plan)), caps)
        }
    };
    let started = Started::from(launch::launch(layout, spec, caps, workload, request)?);
    // It is listed with its volumes from here on.
    drop(folders.held);
    again::keep_started(layout, &started, kept)?;
    cidfile.map(|file| file.write(&started.record.id)).transpose()?;
    show(layout, &started, &showing)
}

/// A file for a cell's id, which no other command uses.
struct IdFile {
    path: PathBuf,
    directory: Directory,
    file: fs::File,
    written: bool,
}

impl IdFile {
    fn new(layout: &Layout, path: PathBuf) -> Result<Self, CellError> {
        let failed = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => CellError::Usage(format!(
                "--cidfile: {} is there already; remove it, or name another file",
                path.display()
            )),
            _ => CellError::host(format!("cannot make {} (--cidfile)", path.display()))(error),
        };
        let (directory, name) = Links::outside(layout).place(&path).map_err(failed)?;
        let file = fs::File::create_new(directory.place().join(name)).map_err(failed)?;
        Ok(Self { path, directory, file, written: false })
    }

    fn write(mut self, id: &str) -> Result<(), CellError> {
        self.written = true;
        let written = self.file.write_all(id.as_bytes());
        written.map_err(CellError::host(format!("cannot write {}", self.path.display())))
    }
}

impl Drop for IdFile {
    fn drop(&mut self) {
        if !self.written {
            // There is no cell; what is left says nothing.
            let name = self.path.file_name().unwrap_or_default();
            let _ = fs::remove_file(self.directory.place().join(name));
        }
    }
}

/// How a cell is shown to whoever started it.
pub(super) struct Showing {
    pub detach: bool,
    pub json: bool,
    pub manner: Manner,
}

/// A cell of this command's.
pub(super) struct Started {
    record: Record,
    session: UnixStream,
    /// Its supervisor's pid, where that is a child of ours.
    child: Option<i32>,
}

impl From<Launched> for Started {
    fn from(launched: Launched) -> Self {
        let Launched { record, supervisor, session } = launched;
        Self { record, session, child: Some(supervisor.pid) }
    }
}

impl Started {
    pub fn session(&self) -> &UnixStream {
        &self.session
    }

    pub fn record(&self) -> &Record {
        &self.record
    }
}

impl From<Taken> for Started {
    fn from(taken: Taken) -> Self {
        Self { record: taken.record, session: taken.session, child: None }
    }
}

/// Shows what the program says until it ends, or that it runs.
pub(super) fn show(layout: &Layout, started: &Started, showing: &Showing) -> Result<u8, CellError> {
    if showing.detach {
        if let Err(error) = session::await_start(&started.session) {
            return settle(layout, started, Err(error));
        }
        say!("{}", started.record.id);
        return Ok(0);
    }
    let send_signal = to_cell(&started.record);
    let outcome = session::follow(&started.session, &showing.manner, 0, send_signal);
    if let Ok(Outcome::Detached) = outcome {
        left(&started.record);
        return Ok(0);
    }
    let out_of_memory = matches!(&outcome, Ok(Outcome::Exited { out_of_memory: true, .. }));
    let code = settle(layout, started, outcome);
    if showing.json {
        report(started, &code, out_of_memory);
    }
    code
}

/// Says what becomes of a cell that was left.
pub(super) fn left(record: &Record) {
    let id = &record.id[..12];
    crate::show::tell!(
        "\r\nexocell: left {id}, which goes on; exocell attach {id} comes back to it"
    );
}

/// A way for signals that input cannot hold up: the control socket.
pub(super) fn to_cell(record: &Record) -> Box<SendSignal> {
    let record = record.clone();
    Box::new(move |_, signal| {
        let Ok(client) = Client::connect(&record) else { return Signalled::NoWay };
        match client.ask(&ControlRequest::Signal { signal }) {
            Ok(_) => Signalled::Sent,
            Err(CellError::Usage(_)) => Signalled::NoAnswer,
            // The cell is ending.
            Err(_) => Signalled::NoWay,
        }
    })
}

/// Waits for the supervisor's own end and finds how the cell ended.
fn settle(
    layout: &Layout,
    started: &Started,
    outcome: Result<Outcome, CellError>,
) -> Result<u8, CellError> {
    let ended = reap(started);
    let id = &started.record.id;
    // Settles the record of a supervisor that was killed.
    let now = started.record.look(layout);
    if let Ok(Some((spec, status))) = now
        && started.record.is_restarting(&spec, &status)
    {
        let id = &id[..12];
        crate::show::tell!(
            "exocell: {id} starts again as its restart policy says; exocell logs -f {id} follows \
             it, exocell stop {id} ends it"
        );
    }
    match outcome? {
        Outcome::Exited { code, .. } => Ok(code),
        Outcome::Detached => Ok(0),
        Outcome::Lost => {
            let how = ended.map_or_else(String::new, |how| format!(" ({how})"));
            crate::show::tell!("exocell: the supervisor of {} ended early{how}", &id[..12]);
            Ok(128 + 9)
        }
    }
}

fn reap(started: &Started) -> Option<String> {
    let Some(pid) = started.child else {
        started.record.await_release();
        return None;
    };
    match waitpid(Pid::from_raw(pid), None) {
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(format!("killed by {signal}")),
        Ok(WaitStatus::Exited(_, code)) if code != 0 => Some(format!("status {code}")),
        _ => None,
    }
}

fn report(started: &Started, code: &Result<u8, CellError>, out_of_memory: bool) {
    let exit_code = match code {
        Ok(code) => *code,
        Err(error) => error.exit_code(),
    };
    let error = code.as_ref().err().map(ToString::to_string);
    let error = error.as_deref().map(printable);
    crate::show::tell!(
        "{}",
        serde_json::json!({
            "id": started.record.id, "exit_code": exit_code, "error": error,
            "out_of_memory": out_of_memory,
        })
    );
}

/// The grant: the file, narrowed by the flags; or the flags alone. In a `vm` cell it lies
/// within the cell's.
pub(super) fn capabilities(
    layout: &Layout,
    args: &RunArgs,
    folders: &mount::Folders,
) -> Result<CapabilitySet, CellError> {
    let base = std::env::current_dir().map_err(CellError::host("cannot find this directory"))?;
    let mut flags = Flags::default();
    let single = [
        ("--memory", "memory", &args.memory),
        ("--cpus", "cpus", &processors(args.cpus.as_deref())?),
        ("--disk", "disk", &args.disk),
        ("--pids-limit", "processes", &args.pids_limit),
        ("--timeout", "time", &args.timeout),
    ];
    for (flag, name, value) in single {
        if let Some(text) = value {
            flags.add(flag, name, text, &base)?;
        }
    }
    for (flag, text) in &folders.texts {
        flags.add(flag, "folder", text, &base)?;
    }
    for rule in &args.allow_net {
        flags.add("--allow-net", "connect", &network_rule(rule), &base)?;
    }
    for own in network::attachments(layout, args)? {
        flags.add("--network", "join", &own.network, &base)?;
    }
    for publish in publishes(&args.publish)? {
        let port = publish.guest_port.to_string();
        flags.add("--publish", "listen", &port, &base)?;
    }
    for pair in &args.cap {
        flags.add_pair("--cap", pair, &base)?;
    }
    let parent = Parent::find()?;
    let own = match (&args.caps, &parent) {
        (Some(path), _) => read_table(layout, path)?.narrowed(&flags)?,
        (None, Some(parent)) => CapabilitySet::default_within(&parent.most).with(&flags)?,
        (None, None) => CapabilitySet::from_flags(&flags)?,
    };
    let own = match parent {
        Some(parent) => own.within(&parent.most)?,
        None => own,
    };
    granted::settle_models(layout, own)
}

/// The most processors that any cell has: an isolate's threads.
const PROCESSORS_MAX: u64 = 64;

/// How many processors it takes to have `cpus`, as the table takes them.
fn processors(cpus: Option<&str>) -> Result<Option<String>, CellError> {
    if cpus.and_then(|text| text.parse().ok()).is_some_and(|count: u64| count > PROCESSORS_MAX) {
        let text = cpus.unwrap_or_default();
        return Err(CellError::Usage(format!(
            "--cpus {text}: a vm cell has 1 to {} processors, an isolate 1 to {PROCESSORS_MAX}",
            plan::VCPUS_MAX
        )));
    }
    let Some(text) = cpus.filter(|text| text.contains('.')) else {
        return Ok(cpus.map(str::to_owned));
    };
    let time =
        Settings::read_cpus(text).map_err(|error| CellError::Usage(format!("--cpus: {error}")))?;
    Ok(Some(time.processors().to_string()))
}

/// What the program has and is held to inside its guest.
fn settings(args: SettingsArgs, cpus: Option<&str>) -> Result<Settings, CellError> {
    let usage =
        |flag: &'static str| move |error: String| CellError::Usage(format!("--{flag}: {error}"));
    let ulimits = args.ulimit.iter().map(|text| Ulimit::read(text)).collect::<Result<_, _>>();
    let tmpfs = args.tmpfs.iter().map(|text| Tmpfs::read(text)).collect::<Result<_, _>>();
    let mut settings = Settings {
        privileged: args.privileged,
        cap_add: args.cap_add,
        cap_drop: args.cap_drop,
        groups: args.group_add,
        ulimits: ulimits.map_err(usage("ulimit"))?,
        tmpfs: tmpfs.map_err(usage("tmpfs"))?,
        shm_bytes: args.shm_size,
        domain_name: args.domainname,
        oom_score_adj: args.oom_score_adj,
        init: args.init,
        cpu: cpus.map(Settings::read_cpus).transpose().map_err(usage("cpus"))?,
        cpu_shares: args.cpu_shares,
        cpuset: args.cpuset_cpus,
        memory_reservation: args.memory_reservation,
        ..Settings::default()
    };
    for text in &args.security_opt {
        settings.add_security_option(text).map_err(usage("security-opt"))?;
    }
    for text in &args.sysctl {
        settings.add_sysctl(text).map_err(usage("sysctl"))?;
    }
    let servers = settings.add_dns(&args.dns, &args.dns_search, &args.dns_option);
    servers.map_err(usage("dns"))?;
    for text in &args.device {
        settings.devices.push(Node::read(text).map_err(usage("device"))?);
    }
    for text in &args.device_cgroup_rule {
        settings.add_device_rule(text).map_err(usage("device-cgroup-rule"))?;
    }
    for text in &args.add_host {
        settings.add_host(text).map_err(usage("add-host"))?;
    }
    Ok(settings)
}

/// How the program is to be looked after, as far as the flags say.
fn health(args: &HealthArgs) -> Result<Option<Healthcheck>, CellError> {
    let nothing = Healthcheck::default();
    let test = match (&args.health_cmd, args.no_healthcheck) {
        (Some(line), _) if line.is_empty() => {
            return Err(CellError::Usage("--health-cmd: the line is empty".to_owned()));
        }
        (Some(line), _) => vec!["CMD-SHELL".to_owned(), line.clone()],
        (None, true) => vec!["NONE".to_owned()],
        (None, false) => Vec::new(),
    };
    let own = Healthcheck {
        test,
        interval: args.health_interval.unwrap_or(0),
        timeout: args.health_timeout.unwrap_or(0),
        start_period: args.health_start_period.unwrap_or(0),
        start_interval: args.health_start_interval.unwrap_or(0),
        retries: args.health_retries.unwrap_or(0).into(),
    };
    health::validate(&own).map_err(CellError::Usage)?;
    Ok((own != nothing).then_some(own))
}

/// A rule as a table has it: a host without ports means every port of TCP.
pub fn network_rule(text: &str) -> String {
    let (text, by) = match text.rsplit_once('/') {
        Some((peer, by @ ("tcp" | "udp" | "raw"))) => (peer, format!("/{by}")),
        _ => (text, String::new()),
    };
    let host = match text.parse::<std::net::Ipv6Addr>() {
        Ok(address) => format!("[{address}]"),
        Err(_) => text.to_owned(),
    };
    let has_ports =
        host.rsplit_once(':').is_some_and(|(_, ports)| !ports.ends_with(']') && !ports.is_empty())
            && !host.ends_with(']');
    match host.ends_with("/icmp") || has_ports {
        true => host + &by,
        false => format!("{host}:1-65535{by}"),
    }
}

fn publishes(publish: &[String]) -> Result<Vec<Publish>, CellError> {
    let read = |text: &String| {
        Publish::read(text).map_err(|error| CellError::Usage(format!("--publish: {error}")))
    };
    let all = publish.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    Ok(all.into_iter().flatten().collect())
}

/// A capability table from a file; relative host paths in it start there.
pub fn read_table(layout: &Layout, path: &Path) -> Result<CapabilitySet, CellError> {
    let failed = || CellError::host(format!("cannot read the capability table {}", path.display()));
    let (text, real) = Links::outside(layout).text(path, TEXT_BYTES_MAX).map_err(failed())?;
    let base = real.parent().unwrap_or(Path::new("/"));
    CapabilitySet::parse(&text, base)
        .map_err(|error| CellError::Usage(format!("{}: {error}", path.display())))
}

/// The values do not go into the spec, which is written down.
fn secrets(texts: &[String]) -> Result<Vec<Secret>, CellError> {
    let read = |text: &String| {
        let placeholder = format!("exocell-secret-{}", CellSpec::new_id()?);
        Secret::read(text, placeholder, |name| std::env::var(name).ok())
            .map_err(|error| CellError::Usage(format!("--secret: {error}")))
    };
    texts.iter().map(read).collect()
}

pub(super) fn spec(
    layout: &Layout,
    args: RunArgs,
    caps: &CapabilitySet,
    secrets: &[Secret],
    id: &str,
) -> Result<CellSpec, CellError> {
    let named = docker::platform(&args)?;
    let strength = match args.strength {
        Some(StrengthArg::Vm) => Strength::Vm,
        Some(StrengthArg::Isolate) => Strength::Isolate,
        None if plan::is_module(Path::new(&args.image)) => Strength::Isolate,
        None => Strength::Vm,
    };
    let attached = args.interactive && !args.detach;
    if args.tty && attached && !std::io::IsTerminal::is_terminal(&std::io::stdin()) {
        return Err(CellError::Usage("standard input is no terminal; leave out -t".to_owned()));
    }
    let networks = network::attachments(layout, &args)?;
    if strength == Strength::Isolate && network::within(&args.network)?.is_some() {
        return Err(CellError::Usage(
            "--network container: is for containers of images; an isolate has no place in a guest"
                .to_owned(),
        ));
    }
    if strength == Strength::Isolate && !networks.is_empty() {
        return Err(CellError::Usage(
            "networks between cells are for vm cells; leave out --network".to_owned(),
        ));
    }
    let id = id.to_owned();
    let name = args.name.unwrap_or_else(|| format!("cell-{}", &id[..6]));
    CellSpec::check_name(&name)?;
    let mut env = Vec::new();
    if secrets.iter().any(|own| own.tls) {
        env.extend(authority_environment());
    }
    env.extend(environment(layout, &args.process)?);
    env.extend(secrets.iter().map(|own| format!("{}={}", own.name, own.placeholder)));
    let mut publish = publishes(&args.publish)?;
    Publish::number_all(&mut publish)?;
    let guests = args.intra.is_some()
        || args.pager.is_some()
        || args.memory_guarantee.is_some()
        || named != Named::Nothing;
    let within = network::within(&args.network)?;
    let within = within.map(|cell| Within {
        cell: cell.to_owned(),
        memory_bytes: args.memory.as_ref().and_then(|_| caps.memory_bytes()),
        process_max: args.pids_limit.as_ref().and_then(|_| caps.process_max()),
    });
    if within.is_some() && (guests || args.disk.is_some()) {
        return Err(CellError::Usage(
            "--network container: guest and disk are the other cell's; leave out --intra, --pager, \
             --memory-guarantee, --platform and --disk"
                .to_owned(),
        ));
    }
    if strength == Strength::Isolate && guests {
        return Err(CellError::Usage(
            "an isolate has no guest kernel; leave out --intra, --pager, --platform and \
             --memory-guarantee"
                .to_owned(),
        ));
    }
    if strength == Strength::Isolate && !secrets.is_empty() {
        return Err(CellError::Usage(
            "--secret is for vm cells: nothing is put into what an isolate sends".to_owned(),
        ));
    }
    let mut settings = settings(args.settings, args.cpus.as_deref())?;
    settings.tmpfs.extend(mount::in_memory_of(&args.mount)?);
    let labels = docker::labels(layout, &args.label, &args.label_file)?;
    if let Some(name) = &args.stop_signal {
        name.parse::<Signal>()?;
    }
    if settings.has_dns() && caps.network().is_none() {
        return Err(CellError::Usage(
            "--dns: the cell has no network, and looks no name up; grant it something (--allow-net)"
                .to_owned(),
        ));
    }
    let health = health(&args.health)?;
    if strength == Strength::Isolate && health.is_some() {
        return Err(CellError::Usage(
            "an isolate has one program and no guest to check it from; leave out the flags of \
             health checks"
                .to_owned(),
        ));
    }
    let inside = Settings { cpu: None, ..settings.clone() };
    if strength == Strength::Isolate && !inside.are_default() {
        return Err(CellError::Usage(
            "an isolate has no guest kernel; leave out the flags that say what a program has inside \
             one (exocell run --help)"
                .to_owned(),
        ));
    }
    let intra = match (args.intra, strength) {
        (Some(intra), _) => intra.check().map(|()| intra),
        (None, Strength::Vm) => Intra::preferred(),
        (None, Strength::Isolate) => Ok(Intra::default()),
    };
    let intra = intra.map_err(CellError::Usage)?;
    let platform = match named {
        Named::Nothing => PlatformKind::default(),
        Named::Platform(platform) => platform,
        Named::Auto => {
            let (pager, has_guarantee) = (args.pager, args.memory_guarantee.is_some());
            let has_secrets = !secrets.is_empty();
            automatic(layout, Wishes { pager, intra, has_guarantee, has_secrets })
        }
    };
    // What a secret was is not written down.
    let keeps_disk = strength == Strength::Vm
        && within.is_none()
        && !args.rm
        && !args.read_only
        && secrets.is_empty();
    Ok(CellSpec {
        version: CellSpec::VERSION,
        id,
        name,
        strength,
        image: args.image,
        image_id: None,
        keeps_disk,
        keeps_no_log: args.log_driver == LogDriver::None,
        labels,
        stop_signal: args.stop_signal,
        stop_seconds: args.stop_timeout,
        restart: args.restart,
        restarts: 0,
        health,
        changes: Changes::default(),
        // An empty one takes the image's away.
        entrypoint: args.entrypoint.map(|program| match program.is_empty() {
            true => Vec::new(),
            false => vec![program],
        }),
        command: args.command,
        env,
        working_dir: args.process.workdir,
        user: args.process.user,
        hostname: args.hostname,
        settings,
        tty: args.tty,
        stdin: args.interactive,
        remove: args.rm,
        read_only: args.read_only,
        pager: args.pager.unwrap_or(match platform {
            PlatformKind::Para => Mode::default(),
            PlatformKind::Kvm => Mode::Off,
        }),
        memory_guarantee: args.memory_guarantee,
        intra,
        platform,
        publish,
        within,
        networks,
        has_link: false,
        capabilities: caps.to_json(),
        disk: None,
        idle: false,
        depot: None,
        plug: false,
        tied: args.tied,
        warm: None,
        locations: Vec::new(),
        fills: Vec::new(),
        copies: std::collections::BTreeMap::new(),
        created_ms: now_ms(),
    })
}

/// The environment that the flags ask for; later ones win.
pub fn environment(layout: &Layout, args: &ProcessArgs) -> Result<Vec<String>, CellError> {
    let mut entries = Vec::new();
    for path in &args.env_file {
        entries.extend(env_file(layout, path)?);
    }
    entries.extend(args.env.iter().filter_map(|entry| resolve(entry)));
    let names = entries.iter().map(|entry| entry.split_once('=').map_or("", |(name, _)| name));
    // Others write such entries one to a line.
    match names.into_iter().find(|name| name.is_empty() || name.contains(char::is_control)) {
        Some(name) => Err(CellError::Usage(format!(
            "{name:?} cannot be the name of a variable: give a name without control characters"
        ))),
        None => Ok(entries),
    }
}

/// `NAME=VALUE` as it is; `NAME` with this environment's value, if it has one.
fn resolve(entry: &str) -> Option<String> {
    if entry.contains('=') {
        return Some(entry.to_owned());
    }
    std::env::var(entry).ok().map(|value| format!("{entry}={value}"))
}

fn env_file(layout: &Layout, path: &Path) -> Result<Vec<String>, CellError> {
    let (text, _) = Links::outside(layout)
        .text(path, TEXT_BYTES_MAX)
        .map_err(CellError::host(format!("cannot read {}", path.display())))?;
    let lines = text.lines().map(str::trim);
    let entries = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(entries.filter_map(resolve).collect())
}

/// The last state in which a command may still act on a cell.
pub fn must_run(record: &Record, state: State) -> Result<(), CellError> {
    match state {
        State::Running => Ok(()),
        State::Created => Err(CellError::WrongState {
            id: record.id[..12].to_owned(),
            state: state.name(),
            remedy: "it is still starting; try again",
        }),
        State::Exited => Err(CellError::WrongState {
            id: record.id[..12].to_owned(),
            state: state.name(),
            remedy: "it must be running; exocell ps lists those that are",
        }),
    }
}
