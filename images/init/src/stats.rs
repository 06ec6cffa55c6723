//! `Stats`: what the guest kernel says about itself.

use std::fs;

use exocell_agent::{GuestStats, Pressure};

use crate::boot::boottime_ns;
use crate::cgroup;

/// Reads every figure; one that the kernel does not give is 0.
pub fn read() -> GuestStats {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    GuestStats {
        memory_total_bytes: meminfo_bytes(&meminfo, "MemTotal"),
        memory_free_bytes: meminfo_bytes(&meminfo, "MemFree"),
        memory_available_bytes: meminfo_bytes(&meminfo, "MemAvailable"),
        page_cache_bytes: meminfo_bytes(&meminfo, "Cached"),
        process_count: cgroup::process_count(),
        uptime_ns: boottime_ns(),
        pager: crate::pager::stats(),
        pressure: Pressure { cpu: pressure("cpu"), memory: pressure("memory"), io: pressure("io") },
    }
}

/// A line `Name:   123 kB` of /proc/meminfo, in bytes.
fn meminfo_bytes(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

fn pressure(resource: &str) -> f64 {
    let text = fs::read_to_string(format!("/proc/pressure/{resource}")).unwrap_or_default();
    some_avg10(&text).unwrap_or(0.0)
}

/// The `some avg10=` figure (kernel: Documentation/accounting/psi.rst).
fn some_avg10(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_their_whole_name() {
        let text = "MemTotal:  100 kB\nSwapCached: 7 kB\nCached:   3 kB\nMemFree: x kB\n";
        assert_eq!(meminfo_bytes(text, "MemTotal"), 102_400);
        assert_eq!(meminfo_bytes(text, "Cached"), 3072);
        assert_eq!(meminfo_bytes(text, "MemFree"), 0);
        assert_eq!(meminfo_bytes(text, "Mem"), 0);
    }

    #[test]
    fn pressure_is_the_share_of_some_tasks_over_ten_seconds() {
        let text = "some avg10=1.50 avg60=0.10 avg300=0.00 total=1\nfull avg10=9.00 avg60=0\n";
        assert_eq!(some_avg10(text), Some(1.5));
        assert_eq!(some_avg10("full avg10=9.00"), None);
        assert_eq!(some_avg10(""), None);
    }
}
