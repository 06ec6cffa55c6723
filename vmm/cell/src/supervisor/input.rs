//! What goes into a cell's program: bytes, signals, a terminal's size.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};

use exocell_agent::{Frame, FrameWriter, Kind};

/// Where input goes.
pub(crate) enum Sink {
    /// The exec session of a `vm` cell's program.
    Session(UnixStream),
    /// The standard input of an isolate, and what a signal does to it.
    Pipe { stdin: Option<std::fs::File>, signal: Signal },
}

/// Takes a signal's number.
pub(crate) type Signal = Box<dyn FnMut(u8) + Send>;

/// The inlet of one program, shared by everyone who may feed it.
#[derive(Clone, Default)]
pub(crate) struct Input {
    shared: Arc<(Mutex<Option<Sink>>, Condvar)>,
}

impl Input {
    pub fn open(&self, sink: Sink) {
        *self.lock() = Some(sink);
        self.shared.1.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Sink>> {
        self.shared.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits until the program can take input.
    pub fn wait_open(&self) {
        let mut sink = self.lock();
        while sink.is_none() {
            sink = match self.shared.1.wait(sink) {
                Ok(sink) => sink,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
    }

    pub fn signal(&self, number: u8) {
        self.feed(&Frame { kind: Kind::Signal, payload: vec![number] });
    }

    /// Hands a follower's frame to the program. A program that is gone takes
    /// nothing; its end is told elsewhere.
    pub fn feed(&self, frame: &Frame) {
        match &mut *self.lock() {
            Some(Sink::Session(stream)) if is_input(frame.kind) => {
                let _ = FrameWriter::new(stream).write(frame.kind, &frame.payload);
            }
            Some(Sink::Pipe { stdin, signal }) => feed_pipe(stdin, signal, frame),
            _ => {}
        }
    }
}

fn is_input(kind: Kind) -> bool {
    matches!(kind, Kind::Stdin | Kind::StdinEof | Kind::Resize | Kind::Signal)
}

fn feed_pipe(stdin: &mut Option<std::fs::File>, signal: &mut Signal, frame: &Frame) {
    match frame.kind {
        Kind::Stdin => {
            if let Some(pipe) = stdin {
                let _ = pipe.write_all(&frame.payload);
            }
        }
        Kind::StdinEof => *stdin = None,
        Kind::Signal => frame.payload.first().into_iter().for_each(|number| signal(*number)),
        _ => {}
    }
}
