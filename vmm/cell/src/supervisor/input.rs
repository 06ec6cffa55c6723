//! What goes into a cell's program: bytes, signals, a terminal's size.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use exocell_agent::{Frame, FrameWriter, Kind};

/// Where input goes.
pub(crate) enum Sink {
    /// The exec session of a `vm` cell's program.
    Session(UnixStream),
    /// The standard input of an isolate.
    Pipe(Option<std::fs::File>),
}

/// Takes a signal's number; false where the program's side does not answer.
pub(crate) type Signal = Arc<dyn Fn(u8) -> bool + Send + Sync>;

/// The inlet of one program, shared by everyone who may feed it. Signals have a
/// way of their own: a program that does not read its input still gets them.
#[derive(Clone, Default)]
pub(crate) struct Input {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    sink: Mutex<Option<Sink>>,
    signal: Mutex<Option<Signal>>,
    opened: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Input {
    pub fn open(&self, sink: Sink, signal: Signal) {
        *lock(&self.shared.sink) = Some(sink);
        *lock(&self.shared.signal) = Some(signal);
        self.shared.opened.notify_all();
    }

    /// Waits until the program can take input.
    pub fn wait_open(&self) {
        let is_closed = |signal: &mut Option<Signal>| signal.is_none();
        drop(self.shared.opened.wait_while(lock(&self.shared.signal), is_closed));
    }

    /// Waits until the program can take input, at most `limit`; whether it can.
    pub fn opens_within(&self, limit: Duration) -> bool {
        let is_closed = |signal: &mut Option<Signal>| signal.is_none();
        let waited =
            self.shared.opened.wait_timeout_while(lock(&self.shared.signal), limit, is_closed);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_some()
    }

    /// Sends the program a signal; false where its side does not answer. A program
    /// that is gone takes nothing; its end is told elsewhere.
    pub fn signal(&self, number: u8) -> bool {
        let signal = lock(&self.shared.signal).clone();
        signal.is_none_or(|signal| signal(number))
    }

    /// Hands a follower's frame to the program.
    pub fn feed(&self, frame: &Frame) {
        if frame.kind == Kind::Signal {
            return frame.payload.first().into_iter().for_each(|number| {
                self.signal(*number);
            });
        }
        match &mut *lock(&self.shared.sink) {
            Some(Sink::Session(stream)) if is_input(frame.kind) => {
                let _ = FrameWriter::new(stream).write(frame.kind, &frame.payload);
            }
            Some(Sink::Pipe(stdin)) => feed_pipe(stdin, frame),
            _ => {}
        }
    }
}

fn is_input(kind: Kind) -> bool {
    matches!(kind, Kind::Stdin | Kind::StdinEof | Kind::Resize)
}

fn feed_pipe(stdin: &mut Option<std::fs::File>, frame: &Frame) {
    match frame.kind {
        Kind::Stdin => {
            if let Some(pipe) = stdin {
                let _ = pipe.write_all(&frame.payload);
            }
        }
        Kind::StdinEof => *stdin = None,
        _ => {}
    }
}
