//! Watched directories: streams, and what is kept for clients that ask now and then.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use exocell_cell::agent::Kind;
use exocell_cell::agent::files::{self, FileAction, FileChange, FileEvent, FileRequest};
use exocell_docker::frames::read_frame;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::task::AbortHandle;

use super::connect::Stream;
use super::filesystem::{act, entry, event};
use super::of_user;
use crate::error::{Problem, Result};
use crate::keys;
use crate::sandbox::Sandbox;

/// Watched directories of a sandbox at once.
const WATCHERS_MAX: usize = 64;
/// Events that are kept for one client; then it has missed some.
const EVENTS_MAX: usize = 10_000;
const EVENTS_BYTES_MAX: usize = 4 << 20;

/// What is to be watched.
#[derive(Debug, Clone)]
pub struct Watching {
    pub user: String,
    pub path: String,
    pub recursive: bool,
    /// Whether each event comes with what the file is by then.
    pub include_entry: bool,
}

/// A watch that runs.
pub struct Watch {
    wanted: Watching,
    events: UnixStream,
}

#[derive(Default)]
struct Kept {
    events: VecDeque<FileEvent>,
    bytes: usize,
    has_missed: bool,
    has_ended: bool,
}

struct Watcher {
    wanted: Watching,
    kept: Arc<Mutex<Kept>>,
    task: AbortHandle,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The watchers of a sandbox.
#[derive(Default)]
pub struct Watchers(Mutex<HashMap<String, Watcher>>);

impl Watchers {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Watcher>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn clear(&self) {
        self.lock().clear();
    }

    pub fn remove(&self, id: &str) -> Result<()> {
        self.lock().remove(id).map(drop).ok_or_else(|| none(id))
    }
}

fn none(id: &str) -> Problem {
    Problem::not_found(format!("watcher with id {id:?} not found"))
}

/// Begins to watch.
pub async fn begin(sandbox: &Arc<Sandbox>, wanted: Watching) -> Result<Watch> {
    let request = FileRequest {
        user: wanted.user.clone(),
        path: wanted.path.clone(),
        action: FileAction::Watch { recursive: wanted.recursive },
    };
    let line = sandbox.line(move |guest| Ok(files::done(guest, guest, &request)?)).await;
    Ok(Watch { wanted, events: line.map_err(of_user)? })
}

/// The next events; none when the guest tells no more.
async fn next(events: &mut UnixStream) -> Vec<FileEvent> {
    let Ok(Some(frame)) = read_frame(events).await else { return Vec::new() };
    if frame.kind != Kind::Data {
        return Vec::new();
    }
    let lines = frame.payload.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// An event as a client is told of it.
async fn shown(sandbox: &Arc<Sandbox>, wanted: &Watching, happened: &FileEvent) -> Option<Value> {
    let mut told = None;
    if wanted.include_entry && happened.change != FileChange::Removed {
        let path = format!("{}/{}", wanted.path.trim_end_matches('/'), happened.name);
        let request = FileRequest { user: wanted.user.clone(), path, action: FileAction::Stat };
        // It may be gone.
        told = act(sandbox, request).await.ok().map(|found| entry(&found));
    }
    event(happened, told)
}

/// Tells a client what happens, until it goes, its time is over, or the directory is gone.
pub async fn stream(
    sandbox: &Arc<Sandbox>,
    mut watch: Watch,
    stream: Stream,
    limit: Option<Duration>,
    every: Duration,
) {
    let limit = limit.unwrap_or(Duration::from_secs(365 * 24 * 3600));
    let mut over = std::pin::pin!(tokio::time::sleep(limit));
    let mut listens = stream.say(&json!({ "start": {} })).await;
    while listens {
        let mut reading = std::pin::pin!(next(&mut watch.events));
        let happened = loop {
            tokio::select! {
                happened = &mut reading => break happened,
                () = stream.closed() => return,
                () = sandbox.gone() => break Vec::new(),
                () = &mut over => {
                    return stream.end(Err(Problem::deadline("the time of the call is over"))).await;
                }
                () = tokio::time::sleep(every) => {
                    if !stream.say(&json!({ "keepalive": {} })).await {
                        return;
                    }
                }
            }
        };
        if happened.is_empty() {
            let lost = "the connection to the sandbox ended";
            return stream.end(Err(Problem::unavailable(lost))).await;
        }
        for one in &happened {
            match one.change {
                FileChange::Ended => return stream.end(Ok(())).await,
                FileChange::Lost => return stream.end(Err(missed())).await,
                _ => {}
            }
            if let Some(told) = shown(sandbox, &watch.wanted, one).await {
                listens = listens && stream.say(&json!({ "filesystem": told })).await;
            }
        }
    }
}

fn missed() -> Problem {
    Problem::exhausted("more has happened in the directory than is kept; look at it anew")
}

/// Watches for a client that asks now and then; the watcher's id.
pub async fn create(sandbox: &Arc<Sandbox>, wanted: Watching) -> Result<String> {
    let full = || {
        Problem::exhausted(format!(
            "the sandbox has {WATCHERS_MAX} watchers, as many as it may have; remove one"
        ))
    };
    if sandbox.watchers.lock().len() >= WATCHERS_MAX {
        return Err(full());
    }
    let Watch { wanted, mut events } = begin(sandbox, wanted).await?;
    let kept: Arc<Mutex<Kept>> = Arc::default();
    let keeping = kept.clone();
    let task = tokio::spawn(async move {
        loop {
            let happened = next(&mut events).await;
            let mut kept = keeping.lock().unwrap_or_else(PoisonError::into_inner);
            if happened.is_empty() {
                kept.has_ended = true;
                return;
            }
            happened.into_iter().for_each(|event| kept.take(event));
        }
    });
    let watcher = Watcher { wanted, kept, task: task.abort_handle() };
    let id = keys::random().map_err(|error| Problem::internal(error.to_string()))?;
    let mut all = sandbox.watchers.lock();
    if all.len() >= WATCHERS_MAX {
        return Err(full());
    }
    all.insert(id.clone(), watcher);
    Ok(id)
}

impl Kept {
    fn take(&mut self, event: FileEvent) {
        match event.change {
            FileChange::Lost => self.has_missed = true,
            FileChange::Ended => self.has_ended = true,
            _ if self.events.len() >= EVENTS_MAX
                || self.bytes + event.name.len() > EVENTS_BYTES_MAX =>
            {
                self.has_missed = true;
            }
            _ => {
                self.bytes += event.name.len();
                self.events.push_back(event);
            }
        }
    }

    /// What has happened since it was asked the last time.
    fn give(&mut self) -> Result<Vec<FileEvent>> {
        if std::mem::take(&mut self.has_missed) {
            (self.events, self.bytes) = (VecDeque::new(), 0);
            return Err(missed());
        }
        self.bytes = 0;
        Ok(std::mem::take(&mut self.events).into())
    }
}

/// What has happened since a client asked the last time.
pub async fn events(sandbox: &Arc<Sandbox>, id: &str) -> Result<Vec<Value>> {
    let (wanted, happened) = {
        let all = sandbox.watchers.lock();
        let watcher = all.get(id).ok_or_else(|| none(id))?;
        let mut kept = watcher.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let happened = kept.give()?;
        if happened.is_empty() && kept.has_ended {
            return Err(Problem::not_found("the watched directory is gone"));
        }
        (watcher.wanted.clone(), happened)
    };
    let mut all = Vec::new();
    for one in &happened {
        all.extend(shown(sandbox, &wanted, one).await);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_ask_misses_events_and_hears_of_it() {
        let mut kept = Kept::default();
        let event = |change| FileEvent { name: "n".into(), change };
        kept.take(event(FileChange::Created));
        assert_eq!(kept.give().unwrap().len(), 1);
        assert!(kept.give().unwrap().is_empty());
        for _ in 0..=EVENTS_MAX {
            kept.take(event(FileChange::Written));
        }
        assert_eq!(kept.give().unwrap_err().status, 429);
        assert!(kept.give().unwrap().is_empty());
        let name = "x".repeat(EVENTS_BYTES_MAX + 1);
        kept.take(FileEvent { name, change: FileChange::Created });
        assert!(kept.give().is_err());
    }
}
