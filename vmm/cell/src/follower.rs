//! Who hears what a program writes. The operator's own connection is its
//! standard output and holds it up as a pipe does; an onlooker (`logs -f`,
//! `wait`) may lag behind for a while and is then cut off.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Take, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use exocell_agent::{FailureKind, FrameWriter, Kind, Reply};

use crate::CellError;
use crate::supervisor::thread;

/// How far an onlooker may lag behind, in bytes.
const BACKLOG_BYTES_MAX: usize = 4 << 20;
/// How long one onlooker may hold the program up, all in all.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whole frames, shared by all who are to get them.
pub(crate) type Frames = Arc<[u8]>;

/// `payload` as frames of `kind`.
pub(crate) fn frames(kind: Kind, payload: &[u8]) -> Frames {
    let mut bytes = Vec::with_capacity(payload.len() + 16);
    // Writing to memory cannot fail.
    let _ = FrameWriter::new(&mut bytes).write(kind, payload);
    bytes.into()
}

/// `reply` as a frame.
pub(crate) fn reply_frame(reply: &Reply) -> Frames {
    let mut bytes = Vec::new();
    // A reply that is too long for a frame is told by the stream's end.
    let _ = FrameWriter::new(&mut bytes).write_json(Kind::Reply, reply);
    bytes.into()
}

/// One who follows a program.
pub(crate) enum Follower {
    Operator(Mutex<UnixStream>),
    Onlooker(Onlooker),
}

impl Follower {
    /// Hands `frames` over; false when the follower is gone.
    pub fn take(&self, frames: &Frames) -> bool {
        match self {
            Self::Operator(stream) => {
                let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
                stream.write_all(frames).is_ok()
            }
            Self::Onlooker(onlooker) => onlooker.take(frames),
        }
    }

    /// Whether this is an operator; it then hears no more, and that it hears no more.
    pub fn is_replaced(&self) -> bool {
        let Self::Operator(stream) = self else { return false };
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
        // One that is gone needs no telling.
        let _ = stream.shutdown(std::net::Shutdown::Both);
        true
    }

    /// Hands over the last that it hears.
    pub fn close(&self, last: &Frames) {
        match self {
            Self::Operator(_) => drop(self.take(last)),
            Self::Onlooker(onlooker) => onlooker.close(last),
        }
    }

    /// Says nothing more to an onlooker.
    pub fn forget(&self) {
        if let Self::Onlooker(onlooker) = self {
            onlooker.queue.lock().gone = true;
            onlooker.queue.changed.notify_all();
        }
    }

    /// Waits until an onlooker has heard everything, at most until `until`.
    pub fn await_heard(&self, until: Instant) {
        if let Self::Onlooker(onlooker) = self {
            drop(onlooker.queue.wait_while(until, |queue| !queue.gone));
        }
    }
}

/// A follower with a backlog and a thread that works it off.
pub(crate) struct Onlooker {
    queue: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

struct Queue {
    waiting: VecDeque<Frames>,
    /// Bytes that wait or are being written.
    bytes: usize,
    patience: Duration,
    /// Takes no more frames.
    closed: bool,
    /// Hears nothing any more.
    gone: bool,
}

impl Onlooker {
    /// An onlooker at the other end of `stream`, who first hears what is in `logged`.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn new(stream: UnixStream, logged: Vec<Take<File>>) -> Result<Self, CellError> {
        let queue = Queue {
            waiting: VecDeque::new(),
            bytes: 0,
            patience: PATIENCE,
            closed: false,
            gone: false,
        };
        let queue = Arc::new(Shared { queue: Mutex::new(queue), changed: Condvar::new() });
        let worker = queue.clone();
        thread("follower", move || worker.work_off(stream, logged))?;
        Ok(Self { queue })
    }

    fn take(&self, frames: &Frames) -> bool {
        let mut queue = self.queue.lock();
        if !queue.fits(frames) {
            let begun = Instant::now();
            let until = begun + queue.patience;
            drop(queue);
            queue = self.queue.wait_while(until, |queue| !queue.fits(frames));
            queue.patience = queue.patience.saturating_sub(begun.elapsed());
        }
        if queue.closed || queue.gone {
            return false;
        }
        if !queue.fits(frames) {
            queue.push(&reply_frame(&cut_off()));
            queue.closed = true;
        } else {
            queue.push(frames);
        }
        self.queue.changed.notify_all();
        !queue.closed
    }

    fn close(&self, last: &Frames) {
        let mut queue = self.queue.lock();
        if !queue.closed {
            queue.push(last);
            queue.closed = true;
        }
        self.queue.changed.notify_all();
    }
}

fn cut_off() -> Reply {
    let message = format!(
        "this follower fell {} MiB behind the program's output and was cut off; \
         the cell is not affected, exocell logs shows what it wrote",
        BACKLOG_BYTES_MAX >> 20
    );
    Reply::Failed { kind: FailureKind::Guest, message }
}

impl Queue {
    fn fits(&self, frames: &Frames) -> bool {
        self.closed || self.gone || self.bytes + frames.len() <= BACKLOG_BYTES_MAX
    }

    fn push(&mut self, frames: &Frames) {
        self.bytes += frames.len();
        self.waiting.push_back(frames.clone());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `condition` holds, at most until `until`.
    fn wait_while(
        &self,
        until: Instant,
        mut condition: impl FnMut(&Queue) -> bool,
    ) -> MutexGuard<'_, Queue> {
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.lock(), left, |queue| condition(queue));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The follower's thread: writes what waits until the stream or the
    /// program ends.
    fn work_off(&self, mut stream: UnixStream, logged: Vec<Take<File>>) {
        for mut part in logged {
            let heard = std::io::copy(&mut part, &mut stream).is_ok();
            self.lock().gone |= !heard;
        }
        while let Some(frames) = self.next() {
            let heard = stream.write_all(&frames).is_ok();
            let mut queue = self.lock();
            queue.bytes -= frames.len();
            queue.gone |= !heard;
            self.changed.notify_all();
        }
        // The other side waits for the end of the stream, and a client thread
        // still reads from its copy.
        let _ = stream.shutdown(std::net::Shutdown::Both);
        self.lock().gone = true;
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Frames> {
        let mut queue = self.lock();
        loop {
            if queue.gone {
                return None;
            }
            if let Some(frames) = queue.waiting.pop_front() {
                return Some(frames);
            }
            if queue.closed {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
