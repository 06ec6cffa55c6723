//! `exocell pool`: warm cells that runs take, and that end with their pool.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Stdio};

use serde_json::Value;

use crate::common::cell::{Cell, pid, ps};
use crate::common::{IMAGE, eventually, exocell, finish, run};

/// A pool of one cell, of a kind that no other test wants; killed when dropped.
struct Pool {
    child: Child,
    ids: Lines<BufReader<ChildStdout>>,
    processes: String,
}

impl Pool {
    #[track_caller]
    fn new(processes: u32) -> Self {
        let processes = processes.to_string();
        let mut command = exocell(["pool", "--size", "1", "--pids-limit", &processes, IMAGE]);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("exocell");
        let ids = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, ids, processes }
    }

    /// The next cell that the pool starts, once it waits.
    #[track_caller]
    fn next(&mut self) -> String {
        let id = self.ids.next().expect("the pool lives").expect("a line");
        eventually("the cell is warm", || {
            inspect(&id).is_some_and(|cell| cell["times"]["guest_ready_us"].as_u64() > Some(0))
        });
        id
    }

    /// `exocell run FLAGS IMAGE COMMAND`, of the pool's kind.
    #[track_caller]
    fn run(&self, flags: &[&str], command: &[&str]) -> crate::common::Finished {
        let kind = ["run", "--pids-limit", &self.processes];
        run([&kind[..], flags, &[IMAGE], command].concat())
    }

    fn end(&mut self) {
        // SIGKILL: it has no chance to clean up.
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Both fail only for a child that was waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn inspect(id: &str) -> Option<Value> {
    let found = run(["inspect", "--json", id]);
    (found.code == 0).then(|| found.one())
}

#[track_caller]
fn is_gone(id: &str, supervisor: i32) {
    eventually("the cell is gone", || {
        ps(&["-a"]).iter().all(|row| row["id"] != id)
            && !std::path::Path::new(&format!("/proc/{supervisor}")).exists()
    });
}

#[test]
fn a_run_takes_a_warm_cell_and_another_takes_its_place() {
    let mut pool = Pool::new(1111);
    let first = pool.next();
    // A cell's host name is the beginning of its id.
    let name = crate::common::unique("warm");
    let flags = ["--name", &name, "-e", "WORD=hello", "-w", "/usr"];
    let ended = pool.run(&flags, &["sh", "-c", "hostname; pwd; echo $WORD; cat; exit 7"]).exited(7);
    assert_eq!(ended.text().lines().collect::<Vec<_>>(), [&first[..12], "/usr", "hello"]);
    let cell = inspect(&name).expect("it has its record and its new name");
    assert_eq!((cell["id"].as_str(), cell["exit_code"].as_u64()), (Some(&*first), Some(7)));
    run(["rm", &name]).ok();
    let second = pool.next();
    assert_ne!(first, second);
    let script = "hostname; read x; echo got $x";
    let mut command =
        exocell(["run", "--rm", "-i", "--pids-limit", "1111", IMAGE, "sh", "-c", script]);
    let ended = finish(&mut command, b"something\n").ok();
    assert_eq!(ended.text(), format!("{}\ngot something", &second[..12]));
    assert!(inspect(&second).is_none(), "it was to be removed");
    // The deadline is the run's own.
    let third = pool.next();
    pool.run(&["--rm", "--timeout", "1s"], &["sleep", "1000"]).exited(137);
    assert!(inspect(&third).is_none());
    pool.next();
    pool.run(&["--rm"], &["no-such-program"]).exited(127);
}

#[test]
fn a_run_of_another_kind_leaves_the_pool_alone() {
    let mut pool = Pool::new(1112);
    let warm = pool.next();
    for flags in [&["--pids-limit", "1113"][..], &["-m", "300m"], &["--hostname", "own"]] {
        let kind =
            if flags.contains(&"--pids-limit") { &[][..] } else { &["--pids-limit", "1112"] };
        let ended = run([&["run", "--rm"], kind, flags, &[IMAGE, "hostname"]].concat()).ok();
        assert_ne!(ended.text(), &warm[..12], "{flags:?}");
    }
    // A cell without a program is not to be looked into.
    for verb in [&["exec"][..], &["pause"], &["kill", "-s", "TERM"]] {
        let command = if verb == ["exec"] { &["true"][..] } else { &[] };
        run([verb, &[&warm], command].concat()).exited(125);
    }
    // What it takes can be seen.
    assert_eq!(run(["stats", "--json", &warm]).ok().json()["id"], *warm);
    assert_eq!(pool.run(&["--rm"], &["hostname"]).ok().text(), &warm[..12]);
    let next = pool.next();
    run(["stop", &next]).ok();
    assert!(inspect(&next).is_none(), "it was stopped");
    let taken_by = [pool.next(), pool.run(&["--rm"], &["hostname"]).ok().text().to_owned()];
    assert_eq!(taken_by[0][..12], taken_by[1]);
}

#[test]
fn a_pool_that_is_killed_leaves_no_cell_but_those_that_were_taken() {
    let mut pool = Pool::new(1114);
    let taken = pool.next();
    let name = crate::common::unique("taken");
    pool.run(&["-d", "--name", &name], &["sleep", "infinity"]).ok();
    let taken_cell = Cell { name };
    assert_eq!(taken_cell.inspect()["id"], *taken);
    let warm = pool.next();
    let supervisor = pid(&inspect(&warm).expect("it waits"), "supervisor_pid");
    pool.end();
    is_gone(&warm, supervisor);
    assert_eq!(taken_cell.shell("echo alive").ok().text(), "alive");
    assert_eq!(taken_cell.state(), "running");
}

#[test]
fn what_cannot_be_warm_is_refused_with_what_to_leave_out() {
    let refused = |arguments: &[&str], word: &str| {
        run([&["pool"], arguments].concat()).exited(125).complains_of(&[word]);
    };
    refused(&["--volume", "/tmp:/x:ro", IMAGE], "folder");
    refused(&["--allow-net", "a.test:80", IMAGE], "network");
    refused(&["--hostname", "own", IMAGE], "host name");
    refused(&[IMAGE, "sh"], "program");
    refused(&["--rm", IMAGE], "--rm");
    refused(&["no/such:image"], "no/such");
}

#[test]
fn a_cell_that_was_warm_is_looked_after_as_its_run_says() {
    let mut pool = Pool::new(2991);
    let id = pool.next();
    let flags = ["-d", "--health-cmd", "echo $A", "--health-interval", "50ms", "-e", "A=b"];
    let taken = pool.run(&flags, &["sleep", "infinity"]).ok();
    assert_eq!(taken.text(), id);
    let health = || inspect(&id).map(|cell| cell["health"].clone()).unwrap_or_default();
    eventually("it is healthy", || health()["status"] == "healthy");
    assert_eq!(health()["log"][0]["output"], "b\n");
    finish(&mut exocell(["rm", "-f", &id]), b"");
}
