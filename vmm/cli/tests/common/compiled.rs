//! C programs for the guest, in `tests/guest/NAME/*.c`, compiled when a test wants them.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::text;

/// Where a cell sees the folder of compiled programs.
pub const FOLDER_IN_CELL: &str = "/programs";

/// A flag for programs that probe addresses.
pub const FAULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/guest/shared/faults.c");

/// A folder of static programs.
pub struct Programs {
    dir: TempDir,
}

impl Programs {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary directory") }
    }

    /// Compiles the sources of `tests/guest/SOURCE` as the static program `name`.
    #[track_caller]
    pub fn compile(self, source: &str, name: &str, flags: &[&str]) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guest").join(source);
        let entries = folder.read_dir().unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let files = entries.map(|entry| entry.expect("an entry").path());
        let sources = files.filter(|file| file.extension().is_some_and(|end| end == "c"));
        let output = Command::new("gcc")
            .args(["-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-result", "-pthread"])
            .args(flags)
            .arg("-o")
            .arg(self.path(name))
            .args(sources)
            .output()
            .expect("gcc is installed by scripts/setup");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self
    }

    /// Copies the script `tests/guest/SOURCE` as `name`.
    #[track_caller]
    pub fn copy(self, source: &str, name: &str) -> Self {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guest").join(source);
        std::fs::copy(&from, self.path(name)).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
        self
    }

    /// The program on this machine.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `HOST:GUEST:ro` for `--volume`.
    pub fn volume(&self) -> String {
        format!("{}:{FOLDER_IN_CELL}:ro", text(self.dir.path()))
    }
}
