//! Whoever looks after a cell's program: a thread that runs its health check, and who hears of it.
//!
//! ```text
//! wait the interval ──> exec in the guest ──> exit code ──> health.json, watchers
//!   ^    paused: begin to wait anew  └── too late: killed ──┘
//! ```
//! The thread holds nothing that the cell's end waits for: it goes with the process.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use exocell_agent::client::{self, ClientError, ExecEvent, ExecOutput, ExecSession};
use exocell_agent::{FrameWriter, Kind, Patient};

use super::clients::Services;
use super::{Shared, thread};
use crate::control::ControlReply;
use crate::follower::{Follower, Frames, Onlooker};
use crate::health::{Check, Health, NO_EXIT_CODE, News, OUTPUT_BYTES_MAX, Probe, output};
use crate::{CellError, now_ms};

/// How long the guest may take to end a check that is killed.
const KILL_MAX: Duration = Duration::from_secs(5);
/// How long a check may take to begin, whatever its timeout: only one that has begun can be ended.
const BEGIN_MAX: Duration = Duration::from_secs(10);
/// How long none is made after one that did not begin: its stream is the guest's to close.
const REST: Duration = Duration::from_secs(60);
/// The least time between two checks, so that an image's cost the host little.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// How long it may take until it is written down that a check ended as the one before did.
const WRITE_PAUSE: Duration = Duration::from_secs(1);
/// How many clients may hear of the checks of one cell.
const WATCHERS_MAX: usize = 8;

/// What the threads of a supervisor know of its checks.
#[derive(Clone, Default)]
pub(crate) struct Watch {
    shared: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Default)]
struct State {
    paused: bool,
    /// How often the cell was paused.
    pauses: u64,
    /// The cell is ending: nothing more is written down.
    over: bool,
    watchers: Vec<Arc<Follower>>,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cell is paused, or goes on.
    pub fn pause(&self, pause: bool) {
        let mut state = self.lock();
        if pause && !state.paused {
            state.pauses += 1;
        }
        state.paused = pause;
        self.shared.1.notify_all();
    }

    /// The cell is ending.
    pub fn close(&self) {
        self.lock().over = true;
        self.shared.1.notify_all();
    }

    /// Tells the client on `stream` of all checks, until it hangs up.
    pub fn attach(&self, mut stream: &UnixStream) {
        let onlooker = stream.try_clone().ok().and_then(|own| Onlooker::new(own, Vec::new()).ok());
        let Some(follower) = onlooker.map(|own| Arc::new(Follower::Onlooker(own))) else { return };
        {
            let mut state = self.lock();
            if state.watchers.len() >= WATCHERS_MAX {
                return;
            }
            state.watchers.push(follower.clone());
        }
        while matches!(stream.read(&mut [0; 64]), Ok(1..)) {}
        self.lock().watchers.retain(|other| !Arc::ptr_eq(other, &follower));
        follower.forget();
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn tell(&self, news: News) {
        let mut bytes = Vec::new();
        // Writing to memory cannot fail.
        let _ = FrameWriter::new(&mut bytes).write_json(Kind::Reply, &ControlReply::Health(news));
        let frames: Frames = bytes.into();
        let watchers = self.lock().watchers.clone();
        for watcher in watchers {
            // One that has gone takes nothing, and leaves by itself.
            watcher.take(&frames);
        }
    }

    /// Waits until the cell was awake for `interval` without a break; how often it had been paused
    /// by then. `None`: it is ending.
    fn wait(&self, interval: Duration) -> Option<u64> {
        let mut state = self.lock();
        let mut until = Instant::now() + interval;
        while !state.over {
            if state.paused {
                state = self.shared.1.wait(state).unwrap_or_else(PoisonError::into_inner);
                until = Instant::now() + interval;
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Some(state.pauses);
            }
            let waited = self.shared.1.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }

    /// Does `work` if the cell is not ending; it does not end meanwhile.
    fn unless_over(&self, work: impl FnOnce()) {
        let state = self.lock();
        if !state.over {
            work();
        }
    }
}

/// Begins to look after the program of a cell. Before its program runs, it is `starting`.
pub(crate) fn begin(
    check: Check,
    services: Arc<dyn Services>,
    shared: &Shared,
) -> Result<(), CellError> {
    shared.record.write_health(&Health::default())?;
    let shared = shared.clone();
    thread("health", move || {
        shared.input.wait_open();
        look_after(&check, &*services, &shared);
    })
    .map(drop)
}

fn look_after(check: &Check, services: &dyn Services, shared: &Shared) {
    let started = Instant::now();
    let mut health = Health::default();
    let mut written: Option<(Instant, Health)> = None;
    let watch = &shared.health;
    let pause = |health: &Health| check.pause(health.status, started.elapsed()).max(PAUSE_MIN);
    while let Some(pauses) = watch.wait(pause(&health)) {
        let since_start = started.elapsed();
        watch.tell(News::Began);
        let probed = probe(check, services, watch);
        let Some(probe) = probed else { continue };
        watch.tell(News::Ended { exit_code: probe.exit_code });
        // What was paused on its way says nothing.
        if watch.lock().pauses != pauses {
            continue;
        }
        let changed = health.add(check, probe, since_start);
        let is_known = written
            .as_ref()
            .is_some_and(|(at, before)| at.elapsed() < WRITE_PAUSE && health.is_as(before));
        if !is_known {
            // What cannot be written down (a full disk) is tried again with the next.
            watch.unless_over(|| {
                let done = shared.record.write_health(&health);
                written = done.is_ok().then(|| (Instant::now(), health.clone()));
            });
        }
        if changed {
            watch.tell(News::Became(health.status));
        }
    }
}

/// A stream that is waited for until a moment, however little comes at a time.
#[derive(Clone, Copy)]
struct Until<'a> {
    stream: &'a UnixStream,
    at: &'a Cell<Instant>,
}

impl Until<'_> {
    fn left(self) -> io::Result<Duration> {
        match self.at.get().saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(buffer)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes one check; `None` where the guest is gone.
fn probe(check: &Check, services: &dyn Services, watch: &Watch) -> Option<Probe> {
    let start_ms = now_ms();
    let told = |exit_code, output| {
        Some(Probe { start_ms, end_ms: now_ms().max(start_ms), exit_code, output })
    };
    let late = || {
        let limit = exocell_xgate::format_duration(check.timeout);
        told(NO_EXIT_CODE, format!("Health check exceeded timeout ({limit})"))
    };
    let stream = services.connect().ok()?;
    let at = Cell::new(Instant::now() + check.timeout.max(BEGIN_MAX));
    let until = Until { stream: &stream, at: &at };
    let session = match client::exec(until, until, &check.exec) {
        Ok(session) => session,
        Err(error @ ClientError::Failed { .. }) => {
            return told(NO_EXIT_CODE, output(error.to_string().as_bytes()));
        }
        Err(_) if Instant::now() >= at.get() => {
            watch.wait(REST)?;
            return late();
        }
        Err(_) => return None,
    };
    at.set(Instant::now() + check.timeout);
    let ExecSession { guest_pid, output: mut events, .. } = session;
    let mut wrote = Vec::new();
    match follow(&mut events, &mut wrote) {
        Ok(code) => told(code.into(), output(&wrote)),
        Err(_) if Instant::now() < at.get() => None,
        Err(_) => {
            kill(&stream, guest_pid, services, watch);
            late()
        }
    }
}

/// Reads what a check writes, and keeps the beginning; its exit code.
fn follow(events: &mut ExecOutput<impl Read>, wrote: &mut Vec<u8>) -> Result<u8, ClientError> {
    loop {
        match events.event()? {
            ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes) => {
                let room = OUTPUT_BYTES_MAX.saturating_sub(wrote.len());
                wrote.extend(bytes.iter().take(room));
            }
            ExecEvent::Exited(code) => return Ok(code),
        }
    }
}

/// Ends a check that took too long, and waits for that: there is one at a time.
fn kill(stream: &UnixStream, guest_pid: u32, services: &dyn Services, watch: &Watch) {
    // The guest of a paused cell answers nobody.
    if watch.wait(Duration::ZERO).is_none() {
        return;
    }
    let Ok(beside) = services.connect() else { return };
    let beside = Patient::new(beside, KILL_MAX);
    if client::kill_group(&beside, &beside, guest_pid).is_ok() {
        let at = Cell::new(Instant::now() + KILL_MAX);
        // What was read of a frame before is lost; the end of the stream is not.
        let mut rest = Until { stream, at: &at };
        while matches!(rest.read(&mut [0; 4096]), Ok(1..)) {}
    }
}
