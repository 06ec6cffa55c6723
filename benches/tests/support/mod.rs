//! Cells for tests, through the command as its users call it.

pub mod trace;

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const IMAGE: &str = "exocell/base:latest";

/// The program that `make test` names.
pub fn program() -> String {
    std::env::var("EXOCELL_TEST_BIN").expect("EXOCELL_TEST_BIN names no exocell; run: make test")
}

/// Runs one subcommand, which must succeed; its output.
pub fn exocell(arguments: &[&str]) -> String {
    let output = Command::new(program()).args(arguments).stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "exocell {arguments:?}: {}: {stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Runs `module` with `folder` and some input, its host system calls going to
/// `log`; what it writes.
pub fn traced_isolate(log: &Path, folder: &Path, module: &str) -> String {
    let volume = format!("{}:/data", folder.display());
    let mut tracer = strace(log)
        .args([&program(), "run", "--rm", "-i", "-v", &volume, "--timeout", "5m", module])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("strace is installed by scripts/setup");
    tracer.stdin.take().unwrap().write_all(b"some input\n").unwrap();
    let output = tracer.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

fn strace(log: &Path) -> Command {
    let mut command = Command::new("strace");
    // It looks through all processes for each pid in a notification; not so raw.
    command.args(["-f", "-Y", "-qq", "-e", "signal=none", "-e", "raw=ioctl", "-o"]).arg(log);
    command
}

/// A cell that sleeps; removed with its owner.
pub struct Cell {
    name: String,
    /// The `strace` that follows it.
    tracer: Option<Child>,
}

impl Cell {
    /// A cell in the background.
    pub fn started(options: &[&str]) -> Self {
        let cell = Self { name: new_name(), tracer: None };
        exocell(
            &[&["run", "--detach", "--name", &cell.name], options, &[IMAGE, "sleep", "1000"]]
                .concat(),
        );
        cell
    }

    /// An isolate in the background.
    pub fn of_module(module: &Path, options: &[&str]) -> Self {
        let cell = Self { name: new_name(), tracer: None };
        let module = module.to_str().unwrap();
        exocell(&[&["run", "--detach", "--name", &cell.name], options, &[module]].concat());
        cell
    }

    /// A cell whose every host system call goes to `log`.
    pub fn traced(log: &Path, options: &[&str]) -> Self {
        let name = new_name();
        let program = program();
        let words =
            [&[&program, "run", "--name", &name], options, &[IMAGE, "sleep", "1000"]].concat();
        let tracer = strace(log)
            .args(words)
            .stdin(Stdio::null())
            .spawn()
            .expect("strace is installed by scripts/setup");
        let cell = Self { name, tracer: Some(tracer) };
        cell.wait_running();
        cell
    }

    fn wait_running(&self) {
        let until = Instant::now() + Duration::from_secs(120);
        while !exocell(&["ps", "--json"]).lines().any(|row| {
            row.contains(&format!("\"name\":\"{}\"", self.name)) && row.contains("\"running\"")
        }) {
            assert!(Instant::now() < until, "the traced cell does not start");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn supervisor_pid(&self) -> i32 {
        let inspected = exocell(&["inspect", "--json", &self.name]);
        let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
        inspected[0]["supervisor_pid"].as_i64().and_then(|pid| pid.try_into().ok()).unwrap()
    }

    pub fn exec(&self, options: &[&str], command: &[&str]) -> String {
        exocell(&[&["exec"], options, &[self.name()], command].concat())
    }

    /// Stops the cell and waits for its tracer.
    pub fn end(mut self) {
        exocell(&["stop", "--time", "1", &self.name]);
        if let Some(mut tracer) = self.tracer.take() {
            tracer.wait().unwrap();
        }
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        let words = ["rm", "--force", &self.name];
        let _ = Command::new(program()).args(words).stdout(Stdio::null()).status();
        if let Some(mut tracer) = self.tracer.take() {
            let _ = tracer.wait();
        }
    }
}

fn new_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}
