//! Every command in every state of a cell: what it does there, and what it says.

use std::process::Child;

use serde_json::Value;

use crate::common::cell::Cell;
use crate::common::guest::{PrivateRoot, TINY};
use crate::common::{IMAGE, Started, eventually, exocell, run, unique};

/// A kernel that never says a word, and does not end.
const NEVER_UP: &str = "#include <unistd.h>\nint main(void) { for (;;) pause(); }";

/// Commands that change nothing, and what comes of each in the states that [`Row`] has.
struct Row {
    command: &'static [&'static str],
    booting: (i32, &'static str),
    running: (i32, &'static str),
    paused: (i32, &'static str),
    exited: (i32, &'static str),
}

const OK: (i32, &str) = (0, "");
const STARTING: (i32, &str) = (125, "still starting");
const PAUSED: (i32, &str) = (125, "paused");
const ENDED: (i32, &str) = (125, "must be running");

const ROWS: [Row; 8] = [
    Row { command: &["inspect", "CELL"], booting: OK, running: OK, paused: OK, exited: OK },
    Row { command: &["logs", "CELL"], booting: OK, running: OK, paused: OK, exited: OK },
    Row {
        command: &["exec", "CELL", "true"],
        booting: STARTING,
        running: OK,
        paused: PAUSED,
        exited: ENDED,
    },
    Row {
        command: &["cp", "CELL:/etc/passwd", "-"],
        booting: STARTING,
        running: OK,
        paused: PAUSED,
        exited: OK,
    },
    Row { command: &["stats", "CELL"], booting: STARTING, running: OK, paused: OK, exited: ENDED },
    Row {
        command: &["unpause", "CELL"],
        booting: STARTING,
        running: (125, "not paused"),
        paused: OK,
        exited: ENDED,
    },
    Row {
        command: &["kill", "-s", "URG", "CELL"],
        booting: STARTING,
        running: OK,
        paused: OK,
        exited: ENDED,
    },
    Row {
        command: &["update", "--deny-net", "x:1", "CELL"],
        booting: STARTING,
        running: (125, "no network"),
        paused: (125, "no network"),
        exited: ENDED,
    },
];

fn check(
    state: &str,
    name: &str,
    (code, words): (i32, &str),
    command: &[&str],
    run: impl Fn(&[String]) -> crate::common::Finished,
) {
    let args: Vec<String> = command.iter().map(|word| word.replace("CELL", name)).collect();
    let done = run(&args);
    assert_eq!(done.code, code, "{state}: {args:?}: {}", done.stderr);
    assert!(done.stderr.contains(words), "{state}: {args:?}: {}", done.stderr);
}

fn reason(told: &Value) -> &str {
    told["reason"].as_str().unwrap_or_default()
}

#[test]
fn a_cell_that_never_comes_up_is_told_of_and_ended() {
    let root = PrivateRoot::with_kernel(NEVER_UP);
    let told = || root.run(["inspect", "--json", "never"]).ok().one();
    let begin = || {
        let mut started = Started::new(&mut root.exocell(["run", "--name", "never", TINY, "true"]));
        started.close_stdin();
        eventually("the kernel runs", || {
            let shown = root.run(["inspect", "--json", "never"]);
            shown.code == 0 && shown.one()["guest_kernel_pid"].as_i64().is_some()
        });
        started
    };
    let started = begin();
    for row in &ROWS {
        check("booting", "never", row.booting, row.command, |args| root.run(args));
    }
    root.run(["stop", "never"]).ok();
    assert_eq!(told()["state"], "exited");
    assert_eq!(reason(&told()), "stopped before it was ready");
    let ended = started.finish(crate::common::LIMIT).expect("its command ends").exited(137);
    assert!(ended.stderr.contains("stopped before it was ready"), "{}", ended.stderr);
    root.run(["rm", "never"]).ok();
    let started = begin();
    root.run(["rm", "-f", "never"]).ok();
    started.finish(crate::common::LIMIT).expect("its command ends");
    root.holds_no_cells();
}

#[test]
fn a_guest_kernel_that_ends_at_boot_is_recorded_as_that() {
    let says = r#"#include <stdio.h>
#include <signal.h>
int main(void) {
    fputs("first\n\033]0;owned\007\033[2J \xc2\x9b" "31m\xe2\x80\xae exocell: all is well\n", stderr);
    LAST
}"#;
    let ends =
        [("return 3;", "exited with status 3"), ("raise(SIGABRT);", "was killed by SIGABRT")];
    for (last, how) in ends {
        let root = PrivateRoot::with_kernel(&says.replace("LAST", last));
        for flags in [&["run", "--name", "dead"][..], &["run", "-d", "--name", "dead"]] {
            let ended = root.run([flags, &[TINY, "true"]].concat()).exited(125);
            let shown =
                ["did not boot", how, "\\u001b]0;owned\\u0007", "\\u009b31m\\u202e exocell: all"];
            assert!(!ended.stderr.contains(['\x1b', '\u{9b}', '\u{202e}']));
            ended.complains_of(&shown);
            let told = root.run(["inspect", "--json", "dead"]).ok();
            assert!(!told.text().contains(['\x1b', '\u{9b}', '\u{202e}', '\x07']));
            let told = told.one();
            assert_eq!((&told["state"], &told["exit_code"]), (&"exited".into(), &125.into()));
            shown.iter().for_each(|word| assert!(reason(&told).contains(word), "{told}"));
            let console = root.run(["logs", "--console", "dead"]).ok();
            assert!(console.text().contains("\\u001b[2J"), "{}", console.text());
            assert!(!console.text().contains(['\x1b', '\u{9b}', '\u{202e}', '\x07']));
            root.run(["rm", "dead"]).ok();
        }
    }
}

/// The image has no such directory, and no place to make one.
#[test]
fn what_init_refuses_to_set_up_is_told_in_its_own_words() {
    let name = unique("refused");
    let _guard = Cell { name: name.clone() };
    let volume = format!("{}:/not/there:ro", env!("CARGO_MANIFEST_DIR"));
    let flags = ["run", "--name", &name, "--read-only", "-v", &volume, IMAGE, "true"];
    let words = ["the image has no directory /not/there", "read-only"];
    run(flags).exited(125).complains_of(&words);
    let told = run(["inspect", "--json", &name]).ok().one();
    words.iter().for_each(|word| assert!(reason(&told).contains(word), "{told}"));
}

#[test]
fn each_command_says_what_it_does_in_each_state() {
    let cell = Cell::idle("states", &[]);
    for row in &ROWS {
        check("running", &cell.name, row.running, row.command, |args| run(args));
    }
    for row in &ROWS {
        // What lets it go on comes last in its own way: it is paused anew each time.
        let _ = cell.verb(&["pause"]);
        check("paused", &cell.name, row.paused, row.command, |args| run(args));
    }
    let _ = cell.verb(&["pause"]);
    cell.verb(&["stop", "-t", "1"]).ok();
    assert_eq!(cell.state(), "exited");
    for row in &ROWS {
        check("exited", &cell.name, row.exited, row.command, |args| run(args));
    }
    cell.verb(&["stop"]).ok();
    assert_eq!(cell.verb(&["wait"]).ok().text().parse::<u8>().ok(), Some(143));
    cell.verb(&["rm"]).ok();
    cell.verb(&["stop"]).exited(125).complains_of(&["no such cell"]);
}

#[test]
fn a_second_stop_shortens_the_first_ones_grace() {
    let script = "trap '' TERM; touch /tmp/ready; while :; do sleep 1; done";
    let cell = Cell::start("stopping", &[], &["sh", "-c", script]);
    eventually("it ignores the signal", || cell.shell("test -e /tmp/ready").code == 0);
    let mut slow = Started::new(&mut exocell(["stop", "-t", "3600", &cell.name]));
    slow.close_stdin();
    cell.verb(&["stop", "-t", "0"]).ok();
    slow.finish(crate::common::LIMIT).expect("both are done").ok();
    assert_eq!(reason(&cell.inspect()), "stopped");
}

/// A pool of one cell; killed when dropped.
struct Pool(Child);

impl Drop for Pool {
    fn drop(&mut self) {
        // Both fail only for a child that was waited for already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_warm_cell_can_be_stopped_too() {
    let mut pool = exocell(["pool", "--size", "1", "--pids-limit", "611", IMAGE]);
    let mut child = pool.stdout(std::process::Stdio::piped()).spawn().expect("exocell");
    let mut ids = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
    let _pool = Pool(child);
    let mut id = String::new();
    std::io::BufRead::read_line(&mut ids, &mut id).expect("a cell");
    let id = id.trim();
    run(["stop", id]).ok();
    eventually("it is gone or ended", || {
        let told = run(["inspect", "--json", id]);
        told.code == 125 || told.one()["state"] == "exited"
    });
}
