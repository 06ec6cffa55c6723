//! The end of a cell: its processes, its record, its followers, in that order.

use std::time::Duration;

use exocell_agent::{Kind, Reply};

use super::{End, Running, Shared, clear_record};
use crate::launch::Inheritance;
use crate::now_ms;
use crate::record::{Record, State, Status};

/// How long a guest with writable folders may take to write them back.
const ORDERLY_SHUTDOWN_MAX: Duration = Duration::from_secs(2);

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
    if let Running::Vm(guest) = &workload {
        guest.end(ORDERLY_SHUTDOWN_MAX);
    }
    status.state = State::Exited;
    status.finished_ms = now_ms();
    status.exit_code = Some(end.exit_code);
    if let (Some(reason), Reply::Exited { .. }) = (&end.reason, &end.reply) {
        shared.output.write(Kind::Stderr, format!("exocell: {reason}\n").as_bytes());
    }
    status.reason = end.reason;
    // A record that cannot be written (a full disk) is settled by the next
    // command that looks at it; the followers still hear the end.
    let _ = record.write_status(&status);
    let _ = std::fs::remove_file("control.sock");
    if inheritance.spec.remove {
        let _ = clear_record(inheritance, record);
    }
    shared.output.close(&end.reply);
}
