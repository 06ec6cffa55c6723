//! A real project and its test tools, from the package registry that `pip` is
//! configured for, pinned by hash; kept below the state root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::BenchError;
use crate::scratch::Scratch;

/// The source release of the project that is worked on.
const SOURCES: &str = "\
click==8.5.1 --hash=sha256:9bbfada76703fd1d784b83eea012e3e8c6a001a876543ef104fa56aaaeb072b4
";
/// The pins of the tests' own tools: wheels that hold no machine code.
const TOOLS: &str = include_str!("../../../vmm/cli/tests/projects/tools.txt");
const SCRIPT: &str = include_str!("../../elasticity/agent.sh");
pub const SCRIPT_NAME: &str = "agent.sh";

/// The folder with the script, `archives` and `tools`; fetched once.
pub fn prepare(cache: &Path) -> Result<PathBuf, BenchError> {
    let hash = Sha256::digest([SOURCES, TOOLS, SCRIPT].concat());
    let name: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let folder = cache.join(format!("agent-{name}"));
    if !folder.exists() {
        let work = Scratch::new(cache)?;
        fetch(work.path())?;
        // Cells read it as another user.
        fs::set_permissions(work.path(), fs::Permissions::from_mode(0o755))
            .and_then(|()| fs::rename(work.path(), &folder))
            .map_err(BenchError::host(folder.display()))?;
    }
    Ok(folder)
}

fn fetch(work: &Path) -> Result<(), BenchError> {
    for (name, text) in [("sources.txt", SOURCES), ("tools.txt", TOOLS), (SCRIPT_NAME, SCRIPT)] {
        let file = work.join(name);
        fs::write(&file, text).map_err(BenchError::host(file.display()))?;
    }
    let download = ["download", "--no-binary", ":all:", "-d", "archives", "-r", "sources.txt"];
    pip(work, &download)?;
    let wheels = ["install", "--only-binary", ":all:", "--no-compile", "--target", "tools"];
    pip(work, &[&wheels[..], &["-r", "tools.txt"]].concat())
}

fn pip(work: &Path, words: &[&str]) -> Result<(), BenchError> {
    let mut command = Command::new("python3");
    command.current_dir(work).args(["-m", "pip", "--disable-pip-version-check", "--quiet"]);
    command.args(words).args(["--no-deps", "--require-hashes"]);
    let output = command.output().map_err(BenchError::host("python3 -m pip"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(BenchError::Command {
        command: format!("python3 -m pip {}", words.join(" ")),
        status: output.status.to_string(),
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}
