//! Those who follow a program, and input that it does not read, cannot hold it
//! or its cell up.

use std::io::{Read, Write};
use std::process::{Child, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::cell::{Cell, row};
use crate::common::{IMAGE, LIMIT, Started, eventually, exocell, run, unique};

/// `exocell run -i IMAGE sleep`, whose input is jammed.
fn jammed(name: &str) -> Started {
    let mut command =
        exocell(["run", "-i", "--name", name, IMAGE, "sh", "-c", "echo ready; exec sleep 1000"]);
    let mut started = Started::new(&mut command);
    let mut stdin = started.child.stdin.take().expect("a pipe");
    std::thread::spawn(move || while stdin.write_all(&[b'x'; 64 << 10]).is_ok() {});
    eventually("it runs", || row(name).is_some_and(|row| row["state"] == "running"));
    eventually("its program runs", || run(["logs", name]).text() == "ready");
    // What fills up on the way: pipes, sockets, the guest's queue.
    let sent = || {
        let io = std::fs::read_to_string(format!("/proc/{}/io", started.child.id()));
        io.expect("its counters").lines().next().expect("rchar").to_owned()
    };
    eventually("its input is jammed", || {
        let before = sent();
        std::thread::sleep(std::time::Duration::from_millis(500));
        before == sent()
    });
    started
}

#[test]
fn a_program_that_does_not_read_its_input_is_stopped_in_order() {
    let cell = Cell { name: unique("jam") };
    let started = jammed(&cell.name);
    cell.verb(&["stop", "--time", "1"]).ok();
    let ended = started.finish(LIMIT).expect("it ends").exited(143);
    assert!(!ended.stderr.contains("ended early"), "{}", ended.stderr);
    let told = cell.inspect();
    assert_eq!(told["exit_code"], 143, "SIGTERM reached it: {told}");
}

#[test]
fn signals_pass_input_that_is_not_read() {
    let cell = Cell { name: unique("jam") };
    let started = jammed(&cell.name);
    kill(Pid::from_raw(started.pid()), Signal::SIGTERM).unwrap();
    started.finish(LIMIT).expect("it ends").exited(143);
}

/// `exocell logs -f CELL` that nobody reads.
fn stalled(cell: &Cell) -> Child {
    let mut command = exocell(["logs", "-f", &cell.name]);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("exocell");
    let mut first = [0; 6];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut first).expect("it follows");
    assert_eq!(&first, b"ready\n");
    child
}

#[test]
fn a_follower_that_stops_reading_is_cut_off_and_told_so() {
    let script = "echo ready; until test -e /tmp/go; do sleep 0.05; done; \
                  head -c 32000000 /dev/zero; echo end; touch /tmp/written; exec sleep 1000";
    let cell = Cell::start("slow", &[], &["sh", "-c", script]);
    let mut follower = stalled(&cell);
    cell.shell("touch /tmp/go").ok();
    eventually("the program goes on", || cell.shell("test -e /tmp/written").code == 0);

    let (mut seen, mut told) = (Vec::new(), String::new());
    follower.stdout.take().expect("a pipe").read_to_end(&mut seen).expect("its output");
    follower.stderr.take().expect("a pipe").read_to_string(&mut told).expect("its complaint");
    assert_eq!(follower.wait().expect("its end").code(), Some(125));
    assert!(told.contains("fell 4 MiB behind"), "{told}");
    assert!(seen.len() < 32_000_000, "it got all of {} bytes", seen.len());
    let logged = cell.verb(&["logs"]).ok().stdout;
    assert!(logged.ends_with(b"end\n"), "the log is whole up to its bound");
}

#[test]
fn a_follower_that_reads_gets_everything() {
    let script = "echo ready; until test -e /tmp/go; do sleep 0.05; done; \
                  head -c 32000000 /dev/zero; echo end";
    let cell = Cell::start("quick", &[], &["sh", "-c", script]);
    let follower = Started::new(&mut exocell(["logs", "-f", &cell.name]));
    eventually("it follows", || cell.verb(&["logs"]).text() == "ready");
    std::thread::sleep(std::time::Duration::from_millis(500));
    cell.shell("touch /tmp/go").ok();
    let heard = follower.finish(LIMIT).expect("it ends").ok().stdout;
    assert_eq!(heard.len(), "ready\n".len() + 32_000_000 + "end\n".len());
}
