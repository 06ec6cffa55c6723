//! Several cells alive at once.

use std::thread;

use crate::common::cell::Cell;

const CELLS: usize = 10;

#[test]
fn ten_cells_alive_at_once_each_answer() {
    let cells: Vec<Cell> = (0..CELLS).map(|_| Cell::idle("dense", &["--memory", "64m"])).collect();
    thread::scope(|scope| {
        for (number, cell) in cells.iter().enumerate() {
            scope.spawn(move || {
                let script = format!("echo {number} > /tmp/own; cat /tmp/own");
                assert_eq!(cell.shell(&script).ok().text(), number.to_string());
            });
        }
    });
    for cell in &cells {
        assert_eq!(cell.state(), "running");
    }
    let ids: Vec<u32> = cells.iter().map(guest_kernel_id).collect();
    let distinct: std::collections::BTreeSet<&u32> = ids.iter().collect();
    assert!(nix::unistd::geteuid().as_raw() != 0 || distinct.len() == CELLS, "shared ids: {ids:?}");
}

/// The host's user id of a cell's guest kernel.
fn guest_kernel_id(cell: &Cell) -> u32 {
    use std::os::unix::fs::MetadataExt;
    let pid = crate::common::cell::pid(&cell.inspect(), "guest_kernel_pid");
    std::fs::metadata(format!("/proc/{pid}")).expect("it is alive").uid()
}
