//! `exocell logs`: what a cell's program wrote, its guest's console, its network's decisions.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::lines::{Line, Tail, Wanted};
use exocell_cell::{CellError, Layout, Record, State, clock, logging, network, now_ms, output};

use crate::args::LogsArgs;
use crate::session::{self, Outcome};
use crate::show;

pub fn logs(layout: &Layout, args: &LogsArgs) -> Result<u8, CellError> {
    let (record, spec, status) = Record::find(layout, &args.cell)?;
    if args.console || args.supervisor {
        let path = record.path(if args.console { "console.log" } else { logging::FILE });
        let file = std::fs::File::open(&path)
            .map_err(CellError::host(format!("cannot read {}", path.display())))?;
        show::lines(std::io::BufReader::new(file))
            .map_err(CellError::host(format!("cannot print {}", path.display())))?;
        return Ok(0);
    }
    if args.network {
        return network_log(&record);
    }
    if spec.keeps_no_log {
        return Err(CellError::Usage(format!(
            "cell {} keeps no log (--log-driver none); exocell attach hears what it says from now on",
            spec.name
        )));
    }
    let wanted = wanted(args)?;
    let follows = args.follow && status.state == State::Running;
    match wanted {
        Some(wanted) if follows => follow_lines(&record, wanted),
        Some(wanted) => past_lines(&record, wanted),
        None if follows => follow(&record, &args.cell),
        None => {
            let (out, err) = (&mut io::stdout(), &mut io::stderr());
            output::replay_log(record.directory(), out, err).map(|()| 0)
        }
    }
}

/// Which lines are wanted; `None` where the log is wanted as it is, unfinished lines too.
fn wanted(args: &LogsArgs) -> Result<Option<Wanted>, CellError> {
    if args.tail.is_none() && args.since.is_none() && args.until.is_none() && !args.timestamps {
        return Ok(None);
    }
    let time = |flag: &str, text: &Option<String>| {
        let time = text.as_deref().map(|text| clock::parse_ms(text, now_ms())).transpose();
        time.map_err(|error| CellError::Usage(format!("--{flag}: {error}")))
    };
    Ok(Some(Wanted {
        timestamps: args.timestamps,
        since: time("since", &args.since)?.unwrap_or(0),
        until: time("until", &args.until)?.unwrap_or(u64::MAX),
        tail: args.tail.as_deref().map_or(Ok(None), tail)?,
        ..Wanted::streams(true, true)
    }))
}

/// A number below zero means all, as docker has it.
fn tail(text: &str) -> Result<Option<usize>, CellError> {
    if text == "all" {
        return Ok(None);
    }
    let number: i64 = text.parse().map_err(|_| {
        CellError::Usage(format!("--tail: `{text}` is no number of lines; write 20, or all"))
    })?;
    Ok(usize::try_from(number).ok())
}

fn follow(record: &Record, name: &str) -> Result<u8, CellError> {
    let client = Client::connect(record)?;
    client.ask(&ControlRequest::Attach { replay: true })?;
    match session::watch(&client.into_stream())? {
        Outcome::Exited { .. } => Ok(0),
        Outcome::Lost | Outcome::Detached => Err(CellError::Guest(format!(
            "the supervisor ended before all was heard; exocell logs {name} shows what is kept"
        ))),
    }
}

fn unreadable(error: io::Error) -> CellError {
    CellError::host("cannot read the log")(error)
}

fn past_lines(record: &Record, wanted: Wanted) -> Result<u8, CellError> {
    let mut log = Tail::open(record.directory()).map_err(unreadable)?;
    log.skip(&wanted, true).map_err(unreadable)?;
    put_all(&mut log, wanted, true)?;
    Ok(0)
}

/// Shows the lines that are there; with `rest` the unfinished ones too.
fn put_all(log: &mut Tail, wanted: Wanted, rest: bool) -> Result<(), CellError> {
    while let Some(line) = log.line().map_err(unreadable)? {
        wanted.choose(line).map_or(Ok(()), |line| put(&line))?;
    }
    while rest && let Some(line) = log.rest() {
        wanted.choose(line).map_or(Ok(()), |line| put(&line))?;
    }
    Ok(())
}

/// Shows the lines of the log as they come, until the program ends.
fn follow_lines(record: &Record, wanted: Wanted) -> Result<u8, CellError> {
    let client = Client::connect(record)?;
    client.ask(&ControlRequest::Attach { replay: false })?;
    // What is written from here on is told, and is in the log by then.
    let mut log = Tail::open(record.directory()).map_err(unreadable)?;
    log.skip(&wanted, false).map_err(unreadable)?;
    let (tell, news) = sync_channel(1);
    thread::spawn(move || session::listen(&client.into_stream(), &tell));
    let mut is_over = false;
    loop {
        log.look().map_err(unreadable)?;
        put_all(&mut log, wanted, is_over)?;
        if is_over || wanted.until <= now_ms() {
            return Ok(0);
        }
        is_over = ends_first(&news, wanted.until);
    }
}

/// Waits until something was written, or `until_ms`; whether the program ended first.
fn ends_first(news: &Receiver<()>, until_ms: u64) -> bool {
    let left = Duration::from_millis(until_ms.saturating_sub(now_ms()));
    // A time that no clock reaches is none.
    match until_ms {
        u64::MAX => news.recv().is_err(),
        _ => news.recv_timeout(left) == Err(RecvTimeoutError::Disconnected),
    }
}

fn put(line: &Line) -> Result<(), CellError> {
    let written = match line.stderr {
        false => io::stdout().write_all(&line.bytes).and_then(|()| io::stdout().flush()),
        true => io::stderr().write_all(&line.bytes),
    };
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => session::end_unread(),
        other => other.map_err(CellError::host("cannot write the log out")),
    }
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
