//! `Stats`: what the guest kernel says about itself.

use std::time::Duration;

use exocell_agent::{GateStats, GuestStats, Pressure};
use nix::time::{ClockId, clock_gettime};

use crate::cgroup::Group;
use crate::own_proc;

/// Bytes of what the guest kernel counts in pages.
pub const PAGE_BYTES: u64 = 4096;

/// Nanoseconds since the guest kernel started.
pub fn boottime_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Reads every figure, with the processes of `group`; one that the kernel does not give is 0.
pub fn read(group: Option<&Group>) -> GuestStats {
    let meminfo = own_proc::read("meminfo");
    GuestStats {
        memory_total_bytes: meminfo_bytes(&meminfo, "MemTotal"),
        memory_free_bytes: meminfo_bytes(&meminfo, "MemFree"),
        memory_available_bytes: meminfo_bytes(&meminfo, "MemAvailable"),
        page_cache_bytes: meminfo_bytes(&meminfo, "Cached"),
        process_count: group.map_or(0, Group::process_count),
        uptime_ns: boottime_ns(),
        pager: crate::pager::stats(),
        gates: Some(own_proc::read("gates"))
            .filter(|text| !text.is_empty())
            .map(|text| gates(&text)),
        pressure: Pressure { cpu: pressure("cpu"), memory: pressure("memory"), io: pressure("io") },
    }
}

/// /proc/gates (arch/x86/um/gate.c of the patched kernel).
fn gates(text: &str) -> GateStats {
    GateStats {
        gated_count: number(text, "calls_gated"),
        trapped_count: number(text, "calls_trapped"),
        site_count: number(text, "sites"),
        refused_count: number(text, "refused"),
        copied_bytes: number(text, "pages").saturating_mul(PAGE_BYTES),
    }
}

/// The number in a line `name 123`; 0 where there is none.
pub fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0)
}

/// A line `Name:   123 kB` of /proc/meminfo, in bytes.
pub fn meminfo_bytes(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

fn pressure(resource: &str) -> f64 {
    some_avg10(&own_proc::read(&format!("pressure/{resource}"))).unwrap_or(0.0)
}

/// The `some avg10=` figure (kernel: Documentation/accounting/psi.rst).
pub fn some_avg10(text: &str) -> Option<f64> {
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
    fn calls_are_counted_by_how_they_came() {
        let stats = gates("calls_gated 30\ncalls_trapped 2\nsites 5\nrefused x\npages 3\n");
        assert_eq!((stats.gated_count, stats.trapped_count, stats.site_count), (30, 2, 5));
        assert_eq!((stats.refused_count, stats.copied_bytes), (0, 3 * 4096));
    }

    #[test]
    fn pressure_is_the_share_of_some_tasks_over_ten_seconds() {
        let text = "some avg10=1.50 avg60=0.10 avg300=0.00 total=1\nfull avg10=9.00 avg60=0\n";
        assert_eq!(some_avg10(text), Some(1.5));
        assert_eq!(some_avg10("full avg10=9.00"), None);
        assert_eq!(some_avg10(""), None);
    }
}
