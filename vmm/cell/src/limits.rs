//! Limits that an operator changes of a cell that is there: of its programs while they run, and of
//! its next start.

use exocell_agent::oci::{Cpu, Memory, Pids, Resources};
use serde::{Deserialize, Serialize};

use crate::settings::{CpuTime, UNLIMITED};

/// What is `None` stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// A quota of [`UNLIMITED`] is none.
    pub cpu: Option<CpuTime>,
    /// 1024 is one share.
    pub cpu_shares: Option<u64>,
    /// Of the cell's own processors, like `0-1`.
    pub cpuset: Option<String>,
    pub memory_bytes: Option<u64>,
    /// Bytes that its kernel takes back last.
    pub memory_reservation: Option<u64>,
    /// Processes and threads.
    pub process_max: Option<u32>,
}

impl Limits {
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// As the guest's control group takes them. Memory that a guest has for itself is its kernel's
    /// to keep to.
    pub(crate) fn resources(&self, has_memory: bool) -> Resources {
        let signed = |amount: u64| match amount {
            UNLIMITED => -1,
            amount => i64::try_from(amount).unwrap_or(i64::MAX),
        };
        let memory = Memory {
            limit: self.memory_bytes.filter(|_| has_memory).map(signed),
            reservation: self.memory_reservation.map(signed),
        };
        let cpu = Cpu {
            quota: self.cpu.map(|time| signed(time.quota_us)),
            period: self.cpu.map(|time| time.period_us),
            shares: self.cpu_shares,
            cpus: self.cpuset.clone(),
        };
        Resources {
            memory: Some(memory),
            cpu: Some(cpu),
            pids: self.process_max.map(|most| Pids { limit: most.into() }),
            ..Resources::default()
        }
    }
}

/// How many processors it takes to have that much, if it is a limit.
pub(crate) fn processors(time: CpuTime) -> Option<u64> {
    (time.quota_us != UNLIMITED).then(|| time.processors())
}

/// Docker's shares as a weight among cells.
#[must_use]
pub fn weight(shares: u64) -> u64 {
    (shares.saturating_mul(100) / 1024).clamp(1, 10_000)
}
