//! Runs the programs of a build: output to the log, its end kept for errors, progress counted.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::KernelError;
use crate::progress::{Progress, Step};

/// Lines of a failed program's output that go into the error.
const TAIL_LINES: usize = 20;

/// `CC` and `AR` lines of a build with the embedded config, for the fraction that is done.
const COMPILE_LINES_EXPECTED: f32 = 1_365.0;

/// One build's log and its caller's progress callback.
pub struct Runner<'a> {
    log: File,
    log_path: PathBuf,
    progress: &'a mut dyn FnMut(Progress),
}

impl<'a> Runner<'a> {
    pub fn new(
        log_path: PathBuf,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Result<Self, KernelError> {
        let log = OpenOptions::new().create(true).append(true).open(&log_path);
        let log = log.map_err(KernelError::io("create", &log_path))?;
        Ok(Self { log, log_path, progress })
    }

    pub fn start(&mut self, step: Step) {
        (self.progress)(Progress { step, fraction: None });
    }

    /// Runs a program to its end.
    ///
    /// # Errors
    /// It cannot be started, or ends otherwise than with status 0.
    pub fn run(&mut self, step: Step, command: &mut Command) -> Result<(), KernelError> {
        let shown = show(command);
        self.write_log(format!("$ {shown}\n").as_bytes())?;
        let mut tail = VecDeque::new();
        let outcome = match self.stream(step, command, &mut tail) {
            Ok(status) if status.success() => return Ok(()),
            Ok(status) => status.to_string(),
            Err(error) => format!("cannot be run: {error}"),
        };
        let (tail, log) = (tail.into(), self.log_path.clone());
        Err(KernelError::Step { step, command: shown, outcome, tail, log })
    }

    /// Runs a program to its end and takes what it writes to its standard output, which is not
    /// logged.
    ///
    /// # Errors
    /// As of [`Self::run`].
    pub fn output(&mut self, step: Step, command: &mut Command) -> Result<String, KernelError> {
        let shown = show(command);
        self.write_log(format!("$ {shown}\n").as_bytes())?;
        let (outcome, said) = match command.stdin(Stdio::null()).output() {
            Ok(output) if output.status.success() => {
                return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
            }
            Ok(output) => (output.status.to_string(), output.stderr),
            Err(error) => (format!("cannot be run: {error}"), Vec::new()),
        };
        self.write_log(&said)?;
        let mut tail = VecDeque::new();
        String::from_utf8_lossy(&said).lines().for_each(|line| push_tail(&mut tail, line.into()));
        let (tail, log) = (tail.into(), self.log_path.clone());
        Err(KernelError::Step { step, command: shown, outcome, tail, log })
    }

    /// Writes a line to the log.
    ///
    /// # Errors
    /// The disk's.
    pub fn note(&mut self, line: &str) -> Result<(), KernelError> {
        self.write_log(format!("{line}\n").as_bytes())
    }

    /// Copies the program's output, both streams as one, to the log.
    fn stream(
        &mut self,
        step: Step,
        command: &mut Command,
        tail: &mut VecDeque<String>,
    ) -> std::io::Result<std::process::ExitStatus> {
        let (reader, writer) = std::io::pipe()?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let mut child = command.spawn()?;
        // The command holds the pipe's write end; without this the loop would never see its end.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut counter = 0;
        for line in BufReader::new(reader).split(b'\n') {
            let line = line?;
            self.log.write_all(&line)?;
            self.log.write_all(b"\n")?;
            self.count(step, &line, &mut counter);
            push_tail(tail, String::from_utf8_lossy(&line).into_owned());
        }
        child.wait()
    }

    fn count(&mut self, step: Step, line: &[u8], counter: &mut u32) {
        let compiled =
            [b"  CC ".as_slice(), b"  AR ", b"  AS "].iter().any(|mark| line.starts_with(mark));
        if step == Step::Compile && compiled {
            *counter += 1;
            let fraction = (*counter as f32 / COMPILE_LINES_EXPECTED).min(0.99);
            (self.progress)(Progress { step, fraction: Some(fraction) });
        }
    }

    fn write_log(&mut self, bytes: &[u8]) -> Result<(), KernelError> {
        self.log.write_all(bytes).map_err(KernelError::io("write", &self.log_path))
    }

    pub fn log_path(&self) -> &Path {
        &self.log_path
    }
}

fn push_tail(tail: &mut VecDeque<String>, line: String) {
    if tail.len() == TAIL_LINES {
        tail.pop_front();
    }
    tail.push_back(line);
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str) -> (Result<(), KernelError>, String) {
        let folder = tempfile::tempdir().expect("temporary folder");
        let log = folder.path().join("log");
        let mut ignore = |_| {};
        let mut runner = Runner::new(log.clone(), &mut ignore).expect("log");
        let result = runner.run(Step::Patch, Command::new("sh").args(["-c", script]));
        (result, std::fs::read_to_string(log).expect("log is there"))
    }

    #[test]
    fn a_failed_program_is_told_with_its_last_lines() {
        let (result, log) = run("seq 1 30; echo oops >&2; exit 3");
        let Err(KernelError::Step { step, command, outcome, tail, .. }) = result else {
            panic!("expected a failed step, found {result:?}");
        };
        assert_eq!(
            (step, tail.len(), tail.last().map(String::as_str)),
            (Step::Patch, TAIL_LINES, Some("oops"))
        );
        assert!(command.starts_with("sh -c") && outcome.contains('3'), "{command} {outcome}");
        assert!(log.contains("\n1\n2\n"), "{log}");
    }

    #[test]
    fn what_a_program_writes_is_taken_and_its_failure_told() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut ignore = |_| {};
        let mut runner = Runner::new(folder.path().join("log"), &mut ignore).expect("log");
        let mut output =
            |script: &str| runner.output(Step::Compile, Command::new("sh").args(["-c", script]));
        assert_eq!(output("echo a; echo b >&2").expect("it succeeds"), "a\n");
        let Err(KernelError::Step { tail, .. }) = output("echo a; echo b >&2; exit 1") else {
            panic!("it failed");
        };
        assert_eq!(tail, ["b"]);
    }

    #[test]
    fn a_program_that_is_not_there_is_told() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut ignore = |_| {};
        let mut runner = Runner::new(folder.path().join("log"), &mut ignore).expect("log");
        let error =
            runner.run(Step::Fetch, &mut Command::new("/no/such/program")).expect_err("missing");
        assert!(error.to_string().contains("cannot be run"), "{error}");
    }
}
