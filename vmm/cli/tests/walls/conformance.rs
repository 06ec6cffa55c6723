//! What programs observe in a cell against what they observe on this machine.
//!
//! One program says facts, a line each, in both places. Lines that differ are
//! listed with their reason in `tests/guest/conform/differences`, those of `--intra mpk`
//! beside it; a difference that is not listed fails, and so does a listed one that is gone.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::common::compiled::{FOLDER_IN_CELL, Programs};
use crate::common::emulator::{self, FILES_INSIDE};
use crate::common::{IMAGE, finish, run};

const DIFFERENCES: &str = include_str!("../guest/conform/differences");
const WITH_KEYS: &str = include_str!("../guest/conform/differences.mpk");
const PROGRAM: &str = "conform";
const PROGRAM_PIE: &str = "conform-pie";

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

fn compiled() -> Programs {
    let programs = Programs::new().compile("conform", PROGRAM, &["-static"]);
    programs.compile("conform", PROGRAM_PIE, &["-static-pie"])
}

/// Compares what `program` says on this machine with what it says in a cell that has its
/// folder as `volume`.
#[track_caller]
fn differ_as_listed(program: &Path, volume: &str, flags: &[&str], mut known: Vec<String>) {
    let native = finish(&mut Command::new(program), b"").ok();
    let in_cell = format!("{FOLDER_IN_CELL}/{PROGRAM}");
    // Natively it has every capability.
    let fixed = ["run", "--rm", "--privileged", "--memory", "512m", "--volume", volume];
    let cell = run([&fixed, flags, &[IMAGE, &in_cell]].concat()).ok();
    assert!(native.text().lines().count() > 200, "{}", native.text());
    let mut found = differences(native.text(), cell.text());
    found.sort();
    known.sort();
    let new: Vec<_> = found.iter().filter(|line| !known.contains(line)).collect();
    let gone: Vec<_> = known.iter().filter(|line| !found.contains(line)).collect();
    assert!(new.is_empty() && gone.is_empty(), "new: {new:#?}\ngone: {gone:#?}");
    assert_eq!(found, known);
}

#[test]
fn programs_observe_the_same_in_a_cell_but_for_listed_differences() {
    let programs = compiled();
    for mode in ["aspace", "none"] {
        let flags = ["--intra", mode];
        let program = programs.path(PROGRAM);
        differ_as_listed(&program, &programs.volume(), &flags, listed(DIFFERENCES));
    }
}

#[test]
fn with_protection_keys_few_more_differ() {
    let known = [listed(DIFFERENCES), listed(WITH_KEYS)].concat();
    let flags = ["--intra", "mpk"];
    if let Some(program) = emulator::file_inside(PROGRAM) {
        let volume = format!("{FILES_INSIDE}:{FOLDER_IN_CELL}:ro");
        return differ_as_listed(&program, &volume, &flags, known);
    }
    let programs = compiled();
    if emulator::keys_are_here() {
        return differ_as_listed(&programs.path(PROGRAM), &programs.volume(), &flags, known);
    }
    let files = [PROGRAM, PROGRAM_PIE].map(|name| programs.path(name));
    emulator::again("conformance::with_protection_keys_few_more_differ", &[&files[0], &files[1]]);
}

#[test]
fn a_difference_is_found_on_either_side() {
    assert_eq!(differences("a\nb\nb\n", "a\nb\nc\n"), ["- b", "+ c"]);
    assert_eq!(differences("a\n", "a\n"), Vec::<String>::new());
    assert_eq!(listed("# why\n- b\n\n+ a\n"), ["+ a", "- b"]);
}
