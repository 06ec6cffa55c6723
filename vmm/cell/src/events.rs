//! The log of what became of cells: `ROOT/events.jsonl`, one JSON object a line.
//!
//! Whoever changes a record's state adds a line, so that a cell's end is told even where its
//! record goes with it, and where its supervisor was killed. The file is at most
//! [`KEPT_BYTES_MAX`] long; what is beyond that moves to `events.old.jsonl`, in place of what was
//! there.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use exocell_images::private;
use serde::{Deserialize, Serialize};

use crate::{Layout, now_ms};

/// How long the log gets before it is moved, in bytes.
const KEPT_BYTES_MAX: u64 = 4 << 20;
/// The longest line that is read, in bytes: a reason may be long, a name may not.
const LINE_BYTES_MAX: usize = 64 << 10;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// A cell was made, or an ended one is about to start again.
    Create,
    /// Its guest is ready for programs.
    Start,
    /// The guest's kernel ended a process for lack of memory; told once, at the cell's end.
    Oom,
    Pause,
    Unpause,
    Exit,
    /// Its record went by hand; what still ran ended with it.
    Remove,
}

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Milliseconds since the epoch.
    pub time_ms: u64,
    pub action: Action,
    /// The cell's.
    pub id: String,
    pub name: String,
    pub image: String,
    /// Of an end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<u8>,
    /// Why the cell ended, when that was not its program's own end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Of a start: when each stage of it was over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<StartTimes>,
}

/// How the start went, in microseconds since the request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTimes {
    pub jailed_us: u64,
    pub kernel_started_us: u64,
    pub guest_ready_us: u64,
    pub program_started_us: u64,
    /// Guest kernel start to init, by the guest's own clock.
    pub guest_init_us: u64,
}

impl Event {
    /// Now, to the cell `id`.
    pub(crate) fn new(action: Action, id: String, name: String, image: String) -> Self {
        let (exit_code, reason, times) = (None, None, None);
        Self { time_ms: now_ms(), action, id, name, image, exit_code, reason, times }
    }
}

/// Where a process writes events.
#[derive(Debug, Clone)]
pub(crate) enum Log {
    /// It opens the file for each.
    At(PathBuf),
    /// It has the file open, and may not see its path.
    Open(Arc<File>),
}

impl Log {
    pub fn of(layout: &Layout) -> Self {
        Self::At(path(layout))
    }

    /// For a process that will not see the state root.
    pub fn opened(&self) -> io::Result<Self> {
        match self {
            Self::At(path) => open(path).map(|file| Self::Open(Arc::new(file))),
            Self::Open(_) => Ok(self.clone()),
        }
    }

    /// Adds a line. A log that can't be written keeps no cell from what it does.
    pub fn add(&self, event: &Event) {
        let Ok(mut line) = serde_json::to_vec(event) else { return };
        line.push(b'\n');
        // In one call, so that lines of several processes do not mix.
        let _ = match self {
            Self::At(path) => open(path).and_then(|mut file| file.write_all(&line)),
            Self::Open(file) => (&**file).write_all(&line),
        };
    }
}

fn path(layout: &Layout) -> PathBuf {
    layout.root().join("events.jsonl")
}

fn old_path(path: &Path) -> PathBuf {
    path.with_file_name("events.old.jsonl")
}

fn open(path: &Path) -> io::Result<File> {
    let file = private::options().create(true).append(true).read(true).open(path)?;
    if file.metadata()?.len() > KEPT_BYTES_MAX {
        // Another process may be at it.
        if file.try_lock().is_ok() {
            let _ = move_lines(&file, path);
            let _ = file.unlock();
        }
    }
    Ok(file)
}

/// Moves all lines to the older file. Supervisors have this one open as long as their cells live,
/// so it stays the same file.
fn move_lines(file: &File, path: &Path) -> io::Result<()> {
    if file.metadata()?.len() <= KEPT_BYTES_MAX {
        return Ok(());
    }
    let (old, new) = (old_path(path), path.with_file_name(".events.new"));
    let mut reader = file.try_clone()?;
    let mut copy = private::create(&new)?;
    reader.seek(SeekFrom::Start(0))?;
    // Until nothing was added meanwhile.
    while io::copy(&mut reader, &mut copy)? > 0 {}
    file.set_len(0)?;
    fs::rename(&new, old)
}

/// Reads the log, and what is added to it.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    open: Option<BufReader<File>>,
    /// The lines of the older file, until they are read.
    old: Option<BufReader<File>>,
    read_bytes: u64,
    line: Vec<u8>,
}

impl Reader {
    /// From the oldest event that is kept; with `only_new` from here on.
    ///
    /// # Errors
    /// A log that is there can't be read.
    pub fn open(layout: &Layout, only_new: bool) -> io::Result<Self> {
        let path = path(layout);
        let there = |path: &Path| match File::open(path) {
            Ok(file) => Ok(Some(BufReader::new(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let old = if only_new { None } else { there(&old_path(&path))? };
        let mut open = there(&path)?;
        let mut read_bytes = 0;
        if let Some(open) = open.as_mut().filter(|_| only_new) {
            read_bytes = open.seek(SeekFrom::End(0))?;
        }
        Ok(Self { path, open, old, read_bytes, line: Vec::new() })
    }

    /// The next event that is there; `None` where all was read for now. A line that is no event is
    /// passed over.
    ///
    /// # Errors
    /// The log can't be read.
    pub fn next_event(&mut self) -> io::Result<Option<Event>> {
        while let Some(line) = self.next_line()? {
            if let Ok(event) = serde_json::from_slice(&line) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    fn next_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        if let Some(old) = &mut self.old {
            let mut line = Vec::new();
            if old.read_until(b'\n', &mut line)? > 0 {
                return Ok(Some(line));
            }
            self.old = None;
        }
        if self.open.is_none() {
            self.open = match File::open(&self.path) {
                Ok(file) => Some(BufReader::new(file)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
        }
        let Some(open) = &mut self.open else { return Ok(None) };
        if open.get_ref().metadata()?.size() < self.read_bytes {
            // Its lines were moved.
            open.seek(SeekFrom::Start(0))?;
            self.read_bytes = 0;
            self.line.clear();
        }
        let count = open.read_until(b'\n', &mut self.line)?;
        self.read_bytes += count as u64;
        if self.line.ends_with(b"\n") || self.line.len() > LINE_BYTES_MAX {
            return Ok(Some(std::mem::take(&mut self.line)));
        }
        // The rest of the line comes.
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str) -> Event {
        Event {
            time_ms: 7,
            action: Action::Exit,
            id: "00".repeat(32),
            name: name.to_owned(),
            image: "image".to_owned(),
            exit_code: Some(3),
            reason: None,
            times: None,
        }
    }

    fn names(reader: &mut Reader) -> Vec<String> {
        std::iter::from_fn(|| reader.next_event().unwrap()).map(|event| event.name).collect()
    }

    #[test]
    fn events_are_read_as_they_come() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let mut all = Reader::open(&layout, false).unwrap();
        assert_eq!(all.next_event().unwrap(), None);
        let log = Log::of(&layout);
        log.add(&event("a"));
        assert_eq!(all.next_event().unwrap(), Some(event("a")));
        let mut new = Reader::open(&layout, true).unwrap();
        log.opened().unwrap().add(&event("b"));
        // Somebody else's line is no event, and half a line is none yet.
        let mut file = open(&path(&layout)).unwrap();
        file.write_all(b"nonsense\n").unwrap();
        log.add(&event("c"));
        file.write_all(b"{\"time_ms\":").unwrap();
        assert_eq!(
            (names(&mut all), names(&mut new)),
            (vec!["b".into(), "c".into()], vec!["b".into(), "c".into()])
        );
    }

    #[test]
    fn a_long_log_is_moved_and_a_supervisor_goes_on_writing() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let held = Log::of(&layout).opened().unwrap();
        let mut follower = Reader::open(&layout, true).unwrap();
        let long = Event { reason: Some("x".repeat(40_000)), ..event("long") };
        for _ in 0..=KEPT_BYTES_MAX / 40_000 {
            held.add(&long);
        }
        let before = names(&mut follower).len();
        Log::of(&layout).add(&event("next"));
        held.add(&event("last"));
        assert_eq!(names(&mut follower), ["next", "last"]);
        let all = names(&mut Reader::open(&layout, false).unwrap());
        assert_eq!(all.len(), before + 2);
        assert!(fs::metadata(path(&layout)).unwrap().len() < 1000);
        assert_eq!(fs::metadata(path(&layout)).unwrap().mode() & 0o777, 0o600);
    }
}
