//! What a cell uses while it runs: once a second, by the host's figures and
//! by the guest's.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cell::Exocell;
use crate::place::USAGE;

const INTERVAL: Duration = Duration::from_secs(1);
/// A day of samples.
const SAMPLES_MAX: usize = 86_400;

/// What a cell uses at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Milliseconds since the instance was begun.
    pub at_ms: u64,
    /// What the host has allocated: guest memory and the processes' own.
    pub host_bytes: u64,
    /// What the guest says that it uses, its page cache left out.
    pub guest_used_bytes: u64,
    /// Of `host_bytes`, the guest's memory.
    #[serde(default)]
    pub held_bytes: u64,
    /// What the guest says of it; `None` without the Pager.
    #[serde(default)]
    pub free: Option<Free>,
    /// CPU time of all of the cell's processes so far.
    pub cpu_ns: u64,
}

/// Guest memory that nobody in the guest uses, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Free {
    /// Not held by the host either.
    pub unbound_bytes: u64,
    /// Held, and with a CPU for its next user.
    pub idle_bytes: u64,
}

/// The content of `cell.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Usage {
    /// From the request to a cell that runs programs.
    pub start_ms: u64,
    /// Of the instance, from the request to the last program's end.
    pub wall_ms: u64,
    pub cpu_ms: u64,
    pub host_bytes_max: u64,
    pub guest_used_bytes_max: u64,
    /// Mean of the guest memory that the host holds beyond what is used in the
    /// guest, in percent of that; `None` without the Pager.
    #[serde(default)]
    pub overhead_percent: Option<f64>,
    pub samples: Vec<Sample>,
}

impl Usage {
    /// What an evaluation that left its files in `folder` used; `None` where it
    /// got no cell.
    pub fn read(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(folder.join(USAGE)).ok()?).ok()
    }

    /// The figures of `samples`.
    pub fn of(samples: Vec<Sample>, start_ms: u64, wall_ms: u64) -> Self {
        let max = |figure: fn(&Sample) -> u64| samples.iter().map(figure).max().unwrap_or(0);
        Self {
            start_ms,
            wall_ms,
            cpu_ms: max(|sample| sample.cpu_ns) / 1_000_000,
            host_bytes_max: max(|sample| sample.host_bytes),
            guest_used_bytes_max: max(|sample| sample.guest_used_bytes),
            overhead_percent: overhead_percent(&samples),
            samples,
        }
    }
}

/// What is held and what is not bound are together all of the guest's memory that
/// was ever held: the same at any time, and their median where the two were not
/// read at one moment.
fn overhead_percent(samples: &[Sample]) -> Option<f64> {
    let known: Vec<_> = samples.iter().filter_map(|s| Some((s.held_bytes, s.free?))).collect();
    let mut wholes: Vec<_> = known.iter().map(|(held, free)| held + free.unbound_bytes).collect();
    wholes.sort_unstable();
    let whole = *wholes.get(wholes.len() / 2)?;
    let beyond = known.iter().filter_map(|(held, free)| {
        let used = whole.checked_sub(free.unbound_bytes + free.idle_bytes)?;
        Some((*held as f64 - used as f64) / (used as f64).max(1.0))
    });
    Some(beyond.sum::<f64>() / known.len() as f64 * 100.0)
}

/// A thread that watches a cell until it is asked for what it saw.
pub struct Watch {
    stop: Sender<()>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Watch {
    /// Watches the cell `name`, whose instance was begun at `begun`.
    pub fn begin(exocell: &Exocell, name: &str, begun: Instant) -> Self {
        let (stop, stopped) = channel();
        let (exocell, name) = (exocell.clone(), name.to_owned());
        let thread = std::thread::spawn(move || {
            let mut samples = Vec::new();
            loop {
                if samples.len() < SAMPLES_MAX {
                    samples.extend(look(&exocell, &name, begun));
                }
                match stopped.recv_timeout(INTERVAL) {
                    Err(RecvTimeoutError::Timeout) => {}
                    // One last look, for the sum of it.
                    _ => break samples.extend(look(&exocell, &name, begun)),
                }
            }
            samples
        });
        Self { stop, thread }
    }

    pub fn end(self) -> Vec<Sample> {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

/// A cell that has just ended cannot be looked at.
fn look(exocell: &Exocell, name: &str, begun: Instant) -> Option<Sample> {
    let output = exocell.command(&["stats", "--json", name]).output().ok()?;
    let at_ms = begun.elapsed().as_millis() as u64;
    sample(at_ms, &serde_json::from_slice(&output.stdout).ok()?)
}

/// A row of `exocell stats --json`.
fn sample(at_ms: u64, row: &Value) -> Option<Sample> {
    let guest = |name: &str| row["guest_claims"][name].as_u64().unwrap_or(0);
    let free = guest("memory_free_bytes").saturating_add(guest("page_cache_bytes"));
    let pager = &row["guest_claims"]["pager"];
    let bound = pager["bound_bytes"].as_u64().filter(|bound| *bound > 0);
    let idle = bound.and_then(|_| pager["idle_bytes"].as_u64());
    Some(Sample {
        at_ms,
        host_bytes: row["host_memory_bytes"].as_u64()?,
        held_bytes: row["counters"]["memory_allocated_bytes"].as_u64().unwrap_or(0),
        free: idle.map(|idle_bytes| Free { unbound_bytes: guest("memory_free_bytes"), idle_bytes }),
        guest_used_bytes: guest("memory_total_bytes").saturating_sub(free),
        cpu_ns: row["host"]["cpu_ns"].as_u64()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_row_of_figures_is_a_sample() {
        let guest =
            json!({"memory_total_bytes": 100, "memory_free_bytes": 50, "page_cache_bytes": 20});
        let row = json!({"host_memory_bytes": 7, "host": {"cpu_ns": 9}, "guest_claims": guest});
        let expected = Sample {
            at_ms: 1,
            host_bytes: 7,
            guest_used_bytes: 30,
            held_bytes: 0,
            free: None,
            cpu_ns: 9,
        };
        assert_eq!(sample(1, &row), Some(expected));
        assert_eq!(sample(1, &json!({"guest_claims": null})), None);
        let usage = Usage::of(vec![expected, Sample { host_bytes: 5, ..expected }], 1, 2);
        assert_eq!((usage.host_bytes_max, usage.guest_used_bytes_max), (7, 30));
        assert_eq!(usage.overhead_percent, None);
    }

    #[test]
    fn overhead_is_what_is_held_beyond_what_is_used() {
        let sample = |held, free, idle| {
            let pager = json!({"bound_bytes": 1, "idle_bytes": idle});
            let guest = json!({"memory_free_bytes": free, "pager": pager});
            let counters = json!({"memory_allocated_bytes": held});
            let row = json!({"host_memory_bytes": held, "host": {"cpu_ns": 0},
                "counters": counters, "guest_claims": guest});
            sample(0, &row).expect("a sample")
        };
        // Of 1000 bytes 500 are used, and 10 and 30 held beyond that.
        let usage = Usage::of(vec![sample(510, 490, 10), sample(530, 470, 30)], 0, 0);
        assert!((usage.overhead_percent.unwrap() - 4.0).abs() < 1e-9, "{usage:?}");
    }
}
