//! A program in a guest, from its start to its end, as its supervisor follows it.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use exocell_agent::client::{self, ClientError, ExecEvent, ExecOutput};
use exocell_agent::{FailureKind, FrameError, Kind, Patient, Reply, Start};

use super::input::{Signal, Sink};
use super::{Event, Shared, thread};
use crate::CellError;

/// How long a guest may take to start the program.
const PROGRAM_MAX: Duration = Duration::from_secs(60);
/// How long it may take to pass a signal on.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Opens a stream to the agent, within the program's container.
pub(crate) type Agent = Arc<dyn Fn() -> io::Result<UnixStream> + Send + Sync>;

/// What is to run.
pub(crate) struct Program {
    pub agent: Agent,
    pub start: Box<Start>,
    /// Whether anyone hears what it writes.
    pub stdio: bool,
    pub requested: Instant,
}

impl Program {
    /// Starts it, and a thread that follows it.
    pub fn run(self, shared: &Shared) -> Result<(), CellError> {
        let shared = shared.clone();
        let follower = thread("program", move || {
            let reply = self.follow(&shared);
            let _ = shared.events.send(Event::Program(reply));
        });
        follower.map(drop)
    }

    /// Runs it to its end and says how that was.
    fn follow(&self, shared: &Shared) -> Reply {
        let failed = |error: &ClientError| Reply::Failed {
            kind: match error {
                ClientError::Failed { kind, .. } => *kind,
                _ => FailureKind::Guest,
            },
            message: error.to_string(),
        };
        // A guest that does not start the program must not hold the cell for ever.
        let (guest_pid, stream, sink) = match self.begin() {
            Ok(begun) => begun,
            Err(error) => return failed(&error),
        };
        let program_started_us = self.requested.elapsed().as_micros() as u64;
        let _ = shared.events.send(Event::Started { program_started_us });
        shared.output.started(guest_pid);
        shared.input.open(Sink::Session(sink), signal_of(self.agent.clone(), guest_pid));
        let mut output = ExecOutput::new(stream);
        loop {
            match output.event() {
                Ok(ExecEvent::Stdout(_) | ExecEvent::Stderr(_)) if !self.stdio => {}
                Ok(ExecEvent::Stdout(bytes)) => shared.output.write(Kind::Stdout, &bytes),
                Ok(ExecEvent::Stderr(bytes)) => shared.output.write(Kind::Stderr, &bytes),
                Ok(ExecEvent::Exited(code)) => {
                    return Reply::Exited { code, out_of_memory: output.is_out_of_memory() };
                }
                Err(error) => return failed(&error),
            }
        }
    }

    /// Starts it; its pid in the guest, and both ends of its session.
    fn begin(&self) -> Result<(u32, UnixStream, UnixStream), ClientError> {
        let local = |error| ClientError::from(FrameError::from(error));
        let stream = connect(&self.agent, PROGRAM_MAX).map_err(local)?;
        let guest_pid = client::start(&stream, &stream, &self.start)?.guest_pid;
        let stream = stream.into_endless().map_err(local)?;
        let sink = stream.try_clone().map_err(local)?;
        Ok((guest_pid, stream, sink))
    }
}

/// A stream to the agent, which has `limit` to answer.
fn connect(agent: &Agent, limit: Duration) -> io::Result<Patient> {
    agent().map(|stream| Patient::new(stream, limit))
}

/// Signals the program on a stream of their own, so that input which it does
/// not read cannot hold them up.
fn signal_of(agent: Agent, guest_pid: u32) -> Signal {
    Arc::new(move |number| {
        let Ok(stream) = connect(&agent, ANSWER_MAX) else { return false };
        // A program that is gone takes none; its end is told elsewhere.
        !matches!(
            client::signal(&stream, &stream, guest_pid, number),
            Err(ClientError::Frame(FrameError::NoAnswer(_)))
        )
    })
}
