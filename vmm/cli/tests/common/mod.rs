//! What the end-to-end tests share: the installed command, state roots, and
//! processes that cannot outlive a test.
#![allow(dead_code)] // each test executable uses its part

pub mod cell;
pub mod compiled;
pub mod containerd;
pub mod cri;
pub mod docker;
pub mod e2b;
pub mod emulator;
pub mod guest;
pub mod host;
pub mod instance;
pub mod lan;
pub mod pip;
pub mod pty;
pub mod registry;
pub mod servers;
pub mod small;
pub mod socket_modules;
pub mod tls;
pub mod unix;

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The image of `make base-image`.
pub const IMAGE: &str = "exocell/base:latest";
/// Nothing a test starts may take longer, on a machine that is busy too.
pub const LIMIT: Duration = Duration::from_secs(90);

/// A variable that `make test` sets.
pub fn given(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(value) if !value.is_empty() => value.into(),
        _ => panic!("{variable} is not set: run these tests with `make test`"),
    }
}

/// The command as it was built.
pub fn program() -> PathBuf {
    given("EXOCELL_TEST_BIN")
}

/// The command on the state root of this machine: `exocell ARGS`.
pub fn exocell<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program());
    command.args(args);
    command
}

/// Runs `exocell ARGS` to its end.
pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Finished {
    finish(&mut exocell(args), b"")
}

/// Runs `exocell run --rm FLAGS IMAGE sh -c SCRIPT`.
pub fn shell(flags: &[&str], script: &str) -> Finished {
    let fixed: &[&str] = &["run", "--rm"];
    run([fixed, flags, &[IMAGE, "sh", "-c", script]].concat())
}

/// How a command ended and what it wrote.
pub struct Finished {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Finished {
    /// Standard output as text, without the last newline.
    pub fn text(&self) -> &str {
        let text = std::str::from_utf8(&self.stdout).expect("output is UTF-8");
        text.strip_suffix('\n').unwrap_or(text)
    }

    /// Asserts exit code 0.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.exited(0)
    }

    #[track_caller]
    pub fn exited(self, code: i32) -> Self {
        let stdout = String::from_utf8_lossy(&self.stdout);
        let start: String = stdout.chars().take(2000).collect();
        assert_eq!(self.code, code, "stdout: {start}\nstderr: {}", self.stderr);
        self
    }

    /// Asserts that the last thing said was one `exocell:` line that holds all
    /// of `words`.
    #[track_caller]
    pub fn complains_of(self, words: &[&str]) -> Self {
        let lines: Vec<&str> =
            self.stderr.lines().filter(|line| line.starts_with("exocell: ")).collect();
        assert_eq!(lines.len(), 1, "one line of complaint in: {}", self.stderr);
        assert_eq!(self.stderr.lines().last(), Some(lines[0]), "in: {}", self.stderr);
        for word in words {
            assert!(lines[0].contains(word), "{word:?} is missing in: {}", lines[0]);
        }
        self
    }

    /// Standard output as one JSON value.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout)
            .unwrap_or_else(|error| panic!("{error} in: {}", String::from_utf8_lossy(&self.stdout)))
    }
}

impl Finished {
    /// The first of a JSON array on standard output.
    #[track_caller]
    pub fn one(&self) -> serde_json::Value {
        self.json()[0].clone()
    }
}

/// The shell's view of an exit status.
pub fn code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Runs `command` to its end with `input`, within [`LIMIT`].
#[track_caller]
pub fn finish(command: &mut Command, input: &[u8]) -> Finished {
    let shown = format!("{command:?}");
    let mut started = Started::new(command);
    started.write(input);
    started.close_stdin();
    started.finish(LIMIT).unwrap_or_else(|| panic!("still running after {LIMIT:?}: {shown}"))
}

/// A command that is running, with pipes on its three streams. It is killed
/// when dropped.
pub struct Started {
    pub child: Child,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
}

impl Started {
    pub fn new(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let stdout = child.stdout.take().map(collect);
        let stderr = child.stderr.take().map(collect);
        Self { child, stdout, stderr }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// A program that does not read its input is no failure.
    pub fn write(&mut self, input: &[u8]) {
        if let Some(stdin) = &mut self.child.stdin {
            let _ = stdin.write_all(input).and_then(|()| stdin.flush());
        }
    }

    pub fn close_stdin(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Its end, or `None` when `limit` passed first; then it is killed.
    pub fn finish(mut self, limit: Duration) -> Option<Finished> {
        let status = wait(&mut self.child, limit)?;
        let collected = |handle: Option<JoinHandle<Vec<u8>>>| {
            handle.map(|handle| handle.join().expect("reader thread")).unwrap_or_default()
        };
        Some(Finished {
            code: code(status),
            stdout: collected(self.stdout.take()),
            stderr: String::from_utf8_lossy(&collected(self.stderr.take())).into_owned(),
        })
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Both fail only for a child that was waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

/// Waits for `child` for at most `limit`.
pub fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let mut ended = None;
    let done = until(limit, || {
        ended = child.try_wait().expect("waitpid");
        ended.is_some()
    });
    if done { ended } else { None }
}

/// Whether `condition` came to hold within `limit`.
pub fn until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asserts that `condition` comes to hold.
#[track_caller]
pub fn eventually(what: &str, condition: impl FnMut() -> bool) {
    assert!(until(Duration::from_secs(30), condition), "never happened: {what}");
}

/// A name that no other test and no earlier run has.
pub fn unique(word: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("test-{word}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// `path` as the command line takes it.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}
