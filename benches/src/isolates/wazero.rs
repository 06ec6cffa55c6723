//! wazero, a runtime in Go: a program of its own, which is told its turns by lines.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::BenchError;
use crate::program::{Compiler, Program};

const PROGRAM: Program = Program {
    name: "wazero",
    compiler: Compiler::Go,
    sources: &[
        ("main.go", include_str!("../../wazero/main.go")),
        ("go.mod", include_str!("../../wazero/go.mod")),
        ("go.sum", include_str!("../../wazero/go.sum")),
    ],
};

fn failed(why: impl ToString) -> BenchError {
    BenchError::Subject { subject: "wazero".to_owned(), why: why.to_string() }
}

/// The program's file, built if it is not below `cache` yet.
pub fn program(cache: &Path) -> Result<PathBuf, BenchError> {
    Ok(PROGRAM.prepare(cache)?.join(PROGRAM.name))
}

/// Whether each call has an instance of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instances {
    /// One a call.
    Fresh,
    /// One a worker and turn.
    Reused,
}

/// The program, with one module.
pub struct Wazero {
    child: Child,
    turns: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    _module: tempfile::NamedTempFile,
}

impl Wazero {
    /// Compiles `text`, whose function `run` is called on `workers` threads.
    pub fn start(
        program: &Path,
        text: &str,
        workers: usize,
        instances: Instances,
    ) -> Result<Self, BenchError> {
        let mut module = tempfile::NamedTempFile::new().map_err(failed)?;
        module.write_all(&wat::parse_str(text).map_err(failed)?).map_err(failed)?;
        let how = match instances {
            Instances::Fresh => "fresh",
            Instances::Reused => "reused",
        };
        let mut child = Command::new(program)
            .arg(module.path())
            .args([&workers.to_string(), how])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let answers = child.stdout.take().ok_or_else(|| failed("it has no output"))?;
        let turns = child.stdin.take();
        Ok(Self { child, turns, answers: BufReader::new(answers), _module: module })
    }

    /// CPU nanoseconds of `calls` calls together.
    pub fn serve(&mut self, calls: u64, argument: i32) -> Result<f64, BenchError> {
        self.ask(&format!("{calls} {argument}"))
    }

    /// Bytes of each of `count` instances that have been called once and are kept.
    pub fn live(&mut self, count: u32) -> Result<f64, BenchError> {
        self.ask(&format!("live {count}"))
    }

    fn ask(&mut self, turn: &str) -> Result<f64, BenchError> {
        let turns = self.turns.as_mut().ok_or_else(|| failed("it has no input"))?;
        writeln!(turns, "{turn}").and_then(|()| turns.flush()).map_err(failed)?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer).map_err(failed)?;
        answer.trim().parse().map_err(|_| failed(format!("it answered {answer:?}")))
    }
}

impl Drop for Wazero {
    fn drop(&mut self) {
        // The end of its input is its end.
        self.turns = None;
        let _ = self.child.wait();
    }
}
