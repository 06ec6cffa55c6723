//! A detached cell that a test owns.

use std::process::Command;

use serde_json::Value;

use super::{Finished, IMAGE, LIMIT, Started, exocell, finish, run, unique};

/// A running cell, removed by force when dropped.
pub struct Cell {
    pub name: String,
}

impl Cell {
    /// `exocell run -d FLAGS IMAGE COMMAND`.
    #[track_caller]
    pub fn start(word: &str, flags: &[&str], command: &[&str]) -> Self {
        Self::start_as(word, flags, command, |_| {})
    }

    /// The same with an environment that `change` makes.
    #[track_caller]
    pub fn start_as(
        word: &str,
        flags: &[&str],
        command: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let cell = Self { name: unique(word) };
        let fixed = ["run", "-d", "--name", &cell.name];
        let mut run = exocell([&fixed[..], flags, &[IMAGE], command].concat());
        change(&mut run);
        finish(&mut run, b"").ok();
        cell
    }

    /// A cell that waits to be used.
    #[track_caller]
    pub fn idle(word: &str, flags: &[&str]) -> Self {
        Self::start(word, flags, &["sleep", "infinity"])
    }

    /// `exocell exec CELL sh -c SCRIPT`.
    #[track_caller]
    pub fn shell(&self, script: &str) -> Finished {
        run(["exec", &self.name, "sh", "-c", script])
    }

    /// `exocell exec FLAGS CELL COMMAND`, not yet started.
    pub fn exec(&self, flags: &[&str], command: &[&str]) -> Command {
        exocell([&["exec"], flags, &[&self.name], command].concat())
    }

    /// Twenty programs at once, each with an answer of its own.
    #[track_caller]
    pub fn answers_many_at_once(&self) {
        let started: Vec<Started> =
            (0..20).map(|n| Started::new(&mut self.exec(&[], &["echo", &n.to_string()]))).collect();
        for (n, one) in started.into_iter().enumerate() {
            assert_eq!(one.finish(LIMIT).expect("it ends").ok().text(), n.to_string());
        }
    }

    /// `exocell VERB ARGS CELL`.
    #[track_caller]
    pub fn verb(&self, verb: &[&str]) -> Finished {
        run([verb, &[&self.name]].concat())
    }

    #[track_caller]
    pub fn inspect(&self) -> Value {
        self.verb(&["inspect", "--json"]).ok().one()
    }

    #[track_caller]
    pub fn state(&self) -> String {
        self.inspect()["state"].as_str().expect("a state").to_owned()
    }

    #[track_caller]
    pub fn supervisor(&self) -> i32 {
        pid(&self.inspect(), "supervisor_pid")
    }

    /// `CELL:PATH`.
    pub fn path(&self, path: &str) -> String {
        format!("{}:{path}", self.name)
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        // A test may have removed it.
        finish(&mut exocell(["rm", "-f", &self.name]), b"");
    }
}

/// A pid in what `inspect` prints.
#[track_caller]
pub fn pid(inspected: &Value, field: &str) -> i32 {
    match inspected[field].as_i64() {
        Some(pid) => pid as i32,
        None => panic!("no {field} in {inspected}"),
    }
}

/// The cells of `exocell ps FLAGS --json`, each an object.
#[track_caller]
pub fn ps(flags: &[&str]) -> Vec<Value> {
    let listed = run([&["ps", "--json"], flags].concat()).ok();
    listed.text().lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

/// The row of `name` in `exocell ps -a`.
#[track_caller]
pub fn row(name: &str) -> Option<Value> {
    ps(&["-a"]).into_iter().find(|row| row["name"] == name)
}
