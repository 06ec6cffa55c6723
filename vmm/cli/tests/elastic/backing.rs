//! A host that does not back the Pager's memory: calls that are interrupted or
//! refused, and a control group at its limit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::cell::{Cell, pid};
use crate::common::host::{namespace, processes};
use crate::common::{IMAGE, LIMIT, Started, exocell, finish, text, unique, until};

const MIB: u64 = 1 << 20;
/// Takes 200 MiB. It makes few calls and is small: all of the host's calls are traced, so
/// those take long, and so does reading in again what went of a program's own pages.
const AT_ONCE: &str = "dd if=/dev/zero of=/dev/null ibs=1M obs=200M count=200 status=none";
/// The same where that is more than there is, so that nobody gets it in one piece.
const BY_PIECES: &str = "python3 -c 'x = [bytearray(1 << 20) for _ in range(200)]'";

/// The Pager's, each with all that it promises.
const MODES: [&str; 2] = ["eager", "credit"];

fn cell(word: &str, mode: &str) -> Cell {
    Cell::idle(word, &["--pager", mode, "--memory", "320m", "--intra", "aspace"])
}

#[track_caller]
fn figure(cell: &Cell, group: &[&str], name: &str) -> u64 {
    let stats = cell.verb(&["stats", "--json"]).ok().json();
    let found = group.iter().fold(&stats, |value, key| &value[key]);
    found[name].as_u64().unwrap_or_else(|| panic!("no {name} in {stats}"))
}

fn claim(cell: &Cell, name: &str) -> u64 {
    figure(cell, &["guest_claims", "pager"], name)
}

/// A program in `cell` that is about to take memory, once it is told to.
fn taker(cell: &Cell, word: &str, takes: &str) -> Started {
    let script = format!(": > /tmp/{word}; read line; {takes} && echo taken");
    let started = Started::new(&mut cell.exec(&["-i"], &["sh", "-c", &script]));
    cell.shell(&format!("until [ -e /tmp/{word} ]; do sleep 0.1; done")).ok();
    started
}

/// The host's answers to those calls of a cell's guest kernel that take memory from the
/// host and give it back. It has one vCPU and stubs: that runs on the process's first thread.
struct Answers {
    strace: Started,
}

impl Answers {
    /// `error`, to those calls that `which` names (strace(1), --inject).
    #[track_caller]
    fn begin(cell: &Cell, error: &str, which: &str) -> Self {
        let inside = namespace(pid(&cell.inspect(), "supervisor_pid")).expect("a pid namespace");
        let kernel = processes(&inside).get(1).copied().expect("a guest kernel");
        let inject = format!("inject=fallocate,pwrite64:error={error}:when={which}");
        let mut command = Command::new("strace");
        command.args(["-qq", "-o", "/dev/null", "-e", &inject, "-p", &kernel.to_string()]);
        let answers = Self { strace: Started::new(&mut command) };
        let traced = format!("TracerPid:\t{}", answers.strace.pid());
        let status = || fs::read_to_string(format!("/proc/{kernel}/status")).unwrap_or_default();
        assert!(until(LIMIT, || status().contains(&traced)), "{}", status());
        answers
    }

    /// From now on the host answers itself.
    fn end(self) {
        let pid = nix::unistd::Pid::from_raw(self.strace.pid());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("strace runs");
        assert!(self.strace.finish(LIMIT).is_some());
    }
}

#[test]
fn interrupted_calls_are_made_again() {
    MODES.into_iter().for_each(interrupted);
}

#[track_caller]
fn interrupted(mode: &str) {
    let cell = cell("interrupted", mode);
    let mut program = taker(&cell, "ready", AT_ONCE);
    let before = claim(&cell, "unbind_bytes");
    let answers = Answers::begin(&cell, "EINTR", "1+2");
    program.write(b"now\n");
    let ended = program.finish(LIMIT).expect("it ends").ok();
    assert!(ended.text().ends_with("taken"), "{}", ended.text());
    answers.end();
    assert_eq!(claim(&cell, "refused_count"), 0);
    assert!(claim(&cell, "unbind_bytes") - before > 200 * MIB);
    let held = figure(&cell, &["counters"], "memory_allocated_bytes");
    assert!(held < 100 * MIB, "{mode}: the host still holds {held} bytes");
}

/// With a credit nothing hangs on what the host says when a page is handed out, but it may
/// not take any back: the guest has them on, within its credit, until the host does.
#[test]
fn a_host_that_takes_nothing_back_costs_no_program() {
    let cell = cell("kept", "credit");
    let held = || figure(&cell, &["counters"], "memory_allocated_bytes");
    let mut program = taker(&cell, "ready", AT_ONCE);
    let answers = Answers::begin(&cell, "ENOMEM", "1+");
    program.write(b"now\n");
    program.finish(LIMIT).expect("it ends").ok();
    assert!(held() > 200 * MIB, "the host holds only {} bytes", held());
    let mut program = taker(&cell, "meanwhile", AT_ONCE);
    program.write(b"now\n");
    program.finish(LIMIT).expect("it ends").ok();
    answers.end();
    let mut program = taker(&cell, "again", AT_ONCE);
    program.write(b"now\n");
    program.finish(LIMIT).expect("it ends").ok();
    assert!(held() < 100 * MIB, "the host still holds {} bytes", held());
}

/// The memory file's host is full, or has no memory: whoever asks is ended by the
/// guest's own OOM killer, and the guest lives on, though it cannot give back either. It drops
/// files of its image meanwhile, of which it has copies here.
#[test]
fn a_host_that_refuses_costs_the_program_that_asks() {
    for error in ["ENOSPC", "ENOMEM"] {
        let flags = ["--pager", "eager", "--memory", "320m", "--intra", "aspace"];
        let waits = ["sleep", "infinity"];
        let cell = Cell::start_as("refused", &flags, &waits, |run| {
            run.env("EXOCELL_IMAGE_PAGES", "own");
        });
        let mut program = taker(&cell, "ready", AT_ONCE);
        let answers = Answers::begin(&cell, error, "1+");
        program.write(b"now\n");
        let ended = program.finish(LIMIT).expect("it ends");
        assert_eq!(ended.code, 137, "{error}: {}{}", ended.text(), ended.stderr);
        answers.end();
        assert!(claim(&cell, "refused_count") > 0);
        let console = cell.verb(&["logs", "--console"]).ok();
        assert!(console.text().contains("ut of memory: Killed"), "{error}: {}", console.text());
        // The host backs again, and takes back again.
        let mut again = taker(&cell, "again", AT_ONCE);
        again.write(b"now\n");
        assert!(again.finish(LIMIT).expect("it ends").ok().text().ends_with("taken"));
    }
}

/// A control group of the host that bounds memory; version 1 or 2, where this
/// machine lets us make one.
struct Group {
    folder: PathBuf,
}

impl Group {
    fn new(limit_bytes: u64) -> Option<Self> {
        let name = unique("backing");
        let versions =
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        versions.iter().find_map(|(root, limit)| {
            let group = Self { folder: Path::new(root).join(&name) };
            fs::create_dir(&group.folder).ok()?;
            fs::write(group.folder.join(limit), limit_bytes.to_string()).ok()?;
            Some(group)
        })
    }

    /// A cell all of which is in the group.
    #[track_caller]
    fn cell(&self, mode: &str, memory: &str) -> Cell {
        let cell = Cell { name: unique("grouped") };
        let words = ["run", "-d", "--name", &cell.name, "--pager", mode, "--memory", memory];
        let run = exocell([&words[..], &[IMAGE, "sleep", "infinity"]].concat());
        let mut inside = Command::new("sh");
        inside.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
        inside.arg(self.folder.join("cgroup.procs")).arg(run.get_program()).args(run.get_args());
        finish(&mut inside, b"").ok();
        let group = fs::read_to_string(format!("/proc/{}/cgroup", cell.supervisor())).expect("it");
        let name = text(&self.folder).rsplit('/').next().expect("a name");
        assert!(group.contains(name), "{group}");
        cell
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its last process may be on its way out.
        until(LIMIT, || fs::remove_dir(&self.folder).is_ok());
    }
}

#[test]
fn a_cell_within_its_control_group_keeps_to_its_own_limit() {
    let Some(group) = Group::new(320 * MIB) else {
        eprintln!("not looked at: this machine lets nobody make a control group for memory");
        return;
    };
    for mode in MODES {
        let cell = group.cell(mode, "128m");
        let mut program = taker(&cell, "ready", BY_PIECES);
        program.write(b"now\n");
        assert_eq!(program.finish(LIMIT).expect("it ends").code, 137, "{mode}");
        assert_eq!(cell.shell("echo alive").ok().text(), "alive", "{mode}");
    }
}

/// The host's own OOM killer is the last resort. Whom it takes of a cell that was given
/// less by its group than by its limit is its choice: the host process of the program
/// that asks, which costs that program, or the guest kernel, which is the cell's end.
/// Neighbours are left alone.
#[test]
fn a_control_group_at_its_limit_costs_its_own_cell_and_no_other() {
    let Some(group) = Group::new(160 * MIB) else {
        eprintln!("not looked at: this machine lets nobody make a control group for memory");
        return;
    };
    MODES.into_iter().for_each(|mode| costs_its_own_cell(&group, mode));
}

#[track_caller]
fn costs_its_own_cell(group: &Group, mode: &str) {
    let neighbour = cell("neighbour", mode);
    let cell = group.cell(mode, "512m");
    let mut program = taker(&cell, "ready", BY_PIECES);
    program.write(b"now\n");
    let ended = program.finish(LIMIT).expect("it ends");
    assert_ne!(ended.code, 0, "{}", ended.text());
    let is_over = || cell.state() == "exited" && cell.inspect()["exit_code"] == 137;
    let lives = || cell.shell("echo alive").text() == "alive";
    assert!(until(LIMIT, || is_over() || lives()), "{}", cell.inspect());
    assert_eq!(neighbour.shell("echo alive").ok().text(), "alive");
}
