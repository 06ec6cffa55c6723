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
    /// CPU time of all of the cell's processes so far.
    pub cpu_ns: u64,
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
            samples,
        }
    }
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
    Some(Sample {
        at_ms,
        host_bytes: row["host_memory_bytes"].as_u64()?,
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
        let expected = Sample { at_ms: 1, host_bytes: 7, guest_used_bytes: 30, cpu_ns: 9 };
        assert_eq!(sample(1, &row), Some(expected));
        assert_eq!(sample(1, &json!({"guest_claims": null})), None);
        let usage = Usage::of(vec![expected, Sample { host_bytes: 5, ..expected }], 1, 2);
        assert_eq!((usage.host_bytes_max, usage.guest_used_bytes_max), (7, 30));
    }
}
