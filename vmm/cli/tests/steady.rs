//! What a guest kernel may still call once it runs programs: the list of each mode, as
//! it is written beside this file, and each of its rules and every other call tried in
//! the processes of a real cell.
//!
//! Needs gcc and the privilege to trace a cell's processes, beside what the others need.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::cell::Cell;
use common::emulator;
use exocell_cell::processes;
use exocell_cell::vmm::intra::Intra;
use exocell_cell::vmm::jail::filter::{Pin, Rule, steady};

/// What an XGates system may ask of its host, after the paper.
const CALLS_MAX: usize = 17;

/// The highest number of a call that a host may have, and some.
const NUMBERS: std::ops::Range<i64> = 0..600;

/// Calls that the host's kernel filters for nobody: uretprobe and uprobe, which end who
/// makes them elsewhere than in its own trampolines (kernel/seccomp.c).
const PAST_FILTERS: [i64; 2] = [335, 336];

const ENOSYS: i64 = -38;

/// For each rule, arguments by which the call does nothing: most fail, none with ENOSYS.
/// What is pinned is filled in.
const HARMLESS: &[(&str, [u64; 6])] = &[
    ("clock_gettime", [99, 0, 0, 0, 0, 0]),
    ("close", [NOWHERE, 0, 0, 0, 0, 0]),
    ("close_range", [9, 8, 0, 0, 0, 0]),
    ("dup2", [NOWHERE, NOWHERE, 0, 0, 0, 0]),
    ("dup3", [NOWHERE, 9, 0, 0, 0, 0]),
    ("epoll_wait", [NOWHERE, 0, 1, 0, 0, 0]),
    ("execveat", [NOWHERE, 0, 0, 0, 0, 0]),
    ("arch_prctl", [0, u64::MAX, 0, 0, 0, 0]),
    ("fallocate", [0, 0, u64::MAX, 1, 0, 0]),
    ("fcntl", [NOWHERE, 0, 0, 0, 0, 0]),
    ("futex", [1, 0, 0, 0, 0, 0]),
    ("getpid", [0; 6]),
    ("gettid", [0; 6]),
    ("ioctl", [NOWHERE, 0, 0, 0, 0, 0]),
    ("kill", [NOBODY, 0, 0, 0, 0, 0]),
    ("mmap", [1, 0, 0, 0, 0, 0]),
    ("mremap", [1, 0, 0, 0, 0, 0]),
    ("munmap", [1, 1, 0, 0, 0, 0]),
    ("pipe2", [8, 0, 0, 0, 0, 0]),
    ("pkey_mprotect", [1, 0, 0, 0, 0, 0]),
    ("prctl", [0, u64::MAX, u64::MAX, u64::MAX, u64::MAX, 0]),
    ("pwrite64", [NOWHERE, 0, 0, 0, 0, 0]),
    ("read", [NOWHERE, 0, 0, 0, 0, 0]),
    ("recvmsg", [NOWHERE, 0, 0, 0, 0, 0]),
    ("rt_sigaction", [9, 0, 0, 8, 0, 0]),
    ("rt_sigprocmask", [0, 0, 0, 8, 0, 0]),
    ("rt_tgsigqueueinfo", [NOBODY, NOBODY, 0, 8, 0, 0]),
    ("sched_setaffinity", [NOBODY, 0, 0, 0, 0, 0]),
    ("sched_yield", [0; 6]),
    ("seccomp", [0, 9, 0, 0, 0, 0]),
    ("sendmsg", [NOWHERE, 0, 0, 0, 0, 0]),
    ("sigaltstack", [8, 0, 0, 0, 0, 0]),
    ("tgkill", [NOBODY, NOBODY, 0, 0, 0, 0]),
    ("timer_create", [0, 0, 8, 0, 0, 0]),
    ("timer_settime", [NOBODY, 0, 0, 0, 0, 0]),
    ("waitid", [99, 0, 0, 0, 0, 0]),
    ("write", [NOWHERE, 0, 0, 0, 0, 0]),
];

/// Rules that only the cell itself can drive: who calls ends, waits or is elsewhere then.
const DRIVEN_BY_USE: [&str; 5] = ["clone", "exit", "exit_group", "rt_sigreturn", "wait4"];

/// No descriptor, and no process.
const NOWHERE: u64 = 0x7fff_ffff;
const NOBODY: u64 = 0x3fff_fff0;

#[test]
fn the_lists_are_those_that_are_written_down() {
    for intra in Intra::ALL {
        let (name, rules) = (intra.name(), steady::rules(intra, true));
        let calls: BTreeSet<_> = rules.iter().map(|rule| rule.number).collect();
        assert_eq!(calls.len(), rules.len(), "{name}: a call twice");
        let lines: Vec<String> = rules.iter().map(|rule| format!("{rule}\n")).collect();
        println!("--intra {name}: {} calls\n{}", calls.len(), lines.concat());
        let file = written(name);
        let known = fs::read_to_string(&file).unwrap();
        assert_eq!(known, lines.concat(), "{} is not what is in force", file.display());
    }
    let fused = |pager| steady::rules(Intra::None, pager).len();
    assert!(fused(true) <= CALLS_MAX && fused(false) < CALLS_MAX);
}

fn written(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/steady").join(format!("{name}.txt"))
}

#[test]
fn every_rule_holds_in_a_cell_and_nothing_else_does() {
    let injector = Injector::new();
    for intra in [Intra::None, Intra::Aspace] {
        injector.tries_all(intra);
    }
}

#[test]
fn every_rule_holds_with_protection_keys_too() {
    let injector = Injector::new();
    if emulator::keys_are_here() {
        injector.tries_all(Intra::Mpk);
    } else {
        emulator::again("every_rule_holds_with_protection_keys_too", &[&injector.program]);
    }
}

/// The guest kernel's first process, and where there are no stubs one more.
fn guest_processes(cell: &Cell, intra: Intra) -> Vec<i32> {
    let mut pids: Vec<i32> = processes::of_cell(cell.supervisor())
        .into_iter()
        .map(|process| process.pid)
        .filter(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.trim() == "linux"
        })
        .collect();
    pids.sort_unstable();
    pids.truncate(if intra == Intra::Aspace { 1 } else { 2 });
    assert!(!pids.is_empty(), "no guest kernel");
    pids
}

/// The descriptor of guest memory, by its name.
fn memory_descriptor(process: i32) -> u64 {
    let directory = format!("/proc/{process}/fd");
    let found = fs::read_dir(&directory).unwrap().flatten().find(|entry| {
        fs::read_link(entry.path())
            .is_ok_and(|to| to.to_string_lossy().contains("memfd:exocell-guest"))
    });
    found.unwrap().file_name().to_string_lossy().parse().unwrap()
}

/// A call, and whether it must reach the host.
#[derive(Debug)]
struct Case {
    name: &'static str,
    number: i64,
    /// An argument that is the descriptor of guest memory is [`MEMORY`].
    arguments: [u64; 6],
    passes: bool,
}

/// Tried in the place of guest memory's.
const DESCRIPTORS: [u64; 5] = [0, 1, 2, NOWHERE, u32::MAX as u64];
/// Stands for the descriptor of guest memory.
const MEMORY: u64 = u64::MAX - 1;

fn cases(rules: &[&'static Rule], has_image: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for number in NUMBERS.filter(|number| !PAST_FILTERS.contains(number)) {
        let Some(rule) = rules.iter().find(|rule| rule.number == number) else {
            cases.push(Case { name: "other", number, arguments: [0; 6], passes: false });
            continue;
        };
        let harmless = HARMLESS.iter().find(|(name, _)| *name == rule.name);
        let pins = flat(rule.pin);
        let mut fitting = harmless.map_or([0; 6], |(_, arguments)| *arguments);
        for pin in &pins {
            match pin {
                Pin::OneOf(argument, values) => fitting[usize::from(*argument)] = values[0],
                Pin::Memory(argument, _) | Pin::Mapped(argument, ..) => {
                    fitting[usize::from(*argument)] = MEMORY;
                }
                _ => {}
            }
        }
        let mut add = |arguments, passes| {
            cases.push(Case { name: rule.name, number, arguments, passes });
        };
        if harmless.is_some() {
            add(fitting, true);
        } else {
            assert!(DRIVEN_BY_USE.contains(&rule.name), "{} is not driven", rule.name);
        }
        for pin in pins {
            match pin {
                Pin::OneOf(argument, values) => {
                    let mut others = fitting;
                    if harmless.is_some() {
                        for value in values {
                            others[usize::from(argument)] = *value;
                            add(others, true);
                        }
                    }
                    for value in forbidden(values) {
                        others[usize::from(argument)] = value;
                        add(others, false);
                    }
                }
                Pin::Memory(argument, permitted) => {
                    for descriptor in DESCRIPTORS {
                        let mut others = fitting;
                        others[usize::from(argument)] = descriptor;
                        add(others, permitted.contains(&descriptor));
                    }
                }
                Pin::Mapped(argument, permitted, files) => {
                    // The image of these cells is one file.
                    let behind = files.iter().max().map(|last| last + 1);
                    for descriptor in DESCRIPTORS.iter().chain(files).chain(&behind) {
                        let mut others = fitting;
                        others[usize::from(argument)] = *descriptor;
                        let is_file = has_image && files.contains(descriptor);
                        add(others, is_file || permitted.contains(descriptor));
                    }
                }
                Pin::Without(argument, bits) => {
                    for bit in (0..u64::BITS).map(|bit| 1 << bit) {
                        let mut others = fitting;
                        others[usize::from(argument)] = bit;
                        add(others, bits & bit == 0);
                    }
                }
                Pin::None | Pin::All(_) => unreachable!("not flat"),
            }
        }
    }
    cases
}

/// The pins of a rule that must all hold.
fn flat(pin: Pin) -> Vec<Pin> {
    match pin {
        Pin::None => Vec::new(),
        Pin::All(pins) => pins.iter().copied().flat_map(flat).collect(),
        pin => vec![pin],
    }
}

/// Each single bit more or less than a permitted value, and none or all of them.
fn forbidden(values: &[u64]) -> Vec<u64> {
    let near = values.iter().flat_map(|value| (0..32).map(move |bit| value ^ (1 << bit)));
    let all: BTreeSet<u64> = near.chain([0, u64::from(u32::MAX)]).collect();
    all.into_iter().filter(|value| !values.contains(value)).collect()
}

/// Makes processes call what it is told (`steady/inject.c`).
struct Injector {
    program: PathBuf,
    _directory: tempfile::TempDir,
}

impl Injector {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        if let Some(program) = emulator::file_inside("inject") {
            return Self { program, _directory: directory };
        }
        let program = directory.path().join("inject");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/steady/inject.c");
        let output = Command::new("gcc")
            .args(["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-o"])
            .args([program.as_os_str(), source.as_ref()])
            .output()
            .expect("gcc is installed by scripts/setup");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { program, _directory: directory }
    }

    fn tries_all(&self, intra: Intra) {
        let flags = ["--intra", intra.name(), "--cpus", "2", "--pager", "credit"];
        let cell = Cell::idle(intra.name(), &flags);
        cell.shell("true & wait").ok();
        // With keys guests have copies of their image.
        let cases = cases(&steady::rules(intra, true), intra != Intra::Mpk);
        for process in guest_processes(&cell, intra) {
            let memory = memory_descriptor(process);
            let answers = self.calls(process, &cases, memory);
            let wrong: Vec<String> = cases
                .iter()
                .zip(&answers)
                .filter(|(case, answer)| case.passes == (**answer == ENOSYS))
                .map(|(case, answer)| format!("{}: {case:x?}: {answer}", case.name))
                .collect();
            assert!(wrong.is_empty(), "{intra}, process {process}:\n{}", wrong.join("\n"));
        }
        assert_eq!(cell.shell("echo on").ok().text(), "on", "{intra}: the guest goes on");
    }

    fn calls(&self, process: i32, cases: &[Case], memory: u64) -> Vec<i64> {
        let mut child = Command::new(&self.program)
            .arg(process.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        let text: String = cases.iter().map(|case| line(case, memory)).collect();
        let writer = std::thread::spawn(move || input.write_all(text.as_bytes()));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        assert!(output.status.success(), "{}", output.status);
        let answers = String::from_utf8(output.stdout).unwrap();
        let answers: Vec<i64> = answers.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(answers.len(), cases.len());
        answers
    }
}

fn line(case: &Case, memory: u64) -> String {
    let words = case.arguments.map(|value| if value == MEMORY { memory } else { value });
    let words: Vec<String> = words.iter().map(|word| format!("{word:x}")).collect();
    format!("{:x} {}\n", case.number, words.join(" "))
}
