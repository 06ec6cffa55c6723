//! What can go wrong with a kernel build.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::progress::Step;

/// Why there is no kernel. Each message names the thing and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// `KERNEL` is not the file this program expects.
    #[error("guest-kernel-patches/KERNEL is not valid: {0}")]
    Pin(#[from] toml::de::Error),
    /// `series` names a patch that is not there, or none names a patch that is.
    #[error("guest-kernel-patches/series: {0}")]
    Series(String),
    /// A line of a config fragment is no assignment.
    #[error(
        "config fragment {file}, line {line}: {text:?} is neither CONFIG_X=value nor '# CONFIG_X is not set'"
    )]
    Fragment { file: String, line: usize, text: String },
    /// A file or directory of the cache failed us.
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    /// Programs the build runs are not installed.
    #[error("the kernel build needs {} that this machine lacks; install with: apt-get install {}", tools.join(", "), packages.join(" "))]
    MissingTools { tools: Vec<&'static str>, packages: Vec<&'static str> },
    /// The tarball is not one that `KERNEL` knows.
    #[error("{} has sha256 {found}, which guest-kernel-patches/KERNEL does not list; use one of: {}", path.display(), known.join(", "))]
    UnknownTarball { path: PathBuf, found: String, known: Vec<String> },
    /// A fetched file is not what `KERNEL` pins.
    #[error(
        "{name} has sha256 {found}, but guest-kernel-patches/KERNEL pins {pinned}: the mirror serves another file"
    )]
    WrongHash { name: String, found: String, pinned: String },
    /// No source could be fetched.
    #[error("no kernel source could be fetched; set EXOCELL_KERNEL_TARBALL to a tarball that guest-kernel-patches/KERNEL lists. Tried:{}", list(.0))]
    NoSource(Vec<Attempt>),
    /// A program failed.
    #[error("kernel build: step '{step}' failed: `{command}` {outcome}; whole log in {}; its last lines:\n{}", log.display(), tail.join("\n"))]
    Step { step: Step, command: String, outcome: String, tail: Vec<String>, log: PathBuf },
    /// Each layout that was tried has bytes in its text by which user code could change keys.
    #[error(
        "the kernel cannot boot with protection keys: in each of {tries} layouts, instructions of its text hold the bytes of one that changes keys (last at {}); change the alignment of functions in guest-kernel-patches/config",
        at.join(", ")
    )]
    Layout { tries: usize, at: Vec<String> },
    /// Config symbols that are not in the finished configuration as a fragment says.
    #[error("the kernel's configuration does not hold what the config fragments say (a dependency is missing, or the symbol is gone):{}", list(.0))]
    LostSymbols(Vec<Lost>),
}

impl KernelError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_path_buf(), source }
    }
}

/// One source that was tried, and why it gave nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The source, as a user would name it.
    pub source: String,
    /// Why it gave nothing.
    pub why: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.why)
    }
}

/// A config symbol whose value is not the one a fragment asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// The symbol, with its `CONFIG_` prefix.
    pub symbol: String,
    /// What the fragments ask for; `n` for `is not set`.
    pub wanted: String,
    /// What the finished configuration has; `n` for absent.
    pub found: String,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: wanted {}, found {}", self.symbol, self.wanted, self.found)
    }
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(|item| format!("\n  {item}")).collect()
}
