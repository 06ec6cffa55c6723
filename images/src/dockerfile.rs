//! Dockerfiles: what an image is made by, as text and as instructions.
//!
//! The way of a file: its lines are joined ([`lines`]), each becomes an [`Instruction`] here, and
//! whoever builds puts variables in ([`Scope`]). All of it is a stranger's text: it is bounded,
//! and nothing in it is a path of the host.

pub mod ignore;
mod lines;
mod parse;
pub mod pattern;
mod words;

use std::collections::BTreeMap;

pub use lines::Heredoc;
pub use words::Scope;

/// The longest file.
pub const BYTES_MAX: u64 = 1 << 20;
/// The most instructions of one file.
pub const STEPS_MAX: usize = 1000;

/// What is wrong with a file, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Dockerfile{}: {why}", place(*.line))]
pub struct DockerfileError {
    /// From 1; 0 is the file as a whole.
    pub line: usize,
    pub why: String,
}

fn place(line: usize) -> String {
    if line == 0 { String::new() } else { format!(", line {line}") }
}

impl DockerfileError {
    /// What is wrong in `line`.
    #[must_use]
    pub fn new(line: usize, why: impl Into<String>) -> Self {
        Self { line, why: why.into() }
    }
}

/// A file that is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dockerfile {
    /// `ARG`s before the first `FROM`.
    pub globals: Vec<Step>,
    pub stages: Vec<Stage>,
    /// The character that takes away the meaning of the next.
    pub escape: char,
}

/// One `FROM` and what follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    pub line: usize,
    /// As it is written.
    pub text: String,
    pub image: String,
    /// In small letters.
    pub name: Option<String>,
    pub platform: Option<String>,
    pub steps: Vec<Step>,
}

/// One instruction and where it is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// From 1.
    pub line: usize,
    /// As it is written, on one line.
    pub text: String,
    pub instruction: Instruction,
}

/// What an image starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// A line for the image's shell.
    Line(String),
    Words(Vec<String>),
}

/// What happens to an image. Words are as they are written: variables are not put in yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    Run {
        program: Program,
        heredocs: Vec<Heredoc>,
        mounts: Vec<Mount>,
        network: Option<String>,
    },
    Copy(Transfer),
    Add(Transfer),
    Env(Vec<(String, String)>),
    Label(Vec<(String, String)>),
    /// Names, and values where they have some.
    Arg(Vec<(String, Option<String>)>),
    Workdir(String),
    User(String),
    Expose(Vec<String>),
    Volume(Vec<String>),
    Entrypoint(Program),
    Cmd(Program),
    Shell(Vec<String>),
    StopSignal(String),
    Healthcheck(Option<Check>),
    /// An instruction of whoever builds on the image.
    OnBuild(String),
    Maintainer(String),
}

/// `COPY` and `ADD`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transfer {
    pub sources: Vec<String>,
    pub heredocs: Vec<Heredoc>,
    pub to: String,
    /// A stage or an image; the build context without one.
    pub from: Option<String>,
    pub owner: Option<String>,
    pub mode: Option<String>,
}

/// How it is found out whether a program is well: numbers as they are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    pub program: Program,
    pub options: BTreeMap<String, String>,
}

/// What a `RUN` has beside its image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub kind: MountKind,
    pub options: BTreeMap<String, String>,
}

/// What kind of thing that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountKind {
    /// Files of the context, or of a stage or an image.
    Bind,
    /// A directory that later builds find again.
    Cache,
    /// Memory.
    Tmpfs,
    /// A file that is in no image.
    Secret,
}

/// Reads a file.
///
/// # Errors
/// What is wrong with it, and in which line.
pub fn read(text: &str) -> Result<Dockerfile, DockerfileError> {
    parse::file(text)
}

/// Reads one instruction, as `ONBUILD` and `commit --change` have them.
///
/// # Errors
/// What is wrong with it; `FROM` and `ONBUILD` are none of these.
pub fn instruction(text: &str) -> Result<Step, DockerfileError> {
    parse::alone(text)
}

#[cfg(test)]
mod tests;
