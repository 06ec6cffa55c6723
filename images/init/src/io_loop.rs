//! The two loops of a program's session: what the host sends in, what the
//! program says out. Each runs in its own thread, so that a host that does not
//! read cannot keep a signal from the program.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use exocell_agent::{Frame, FrameReader, Kind, TtySize};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::followed::{Host, Line};
use crate::log;
use crate::reaper::{Exit, Reaper};
use crate::sys;

/// Standard input the program has not read; a host that sends more waits.
const QUEUE_BYTES_MAX: usize = 256 * 1024;
/// How long output may pause after the program's death before it is over: a
/// grandchild may hold the pipe for ever.
const DRAIN_PAUSE_MS: u16 = 100;
/// How long the rest of a line is waited for that a terminal has begun to hand over.
const REST_MS: u8 = 2;
/// How much output is read after the program's death: more than a pipe holds.
const DRAIN_BYTES_MAX: usize = 1 << 20;
/// Bytes read from a program at a time.
const CHUNK_BYTES: usize = 16 * 1024;
/// What a terminal's user types to end the input (termios VEOF).
const CTRL_D: u8 = 4;

/// Everything the input loop feeds.
pub struct Input<'a> {
    pub frames: FrameReader<&'a File>,
    /// Write end of the program's input (non-blocking), if it gets one.
    pub sink: Option<File>,
    /// The terminal's master, if there is one.
    pub tty: Option<File>,
    pub reaper: &'a Reaper,
    pub pid: i32,
    /// Of a program that may have another host after this one.
    line: Option<&'a Line>,
    queue: VecDeque<u8>,
    ended: bool,
}

impl<'a> Input<'a> {
    pub fn new(
        frames: FrameReader<&'a File>,
        sink: Option<File>,
        tty: Option<File>,
        reaper: &'a Reaper,
        pid: i32,
        line: Option<&'a Line>,
    ) -> Self {
        Self { frames, sink, tty, reaper, pid, line, queue: VecDeque::new(), ended: false }
    }

    /// Runs until `done` is readable, or the host has closed its end and what
    /// it sent is delivered. A host that goes away leaves the program running.
    pub fn run(mut self, done: BorrowedFd<'_>) {
        let mut connected = true;
        while connected || !self.queue.is_empty() {
            let ready = self.wait(done, connected);
            if ready.done {
                return;
            }
            if ready.stream {
                connected = self.receive();
            }
            if ready.sink {
                self.deliver();
            }
            if self.queue.is_empty() && (self.ended || !connected) {
                self.sink = None;
                if let Some(line) = self.line.filter(|_| self.ended) {
                    line.close();
                }
            }
        }
    }

    fn wait(&self, done: BorrowedFd<'_>, connected: bool) -> Ready {
        let wants_frames = connected && self.queue.len() < QUEUE_BYTES_MAX;
        let stream = wants_frames.then(|| self.frames.get_ref().as_fd());
        let sink = self.sink.as_ref().filter(|_| !self.queue.is_empty()).map(AsFd::as_fd);
        let waits = [
            (Some(done), PollFlags::POLLIN),
            (stream, PollFlags::POLLIN),
            (sink, PollFlags::POLLOUT),
        ];
        let [done, stream, sink] = wait_for(waits, PollTimeout::NONE);
        Ready { done, stream, sink }
    }

    /// Takes one frame in; whether more may come.
    fn receive(&mut self) -> bool {
        match self.frames.read() {
            Ok(Some(frame)) => {
                self.take(frame);
                true
            }
            Ok(None) => false,
            Err(error) => {
                log::warn(format_args!("session of pid {}: {error}", self.pid));
                false
            }
        }
    }

    fn take(&mut self, frame: Frame) {
        match frame.kind {
            Kind::Stdin if self.sink.is_some() && !self.ended => self.queue.extend(frame.payload),
            Kind::Stdin => {}
            Kind::StdinEof => self.end(),
            Kind::Resize => self.resize(&frame),
            Kind::Signal => self.signal(&frame),
            kind => log::warn(format_args!("session of pid {}: stray {kind:?} frame", self.pid)),
        }
    }

    fn end(&mut self) {
        if self.tty.is_some() && self.sink.is_some() && !self.ended {
            self.queue.push_back(CTRL_D);
        }
        self.ended = true;
    }

    fn resize(&self, frame: &Frame) {
        if let (Some(tty), Ok(size)) = (&self.tty, frame.json::<TtySize>()) {
            let _ = sys::set_tty_size(tty, size);
        }
    }

    fn signal(&self, frame: &Frame) {
        match frame.payload.as_slice() {
            [number @ 1..=64] => drop(self.reaper.signal(self.pid, *number)),
            other => log::warn(format_args!("signal {other:?} is none of 1 to 64")),
        }
    }

    /// Writes what the program's input takes; drops it all once nobody reads.
    fn deliver(&mut self) {
        let Some(sink) = &mut self.sink else { return };
        match sink.write(self.queue.as_slices().0) {
            Ok(n) => drop(self.queue.drain(..n)),
            Err(error) if is_transient(&error) => {}
            Err(_) => {
                self.queue.clear();
                self.sink = None;
            }
        }
    }
}

struct Ready {
    done: bool,
    stream: bool,
    sink: bool,
}

/// One stream of the program's output.
pub struct Source {
    pub file: File,
    pub kind: Kind,
    pub is_tty: bool,
}

/// Sends the program's output to the host until the program is dead and its
/// output drained; its exit code. When the host is gone the output is read and
/// thrown away, so that the program does not block on it.
pub fn pump_output(mut sources: Vec<Source>, exit: &Exit, host: &mut Host<'_>) -> u8 {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut drained = 0;
    loop {
        let code = exit.code();
        if let Some(code) = code.filter(|_| sources.is_empty() || drained > DRAIN_BYTES_MAX) {
            return code;
        }
        let [readable @ .., renewed] = wait_for_output(&sources, exit, host, code.is_some());
        if renewed {
            host.renew();
            continue;
        }
        if let Some(code) = code.filter(|_| !readable.contains(&true)) {
            return code;
        }
        let mut at = readable.into_iter();
        sources.retain_mut(|source| {
            if at.next() != Some(true) {
                return true;
            }
            let Some(mut count) = read_some(&mut source.file, &mut buffer) else { return false };
            // A terminal hands a line over in parts: its end comes a moment later.
            if source.is_tty && is_unfinished(&buffer[..count]) && is_ready(&source.file, REST_MS) {
                count += read_some(&mut source.file, &mut buffer[count..]).unwrap_or(0);
            }
            let bytes = &buffer[..count];
            host.say(source.kind, bytes);
            drained += if code.is_some() { bytes.len() } else { 0 };
            true
        });
    }
}

/// Waits for output, another host, the program's death, or once it is dead for a pause; which
/// sources are readable, and whether there is a host.
fn wait_for_output(sources: &[Source], exit: &Exit, host: &Host<'_>, dead: bool) -> [bool; 3] {
    let source = |index: usize| sources.get(index).map(|source| source.file.as_fd());
    let waits = [
        (source(0), PollFlags::POLLIN),
        (source(1), PollFlags::POLLIN),
        (host.wake(), PollFlags::POLLIN),
        (Some(exit.as_fd()).filter(|_| !dead), PollFlags::POLLIN),
    ];
    let timeout = if dead { DRAIN_PAUSE_MS.into() } else { PollTimeout::NONE };
    let [first, second, renewed, _] = wait_for(waits, timeout);
    [first, second, renewed]
}

/// How many bytes are there, perhaps none; `None` at the end. A terminal's master
/// says EIO when nobody holds the terminal.
fn read_some(file: &mut File, buffer: &mut [u8]) -> Option<usize> {
    match file.read(buffer) {
        Ok(0) => None,
        Ok(count) => Some(count),
        Err(error) if is_transient(&error) => Some(0),
        Err(_) => None,
    }
}

/// Whether more of a line is to come, and there is room for it.
fn is_unfinished(bytes: &[u8]) -> bool {
    bytes.len() < CHUNK_BYTES && bytes.last().is_some_and(|last| *last != b'\n')
}

/// Whether `file` can be read within so many milliseconds.
fn is_ready(file: &File, wait_ms: u8) -> bool {
    wait_for([(Some(file.as_fd()), PollFlags::POLLIN)], PollTimeout::from(wait_ms)) == [true]
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Polls descriptors, some of which may be absent; which have an event.
fn wait_for<const N: usize>(
    waits: [(Option<BorrowedFd<'_>>, PollFlags); N],
    timeout: PollTimeout,
) -> [bool; N] {
    let mut fds: Vec<PollFd<'_>> =
        waits.iter().filter_map(|(fd, flags)| Some(PollFd::new((*fd)?, *flags))).collect();
    while poll(&mut fds, timeout) == Err(Errno::EINTR) {}
    let mut polled = fds.iter();
    waits.map(|(fd, _)| fd.is_some() && polled.next().and_then(PollFd::any) == Some(true))
}
