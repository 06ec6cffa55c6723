//! Mappings that are the kernel's own, and what a program leaves in its host process:
//! nothing that a program of the cell does changes the first, or is there for the next.

use std::process::Command;

use crate::common::cell::Cell;
use crate::common::compiled::{FOLDER_IN_CELL, Programs};
use crate::common::{IMAGE, finish, run};

const MODES: [&str; 2] = ["aspace", "none"];
/// An ordinary user, and root.
const USERS: [&str; 2] = ["1000:1000", "0:0"];

/// `exocell run FLAGS IMAGE COMMAND`, with the programs at hand.
fn in_cell(programs: &Programs, flags: &[&str], command: &[&str]) -> crate::common::Finished {
    let fixed = ["run", "--rm", "--volume", &programs.volume()];
    run([&fixed[..], flags, &[IMAGE], command].concat())
}

#[test]
fn no_call_changes_a_mapping_of_the_kernels() {
    let programs = Programs::new().compile("special", "special", &["-static"]);
    let program = format!("{FOLDER_IN_CELL}/special");
    for (mode, user) in MODES.iter().flat_map(|mode| USERS.map(|user| (mode, user))) {
        let flags = ["--intra", mode, "--user", user];
        let tried = in_cell(&programs, &flags, &[&program]).ok();
        let last = tried.text().lines().last().unwrap_or_default();
        assert!(last.ends_with(" tries, 0 changed"), "{mode}, {user}: {}", tried.text());
        // Gates or the image, the vDSO, its data
        assert!(last.starts_with("3 mappings, ") || last.starts_with("4 mappings, "), "{last}");
    }
}

#[test]
fn addresses_that_nobody_has_are_the_end_of_a_program() {
    let programs = Programs::new().compile("special", "special", &["-static"]);
    let program = format!("{FOLDER_IN_CELL}/special");
    for mode in MODES {
        let flags = ["--intra", mode, "--user", USERS[0], "--timeout", "60s"];
        let touched = in_cell(&programs, &flags, &[&program, "faults"]).ok();
        assert!(touched.text().ends_with(", 0 did not end by SIGSEGV"), "{}", touched.text());
    }
}

#[test]
fn what_a_mapping_has_replaced_is_not_seen_any_more() {
    let programs = Programs::new().compile("special", "special", &["-static"]);
    let program = format!("{FOLDER_IN_CELL}/special");
    for (mode, vcpus) in MODES.iter().flat_map(|mode| ["1", "2"].map(|count| (mode, count))) {
        let looked = in_cell(&programs, &["--intra", mode, "--cpus", vcpus], &[&program, "stale"]);
        assert_eq!(looked.ok().text(), "0 stale pages", "{mode}, {vcpus} vCPUs");
    }
}

#[test]
fn programs_whose_segments_lie_there_end_and_harm_nobody() {
    let programs = Programs::new().copy("special/elves.py", "elves.py");
    let script = format!("{FOLDER_IN_CELL}/elves.py");
    for mode in MODES {
        let flags = ["--intra", mode, "--user", USERS[0]];
        let said = in_cell(&programs, &flags, &["python3", &script, "/tmp"]).ok();
        let lines: Vec<(&str, &str)> =
            said.text().lines().filter_map(|line| line.split_once(' ')).collect();
        assert!(lines.len() > 20, "{mode}: {}", said.text());
        assert_eq!(lines[0], ("plain", "0"));
        for (name, ended) in lines {
            assert_ne!(ended, "no end", "{mode}, {name}");
            assert!(!ended.contains("nothing runs"), "{mode}, {name}");
            // One that may lie anywhere is put elsewhere, and runs.
            let is_over = ["_first", "_last", "_whole", "_over", "_entry"];
            if is_over.iter().any(|end| name.ends_with(end)) {
                assert_ne!(ended, "0", "{mode}: {name} ran in a mapping of the kernel's");
            }
        }
    }
}

#[test]
fn the_next_program_begins_in_nothing_of_another_users() {
    let programs =
        Programs::new().compile("evil", "evil.so", &["-shared", "-fPIC", "-nostartfiles"]);
    for mode in MODES {
        let cell = Cell::idle("evil", &["--intra", mode, "--volume", &programs.volume()]);
        for _ in 0..4 {
            let script = format!("LD_PRELOAD={FOLDER_IN_CELL}/evil.so id -u; true");
            let evil = ["sh", "-c", &script];
            finish(&mut cell.exec(&["--user", USERS[0]], &evil), b"").ok();
            assert_eq!(cell.shell("id -u; id -u; id -u").ok().text(), "0\n0\n0", "{mode}");
            let python = cell.shell("python3 -c 'import os; print(os.getuid())'").ok();
            assert_eq!((python.text(), &*python.stderr), ("0", ""), "{mode}");
        }
    }
}

#[test]
fn a_process_finds_nothing_of_the_one_before() {
    let programs = Programs::new().compile("reuse", "reuse", &["-static"]);
    let program = format!("{FOLDER_IN_CELL}/reuse");
    for (mode, vcpus) in [("aspace", "1"), ("aspace", "2"), ("none", "1"), ("none", "2")] {
        let flags = ["--intra", mode, "--cpus", vcpus];
        let looked = in_cell(&programs, &flags, &[&program]).ok();
        assert_eq!(looked.text(), "0 of 60 saw something", "{mode}, {vcpus} vCPUs");
    }
}

/// That the program would see something: on this machine nobody unmaps for it.
#[test]
fn calls_change_mappings_that_are_not_sealed() {
    let programs = Programs::new().compile("special", "special", &["-static"]);
    let tried = finish(&mut Command::new(programs.path("special")), b"").exited(1);
    assert!(tried.text().contains("[vdso] munmap 0: changed"), "{}", tried.text());
}
