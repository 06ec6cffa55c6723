//! `exocell run`: from flags to a cell, and its program's exit code.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use exocell_cell::agent::printable;
use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::intra::Intra;
use exocell_cell::isolate::IsolatePlan;
use exocell_cell::launch::{self, Launched, Request, Workload};
use exocell_cell::network::{Publish, authority_environment};
use exocell_cell::pager::Mode;
use exocell_cell::parent::Parent;
use exocell_cell::plan::{self, VmPlan};
use exocell_cell::secrets::Secret;
use exocell_cell::settings::{Settings, Tmpfs, Ulimit};
use exocell_cell::warm::{self, Taken};
use exocell_cell::xgate::{CapabilitySet, Flags};
use exocell_cell::{CellError, CellSpec, Layout, Record, State, Strength, now_ms};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::args::{ProcessArgs, RunArgs, SettingsArgs, StrengthArg};
use crate::session::{self, Outcome, SendSignal, Signalled};
use crate::show::say;
use crate::terminal;

pub fn run(layout: &Layout, args: RunArgs) -> Result<u8, CellError> {
    let request = Request::begin();
    let caps = capabilities(&args)?;
    let (detach, interactive, tty, json) = (args.detach, args.interactive, args.tty, args.json);
    let secrets = secrets(&args.secret)?;
    let spec = spec(args, &caps, &secrets)?;
    if secrets.is_empty()
        && let Some(taken) = warm::take(layout, &spec, &caps, terminal::size())?
    {
        let started = Started::from(taken);
        return show(layout, &started, detach, (interactive, tty, json));
    }
    let workload = match spec.strength {
        Strength::Vm => {
            Workload::Vm(Box::new(VmPlan::new(layout, &spec, &caps, terminal::size(), secrets)?))
        }
        Strength::Isolate => {
            Workload::Isolate(Box::new(IsolatePlan::new(layout, &spec, &caps, &request)?))
        }
    };
    let started = Started::from(launch::launch(layout, spec, caps, workload, request)?);
    show(layout, &started, detach, (interactive, tty, json))
}

/// A cell of this command's.
struct Started {
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

impl From<Taken> for Started {
    fn from(taken: Taken) -> Self {
        Self { record: taken.record, session: taken.session, child: None }
    }
}

/// Shows what the program says until it ends, or that it runs.
fn show(
    layout: &Layout,
    started: &Started,
    detach: bool,
    (interactive, tty, json): (bool, bool, bool),
) -> Result<u8, CellError> {
    if detach {
        if let Err(error) = session::await_start(&started.session) {
            return settle(layout, started, Err(error));
        }
        say!("{}", started.record.id);
        return Ok(0);
    }
    let outcome = session::follow(&started.session, interactive, tty, 0, to_cell(&started.record));
    let out_of_memory = matches!(&outcome, Ok(Outcome::Exited { out_of_memory: true, .. }));
    let code = settle(layout, started, outcome);
    if json {
        report(started, &code, out_of_memory);
    }
    code
}

/// A way for signals that input cannot hold up: the control socket.
fn to_cell(record: &Record) -> Box<SendSignal> {
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
    let _ = Record::find(layout, id);
    match outcome? {
        Outcome::Exited { code, .. } => Ok(code),
        Outcome::Lost => {
            let how = ended.map_or_else(String::new, |how| format!(" ({how})"));
            eprintln!("exocell: the supervisor of {} ended early{how}", &id[..12]);
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
    eprintln!(
        "{}",
        serde_json::json!({
            "id": started.record.id, "exit_code": exit_code, "error": error,
            "out_of_memory": out_of_memory,
        })
    );
}

/// The grant: the file, narrowed by the flags; or the flags alone. In a `vm` cell it lies
/// within the cell's.
pub(super) fn capabilities(args: &RunArgs) -> Result<CapabilitySet, CellError> {
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
    for volume in &args.volume {
        flags.add("--volume", "folder", volume, &base)?;
    }
    for rule in &args.allow_net {
        flags.add("--allow-net", "connect", &network_rule(rule), &base)?;
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
        (Some(path), _) => read_table(path)?.narrowed(&flags)?,
        (None, Some(parent)) => CapabilitySet::default_within(&parent.most).with(&flags)?,
        (None, None) => CapabilitySet::from_flags(&flags)?,
    };
    match parent {
        Some(parent) => Ok(own.within(&parent.most)?),
        None => Ok(own),
    }
}

/// How many processors it takes to have `cpus`, as the table takes them.
fn processors(cpus: Option<&str>) -> Result<Option<String>, CellError> {
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
    for text in &args.add_host {
        settings.add_host(text).map_err(usage("add-host"))?;
    }
    Ok(settings)
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
        text.parse().map_err(|error: String| CellError::Usage(format!("--publish: {error}")))
    };
    publish.iter().map(read).collect()
}

/// A capability table from a file; relative host paths in it start there.
pub fn read_table(path: &Path) -> Result<CapabilitySet, CellError> {
    let failed = || format!("cannot read the capability table {}", path.display());
    let text = fs::read_to_string(path).map_err(CellError::host(failed()))?;
    let absolute = path.canonicalize().map_err(CellError::host(failed()))?;
    let base = absolute.parent().unwrap_or(Path::new("/"));
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
    args: RunArgs,
    caps: &CapabilitySet,
    secrets: &[Secret],
) -> Result<CellSpec, CellError> {
    let strength = match args.strength {
        Some(StrengthArg::Vm) => Strength::Vm,
        Some(StrengthArg::Isolate) => Strength::Isolate,
        None if plan::is_module(Path::new(&args.image)) => Strength::Isolate,
        None => Strength::Vm,
    };
    if args.tty && args.interactive && !std::io::IsTerminal::is_terminal(&std::io::stdin()) {
        return Err(CellError::Usage("standard input is no terminal; leave out -t".to_owned()));
    }
    let id = CellSpec::new_id()?;
    let name = args.name.unwrap_or_else(|| format!("cell-{}", &id[..6]));
    CellSpec::check_name(&name)?;
    let mut env = Vec::new();
    if secrets.iter().any(|own| own.tls) {
        env.extend(authority_environment());
    }
    env.extend(environment(&args.process)?);
    env.extend(secrets.iter().map(|own| format!("{}={}", own.name, own.placeholder)));
    let publish =
        publishes(&args.publish)?.into_iter().map(Publish::named).collect::<Result<_, _>>()?;
    let guests =
        args.intra.is_some() || args.pager != Mode::default() || args.memory_guarantee.is_some();
    if strength == Strength::Isolate && guests {
        return Err(CellError::Usage(
            "an isolate has no guest kernel; leave out --intra, --pager and --memory-guarantee"
                .to_owned(),
        ));
    }
    if strength == Strength::Isolate && !secrets.is_empty() {
        return Err(CellError::Usage(
            "--secret is for vm cells: nothing is put into what an isolate sends".to_owned(),
        ));
    }
    let settings = settings(args.settings, args.cpus.as_deref())?;
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
    Ok(CellSpec {
        version: CellSpec::VERSION,
        id,
        name,
        strength,
        image: args.image,
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
        pager: args.pager,
        memory_guarantee: args.memory_guarantee,
        intra,
        publish,
        capabilities: caps.to_json(),
        disk: None,
        idle: false,
        warm: None,
        locations: Vec::new(),
        created_ms: now_ms(),
    })
}

/// The environment that the flags ask for; later ones win.
pub fn environment(args: &ProcessArgs) -> Result<Vec<String>, CellError> {
    let mut entries = Vec::new();
    for path in &args.env_file {
        entries.extend(env_file(path)?);
    }
    entries.extend(args.env.iter().filter_map(|entry| resolve(entry)));
    Ok(entries)
}

/// `NAME=VALUE` as it is; `NAME` with this environment's value, if it has one.
fn resolve(entry: &str) -> Option<String> {
    if entry.contains('=') {
        return Some(entry.to_owned());
    }
    std::env::var(entry).ok().map(|value| format!("{entry}={value}"))
}

fn env_file(path: &PathBuf) -> Result<Vec<String>, CellError> {
    let text = fs::read_to_string(path)
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
