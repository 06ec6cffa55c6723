//! Threads of one guest process on several vCPUs: when a change of the address
//! space has returned, none of them sees what was there before.

use std::process::Command;

use crate::common::compiled::{FOLDER_IN_CELL, Programs};
use crate::common::{IMAGE, finish, run};

const PROGRAM: &str = "shootdown";
/// Seconds for each case, and threads: one changes, the others look.
const ARGUMENTS: [&str; 2] = ["1", "3"];
const MODES: [&str; 2] = ["aspace", "none"];
const VCPUS: [&str; 3] = ["1", "2", "4"];
const CASES: [&str; 6] = ["replace", "munmap", "mprotect", "dontneed", "mremap", "fork"];

/// Asserts that each line `CASE ROUNDS USES STALE` tells of work and of nothing stale.
#[track_caller]
fn nothing_is_stale(place: &str, report: &str) {
    let lines: Vec<Vec<&str>> = report.lines().map(|line| line.split(' ').collect()).collect();
    let names: Vec<&str> = lines.iter().filter_map(|words| words.first().copied()).collect();
    assert_eq!(names, CASES, "{place}: {report}");
    for words in lines {
        let numbers: Vec<u64> = words[1..].iter().map(|word| word.parse().unwrap()).collect();
        let [rounds, uses, stale] = numbers[..] else { panic!("{place}: {words:?}") };
        assert!(rounds > 0 && uses > 0, "{place}: nothing was tried: {words:?}");
        assert_eq!(stale, 0, "{place}: {words:?}");
    }
}

fn compiled() -> Programs {
    Programs::new().compile("shootdown", PROGRAM, &["-static"])
}

#[test]
fn no_thread_sees_a_mapping_that_is_gone() {
    let programs = compiled();
    let (volume, program) = (programs.volume(), format!("{FOLDER_IN_CELL}/{PROGRAM}"));
    for (intra, vcpus) in MODES.iter().flat_map(|mode| VCPUS.map(|count| (mode, count))) {
        let fixed = ["run", "--rm", "--intra", intra, "--cpus", vcpus, "--volume", &volume];
        let ended = run([&fixed[..], &[IMAGE, &program], &ARGUMENTS].concat()).ok();
        nothing_is_stale(&format!("{intra}, {vcpus} vCPUs"), ended.text());
    }
}

#[test]
fn the_program_finds_nothing_stale_on_this_machine() {
    let ended = finish(Command::new(compiled().path(PROGRAM)).args(ARGUMENTS), b"").ok();
    nothing_is_stale("this machine", ended.text());
}

#[test]
fn a_change_that_is_not_made_is_seen_as_stale() {
    let words = [&ARGUMENTS[..], &["lazy"]].concat();
    let ended = finish(Command::new(compiled().path(PROGRAM)).args(words), b"").ok();
    for case in ["replace", "munmap", "mprotect", "mremap"] {
        let line = ended.text().lines().find(|line| line.starts_with(case)).unwrap_or_default();
        assert!(!line.is_empty() && !line.ends_with(" 0"), "{case}: {}", ended.text());
    }
}
