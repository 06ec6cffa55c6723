//! Hooks of the runtime specification that are programs of the host's: those that make and remove
//! networks, above all (nerdctl, docker's engine before 23).
//!
//! They find the container's state on standard input, and in it the pid of the cell's supervisor,
//! whose network namespace is the container's own. Hooks that run in the container (`createContainer`,
//! `startContainer`) are refused when the specification is read.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::json;

use crate::error::{Result, ShimError};

/// How long a hook may take that names no time.
const LIMIT: Duration = Duration::from_secs(60);
/// How often it is looked whether one has ended.
const LOOK: Duration = Duration::from_millis(5);

/// The hooks of one container.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Hooks {
    /// Before the program starts, in the old words and in the new.
    pub prestart: Vec<Hook>,
    pub create_runtime: Vec<Hook>,
    pub poststart: Vec<Hook>,
    pub poststop: Vec<Hook>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hook {
    path: PathBuf,
    /// With the program's own name.
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<String>,
    /// Seconds.
    #[serde(default)]
    timeout: Option<u64>,
}

/// What a hook is told of its container.
pub struct Told<'a> {
    pub id: &'a str,
    pub status: &'a str,
    pub pid: u32,
    pub bundle: &'a Path,
    pub annotations: &'a std::collections::BTreeMap<String, String>,
}

/// Runs `hooks` one after the other.
///
/// # Errors
/// Names the first that fails, with what it said.
pub fn run<'a>(hooks: impl IntoIterator<Item = &'a Hook>, told: &Told<'_>) -> Result<()> {
    let state = json!({
        "ociVersion": "1.1.0",
        "id": told.id,
        "status": told.status,
        "pid": told.pid,
        "bundle": told.bundle,
        "annotations": told.annotations,
    });
    hooks.into_iter().try_for_each(|hook| hook.run(&state.to_string()))
}

impl Hook {
    fn run(&self, state: &str) -> Result<()> {
        let failed = |why: &dyn std::fmt::Display| {
            ShimError::internal(format!("the hook {}: {why}", self.path.display()))
        };
        let variables = self.env.iter().filter_map(|variable| variable.split_once('='));
        let mut command = Command::new(&self.path);
        if let Some((name, arguments)) = self.args.split_first() {
            command.arg0(name).args(arguments);
        }
        let said = tempfile_in_memory().map_err(|error| failed(&error))?;
        let output = said.try_clone().map_err(|error| failed(&error))?;
        let mut child = command
            .env_clear()
            .envs(variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(output)
            .spawn()
            .map_err(|error| failed(&error))?;
        if let Some(mut stdin) = child.stdin.take() {
            // One that does not read it says why it fails.
            let _ = stdin.write_all(state.as_bytes());
        }
        let limit = self.timeout.map_or(LIMIT, Duration::from_secs);
        match wait(&mut child, limit).map_err(|error| failed(&error))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(failed(&format_args!(
                "{status}: {}",
                exocell_cell::agent::printable(&text(&said))
            ))),
            None => {
                let _ = child.kill().and_then(|()| child.wait());
                Err(failed(&format_args!("it did not end within {} s", limit.as_secs())))
            }
        }
    }
}

/// Not a pipe, which a process that the hook leaves behind could keep open.
fn tempfile_in_memory() -> std::io::Result<std::fs::File> {
    let made = nix::sys::memfd::memfd_create(c"hook", nix::sys::memfd::MFdFlags::MFD_CLOEXEC);
    Ok(std::fs::File::from(made?))
}

/// The last of what was written to `file`.
fn text(file: &std::fs::File) -> String {
    use std::os::unix::fs::FileExt;
    let length = file.metadata().map_or(0, |metadata| metadata.len());
    let mut bytes = vec![0; 1024];
    let read = file.read_at(&mut bytes, length.saturating_sub(1024)).unwrap_or(0);
    String::from_utf8_lossy(bytes.get(..read).unwrap_or_default()).trim().to_owned()
}

fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<std::process::ExitStatus>> {
    let until = Instant::now() + limit;
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if Instant::now() >= until => return Ok(None),
            None => std::thread::sleep(LOOK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(script: &str, timeout: Option<u64>) -> Hook {
        let args = ["sh", "-c", script].map(str::to_owned).to_vec();
        Hook { path: "/bin/sh".into(), args, env: vec!["A=b".to_owned()], timeout }
    }

    #[test]
    fn hooks_are_told_the_state_and_say_why_they_fail() {
        let annotations = [("a".to_owned(), "b".to_owned())].into();
        let bundle = Path::new("/b");
        let told = Told { id: "i", status: "created", pid: 7, bundle, annotations: &annotations };
        let good = hook("grep -q '\"pid\":7' && test $A = b && test -z \"$HOME\"", None);
        run([&good], &told).unwrap();
        let error = run([&good, &hook("echo why >&2; exit 3", None)], &told).unwrap_err();
        assert!(error.to_string().contains("why"), "{error}");
        let error = run([&hook("sleep 1000", Some(0))], &told).unwrap_err().to_string();
        assert!(error.contains("/bin/sh") && error.contains("0 s"), "{error}");
    }
}
