//! The control socket's server: one thread a connection, a bounded number.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use exocell_agent::{FrameReader, FrameWriter, Kind};
use exocell_network::switch::Port;
use exocell_xgate::{Kind as CapabilityKind, Table};

use super::contained::{self, Contained};
use super::{Event, Shared, thread, warmth};
use crate::changes::Changes;
use crate::control::{Contain, ControlReply, ControlRequest, Counters, Order};
use crate::descriptors::{receive_descriptor, send_descriptor};
use crate::events::Action;
use crate::launch::Inheritance;
use crate::limits::Limits;
use crate::networks::Attachment;
use crate::{CellError, CellSpec, Record};
use exocell_images::private;

/// Connections served at once.
const CLIENTS_MAX: usize = 64;
/// How long a signal waits for a program that is being started.
const PROGRAM_MAX: Duration = Duration::from_secs(15);
/// How long a client may take to say what it wants, and to take the answer.
const CLIENT_MAX: Duration = Duration::from_secs(10);

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
    /// Has one more container in the guest, of the image in a file or with a root in the depot.
    fn contain(&self, wanted: Contain, image: Vec<OwnedFd>) -> Result<Contained, String>;
    /// Removes what the container of cell `id` has kept.
    fn forget(&self, id: &str) -> Result<(), String>;
    /// A stream to the guest's agent.
    fn connect(&self) -> Result<UnixStream, String>;
    /// Ends the capability `name` and all derived from it.
    fn revoke(&self, name: &str) -> Result<(), String>;
    /// Adds and removes rules of the network; those that hold from now on.
    fn change_network(&self, allow: &[String], deny: &[String]) -> Result<Vec<String>, String>;
    /// Puts the workload into a network between cells, by a socket that has joined it.
    fn join(&self, port: Port) -> Result<(), String>;
    /// Has its network device lead to a tun device of the host's.
    fn plug(&self, _: &exocell_agent::NetworkSetup, _: OwnedFd) -> Result<(), String> {
        Err("the cell was not made to be plugged into a network".to_owned())
    }
    /// Takes it out of one.
    fn leave(&self, network: &str) -> Result<(), String>;
    /// The networks whose switch has ended, and the workload's address in each.
    fn lost_networks(&self) -> BTreeMap<String, Ipv4Addr>;
    /// Stops all of the guest, or lets it go on.
    fn pause(&self, pause: bool) -> Result<(), String>;
    /// Changes how much memory the guest may use; says whether it does by now.
    fn change_memory(&self, limit_bytes: u64) -> Result<bool, String>;
    /// Has the guest keep the workload to `limits`.
    fn limit(&self, limits: &Limits) -> Result<(), String>;
    fn counters(&self) -> Counters;
}

/// What a workload offers, once it is up. Before that it can be followed and ended.
pub(crate) type Pending = Arc<OnceLock<Arc<dyn Services>>>;

/// Starts serving; also takes input from the operator's own connection.
pub(crate) fn serve(
    inheritance: &Inheritance,
    shared: &Shared,
    services: Pending,
) -> Result<(), CellError> {
    let failed = || "cannot copy a descriptor";
    let operator = inheritance.operator.try_clone().map_err(CellError::host(failed()))?;
    let control = inheritance.control.try_clone().map_err(CellError::host(failed()))?;
    let input = shared.clone();
    let idle = inheritance.spec.idle;
    thread("operator", move || match (input.warmth.is_warm(), idle) {
        (true, _) => warmth::watch_pool(&input, &operator),
        (false, true) => await_hang_up(&input, &operator),
        (false, false) => {
            forward_input(&input, operator);
            // Another may have taken it over meanwhile.
            if input.warmth.spec().tied {
                hung_up(&input);
            }
        }
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

fn accept(shared: &Shared, services: &Pending, stream: UnixStream, alive: &Arc<AtomicUsize>) {
    if alive.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
        alive.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    let (shared, services, alive) = (shared.clone(), services.clone(), alive.clone());
    let counter = alive.clone();
    let started = thread("client", move || {
        answer(&shared, &services, stream);
        alive.fetch_sub(1, Ordering::Relaxed);
    });
    if started.is_err() {
        counter.fetch_sub(1, Ordering::Relaxed);
    }
}

fn answer(shared: &Shared, services: &Pending, stream: UnixStream) {
    let bounded = |limit| {
        stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit)).is_ok()
    };
    if !bounded(Some(CLIENT_MAX)) {
        return;
    }
    let request = FrameReader::of_operator(&stream).expect::<ControlRequest>(Kind::Request);
    let Ok(request) = request else { return };
    let reply = |reply: &ControlReply| {
        // A client that is gone needs no answer.
        let _ = FrameWriter::new(&stream).write_json(Kind::Reply, reply);
    };
    let outcome = |result: Result<(), String>| match result {
        Ok(()) => ControlReply::Done,
        Err(message) => ControlReply::Failed { message },
    };
    match (&request, services.get()) {
        (ControlRequest::Attach { replay }, _) if !shared.warmth.is_warm() => {
            if bounded(None) {
                attach(shared, &stream, *replay);
            }
        }
        (ControlRequest::Watch, _) => {
            reply(&ControlReply::Done);
            if bounded(None) {
                shared.health.attach(&stream);
            }
        }
        (ControlRequest::Stop { signal, grace_ms }, None) => {
            reply(&outcome(stop(shared, *signal, Duration::from_millis(*grace_ms))));
        }
        (ControlRequest::Signal { signal }, None) if !shared.warmth.is_warm() => {
            reply(&outcome(send_signal(shared, *signal)));
        }
        (_, None) => reply(&outcome(Err("the cell is still starting; try again".to_owned()))),
        (_, Some(services)) => {
            serve_one(shared, &**services, &stream, request).iter().for_each(reply);
        }
    }
}

/// Does what a cell that is up is asked for; the answer, where it was not given on
/// the way.
fn serve_one(
    shared: &Shared,
    services: &dyn Services,
    stream: &UnixStream,
    request: ControlRequest,
) -> Option<ControlReply> {
    if shared.warmth.is_warm() && !warmth::is_for_warm(&request) {
        let message = "the cell waits in a pool for its program".to_owned();
        return Some(ControlReply::Failed { message });
    }
    let record = &shared.record;
    let done = match request {
        ControlRequest::Connect => {
            return connect(services, record, stream)
                .err()
                .map(|message| ControlReply::Failed { message });
        }
        ControlRequest::Contain(wanted) => {
            return contained::serve(record, &shared.contained, services, stream, wanted)
                .err()
                .map(|message| ControlReply::Failed { message });
        }
        ControlRequest::Counters => return Some(ControlReply::Counters(services.counters())),
        ControlRequest::Memory { limit_bytes } => {
            let changed = services.change_memory(limit_bytes);
            let noted = changed.and_then(|applied| {
                note(shared, |changes| changes.memory_bytes = Some(limit_bytes))?;
                Ok(applied)
            });
            return Some(match noted {
                Ok(applied) => ControlReply::Memory { applied },
                Err(message) => ControlReply::Failed { message },
            });
        }
        ControlRequest::Take(order) => match take(shared, stream, *order) {
            Ok(()) => return None,
            Err(message) => Err(message),
        },
        // Answered before.
        ControlRequest::Attach { .. } | ControlRequest::Watch => return None,
        ControlRequest::Signal { signal } => {
            wake(services, shared).and_then(|()| send_signal(shared, signal))
        }
        // One that stays where it is has no use for the grace, but it ends.
        ControlRequest::Stop { signal, grace_ms } => {
            wake(services, shared).and(stop(shared, signal, Duration::from_millis(grace_ms)))
        }
        ControlRequest::Revoke { capability } => {
            services.revoke(&capability).and_then(|()| note_revoked(shared, capability))
        }
        ControlRequest::Network { allow, deny } => services
            .change_network(&allow, &deny)
            .and_then(|rules| note(shared, |changes| changes.connect = Some(rules))),
        ControlRequest::Join { own, addresses, address } => receive_descriptor(stream)
            .map_err(|error| format!("no connection to the network came: {error}"))
            .and_then(|socket| awake(record).map(|()| socket))
            .map(|socket| own.linked(Port::new(socket, &own.network, addresses, address)))
            .and_then(|port| services.join(port))
            .and_then(|()| note_networks(shared, own.network.clone(), Some(own))),
        ControlRequest::Plug { setup } => receive_descriptor(stream)
            .map_err(|error| format!("no device came: {error}"))
            .and_then(|device| awake(record).map(|()| device))
            .and_then(|device| services.plug(&setup, device)),
        ControlRequest::Leave { network } => awake(record)
            .and_then(|()| services.leave(&network))
            .and_then(|()| note_networks(shared, network, None)),
        ControlRequest::Networks => {
            return Some(ControlReply::Networks { lost: services.lost_networks() });
        }
        ControlRequest::Forget { id } => awake(record).and_then(|()| services.forget(&id)),
        ControlRequest::Pause { pause: true } => hold(services, shared),
        ControlRequest::Pause { pause: false } => let_go_on(services, shared),
        ControlRequest::Rename { name } => CellSpec::check_name(&name)
            .map_err(|error| error.to_string())
            .and_then(|()| shared.warmth.rewrite(record, |spec| spec.name = name)),
        ControlRequest::Restart { policy } => {
            shared.warmth.rewrite(record, |spec| spec.restart = policy)
        }
        ControlRequest::Settle { labels } => shared.warmth.rewrite(record, |spec| {
            (spec.tied, spec.labels) = (false, labels);
        }),
        ControlRequest::Limit(limits) => limit(shared, services, &limits),
        ControlRequest::Reserve { from, to } => warmth::reserve(shared, &from, to),
    };
    Some(match done {
        Ok(()) => ControlReply::Done,
        Err(message) => ControlReply::Failed { message },
    })
}

/// Writes down what was changed, for whoever looks and for the cell's next start.
fn note(shared: &Shared, change: impl FnOnce(&mut Changes)) -> Result<(), String> {
    let noted = shared.warmth.rewrite(&shared.record, |spec| change(&mut spec.changes));
    noted.map_err(|error| format!("it is changed, but that cannot be written down: {error}"))
}

/// Has the workload keep to `limits`, from now on and at its next start.
fn limit(shared: &Shared, services: &dyn Services, limits: &Limits) -> Result<(), String> {
    awake(&shared.record)?;
    let mut spec = shared.warmth.spec();
    limits.check_running(&spec).map_err(|error| error.to_string())?;
    // What could not be written down is not begun.
    limits.apply(&mut spec).map_err(|error| error.to_string())?;
    services.limit(limits)?;
    let noted = shared.warmth.rewrite(&shared.record, |own| {
        own.settings = spec.settings;
        own.within = spec.within;
        own.capabilities = spec.capabilities;
        own.changes.memory_bytes = spec.changes.memory_bytes;
    });
    noted.map_err(|error| format!("it is changed, but that cannot be written down: {error}"))
}

/// Writes down what was revoked.
fn note_revoked(shared: &Shared, capability: String) -> Result<(), String> {
    if capability == CapabilityKind::Network.name() {
        shared.warmth.rewrite(&shared.record, |spec| spec.networks.clear())?;
    }
    note(shared, |changes| changes.revoked.push(capability))
}

/// Writes down that the cell is in `network` as `now` says, or is not.
fn note_networks(shared: &Shared, network: String, now: Option<Attachment>) -> Result<(), String> {
    shared.warmth.rewrite(&shared.record, |spec| {
        spec.networks.retain(|own| own.network != network);
        spec.networks.extend(now);
        let join = spec.networks.iter().map(|own| own.network.clone()).collect();
        spec.changes.join = Some(join);
    })
}

/// Hands a stream to the guest's agent over.
fn connect(services: &dyn Services, record: &Record, stream: &UnixStream) -> Result<(), String> {
    let guest = awake(record).and_then(|()| services.connect())?;
    // A client that is gone needs none.
    if FrameWriter::new(stream).write_json(Kind::Reply, &ControlReply::Stream).is_ok() {
        let _ = send_descriptor(stream, &guest);
    }
    Ok(())
}

/// Gives a warm cell to the client, and follows what it has to say.
fn take(shared: &Shared, stream: &UnixStream, order: Order) -> Result<(), String> {
    let endless = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(None));
    endless.map_err(|error| format!("cannot follow its operator: {error}"))?;
    forward_input(shared, warmth::take(shared, stream, order)?);
    Ok(())
}

fn stop(shared: &Shared, signal: u8, grace: Duration) -> Result<(), String> {
    shared.events.send(Event::Stop { signal, grace }).map_err(|_| "the cell is ending".to_owned())
}

fn send_signal(shared: &Shared, number: u8) -> Result<(), String> {
    let not = |why: String| {
        format!(
            "signal {number} was not delivered: {why}; exocell stop and kill end the cell without its agent"
        )
    };
    if !shared.input.opens_within(PROGRAM_MAX) {
        let limit = PROGRAM_MAX.as_secs();
        return Err(not(format!("the program did not start within {limit} s")));
    }
    match shared.input.signal(number) {
        true => Ok(()),
        false => Err(not("the cell's agent did not answer in time".to_owned())),
    }
}

/// Whoever makes the mark pauses the cell: it is made first and removed last.
fn hold(services: &dyn Services, shared: &Shared) -> Result<(), String> {
    let mark = shared.record.path(Record::PAUSED);
    private::options().write(true).create_new(true).open(&mark).map_err(|error| {
        match error.kind() {
            ErrorKind::AlreadyExists => "the cell is already paused".to_owned(),
            _ => format!("cannot mark the cell as paused: {error}"),
        }
    })?;
    shared.health.pause(true);
    services.pause(true).inspect_err(|_| {
        shared.health.pause(false);
        // The first error is the one to tell.
        let _ = fs::remove_file(&mark);
    })?;
    shared.record.tell(Action::Pause);
    Ok(())
}

fn let_go_on(services: &dyn Services, shared: &Shared) -> Result<(), String> {
    if !shared.record.is_paused() {
        return Err("the cell is not paused".to_owned());
    }
    wake(services, shared)
}

/// Lets a paused cell go on; what is asked of its program is then heard.
fn wake(services: &dyn Services, shared: &Shared) -> Result<(), String> {
    if !shared.record.is_paused() {
        return Ok(());
    }
    services.pause(false)?;
    shared.health.pause(false);
    match fs::remove_file(shared.record.path(Record::PAUSED)) {
        // Another client was faster.
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(format!("cannot take the mark of a paused cell away: {error}"))
        }
        Ok(()) => {
            shared.record.tell(Action::Unpause);
            Ok(())
        }
        Err(_) => Ok(()),
    }
}

/// The guest of a paused cell answers nobody.
pub(super) fn awake(record: &Record) -> Result<(), String> {
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
    hung_up(shared);
}

fn hung_up(shared: &Shared) {
    // One that is ending needs no word.
    let _ = shared.events.send(Event::Stop { signal: libc::SIGKILL as u8, grace: Duration::ZERO });
}

/// Passes a follower's frames on until it goes.
fn forward_input(shared: &Shared, source: UnixStream) {
    shared.input.wait_open();
    let mut frames = FrameReader::new(source);
    while let Ok(Some(frame)) = frames.read() {
        shared.input.feed(&frame);
    }
}
