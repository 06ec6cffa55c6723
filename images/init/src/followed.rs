//! Programs whose host may go and come again ([`exocell_agent::Exec::lasting`]).
//!
//! ```text
//!  Exec ──> host ──────── its stream ends ──────> nobody: output is dropped, input stays open
//!             ^                                      │
//!             └───────────── Follow: the new host <──┘
//! ```
//! One thread reads what a program says; a new host is handed to that thread.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use exocell_agent::{FrameError, FrameWriter, Kind, Reply};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::error::{Context, InitError};
use crate::reaper::Exit;

/// The pid by which a program knows itself, and in which container.
pub type Shown = (u32, i32);

/// What a new host of a program needs.
pub struct Line {
    pub pid: i32,
    pub exit: Arc<Exit>,
    pub tty: Option<File>,
    /// Kept open between two hosts.
    sink: Mutex<Option<File>>,
    next: Mutex<Option<File>>,
    wake: EventFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Line {
    pub fn new(
        pid: i32,
        exit: &Arc<Exit>,
        sink: Option<&File>,
        tty: Option<&File>,
    ) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            pid,
            exit: Arc::clone(exit),
            tty: tty.map(File::try_clone).transpose()?,
            sink: Mutex::new(sink.map(File::try_clone).transpose()?),
            next: Mutex::default(),
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        }))
    }

    pub fn sink(&self) -> io::Result<Option<File>> {
        lock(&self.sink).as_ref().map(File::try_clone).transpose()
    }

    /// The program's input has ended for good.
    pub fn close(&self) {
        lock(&self.sink).take();
    }
}

/// All of a guest.
#[derive(Default)]
pub struct Lines(Mutex<HashMap<Shown, Arc<Line>>>);

impl Lines {
    pub fn add(&self, shown: Shown, line: &Arc<Line>) {
        lock(&self.0).insert(shown, Arc::clone(line));
    }

    /// The program is over: nobody is handed to it any more.
    pub fn remove(&self, shown: Shown) {
        lock(&self.0).remove(&shown);
    }

    /// Makes who is at the other end of `stream` the program's host.
    ///
    /// # Errors
    /// There is no such program.
    pub fn give(&self, shown: Shown, stream: &File) -> Result<Arc<Line>, InitError> {
        let lines = lock(&self.0);
        let none = || InitError::not_found(format!("no program {} that can be followed", shown.1));
        let line = lines.get(&shown).ok_or_else(none)?;
        *lock(&line.next) = Some(stream.try_clone().context(|| "a stream")?);
        let _ = line.wake.write(1);
        Ok(Arc::clone(line))
    }
}

/// Who hears a program.
pub struct Host<'a> {
    first: &'a File,
    next: Option<File>,
    connected: bool,
    line: Option<Arc<Line>>,
    guest_pid: u32,
}

impl<'a> Host<'a> {
    pub fn new(stream: &'a File, line: Option<Arc<Line>>, guest_pid: u32) -> Self {
        Self { first: stream, next: None, connected: true, line, guest_pid }
    }

    /// Readable when there is a new host.
    pub fn wake(&self) -> Option<BorrowedFd<'_>> {
        self.line.as_ref().map(|line| line.wake.as_fd())
    }

    /// Takes a new host, if there is one.
    pub fn renew(&mut self) {
        let Some(line) = &self.line else { return };
        let _ = line.wake.read();
        let Some(next) = lock(&line.next).take() else { return };
        (self.next, self.connected) = (Some(next), true);
        let started = Reply::Started { guest_pid: self.guest_pid };
        self.connected = self.reply(&started).is_ok();
    }

    fn writer(&self) -> FrameWriter<&File> {
        FrameWriter::new(self.next.as_ref().unwrap_or(self.first))
    }

    /// Passes output on. Where nobody hears it, it is gone.
    pub fn say(&mut self, kind: Kind, bytes: &[u8]) {
        self.connected = self.connected && self.writer().write(kind, bytes).is_ok();
    }

    pub fn reply(&self, reply: &Reply) -> Result<(), FrameError> {
        self.writer().write_json(Kind::Reply, reply)
    }
}
