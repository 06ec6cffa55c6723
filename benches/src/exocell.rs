//! The `exocell` command as its users call it.

use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use exocell_cell::kernel::{self, Recipe, Status};
use serde::de::DeserializeOwned;

use crate::BenchError;

/// The program to measure, the state root and the image that cells run.
#[derive(Debug)]
pub struct Exocell {
    program: PathBuf,
    root: PathBuf,
    pub image: String,
}

impl Exocell {
    /// The command beside this program, on the state root `root`.
    pub fn new(root: &Path, image: &str) -> Result<Self, BenchError> {
        let own = std::env::current_exe().map_err(BenchError::host("cannot find this program"))?;
        let program = own.with_file_name("exocell");
        match program.exists() {
            true => Ok(Self::of(program, root, image)),
            false => Err(BenchError::NoCommand(program)),
        }
    }

    /// The command `program`.
    pub(crate) fn of(program: PathBuf, root: &Path, image: &str) -> Self {
        Self { program, root: root.to_owned(), image: image.to_owned() }
    }

    /// The command, on the state root, without arguments.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env("EXOCELL_ROOT", &self.root);
        command
    }

    /// The command with `arguments`.
    pub fn with(&self, arguments: &[&str]) -> Command {
        let mut command = self.command();
        command.args(arguments);
        command
    }

    /// The same program, guest kernels and images on a state root of its own in
    /// `folder`, which has no budget and no cells yet.
    pub fn apart(&self, folder: &Path) -> Result<Self, BenchError> {
        for name in ["kernels", "images"] {
            let link = folder.join(name);
            symlink(self.root.join(name), &link).map_err(BenchError::host(link.display()))?;
        }
        let (program, image) = (self.program.clone(), self.image.clone());
        Ok(Self { program, root: folder.to_owned(), image })
    }

    /// Where compiled programs and the like are kept.
    pub fn cache(&self) -> PathBuf {
        self.root.join("bench")
    }

    /// The guest kernel without our patches.
    pub fn stock_kernel(&self) -> Result<PathBuf, BenchError> {
        match kernel::status_of(&Recipe::stock(), &self.root)? {
            Status::Present(kernel) => Ok(kernel.path),
            Status::Absent { .. } => Err(BenchError::NoStockKernel),
        }
    }

    /// Runs one subcommand to its end.
    pub fn call(&self, arguments: &[&str]) -> Result<Vec<u8>, BenchError> {
        let output = self
            .with(arguments)
            .stdin(Stdio::null())
            .output()
            .map_err(BenchError::host(self.program.display()))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        Err(BenchError::Command {
            command: format!("exocell {}", arguments.join(" ")),
            status: output.status.to_string(),
            stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }

    /// As [`Self::call`], with the JSON it printed.
    pub fn ask<T: DeserializeOwned>(
        &self,
        what: &'static str,
        arguments: &[&str],
    ) -> Result<T, BenchError> {
        let output = self.call(arguments)?;
        serde_json::from_slice(&output).map_err(|source| BenchError::Json { what, source })
    }
}

/// What a cell runs: it ends when its input does.
pub const WAITER: &str = "cat";

/// A cell that ends with its owner, whatever ends that: its program's input is a pipe
/// of this process, and its record goes with it.
pub struct Cell<'a> {
    exocell: &'a Exocell,
    pub name: String,
    run: Child,
    input: Option<ChildStdin>,
}

impl<'a> Cell<'a> {
    /// Runs `options IMAGE cat`, and waits until that answers.
    pub fn start(exocell: &'a Exocell, name: String, options: &[&str]) -> Result<Self, BenchError> {
        let mut command = exocell.with(&["run", "--rm", "-i", "--name", &name]);
        command.args(options).args([&exocell.image, WAITER]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut run = command.spawn().map_err(BenchError::host("exocell run"))?;
        let input = run.stdin.take();
        let mut cell = Self { exocell, name, run, input };
        if cell.echoes(b"ready\n") {
            return Ok(cell);
        }
        let mut stderr = String::new();
        cell.input = None;
        // What could be read is told.
        let _ = cell.run.stderr.as_mut().map(|stream| stream.read_to_string(&mut stderr));
        let status = cell.run.wait().map_err(BenchError::host("exocell run"))?;
        Err(BenchError::Command {
            command: format!("exocell run {}", options.join(" ")),
            status: status.to_string(),
            stderr: stderr.trim().to_owned(),
        })
    }

    /// Whether what is written to the cell's program comes back.
    fn echoes(&mut self, line: &[u8]) -> bool {
        let (Some(input), Some(output)) = (&mut self.input, &mut self.run.stdout) else {
            return false;
        };
        let mut back = vec![0; line.len()];
        input.write_all(line).is_ok() && output.read_exact(&mut back).is_ok() && back == line
    }
}

impl Drop for Cell<'_> {
    fn drop(&mut self) {
        drop(self.input.take());
        // One that is gone already cannot be removed either.
        let _ = self.exocell.call(&["rm", "--force", &self.name]);
        let _ = self.run.wait();
    }
}

/// Runs `command`, but no longer than `limit`.
pub fn patiently(command: &mut Command, limit: Duration) -> Result<(), String> {
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let until = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(status.to_string()),
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                // It may have ended this instant; either way it is waited for.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no end within {limit:?}"));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_hangs_is_ended() {
        let error = patiently(Command::new("sleep").arg("60"), Duration::from_millis(20));
        assert!(error.unwrap_err().contains("no end"));
        assert!(patiently(&mut Command::new("false"), Duration::from_secs(9)).is_err());
        assert!(patiently(&mut Command::new("true"), Duration::from_secs(9)).is_ok());
    }
}
