//! The control socket: how an operator's command reaches a supervisor.
//!
//! A client connects to `control.sock` and sends one `Request` frame with a
//! [`ControlRequest`]; the supervisor answers with one `Reply` frame, a
//! [`ControlReply`]. After `Attach` the connection goes on as an exec session
//! of the cell's own program does (see [`exocell_agent`]). `Connect` passes a
//! stream into the guest as a descriptor, so sessions do not run through the
//! supervisor.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use exocell_agent::{ANSWER_MAX, FrameError, FrameReader, FrameWriter, Kind, Patient, Start};
use exocell_network::switch::Addresses;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use serde::{Deserialize, Serialize};

use crate::descriptors::{receive_descriptor, send_descriptor};
use crate::health::{Check, News};
use crate::limits::Limits;
use crate::networks::Attachment;
use crate::policy::Policy;
use crate::{CellError, CellSpec, Record};

/// How long a supervisor may take for what it does by itself.
const SUPERVISOR_MAX: Duration = Duration::from_secs(10);
/// How long for what it has to ask the guest for, each part of which is bounded there.
const THROUGH_GUEST_MAX: Duration = Duration::from_secs(25);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    /// Follow the cell's own program: output, input, its end. First comes what
    /// the log holds, if `replay` asks for it.
    Attach {
        replay: bool,
    },
    /// Hear of the cell's health checks: `Health` replies, until the client hangs up.
    Watch,
    /// A stream to the guest's agent.
    Connect,
    /// Send a signal to the cell's own program.
    Signal {
        signal: u8,
    },
    /// `signal` to the program, then after `grace_ms` the end of the cell.
    Stop {
        #[serde(default = "sigterm")]
        signal: u8,
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
    /// Be in a network between cells as `address`, by the connection to its switch that comes with
    /// the next byte. `own` is what the spec notes of it.
    Join {
        own: Attachment,
        addresses: Addresses,
        address: Ipv4Addr,
    },
    /// Have the network device lead to the tun device that comes as a descriptor with the next byte,
    /// and the guest be there as `setup` says.
    Plug {
        setup: Box<exocell_agent::NetworkSetup>,
    },
    /// Be in it no more.
    Leave {
        network: String,
    },
    /// Which networks it should be in and is not, for their switch has ended.
    Networks,
    /// Have one more container in the guest, whose image comes as descriptors with the next bytes,
    /// one each, unless it is in the depot.
    /// After `Done` the connection is the container's: it takes `Connect`, for streams within it,
    /// and the container ends with it.
    Contain(Contain),
    /// Remove what the container of cell `id` has kept in the guest.
    Forget {
        id: String,
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
    /// Start again as `policy` says after the next end; the asker has seen to it that this can be.
    Restart {
        policy: Policy,
    },
    /// Outlive the operator of a cell that was tied to it, with these notes of the next one.
    Settle {
        labels: BTreeMap<String, String>,
    },
    /// Change how much memory the guest may use.
    Memory {
        limit_bytes: u64,
    },
    /// Keep to other limits, now and at the next start.
    Limit(Limits),
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

/// A container in another cell's guest, as its supervisor asks for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contain {
    /// The id of the cell that it is.
    pub id: String,
    pub hostname: String,
    pub domain_name: String,
    pub read_only: bool,
    /// Whether it may start again, and find what it has changed.
    pub keeps_files: bool,
    /// Files of the image, the lowest first.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub files: usize,
    /// Instead of an image: the directory of the cell's depot that has its root and its mounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depot: Option<String>,
    /// The id of another container of the depot, whose program runs: it has the IPC and the host
    /// name of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares_with: Option<String>,
    /// Whether their programs see each other, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares_pids: bool,
}

fn one() -> usize {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference over")]
fn is_one(count: &usize) -> bool {
    *count == 1
}

fn sigterm() -> u8 {
    libc::SIGTERM as u8
}

impl ControlRequest {
    /// How long the answer may take.
    fn limit(&self) -> Duration {
        match self {
            Self::Memory { .. }
            | Self::Limit(_)
            | Self::Revoke { .. }
            | Self::Signal { .. }
            | Self::Join { .. }
            | Self::Plug { .. }
            | Self::Contain(_)
            | Self::Forget { .. }
            | Self::Leave { .. } => THROUGH_GUEST_MAX,
            _ => SUPERVISOR_MAX,
        }
    }
}

/// What a warm cell becomes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// With the cell's own id; the asker has seen to it that the name is free.
    pub spec: CellSpec,
    pub start: Start,
    /// How its program is looked after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Check>,
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
    /// The networks whose switch has ended, and the cell's address in each.
    Networks {
        lost: BTreeMap<String, Ipv4Addr>,
    },
    /// To who watches.
    Health(News),
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
    /// All that each device counts, by the device's name and the counter's. Folders, which have
    /// processes of their own, are not among them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub devices: BTreeMap<String, BTreeMap<String, u64>>,
}

/// Whether a time has run out, and the other side is there still.
fn is_late(error: &FrameError) -> bool {
    match error {
        FrameError::NoAnswer(_) => true,
        FrameError::Io(error) => error.kind() == io::ErrorKind::WouldBlock,
        _ => false,
    }
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
        let stream = connect_within(&short, SUPERVISOR_MAX).map_err(CellError::host(format!(
            "cannot reach the supervisor at {}",
            path.display()
        )))?;
        Ok(Self { stream })
    }

    /// Sends `request` and returns the answer.
    ///
    /// # Errors
    /// The supervisor's refusal, or that it does not answer: it has a bounded time.
    pub fn ask(&self, request: &ControlRequest) -> Result<ControlReply, CellError> {
        self.ask_with(request, &[] as &[OwnedFd])
    }

    /// The same, and passes `descriptors` on with it.
    ///
    /// # Errors
    /// As those of [`Self::ask`].
    pub(crate) fn pass(
        &self,
        request: &ControlRequest,
        descriptors: &[impl AsFd],
    ) -> Result<(), CellError> {
        self.ask_with(request, descriptors).map(drop)
    }

    fn ask_with(
        &self,
        request: &ControlRequest,
        descriptors: &[impl AsFd],
    ) -> Result<ControlReply, CellError> {
        let limit = request.limit();
        let failed = |error: FrameError| {
            let what = match is_late(&error) {
                true => format!(
                    "the cell's supervisor did not answer within {} s; exocell rm -f ends its cell",
                    limit.as_secs()
                ),
                false => "the cell's supervisor ended before it answered".to_owned(),
            };
            CellError::Host { what, source: io::Error::other(error) }
        };
        let bounded = |time| {
            self.stream.set_read_timeout(time)?;
            self.stream.set_write_timeout(time)
        };
        bounded(Some(limit)).map_err(|error| failed(error.into()))?;
        FrameWriter::new(&self.stream).write_json(Kind::Request, request).map_err(failed)?;
        let passed = descriptors.iter().try_for_each(|one| send_descriptor(&self.stream, one));
        passed.map_err(|error| failed(error.into()))?;
        let reply = FrameReader::new(&self.stream).expect(Kind::Reply).map_err(failed)?;
        bounded(None).map_err(|error| failed(error.into()))?;
        match reply {
            ControlReply::Failed { message } => Err(CellError::Usage(message)),
            reply => Ok(reply),
        }
    }

    /// Plugs the cell's network device into the tun device `device`, as which the guest is `setup`.
    ///
    /// # Errors
    /// As those of [`Self::ask`].
    pub fn plug(
        &self,
        setup: exocell_agent::NetworkSetup,
        device: &OwnedFd,
    ) -> Result<(), CellError> {
        self.pass(&ControlRequest::Plug { setup: Box::new(setup) }, std::slice::from_ref(device))
    }

    /// A stream to the guest's agent, for one session. The guest has
    /// [`ANSWER_MAX`] to answer.
    pub fn guest_stream(self) -> Result<Patient, CellError> {
        self.ask(&ControlRequest::Connect)?;
        let bounded = self.stream.set_read_timeout(Some(SUPERVISOR_MAX));
        bounded
            .and_then(|()| receive_descriptor(&self.stream))
            .map(|stream| Patient::new(stream.into(), ANSWER_MAX))
            .map_err(CellError::host("cannot receive a stream into the guest"))
    }

    /// The connection itself, for what follows an `Attach`.
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }
}

/// Connects to a socket whose owner may accept nobody (unix(7): SO_SNDTIMEO bounds
/// connect(2) too).
fn connect_within(path: &str, limit: Duration) -> io::Result<UnixStream> {
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let seconds = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
    setsockopt(&socket, sockopt::SendTimeout, &TimeVal::new(seconds, 0))?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket.into())
}

/// Whether something that was written to `socket` has not been read: bytes, with what the host
/// counts beside them (unix(7), SIOCOUTQ).
///
/// # Errors
/// The host's.
pub fn unread(socket: &impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open for the length of the call, and the pointer is to a local
    // number, which the call writes. Needed because nix has no such ioctl.
    let done = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    nix::errno::Errno::result(done)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_that_ends_is_not_said_to_be_slow() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let client = Client { stream: ours };
        let error = client.ask(&ControlRequest::Stop { grace_ms: 0, signal: 15 }).unwrap_err();
        assert!(error.to_string().starts_with("the cell's supervisor ended"), "{error}");
    }
}
