//! The verbs on existing cells: ps, logs, inspect, wait, stop, kill, rm, update.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::{
    CellError, CellSpec, Layout, Record, State, Status, network, output, processes,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use serde::Serialize;

use super::print_json;
use super::run::{must_run, network_rule};
use crate::args::{
    InspectArgs, KillArgs, LogsArgs, PsArgs, RmArgs, StopArgs, UpdateArgs, WaitArgs,
};
use crate::session::{self, Outcome};
use crate::show::{self, say};

#[derive(Serialize)]
struct PsRow<'a> {
    id: &'a str,
    name: &'a str,
    image: &'a str,
    strength: String,
    state: State,
    exit_code: Option<u8>,
    created_ms: u64,
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
                spec.strength.to_string(),
                show::ago(spec.created_ms),
                state(status),
                spec.name.clone(),
            ]
        })
        .collect();
    show::table(&["CELL ID", "IMAGE", "STRENGTH", "CREATED", "STATE", "NAME"], &rows);
    Ok(0)
}

fn ps_row<'a>(record: &'a Record, spec: &'a CellSpec, status: &Status) -> PsRow<'a> {
    PsRow {
        id: &record.id,
        name: &spec.name,
        image: &spec.image,
        strength: spec.strength.to_string(),
        state: status.state,
        exit_code: status.exit_code,
        created_ms: spec.created_ms,
    }
}

fn state(status: &Status) -> String {
    match status.exit_code {
        Some(code) => format!("{} ({code})", status.state.name()),
        None => status.state.name().to_owned(),
    }
}

pub fn logs(layout: &Layout, args: &LogsArgs) -> Result<u8, CellError> {
    let (record, _, status) = Record::find(layout, &args.cell)?;
    if args.console {
        let path = record.path("console.log");
        let mut file = std::fs::File::open(&path)
            .map_err(CellError::host(format!("cannot read {}", path.display())))?;
        std::io::copy(&mut file, &mut std::io::stdout())
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
            Outcome::Exited(_) => Ok(0),
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
    for name in [network::LOG_OLD, network::LOG] {
        let path = record.path(name);
        let mut file = match std::fs::File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                return Err(CellError::host(format!("cannot read {}", path.display()))(error));
            }
        };
        std::io::copy(&mut file, &mut std::io::stdout())
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
    times: exocell_cell::record::StartTimes,
    capabilities: serde_json::Value,
    spec: CellSpec,
}

pub fn inspect(layout: &Layout, args: &InspectArgs) -> Result<u8, CellError> {
    let mut inspected = Vec::new();
    for key in &args.cells {
        let (record, spec, status) = Record::find(layout, key)?;
        let alive = status.state == State::Running;
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
            None => await_end(layout, &record, &status, None)?,
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
        Ok(Outcome::Exited(code)) => Some(code),
        Ok(Outcome::Lost) => Some(128 + Signal::SIGKILL as u8),
        Err(error) => Some(error.exit_code()),
    }
}

/// The exit code of a cell once it has ended; `None` when `limit` passed
/// first.
fn await_end(
    layout: &Layout,
    record: &Record,
    status: &Status,
    limit: Option<Duration>,
) -> Result<Option<u8>, CellError> {
    if let Some(code) = status.exit_code {
        return Ok(Some(code));
    }
    let pidfd = open_pidfd(supervisor(layout, record, status));
    if let Some(pidfd) = pidfd {
        let until = limit.map(|limit| Instant::now() + limit);
        if !poll_end(&pidfd, until)? {
            return Ok(None);
        }
    }
    match Record::find(layout, &record.id) {
        Ok((_, _, status)) => Ok(Some(status.exit_code.unwrap_or(0))),
        Err(CellError::NoSuchCell(_)) => Ok(Some(0)),
        Err(error) => Err(error),
    }
}

/// The supervisor's pid, waited for where it is so young that it has not
/// written it down; 0 when it is gone.
fn supervisor(layout: &Layout, record: &Record, status: &Status) -> i32 {
    let mut pid = status.supervisor_pid;
    while pid == 0 {
        match Record::find(layout, &record.id) {
            Ok((_, _, now)) if now.state != State::Exited => pid = now.supervisor_pid,
            _ => return 0,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    pid
}

fn open_pidfd(pid: i32) -> Option<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(pid)?;
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
}

/// Whether the process of `pidfd` ended before `until`.
fn poll_end(pidfd: &OwnedFd, until: Option<Instant>) -> Result<bool, CellError> {
    loop {
        let timeout = match until {
            None => PollTimeout::NONE,
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut waited = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waited, timeout) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(CellError::host("cannot wait for the cell")(errno.into())),
        }
    }
}

pub fn stop(layout: &Layout, args: &StopArgs) -> Result<u8, CellError> {
    for key in &args.cells {
        let (record, _, status) = Record::find(layout, key)?;
        if status.state == State::Running {
            let grace = Duration::from_secs(args.time);
            let request = ControlRequest::Stop { grace_ms: args.time.saturating_mul(1000) };
            // A supervisor that does not answer is killed below.
            let _ = Client::connect(&record).and_then(|client| client.ask(&request));
            if await_end(layout, &record, &status, Some(grace + Duration::from_secs(5)))?.is_none()
            {
                end_now(layout, &record, &status)?;
            }
        }
        say!("{key}");
    }
    Ok(0)
}

pub fn kill(layout: &Layout, args: &KillArgs) -> Result<u8, CellError> {
    let signal = signal(&args.signal)?;
    for key in &args.cells {
        let (record, _, status) = Record::find(layout, key)?;
        must_run(&record, status.state)?;
        let request = match signal {
            Signal::SIGKILL => ControlRequest::Stop { grace_ms: 0 },
            other => ControlRequest::Signal { signal: other as i32 as u8 },
        };
        Client::connect(&record)?.ask(&request)?;
        if signal == Signal::SIGKILL
            && await_end(layout, &record, &status, Some(Duration::from_secs(5)))?.is_none()
        {
            end_now(layout, &record, &status)?;
        }
        say!("{key}");
    }
    Ok(0)
}

/// `KILL`, `SIGKILL` or `9`.
fn signal(text: &str) -> Result<Signal, CellError> {
    let upper = text.to_ascii_uppercase();
    let by_number = text.parse::<i32>().ok().and_then(|number| Signal::try_from(number).ok());
    let name = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
    by_number.or_else(|| name.parse().ok()).ok_or_else(|| {
        CellError::Usage(format!("{text} is no signal; try TERM, KILL, HUP or a number"))
    })
}

/// Kills a supervisor and with it all of its cell.
fn end_now(layout: &Layout, record: &Record, status: &Status) -> Result<(), CellError> {
    if let Some(pidfd) = open_pidfd(supervisor(layout, record, status)) {
        // Asked with the descriptor in hand: the pid may be someone else's by now.
        if record.is_held() {
            rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL)
                .map_err(|error| CellError::host("cannot kill the supervisor")(error.into()))?;
            poll_end(&pidfd, None)?;
        }
    }
    Ok(())
}

pub fn rm(layout: &Layout, args: &RmArgs) -> Result<u8, CellError> {
    for key in &args.cells {
        let (record, _, status) = Record::find(layout, key)?;
        if status.state != State::Exited {
            if !args.force {
                return Err(CellError::WrongState {
                    id: record.id[..12].to_owned(),
                    state: status.state.name(),
                    remedy: "stop it first, or use rm -f",
                });
            }
            end_now(layout, &record, &status)?;
        }
        // An ended cell's supervisor may still write to its followers.
        let patience = Instant::now() + Duration::from_secs(2);
        while !record.retire()? {
            if Instant::now() > patience {
                end_now(layout, &record, &status)?;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
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
    Ok(0)
}
