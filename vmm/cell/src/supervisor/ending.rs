//! The end of a cell: its processes, its record, its followers, in that order.

use std::time::Duration;

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
    status.reason = end.reason;
    status.times = match &workload {
        Running::Vm(guest) => guest.times(status.times),
        Running::Isolate(_) => status.times,
    };
    // A record that cannot be written (a full disk) is settled by the next
    // command that looks at it; the followers still hear the end.
    let _ = record.write_status(&status);
    let _ = std::fs::remove_file("control.sock");
    if inheritance.spec.remove {
        let _ = clear_record(inheritance, record);
    }
    shared.output.close(&end.reply);
}
