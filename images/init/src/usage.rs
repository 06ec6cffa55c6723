//! `Usage`, `Freeze` and `SignalAll`: the programs of one container together.

use std::collections::BTreeMap;
use std::time::Duration;

use exocell_agent::{ContainerUsage, PIDS_MAX};
use nix::errno::Errno;

use crate::cgroup::Group;
use crate::error::{Context, InitError};
use crate::own_proc;
use crate::reaper::Reaper;
use crate::sys;

/// How long programs may take to stop where they are.
const FREEZE_MAX: Duration = Duration::from_secs(4);

/// What the programs in `group` use.
pub fn read(group: &Group) -> ContainerUsage {
    let number = |file: &str| group.says(file).trim().parse::<u64>().unwrap_or(0);
    let pids = group.pids();
    let shown = pids.iter().take(PIDS_MAX).filter_map(|pid| own_proc::innermost_pid(*pid));
    ContainerUsage {
        pids: shown.map(i32::unsigned_abs).collect(),
        task_count: number("pids.current"),
        task_count_max: number("pids.max"),
        memory_bytes: number("memory.current"),
        memory_peak_bytes: number("memory.peak"),
        memory_limit_bytes: number("memory.max"),
        cpu: counters(&group.says("cpu.stat")),
        memory: counters(&group.says("memory.stat")),
        memory_events: counters(&group.says("memory.events")),
    }
}

/// Lines of a name and a number.
fn counters(text: &str) -> BTreeMap<String, u64> {
    let pair = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    };
    text.lines().filter_map(pair).collect()
}

/// Stops the programs in `group`, or lets them go on.
pub fn freeze(group: &Group, frozen: bool) -> Result<(), InitError> {
    let done = group.freeze(frozen, FREEZE_MAX).context(|| "freezing the container")?;
    if done || !frozen {
        return Ok(());
    }
    // Nobody is told that they stand while one goes on.
    let _ = group.freeze(false, Duration::ZERO);
    Err(InitError::guest(format!("a program does not stop within {} s", FREEZE_MAX.as_secs())))
}

/// Sends every program in `group` signal `number`.
pub fn signal_all(reaper: &Reaper, group: &Group, number: u8) -> Result<(), InitError> {
    if !(1..=64).contains(&number) {
        return Err(InitError::invalid(format!("there is no signal {number}")));
    }
    if i32::from(number) == libc::SIGKILL {
        return group.kill().context(|| "ending the container's programs");
    }
    for pid in group.pids() {
        // A first process that would not notice it is ended by it, too.
        let sent = match reaper.signal(pid, number) {
            Err(Errno::ESRCH) => sys::kill(pid, number),
            sent => sent,
        };
        match sent {
            // It has ended meanwhile.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(errno) => return Err(errno).context(|| format!("sending signal {number}")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_control_group_are_counters() {
        let found = counters("usage_usec 5\nbroken\nuser_usec x\nsystem_usec 2\n");
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            [("system_usec".to_owned(), 2), ("usage_usec".to_owned(), 5)]
        );
    }
}
