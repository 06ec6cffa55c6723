//! The verbs on existing cells: ps, logs, inspect, wait, stop, kill, rm, update.

use std::time::Duration;

use exocell_cell::control::{Client, ControlReply, ControlRequest};
use exocell_cell::{
    CellError, CellSpec, Layout, Record, State, Status, end, network, output, processes,
};
use nix::sys::signal::Signal;
use serde::Serialize;

use super::print_json;
use super::run::{must_run, network_rule};
use crate::args::{
    InspectArgs, KillArgs, LogsArgs, PauseArgs, PortArgs, PsArgs, RmArgs, StopArgs, UpdateArgs,
    WaitArgs,
};
use crate::session::{self, Outcome};
use crate::show::{self, say};

#[derive(Serialize)]
struct PsRow<'a> {
    id: &'a str,
    name: &'a str,
    image: &'a str,
    /// As it was given; the image's own where there is none.
    command: Vec<&'a str>,
    strength: String,
    state: State,
    paused: bool,
    exit_code: Option<u8>,
    created_ms: u64,
    ports: Vec<String>,
}

pub fn ps(layout: &Layout, args: &PsArgs) -> Result<u8, CellError> {
    let mut all = Record::all(layout)?;
    all.retain(|(_, _, status)| args.all || status.state != State::Exited);
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
    let rows: Vec<Vec<String>> = all
        .iter()
        .map(|(record, spec, status)| {
            vec![
                record.id[..12].to_owned(),
                spec.image.clone(),
                shortened(&command(spec).join(" ")),
                spec.strength.to_string(),
                show::ago(spec.created_ms),
                state(record, status),
                ports(spec).join(", "),
                spec.name.clone(),
            ]
        })
        .collect();
    let header = ["CELL ID", "IMAGE", "COMMAND", "STRENGTH", "CREATED", "STATE", "PORTS", "NAME"];
    show::table(&header, &rows);
    Ok(0)
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
    spec.publish.iter().map(|port| format!("{}->{}/tcp", port.host, port.guest_port)).collect()
}

pub fn port(layout: &Layout, args: &PortArgs) -> Result<u8, CellError> {
    let (_, spec, _) = Record::find(layout, &args.cell)?;
    let mut published = spec.publish;
    if let Some(wanted) = args.port {
        published.retain(|port| port.guest_port == wanted);
        if published.is_empty() {
            return Err(CellError::Usage(format!(
                "port {wanted} of {} is not published; exocell run -p HOST_PORT:{wanted} does that",
                args.cell
            )));
        }
        published.iter().for_each(|port| say!("{}", port.host));
    } else {
        published.iter().for_each(|port| say!("{}/tcp -> {}", port.guest_port, port.host));
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
        state: status.state,
        paused: is_paused(record, status),
        exit_code: status.exit_code,
        created_ms: spec.created_ms,
    }
}

fn is_paused(record: &Record, status: &Status) -> bool {
    status.state == State::Running && record.is_paused()
}

fn state(record: &Record, status: &Status) -> String {
    match status.exit_code {
        _ if is_paused(record, status) => "paused".to_owned(),
        Some(code) => format!("{} ({code})", status.state.name()),
        None => status.state.name().to_owned(),
    }
}

pub fn logs(layout: &Layout, args: &LogsArgs) -> Result<u8, CellError> {
    let (record, _, status) = Record::find(layout, &args.cell)?;
    if args.console {
        let path = record.path("console.log");
        let file = std::fs::File::open(&path)
            .map_err(CellError::host(format!("cannot read {}", path.display())))?;
        show::lines(std::io::BufReader::new(file))
            .map_err(CellError::host("cannot write the console out"))?;
        return Ok(0);
    }
    if args.network {
        return network_log(&record);
    }
    if args.follow && status.state == State::Running {
        let client = Client::connect(&record)?;
        client.ask(&ControlRequest::Attach { replay: true })?;
        return match session::watch(&client.into_stream())? {
            Outcome::Exited { .. } => Ok(0),
            Outcome::Lost => Err(CellError::Guest(format!(
                "the supervisor ended before all was heard; exocell logs {} shows what is kept",
                args.cell
            ))),
        };
    }
    output::replay_log(record.directory(), &mut std::io::stdout(), &mut std::io::stderr())?;
    Ok(0)
}

/// The decisions that are kept, older ones first; none where there is no network.
fn network_log(record: &Record) -> Result<u8, CellError> {
    for name in network::LOGS {
        let path = record.path(name);
        let file = match std::fs::File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                return Err(CellError::host(format!("cannot read {}", path.display()))(error));
            }
        };
        show::lines(std::io::BufReader::new(file))
            .map_err(CellError::host("cannot write the decisions out"))?;
    }
    Ok(0)
}

/// `inspect --json`: the record, and what the host sees of it.
#[derive(Serialize)]
struct Inspected {
    id: String,
    name: String,
    state: State,
    strength: String,
    supervisor_pid: Option<i32>,
    guest_kernel_pid: Option<i32>,
    exit_code: Option<u8>,
    reason: Option<String>,
    out_of_memory: bool,
    times: exocell_cell::record::StartTimes,
    capabilities: serde_json::Value,
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
            supervisor_pid: alive.then_some(status.supervisor_pid),
            guest_kernel_pid: kernel
                .then(|| processes::host_pid(status.supervisor_pid, status.guest_kernel_inner_pid))
                .flatten(),
            exit_code: status.exit_code,
            reason: status.reason,
            out_of_memory: status.out_of_memory,
            times: status.times,
            capabilities: serde_json::from_str(&spec.capabilities).unwrap_or_default(),
            spec,
        });
    }
    match inspected.as_slice() {
        [one] if args.json => print_json(one, true)?,
        all => print_json(&all, true)?,
    }
    Ok(0)
}

pub fn wait(layout: &Layout, args: &WaitArgs) -> Result<u8, CellError> {
    for key in &args.cells {
        let (record, spec, status) = Record::find(layout, key)?;
        let heard = if spec.remove { hear_end(&record) } else { None };
        let code = match heard {
            Some(code) => Some(code),
            None => end::await_end(layout, &record, &status, None)?,
        };
        say!("{}", code.unwrap_or(0));
    }
    Ok(0)
}

/// The exit code that a follower of the cell hears. A cell that removes itself
/// leaves no other trace of it. `None`: the cell takes no follower now.
fn hear_end(record: &Record) -> Option<u8> {
    let client = Client::connect(record).ok()?;
    client.ask(&ControlRequest::Attach { replay: false }).ok()?;
    match session::await_end(&client.into_stream()) {
        Ok(Outcome::Exited { code, .. }) => Some(code),
        Ok(Outcome::Lost) => Some(128 + Signal::SIGKILL as u8),
        Err(error) => Some(error.exit_code()),
    }
}

pub fn stop(layout: &Layout, args: &StopArgs) -> Result<u8, CellError> {
    for key in &args.cells {
        let (record, _, status) = Record::find(layout, key)?;
        // One that is still starting, or waits in a pool, is ended too.
        if status.state != State::Exited {
            end::stop(layout, &record, Duration::from_secs(args.time))?;
        }
        say!("{key}");
    }
    Ok(0)
}

pub fn kill(layout: &Layout, args: &KillArgs) -> Result<u8, CellError> {
    let signal = end::signal(&args.signal)?;
    for key in &args.cells {
        let (record, _, status) = Record::find(layout, key)?;
        // What is still starting has no program to signal, but it can be ended.
        if signal != Signal::SIGKILL || status.state == State::Exited {
            must_run(&record, status.state)?;
        }
        end::kill(layout, &record, signal)?;
        say!("{key}");
    }
    Ok(0)
}

pub fn pause(layout: &Layout, args: &PauseArgs, pause: bool) -> Result<u8, CellError> {
    for key in &args.cells {
        let (record, _, status) = Record::find(layout, key)?;
        must_run(&record, status.state)?;
        end::pause(&record, pause)?;
        say!("{key}");
    }
    Ok(0)
}

pub fn rm(layout: &Layout, args: &RmArgs) -> Result<u8, CellError> {
    for key in &args.cells {
        let (record, _, status) = Record::find(layout, key)?;
        end::remove(layout, &record, &status, args.force)?;
        say!("{key}");
    }
    Ok(0)
}

pub fn update(layout: &Layout, args: &UpdateArgs) -> Result<u8, CellError> {
    let (record, _, status) = Record::find(layout, &args.cell)?;
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
