//! The guest's console: a log of what was said first and of what was said last, for whoever
//! is told why a guest is gone. What lies between a guest can make as long as it likes, its
//! ordinary users too.
//!
//! ```text
//! console.log   HEAD_BYTES_MAX, as it comes | a line that counts what is not kept | TAIL_BYTES_MAX
//! ```
//! The tail is held in memory and written again by the thread that reads the pipe.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use exocell_agent::printable;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::CellError;
use exocell_images::private;

/// How long a dead guest kernel's last words are waited for.
const LAST_WORDS_MAX: Duration = Duration::from_millis(500);
/// The log keeps this much of the beginning, and this much of the end.
const HEAD_BYTES_MAX: usize = 192 << 10;
const TAIL_BYTES_MAX: usize = 64 << 10;
/// How long the log may lack what was said last, in milliseconds.
const STALE_MS_MAX: u16 = 1000;
/// What an error message repeats of the end.
const TAIL_LINES: usize = 5;
const TAIL_CHARS_MAX: usize = 400;

/// The guest's console, from its standard error and its virtio console.
#[derive(Clone)]
pub(super) struct ConsoleLog {
    log: Arc<Mutex<Log>>,
    /// Standard error of the guest kernel, and of all that it starts.
    pipe: Arc<File>,
}

impl ConsoleLog {
    pub fn new(pipe: File) -> Result<Self, CellError> {
        let file =
            private::create("console.log").map_err(CellError::host("cannot make console.log"))?;
        Ok(Self { log: Arc::new(Mutex::new(Log::new(file))), pipe: Arc::new(pipe) })
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads under the lock: what is not in the pipe is in the log.
    pub fn pump(self) {
        let mut buffer = [0; 4096];
        let mut written = Instant::now();
        loop {
            let is_stale = self.lock().is_stale;
            let waits = if is_stale { STALE_MS_MAX.into() } else { PollTimeout::NONE };
            let is_readable = self.is_readable(waits);
            let mut log = self.lock();
            if log.is_stale && written.elapsed() >= Duration::from_millis(STALE_MS_MAX.into()) {
                log.write_tail();
                written = Instant::now();
            }
            if is_stale && !is_readable && !self.is_hung_up() {
                continue;
            }
            match (&*self.pipe).read(&mut buffer) {
                Ok(count @ 1..) => log.keep(&buffer[..count]),
                _ => return log.write_tail(),
            }
        }
    }

    fn events(&self, timeout: PollTimeout) -> PollFlags {
        let mut waited = [PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)];
        let polled = poll(&mut waited, timeout);
        waited[0].revents().filter(|_| polled.is_ok()).unwrap_or(PollFlags::empty())
    }

    /// A pipe without writers is not readable, only hung up.
    fn is_readable(&self, timeout: PollTimeout) -> bool {
        self.events(timeout).contains(PollFlags::POLLIN)
    }

    fn is_hung_up(&self) -> bool {
        self.events(PollTimeout::ZERO).contains(PollFlags::POLLHUP)
    }

    /// Waits until a dead guest kernel's last words are in the log.
    pub fn settle(&self) {
        let until = Instant::now() + LAST_WORDS_MAX;
        while Instant::now() < until {
            let mut log = self.lock();
            if !self.is_readable(PollTimeout::ZERO) {
                return log.write_tail();
            }
            drop(log);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The last lines, for an error message.
    pub fn tail(&self) -> String {
        let mut log = self.lock();
        log.write_tail();
        let bytes = std::fs::read("console.log").unwrap_or_default();
        drop(log);
        last_words(&bytes)
    }
}

/// What the log holds. A full disk costs it, not the guest.
struct Log {
    file: File,
    /// What the head has room for, in bytes.
    room: usize,
    tail: VecDeque<u8>,
    /// Bytes between the two that are not kept.
    lost: u64,
    /// Whether the file lacks some of the tail.
    is_stale: bool,
}

impl Log {
    fn new(file: File) -> Self {
        let tail = VecDeque::new();
        Self { file, room: HEAD_BYTES_MAX, tail, lost: 0, is_stale: false }
    }

    fn keep(&mut self, bytes: &[u8]) {
        let (head, rest) = bytes.split_at(bytes.len().min(self.room));
        self.room -= head.len();
        let _ = self.file.write_all(head);
        self.tail.extend(rest);
        let over = self.tail.len().saturating_sub(TAIL_BYTES_MAX);
        self.tail.drain(..over);
        self.lost += over as u64;
        self.is_stale |= !rest.is_empty();
    }

    fn write_tail(&mut self) {
        if std::mem::take(&mut self.is_stale) {
            // A disk that is full now may not be so the next time.
            let _ = self.try_write_tail();
        }
    }

    fn try_write_tail(&mut self) -> std::io::Result<()> {
        let start = HEAD_BYTES_MAX as u64;
        self.file.seek(SeekFrom::Start(start))?;
        if self.lost > 0 {
            let lost = self.lost;
            writeln!(self.file, "\nexocell: {lost} bytes of the console were not kept here")?;
        }
        let (first, second) = self.tail.as_slices();
        self.file.write_all(first)?;
        self.file.write_all(second)?;
        let end = self.file.stream_position()?;
        self.file.set_len(end)
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

impl Write for ConsoleLog {
    /// Takes everything; keeps what fits.
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.lock().keep(bytes);
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
    #[test]
    fn a_long_log_keeps_its_beginning_and_its_end() {
        let mut file = tempfile::tempfile().unwrap();
        let mut log = Log::new(file.try_clone().unwrap());
        let mut said = Vec::new();
        for line in 0..40_000 {
            let line = format!("line {line}\n");
            log.keep(line.as_bytes());
            said.extend_from_slice(line.as_bytes());
            if said.len() % 7 == 0 {
                log.write_tail();
            }
        }
        log.write_tail();
        let mut kept = Vec::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut kept).unwrap();
        assert_eq!(kept[..HEAD_BYTES_MAX], said[..HEAD_BYTES_MAX]);
        assert!(kept.ends_with(&said[said.len() - TAIL_BYTES_MAX..]));
        let note = String::from_utf8_lossy(&kept[HEAD_BYTES_MAX..kept.len() - TAIL_BYTES_MAX]);
        let lost = said.len() - HEAD_BYTES_MAX - TAIL_BYTES_MAX;
        assert_eq!(note, format!("\nexocell: {lost} bytes of the console were not kept here\n"));
    }
}
