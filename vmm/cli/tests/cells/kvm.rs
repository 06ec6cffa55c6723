//! `--platform kvm`: cells as virtual machines, on an emulated host that runs some. This host's own
//! KVM is used by no test: where the host is a virtual machine itself, it may be another thing than
//! it says.

use std::time::Duration;

use crate::common::cell::{Cell, pid, row};
use crate::common::{
    Finished, IMAGE, Started, emulator, eventually, exocell, finish, host, run, text, unique,
};

/// It tries much, and an emulated machine is slow.
const DOCTOR_LIMIT: Duration = Duration::from_secs(400);

const FIXED: [&str; 4] = ["--platform", "kvm", "--memory", "128m"];

#[test]
fn a_cell_is_a_virtual_machine() {
    if !emulator::is_inside() {
        return emulator::again_with_virtual_machines("kvm::a_cell_is_a_virtual_machine", &[]);
    }
    let doctor = Started::new(&mut exocell(["doctor"])).finish(DOCTOR_LIMIT).expect("it ends");
    assert!(doctor.text().contains("kvm with --platform kvm, or auto"), "{}", doctor.text());
    what_is_not_there_is_refused();
    a_program_runs_and_its_exit_code_comes();
    a_cell_has_its_devices();
    a_cell_ends_and_starts_again();
    killed_by_force_it_leaves_nothing();
}

/// Runs a command that starts a machine; once more where its guest was not ready within the minute
/// that a guest has: on a busy host an emulated one may take that long.
fn starts(words: &[&str]) -> Finished {
    let ended = run(words);
    if is_late(&ended) { run(words) } else { ended }
}

fn is_late(ended: &Finished) -> bool {
    // A stream that the host took later than the guest waits for (2 s: vsock(7)) is closed again.
    let words = ["it said nothing for", "closed the stream before it answered"];
    let is_late = words.iter().any(|words| ended.stderr.contains(words));
    if is_late {
        println!("once more: {}", ended.stderr);
    }
    is_late
}

/// A machine that waits to be used.
#[track_caller]
fn idle(word: &str, more: &[&str]) -> Cell {
    let start = || {
        let cell = Cell { name: unique(word) };
        let named = ["run", "-d", "--name", &cell.name];
        let ended = run([&named[..], &FIXED, more, &[IMAGE, "sleep", "infinity"]].concat());
        (cell, ended)
    };
    let (cell, ended) = start();
    let (cell, ended) = if is_late(&ended) { start() } else { (cell, ended) };
    ended.ok();
    cell
}

/// By its name, with what to do; nothing is started for it.
fn what_is_not_there_is_refused() {
    for (words, named) in [
        (["--pager", "credit"], "--pager off"),
        (["--intra", "none"], "--intra aspace"),
        (["--memory-guarantee", "32m"], "--memory-guarantee"),
        (["--secret", "KEY=value@example.com"], "--secret"),
    ] {
        let refused = run([&["run", "--rm"], &FIXED[..], &words, &[IMAGE, "true"]].concat());
        refused.exited(125).complains_of(&[words[0], "kvm", "para", named]);
    }
}

/// On what `auto` chooses: the emulated host runs guests.
fn a_program_runs_and_its_exit_code_comes() {
    let script = "echo hi; cat /proc/cmdline; exit 7";
    let auto = ["run", "--rm", "--platform", "auto", "--memory", "128m", IMAGE, "sh", "-c", script];
    let said = starts(&auto).exited(7);
    assert!(said.text().starts_with("hi\n"), "{}", said.text());
    assert!(said.text().contains("virtio_mmio.device="), "{}", said.text());
}

fn a_cell_has_its_devices() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("put"), "by the host").unwrap();
    let volume = format!("{}:/shared", text(folder.path()));
    let more = ["--cpus", "2", "--volume", &volume, "--allow-net", "example.com:443"];
    let cell = idle("machine", &more);
    assert_eq!(cell.inspect()["platform"], "kvm");
    assert_eq!(row(&cell.name).expect("a row")["platform"], "kvm");
    cell.shell("exit 3").exited(3);
    assert_eq!(cell.shell("cat /sys/devices/system/cpu/online").ok().text(), "0-1");
    // The image's disk, and the private one on which changes are.
    assert_eq!(cell.shell("echo more > /data/kept; cat /data/kept").ok().text(), "more");
    let script = "cat /shared/put; echo by the guest > /shared/answer";
    assert_eq!(cell.shell(script).ok().text(), "by the host");
    assert_eq!(std::fs::read_to_string(folder.path().join("answer")).unwrap(), "by the guest\n");
    // Nobody may look this name up, which is an answer.
    cell.shell("getent hosts elsewhere.example").exited(2);
    let stats = cell.verb(&["stats", "--json"]).ok().json();
    let network = &stats["counters"]["devices"]["network"];
    for counter in ["sent_bytes", "received_bytes"] {
        assert!(network[counter].as_u64().is_some_and(|bytes| bytes > 0), "{stats}");
    }
    let malformed = stats["counters"]["devices"].as_object().expect("devices").values();
    for (what, count) in malformed.flat_map(|device| device.as_object().expect("counters")) {
        let is_wrong = what.contains("fault") || what.contains("malformed");
        assert!(!is_wrong || count == 0, "{stats}");
    }
    // Its machine stands still, and goes on.
    cell.verb(&["pause"]).ok();
    assert!(host::is_stopped(pid(&cell.inspect(), "guest_kernel_pid")));
    cell.verb(&["unpause"]).ok();
    assert_eq!(cell.shell("echo on").ok().text(), "on");
    // What its kernel has was fixed when it was made.
    run(["update", "--memory", "64m", &cell.name]).exited(125).complains_of(&["--pager"]);
}

fn a_cell_ends_and_starts_again() {
    let cell = idle("again", &[]);
    cell.shell("echo more > /data/kept").ok();
    cell.verb(&["stop", "-t", "1"]).ok();
    assert_eq!(cell.state(), "exited");
    starts(&["start", &cell.name]).ok();
    assert_eq!(cell.inspect()["platform"], "kvm");
    assert_eq!(cell.shell("cat /data/kept").ok().text(), "more");
}

fn killed_by_force_it_leaves_nothing() {
    for victim in ["supervisor_pid", "guest_kernel_pid"] {
        let cell = idle("killed", &[]);
        let told = cell.inspect();
        let namespace = host::namespace(pid(&told, "supervisor_pid")).expect("a namespace");
        let files = host::nameless_files(&host::processes(&namespace));
        assert!(!files.is_empty());
        host::kill(pid(&told, victim));
        eventually("its processes are gone", || host::processes(&namespace).is_empty());
        let held = host::all_nameless_files();
        assert!(files.intersection(&held).next().is_none(), "files are still held");
        assert_eq!(cell.state(), "exited");
        finish(&mut exocell(["rm", &cell.name]), b"").ok();
    }
}

#[test]
fn a_platform_that_is_none_is_refused_with_those_that_are() {
    let refused = run(["run", "--rm", "--platform", "xen", IMAGE, "true"]);
    refused.exited(125).complains_of(&["--platform xen", "para", "kvm", "auto"]);
    let module = run(["run", "--rm", "--platform", "auto", "module.wasm"]);
    module.exited(125).complains_of(&["isolate", "--platform"]);
}

/// By default, and by `auto` where a cell asks for what only that has.
#[test]
fn cells_run_on_para_unless_they_are_asked_otherwise() {
    let cell = Cell::idle("para", &[]);
    assert_eq!(cell.inspect()["platform"], "para");
    assert_eq!(row(&cell.name).expect("a row")["platform"], "para");
    let auto = Cell::idle("auto", &["--platform", "auto", "--pager", "eager"]);
    assert_eq!(auto.inspect()["platform"], "para");
}
