//! Starting a container's cell. A supervisor is cloned from a process with one
//! thread, and a server has many; so each start is a short life of the same
//! executable:
//!
//! ```text
//! server ── exec: exocell launch-container ID|- ──> plan, launch ──> supervisor
//!   └───── stdin: [SPEC] the operator's session (a socket pair) ──┘
//! ```
//! A spec goes over the socket: a command line can be read by every user of the host.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use exocell_cell::agent::TtySize;
use exocell_cell::launch::{Request, Workload, launch_for};
use exocell_cell::{CellError, CellSpec, Layout, end, logging, restart};
use serde::{Deserialize, Serialize};

use crate::containers::Containers;
use crate::error::{ApiError, ApiResult};

/// The verb of the command that runs [`launch_container`].
pub const VERB: &str = "launch-container";

/// What a launcher says on its standard output when it fails.
#[derive(Debug, Serialize, Deserialize)]
struct Failure {
    status: u16,
    message: String,
}

/// What is to be started.
pub enum Start<'a> {
    /// A container, by its id.
    Container(&'a str),
    /// A cell of which nothing is written down.
    Cell(&'a CellSpec),
}

/// Stands for a spec that comes on standard input: its length, then as much JSON.
const SPEC: &str = "-";
/// The longest spec, in bytes.
const SPEC_BYTES_MAX: u32 = 16 << 20;

impl Start<'_> {
    fn word(&self) -> &str {
        match self {
            Self::Container(id) => id,
            Self::Cell(_) => SPEC,
        }
    }

    /// What is said on the launcher's standard input before the session begins.
    fn said(&self) -> ApiResult<Vec<u8>> {
        let Self::Cell(spec) = self else { return Ok(Vec::new()) };
        let text = serde_json::to_vec(spec)
            .map_err(|error| ApiError::internal(format!("cannot write a spec: {error}")))?;
        let length = u32::try_from(text.len()).ok().filter(|length| *length <= SPEC_BYTES_MAX);
        let length =
            length.ok_or_else(|| ApiError::bad_request("the container's spec is too long"))?;
        Ok([&length.to_le_bytes()[..], &text].concat())
    }
}

/// Starts a cell; the server's end of its session. Blocks.
pub fn launch(layout: &Layout, start: &Start<'_>) -> ApiResult<UnixStream> {
    let failed = |what: &str, error: std::io::Error| ApiError::internal(format!("{what}: {error}"));
    let (session, operator) =
        UnixStream::pair().map_err(|error| failed("cannot make a socket pair", error))?;
    let said = start.said()?;
    let child = Command::new("/proc/self/exe")
        .envs(logging::environment())
        .arg("--root")
        .arg(layout.root())
        .args([VERB, start.word()])
        .stdin(OwnedFd::from(operator))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed("cannot run the launcher", error))?;
    // One that does not listen says why.
    let _ = (&session).write_all(&said);
    let output =
        child.wait_with_output().map_err(|error| failed("cannot run the launcher", error))?;
    if output.status.success() {
        // What it logged is this server's to say; nobody may be listening.
        let _ = std::io::stderr().write_all(&output.stderr);
        return Ok(session);
    }
    match serde_json::from_slice::<Failure>(&output.stdout) {
        Ok(failure) => Err(ApiError::new(
            failure.status.try_into().unwrap_or(hyper::StatusCode::INTERNAL_SERVER_ERROR),
            failure.message,
        )),
        Err(_) => Err(ApiError::internal(format!(
            "the launcher failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

/// The launcher: makes a cell of what [`Start`] said in `word`, whose operator is
/// at the other end of standard input. The caller must have one thread. The result is the
/// exit code.
pub fn launch_container(layout: &Layout, word: &str) -> u8 {
    let request = Request::begin();
    match start(layout, word, request) {
        Ok(()) => 0,
        Err(error) => {
            let error = ApiError::from(error);
            let failure = Failure { status: error.status.as_u16(), message: error.message };
            let text = serde_json::to_vec(&failure).unwrap_or_default();
            // The server is told by the exit code if it cannot be told why.
            let _ = std::io::stdout().write_all(&text);
            125
        }
    }
}

fn start(layout: &Layout, word: &str, request: Request) -> Result<(), CellError> {
    let (mut spec, tty) = match word == SPEC {
        true => (read_spec()?, None),
        false => {
            let container = Containers::of(layout).read(word)?;
            let tty = container.tty_size.map(|(rows, cols)| TtySize { rows, cols });
            (container.spec, tty)
        }
    };
    let operator = std::io::stdin().as_fd().try_clone_to_owned();
    let operator = operator.map_err(CellError::host("cannot take over the session"))?;
    let (workload, caps) = Workload::plan(layout, &mut spec, tty, Vec::new())?;
    let (id, kept) = (spec.id.clone(), !spec.restart.is_no());
    let (record, _) = launch_for(layout, spec, caps, workload, request, operator.into())?;
    match kept {
        true => restart::keep(layout, &id).inspect_err(|_| {
            // The first error is the one to tell.
            let _ = end::kill(layout, &record, exocell_cell::signal::Signal::KILL);
        }),
        false => Ok(()),
    }
}

/// Reads as much as was said of the spec, and nothing of the session behind it.
fn read_spec() -> Result<CellSpec, CellError> {
    let failed = || CellError::host("cannot read the cell's spec from standard input");
    // Not through the standard library's handle, which reads ahead.
    let mut stdin = File::from(std::io::stdin().as_fd().try_clone_to_owned().map_err(failed())?);
    let mut length = [0; 4];
    stdin.read_exact(&mut length).map_err(failed())?;
    let length = u32::from_le_bytes(length);
    if length > SPEC_BYTES_MAX {
        return Err(CellError::Usage("the cell's spec is too long".to_owned()));
    }
    let mut text = vec![0; length as usize];
    stdin.read_exact(&mut text).map_err(failed())?;
    serde_json::from_slice(&text)
        .map_err(|error| CellError::Usage(format!("this is no cell's spec: {error}")))
}
