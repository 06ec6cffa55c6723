//! `/etc/exocell/containerd.toml`: what the operator says of all cells of containerd's.

use std::path::{Path, PathBuf};

use exocell_cell::{Layout, plan};
use serde::Deserialize;

use crate::error::{Result, ShimError};
use crate::refusal::refused;

/// The file, and what names another one.
pub const FILE: &str = "/etc/exocell/containerd.toml";
pub const FILE_VARIABLE: &str = "EXOCELL_CONTAINERD_CONFIG";
/// Names another state root.
const ROOT_VARIABLE: &str = "EXOCELL_ROOT";
/// What a guest's kernel has for itself, beside what the containers' limits say.
const OVERHEAD_BYTES: u64 = 64 << 20;

/// What of a specification may be left out, because the cell's kernel is the boundary. It is refused
/// unless the operator says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LeftOut {
    Seccomp,
    Apparmor,
    Selinux,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The state root.
    pub root: Option<PathBuf>,
    /// Memory of a cell whose containers name no limit, in MiB.
    pub memory_mib: u64,
    /// The most processors of a cell; all of the host's, up to 16, where it does not say.
    pub processors: Option<u32>,
    /// Processes and threads that a cell's containers may have together.
    pub processes: u32,
    pub leave_out: Vec<LeftOut>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            root: None,
            memory_mib: 1024,
            processors: None,
            processes: 4096,
            leave_out: Vec::new(),
        }
    }
}

impl Config {
    /// # Errors
    /// The file is there and cannot be read, or says what is not known.
    pub fn read() -> Result<Self> {
        let named = std::env::var_os(FILE_VARIABLE).map(PathBuf::from);
        let path = named.clone().unwrap_or_else(|| FILE.into());
        match std::fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text, &path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => {
                Ok(Self::default())
            }
            Err(error) => Err(ShimError::host(format!("cannot read {}", path.display()))(error)),
        }
    }

    fn parse(text: &str, path: &Path) -> Result<Self> {
        toml::from_str(text)
            .map_err(|error| ShimError::invalid(format!("{}: {error}", path.display())))
    }

    /// Where the state of cells is.
    pub fn layout(&self) -> Layout {
        let named = std::env::var_os(ROOT_VARIABLE).filter(|root| !root.is_empty());
        let root = named.map(PathBuf::from).or_else(|| self.root.clone());
        Layout::new(root.unwrap_or_else(Layout::default_root))
    }

    /// Whether the operator has it left out.
    pub fn leaves_out(&self, kind: LeftOut) -> bool {
        self.leave_out.contains(&kind)
    }

    /// Lets `what` be left out if the operator says so.
    ///
    /// # Errors
    /// The operator does not.
    pub fn leave_out(&self, kind: LeftOut, what: &str) -> Result<()> {
        if self.leaves_out(kind) {
            return Ok(());
        }
        let name = format!("{kind:?}").to_lowercase();
        Err(refused(
            what,
            &format!(
                "the cell's kernel is the boundary. Ask for none, or have it left out for all \
                 containers: leave_out = [\"{name}\"] in {FILE}"
            ),
        ))
    }

    /// Memory of a cell whose containers may have `limit` bytes, or any amount.
    pub fn memory_bytes(&self, limit: Option<u64>) -> u64 {
        let wanted = match limit {
            Some(limit) => limit.saturating_add(OVERHEAD_BYTES),
            None => self.memory_mib << 20,
        };
        wanted.clamp(plan::MEMORY_BYTES_MIN, plan::host_memory().max(plan::MEMORY_BYTES_MIN))
    }

    /// Processors of a cell whose containers may have the time of `count`, or any.
    pub fn processors(&self, count: Option<u64>) -> u32 {
        let host = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
        let most = self.processors.map_or(host, u64::from).clamp(1, u64::from(plan::VCPUS_MAX));
        u32::try_from(count.unwrap_or(most).clamp(1, most)).unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_says_what_is_known_and_nothing_else() {
        let read = |text: &str| Config::parse(text, Path::new("f"));
        let config = read("memory_mib = 256\nleave_out = [\"seccomp\"]\nprocessors = 1").unwrap();
        assert_eq!((config.memory_bytes(None), config.processors(Some(9))), (256 << 20, 1));
        config.leave_out(LeftOut::Seccomp, "x").unwrap();
        let error = config.leave_out(LeftOut::Apparmor, "linux.x").unwrap_err().to_string();
        assert!(error.contains("linux.x") && error.contains("apparmor"), "{error}");
        assert!(read("memory = 1").unwrap_err().to_string().contains("memory"));
        assert!(read("leave_out = [\"all\"]").is_err());
    }

    #[test]
    fn a_guests_kernel_has_its_memory_beside_the_containers() {
        let config = Config::default();
        assert_eq!(config.memory_bytes(Some(64 << 20)), 128 << 20);
        assert_eq!(config.memory_bytes(Some(0)), OVERHEAD_BYTES);
        assert_eq!(config.memory_bytes(Some(u64::MAX)), plan::host_memory());
    }
}
