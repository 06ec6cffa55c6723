//! The `exocell` command as its users call it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use crate::BenchError;

/// The program to measure and the image it runs.
#[derive(Debug)]
pub struct Exocell {
    program: PathBuf,
    pub image: String,
}

impl Exocell {
    pub fn new(program: Option<PathBuf>, image: &str) -> Result<Self, BenchError> {
        let beside = || std::env::current_exe().map(|own| own.with_file_name("exocell"));
        let program = match program {
            Some(program) => program,
            None => beside().map_err(BenchError::host("cannot find this program"))?,
        };
        Ok(Self { program, image: image.to_owned() })
    }

    /// The command whose time counts as the start of a cell.
    pub fn run_words(&self) -> Vec<OsString> {
        let words = ["run", "--rm", &self.image, "true"];
        [self.program.clone().into()].into_iter().chain(words.map(OsString::from)).collect()
    }

    /// Runs one subcommand to its end.
    pub fn call(&self, arguments: &[&str]) -> Result<Vec<u8>, BenchError> {
        let output = Command::new(&self.program)
            .args(arguments)
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
