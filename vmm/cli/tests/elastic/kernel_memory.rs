//! What the guest kernel writes to is memory of the guest, which every process of
//! the cell can map: nothing of it is private to one process of the host.

use crate::common::cell::{Cell, pid};

/// The writable mappings of a process of the host that are private to it: lines of
/// its `maps`, see proc_pid_maps(5).
fn writable_and_private(process: i32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).expect("it is alive");
    let private = |line: &&str| {
        let access = line.split(' ').nth(1).expect("its access");
        access.contains('w') && access.ends_with('p')
    };
    maps.lines().filter(private).map(str::to_owned).collect()
}

#[test]
fn the_guest_kernel_writes_to_nothing_but_the_guests_memory() {
    let cell = Cell::idle("memory", &["--cpus", "2"]);
    cell.shell("for i in 1 2 3 4; do dd if=/dev/zero bs=64k count=9 | wc -c & done; wait").ok();

    let private = writable_and_private(pid(&cell.inspect(), "guest_kernel_pid"));

    assert!(
        matches!(private.as_slice(), [stack] if stack.ends_with("[stack]")),
        "beside the stack on which it was started: {private:#?}"
    );
}
