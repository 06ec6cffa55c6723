//! Processes beside a cell's supervisor, which hold what is the operator's: a folder, a way to a
//! socket.
//!
//! ```text
//! operator's process ── start ──> a process in namespaces of its own ── is in its root ──> "ready"
//!        └ the other end of its socket: the supervisor's later. The process ends with that.
//! ```

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use exocell_vmm::jail::{self, HostNetwork, IdentityMap};

use crate::CellError;

/// How long a process may take to be in its root.
const READY_MAX: Duration = Duration::from_secs(60);
/// What says that a process is in its root; else it says why not.
const READY: u8 = b'+';
/// The longest reason, in bytes.
const REASON_LEN_MAX: u64 = 4096;

/// Starts a process that runs `body` with its end of a socket, and waits until it is ready
/// ([`say_ready`]); the other end. `what` is what the operator knows it by. The caller must have one
/// thread.
///
/// # Errors
/// Says what the host did not allow.
pub(crate) fn start(
    what: &str,
    body: impl FnOnce(&UnixStream, IdentityMap) -> Result<(), CellError>,
) -> Result<UnixStream, CellError> {
    let failed = "cannot make a socket pair";
    let (ours, theirs) = UnixStream::pair().map_err(CellError::host(failed))?;
    let identity = IdentityMap::for_folder();
    jail::spawn(identity, HostNetwork::Never, |_| match body(&theirs, identity) {
        Ok(()) => 0,
        Err(error) => {
            // Whoever started it is told, if it still waits.
            let _ = (&theirs).write_all(error.to_string().as_bytes());
            125
        }
    })?;
    drop(theirs);
    await_ready(what, &ours)?;
    Ok(ours)
}

fn await_ready(what: &str, mut control: &UnixStream) -> Result<(), CellError> {
    let failed = format!("the process that serves {what} did not start");
    control.set_read_timeout(Some(READY_MAX)).map_err(CellError::host(&*failed))?;
    let mut word = [0];
    let read = control.read(&mut word).map_err(CellError::host(&*failed))?;
    if read == 1 && word[0] == READY {
        return control.set_read_timeout(None).map_err(CellError::host(&*failed));
    }
    let mut why = word.get(..read).unwrap_or_default().to_vec();
    let _ = control.take(REASON_LEN_MAX).read_to_end(&mut why);
    let why = exocell_agent::printable(&String::from_utf8_lossy(&why)).to_string();
    Err(CellError::Usage(format!("{what} cannot be served: {why}")))
}

/// Says that the calling process is in its root.
///
/// # Errors
/// The host's.
pub(crate) fn say_ready(control: &UnixStream) -> Result<(), CellError> {
    // The standard library's would be send(2), which not all of them may call.
    let said = nix::unistd::write(control, &[READY]);
    said.map(drop).map_err(|errno| CellError::host("cannot say that it is ready")(errno.into()))
}

/// Leaves the operator's terminal: what it is told there is not for this process.
///
/// # Errors
/// The host's.
pub(crate) fn leave_operator() -> Result<(), CellError> {
    let failed = |errno: nix::errno::Errno| CellError::host("cannot leave")(errno.into());
    nix::unistd::setsid().map_err(failed)?;
    let null = File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .map_err(CellError::host("cannot open /dev/null"))?;
    nix::unistd::dup2_stdin(&null).map_err(failed)?;
    nix::unistd::dup2_stdout(&null).map_err(failed)?;
    nix::unistd::dup2_stderr(&null).map_err(failed)
}

/// CPU weight 100 is nice 0; each nice level is a factor of 1.25
/// (kernel/sched/core.c, sched_prio_to_weight).
pub(crate) fn set_priority(weight: u32) {
    let steps = (100.0 / f64::from(weight.max(1))).ln() / 1.25f64.ln();
    let nice = (steps.round() as i32).clamp(-20, 19);
    // SAFETY: setpriority takes integers only. Needed because nix does not
    // wrap it. Raising takes a privilege; without it the cell stays at 0.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
}
