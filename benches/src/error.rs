//! Why a benchmark has no result.

use std::fmt::Display;
use std::io;
use std::path::PathBuf;

/// Each message names what failed and, where there is one, the remedy.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("{what}: {source}")]
    Host { what: String, source: io::Error },
    #[error("{command} failed ({status}): {stderr}")]
    Command { command: String, status: String, stderr: String },
    #[error("{what} is not JSON as expected: {source}")]
    Json { what: &'static str, source: serde_json::Error },
    #[error("no measurement {name:?}; there are: {known}")]
    NoMeasurement { name: String, known: String },
    #[error("the command to measure, {}, is missing; install it beside exocell-bench", .0.display())]
    NoCommand(PathBuf),
    #[error("the stock guest kernel is missing; run exocell kernel build --stock")]
    NoStockKernel,
    #[error("no traces to replay; name their folder (--traces DIR)")]
    NoTraces,
    #[error("the audit failed: {0}")]
    Audit(String),
    #[error(transparent)]
    Kernel(#[from] exocell_cell::kernel::KernelError),
    #[error("{program} cannot be compiled (is {compiler} there?): {why}")]
    Compile { program: &'static str, compiler: &'static str, why: String },
    #[error("{subject}: {why}")]
    Subject { subject: String, why: String },
    #[error("a row cannot be written: {0}")]
    Row(#[from] serde_json::Error),
}

impl BenchError {
    /// `file` of the host holds something else than `expected`.
    pub fn unlike(file: &str, expected: &str) -> Self {
        let why = io::Error::new(io::ErrorKind::InvalidData, format!("no {expected}"));
        Self::Host { what: file.to_owned(), source: why }
    }

    /// A closure for `map_err` that says what was touched.
    pub fn host(what: impl Display) -> impl FnOnce(io::Error) -> Self {
        let what = what.to_string();
        move |source| Self::Host { what, source }
    }
}
