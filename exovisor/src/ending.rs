//! Ending an isolate from outside: its deadline, a revocation, a stop.
//!
//! ```text
//! running --stop(cause), the first one counts--> ended(cause)
//! ```
//! Wasm code notices at its next loop or call (epoch check); a hostcall that waits is woken.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use wasmtime::Engine;

/// Why an isolate was ended from outside.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its wall time was over.
    Deadline = 1,
    /// A capability it cannot run without was revoked.
    Revoked = 2,
    /// Somebody asked for it.
    Stopped = 3,
}

/// Ends an isolate; clones end the same one, from any thread.
#[derive(Clone)]
pub struct Stopper(Arc<Ending>);

struct Ending {
    cause: AtomicU8,
    woken: Notify,
    engine: Engine,
    /// Whether the isolate is done, so that the watch may go.
    done: Mutex<bool>,
    changed: Condvar,
}

/// What a hostcall answers once the isolate was ended.
#[derive(Debug, thiserror::Error)]
#[error("the isolate was ended from outside")]
pub(crate) struct Ended;

impl Stopper {
    pub(crate) fn new(engine: &Engine) -> Self {
        Self(Arc::new(Ending {
            cause: AtomicU8::new(0),
            woken: Notify::new(),
            engine: engine.clone(),
            done: Mutex::new(false),
            changed: Condvar::new(),
        }))
    }

    /// Ends the isolate, whether it runs, waits or has not begun. The first cause counts.
    pub fn stop(&self, cause: Cause) {
        let first =
            self.0.cause.compare_exchange(0, cause as u8, Ordering::AcqRel, Ordering::Acquire);
        if first.is_ok() {
            self.0.woken.notify_one();
            self.0.engine.increment_epoch();
        }
    }

    /// Why it was ended, if it was.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match self.0.cause.load(Ordering::Acquire) {
            1 => Some(Cause::Deadline),
            2 => Some(Cause::Revoked),
            3 => Some(Cause::Stopped),
            _ => None,
        }
    }

    /// Does `work` unless the isolate is or gets ended.
    pub(crate) async fn unless_ended<T>(&self, work: impl Future<Output = T>) -> Result<T, Ended> {
        if self.cause().is_some() {
            return Err(Ended);
        }
        tokio::select! {
            biased;
            () = self.0.woken.notified() => Err(Ended),
            result = work => Ok(result),
        }
    }

    /// Starts the thread that ends the isolate after `limit`.
    pub(crate) fn watch(&self, limit: Duration) -> std::io::Result<Watch> {
        let stopper = self.clone();
        let end = Instant::now().checked_add(limit);
        let body = move || stopper.sleep_until(end);
        let thread = thread::Builder::new().name("deadline".to_owned()).spawn(body)?;
        Ok(Watch { stopper: self.clone(), thread: Some(thread) })
    }

    fn sleep_until(&self, end: Option<Instant>) {
        let mut done = self.0.done.lock().unwrap_or_else(PoisonError::into_inner);
        while !*done {
            let left =
                end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return self.stop(Cause::Deadline);
            }
            let wait = self.0.changed.wait_timeout(done, left);
            done = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The deadline's thread; it ends when this is dropped.
pub(crate) struct Watch {
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.stopper.0.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stopper.0.changed.notify_all();
        // The thread holds nothing that could panic; there is no one to tell if it did.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
