//! What is counted: CPU time, because the machine is shared.

use nix::time::{ClockId, clock_gettime};

/// CPU time of this process, in nanoseconds.
pub fn process_cpu_ns() -> u64 {
    cpu_ns(ClockId::CLOCK_PROCESS_CPUTIME_ID)
}

/// CPU time of the calling thread, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    cpu_ns(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

fn cpu_ns(clock: ClockId) -> u64 {
    clock_gettime(clock).map_or(0, |time| {
        (time.tv_sec() as u64).saturating_mul(1_000_000_000) + time.tv_nsec() as u64
    })
}
