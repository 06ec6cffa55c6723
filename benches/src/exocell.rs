//! The `exocell` command as its users call it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
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
    /// This very program, on the state root `root`.
    pub fn new(root: &Path, image: &str) -> Result<Self, BenchError> {
        let program =
            std::env::current_exe().map_err(BenchError::host("cannot find this program"))?;
        Ok(Self { program, root: root.to_owned(), image: image.to_owned() })
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

/// A cell that is removed with its owner, alive or not.
pub struct Cell<'a> {
    exocell: &'a Exocell,
    pub name: String,
}

impl<'a> Cell<'a> {
    /// Runs `options IMAGE command` as a cell that keeps its record.
    pub fn run(
        exocell: &'a Exocell,
        name: String,
        options: &[&str],
        command: &[&str],
    ) -> Result<Self, BenchError> {
        let cell = Self { exocell, name };
        let mut words = vec!["run", "--name", &cell.name];
        words.extend(options);
        words.push(&exocell.image);
        words.extend(command);
        exocell.call(&words)?;
        Ok(cell)
    }
}

impl Drop for Cell<'_> {
    fn drop(&mut self) {
        // A cell that never came to be cannot be removed either.
        let _ = self.exocell.call(&["rm", "--force", &self.name]);
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
