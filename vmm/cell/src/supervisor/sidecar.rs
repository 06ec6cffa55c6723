//! The supervisor of a container in another cell's guest: it has a record, a log and clients as any,
//! and instead of a guest a line to the supervisor that has one.
//!
//! ```text
//! this supervisor ── Contain, the image ──> the other cell's: the container is there
//!     │ ──────────── Connect ─────────────> a stream to its agent, for each request
//!     └── either end hangs up: this cell has ended, and the container is taken away
//! ```

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Shutdown};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use exocell_agent::{FrameReader, FrameWriter, Kind, Patient, Start, client};
use exocell_network::switch::Port;
use exocell_vmm::jail::{self, JailRoot, ThreadClass};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::clients::Services;
use super::contained::Contained;
use super::program::Program;
use super::{Event, Shared, fault, restrict_paths, thread};
use crate::CellError;
use crate::control::{Contain, ControlReply, ControlRequest, Counters};
use crate::descriptors::receive_descriptor;
use crate::launch::Inheritance;
use crate::limits::Limits;
use crate::plan::sidecar::SidecarPlan;
use crate::record::Status;

/// How long the other supervisor may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How long to wait until the container is taken away.
const END_MAX: Duration = Duration::from_secs(12);

/// A container that is there.
pub(crate) struct Sidecar {
    line: Arc<Line>,
    start: Box<Start>,
    stdio: bool,
    requested: Instant,
}

/// What clients can reach of it.
struct Line {
    /// The other cell's name.
    other: String,
    /// To its supervisor; one asks at a time.
    stream: Mutex<UnixStream>,
    memory_limit_bytes: u64,
}

/// Enters the jail, and has the container made. The caller has one thread.
pub(super) fn start(
    inheritance: &Inheritance,
    plan: SidecarPlan,
    shared: &Shared,
    status: &mut Status,
) -> Result<Sidecar, CellError> {
    let SidecarPlan { other, client, image, wanted, start, stdio, .. } = plan;
    JailRoot::new(inheritance.record.directory())?.seal()?;
    nix::unistd::fchdir(&inheritance.record_dir)
        .map_err(|errno| CellError::host("cannot enter the record")(errno.into()))?;
    restrict_paths(inheritance, &[])?;
    jail::forgo_capabilities();
    jail::keep_capabilities(&[]).map_err(CellError::host("cannot give up capabilities"))?;
    status.times.jailed_us = inheritance.requested.elapsed().as_micros() as u64;
    jail::restrict_calls(ThreadClass::Control)?;
    fault::note()?;
    client.pass(&ControlRequest::Contain(wanted), image.files())?;
    drop(image);
    let stream = client.into_stream();
    watch(stream.try_clone().map_err(CellError::host("dup"))?, other.clone(), shared)?;
    let memory_limit_bytes = inheritance.caps.memory_bytes().unwrap_or(0);
    let line = Arc::new(Line { other, stream: Mutex::new(stream), memory_limit_bytes });
    let requested = inheritance.requested;
    Ok(Sidecar { line, start: Box::new(start), stdio, requested })
}

/// Waits for the end of the other cell, or of its supervisor.
fn watch(stream: UnixStream, other: String, shared: &Shared) -> Result<(), CellError> {
    let events = shared.events.clone();
    let watching = thread("other-cell", move || {
        // A hang-up is told of whatever is waited for (poll(2)).
        let mut watched = [PollFd::new(stream.as_fd(), PollFlags::empty())];
        while let Ok(0) | Err(nix::errno::Errno::EINTR) = poll(&mut watched, PollTimeout::NONE) {}
        let _ = events.send(Event::CellEnded(other));
    });
    watching.map(drop)
}

impl Line {
    /// A stream to the agent, within the container. A supervisor that does not answer is given up,
    /// and with it the container.
    fn open(&self) -> Result<UnixStream, String> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = |error: &dyn std::fmt::Display| {
            let _ = stream.shutdown(Shutdown::Both);
            format!("the cell {}, in which it is, does not answer: {error}", self.other)
        };
        let ask = || -> Result<ControlReply, exocell_agent::FrameError> {
            stream.set_read_timeout(Some(ANSWER_MAX))?;
            stream.set_write_timeout(Some(ANSWER_MAX))?;
            FrameWriter::new(&*stream).write_json(Kind::Request, &ControlRequest::Connect)?;
            FrameReader::new(&*stream).expect(Kind::Reply)
        };
        match ask().map_err(|error| lost(&error))? {
            ControlReply::Stream => {
                receive_descriptor(&stream).map(UnixStream::from).map_err(|error| lost(&error))
            }
            ControlReply::Failed { message } => Err(message),
            _ => Err(lost(&"it broke the protocol")),
        }
    }

    fn refuse<T>(&self, what: &str) -> Result<T, String> {
        Err(format!("{what} {}, in which the container is; ask for that one", self.other))
    }
}

impl Services for Line {
    fn contain(&self, _: Contain, _: Vec<OwnedFd>) -> Result<Contained, String> {
        self.refuse("its guest is that of the cell")
    }

    fn forget(&self, _: &str) -> Result<(), String> {
        self.refuse("its guest is that of the cell")
    }

    fn connect(&self) -> Result<UnixStream, String> {
        self.open()
    }

    fn revoke(&self, _: &str) -> Result<(), String> {
        self.refuse("what can be revoked was given to the cell")
    }

    fn change_network(&self, _: &[String], _: &[String]) -> Result<Vec<String>, String> {
        self.refuse("the network is that of the cell")
    }

    fn join(&self, _: Port) -> Result<(), String> {
        self.refuse("the network is that of the cell")
    }

    fn leave(&self, _: &str) -> Result<(), String> {
        self.refuse("the network is that of the cell")
    }

    fn lost_networks(&self) -> BTreeMap<String, Ipv4Addr> {
        BTreeMap::new()
    }

    fn pause(&self, _: bool) -> Result<(), String> {
        self.refuse("only a whole guest can be paused: that of the cell")
    }

    fn change_memory(&self, _: u64) -> Result<bool, String> {
        self.refuse("the memory is that of the cell")
    }

    fn limit(&self, limits: &Limits) -> Result<(), String> {
        let stream = Patient::new(self.open()?, ANSWER_MAX);
        let limited = client::limit(&stream, &stream, &limits.resources(true));
        limited.map_err(|error| error.to_string())
    }

    fn counters(&self) -> Counters {
        Counters { memory_limit_bytes: self.memory_limit_bytes, ..Counters::default() }
    }
}

impl Sidecar {
    pub fn services(&self) -> Arc<dyn Services> {
        self.line.clone()
    }

    /// Starts the program and a thread that follows it.
    pub fn run_program(&self, shared: &Shared) -> Result<(), CellError> {
        let line = self.line.clone();
        let program = Program {
            agent: Arc::new(move || line.open().map_err(io::Error::other)),
            start: self.start.clone(),
            stdio: self.stdio,
            requested: self.requested,
        };
        program.run(shared)
    }

    /// Has the container taken away; returns when it is.
    pub fn end(&self) {
        // Behind a client that waits for an answer, which has a bounded time.
        let stream = self.line.stream.lock().unwrap_or_else(PoisonError::into_inner).try_clone();
        let Ok(stream) = stream else { return };
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.set_read_timeout(Some(END_MAX));
        let _ = io::Read::read(&mut &stream, &mut [0]);
    }
}
