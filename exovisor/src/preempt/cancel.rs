//! Ending an isolate from outside: its deadline, a revocation, a stop.
//!
//! ```text
//! running --stop(cause), the first one counts--> ended(cause)
//! ```
//! Running code is interrupted by a signal ([`crate::preempt`]) or notices at its next loop or
//! call (epoch check); a hostcall that waits is woken.

use crate::preempt::{self, CodeMap, WasmContext};
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use wasmtime::Engine;

/// Why an isolate was ended from outside.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// Its wall time was over.
    Deadline = 1,
    /// A capability it cannot run without was revoked.
    Revoked = 2,
    /// Somebody asked for it.
    Stopped = 3,
    /// Its CPU time was used up.
    CpuTime = 4,
}

/// Ends an isolate; clones end the same one, from any thread.
#[derive(Clone)]
pub struct CancelHandle(Arc<Shared>);

struct Shared {
    reason: AtomicU8,
    woken: Notify,
    wasm: Option<WasmContext>,
    /// The thread that runs the guest, 0 when none does.
    thread: AtomicI32,
    /// Whose epoch running code looks at, if it does.
    epochs: Option<Engine>,
    /// CPU time that other threads than workers used for it, and that no time slice was charged
    /// with.
    elsewhere_ns: AtomicU64,
    /// What was left of its CPU time at the end of its last time slice.
    cpu_left_ns: AtomicU64,
    /// Whether the isolate is done, so that the watch may go.
    done: Mutex<bool>,
    changed: Condvar,
}

/// What a hostcall answers once the isolate was ended.
#[derive(Debug, thiserror::Error)]
#[error("the isolate was ended from outside")]
pub(crate) struct Cancelled;

/// Counts the CPU time of a thread that works for an isolate and is not a worker, from when it is
/// made until it is dropped.
pub(crate) struct Meter {
    cancel: CancelHandle,
    read_ns: Cell<u64>,
}

impl Meter {
    pub fn start(cancel: CancelHandle) -> Self {
        Self { cancel, read_ns: Cell::new(preempt::thread_cpu_ns()) }
    }

    /// Counts what was used since the last look; whether the isolate was ended.
    pub fn is_over(&self) -> bool {
        let now_ns = preempt::thread_cpu_ns();
        self.cancel.charge(now_ns.saturating_sub(self.read_ns.replace(now_ns)));
        self.cancel.is_over()
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.is_over();
    }
}

/// How often the watch interrupts an isolate that was ended and is still in a host function.
const KICK_INTERVAL: Duration = Duration::from_millis(1);

impl CancelHandle {
    /// For a guest that runs `code`; `epochs` if it looks at that engine's epoch.
    pub(crate) fn new(code: Option<Arc<CodeMap>>, epochs: Option<Engine>) -> Self {
        Self(Arc::new(Shared {
            reason: AtomicU8::new(0),
            woken: Notify::new(),
            wasm: code.map(WasmContext::new),
            thread: AtomicI32::new(0),
            epochs,
            elsewhere_ns: AtomicU64::new(0),
            cpu_left_ns: AtomicU64::new(u64::MAX),
            done: Mutex::new(false),
            changed: Condvar::new(),
        }))
    }

    /// Ends the isolate, whether it runs, waits or has not begun. The first cause counts.
    pub fn request(&self, reason: CancelReason) {
        let first =
            self.0.reason.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Acquire);
        if first.is_err() {
            return;
        }
        self.0.woken.notify_one();
        if let Some(engine) = &self.0.epochs {
            engine.increment_epoch();
        }
        if let Some(wasm) = &self.0.wasm {
            wasm.request_preempt();
            self.kick();
        }
        // The watch goes on interrupting from here; it must not miss this between its look at
        // the cause and its wait.
        drop(self.0.done.lock());
        self.0.changed.notify_all();
    }

    /// Ends the guest's time slice at `due_ns` of CLOCK_MONOTONIC: when the timer next looks after
    /// that, or `exactly` then, which takes a signal more.
    pub(crate) fn shorten_slice(&self, due_ns: u64, exactly: bool) {
        if let Some(wasm) = &self.0.wasm {
            wasm.shorten_slice(due_ns, exactly);
            if exactly || preempt::now_ns() >= due_ns {
                self.kick();
            }
        }
    }

    fn kick(&self) {
        match self.0.thread.load(Ordering::SeqCst) {
            0 => {}
            thread => preempt::kick(thread),
        }
    }

    /// Why it was ended, if it was.
    #[must_use]
    pub fn reason(&self) -> Option<CancelReason> {
        match self.0.reason.load(Ordering::Acquire) {
            1 => Some(CancelReason::Deadline),
            2 => Some(CancelReason::Revoked),
            3 => Some(CancelReason::Stopped),
            4 => Some(CancelReason::CpuTime),
            _ => None,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.reason.load(Ordering::Acquire) != 0
    }

    pub(crate) fn wasm(&self) -> Option<&WasmContext> {
        self.0.wasm.as_ref()
    }

    /// Says which thread runs the guest from now on; 0 for none.
    pub(crate) fn runs_on(&self, thread: i32) {
        self.0.thread.store(thread, Ordering::SeqCst);
    }

    /// Another thread used CPU time for it, which its next time slice is charged with. If it is
    /// more than was left, it is ended.
    fn charge(&self, used_ns: u64) {
        let before_ns = self.0.elsewhere_ns.fetch_add(used_ns, Ordering::AcqRel);
        if before_ns.saturating_add(used_ns) > self.0.cpu_left_ns.load(Ordering::Acquire) {
            self.request(CancelReason::CpuTime);
        }
    }

    /// CPU time of other threads since the last time slice, in nanoseconds.
    pub(crate) fn take_elsewhere_ns(&self) -> u64 {
        match self.0.elsewhere_ns.load(Ordering::Acquire) {
            0 => 0,
            _ => self.0.elsewhere_ns.swap(0, Ordering::AcqRel),
        }
    }

    /// A time slice ended and left so much of its CPU time.
    pub(crate) fn leave_cpu(&self, left_ns: u64) {
        self.0.cpu_left_ns.store(left_ns, Ordering::Release);
    }

    /// Does `work` unless the isolate is or gets ended, by `deadline` at the latest.
    pub(crate) async fn unless_cancelled<T>(
        &self,
        deadline: Option<Instant>,
        work: impl Future<Output = T>,
    ) -> Result<T, Cancelled> {
        if self.is_over() {
            return Err(Cancelled);
        }
        tokio::select! {
            biased;
            () = self.0.woken.notified() => Err(Cancelled),
            result = work => Ok(result),
            () = at(deadline) => {
                self.request(CancelReason::Deadline);
                Err(Cancelled)
            }
        }
    }

    /// Starts the thread that ends the isolate after `limit`, and sees to it that an ended one
    /// leaves the CPU.
    pub(crate) fn watch(&self, limit: Option<Duration>) -> std::io::Result<Watch> {
        let cancel = self.clone();
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let body = move || cancel.watch_until(end);
        let thread = thread::Builder::new().name("deadline".to_owned()).spawn(body)?;
        Ok(Watch { cancel: self.clone(), thread: Some(thread) })
    }

    fn watch_until(&self, end: Option<Instant>) {
        let mut done = self.0.done.lock().unwrap_or_else(PoisonError::into_inner);
        while !*done {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let wait = match (self.is_over(), left) {
                (true, _) => KICK_INTERVAL,
                (false, Some(Duration::ZERO)) => {
                    drop(done);
                    self.request(CancelReason::Deadline);
                    done = self.0.done.lock().unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                (false, left) => left.unwrap_or(Duration::MAX),
            };
            if self.is_over() {
                self.kick();
            }
            let waited = self.0.changed.wait_timeout(done, wait);
            done = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Waits until then; for ever without a time.
async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

/// The deadline's thread; it ends when this is dropped.
pub(crate) struct Watch {
    cancel: CancelHandle,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.cancel.0.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.cancel.0.changed.notify_all();
        // The thread does nothing that could panic, and nobody could be told if it did.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
