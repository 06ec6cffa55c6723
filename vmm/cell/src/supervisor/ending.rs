//! The end of a cell: its processes, its record, its followers, in that order.

use std::time::Duration;

use exocell_agent::{FailureKind, FrameWriter, Kind, Reply};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tracing::{error, info, warn};

use super::{End, Running, Shared, clear_record};
use crate::launch::Inheritance;
use crate::output::notice;
use crate::record::{Record, State, Status};
use crate::{CellError, now_ms};

/// How long a guest with writable folders, or a disk that is kept, may take to write
/// them back after its program's own end.
const WRITE_BACK_MAX: Duration = Duration::from_secs(10);
/// The same where somebody waits for the end: less than he does.
const WRITE_BACK_STOPPED_MAX: Duration = Duration::from_secs(4);

/// Ends what still runs and settles the record, so that whoever is told of
/// the end finds nothing left.
pub(crate) fn finish(
    inheritance: &Inheritance,
    record: &Record,
    shared: &Shared,
    workload: Running,
    mut status: Status,
    end: End,
) {
    shared.contained.hang_up();
    match &workload {
        Running::Vm(guest) => guest.end(match end.reason {
            None => WRITE_BACK_MAX,
            Some(_) => WRITE_BACK_STOPPED_MAX,
        }),
        Running::Sidecar(sidecar) => sidecar.end(),
        Running::Isolate(_) => {}
    }
    status.state = State::Exited;
    status.finished_ms = now_ms();
    status.exit_code = Some(end.exit_code);
    status.reason.clone_from(&end.reason);
    status.out_of_memory = end.out_of_memory;
    status.deadline_passed = end.deadline_passed;
    let (exit_code, reason) = (end.exit_code, end.reason.as_deref());
    match reason {
        None => info!(exit_code, "ended"),
        Some(reason) => warn!(exit_code, reason, "ended"),
    }
    clear_group(inheritance);
    shared.health.close();
    // Before the followers hear of it: one that has stopped reading must not
    // keep an ended cell in the list.
    settle(inheritance, record, &status);
    if let (Some(reason), Reply::Exited { .. }) = (&end.reason, &end.reply) {
        shared.output.notice(reason);
    }
    shared.output.close(&end.reply);
}

/// Settles the record of a cell that did not come up, and tells the operator
/// why.
pub(crate) fn fail(inheritance: &Inheritance, error: &CellError) {
    clear_group(inheritance);
    let message = error.to_string();
    error!("did not come up: {message}");
    // The set-up may have stopped in a half-made root, or before any of it.
    if nix::unistd::fchdir(&inheritance.record_dir).is_ok() {
        settle(inheritance, &inheritance.record.from_within(), &Status::failed(error));
    }
    let mut operator = FrameWriter::new(&inheritance.operator);
    let end = match error {
        CellError::Deadline => {
            let _ = operator.write(Kind::Stderr, notice(&message).as_bytes());
            Reply::exited(error.exit_code())
        }
        _ => Reply::Failed { kind: FailureKind::Guest, message },
    };
    // There is nobody else to tell.
    let _ = operator.write_json(Kind::Reply, &end);
}

/// Ends what is left of the guest's processes, and removes their control group.
fn clear_group(inheritance: &Inheritance) {
    if let Some(group) = &inheritance.group {
        // All of the pid namespace but its first process, which this is. There may be none.
        let _ = nix::sys::signal::kill(Pid::from_raw(-1), Signal::SIGKILL);
        group.remove();
    }
}

/// Writes the end down, or removes the record where that was asked for. What
/// fails here (a full disk) is put right by the next command that looks.
fn settle(inheritance: &Inheritance, record: &Record, status: &Status) {
    let _ = record.write_status(status);
    let _ = std::fs::remove_file("control.sock");
    if inheritance.spec.remove {
        let _ = clear_record(inheritance, record);
    }
}
