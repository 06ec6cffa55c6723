//! The Pager in larger pieces of the host's memory, whether the host has any or not.

use crate::common::cell::Cell;
use crate::common::compiled::{FOLDER_IN_CELL, Programs};
use crate::common::host::{command_line, namespace, processes};
use crate::common::{IMAGE, LIMIT, Started, exocell, finish};

const VARIABLE: &str = "EXOCELL_PAGER_BLOCKS";
const MIB: u64 = 1 << 20;
const MODES: [&str; 2] = ["eager", "credit"];
/// Every other page of 48 MiB goes back, then all of it.
const HALVES: &str = "\
import mmap
m = mmap.mmap(-1, 48 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(m), 4096): m[at] = 1
for at in range(0, len(m), 8192): m.madvise(mmap.MADV_DONTNEED, at, 4096)
assert sum(m[at] for at in range(0, len(m), 4096)) == len(m) // 8192
open('/tmp/half', 'w').close()
input()";

#[track_caller]
fn held(cell: &Cell) -> u64 {
    let stats = cell.verb(&["stats", "--json"]).ok().json();
    stats["counters"]["memory_allocated_bytes"].as_u64().expect("a figure")
}

#[test]
fn no_page_is_stale_shared_or_dirty_in_larger_pieces() {
    let programs = Programs::new().compile("pages", "pages", &["-static"]);
    let (volume, program) = (programs.volume(), format!("{FOLDER_IN_CELL}/pages"));
    for (mode, vcpus) in MODES.into_iter().flat_map(|mode| ["1", "2"].map(|n| (mode, n))) {
        let flags = ["--cpus", vcpus, "--pager", mode, "--memory", "256m", "--volume", &volume];
        let words = [IMAGE, &program, "2", "150000000", "4"];
        let mut run = exocell([&["run", "--rm"], &flags[..], &words].concat());
        let ended = finish(run.env(VARIABLE, "on"), b"").ok();
        let report = ended.text();
        assert!(report.ends_with("pages: ok"), "{mode}, {vcpus} vCPUs: {report}");
    }
}

#[test]
fn single_pages_of_larger_pieces_go_back() {
    for (mode, intra) in [("eager", "aspace"), ("credit", "aspace"), ("credit", "none")] {
        let flags = ["--pager", mode, "--intra", intra, "--memory", "256m"];
        let command = ["sleep", "infinity"];
        let cell = Cell::start_as("blocks", &flags, &command, |run| {
            run.env(VARIABLE, "on");
        });
        let inside = namespace(cell.supervisor()).expect("a pid namespace");
        let kernel = processes(&inside).get(1).copied().expect("a guest kernel");
        assert!(command_line(kernel).contains(" pager_blocks "), "{}", command_line(kernel));
        // What files leave in memory stays.
        cell.shell("python3 -c 'import mmap'").ok();
        let before = held(&cell);
        let mut half = Started::new(&mut cell.exec(&["-i"], &["python3", "-c", HALVES]));
        cell.shell("until [ -e /tmp/half ]; do sleep 0.1; done").ok();
        let there = held(&cell) - before;
        assert!((24 * MIB..40 * MIB).contains(&there), "{mode}, {intra}: {there} bytes more");
        half.write(b"\n");
        half.finish(LIMIT).expect("it ends").ok();
        let left = held(&cell).saturating_sub(before);
        assert!(left < 8 * MIB, "{mode}, {intra}: still {left} bytes more");
    }
}

#[test]
fn a_word_that_is_neither_on_nor_off_is_told() {
    let mut run = exocell(["run", "--rm", "--pager", "eager", IMAGE, "true"]);
    finish(run.env(VARIABLE, "maybe"), b"").complains_of(&[VARIABLE, "maybe", "on or off"]);
}
