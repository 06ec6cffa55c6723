//! Where the host runs the vCPUs of a cell.

use std::time::Duration;

use crate::common::cell::{Cell, pid};
use crate::common::{LIMIT, host, until};

/// Two shells compute at once, rest, and begin again.
const SCRIPT: &str = "compute() { i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done; }
    while :; do compute & compute; wait; sleep 0.1; done";
/// Observations of two vCPUs that each stay on one CPU.
const OBSERVATIONS: usize = 200;

#[test]
fn vcpus_that_compute_at_once_stay_on_different_cpus() {
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() < 2) {
        return; // they can't
    }
    let cell = Cell::start("vcpus", &["--cpus", "2", "--intra", "aspace"], &["sh", "-c", SCRIPT]);
    let kernel = pid(&cell.inspect(), "guest_kernel_pid");
    let (mut apart, mut together) = (0, 0);
    let seen = until(LIMIT, || {
        std::thread::sleep(Duration::from_millis(20));
        // Others of its threads may run on all CPUs.
        if let [one, other] = host::bound_threads(kernel)[..] {
            *if one == other { &mut together } else { &mut apart } += 1;
        }
        apart + together == OBSERVATIONS
    });
    assert!(seen, "two vCPUs on one CPU each: only {} times", apart + together);
    assert!(together * 10 < apart, "on one CPU {together} times, on two {apart} times");
}
