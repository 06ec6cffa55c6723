//! One sandbox: its cell, what runs in it for clients, and its time.
//!
//! ```text
//!        create, template's start  deadline: on_timeout        kill, end of the cell
//!  (nothing) ────────> running ──────────────────────────> ended, nothing is left
//!                       │    ^ connect, traffic            ^
//!                 pause v    │ (auto_resume)               │
//!                      paused ─────────── kill, a month ───┘
//! ```

use std::os::unix::net::UnixStream as BlockingStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use exocell_cell::agent::client::ClientError;
use exocell_cell::agent::{ANSWER_MAX, Patient, TRANSFER_MAX};
use exocell_cell::commit::Cutter;
use exocell_cell::control::Client;
use exocell_cell::{Record, now_ms};
use hyper::header::HeaderValue;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout;

use crate::blocking::blocking;
use crate::bounds::{Bounds, Share, Shares};
use crate::envd::programs::Programs;
use crate::envd::signature::Wanted;
use crate::envd::watchers::Watchers;
use crate::error::{Problem, Result};
use crate::keys::{self, POOL};
use crate::network;
use crate::note::Note;

/// Calls that wait for the guest at once, each with a thread; and dials of visitors that do.
const ASKS_MAX: usize = 16;
const DIALS_MAX: usize = 8;
/// Connections of visitors: half of the streams that a guest has, so that its owner keeps the rest.
pub const VISITS_MAX: usize = 128;
/// Files that are sent or taken, and those of them that are unpacked.
const TRANSFERS_MAX: usize = 32;
const UNPACKING_MAX: usize = 8;
/// How long a call waits for its turn.
const TURN_MAX: Duration = Duration::from_secs(10);
const TRANSFER_TURN_MAX: Duration = Duration::from_secs(30);
/// How long a paused sandbox is kept.
pub const PAUSED_MAX_MS: u64 = 30 * 24 * 3600 * 1000;

/// See the module's head.
pub struct Sandbox {
    pub id: String,
    /// Of one that waits in the pool nobody's yet.
    tenant: OnceLock<String>,
    pub record: Record,
    pub programs: Programs,
    pub watchers: Watchers,
    /// Held while it is paused, resumed or ended.
    pub changing: tokio::sync::Mutex<()>,
    /// Held while a snapshot is made, before `changing` if both are. Its end does not wait for it.
    pub saving: tokio::sync::Mutex<()>,
    /// Breaks that off.
    cutter: Mutex<Option<Arc<Cutter>>>,
    /// Whether the template's own programs have run as they are to: nobody has it before.
    has_begun: AtomicBool,
    note: Mutex<Note>,
    /// When its time is over, milliseconds since the epoch.
    deadline: watch::Sender<u64>,
    /// Becomes true once.
    ended: watch::Sender<bool>,
    /// What its processors had done when they were looked at last.
    used: Mutex<(u64, Instant)>,
    bounds: Arc<Bounds>,
    asks: Arc<Semaphore>,
    dials: Arc<Semaphore>,
    visits: Arc<Semaphore>,
    transfers: Arc<Semaphore>,
    unpacking: Arc<Semaphore>,
}

/// The right to what others have to wait for, until it is dropped.
pub struct Turn {
    _place: OwnedSemaphorePermit,
    _share: Share,
}

impl Sandbox {
    pub fn new(record: Record, note: Note, bounds: &Arc<Bounds>) -> Arc<Self> {
        let deadline = watch::Sender::new(over_at(&note));
        Arc::new(Self {
            id: note.id.clone(),
            tenant: owner(&note),
            record,
            programs: Programs::default(),
            watchers: Watchers::default(),
            changing: tokio::sync::Mutex::default(),
            saving: tokio::sync::Mutex::default(),
            cutter: Mutex::default(),
            has_begun: AtomicBool::new(false),
            note: Mutex::new(note),
            deadline,
            ended: watch::Sender::new(false),
            used: Mutex::new((0, Instant::now())),
            bounds: bounds.clone(),
            asks: Arc::new(Semaphore::new(ASKS_MAX)),
            dials: Arc::new(Semaphore::new(DIALS_MAX)),
            visits: Arc::new(Semaphore::new(VISITS_MAX)),
            transfers: Arc::new(Semaphore::new(TRANSFERS_MAX)),
            unpacking: Arc::new(Semaphore::new(UNPACKING_MAX)),
        })
    }

    /// Whose it is; nobody is called as the pool is.
    pub fn tenant(&self) -> &str {
        self.tenant.get().map_or(POOL, String::as_str)
    }

    /// Makes one of the pool's what `note` says, whose tenant it is from now on; only the first
    /// time.
    pub fn become_one(&self, note: Note) -> bool {
        if self.tenant.set(note.tenant.clone()).is_err() {
            return false;
        }
        self.change(|own| *own = note);
        true
    }

    fn lock(&self) -> MutexGuard<'_, Note> {
        self.note.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note(&self) -> Note {
        self.lock().clone()
    }

    /// Changes what is noted of it, and hands that out to be written down.
    pub fn change(&self, change: impl FnOnce(&mut Note)) -> Note {
        let mut note = self.lock();
        change(&mut note);
        self.deadline.send_replace(over_at(&note));
        note.clone()
    }

    pub fn is_paused(&self) -> bool {
        self.lock().paused_ms.is_some()
    }

    /// Its tenant has it from now on.
    pub fn begin(&self) {
        self.has_begun.store(true, Ordering::Release);
    }

    pub fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    /// What breaks the snapshot off that is begun now.
    pub fn save(&self) -> Arc<Cutter> {
        let cutter = Arc::new(Cutter::default());
        let mut own = self.cutter.lock().unwrap_or_else(PoisonError::into_inner);
        *own = Some(cutter.clone());
        cutter
    }

    /// Breaks a snapshot off that is being made, so that the guest is free.
    pub fn stop_saving(&self) {
        if let Some(cutter) = &*self.cutter.lock().unwrap_or_else(PoisonError::into_inner) {
            cutter.cut();
        }
    }

    pub fn deadline(&self) -> watch::Receiver<u64> {
        self.deadline.subscribe()
    }

    /// Tells all that wait for it that it is over.
    pub fn end(&self) {
        self.ended.send_replace(true);
        self.watchers.clear();
    }

    pub fn has_ended(&self) -> bool {
        *self.ended.borrow()
    }

    /// Waits until it is over.
    pub async fn gone(&self) {
        // The sender is in our hands: it does not go.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// Whether `token` is its own.
    pub fn lets_in(&self, token: Option<&str>) -> bool {
        token.is_some_and(|token| keys::same(token, &self.lock().access_token))
    }

    /// Whether it runs, and has signed this.
    pub fn has_signed(&self, wanted: &Wanted) -> bool {
        let note = self.lock();
        note.paused_ms.is_none() && wanted.is_by(&note.access_token)
    }

    /// Whether whoever has `token` may reach its other ports.
    pub fn lets_through(&self, token: Option<&str>) -> bool {
        match &self.lock().traffic_token {
            None => true,
            Some(own) => token.is_some_and(|token| keys::same(token, own)),
        }
    }

    /// The host that a program at `port` is told, where its client has said one.
    pub fn masked_host(&self, port: u16) -> Option<HeaderValue> {
        let note = self.lock();
        let mask = note.network.as_ref()?.get("maskRequestHost")?.as_str()?;
        network::masked(mask, port)
    }

    /// How many of the nanoseconds of one processor were used since the last look, in percent.
    pub fn cpu_percent(&self, cpu_ns: u64) -> f64 {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, at) = std::mem::replace(&mut *used, (cpu_ns, Instant::now()));
        let passed = at.elapsed().as_nanos().max(1) as f64;
        cpu_ns.saturating_sub(before) as f64 / passed * 100.0
    }

    /// A stream to the guest, which has its time to answer. Blocks.
    pub fn guest(&self) -> Result<Patient> {
        Ok(Client::connect(&self.record)?.guest_stream()?)
    }

    /// The same for much that is sent.
    pub fn guest_for_long(&self) -> Result<Patient> {
        Ok(self.guest()?.within(TRANSFER_MAX))
    }

    /// Waits for one of its `places`, and for its tenant's part in what all share.
    async fn turn(
        &self,
        places: &Arc<Semaphore>,
        shared: &Arc<Shares>,
        most: Duration,
    ) -> Result<Turn> {
        let both = async {
            let place = places.clone().acquire_owned().await;
            Some(Turn { _place: place.ok()?, _share: shared.wait(self.tenant(), 1).await })
        };
        timeout(most, both).await.ok().flatten().ok_or_else(|| {
            Problem::exhausted(format!(
                "as many calls as may wait for the sandbox {}, or for others of this key, and it \
                 did not answer them for {} s; try again later",
                self.id,
                most.as_secs()
            ))
        })
    }

    /// To be held while a file is sent or taken.
    pub async fn transfer(&self) -> Result<Turn> {
        self.turn(&self.transfers, &self.bounds.transfers, TRANSFER_TURN_MAX).await
    }

    /// To be held while a file is unpacked.
    pub async fn unpack(&self) -> Result<Turn> {
        self.turn(&self.unpacking, &self.bounds.unpacking, TRANSFER_TURN_MAX).await
    }

    /// To be held while a visitor is there: a client of its program's.
    ///
    /// # Errors
    /// 429: there are too many, of this sandbox or of its tenant's.
    pub fn visit(&self) -> Result<(OwnedSemaphorePermit, Share)> {
        let both = self.visits.clone().try_acquire_owned().ok();
        let both = both.zip(self.bounds.visits.take(self.tenant(), 1));
        both.ok_or_else(|| {
            Problem::exhausted(format!(
                "the ports of the sandbox have as many connections as they may ({VISITS_MAX}, and \
                 fewer where others of this key have many); try again later"
            ))
        })
    }

    /// A part of what a tenant's requests and commands may take of the server's memory, in bytes.
    pub fn bytes(&self, count: u64) -> Option<Share> {
        self.bounds.bytes.take(self.tenant(), count)
    }

    /// What of its tenant's share holds events for clients that ask for them; nothing yet.
    pub fn event_bytes(&self) -> Share {
        self.bounds.event_bytes.none(self.tenant())
    }

    /// Does `work`, which may block, in its turn.
    pub async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.work_within(&self.asks, work).await
    }

    async fn work_within<T: Send + 'static>(
        &self,
        places: &Arc<Semaphore>,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let turn = self.turn(places, &self.bounds.threads, TURN_MAX).await?;
        blocking(move || {
            // The thread is taken for so long, whether the client waits or not.
            let _turn = turn;
            work()
        })
        .await
    }

    /// Asks the guest something for a client.
    pub async fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        ask: impl FnOnce(&Patient) -> std::result::Result<T, ClientError> + Send + 'static,
    ) -> Result<T> {
        let own = self.clone();
        self.work(move || Ok(ask(&own.guest()?)?)).await
    }

    /// The same for the server itself, whatever its clients do.
    pub async fn order<T: Send + 'static>(
        self: &Arc<Self>,
        ask: impl FnOnce(&Patient) -> std::result::Result<T, ClientError> + Send + 'static,
    ) -> Result<T> {
        let own = self.clone();
        blocking(move || Ok(ask(&own.guest()?)?)).await
    }

    /// A stream to the guest on which `begin` was agreed, for as long as it takes.
    pub async fn line(
        self: &Arc<Self>,
        begin: impl FnOnce(&Patient) -> Result<()> + Send + 'static,
    ) -> Result<UnixStream> {
        self.line_within(&self.asks, begin).await
    }

    /// The same for a visitor, on which nothing was said yet.
    pub async fn visitors_line(self: &Arc<Self>) -> Result<UnixStream> {
        self.line_within(&self.dials, |_| Ok(())).await
    }

    async fn line_within(
        self: &Arc<Self>,
        places: &Arc<Semaphore>,
        begin: impl FnOnce(&Patient) -> Result<()> + Send + 'static,
    ) -> Result<UnixStream> {
        let own = self.clone();
        let stream = self.work_within(places, move || {
            let stream = own.guest()?.within(ANSWER_MAX);
            begin(&stream)?;
            stream.into_endless().map_err(|error| Problem::internal(error.to_string()))
        });
        listened(stream.await?)
    }
}

/// A stream for tasks.
pub fn listened(stream: BlockingStream) -> Result<UnixStream> {
    let made = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream));
    made.map_err(|error| Problem::internal(format!("no stream into the sandbox: {error}")))
}

fn owner(note: &Note) -> OnceLock<String> {
    match note.tenant.as_str() {
        POOL => OnceLock::new(),
        tenant => tenant.to_owned().into(),
    }
}

/// When something happens to it by itself.
fn over_at(note: &Note) -> u64 {
    match note.paused_ms {
        Some(since) => since.saturating_add(PAUSED_MAX_MS),
        None => note.deadline_ms,
    }
}

/// How long it is until `at_ms`.
pub fn until(at_ms: u64) -> std::time::Duration {
    std::time::Duration::from_millis(at_ms.saturating_sub(now_ms()))
}
