//! The way from the process that listens to its workers.
//!
//! ```text
//!              request                       Ask::Start               (no worker) ── evicts, or 503
//! no worker ────────────> wanted ─────────────────────────> started ──> a line
//!     ^                     │ failed: 503                               │  answers, by number
//!     └─────────────────────┴───────── ended: 502 for what is open <────┘  dead, silent, hostile,
//!                                                                          idle: Ask::End
//! ```
//!
//! One place a tenant, or one for all; a place has one worker at a time. Workers are hostile: a
//! worker that says what is no answer to a request of its own line, or nothing by the deadline of
//! one, is ended. Nothing here waits for one worker while another has something to say.

use crate::call::{Done, Work};
use crate::http::Answer;
use crate::loaded::Callable;
use crate::runner::Runner;
use crate::wire::{self, Broken, Frames};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// For a worker to be there.
const START_TIME: Duration = Duration::from_secs(20);
/// What an answer may take longer than the deadline of its call.
const GRACE: Duration = Duration::from_secs(5);
/// How long what was open on a dead line waits to be told how its worker ended.
const OBITUARY_TIME: Duration = Duration::from_secs(2);

/// Calls whose CPU time is less than this on average are short.
const SHORT_NS: u64 = 100_000;
/// Part of the average that the last call is.
const LAST_PART: u64 = 8;
/// How long a request waits at most for an answer to go with.
const HOLD_TIME: Duration = Duration::from_millis(2);

/// What the process that listens wants of the one that starts workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// A worker for a place, which is the name of a tenant, or empty if there is one for all.
    Start {
        /// Which.
        place: String,
        /// By which it is known from now on.
        number: u64,
    },
    /// The end of a worker.
    End {
        /// Which.
        number: u64,
    },
}

/// What that one says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Told {
    /// All that may be called from now on.
    Listing(crate::Listing),
    /// A worker was started; its socket comes with it.
    Started {
        /// Which.
        number: u64,
        /// Whether it is kept though it is idle, for what it holds, as long as nobody else wants
        /// its place.
        is_kept: bool,
    },
    /// It could not be.
    Failed {
        /// Which.
        number: u64,
        /// Why.
        why: String,
    },
    /// It has ended.
    Ended {
        /// Which.
        number: u64,
        /// How.
        how: String,
    },
    /// It goes on with what it has begun, and is asked for nothing more.
    Outdated {
        /// Which.
        number: u64,
    },
}

/// How many workers there are, for whom.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct WorkerRules {
    /// One for all tenants, not one for each.
    pub is_shared: bool,
    /// At once.
    pub workers_max: usize,
    /// After which one that has nothing to do is ended.
    pub idle: Duration,
}

/// All lines.
pub struct Lines {
    rules: WorkerRules,
    answer_bytes: usize,
    ask: Box<dyn Fn(Ask) + Send + Sync>,
    runtime: Handle,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last_number: u64,
    places: HashMap<String, Place>,
    /// By number; also those that no place has any more.
    lines: HashMap<u64, Arc<Line>>,
}

enum Place {
    /// Who waits for it.
    Wanted {
        number: u64,
        waiting: Vec<oneshot::Sender<Result<Arc<Line>, String>>>,
    },
    Has(Arc<Line>),
}

/// A worker that was started.
struct Line {
    number: u64,
    place: String,
    is_kept: bool,
    out: tokio::sync::Mutex<OwnedWriteHalf>,
    open: Mutex<Open>,
}

struct Open {
    last: u64,
    /// Who waits for which answer.
    waiting: HashMap<u64, oneshot::Sender<Done>>,
    used: Instant,
    /// It takes nothing more.
    is_over: bool,
    /// Requests that were sent and have no answer.
    sent: usize,
    held: Held,
    /// CPU time of a call, on average.
    usual_ns: u64,
}

/// Requests that are not sent yet. To wake a worker costs as much as a short call takes, so where
/// calls are short, and one is under way, what comes meanwhile goes together when that is over.
#[derive(Default)]
struct Held {
    bytes: Vec<u8>,
    count: usize,
    /// Whether they go after a while in any case.
    is_timed: bool,
}

impl Line {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a request, and where its answer comes; `None` if it takes no more.
    fn expect(&self) -> Option<(u64, oneshot::Receiver<Done>)> {
        let mut open = self.open();
        if open.is_over {
            return None;
        }
        open.last += 1;
        let (number, (send, receive)) = (open.last, oneshot::channel());
        open.waiting.insert(number, send);
        Some((number, receive))
    }

    /// Hands an answer to who waits for it.
    fn answered(&self, number: u64, done: Done) -> Result<(), Broken> {
        let mut open = self.open();
        let waiting = open.waiting.remove(&number).ok_or(Broken)?;
        open.used = Instant::now();
        open.sent = open.sent.saturating_sub(1);
        if let Some(spent) = &done.spent {
            let before = open.usual_ns - open.usual_ns / LAST_PART;
            open.usual_ns = before.saturating_add(spent.cpu_ns / LAST_PART);
        }
        drop(open);
        // One that is gone does not want to know.
        let _ = waiting.send(done);
        Ok(())
    }

    /// Takes a request; whether it is to be sent now.
    fn hold(self: &Arc<Self>, request: &[u8]) -> bool {
        let mut open = self.open();
        open.held.bytes.extend(request);
        open.held.count += 1;
        let is_to_wait = open.sent > 0 && open.usual_ns < SHORT_NS;
        if is_to_wait && !std::mem::replace(&mut open.held.is_timed, true) {
            let line = Arc::clone(self);
            tokio::spawn(async move {
                tokio::time::sleep(HOLD_TIME).await;
                line.open().held.is_timed = false;
                line.send().await;
            });
        }
        !is_to_wait
    }

    fn is_holding(&self) -> bool {
        self.open().held.count > 0
    }

    /// Sends all that is held.
    async fn send(&self) {
        let mut out = self.out.lock().await;
        let bytes = {
            let mut open = self.open();
            open.sent += std::mem::take(&mut open.held.count);
            std::mem::take(&mut open.held.bytes)
        };
        if !bytes.is_empty() {
            // One that cannot be written to has ended, which is told.
            let _ = out.write_all(&bytes).await;
        }
    }

    /// Takes no more; whether it has nothing open either.
    fn retire(&self) -> bool {
        let mut open = self.open();
        open.is_over = true;
        open.waiting.is_empty()
    }

    /// The same if it has nothing to do since `since`.
    fn retire_idle(&self, since: Instant) -> bool {
        let mut open = self.open();
        let is_idle = !open.is_over && open.waiting.is_empty() && open.used <= since;
        open.is_over |= is_idle;
        is_idle
    }

    /// All that is open hears that there is no answer.
    fn end(&self, how: &str) {
        let mut open = self.open();
        open.is_over = true;
        let waiting = std::mem::take(&mut open.waiting);
        drop(open);
        for one in waiting.into_values() {
            let message =
                format!("the worker {how}, and this call with it; call again for another worker");
            let _ = one.send(Answer::error(502, &message).into());
        }
    }
}

impl Lines {
    /// Workers are asked for by `ask`, which must not wait. Answers are of at most what `limits`
    /// permit.
    #[must_use]
    pub fn new(
        rules: WorkerRules,
        limits: &crate::Limits,
        runtime: Handle,
        ask: Box<dyn Fn(Ask) + Send + Sync>,
    ) -> Arc<Self> {
        let answer_bytes = limits.answer_bytes();
        let lines = Arc::new(Self { rules, answer_bytes, ask, runtime, state: Mutex::default() });
        lines.runtime.spawn(Arc::clone(&lines).end_idle());
        lines
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker is there, at the other end of `stream`.
    ///
    /// # Errors
    /// The host's, when the socket cannot be used.
    pub fn started(
        self: &Arc<Self>,
        number: u64,
        stream: std::os::unix::net::UnixStream,
        is_kept: bool,
    ) -> std::io::Result<()> {
        let _inside = self.runtime.enter();
        stream.set_nonblocking(true)?;
        let (from, to) = UnixStream::from_std(stream)?.into_split();
        let mut state = self.state();
        let wanted = state.places.iter_mut().find(|(_, place)| place.is_wanted(number));
        let Some((name, place)) = wanted else { return Ok(()) };
        let waiting = HashMap::new();
        let open = Open {
            last: 0,
            waiting,
            used: Instant::now(),
            is_over: false,
            sent: 0,
            held: Held::default(),
            usual_ns: SHORT_NS,
        };
        let line = Arc::new(Line {
            number,
            place: name.clone(),
            is_kept,
            out: tokio::sync::Mutex::new(to),
            open: Mutex::new(open),
        });
        let before = std::mem::replace(place, Place::Has(Arc::clone(&line)));
        state.lines.insert(number, Arc::clone(&line));
        drop(state);
        if let Place::Wanted { waiting, .. } = before {
            for one in waiting {
                let _ = one.send(Ok(Arc::clone(&line)));
            }
        }
        self.runtime.spawn(Arc::clone(self).listen(line, from));
        Ok(())
    }

    /// A worker could not be started.
    pub fn failed(&self, number: u64, why: &str) {
        let mut state = self.state();
        let wanted = state.places.iter().find(|(_, place)| place.is_wanted(number));
        let name = wanted.map(|(name, _)| name.clone());
        let place = name.and_then(|name| state.places.remove(&name));
        drop(state);
        if let Some(Place::Wanted { waiting, .. }) = place {
            for one in waiting {
                let _ = one.send(Err(why.to_owned()));
            }
        }
    }

    /// A worker has ended.
    pub fn ended(&self, number: u64, how: &str) {
        let mut state = self.state();
        let Some(line) = state.lines.remove(&number) else { return };
        state.forget(&line);
        drop(state);
        line.end(how);
    }

    /// A worker is asked for nothing more, and ends when it has answered.
    pub fn outdated(&self, number: u64) {
        let mut state = self.state();
        let Some(line) = state.lines.get(&number).cloned() else { return };
        state.forget(&line);
        drop(state);
        if line.retire() {
            (self.ask)(Ask::End { number });
        }
    }

    /// Reads answers until there are no more, or what is none.
    async fn listen(self: Arc<Self>, line: Arc<Line>, mut from: OwnedReadHalf) {
        let mut frames = Frames::default();
        let why = loop {
            match from.read(frames.room()).await {
                Ok(0) | Err(_) => break "ended",
                Ok(count) => frames.came(count),
            }
            if self.take(&line, &mut frames).is_err() {
                break "broke the protocol and was ended";
            }
            if line.is_holding() {
                // Answers are read meanwhile: a worker may read no requests until they are.
                let line = Arc::clone(&line);
                tokio::spawn(async move { line.send().await });
            }
        };
        self.lost(&line);
        tokio::time::sleep(OBITUARY_TIME).await;
        self.ended(line.number, why);
    }

    fn take(&self, line: &Line, frames: &mut Frames) -> Result<(), Broken> {
        while let Some(frame) = frames.next(self.answer_bytes)? {
            let (number, done) = wire::read_answer(frame)?;
            line.answered(number, done)?;
        }
        let is_done = {
            let open = line.open();
            open.is_over && open.waiting.is_empty()
        };
        if is_done {
            (self.ask)(Ask::End { number: line.number });
        }
        Ok(())
    }

    /// Nothing more is asked of this line, and its worker is to be ended.
    fn lost(&self, line: &Arc<Line>) {
        self.state().forget(line);
        line.retire();
        (self.ask)(Ask::End { number: line.number });
    }

    async fn end_idle(self: Arc<Self>) {
        let rest = (self.rules.idle / 4).clamp(Duration::from_millis(50), Duration::from_secs(5));
        loop {
            tokio::time::sleep(rest).await;
            let Some(since) = Instant::now().checked_sub(self.rules.idle) else { continue };
            let mut state = self.state();
            let lines: Vec<_> = state.lines.values().cloned().collect();
            let may_go = lines.into_iter().filter(|line| !line.is_kept);
            let idle: Vec<_> = may_go.filter(|line| line.retire_idle(since)).collect();
            idle.iter().for_each(|line| state.forget(line));
            drop(state);
            for line in idle {
                (self.ask)(Ask::End { number: line.number });
            }
        }
    }

    /// The line of a place, or who tells of it; `Err` says why there can be none.
    fn find(&self, name: &str) -> Result<Found, String> {
        let mut state = self.state();
        match state.places.get_mut(name) {
            Some(Place::Has(line)) => return Ok(Found::Line(Arc::clone(line))),
            Some(Place::Wanted { waiting, .. }) => {
                let (send, receive) = oneshot::channel();
                waiting.push(send);
                return Ok(Found::Wanted(receive));
            }
            None => {}
        }
        let evicted = if state.places.len() >= self.rules.workers_max {
            Some(state.evict().ok_or_else(|| {
                format!(
                    "as many workers as may be ({}) are busy; call again later",
                    self.rules.workers_max
                )
            })?)
        } else {
            None
        };
        state.last_number += 1;
        let number = state.last_number;
        let (send, receive) = oneshot::channel();
        let waiting = vec![send];
        state.places.insert(name.to_owned(), Place::Wanted { number, waiting });
        drop(state);
        if let Some(number) = evicted {
            (self.ask)(Ask::End { number });
        }
        (self.ask)(Ask::Start { place: name.to_owned(), number });
        Ok(Found::Wanted(receive))
    }

    /// A line that takes a request, with the request's number there.
    async fn expect(
        &self,
        name: &str,
    ) -> Result<(Arc<Line>, u64, oneshot::Receiver<Done>), String> {
        let failed = |why: &str| format!("there is no worker: {why}");
        loop {
            let line = match self.find(name)? {
                Found::Line(line) => line,
                Found::Wanted(told) => match timeout(START_TIME, told).await {
                    Ok(Ok(line)) => line.map_err(|why| failed(&why))?,
                    Ok(Err(_)) => return Err(failed("the service is shutting down")),
                    Err(_elapsed) => return Err(failed("it does not start in time")),
                },
            };
            if let Some((number, receive)) = line.expect() {
                return Ok((line, number, receive));
            }
            // It was retired since; unless somebody else has, it leaves its place now.
            self.state().forget(&line);
        }
    }

    async fn call(&self, callable: &Callable, work: Work) -> Done {
        let place = if self.rules.is_shared { "" } else { &callable.owner.name };
        let (line, number, told) = match self.expect(place).await {
            Ok(expected) => expected,
            Err(why) => return Answer::error(503, &why).into(),
        };
        let bytes = wire::request(number, callable.id, &work);
        drop(work);
        let answered = async {
            if line.hold(&bytes) {
                line.send().await;
            }
            told.await
        };
        match timeout(callable.deadline + GRACE, answered).await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) => Answer::error(502, "the worker ended, and this call with it").into(),
            Err(_elapsed) => {
                self.lost(&line);
                let why = "the worker did not answer by the deadline and was ended; call again";
                Answer::error(503, why).into()
            }
        }
    }
}

enum Found {
    Line(Arc<Line>),
    Wanted(oneshot::Receiver<Result<Arc<Line>, String>>),
}

impl Place {
    fn is_wanted(&self, as_number: u64) -> bool {
        matches!(self, Self::Wanted { number, .. } if *number == as_number)
    }
}

impl State {
    /// The line is nobody's any more.
    fn forget(&mut self, line: &Arc<Line>) {
        let has = |place: &Place| matches!(place, Place::Has(own) if Arc::ptr_eq(own, line));
        if self.places.get(&line.place).is_some_and(has) {
            self.places.remove(&line.place);
        }
    }

    /// Retires the line that has had nothing to do for longest; its number. Those that are kept
    /// for what they hold come last, but they come: who holds something has no right to a place
    /// that all others want.
    fn evict(&mut self) -> Option<u64> {
        let mut lines: Vec<_> = self.lines.values().cloned().collect();
        lines.sort_by_key(|line| (line.is_kept, line.open().used));
        let line = lines.into_iter().find(|line| line.retire_idle(Instant::now()))?;
        self.forget(&line);
        Some(line.number)
    }
}

impl Runner for Lines {
    fn run<'a>(
        &'a self,
        callable: &'a Callable,
        work: Work,
    ) -> Pin<Box<dyn Future<Output = Done> + Send + 'a>> {
        Box::pin(self.call(callable, work))
    }
}
