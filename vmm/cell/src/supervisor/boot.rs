//! A guest that comes up: its hello, its boot request, its answer; or why there is none.
//!
//! ```text
//! kernel started ──> init says hello ──> Boot ──> (at work on it ──>)* Ready
//!       └── ended, stopped, too late, refused: the end of the cell, with its reason
//! ```
//! The talking is done on a thread of its own, so that whoever wants to end the cell
//! meanwhile can.

use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use exocell_agent::client::{self, ClientError};
use exocell_agent::{Boot, BootTimes, Patient};

use super::guest::Guest;
use super::warmth::Warmth;
use super::{End, Event, thread};
use crate::CellError;

/// How long a guest may take from its first instruction to its readiness, and to say that it is
/// still at work on that.
const READY_MAX: Duration = Duration::from_secs(60);
/// How long it may take, however often it says so: volumes that get what the image holds may be
/// long.
const WORK_MAX: Duration = Duration::from_secs(30 * 60);
/// How long the death of a guest kernel is waited for whose init has fallen silent.
const DEATH_MAX: Duration = Duration::from_millis(500);

/// Why a guest is not ready.
pub(crate) enum Unready {
    /// Its init's own word. It ends the guest then, in order: that end says nothing more.
    Refused(String),
    /// It fell silent, or nothing that it says can be understood.
    Lost(String),
}

impl From<ClientError> for Unready {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Failed { message, .. } => Self::Refused(message),
            error => Self::Lost(error.to_string()),
        }
    }
}

/// Boots the guest, whose init connects to `hellos`, as `request` says.
pub(super) fn begin(
    hellos: Receiver<UnixStream>,
    request: Boot,
    events: Sender<Event>,
    deadline: Option<Instant>,
) -> Result<(), CellError> {
    let booting = thread("boot", move || {
        let booted = match hellos.recv_timeout(patience(deadline)) {
            Ok(stream) => {
                let stream = Patient::new(stream, patience(deadline));
                let goes_on = || {
                    stream.wait_anew();
                    let _ = events.send(Event::Booting);
                };
                client::boot(&stream, &stream, &request, goes_on).map_err(Unready::from)
            }
            Err(_) => Err(Unready::Lost("its init did not say that it runs".to_owned())),
        };
        let _ = events.send(Event::Booted(booted));
    });
    booting.map(drop)
}

/// How long to wait for a guest that comes up.
fn patience(deadline: Option<Instant>) -> Duration {
    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
    left.map_or(READY_MAX, |left| left.min(READY_MAX))
}

/// Waits until the guest is ready; the cell's end when something else comes first.
pub(super) fn await_ready(
    inbox: &Receiver<Event>,
    warmth: &Warmth,
    guest: &Guest,
    deadline: Option<Instant>,
) -> Result<BootTimes, Box<End>> {
    let begun = Instant::now();
    let mut until = begun + patience(deadline);
    let killed = |why: &str| Box::new(End::killed(why.to_owned()));
    let late = || match deadline.is_some_and(|at| at <= Instant::now()) {
        true => End::failed(&CellError::Deadline),
        false => not_ready(guest, &format!("it said nothing for {} s", begun.elapsed().as_secs())),
    };
    loop {
        match inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Event::Booted(Ok(times))) => {
                guest.is_ready_now();
                return Ok(times);
            }
            Ok(Event::Booting) => {
                until = (Instant::now() + patience(deadline)).min(begun + WORK_MAX)
            }
            Ok(Event::GuestKernel(how)) => {
                // Its init's word may lie behind the news of its end.
                return Err(Box::new(match refusal(inbox) {
                    Some(why) => refused(why),
                    None => died(guest, &how),
                }));
            }
            Ok(Event::Booted(Err(Unready::Refused(why)))) => return Err(Box::new(refused(why))),
            Ok(Event::Booted(Err(Unready::Lost(why)))) => {
                // The first sign of a dying guest is its silence.
                return Err(Box::new(match inbox.recv_timeout(DEATH_MAX) {
                    Ok(Event::GuestKernel(how)) => died(guest, &how),
                    _ if Instant::now() >= until => late(),
                    _ => not_ready(guest, &why),
                }));
            }
            Ok(Event::Stop { .. }) => return Err(killed("stopped before it was ready")),
            Ok(Event::Abandoned) if warmth.close() => return Err(killed("its pool is gone")),
            Ok(Event::Panicked(what)) => return Err(Box::new(End::panicked(&what))),
            Ok(
                Event::Abandoned
                | Event::Taken(_)
                | Event::Started { .. }
                | Event::Program(_)
                | Event::CellEnded(_),
            ) => {}
            Err(RecvTimeoutError::Timeout) => return Err(Box::new(late())),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(killed("the supervisor lost its threads"));
            }
        }
    }
}

/// What init refused with, of a guest kernel that has ended: both are on their way at once.
fn refusal(inbox: &Receiver<Event>) -> Option<String> {
    let until = Instant::now() + DEATH_MAX;
    loop {
        match inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Event::Booted(Err(Unready::Refused(why)))) => return Some(why),
            Ok(Event::Booted(_)) | Err(_) => return None,
            Ok(_) => {}
        }
    }
}

/// The console says nothing of it that the message does not.
fn refused(why: String) -> End {
    End::failed(&CellError::Guest(format!("its init did not set the cell up: {why}")))
}

fn died(guest: &Guest, how: &str) -> End {
    guest.console.settle();
    not_ready(guest, &format!("its kernel did not boot: it {how} before it was ready"))
}

fn not_ready(guest: &Guest, why: &str) -> End {
    let tail = guest.console.tail();
    End::failed(&CellError::Guest(match tail.is_empty() {
        true => why.to_owned(),
        false => format!("{why}: {tail}"),
    }))
}
