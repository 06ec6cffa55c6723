//! What an ordinary user of a cell can do to others of it, and to its guest kernel, by calls
//! that anyone may make: nothing.

use std::process::Command;

use crate::common::cell::Cell;
use crate::common::compiled::{FOLDER_IN_CELL, Programs};
use crate::common::{IMAGE, finish, run};

const MODES: [&str; 2] = ["aspace", "none"];
const USER: &str = "1000:1000";

/// A case, and the flags of a cell in which it would succeed.
const CASES: [(&str, &[&str]); 6] = [
    ("page_of_anothers_file", &["--cpus", "2"]),
    ("page_read_ahead", &["--cpus", "1"]),
    ("munmap_beside_read", &["--cpus", "2"]),
    ("odd_stacks", &["--pager", "credit"]),
    ("odd_registers", &[]),
    ("no_access", &["--pager", "credit"]),
];

fn compiled() -> Programs {
    Programs::new().compile("ordinary", "ordinary", &["-static"])
}

/// Tries `case` in cells of their own, in both modes.
fn holds(case: &str) {
    let programs = compiled();
    let program = format!("{FOLDER_IN_CELL}/ordinary");
    let (_, flags) = CASES.iter().find(|(name, _)| *name == case).expect("a case");
    for mode in MODES {
        let volume = programs.volume();
        let fixed = ["run", "--rm", "--user", USER, "--intra", mode, "--volume", &volume];
        let script = format!("{program} {case}; echo alive");
        let tried = run([&fixed[..], flags, &[IMAGE, "sh", "-c", &script]].concat()).ok();
        assert_eq!(tried.text(), format!("{case} held \nalive"), "{mode}");
    }
}

#[test]
fn every_case_is_tried() {
    let listed = finish(Command::new(compiled().path("ordinary")).arg("list"), b"").ok();
    let known: Vec<&str> = CASES.iter().map(|(name, _)| *name).collect();
    assert_eq!(listed.text().lines().collect::<Vec<_>>(), known);
}

#[test]
fn a_file_of_anothers_stays_as_it_is_beside_threads_that_take_its_pages_away() {
    holds("page_of_anothers_file");
}

#[test]
fn a_file_of_anothers_stays_as_it_is_while_pages_are_read_ahead() {
    holds("page_read_ahead");
}

#[test]
fn page_tables_that_go_while_the_kernel_copies_are_not_the_cells_end() {
    holds("munmap_beside_read");
}

#[test]
fn a_stack_at_no_address_maps_nothing() {
    holds("odd_stacks");
}

#[test]
fn registers_that_there_are_not_are_refused() {
    holds("odd_registers");
}

#[test]
fn the_kernel_reads_nothing_that_its_program_may_not() {
    holds("no_access");
}

/// What a user had executed is not what others execute, where its page was.
#[test]
fn a_page_of_code_is_not_taken_for_that_of_another_file() {
    let programs = Programs::new().compile("copies", "copies", &["-static"]).compile(
        "judge",
        "judge",
        &["-static", "-nostdlib", "-no-pie", "-Wl,--build-id=none"],
    );
    for mode in MODES {
        let cell = Cell::idle("copies", &["--intra", mode, "--volume", &programs.volume()]);
        let judge = "/usr/local/bin/judge";
        cell.shell(&format!("install -m 4755 {FOLDER_IN_CELL}/judge {judge} && sync")).ok();
        let copies = [&*format!("{FOLDER_IN_CELL}/copies"), judge];
        let said = finish(&mut cell.exec(&["--user", USER], &copies), b"").ok();
        assert_eq!(said.text(), "denied!", "{mode}, by the user");
        assert_eq!(cell.shell(judge).ok().text(), "denied!", "{mode}, by root");
    }
}
