//! Attacks of a guest program on the host process that runs its code. Each runs
//! in a cell of its own and must fail; the cell must live.

use std::process::Command;

use crate::common::compiled::{FAULTS, FOLDER_IN_CELL, Programs};
use crate::common::{IMAGE, finish, run};

const PROGRAM: &str = "attacks";
/// The attacks; all must fail.
const CASES: &[&str] = &[
    "jump_mmap_anonymous",
    "jump_mmap_memory",
    "jump_mremap",
    "far_jump_32",
    "forge_data",
    "forge_gate",
    "int80",
    "sysenter",
    "vsyscall",
    "remap_stub",
    "write_stub_code",
    "keep_cpu_mask",
    "keep_cpu_sigreturn",
    "keep_cpu_sigprocmask",
    "keep_cpu_bad_stack",
    "poison",
    "outlive_exit",
    "outlive_munmap",
];
/// Cases that succeed where nothing stands in their way.
const WORKING: &[&str] = &["jump_mmap_anonymous", "jump_mremap"];

fn compiled() -> Programs {
    Programs::new().compile("attacks", PROGRAM, &["-static", FAULTS])
}

#[test]
fn every_case_is_tried() {
    let listed = finish(Command::new(compiled().path(PROGRAM)).arg("list"), b"").ok();
    let mut cases: Vec<&str> = listed.text().lines().collect();
    let mut known = CASES.to_vec();
    cases.sort_unstable();
    known.sort_unstable();
    assert_eq!(cases, known);
}

#[test]
fn attacks_on_the_stub_fail_and_the_cell_lives() {
    let programs = compiled();
    let (volume, program) = (programs.volume(), format!("{FOLDER_IN_CELL}/{PROGRAM}"));
    for case in CASES {
        let script = format!("{program} {case}; echo alive");
        let fixed = ["run", "--rm", "--intra", "aspace", "--timeout", "60s", "--volume", &volume];
        let ended = run([&fixed[..], &[IMAGE, "sh", "-c", &script]].concat()).ok();
        let lines: Vec<&str> = ended.text().lines().collect();
        assert!(
            lines.first().is_some_and(|line| line.starts_with(&format!("{case} held"))),
            "{lines:?}"
        );
        assert_eq!(lines.last(), Some(&"alive"), "{case}: {lines:?}");
    }
}

/// On this machine, with a call instruction of its own: the attacks themselves work.
#[test]
fn attacks_succeed_where_nothing_holds_them() {
    let programs = compiled();
    for case in WORKING {
        let tried = finish(Command::new(programs.path(PROGRAM)).args([case, "own"]), b"").ok();
        assert!(tried.text().starts_with(&format!("{case} broken")), "{}", tried.text());
    }
    let spins = ["keep_cpu_sigreturn", "own"];
    let tried = finish(Command::new(programs.path(PROGRAM)).args(spins), b"").ok();
    assert!(!tried.text().contains("most 0 spins"), "{}", tried.text());
}
