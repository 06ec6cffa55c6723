//! What a client is told of a build while it runs: steps, how far they are, and what programs say.
//!
//! A [`Journal`] stands between the build's thread and the client that listens. Who listens
//! slowly slows its build; where nobody listens, what programs say is kept up to a bound.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use exocell_cell::agent::printable;
use exocell_cell::images::Digest;
use prost::Message;
use tokio::sync::Notify;

use crate::control_messages::{Log, Timestamp, Update, Vertex, VertexState, Warning};

/// Bytes that wait for whoever listens.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Said once instead of what is left out.
const CLIPPED: &str = "[what follows is left out until somebody listens]\n";
/// How often a build that waits for its client looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(100);
/// How often it is told how much has come, in bytes.
const STEP_BYTES: u64 = 1 << 20;
/// The longest name of a step.
const NAME_BYTES_MAX: usize = 512;

/// The present.
pub fn now() -> Timestamp {
    of_time(SystemTime::now())
}

pub fn of_time(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() as i32 }
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Journal {
    pages: Mutex<Pages>,
    /// There is something to read.
    written: Notify,
    /// There is room.
    read: Condvar,
}

#[derive(Debug, Default)]
struct Pages {
    waiting: VecDeque<Update>,
    bytes: usize,
    /// Somebody listens; nobody else may.
    is_heard: bool,
    is_ended: bool,
    is_clipped: bool,
}

impl Journal {
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes an update. Waits for room while somebody listens, and leaves what programs say out
    /// where nobody does. Blocks.
    fn write(&self, mut update: Update) {
        let mut pages = self.pages();
        while pages.bytes > WAITING_BYTES_MAX && pages.is_heard && !pages.is_ended {
            let waited = self.read.wait_timeout(pages, LOOK);
            pages = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if pages.is_ended {
            return;
        }
        if pages.bytes > WAITING_BYTES_MAX
            && let Some(log) = update.logs.first_mut()
        {
            if std::mem::replace(&mut pages.is_clipped, true) {
                return;
            }
            log.bytes = CLIPPED.into();
        }
        pages.bytes += update.encoded_len();
        pages.waiting.push_back(update);
        drop(pages);
        self.written.notify_one();
    }

    /// Has the caller, and nobody else, listen. False where somebody does already.
    pub fn hear(self: &Arc<Self>) -> Option<Ear> {
        let mut pages = self.pages();
        if pages.is_heard {
            return None;
        }
        pages.is_heard = true;
        Some(Ear(self.clone()))
    }

    /// Nothing more is written.
    pub fn end(&self) {
        self.pages().is_ended = true;
        self.written.notify_one();
        self.read.notify_all();
    }
}

/// Who listens.
pub struct Ear(Arc<Journal>);

impl Ear {
    /// The next update; `None` after the last.
    pub async fn next(&mut self) -> Option<Update> {
        loop {
            {
                let mut pages = self.0.pages();
                if let Some(update) = pages.waiting.pop_front() {
                    pages.bytes = pages.bytes.saturating_sub(update.encoded_len());
                    self.0.read.notify_all();
                    return Some(update);
                }
                if pages.is_ended {
                    return None;
                }
            }
            self.0.written.notified().await;
        }
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        // The build goes on or is ended by others; nobody hears of it any more.
        self.0.end();
    }
}

/// Tells of a build's steps, one after the other.
pub struct Progress {
    journal: Arc<Journal>,
    /// What makes the steps of this build others than those of another.
    build: String,
    count: u32,
    last: Option<String>,
    now: Option<Vertex>,
}

impl Progress {
    pub fn new(journal: Arc<Journal>, build: &str) -> Self {
        Self { journal, build: build.to_owned(), count: 0, last: None, now: None }
    }

    /// A step begins; the one before it is done.
    pub fn begin(&mut self, name: &str) {
        self.end(None);
        self.count += 1;
        let digest = Digest::of(format!("{} {}", self.build, self.count).as_bytes()).to_string();
        let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
        let end = name.floor_char_boundary(NAME_BYTES_MAX);
        let inputs = self.last.replace(digest.clone()).into_iter().collect();
        let name = printable(&name[..end]).into_owned();
        let started = Some(now());
        let vertex = Vertex { digest, inputs, name, started, ..Vertex::default() };
        self.tell(vertex.clone());
        self.now = Some(vertex);
    }

    fn tell(&self, vertex: Vertex) {
        self.journal.write(Update { vertices: vec![vertex], ..Update::default() });
    }

    /// What the step does was done before.
    pub fn cached(&mut self) {
        if let Some(vertex) = &mut self.now {
            vertex.cached = true;
        }
    }

    /// The step is done, or has failed.
    pub fn end(&mut self, error: Option<&str>) {
        let Some(mut vertex) = self.now.take() else { return };
        vertex.completed = Some(now());
        vertex.error = error.unwrap_or_default().to_owned();
        self.tell(vertex);
    }

    /// What a program writes, or is said of it.
    pub fn log(&self, stream: i64, bytes: &[u8]) {
        let Some(vertex) = self.now.as_ref().map(|vertex| vertex.digest.clone()) else { return };
        let log = Log { vertex, at: Some(now()), stream, bytes: bytes.to_vec() };
        self.journal.write(Update { logs: vec![log], ..Update::default() });
    }

    /// A warning of the step, or of the one before.
    pub fn warn(&self, words: &str) {
        let vertex = self.last.clone().unwrap_or_default();
        let warning = Warning { vertex, level: 1, words: printable(words).into_owned().into() };
        self.journal.write(Update { warnings: vec![warning], ..Update::default() });
    }

    /// A part of the step that is done at once.
    pub fn part(&self, name: &str) {
        self.state(name, 0, Some(now()));
    }

    fn state(&self, name: &str, bytes: u64, completed: Option<Timestamp>) {
        let Some(vertex) = &self.now else { return };
        let state = VertexState {
            id: name.to_owned(),
            vertex: vertex.digest.clone(),
            current: i64::try_from(bytes).unwrap_or(i64::MAX),
            at: Some(now()),
            started: vertex.started,
            completed,
            ..VertexState::default()
        };
        self.journal.write(Update { states: vec![state], ..Update::default() });
    }

    /// How much comes in a part of the step.
    pub fn meter<'a>(&'a self, name: &'a str) -> Meter<'a> {
        Meter { progress: self, name, bytes: 0, told: 0 }
    }
}

/// Counts what comes.
pub struct Meter<'a> {
    progress: &'a Progress,
    name: &'a str,
    bytes: u64,
    told: u64,
}

impl Meter<'_> {
    pub fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        if self.bytes - self.told >= STEP_BYTES {
            self.told = self.bytes;
            self.progress.state(self.name, self.bytes, None);
        }
    }

    /// All has come.
    pub fn end(self) {
        self.progress.state(self.name, self.bytes, Some(now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vertices(ear: &mut Ear, runtime: &tokio::runtime::Runtime) -> Vec<Vertex> {
        let mut found = Vec::new();
        while let Some(update) = runtime.block_on(ear.next()) {
            found.extend(update.vertices);
        }
        found
    }

    #[test]
    fn steps_follow_each_other_and_are_told_to_one_listener() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let journal = Arc::new(Journal::default());
        let mut progress = Progress::new(journal.clone(), "b");
        progress.begin("one\n  and more");
        progress.cached();
        progress.begin("two\x1b[1m");
        progress.end(Some("failed"));
        progress.end(Some("twice"));
        let mut ear = journal.hear().unwrap();
        assert!(journal.hear().is_none());
        journal.end();
        progress.begin("late");
        let told = vertices(&mut ear, &runtime);
        assert_eq!(told.len(), 4);
        assert_eq!(told[1].name, "one and more");
        assert!(told[1].cached && told[1].completed.is_some());
        assert_eq!(told[3].inputs, [told[1].digest.clone()]);
        assert!(!told[3].name.contains('\x1b') && told[3].error == "failed");
    }

    #[test]
    fn who_listens_slowly_is_waited_for_and_who_does_not_is_told_the_steps() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let journal = Arc::new(Journal::default());
        let mut progress = Progress::new(journal.clone(), "b");
        progress.begin("loud");
        let loud = vec![b'x'; 64 << 10];
        for _ in 0..100 {
            progress.log(1, &loud);
        }
        assert!(journal.pages().bytes < 2 * WAITING_BYTES_MAX && journal.pages().is_clipped);
        let mut ear = journal.hear().unwrap();
        let writer = std::thread::spawn(move || {
            for _ in 0..100 {
                progress.log(1, &loud);
            }
            progress.end(None);
            progress.journal.end();
        });
        let mut bytes = 0;
        let mut ended = false;
        while let Some(update) = runtime.block_on(ear.next()) {
            bytes += update.logs.iter().map(|log| log.bytes.len()).sum::<usize>();
            ended |= update.vertices.iter().any(|vertex| vertex.completed.is_some());
        }
        writer.join().unwrap();
        assert!(bytes >= 100 * (64 << 10) && ended);
    }
}
