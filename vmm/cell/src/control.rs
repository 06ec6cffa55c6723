//! The control socket: how an operator's command reaches a supervisor.
//!
//! A client connects to `control.sock` and sends one `Request` frame with a
//! [`ControlRequest`]; the supervisor answers with one `Reply` frame, a
//! [`ControlReply`]. After `Attach` the connection goes on as an exec session
//! of the cell's own program does (see [`exocell_agent`]). `Connect` passes a
//! stream into the guest as a descriptor, so sessions do not run through the
//! supervisor.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use exocell_agent::{Exec, FrameReader, FrameWriter, Kind};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg};
use serde::{Deserialize, Serialize};

use crate::{CellError, CellSpec, Record};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    /// Follow the cell's own program: output, input, its end. First comes what
    /// the log holds, if `replay` asks for it.
    Attach {
        replay: bool,
    },
    /// A stream to the guest's agent.
    Connect,
    /// Send a signal to the cell's own program.
    Signal {
        signal: u8,
    },
    /// SIGTERM, then after `grace_ms` the end of the cell.
    Stop {
        grace_ms: u64,
    },
    /// End the capability named `capability` (as `caps explain` prints it)
    /// and all derived from it.
    Revoke {
        capability: String,
    },
    /// Add and remove rules of the network, written as in a table.
    Network {
        allow: Vec<String>,
        deny: Vec<String>,
    },
    /// Stop the guest where it is, or let it go on. A paused cell refuses
    /// `Connect`; `Signal` and `Stop` let it go on first.
    Pause {
        pause: bool,
    },
    /// Call the cell `name`; the asker has seen to it that the name is free.
    Rename {
        name: String,
    },
    /// Change how much memory the guest may use.
    Memory {
        limit_bytes: u64,
    },
    Counters,
    /// Keep a warm cell whose key is `from` for who knows the key `to`.
    Reserve {
        from: String,
        to: String,
    },
    /// Make a warm cell one of the asker's, and run a program in it. The
    /// connection goes on as the program's session, the asker its operator.
    Take(Box<Order>),
}

/// What a warm cell becomes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// With the cell's own id; the asker has seen to it that the name is free.
    pub spec: CellSpec,
    pub exec: Exec,
    /// How long it may live from now on.
    pub deadline_ms: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlReply {
    Done,
    /// The descriptor comes with the next byte.
    Stream,
    /// Whether the guest keeps to the new limit by now, or is still on its way.
    Memory {
        applied: bool,
    },
    Counters(Counters),
    Failed {
        message: String,
    },
}

/// What the supervisor itself counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Host memory behind the guest's, in bytes.
    pub memory_allocated_bytes: u64,
    pub memory_limit_bytes: u64,
    /// What the guest may take without asking again, with what it has; 0 where it has
    /// no credit (`--pager credit`).
    #[serde(default)]
    pub memory_credit_bytes: u64,
    /// Of that, what it can have whatever other cells do.
    #[serde(default)]
    pub memory_guarantee_bytes: u64,
    pub block_read_bytes: u64,
    pub block_written_bytes: u64,
    pub disk_allocated_bytes: u64,
}

/// A connection to a supervisor, before its request.
pub struct Client {
    stream: UnixStream,
}

impl Client {
    pub fn connect(record: &Record) -> Result<Self, CellError> {
        let path = record.path("control.sock");
        // A socket's path is at most 107 bytes; through the directory's
        // descriptor it always fits.
        let directory = std::fs::File::open(record.directory())
            .map_err(CellError::host(format!("cannot open {}", record.directory().display())))?;
        let short = format!("/proc/self/fd/{}/control.sock", directory.as_raw_fd());
        let stream = UnixStream::connect(short).map_err(CellError::host(format!(
            "cannot reach the supervisor at {}",
            path.display()
        )))?;
        Ok(Self { stream })
    }

    /// Sends `request` and returns the answer.
    pub fn ask(&self, request: &ControlRequest) -> Result<ControlReply, CellError> {
        let failed = |error| CellError::Guest(format!("the supervisor does not answer: {error}"));
        FrameWriter::new(&self.stream).write_json(Kind::Request, request).map_err(failed)?;
        match FrameReader::new(&self.stream).expect(Kind::Reply).map_err(failed)? {
            ControlReply::Failed { message } => Err(CellError::Usage(message)),
            reply => Ok(reply),
        }
    }

    /// A stream to the guest's agent, for one session.
    pub fn guest_stream(self) -> Result<UnixStream, CellError> {
        self.ask(&ControlRequest::Connect)?;
        receive_descriptor(&self.stream)
            .map(UnixStream::from)
            .map_err(CellError::host("cannot receive a stream into the guest"))
    }

    /// The connection itself, for what follows an `Attach`.
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }
}

/// Sends `descriptor` along with one byte.
pub(crate) fn send_descriptor(stream: &UnixStream, descriptor: &impl AsFd) -> io::Result<()> {
    let descriptors = [descriptor.as_fd().as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let byte = [IoSlice::new(&[0])];
    sendmsg::<UnixAddr>(stream.as_raw_fd(), &byte, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

fn receive_descriptor(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut data = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<UnixAddr>(stream.as_raw_fd(), &mut data, Some(&mut space), flags)?;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = control
            && let Some(descriptor) = descriptors.first()
        {
            // SAFETY: the kernel just installed this descriptor for us, and
            // nothing else owns it.
            return Ok(unsafe { OwnedFd::from_raw_fd(*descriptor) });
        }
    }
    Err(io::Error::other("no descriptor came"))
}
