//! A container in the guest of a cell with a depot, as the operator of that cell holds it.
//!
//! ```text
//! operator ── Contain ──> the cell's supervisor: the container is there
//!     │ ───── Connect ──> a stream to the agent within it, for each request
//!     └ hangs up: the container is taken away, and its files are whole on the host
//! ```
//! What is asked on such a stream is the agent's protocol ([`exocell_agent::client`]).

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use exocell_agent::{FrameReader, FrameWriter, Kind, Patient};

use crate::control::{Client, Contain, ControlReply, ControlRequest};
use crate::descriptors::receive_descriptor;
use crate::{CellError, Record};

/// How long the supervisor may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How long to wait until the container is taken away.
const END_MAX: Duration = Duration::from_secs(20);

/// A container that is there for as long as this is held.
pub struct Inside {
    /// One asks at a time.
    stream: Mutex<UnixStream>,
}

impl Inside {
    /// Has the guest of the cell `record` make room for `wanted`, which has a directory of the
    /// cell's depot. Returns when it is there.
    ///
    /// # Errors
    /// The cell has ended, or its guest refuses.
    pub fn begin(record: &Record, wanted: Contain) -> Result<Self, CellError> {
        let client = Client::connect(record)?;
        client.ask(&ControlRequest::Contain(wanted))?;
        Ok(Self { stream: Mutex::new(client.into_stream()) })
    }

    /// A stream to the agent within the container, for one request that may last.
    ///
    /// # Errors
    /// The cell has ended, or its supervisor does not answer.
    pub fn connect(&self) -> Result<UnixStream, CellError> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = |error: &dyn std::fmt::Display| {
            CellError::Guest(format!("its supervisor does not answer: {error}"))
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
            ControlReply::Failed { message } => Err(CellError::Guest(message)),
            _ => Err(lost(&"it broke the protocol")),
        }
    }

    /// The same, for a request that is answered within `limit`.
    ///
    /// # Errors
    /// As [`Self::connect`]'s.
    pub fn patient(&self, limit: Duration) -> Result<Patient, CellError> {
        Ok(Patient::new(self.connect()?, limit))
    }

    /// Has the container taken away; returns when it is, or the cell has ended.
    pub fn end(self) {
        let mut stream = self.stream.into_inner().unwrap_or_else(PoisonError::into_inner);
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.set_read_timeout(Some(END_MAX));
        // Nothing comes but the end.
        let _ = stream.read(&mut [0]);
    }
}
