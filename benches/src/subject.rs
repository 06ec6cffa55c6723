//! What is compared, and how each of them runs `true`.

use std::ffi::OsString;
use std::fmt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;

use crate::exocell::{Exocell, patiently};

/// A way to run a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// A process of the host.
    Native,
    /// bubblewrap: namespaces only.
    Bwrap,
    /// gVisor: a user-space kernel.
    Gvisor,
    /// A `vm` cell on the `para` platform, guest processes in stubs.
    ParaAspace,
}

impl Subject {
    pub const ALL: [Self; 4] = [Self::Native, Self::Bwrap, Self::Gvisor, Self::ParaAspace];
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Native => "native",
            Self::Bwrap => "bwrap",
            Self::Gvisor => "gvisor",
            Self::ParaAspace => "para-aspace",
        })
    }
}

/// A subject that runs here.
#[derive(Debug)]
pub struct Runner {
    pub subject: Subject,
    words: Vec<OsString>,
}

/// A gVisor that cannot use a platform may hang instead of failing.
const PROBE_MAX: Duration = Duration::from_secs(20);
/// The newest and fastest first; older releases lack it.
const GVISOR_PLATFORMS: [&str; 2] = ["systrap", "ptrace"];

impl Runner {
    /// The subject's command that works here, or why none does.
    pub fn probe(subject: Subject, exocell: &Exocell) -> Result<Self, String> {
        let mut why = String::new();
        for words in candidates(subject, exocell) {
            let runner = Self { subject, words };
            match patiently(&mut runner.command_of_run(), PROBE_MAX) {
                Ok(()) => return Ok(runner),
                Err(reason) => why = format!("{}: {reason}", runner.command()),
            }
        }
        Err(why)
    }

    /// What runs, as one line, without the program's folder.
    pub fn command(&self) -> String {
        let words: Vec<_> = self.words.iter().map(|word| word.to_string_lossy()).collect();
        let line = words.join(" ");
        let folder = words.first().and_then(|program| program.rfind('/')).map_or(0, |at| at + 1);
        line[folder..].to_owned()
    }

    /// Microseconds from the start of the command to its end.
    pub fn time(&self) -> Result<u64, String> {
        let start = Instant::now();
        let status = self.command_of_run().status().map_err(|error| error.to_string())?;
        let elapsed_us = start.elapsed().as_micros() as u64;
        if status.success() { Ok(elapsed_us) } else { Err(format!("{}: {status}", self.command())) }
    }

    fn command_of_run(&self) -> Command {
        let mut words = self.words.iter();
        let mut command = Command::new(words.next().cloned().unwrap_or_default());
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

fn candidates(subject: Subject, exocell: &Exocell) -> Vec<Vec<OsString>> {
    let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
    match subject {
        Subject::Native => vec![words("true")],
        Subject::Bwrap => vec![words(
            "bwrap --unshare-all --die-with-parent --ro-bind / / --dev /dev --proc /proc true",
        )],
        Subject::Gvisor => GVISOR_PLATFORMS
            .iter()
            .map(|platform| {
                words(&format!(
                    "runsc --rootless --network=none --ignore-cgroups --platform={platform} do true"
                ))
            })
            .collect(),
        Subject::ParaAspace => vec![exocell.run_words()],
    }
}
