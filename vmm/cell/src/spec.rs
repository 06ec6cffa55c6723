//! The wire form of a cell: what the operator asked for, as it is stored.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::CellError;
use crate::settings::Settings;

/// How strongly a cell is isolated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strength {
    /// A Linux kernel of its own.
    Vm,
    /// A Wasm isolate.
    Isolate,
}

impl std::fmt::Display for Strength {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Vm => "vm",
            Self::Isolate => "isolate",
        })
    }
}

/// A request for a cell, version 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellSpec {
    pub version: u32,
    pub id: String,
    pub name: String,
    pub strength: Strength,
    /// An image reference, or the path of a Wasm module.
    pub image: String,
    /// The image's entrypoint is replaced by this.
    pub entrypoint: Option<Vec<String>>,
    /// Program and arguments; empty takes the image's.
    pub command: Vec<String>,
    /// `NAME=value`, added to the image's.
    pub env: Vec<String>,
    pub working_dir: Option<String>,
    pub user: Option<String>,
    pub hostname: Option<String>,
    /// What its program has and is held to inside the guest.
    #[serde(default, skip_serializing_if = "Settings::are_default")]
    pub settings: Settings,
    pub tty: bool,
    /// Keep standard input open.
    pub stdin: bool,
    /// Remove the record when the cell ends.
    pub remove: bool,
    /// No private overlay: the root file system cannot be written.
    pub read_only: bool,
    /// Ports of the host that lead into the cell.
    #[serde(default)]
    pub publish: Vec<crate::network::Publish>,
    /// How guest memory goes back to the host.
    #[serde(default)]
    pub pager: exocell_pager::Mode,
    /// Memory, in bytes, that is set aside for the cell (`credit` mode).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_guarantee: Option<u64>,
    /// What stands between the guest's programs and its kernel.
    #[serde(default)]
    pub intra: exocell_vmm::intra::Intra,
    /// A file that keeps the private overlay beyond the cell's end, so that another
    /// cell can go on with it; made where it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<PathBuf>,
    /// Runs no program: its operator reaches into its files until it hangs up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub idle: bool,
    /// Of a cell that waits in a pool for its program: what a run must
    /// want to take it (see [`crate::warm`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<String>,
    /// The capability table in its TOML form, after the command line's flags.
    pub capabilities: String,
    /// Where its folders were when it was made, if it may start again; found at its start else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub locations: Vec<crate::granted::Location>,
    /// Milliseconds since the epoch.
    pub created_ms: u64,
}

impl CellSpec {
    pub const VERSION: u32 = 1;

    /// 128 random bits in hexadecimal: the id of a new cell.
    pub fn new_id() -> Result<String, CellError> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")
            .and_then(|mut source| source.read_exact(&mut bytes))
            .map_err(CellError::host("cannot read /dev/urandom"))?;
        Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Whether a cell may be called `name`.
    pub fn check_name(name: &str) -> Result<(), CellError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain) {
            return Ok(());
        }
        Err(CellError::Usage(format!(
            "{name:?} is no name; use letters, digits, _ . - and start with a letter or digit"
        )))
    }
}
