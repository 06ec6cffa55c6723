//! The decisions about a cell's network, as they are written down.
//!
//! ```text
//! network thread -> Waiting -> [a bounded queue] -> Written -> Log: LOG -> LOG_OLD -> dropped
//!                                                   the first of a kind that let something in
//!                                                   or out: LOG -> LOG_OLD -> LOG_FIRST, kept
//! ```
//! A guest makes as many decisions as it likes, so nothing that is denied takes the place of
//! what was not.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

use exocell_agent::printable;
use exocell_images::private;
use exocell_network::audit::{Audit, Decision, Entry};

/// The decisions are kept in two files of at most this many bytes; the older
/// is dropped. What is kept of it has as many.
const LOG_BYTES_MAX: u64 = 1 << 20;
/// Decisions that may wait to be written; more are counted and lost.
const WAITING_MAX: usize = 1024;
/// How many of those may be of what was not let through.
const OTHERS_MAX: usize = WAITING_MAX / 2;
/// Decisions that are written at once.
const WRITTEN_MAX: usize = 128;
/// How long their writer rests after that, so that a guest that opens and closes connections
/// wakes it now and then, not twice for each.
const REST: Duration = Duration::from_millis(2);
/// What let something in or out, the first of each kind, of all that was dropped.
pub const LOG_FIRST: &str = "network.log.first";
pub const LOG_OLD: &str = "network.log.old";
pub const LOG: &str = "network.log";
/// All of them, in the order of time.
pub const LOGS: [&str; 3] = [LOG_FIRST, LOG_OLD, LOG];

/// Entries on their way to the thread that writes them.
pub(crate) struct Waiting {
    entries: SyncSender<Entry>,
    others: Arc<AtomicUsize>,
    lost: u64,
}

/// The other end.
pub struct Written {
    entries: Receiver<Entry>,
    others: Arc<AtomicUsize>,
}

/// Both ends.
pub(crate) fn waiting() -> (Waiting, Written) {
    let (sender, entries) = sync_channel(WAITING_MAX);
    let others = Arc::new(AtomicUsize::new(0));
    (Waiting { entries: sender, others: others.clone(), lost: 0 }, Written { entries, others })
}

/// Whether something came in or went out by it. A question for a name leads nowhere.
fn let_through(entry: &Entry) -> bool {
    let passed = matches!(entry.decision, Decision::Allowed | Decision::Closed | Decision::Cut);
    passed && matches!(entry.event, "connect" | "listen" | "secret")
}

impl Waiting {
    fn send(&self, entry: Entry) -> bool {
        let is_other = !let_through(&entry);
        if is_other && self.others.load(Ordering::Relaxed) >= OTHERS_MAX {
            return false;
        }
        // Before the other end counts it down.
        self.others.fetch_add(usize::from(is_other), Ordering::Relaxed);
        match self.entries.try_send(entry) {
            // Without a writer nothing is lost that anybody would read.
            Ok(()) | Err(TrySendError::Disconnected(_)) => true,
            Err(TrySendError::Full(_)) => {
                self.others.fetch_sub(usize::from(is_other), Ordering::Relaxed);
                false
            }
        }
    }
}

impl Audit for Waiting {
    fn record(&mut self, entry: Entry) {
        if self.lost > 0 {
            let note = Entry::new("log", Decision::Failed, format!("{} entries", self.lost));
            if self.send(note.because("came too fast to be written")) {
                self.lost = 0;
            }
        }
        if !self.send(entry) {
            self.lost += 1;
        }
    }
}

impl Written {
    /// Some entries, once there are any; none when nobody is left who could send one.
    fn next(&self) -> Vec<Entry> {
        let first = self.entries.recv().ok();
        let more = iter::from_fn(|| self.entries.try_recv().ok());
        let entries: Vec<Entry> = first.into_iter().chain(more).take(WRITTEN_MAX).collect();
        let others = entries.iter().filter(|entry| !let_through(entry)).count();
        self.others.fetch_sub(others, Ordering::Relaxed);
        entries
    }
}

/// Where decisions are written down: a directory.
pub struct Log(PathBuf);

/// The lines of what let something through for the first time.
#[derive(Default)]
struct First {
    /// Which ones there were, without their times and bytes.
    known: HashSet<String>,
    bytes: u64,
    /// How many more there were than are kept.
    beyond: u64,
    /// Those in [`LOG`] and in [`LOG_OLD`].
    new: Vec<u8>,
    old: Vec<u8>,
    file: Option<File>,
}

impl First {
    fn see(&mut self, entry: &Entry, line: &[u8]) {
        if !let_through(entry) {
            return;
        }
        let mut kind = Entry { time_ms: 0, bytes: None, ..entry.clone() };
        // Callers come from any port of theirs.
        let caller = kind.peer.as_mut().filter(|_| entry.event == "listen");
        caller.into_iter().for_each(|peer| peer.set_port(0));
        let Ok(kind) = serde_json::to_string(&kind) else { return };
        if self.known.contains(&kind) {
            return;
        }
        if self.bytes + line.len() as u64 > LOG_BYTES_MAX {
            self.beyond += 1;
            return;
        }
        self.bytes += line.len() as u64;
        self.known.insert(kind);
        self.new.extend_from_slice(line);
    }

    /// [`LOG_OLD`] is dropped for [`LOG`].
    fn turn_over(&mut self, directory: &Path) {
        if !self.old.is_empty() && self.file.is_none() {
            self.file = private::create(directory.join(LOG_FIRST)).ok();
        }
        // A full disk costs the log, not the cell.
        let _ = self.file.as_mut().map(|file| file.write_all(&self.old));
        self.old = std::mem::take(&mut self.new);
    }

    /// What the next file begins with, where not all were kept.
    fn note(&mut self) -> Option<Entry> {
        let beyond = std::mem::take(&mut self.beyond);
        let note = Entry::new("log", Decision::Failed, format!("{beyond} entries"));
        (beyond > 0).then(|| note.because("of other peers were not kept: there are too many"))
    }
}

impl Log {
    /// The working directory.
    pub fn here() -> Self {
        Self(PathBuf::new())
    }

    pub fn within(directory: &Path) -> Self {
        Self(directory.to_owned())
    }

    /// Writes entries until nobody is left who could send one.
    pub fn write(&self, written: &Written) {
        let (path, old) = (self.0.join(LOG), self.0.join(LOG_OLD));
        let (mut file, mut first): (Option<File>, First) = (None, First::default());
        let mut bytes = 0;
        loop {
            let mut entries = written.next();
            if entries.is_empty() {
                return;
            }
            if bytes > LOG_BYTES_MAX && std::fs::rename(&path, &old).is_ok() {
                (file, bytes) = (None, 0);
                first.turn_over(&self.0);
                entries.extend(first.note());
            }
            if file.is_none() {
                file = private::create(&path).ok();
            }
            let mut lines = Vec::new();
            for entry in &entries {
                let Ok(line) = serde_json::to_string(entry) else { continue };
                // Host names are the guest's word; what is JSON stays the same JSON.
                let line = format!("{}\n", printable(&line));
                first.see(entry, line.as_bytes());
                lines.extend_from_slice(line.as_bytes());
            }
            bytes += lines.len() as u64;
            // A full disk costs the log, not the cell.
            let _ = file.as_mut().map(|file| file.write_all(&lines));
            thread::sleep(REST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connected(target: &str) -> Entry {
        Entry::new("connect", Decision::Allowed, target)
    }

    /// The whole log that is kept of what `say` records, and how much that is.
    fn kept(say: impl FnOnce(&mut dyn FnMut(Entry)) + Send) -> (String, u64) {
        let place = tempfile::tempdir().unwrap();
        let (waiting, written) = waiting();
        let log = Log::within(place.path());
        thread::scope(|scope| {
            scope.spawn(move || log.write(&written));
            say(&mut |entry| {
                // Here none may be lost because the writer is behind.
                while !waiting.send(entry.clone()) {
                    thread::sleep(REST);
                }
            });
            drop(waiting);
        });
        let read = |name| std::fs::read_to_string(place.path().join(name)).unwrap_or_default();
        let texts = LOGS.map(read);
        (texts.concat(), texts.iter().map(|text| text.len() as u64).sum())
    }

    #[test]
    fn what_was_let_through_stays_however_much_is_denied() {
        let (log, bytes) = kept(|record| {
            record(connected("peer.test"));
            for index in 0..20_000 {
                let denied = Entry::new("name", Decision::Denied, format!("{index}.other.test"));
                record(denied.because("no rule covers it"));
            }
        });
        assert_eq!(log.matches("peer.test").count(), 1);
        assert!(log.contains("19999.other.test") && !log.contains("\"0.other.test"));
        assert!(bytes < 4 * LOG_BYTES_MAX, "{bytes}");
    }

    #[test]
    fn the_first_connection_stays_however_often_others_are_made() {
        let (log, bytes) = kept(|record| {
            record(connected("first.test"));
            for index in 0..40_000 {
                record(connected(&format!("{}.other.test", index % 10)));
            }
            record(connected("last.test"));
        });
        for target in ["first.test", "0.other.test", "9.other.test", "last.test"] {
            assert!(log.contains(target), "{target}");
        }
        assert!(log.lines().next().unwrap().contains("first.test"), "older ones come first");
        assert!(bytes < 4 * LOG_BYTES_MAX, "{bytes}");
    }

    #[test]
    fn more_peers_than_can_be_kept_are_told() {
        let (log, bytes) = kept(|record| {
            (0..30_000).for_each(|index| record(connected(&format!("{index}.other.test"))));
        });
        assert!(log.contains("\"0.other.test") && log.contains("29999.other.test"));
        assert!(log.contains("of other peers were not kept"));
        assert!(bytes < 4 * LOG_BYTES_MAX, "{bytes}");
    }

    #[test]
    fn what_is_denied_leaves_room_in_the_queue() {
        let (mut waiting, written) = waiting();
        for _ in 0..10_000 {
            waiting.record(Entry::new("name", Decision::Denied, "other.test"));
        }
        waiting.record(connected("peer.test"));
        drop(waiting);
        let all: Vec<Entry> =
            iter::from_fn(|| Some(written.next()).filter(|some| !some.is_empty()))
                .flatten()
                .collect();
        assert_eq!((all.len(), all[OTHERS_MAX].target.as_str()), (OTHERS_MAX + 1, "peer.test"));
        assert_eq!(written.others.load(Ordering::Relaxed), 0);
    }
}
