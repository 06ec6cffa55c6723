//! Memory that files left behind, and that nobody looks at: it goes when the host asks.

use std::io;

use crate::cgroup::Group;
use crate::error::{Context, InitError};
use crate::own_proc;
use crate::stats::{meminfo_bytes, some_avg10};

/// Of what files have in memory, each time the host asks.
const SHARE: u64 = 8;
/// Left alone: what programs run from.
const LEAST_BYTES: u64 = 4 << 20;
/// Percent of the time that programs may wait for memory, what was dropped and is read
/// again included.
const WAIT_PERCENT_MAX: f64 = 1.0;

/// Drops a share of it, the least recently used first.
pub fn drop_some(group: &Group) -> Result<(), InitError> {
    let (meminfo, pressure) = (own_proc::read("meminfo"), own_proc::read("pressure/memory"));
    let bytes = share(&meminfo, &pressure);
    if bytes == 0 {
        return Ok(());
    }
    match group.reclaim(bytes) {
        // Less than that could be dropped.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        done => done.context(|| "dropping what files left in memory"),
    }
}

/// How much to drop by what the guest kernel says of its memory, in bytes.
fn share(meminfo: &str, pressure: &str) -> u64 {
    let held = meminfo_bytes(meminfo, "Active(file)") + meminfo_bytes(meminfo, "Inactive(file)");
    let waits = some_avg10(pressure).is_some_and(|percent| percent > WAIT_PERCENT_MAX);
    if waits || held <= LEAST_BYTES { 0 } else { held / SHARE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_dropped_unless_there_is_little_or_programs_wait() {
        let meminfo =
            |kib| format!("Active: 9999999 kB\nActive(file): {kib} kB\nInactive(file): 4096 kB\n");
        let pressure = |percent| format!("some avg10={percent} avg60=9.00 avg300=9.00 total=9\n");
        assert_eq!(share(&meminfo(12_288), &pressure("0.99")), 2 << 20);
        assert_eq!(share(&meminfo(12_288), &pressure("1.01")), 0);
        assert_eq!(share(&meminfo(0), &pressure("0.00")), 0);
        assert_eq!(share("", ""), 0);
    }
}
