//! Changes of a running guest's memory limit.
//!
//! The guest's Pager keeps to a limit; what the guest says about that is a
//! claim, so it counts only together with what the host holds for it. The size
//! of the memory file bounds what a guest that keeps to nothing can take.

use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

use exocell_agent::{GuestStats, Patient, client};
use exocell_vmm::devices::VsockHandle;

use super::guest;
use crate::plan::MEMORY_BYTES_MIN;

/// A guest that has to reclaim memory first gets this long before the change
/// is reported as under way.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(50);

/// What a guest would answer that has nothing to keep to a limit with.
pub(super) const NO_PAGER: &str = "the cell's memory was fixed when it started; run cells whose \
                                   memory is to change with --pager eager or credit";

/// Refuses limits that no guest could keep to.
pub(super) fn check(limit_bytes: u64, granted_bytes: u64) -> Result<(), String> {
    if limit_bytes > granted_bytes {
        return Err(format!(
            "{limit_bytes} bytes are more than the {granted_bytes} that the cell was granted; run it with more memory (--memory)"
        ));
    }
    if limit_bytes < MEMORY_BYTES_MIN {
        return Err(format!(
            "{limit_bytes} bytes of memory are too few for a vm cell; leave it at least {} MiB",
            MEMORY_BYTES_MIN >> 20
        ));
    }
    Ok(())
}

/// Tells the guest; whether it keeps to the limit by now.
pub(super) fn change(agent: &VsockHandle, memory: &File, limit_bytes: u64) -> Result<bool, String> {
    let stream = connect(agent)?;
    client::memory(&stream, &stream, limit_bytes).map_err(|error| error.to_string())?;
    let until = Instant::now() + PATIENCE;
    loop {
        let stream = connect(agent)?;
        let claims = client::stats(&stream, &stream).map_err(|error| error.to_string())?;
        let held = exocell_pager::allocated_bytes(memory).map_err(|error| error.to_string())?;
        if keeps_to(&claims, held, limit_bytes) {
            return Ok(true);
        }
        if Instant::now() > until {
            return Ok(false);
        }
        thread::sleep(POLL);
    }
}

pub(super) fn connect(agent: &VsockHandle) -> Result<Patient, String> {
    guest::connect(agent, PATIENCE).map_err(|error| format!("the guest does not answer: {error}"))
}

/// What the guest says, and what the host holds for it.
fn keeps_to(claims: &GuestStats, held_bytes: u64, limit_bytes: u64) -> bool {
    let settled = claims
        .pager
        .as_ref()
        .is_some_and(|pager| pager.withheld_bytes == pager.withheld_target_bytes);
    settled && held_bytes <= limit_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_agent::PagerStats;

    #[test]
    fn limits_lie_between_what_a_guest_needs_and_what_it_was_granted() {
        assert_eq!(check(64 << 20, 64 << 20), Ok(()));
        assert!(check((64 << 20) + 1, 64 << 20).unwrap_err().contains("granted"));
        assert!(check(MEMORY_BYTES_MIN - 1, 64 << 20).unwrap_err().contains("too few"));
    }

    #[test]
    fn a_claim_counts_only_with_what_the_host_holds() {
        let pager = |withheld_bytes| PagerStats {
            withheld_bytes,
            withheld_target_bytes: 5,
            ..PagerStats::default()
        };
        let claims = |pager| GuestStats { pager, ..GuestStats::default() };
        assert!(keeps_to(&claims(Some(pager(5))), 9, 10));
        assert!(!keeps_to(&claims(Some(pager(5))), 11, 10));
        assert!(!keeps_to(&claims(Some(pager(4))), 9, 10));
        assert!(!keeps_to(&claims(None), 9, 10));
    }
}
