//! Starting a cell. A supervisor is cloned from a process with one thread, and the shim has many;
//! so each start is a short life of the same executable:
//!
//! ```text
//! shim ── exec: launch ──> plan, launch ──> supervisor
//!   └──── stdin: SPEC, then the operator's session (a socket pair) ──┘
//! ```

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use exocell_cell::launch::{Request, Workload, launch_for};
use exocell_cell::{CellSpec, Layout, logging};
use serde::{Deserialize, Serialize};

use crate::error::{Result, ShimError};
use crate::{NAME, cgroups};

/// The longest order, in bytes.
const ORDER_BYTES_MAX: u32 = 1 << 20;

/// What the launcher is told: its length as four bytes, then as much JSON.
#[derive(Serialize, Deserialize)]
struct Order {
    root: PathBuf,
    spec: CellSpec,
    /// The host's control groups that its processes are to be in.
    groups: Vec<PathBuf>,
}

/// Starts a cell, in the control groups `groups`; the shim's end of its session.
///
/// # Errors
/// Why there is none.
pub fn launch(layout: &Layout, spec: &CellSpec, groups: &[PathBuf]) -> Result<UnixStream> {
    let failed = "cannot run the launcher";
    let (session, operator) = UnixStream::pair().map_err(ShimError::host(failed))?;
    let (root, groups) = (layout.root().to_owned(), groups.to_vec());
    let order = Order { root, spec: spec.clone(), groups };
    let text = serde_json::to_vec(&order).map_err(ShimError::host(failed))?;
    let length = u32::try_from(text.len()).map_err(ShimError::host(failed))?;
    let child = Command::new("/proc/self/exe")
        .arg0(NAME)
        .arg("launch")
        .envs(logging::environment())
        .stdin(OwnedFd::from(operator))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(ShimError::host(failed))?;
    // One that does not listen says why.
    let _ = (&session).write_all(&[&length.to_le_bytes()[..], &text].concat());
    let output = child.wait_with_output().map_err(ShimError::host(failed))?;
    if output.status.success() {
        return Ok(session);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim().trim_start_matches(NAME).trim_start_matches(": ");
    Err(match said {
        "" => ShimError::internal(format!("the launcher failed ({})", output.status)),
        why => ShimError::internal(why),
    })
}

/// The launcher: makes a cell as it is told on standard input, whose operator is at the other end of
/// that. The caller has one thread.
///
/// # Errors
/// Why there is no cell.
pub fn launch_here() -> Result<()> {
    let request = Request::begin();
    let level = std::env::var(logging::LEVEL_VARIABLE).ok().and_then(|level| level.parse().ok());
    let default = logging::Settings::default();
    logging::begin(logging::Settings { level: level.unwrap_or(default.level), ..default });
    let Order { root, mut spec, groups } = read_order()?;
    let layout = Layout::new(root);
    let operator = std::io::stdin().as_fd().try_clone_to_owned();
    let operator = operator.map_err(ShimError::host("cannot take over the session"))?;
    let (workload, caps) = Workload::plan(&layout, &mut spec, None, Vec::new())?;
    if let Workload::Vm(plan) = &workload {
        cgroups::enter(&groups, plan.limits.bytes_max())?;
    }
    launch_for(&layout, spec, caps, workload, request, operator.into())?;
    Ok(())
}

/// Reads as much as was said of the order, and nothing of the session behind it.
fn read_order() -> Result<Order> {
    let failed = "cannot read what is to be launched";
    // Not through the standard library's handle, which reads ahead.
    let stdin = std::io::stdin().as_fd().try_clone_to_owned();
    let mut stdin = File::from(stdin.map_err(ShimError::host(failed))?);
    let mut length = [0; 4];
    stdin.read_exact(&mut length).map_err(ShimError::host(failed))?;
    let length = u32::from_le_bytes(length);
    if length > ORDER_BYTES_MAX {
        return Err(ShimError::invalid("what is to be launched is too long"));
    }
    let mut text = vec![0; length as usize];
    stdin.read_exact(&mut text).map_err(ShimError::host(failed))?;
    serde_json::from_slice(&text).map_err(ShimError::host(failed))
}
