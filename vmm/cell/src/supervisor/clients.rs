//! The control socket's server: one thread a connection, a bounded number.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use exocell_agent::{FrameReader, FrameWriter, Kind};
use exocell_xgate::{Kind as CapabilityKind, Table};

use super::{Event, Shared, thread, warmth};
use crate::control::{ControlReply, ControlRequest, Counters, send_descriptor};
use crate::launch::Inheritance;
use crate::{CellError, CellSpec, Record};

/// Connections served at once.
const CLIENTS_MAX: usize = 64;

/// Ends the capability `name` of `holder` and all derived from it, if it is of one of the `kinds`
/// that a workload of this strength can lose while it runs.
pub(crate) fn revoke(
    table: &mut Table,
    holder: &str,
    name: &str,
    kinds: &[CapabilityKind],
) -> Result<(), String> {
    let handle = table
        .find(holder, name)
        .ok_or_else(|| format!("the cell has no capability {name}; exocell inspect lists them"))?;
    let kind = table.get(handle).map_err(|error| error.to_string())?.kind();
    if !kinds.contains(&kind) {
        return Err(format!(
            "{name} was given when the cell started and stays as long as it runs; exocell stop ends it"
        ));
    }
    table.revoke(handle).map(drop).map_err(|error| error.to_string())
}

/// What a workload offers to clients; a refusal is told as it is.
pub(crate) trait Services: Send + Sync {
    /// A stream to the guest's agent.
    fn connect(&self) -> Result<UnixStream, String>;
    /// Ends the capability `name` and all derived from it.
    fn revoke(&self, name: &str) -> Result<(), String>;
    /// Adds and removes rules of the network.
    fn change_network(&self, allow: &[String], deny: &[String]) -> Result<(), String>;
    /// Stops all of the guest, or lets it go on.
    fn pause(&self, pause: bool) -> Result<(), String>;
    /// Changes how much memory the guest may use; says whether it does by now.
    fn change_memory(&self, limit_bytes: u64) -> Result<bool, String>;
    fn counters(&self) -> Counters;
}

/// Starts serving; also takes input from the operator's own connection.
pub(crate) fn serve(
    inheritance: &Inheritance,
    shared: &Shared,
    services: Arc<dyn Services>,
) -> Result<(), CellError> {
    let failed = || "cannot copy a descriptor";
    let operator = inheritance.operator.try_clone().map_err(CellError::host(failed()))?;
    let control = inheritance.control.try_clone().map_err(CellError::host(failed()))?;
    let input = shared.clone();
    let idle = inheritance.spec.idle;
    thread("operator", move || match (input.warmth.is_warm(), idle) {
        (true, _) => warmth::watch_pool(&input, &operator),
        (false, true) => await_hang_up(&input, &operator),
        (false, false) => forward_input(&input, operator),
    })?;
    let shared = shared.clone();
    let server = thread("control", move || {
        let alive = Arc::new(AtomicUsize::new(0));
        for stream in control.incoming().flatten() {
            accept(&shared, &services, stream, &alive);
        }
    });
    server.map(drop)
}

fn accept(
    shared: &Shared,
    services: &Arc<dyn Services>,
    stream: UnixStream,
    alive: &Arc<AtomicUsize>,
) {
    if alive.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
        alive.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    let (shared, services, alive) = (shared.clone(), services.clone(), alive.clone());
    let counter = alive.clone();
    let started = thread("client", move || {
        answer(&shared, &*services, stream);
        alive.fetch_sub(1, Ordering::Relaxed);
    });
    if started.is_err() {
        counter.fetch_sub(1, Ordering::Relaxed);
    }
}

fn answer(shared: &Shared, services: &dyn Services, stream: UnixStream) {
    let Ok(request) = FrameReader::new(&stream).expect::<ControlRequest>(Kind::Request) else {
        return;
    };
    let reply = |reply: &ControlReply| {
        // A client that is gone needs no answer.
        let _ = FrameWriter::new(&stream).write_json(Kind::Reply, reply);
    };
    let outcome = |result: Result<(), String>| match result {
        Ok(()) => ControlReply::Done,
        Err(message) => ControlReply::Failed { message },
    };
    if shared.warmth.is_warm() && !warmth::is_for_warm(&request) {
        return reply(&outcome(Err("the cell waits in a pool for its program".to_owned())));
    }
    let record = &shared.record;
    match request {
        ControlRequest::Attach { replay } => attach(shared, &stream, replay),
        ControlRequest::Connect => match awake(record).and_then(|()| services.connect()) {
            Ok(guest) => {
                reply(&ControlReply::Stream);
                let _ = send_descriptor(&stream, &guest);
            }
            Err(message) => reply(&ControlReply::Failed { message }),
        },
        ControlRequest::Signal { signal } => {
            let woken = wake(services, record);
            if woken.is_ok() {
                shared.input.wait_open();
                shared.input.signal(signal);
            }
            reply(&outcome(woken));
        }
        ControlRequest::Stop { grace_ms } => {
            // One that stays where it is has no use for the grace, but it ends.
            let woken = wake(services, record);
            let grace = Duration::from_millis(grace_ms);
            let told = shared.events.send(Event::Stop { grace });
            reply(&outcome(woken.and(told.map_err(|_| "the cell is ending".to_owned()))));
        }
        ControlRequest::Revoke { capability } => reply(&outcome(services.revoke(&capability))),
        ControlRequest::Network { allow, deny } => {
            reply(&outcome(services.change_network(&allow, &deny)));
        }
        ControlRequest::Pause { pause: true } => reply(&outcome(hold(services, record))),
        ControlRequest::Pause { pause: false } => reply(&outcome(let_go_on(services, record))),
        ControlRequest::Rename { name } => {
            let renamed = CellSpec::check_name(&name)
                .and_then(|()| record.write_name(shared.warmth.spec(), &name));
            reply(&outcome(renamed.map_err(|error| error.to_string())));
        }
        ControlRequest::Memory { limit_bytes } => {
            reply(&match services.change_memory(limit_bytes) {
                Ok(applied) => ControlReply::Memory { applied },
                Err(message) => ControlReply::Failed { message },
            })
        }
        ControlRequest::Reserve { from, to } => {
            reply(&outcome(warmth::reserve(shared, &from, to)));
        }
        ControlRequest::Take(order) => match warmth::take(shared, &stream, *order) {
            Ok(session) => forward_input(shared, session),
            Err(message) => reply(&outcome(Err(message))),
        },
        ControlRequest::Counters => reply(&ControlReply::Counters(services.counters())),
    }
}

/// Whoever makes the mark pauses the cell: it is made first and removed last.
fn hold(services: &dyn Services, record: &Record) -> Result<(), String> {
    let mark = record.path(Record::PAUSED);
    File::create_new(&mark).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => "the cell is already paused".to_owned(),
        _ => format!("cannot mark the cell as paused: {error}"),
    })?;
    services.pause(true).inspect_err(|_| {
        // The first error is the one to tell.
        let _ = fs::remove_file(&mark);
    })
}

fn let_go_on(services: &dyn Services, record: &Record) -> Result<(), String> {
    if !record.is_paused() {
        return Err("the cell is not paused".to_owned());
    }
    wake(services, record)
}

/// Lets a paused cell go on; what is asked of its program is then heard.
fn wake(services: &dyn Services, record: &Record) -> Result<(), String> {
    if !record.is_paused() {
        return Ok(());
    }
    services.pause(false)?;
    match fs::remove_file(record.path(Record::PAUSED)) {
        // Another client was faster.
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(format!("cannot take the mark of a paused cell away: {error}"))
        }
        _ => Ok(()),
    }
}

/// The guest of a paused cell answers nobody.
fn awake(record: &Record) -> Result<(), String> {
    match record.is_paused() {
        true => Err("the cell is paused; unpause it first".to_owned()),
        false => Ok(()),
    }
}

fn attach(shared: &Shared, stream: &UnixStream, replay: bool) {
    let (Ok(follower), Ok(source)) = (stream.try_clone(), stream.try_clone()) else { return };
    if FrameWriter::new(stream).write_json(Kind::Reply, &ControlReply::Done).is_ok()
        && let Some(follower) = shared.output.attach(follower, replay)
    {
        forward_input(shared, source);
        shared.output.detach(&follower);
    }
}

/// A cell without a program ends when its operator hangs up.
fn await_hang_up(shared: &Shared, mut operator: &UnixStream) {
    while matches!(operator.read(&mut [0; 64]), Ok(1..)) {}
    // One that is ending needs no word.
    let _ = shared.events.send(Event::Stop { grace: Duration::ZERO });
}

/// Passes a follower's frames on until it goes.
fn forward_input(shared: &Shared, source: UnixStream) {
    shared.input.wait_open();
    let mut frames = FrameReader::new(source);
    while let Ok(Some(frame)) = frames.read() {
        shared.input.feed(&frame);
    }
}
