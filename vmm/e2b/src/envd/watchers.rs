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
use crate::bounds::Share;
use crate::error::{Problem, Result};
use crate::http::Growing;
use crate::keys;
use crate::sandbox::Sandbox;

/// Watched directories of a sandbox at once.
const WATCHERS_MAX: usize = 64;
/// Events that are kept for one client; then it has missed some.
const EVENTS_MAX: usize = 10_000;
const EVENTS_BYTES_MAX: u64 = 4 << 20;

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

struct Kept {
    events: VecDeque<FileEvent>,
    bytes: u64,
    /// As many, of the tenant's share.
    held: Share,
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
    let kept = Arc::new(Mutex::new(Kept::new(sandbox.event_bytes())));
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
    fn new(held: Share) -> Self {
        let (events, bytes) = (VecDeque::new(), 0);
        Self { events, bytes, held, has_missed: false, has_ended: false }
    }

    fn take(&mut self, event: FileEvent) {
        let bytes = (event.name.len() + size_of::<FileEvent>()) as u64;
        match event.change {
            FileChange::Lost => self.miss(),
            FileChange::Ended => self.has_ended = true,
            _ if self.has_missed => {}
            _ if self.events.len() >= EVENTS_MAX
                || self.bytes + bytes > EVENTS_BYTES_MAX
                || !self.held.grow(bytes) =>
            {
                self.miss();
            }
            _ => {
                self.bytes += bytes;
                self.events.push_back(event);
            }
        }
    }

    /// Nothing is kept for a client that has missed something: it has to look anew.
    fn miss(&mut self) {
        self.clear();
        self.has_missed = true;
    }

    /// What was kept, and the share that it has.
    fn clear(&mut self) -> (Vec<FileEvent>, Share) {
        let rest = self.held.another();
        self.bytes = 0;
        (std::mem::take(&mut self.events).into(), std::mem::replace(&mut self.held, rest))
    }

    /// What has happened since it was asked the last time.
    fn give(&mut self) -> Result<(Vec<FileEvent>, Share)> {
        match std::mem::take(&mut self.has_missed) {
            true => Err(missed()),
            false => Ok(self.clear()),
        }
    }
}

/// What has happened since a client asked the last time, behind what `told` says.
pub async fn events(sandbox: &Arc<Sandbox>, id: &str, mut told: Growing) -> Result<Growing> {
    let (wanted, (happened, _held)) = {
        let all = sandbox.watchers.lock();
        let watcher = all.get(id).ok_or_else(|| none(id))?;
        let mut kept = watcher.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let happened = kept.give()?;
        if happened.0.is_empty() && kept.has_ended {
            return Err(Problem::not_found("the watched directory is gone"));
        }
        (watcher.wanted.clone(), happened)
    };
    for one in &happened {
        if let Some(shown) = shown(sandbox, &wanted, one).await {
            told.push(&shown)?;
        }
    }
    Ok(told)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::Shares;

    fn event(name: &str, change: FileChange) -> FileEvent {
        FileEvent { name: name.to_owned(), change }
    }

    #[test]
    fn who_does_not_ask_misses_events_and_hears_of_it() {
        let mut kept = Kept::new(Shares::new(64 << 20).none("ann"));
        kept.take(event("n", FileChange::Created));
        assert_eq!(kept.give().unwrap().0.len(), 1);
        assert!(kept.give().unwrap().0.is_empty());
        for _ in 0..=EVENTS_MAX {
            kept.take(event("n", FileChange::Written));
        }
        assert_eq!(kept.give().unwrap_err().status, 429);
        assert!(kept.give().unwrap().0.is_empty());
        kept.take(event(&"x".repeat(EVENTS_BYTES_MAX as usize + 1), FileChange::Created));
        assert!(kept.give().is_err());
    }

    #[test]
    fn events_are_kept_within_their_tenants_share() {
        let shares = Shares::new(64 << 10);
        let watch = |who: &str| {
            let mut kept = Kept::new(shares.none(who));
            (0..100).for_each(|_| kept.take(event(&"x".repeat(100), FileChange::Created)));
            kept
        };
        let mut all: Vec<Kept> = (0..64).map(|_| watch("ann")).collect();
        let missed = all.iter().filter(|kept| kept.has_missed).count();
        assert!(missed >= 60, "{missed}");
        assert!(all.iter().all(|kept| !kept.has_missed || kept.events.is_empty()));
        assert!(shares.take("bob", 16 << 10).is_some());
        for kept in &mut all {
            assert!(kept.give().is_ok() || kept.give().is_ok(), "told once");
        }
        assert!(shares.take("ann", 32 << 10).is_some(), "given back");
        assert!(!watch("ann").has_missed);
    }
}
