//! The two samplers of a run: one in the cell, one on the host.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::samples::{self, Held, Sample, Watched};
use super::{FOLDER, PROGRAM, memory_file};
use crate::BenchError;
use crate::exocell::{Cell, Exocell};

/// The host samples this often, so that a guest's sample has one near it.
const HOST_PERIOD_MS: &str = "1";

/// A running sampler, and what it has written.
struct Sampler {
    child: Child,
    text: Arc<Mutex<String>>,
}

impl Sampler {
    fn start(mut command: Command) -> Result<Self, BenchError> {
        let failed = || BenchError::host("a sampler");
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(failed())?;
        let text = Arc::new(Mutex::new(String::new()));
        if let Some(mut output) = child.stdout.take() {
            let text = text.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 1 << 14];
                while let Ok(count @ 1..) = output.read(&mut buffer) {
                    let words = String::from_utf8_lossy(&buffer[..count]);
                    text.lock().unwrap_or_else(PoisonError::into_inner).push_str(&words);
                }
            });
        }
        Ok(Self { child, text })
    }

    /// Its whole lines.
    fn so_far(&self) -> String {
        let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        text[..text.rfind('\n').map_or(0, |end| end + 1)].to_owned()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // It may have ended with its cell.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Both samplers of a cell, until it ends.
pub struct Watch {
    guest: Sampler,
    host: Sampler,
    since: Instant,
}

/// What both wrote.
pub struct Series {
    watched: Vec<Watched>,
    held: Vec<Held>,
    held_in_blocks: Vec<Held>,
    seconds: f64,
}

impl Watch {
    pub fn start(
        exocell: &Exocell,
        cell: &Cell,
        folder: &Path,
        period_ms: u32,
    ) -> Result<Self, BenchError> {
        let program = format!("{FOLDER}/{}", PROGRAM.name);
        let period = period_ms.to_string();
        let guest = exocell.with(&["exec", &cell.name, &program, "watch", &period]);
        let mut host = Command::new(folder.join(PROGRAM.name));
        host.args(["held", HOST_PERIOD_MS]).arg(memory_file(exocell, cell)?);
        let (guest, host) = (Sampler::start(guest)?, Sampler::start(host)?);
        Ok(Self { guest, host, since: Instant::now() })
    }

    pub fn so_far(&self) -> Series {
        let host = self.host.so_far();
        Series {
            watched: samples::watched(&self.guest.so_far()),
            held: samples::held(&host),
            held_in_blocks: samples::held_in_blocks(&host),
            seconds: self.since.elapsed().as_secs_f64(),
        }
    }

    pub fn end(self) -> Series {
        self.so_far()
    }
}

impl Series {
    pub fn never_held_bytes(&self, file_bytes: u64) -> Option<f64> {
        samples::never_held_bytes(file_bytes, &self.watched, &self.held)
    }

    pub fn join(&self, file_bytes: u64, never_held: f64) -> Vec<Sample> {
        samples::join(file_bytes, never_held, &self.watched, &self.held)
    }

    /// As [`Self::join`], but held is what blocks of 2 MiB would hold that have a page in use.
    pub fn join_in_blocks(&self, file_bytes: u64, never_held: f64) -> Vec<Sample> {
        samples::join(file_bytes, never_held, &self.watched, &self.held_in_blocks)
    }

    /// How far the time stamp counter goes in a second: the host's sampler ran all the while.
    pub fn ticks_per_second(&self) -> f64 {
        let (Some(first), Some(last)) = (self.held.first(), self.held.last()) else { return 1.0 };
        (last.at.begin - first.at.begin) as f64 / self.seconds
    }
}
