//! What an isolate costs that is alive: ours has begun and waits for its next turn, so it has a
//! stack; those of peers have been called once and are kept, without one. Most of ours are
//! dormant: what they use of their stacks and memories is packed. `exocell-awake` are ours that
//! are not: their scheduler lets as many wait as there are.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use exocell_exovisor::{
    Admission, Call, CallLimits, Metering, Policy, Pool, Priority, Report, Scheduler,
    SchedulerConfig, Slots, Value,
};
use exocell_xgate::CapabilitySet;

use super::plain::{Allocator, Plain};
use super::wazero::{Instances, Wazero};
use super::{DEFAULT, OURS, POOLING, guests};
use crate::BenchError;
use crate::row::{Row, Unit};

const OWNER: &str = "bench";
const AWAKE: &str = "exocell-awake";
/// Short, because each isolate has to have had a turn, and long enough that it is made in that and
/// has begun.
const SLICE: Duration = Duration::from_micros(100);
/// One page of Wasm, the least that a memory can be.
const MEMORY_BYTES: usize = 64 << 10;
/// Of a stack's memory only touched pages count; this is address space.
const STACK_BYTES: usize = 64 << 10;

fn failed(why: impl ToString) -> BenchError {
    BenchError::Subject { subject: OURS.to_owned(), why: why.to_string() }
}

/// Resident memory and page tables of this process, in bytes.
fn held_bytes() -> Result<u64, BenchError> {
    let status = fs::read_to_string("/proc/self/status").map_err(failed)?;
    Ok(["VmRSS:", "VmPTE:"].iter().filter_map(|name| kilobytes(&status, name)).sum::<u64>() << 10)
}

/// A line of proc_pid_status(5).
pub(super) fn kilobytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// What memory the isolates have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Memory {
    /// None.
    None,
    /// One, of which a word of a page is written.
    Written,
    /// One, of which a page is full of what does not pack.
    Filled,
}

impl Memory {
    const ALL: [Self; 3] = [Self::None, Self::Written, Self::Filled];

    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Written => "written",
            Self::Filled => "filled",
        }
    }

    /// A module whose function never returns.
    fn endless(self) -> &'static str {
        match self {
            Self::None => guests::SPIN_BARE,
            Self::Written => guests::SPIN,
            Self::Filled => guests::FILL_SPIN,
        }
    }

    /// The same, but it returns.
    fn returning(self) -> &'static str {
        match self {
            Self::None => guests::EMPTY,
            Self::Written => guests::WRITE,
            Self::Filled => guests::FILL,
        }
    }
}

/// Whose isolates are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Subject {
    /// Ours, preempted.
    Ours,
    /// The same, and none is dormant.
    Awake,
    /// Of wasmtime, in slots of a pool.
    Pooling,
    /// Of wasmtime, each with a mapping of its own.
    Default,
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => OURS,
            Self::Awake => AWAKE,
            Self::Pooling => POOLING,
            Self::Default => DEFAULT,
        }
    }

    fn word(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Bytes of each of `count` isolates, all alive at once. Each kind has a process of its own: the
/// heap that one leaves behind would serve the next.
pub fn measure(count: u32, peers: bool, wazero: Option<&Path>) -> Result<Vec<Row>, BenchError> {
    let others: &[Subject] = if peers { &[Subject::Pooling, Subject::Default] } else { &[] };
    let mut rows = Vec::new();
    for memory in Memory::ALL {
        for subject in [Subject::Ours, Subject::Awake] {
            let bytes = in_own_process(memory, subject, count)?;
            rows.extend(row(memory, subject.name(), count, bytes));
        }
        for subject in others {
            match in_own_process(memory, *subject, count) {
                Ok(bytes) => rows.extend(row(memory, subject.name(), count, bytes)),
                Err(error) => eprintln!("{} is left out: {error}", subject.name()),
            }
        }
        if let Some(program) = wazero {
            let bytes =
                Wazero::start(program, memory.returning(), 1, Instances::Fresh)?.live(count)?;
            rows.extend(row(memory, "wazero", count, bytes));
        }
    }
    Ok(rows)
}

fn row(memory: Memory, subject: &str, count: u32, bytes: f64) -> Option<Row> {
    let state = match subject {
        OURS => "in a call, dormant",
        AWAKE => "in a call",
        _ => "called once",
    };
    let params = [
        ("live", count.to_string()),
        ("memory", memory.name().to_owned()),
        ("state", state.to_owned()),
    ];
    Row::of(format!("isolate_bytes_{}", memory.name()), subject, Unit::Bytes, &[bytes], &params)
}

/// This program, asked with `--live-memory`.
fn in_own_process(memory: Memory, subject: Subject, count: u32) -> Result<f64, BenchError> {
    let program = std::env::current_exe().map_err(failed)?;
    let output = Command::new(program)
        .args(["isolates", "--json", "--peers", "none", "--live", &count.to_string()])
        .args(["--live-memory", memory.name(), "--live-subject", &subject.word()])
        .output()
        .map_err(failed)?;
    let row = serde_json::from_slice::<serde_json::Value>(&output.stdout);
    let bytes = row.ok().and_then(|row| row["min"].as_f64());
    bytes.ok_or_else(|| failed(String::from_utf8_lossy(&output.stderr).trim()))
}

/// The row of one kind, measured in this process.
pub fn measure_here(memory: Memory, subject: Subject, count: u32) -> Result<Vec<Row>, BenchError> {
    let bytes = match subject {
        Subject::Ours => {
            measure_ours(memory.endless(), count, SchedulerConfig::default().resident_max)?
        }
        Subject::Awake => measure_ours(memory.endless(), count, usize::MAX)?,
        Subject::Pooling => measure_plain(memory, Allocator::Pooling { isolates: count }, count)?,
        Subject::Default => measure_plain(memory, Allocator::OnDemand, count)?,
    };
    Ok(row(memory, subject.name(), count, bytes).into_iter().collect())
}

fn measure_plain(memory: Memory, allocator: Allocator, count: u32) -> Result<f64, BenchError> {
    let plain = Plain::new(memory.returning(), allocator)?;
    let before = held_bytes()?;
    let kept: Vec<_> = (0..count).map(|_| plain.kept(1)).collect::<Result<_, _>>()?;
    let after = held_bytes()?;
    drop(kept);
    Ok(after.saturating_sub(before) as f64 / f64::from(count))
}

fn policy(count: u32) -> Policy {
    let pool = Pool {
        isolates: count + 2,
        stacks: count / 2 + 2,
        memory_bytes: MEMORY_BYTES,
        table_elements: 0,
        slots: Slots::Compact,
        keep_resident_bytes: 0,
        kept: 0,
    };
    Policy { wasm_stack_bytes: STACK_BYTES, host_stack_bytes: STACK_BYTES, ..Policy::pooled(pool) }
}

fn measure_ours(text: &str, count: u32, resident_max: usize) -> Result<f64, BenchError> {
    let all = count as usize;
    let config = SchedulerConfig {
        slice: SLICE,
        waiting_max: all + 1,
        begun_max: all + 1,
        resident_max,
        ..Default::default()
    };
    let scheduler = Scheduler::new(&config).map_err(failed)?;
    let tenant = scheduler.tenant(OWNER, 1, Priority::Normal);
    let caps = CapabilitySet::nothing();
    let function = Admission::new(policy(count))
        .admit_for(OWNER, text.as_bytes(), &caps, Metering::Time)
        .and_then(|admitted| admitted.function(OWNER, "run"))
        .map_err(failed)?;
    let limits =
        CallLimits { memory_bytes: 1 << 20, deadline: None, cpu_ns: None, threads: 0, fuel: 0 };
    let before = held_bytes()?;
    let (send, ended) = mpsc::channel();
    for _ in 0..count {
        let send = send.clone();
        let done = move |report: Report| {
            // Nobody listens once the measurement has failed.
            let _ = send.send(report.preemptions);
        };
        let call = Call::new(&function, &[Value::I32(1)], limits.clone());
        scheduler.submit(&tenant, call, done).map_err(failed)?;
    }
    drop(send);
    // Turns of one tenant come one after the other: a call that is over at its first one ends
    // when each of those before it has had one.
    let last = CallLimits { deadline: Some(Instant::now()), ..limits };
    scheduler.run(&tenant, Call::new(&function, &[Value::I32(1)], last)).map_err(failed)?;
    let after = held_bytes()?;
    if ended.try_recv().is_ok() {
        return Err(failed(format!(
            "an isolate could not live beside {count}; hosts before Linux 6.13 need two mappings \
             for each (sysctl vm.max_map_count)"
        )));
    }
    drop(scheduler);
    let alive = ended.iter().filter(|preemptions| *preemptions > 0).count();
    if alive != all {
        return Err(failed(format!("only {alive} of {count} isolates were alive at once")));
    }
    Ok(after.saturating_sub(before) as f64 / f64::from(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_status_are_found() {
        let status = "Name:\tx\nVmRSS:\t    123 kB\nVmPTE:\t 40 kB\n";
        assert_eq!(kilobytes(status, "VmRSS:"), Some(123));
        assert_eq!(kilobytes(status, "VmSwap:"), None);
        assert!(held_bytes().unwrap() > 0);
    }
}
