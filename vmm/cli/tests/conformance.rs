//! What programs observe in a cell against what they observe on this machine.
//!
//! One program says facts, a line each, in both places. Lines that differ are
//! listed with their reason in `tests/guest/conform/differences`; a difference that
//! is not listed fails, and so does a listed one that is gone.

mod common;

use std::collections::BTreeMap;
use std::process::Command;

use common::compiled::{FOLDER_IN_CELL, Programs};
use common::{IMAGE, finish, run};

const DIFFERENCES: &str = include_str!("guest/conform/differences");
const PROGRAM: &str = "conform";

/// How often each line is said.
fn counted<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeMap<String, i32> {
    let mut counts = BTreeMap::new();
    for line in lines {
        *counts.entry(line.to_owned()).or_default() += 1;
    }
    counts
}

/// `- LINE` for what only `native` says and `+ LINE` for what only `cell` says,
/// as often as it is said more.
fn differences(native: &str, cell: &str) -> Vec<String> {
    let (native, cell) = (counted(native.lines()), counted(cell.lines()));
    let missing = |from: &BTreeMap<String, i32>, other: &BTreeMap<String, i32>, sign: char| {
        let mut lines = Vec::new();
        for (line, count) in from {
            let more = count - other.get(line).unwrap_or(&0);
            lines.extend((0..more).map(|_| format!("{sign} {line}")));
        }
        lines
    };
    [missing(&native, &cell, '-'), missing(&cell, &native, '+')].concat()
}

/// The sorted lines of a list, without its reasons.
fn listed(list: &str) -> Vec<String> {
    let lines = list.lines().filter(|line| line.starts_with(['-', '+']));
    let mut lines: Vec<String> = lines.map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn programs_observe_the_same_in_a_cell_but_for_listed_differences() {
    let programs = Programs::new().compile("conform", PROGRAM, &["-static"]).compile(
        "conform",
        "conform-pie",
        &["-static-pie"],
    );
    let native = finish(&mut Command::new(programs.path(PROGRAM)), b"").ok();
    let in_cell = format!("{FOLDER_IN_CELL}/{PROGRAM}");
    let volume = programs.volume();
    let cell = run(["run", "--rm", "--memory", "512m", "--volume", &volume, IMAGE, &in_cell]).ok();
    assert!(native.text().lines().count() > 200, "{}", native.text());
    let mut found = differences(native.text(), cell.text());
    found.sort();
    let known = listed(DIFFERENCES);
    let new: Vec<_> = found.iter().filter(|line| !known.contains(line)).collect();
    let gone: Vec<_> = known.iter().filter(|line| !found.contains(line)).collect();
    assert!(new.is_empty() && gone.is_empty(), "new: {new:#?}\ngone: {gone:#?}");
    assert_eq!(found, known);
}

#[test]
fn a_difference_is_found_on_either_side() {
    assert_eq!(differences("a\nb\nb\n", "a\nb\nc\n"), ["- b", "+ c"]);
    assert_eq!(differences("a\n", "a\n"), Vec::<String>::new());
    assert_eq!(listed("# why\n- b\n\n+ a\n"), ["+ a", "- b"]);
}
