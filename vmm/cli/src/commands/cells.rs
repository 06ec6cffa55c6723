//! The verbs on existing cells: ps, inspect, wait, stop, kill, rm, update.

use std::collections::BTreeMap;
use std::time::Duration;

use exocell_cell::control::{Client, ControlReply, ControlRequest};
use exocell_cell::health::{Condition, Health};
use exocell_cell::images::Store;
use exocell_cell::limits::Limits;
use exocell_cell::network::Publish;
use exocell_cell::networks::Networks;
use exocell_cell::platform::PlatformKind;
use exocell_cell::policy::Policy;
use exocell_cell::settings::Settings;
use exocell_cell::signal::Signal;
use exocell_cell::{
    CellError, CellSpec, Layout, Record, State, Status, Strength, clock, end, plan, processes,
    restart, switches,
};
use exocell_docker::Filters;
use serde::Serialize;
use serde_json::Value;

use super::print_json;
use super::run::{must_run, network_rule};
use crate::args::{
    InspectArgs, KillArgs, PauseArgs, PortArgs, PsArgs, RenameArgs, RmArgs, StopArgs, TopArgs,
    UpdateArgs, WaitArgs,
};
use crate::format::{Item, Template};
use crate::session::{self, Outcome};
use crate::show::{self, each, say};

#[derive(Serialize)]
struct PsRow<'a> {
    id: &'a str,
    name: &'a str,
    image: &'a str,
    /// As it was given; the image's own where there is none.
    command: Vec<&'a str>,
    strength: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<PlatformKind>,
    state: State,
    paused: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    health: Option<Condition>,
    exit_code: Option<u8>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    restarting: bool,
    created_ms: u64,
    ports: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: &'a BTreeMap<String, String>,
}

/// What `ps --filter` may name.
const FILTERS: [&str; 9] =
    ["status", "name", "id", "label", "ancestor", "exited", "health", "network", "strength"];
/// What some of them may say.
const VALUES: [(&str, &[&str]); 3] = [
    ("status", &["created", "running", "paused", "restarting", "exited"]),
    ("health", &["starting", "healthy", "unhealthy", "none"]),
    ("strength", &["vm", "isolate"]),
];

pub fn ps(layout: &Layout, args: &PsArgs) -> Result<u8, CellError> {
    let all = chosen(layout, args)?;
    if args.quiet {
        all.iter().for_each(|(record, _, _)| say!("{}", record.id));
        return Ok(0);
    }
    if args.json {
        for (record, spec, status) in &all {
            print_json(&ps_row(record, spec, status), false)?;
        }
        return Ok(0);
    }
    if let Some(text) = &args.format {
        let images = Images::of(layout);
        let named = |(record, spec, status): &Cell| named(record, spec, status, &images, args);
        let rows = all.iter().map(named);
        return Template::read(text)?.print(&rows.collect::<Vec<_>>()).map(|()| 0);
    }
    let images = Images::of(layout);
    let rows: Vec<Vec<String>> = all
        .iter()
        .map(|(record, spec, status)| {
            vec![
                id(record, args),
                spec.image.clone(),
                words(spec, &images, args),
                spec.strength.to_string(),
                show::ago(spec.created_ms),
                state(record, spec, status),
                ports(spec).join(", "),
                spec.name.clone(),
            ]
        })
        .collect();
    let header = ["CELL ID", "IMAGE", "COMMAND", "STRENGTH", "CREATED", "STATE", "PORTS", "NAME"];
    show::table(&header, &rows);
    Ok(0)
}

type Cell = (Record, CellSpec, Status);

/// Where what a cell runs is looked up, as far as its image says it.
struct Images(Option<Store>);

impl Images {
    fn of(layout: &Layout) -> Self {
        Self(Store::open(layout.images()).ok())
    }

    fn words(&self, spec: &CellSpec) -> Vec<String> {
        let is_said = spec.strength == Strength::Isolate || spec.entrypoint.is_some();
        let store = self.0.as_ref().filter(|_| !is_said);
        match store.and_then(|store| store.resolve(spec.image_name()).ok()) {
            Some(image) => plan::words(spec, &image.config),
            None => command(spec).into_iter().map(str::to_owned).collect(),
        }
    }
}

/// The cells that are asked for, oldest first.
fn chosen(layout: &Layout, args: &PsArgs) -> Result<Vec<Cell>, CellError> {
    let filters = Filters::of_words(&args.filter, &FILTERS)
        .map_err(|error| CellError::Usage(format!("--filter: {error}")))?;
    filters
        .check(&VALUES, &["exited"])
        .map_err(|error| CellError::Usage(format!("--filter: {error}")))?;
    let images = Ancestors::of(layout, filters.values("ancestor"));
    let networks = Networks::of(layout);
    let found = filters.values("network").iter().map(|key| match networks.find(key) {
        Ok(network) => network.name,
        Err(_) => key.clone(),
    });
    let networks: Vec<String> = found.collect();
    let last = if args.latest { Some(1) } else { args.last };
    let ended_too = args.all
        || last.is_some()
        || !filters.values("status").is_empty()
        || !filters.values("exited").is_empty();
    let mut all = Record::all(layout)?;
    all.retain(|(record, spec, status)| {
        (ended_too || status.state != State::Exited || record.is_restarting(spec, status))
            && passes(&filters, record, spec, status)
            && images.has(spec)
            && (networks.is_empty()
                || spec.networks.iter().any(|own| networks.contains(&own.network)))
    });
    if let Some(last) = last {
        all.drain(..all.len().saturating_sub(last));
    }
    Ok(all)
}

/// The images of the filter `ancestor`.
struct Ancestors {
    names: Vec<String>,
    ids: Vec<String>,
}

impl Ancestors {
    fn of(layout: &Layout, names: &[String]) -> Self {
        let store = Store::open(layout.images());
        let id = |name: &String| Some(store.as_ref().ok()?.resolve(name).ok()?.id.to_string());
        Self { ids: names.iter().filter_map(id).collect(), names: names.to_vec() }
    }

    /// Whether the cell is of one of them: by its id, or by the name that it was asked by.
    fn has(&self, spec: &CellSpec) -> bool {
        let is_named = |name: &String| {
            spec.image == *name || spec.image.rsplit_once(':').is_some_and(|(own, _)| own == name)
        };
        self.names.is_empty()
            || spec.image_id.as_ref().is_some_and(|id| self.ids.contains(id))
            || self.names.iter().any(is_named)
    }
}

fn passes(filters: &Filters, record: &Record, spec: &CellSpec, status: &Status) -> bool {
    let code = status.exit_code.map(|code| code.to_string());
    filters.any("status", |wanted| wanted == state_word(record, spec, status))
        && filters.any("name", |wanted| spec.name.contains(wanted))
        && filters.any("id", |wanted| record.id.starts_with(wanted))
        && filters.any("exited", |wanted| code.as_deref() == Some(wanted))
        && filters.any("health", |wanted| wanted == health_word(record, status))
        && filters.any("strength", |wanted| wanted == spec.strength.to_string())
        && filters.labels(&spec.labels)
}

fn id(record: &Record, args: &PsArgs) -> String {
    let shown = if args.no_trunc { record.id.len() } else { 12 };
    record.id.chars().take(shown).collect()
}

fn words(spec: &CellSpec, images: &Images, args: &PsArgs) -> String {
    let words = images.words(spec).join(" ");
    if args.no_trunc { words } else { shortened(&words) }
}

/// A row by docker's names, and by those of `--json`.
fn named(
    record: &Record,
    spec: &CellSpec,
    status: &Status,
    images: &Images,
    args: &PsArgs,
) -> Value {
    let labels = spec.labels.iter().map(|(name, value)| format!("{name}={value}"));
    let mut row = serde_json::to_value(ps_row(record, spec, status)).unwrap_or_default();
    let own = [
        ("ID", id(record, args)),
        ("Names", spec.name.clone()),
        ("Image", spec.image.clone()),
        ("Command", words(spec, images, args)),
        ("Ports", ports(spec).join(", ")),
        ("State", state_word(record, spec, status).to_owned()),
        ("Status", since(record, spec, status)),
        ("RunningFor", show::ago(spec.created_ms)),
        ("CreatedAt", clock::rfc3339_ms(spec.created_ms)),
        ("Labels", labels.collect::<Vec<_>>().join(",")),
    ];
    for (name, value) in own {
        row[name] = value.into();
    }
    row
}

/// As docker says it.
fn since(record: &Record, spec: &CellSpec, status: &Status) -> String {
    let ago = |time| show::ago(time).replace(" ago", "");
    match (status.state, status.exit_code) {
        (State::Exited, code) => {
            let word = match record.is_restarting(spec, status) {
                true => "Restarting",
                false => "Exited",
            };
            format!("{word} ({}) {} ago", code.unwrap_or(0), ago(status.finished_ms))
        }
        (State::Created, _) if spec.restarts > 0 => "Restarting".to_owned(),
        (State::Created, _) => "Created".to_owned(),
        (State::Running, _) if record.is_paused() => {
            format!("Up {} (Paused)", ago(status.started_ms))
        }
        (State::Running, _) => {
            let health = health(record, status);
            let health = health.map_or_else(String::new, |health| format!(" ({})", health.shown()));
            format!("Up {}{health}", ago(status.started_ms))
        }
    }
}

/// As it was given.
fn command(spec: &CellSpec) -> Vec<&str> {
    spec.entrypoint.iter().flatten().chain(&spec.command).map(String::as_str).collect()
}

fn shortened(text: &str) -> String {
    const SHOWN_MAX: usize = 24;
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// As docker shows them.
fn ports(spec: &CellSpec) -> Vec<String> {
    let shown = |port: &Publish| format!("{}->{}/{}", port.host, port.guest_port, port.protocol());
    spec.publish.iter().map(shown).collect()
}

pub fn port(layout: &Layout, args: &PortArgs) -> Result<u8, CellError> {
    let (_, spec, _) = Record::find(layout, &args.cell)?;
    let mut published = spec.publish;
    if let Some(wanted) = &args.port {
        let (number, protocol) = wanted.split_once('/').unwrap_or((wanted, "tcp"));
        published
            .retain(|port| port.guest_port.to_string() == number && port.protocol() == protocol);
        if published.is_empty() {
            return Err(CellError::Usage(format!(
                "port {wanted} of {} is not published; exocell run -p HOST_PORT:{wanted} does that",
                args.cell
            )));
        }
        published.iter().for_each(|port| say!("{}", port.host));
    } else {
        for port in &published {
            say!("{}/{} -> {}", port.guest_port, port.protocol(), port.host);
        }
    }
    Ok(0)
}

fn ps_row<'a>(record: &'a Record, spec: &'a CellSpec, status: &Status) -> PsRow<'a> {
    PsRow {
        id: &record.id,
        name: &spec.name,
        image: &spec.image,
        command: command(spec),
        ports: ports(spec),
        strength: spec.strength.to_string(),
        platform: spec.guest_platform(),
        state: status.state,
        paused: is_paused(record, status),
        health: health(record, status),
        exit_code: status.exit_code,
        restarting: record.is_restarting(spec, status),
        created_ms: spec.created_ms,
        labels: &spec.labels,
    }
}

fn is_paused(record: &Record, status: &Status) -> bool {
    status.state == State::Running && record.is_paused()
}

/// What the checks of a cell say that runs, if there are any.
fn health(record: &Record, status: &Status) -> Option<Condition> {
    let runs = status.state == State::Running;
    runs.then(|| record.health(status.state)).flatten().map(|health| health.status)
}

/// As docker filters by it.
fn health_word(record: &Record, status: &Status) -> &'static str {
    record.health(status.state).map_or("none", |health| health.status.name())
}

fn state_word(record: &Record, spec: &CellSpec, status: &Status) -> &'static str {
    match status.state {
        State::Exited if record.is_restarting(spec, status) => "restarting",
        _ if is_paused(record, status) => "paused",
        state => state.name(),
    }
}

fn state(record: &Record, spec: &CellSpec, status: &Status) -> String {
    let word = state_word(record, spec, status);
    match status.exit_code {
        _ if is_paused(record, status) => word.to_owned(),
        Some(code) => format!("{word} ({code})"),
        None => match health(record, status) {
            Some(health) => format!("{word} ({})", health.shown()),
            None => word.to_owned(),
        },
    }
}

/// `inspect --json`: the record, and what the host sees of it.
#[derive(Serialize)]
struct Inspected {
    id: String,
    name: String,
    state: State,
    strength: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<PlatformKind>,
    supervisor_pid: Option<i32>,
    guest_kernel_pid: Option<i32>,
    exit_code: Option<u8>,
    reason: Option<String>,
    restarting: bool,
    restart_count: u32,
    out_of_memory: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    health: Option<Health>,
    started_at: String,
    finished_at: String,
    times: exocell_cell::record::StartTimes,
    /// As they hold now.
    capabilities: Value,
    spec: CellSpec,
}

pub fn inspect(layout: &Layout, args: &InspectArgs) -> Result<u8, CellError> {
    let mut inspected = Vec::new();
    for key in &args.cells {
        let (record, spec, status) = Record::find(layout, key)?;
        let alive = status.state != State::Exited && status.supervisor_pid != 0;
        let kernel = alive && status.guest_kernel_inner_pid != 0;
        inspected.push(Inspected {
            id: record.id.clone(),
            name: spec.name.clone(),
            state: status.state,
            strength: spec.strength.to_string(),
            platform: spec.guest_platform(),
            supervisor_pid: alive.then_some(status.supervisor_pid),
            guest_kernel_pid: kernel
                .then(|| processes::host_pid(status.supervisor_pid, status.guest_kernel_inner_pid))
                .flatten(),
            exit_code: status.exit_code,
            restarting: record.is_restarting(&spec, &status),
            restart_count: spec.restarts,
            reason: status.reason,
            out_of_memory: status.out_of_memory,
            health: record.health(status.state),
            times: status.times,
            capabilities: spec.changes.applied(&spec.capabilities),
            started_at: clock::rfc3339_ms(status.started_ms),
            finished_at: clock::rfc3339_ms(status.finished_ms),
            spec,
        });
    }
    if let Some(text) = &args.format {
        let item = |own: &Inspected| {
            let value = serde_json::to_value(own)
                .map_err(|error| CellError::Usage(format!("cannot print JSON: {error}")))?;
            Ok(Item::new(value, Some(exocell_docker::inspected(layout, &own.id)?)))
        };
        let rows = inspected.iter().map(item).collect::<Result<Vec<_>, CellError>>()?;
        return Template::read(text)?.print_items(&rows).map(|()| 0);
    }
    print_json(&inspected, true)?;
    Ok(0)
}

pub fn wait(layout: &Layout, args: &WaitArgs) -> Result<u8, CellError> {
    Ok(each(&args.cells, |key| {
        let (record, spec, status) = Record::find(layout, key)?;
        let heard = if spec.remove { hear_end(&record) } else { None };
        let code = match heard {
            Some(code) => Some(code),
            None => end::await_end(layout, &record, &status, None)?,
        };
        say!("{}", await_last(layout, &record, code)?.unwrap_or(0));
        Ok(())
    }))
}

/// How soon a cell is looked at again that restarts.
const RESTART_LOOK: Duration = Duration::from_millis(50);

/// The exit code of a cell that has ended with `code`, once it stays ended.
fn await_last(
    layout: &Layout,
    record: &Record,
    mut code: Option<u8>,
) -> Result<Option<u8>, CellError> {
    while let Some((spec, status)) = record.look(layout)? {
        if status.state != State::Exited {
            code = end::await_end(layout, record, &status, None)?;
        } else if record.is_restarting(&spec, &status) {
            std::thread::sleep(RESTART_LOOK);
        } else {
            return Ok(status.exit_code.or(code));
        }
    }
    Ok(code)
}

/// The exit code that a follower of the cell hears. A cell that removes itself
/// leaves no other trace of it. `None`: the cell takes no follower now.
fn hear_end(record: &Record) -> Option<u8> {
    let client = Client::connect(record).ok()?;
    client.ask(&ControlRequest::Attach { replay: false }).ok()?;
    match session::await_end(&client.into_stream()) {
        Ok(Outcome::Exited { code, .. }) => Some(code),
        Ok(Outcome::Lost | Outcome::Detached) => Some(128 + Signal::KILL.number()),
        Err(error) => Some(error.exit_code()),
    }
}

pub fn stop(layout: &Layout, args: &StopArgs) -> Result<u8, CellError> {
    Ok(each(&args.cells, |key| {
        let (record, spec, status) = Record::find(layout, key)?;
        // One that is still starting, or waits in a pool, is ended too.
        match status.state {
            State::Exited => record.stay_ended(&spec)?,
            _ => stop_one(layout, &record, &spec, args.signal.as_deref(), args.time)?,
        }
        stays_ended(layout, &record)?;
        say!("{key}");
        Ok(())
    }))
}

/// Ends a cell that was started again in the last moment before its restarter's end.
fn stays_ended(layout: &Layout, record: &Record) -> Result<(), CellError> {
    match record.look(layout)? {
        Some((spec, status)) if status.state != State::Exited && record.is_stopped() => {
            stop_one(layout, record, &spec, None, Some(0))
        }
        _ => Ok(()),
    }
}

/// How long a program has to end where nobody says.
const STOP_SECONDS: u64 = 10;

/// Ends a cell as the command says, or else the cell, or else its image.
pub(super) fn stop_one(
    layout: &Layout,
    record: &Record,
    spec: &CellSpec,
    signal: Option<&str>,
    seconds: Option<u64>,
) -> Result<(), CellError> {
    let seconds = seconds.or(spec.stop_seconds).unwrap_or(STOP_SECONDS);
    let image = || Store::open(layout.images()).and_then(|s| s.resolve(spec.image_name())).ok();
    let named = signal.map(str::to_owned).or_else(|| spec.stop_signal.clone());
    // What an image says that means nothing is not its cells' fault.
    let first = match (named, spec.strength) {
        (Some(name), _) => name.parse()?,
        (None, Strength::Isolate) => Signal::TERM,
        (None, Strength::Vm) => {
            image().and_then(|image| image.config.stop_signal?.parse().ok()).unwrap_or(Signal::TERM)
        }
    };
    end::stop_by(layout, record, first, Duration::from_secs(seconds))
}

pub fn rename(layout: &Layout, args: &RenameArgs) -> Result<u8, CellError> {
    let (record, _, _) = Record::find(layout, &args.cell)?;
    switches::rename(layout, &record.id, &args.name)?;
    Ok(0)
}

pub fn top(layout: &Layout, args: &TopArgs) -> Result<u8, CellError> {
    let (record, spec, status) = Record::find(layout, &args.cell)?;
    must_run(&record, status.state)?;
    if spec.strength == Strength::Isolate {
        return Err(CellError::Usage(format!("{} is an isolate: it has no processes", args.cell)));
    }
    let env = exocell_cell::plan::environment_beside(layout, &spec, &[], false);
    let shown = exocell_docker::processes(&record, env, &args.arguments.join(" "))?;
    say!("{}", shown.trim_end());
    Ok(0)
}

pub fn kill(layout: &Layout, args: &KillArgs) -> Result<u8, CellError> {
    let signal: Signal = args.signal.parse()?;
    Ok(each(&args.cells, |key| {
        let (record, spec, status) = Record::find(layout, key)?;
        // What is still starting has no program to signal, but it can be ended.
        let restarting = record.is_restarting(&spec, &status);
        if !restarting && (signal != Signal::KILL || status.state == State::Exited) {
            must_run(&record, status.state)?;
        }
        // As docker has it: what ends a program by hand is its last end.
        let own = spec.stop_signal.as_deref().and_then(|name| name.parse().ok());
        if signal == Signal::KILL || signal == own.unwrap_or(Signal::TERM) || restarting {
            record.stay_ended(&spec)?;
        }
        if restarting {
            say!("{key}");
            return Ok(());
        }
        end::kill(layout, &record, signal)?;
        say!("{key}");
        Ok(())
    }))
}

pub fn pause(layout: &Layout, args: &PauseArgs, pause: bool) -> Result<u8, CellError> {
    Ok(each(&args.cells, |key| {
        let (record, _, status) = Record::find(layout, key)?;
        must_run(&record, status.state)?;
        end::pause(&record, pause)?;
        say!("{key}");
        Ok(())
    }))
}

pub fn rm(layout: &Layout, args: &RmArgs) -> Result<u8, CellError> {
    let code = each(&args.cells, |key| {
        let (record, _, status) = match Record::find(layout, key) {
            // As docker has it.
            Err(CellError::NoSuchCell(_)) if args.force => return Ok(()),
            found => found?,
        };
        end::remove(layout, &record, &status, args.force)?;
        if args.volumes {
            exocell_docker::discard_volumes(layout, &record.id);
        }
        say!("{key}");
        Ok(())
    });
    exocell_docker::sweep_volumes(layout);
    Ok(code)
}

pub fn update(layout: &Layout, args: &UpdateArgs) -> Result<u8, CellError> {
    let (record, spec, status) = Record::find(layout, &args.cell)?;
    if let Some(policy) = args.restart {
        change_restart(layout, &record, &spec, policy)?;
    }
    if args.cpus.is_some() || args.pids_limit.is_some() {
        change_limits(&record, &spec, args)?;
    }
    let others = args.memory.is_some()
        || [&args.revoke, &args.allow_net, &args.deny_net].iter().any(|list| !list.is_empty());
    if !others {
        return Ok(0);
    }
    must_run(&record, status.state)?;
    for capability in &args.revoke {
        let request = ControlRequest::Revoke { capability: capability.clone() };
        Client::connect(&record)?.ask(&request)?;
        say!("{capability} revoked");
    }
    if !args.allow_net.is_empty() || !args.deny_net.is_empty() {
        let rules = |list: &[String]| list.iter().map(|rule| network_rule(rule)).collect();
        let request =
            ControlRequest::Network { allow: rules(&args.allow_net), deny: rules(&args.deny_net) };
        Client::connect(&record)?.ask(&request)?;
        say!("network changed");
    }
    if let Some(limit_bytes) = args.memory {
        change_memory(&record, limit_bytes)?;
    }
    Ok(0)
}

fn change_restart(
    layout: &Layout,
    record: &Record,
    spec: &CellSpec,
    policy: Policy,
) -> Result<(), CellError> {
    record.set_restart(spec, policy)?;
    restart::follow_policy(layout, record)?;
    say!("restart policy {policy}");
    Ok(())
}

/// Of its programs, if it runs, and of its next start.
fn change_limits(record: &Record, spec: &CellSpec, args: &UpdateArgs) -> Result<(), CellError> {
    if spec.strength == Strength::Isolate {
        let why = "--cpus and --pids-limit are changed of vm cells; run the isolate anew";
        return Err(CellError::Usage(why.to_owned()));
    }
    let cpu = args.cpus.as_deref().map(Settings::read_cpus).transpose();
    let cpu = cpu.map_err(|error| CellError::Usage(format!("--cpus: {error}")))?;
    if let Some(time) = cpu.filter(|time| time.processors() > u64::from(plan::VCPUS_MAX)) {
        let (wanted, most) = (time.processors(), plan::VCPUS_MAX);
        let why = format!("--cpus: {wanted} processors are more than the {most} of a vm cell");
        return Err(CellError::Usage(why));
    }
    let limits = Limits { cpu, process_max: args.pids_limit, ..Limits::default() };
    record.set_limits(&limits)?;
    say!("limits changed");
    Ok(())
}

/// Whatever is not refused is applied, or on its way.
fn change_memory(record: &Record, limit_bytes: u64) -> Result<(), CellError> {
    match Client::connect(record)?.ask(&ControlRequest::Memory { limit_bytes })? {
        ControlReply::Memory { applied: true } => say!("memory limit applied"),
        ControlReply::Memory { applied: false } => {
            say!("memory limit converging: the guest still uses more; exocell stats shows it");
        }
        _ => return Err(CellError::Guest("the supervisor broke the protocol".to_owned())),
    }
    Ok(())
}
