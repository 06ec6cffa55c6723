//! The guest's console: a log that begins with what was said first, and the end of it
//! for whoever is told why a guest is gone.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use exocell_agent::printable;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::CellError;
use exocell_images::private;

/// How long a dead guest kernel's last words are waited for.
const LAST_WORDS_MAX: Duration = Duration::from_millis(500);
/// The log keeps this much of the beginning.
pub(super) const CONSOLE_BYTES_MAX: usize = 256 << 10;
/// What an error message repeats of the end.
const TAIL_LINES: usize = 5;
const TAIL_CHARS_MAX: usize = 400;

/// The guest's console, from its standard error and its virtio console.
#[derive(Clone)]
pub(super) struct ConsoleLog {
    log: Arc<Mutex<(File, usize)>>,
    /// Standard error of the guest kernel, and of all that it starts.
    pipe: Arc<File>,
}

impl ConsoleLog {
    pub fn new(pipe: File) -> Result<Self, CellError> {
        let file =
            private::create("console.log").map_err(CellError::host("cannot make console.log"))?;
        let log = Arc::new(Mutex::new((file, CONSOLE_BYTES_MAX)));
        Ok(Self { log, pipe: Arc::new(pipe) })
    }

    fn lock(&self) -> MutexGuard<'_, (File, usize)> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads under the lock: what is not in the pipe is in the log.
    pub fn pump(self) {
        let mut buffer = [0; 4096];
        loop {
            self.is_readable(PollTimeout::NONE);
            let mut log = self.lock();
            match (&*self.pipe).read(&mut buffer) {
                Ok(count @ 1..) => keep(&mut log, &buffer[..count]),
                _ => return,
            }
        }
    }

    fn is_readable(&self, timeout: PollTimeout) -> bool {
        let mut waited = [PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)];
        // A pipe without writers is not readable, only hung up.
        poll(&mut waited, timeout).is_ok()
            && waited[0].revents().is_some_and(|events| events.contains(PollFlags::POLLIN))
    }

    /// Waits until a dead guest kernel's last words are in the log.
    pub fn settle(&self) {
        let until = Instant::now() + LAST_WORDS_MAX;
        while Instant::now() < until {
            let log = self.lock();
            if !self.is_readable(PollTimeout::ZERO) {
                return;
            }
            drop(log);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The last lines, for an error message.
    pub fn tail(&self) -> String {
        let log = self.lock();
        let bytes = std::fs::read("console.log").unwrap_or_default();
        drop(log);
        last_words(&bytes)
    }
}

/// What a guest wrote last, to be shown: it chooses the bytes.
fn last_words(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(TAIL_LINES)..].join(" | ");
    let skipped = last.chars().count().saturating_sub(TAIL_CHARS_MAX);
    printable(&last.chars().skip(skipped).collect::<String>()).into_owned()
}

/// A full disk costs the console log, not the guest.
fn keep((file, left): &mut (File, usize), bytes: &[u8]) {
    let kept = bytes.len().min(*left);
    *left -= kept;
    let _ = file.write_all(&bytes[..kept]);
}

impl Write for ConsoleLog {
    /// Takes everything; keeps what fits.
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        keep(&mut self.lock(), bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_few_and_can_be_shown() {
        let said = "one\n\n\x1b[31mtwo\x07\nthree\nfour\nfive\nsix\u{9b}\n";
        assert_eq!(
            last_words(said.as_bytes()),
            "\\u001b[31mtwo\\u0007 | three | four | five | six\\u009b"
        );
        assert_eq!(last_words(b"\xff\n"), "\u{fffd}");
        assert_eq!(last_words(&[b'x'; 5000]).len(), TAIL_CHARS_MAX);
        assert_eq!(last_words(b""), "");
    }
}
