//! What can go wrong with a cell, and the exit code that tells it.

use std::io;

/// An error of a cell operation. The message names the thing and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    #[error("{0}")]
    Usage(String),
    #[error("no such cell: {0} (exocell ps -a lists them)")]
    NoSuchCell(String),
    #[error("cell {id} is {state}; {remedy}")]
    WrongState { id: String, state: &'static str, remedy: &'static str },
    #[error("the name {0} is taken by another cell; exocell rm {0} frees it")]
    NameTaken(String),
    #[error("{what}: {source}")]
    Host { what: String, source: io::Error },
    #[error("the record of cell {id} is damaged ({file}: {reason}); exocell rm -f {id} removes it")]
    Record { id: String, file: &'static str, reason: String },
    #[error(
        "cell {id} was made by another version of exocell (its record has version {version}, this \
         one knows {known}); use that version, or remove the record's folder"
    )]
    Version { id: String, version: u32, known: u32 },
    #[error(
        "the record of cell {id} says {from}, which does not become {to}: a fault of Exocell's"
    )]
    Step { id: String, from: &'static str, to: &'static str },
    #[error(transparent)]
    Jail(#[from] exocell_vmm::jail::JailError),
    #[error(transparent)]
    Image(#[from] exocell_images::ImageError),
    #[error(transparent)]
    Kernel(#[from] exocell_kernel::KernelError),
    #[error(transparent)]
    Caps(#[from] exocell_xgate::CapsError),
    #[error("the module cannot run: {0}")]
    Module(String),
    #[error("the cell's guest: {0}")]
    Guest(String),
    #[error("the deadline passed (time.deadline)")]
    Deadline,
    /// The program could not be started: 126 or 127.
    #[error("{message}")]
    Program { message: String, exit_code: u8 },
}

impl CellError {
    /// docker's codes: 127 program not found, 126 not executable, 137 ended by
    /// the deadline, 125 all else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Program { exit_code, .. } => *exit_code,
            Self::Deadline => 128 + libc::SIGKILL as u8,
            _ => 125,
        }
    }

    /// A closure for `map_err` that says what was being done.
    pub fn host(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Host { what, source }
    }
}
