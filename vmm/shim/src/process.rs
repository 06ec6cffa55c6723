//! One program of a container: its own, or one of an exec.
//!
//! ```text
//! created ── start ──> starting ──> running ──────────────> stopped
//!    └─────── killed, or cannot be started ─────────────────^
//! ```
//! While it runs, one thread passes its output on and sees its end, one passes input on, and one
//! writes to its session, so that input which it does not read holds nothing else up.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use exocell_cell::agent::client::{self, ExecEvent, ExecOutput};
use exocell_cell::agent::{Exec, FrameWriter, Kind, Start, TtySize};
use exocell_cell::inside::Inside;
use tracing::{info, warn};

use crate::error::{Result, ShimError};
use crate::stdio::{Outputs, Over, Stdin, Stdio};

/// How long a guest may take to start a program.
const START_MAX: Duration = Duration::from_secs(60);
/// How long it may take to pass a signal on.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Frames that wait to be written to a session.
const FRAMES_MAX: usize = 16;
/// How long a program whose end was told may take to be over.
const OVER_MAX: Duration = Duration::from_secs(1);
/// How long output of a killed program is waited for that nobody takes.
const TAKEN_MAX: Duration = Duration::from_secs(5);
/// What a program's code is that ended with its cell.
const KILLED: u32 = 128 + 9;

/// What is to run.
pub enum Program {
    /// The container's own.
    Start(Box<Start>),
    Exec(Box<Exec>),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Stage {
    #[default]
    Created,
    Starting,
    Running,
    Stopped,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    pub code: u32,
    pub at: SystemTime,
    pub out_of_memory: bool,
}

#[derive(Default)]
struct State {
    stage: Stage,
    /// As the programs of its container know it.
    guest_pid: u32,
    ended: Option<Ended>,
    size: Option<TtySize>,
    input: Option<SyncSender<(Kind, Vec<u8>)>>,
    over: Option<Over>,
}

/// A program, from its creation until it is deleted.
pub struct Process {
    /// Empty for the container's own.
    pub exec_id: String,
    pub stdio: Stdio,
    state: Mutex<State>,
    changed: Condvar,
    given_up: AtomicBool,
    /// Of an exec, until it is started.
    program: Mutex<Option<Exec>>,
}

impl Process {
    /// A container's own.
    pub fn new(stdio: Stdio) -> Self {
        Self {
            exec_id: String::new(),
            stdio,
            program: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            given_up: AtomicBool::new(false),
        }
    }

    /// One of an exec.
    pub fn of_exec(exec_id: &str, stdio: Stdio, program: Exec) -> Self {
        let own = Self::new(stdio);
        Self { exec_id: exec_id.to_owned(), program: Mutex::new(Some(program)), ..own }
    }

    /// The program of an exec, once.
    ///
    /// # Errors
    /// It was started before.
    pub fn take_program(&self) -> Result<Exec> {
        let taken = self.program.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.ok_or_else(|| ShimError::state("the process was started already"))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn stage(&self) -> Stage {
        self.lock().stage
    }

    pub fn guest_pid(&self) -> u32 {
        self.lock().guest_pid
    }

    pub fn ended(&self) -> Option<Ended> {
        self.lock().ended
    }

    /// How it ended, waited for a moment where that is about to be written down; of one that was
    /// never started, that it was given up. `None` where it runs.
    pub fn ended_or_never_started(&self) -> Option<Ended> {
        match self.stage() {
            Stage::Created => self.end_before_start(nix::libc::SIGKILL as u8).or(self.ended()),
            Stage::Starting => None,
            Stage::Running | Stage::Stopped => self.wait_within(OVER_MAX),
        }
    }

    /// Waits for its end.
    pub fn wait(&self) -> Ended {
        let mut state = self.lock();
        loop {
            match state.ended {
                Some(ended) => return ended,
                None => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Waits for its end at most `limit`.
    pub fn wait_within(&self, limit: Duration) -> Option<Ended> {
        let state = self.lock();
        let waited = self.changed.wait_timeout_while(state, limit, |own| own.ended.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.ended
    }

    /// Starts it within `inside`. `started` is told before anything else can be told of it, and
    /// `finished` when it has ended and its output is written.
    ///
    /// # Errors
    /// It was started before, or it cannot be.
    pub fn start(
        self: &Arc<Self>,
        inside: &Inside,
        (namespace, id): (&str, &str),
        program: Program,
        started: impl FnOnce(u32),
        finished: impl FnOnce(Ended) + Send + 'static,
    ) -> Result<u32> {
        let size = {
            let mut state = self.lock();
            match state.stage {
                Stage::Created => state.stage = Stage::Starting,
                Stage::Starting | Stage::Running => {
                    return Err(ShimError::state("the process was started already"));
                }
                Stage::Stopped => return Err(ShimError::state("the process has ended")),
            }
            state.size
        };
        match self.begin(inside, (namespace, id), program, size) {
            Ok((guest_pid, stream, outputs)) => {
                started(guest_pid);
                self.follow(stream, outputs, finished)?;
                Ok(guest_pid)
            }
            Err(error) => {
                self.fail();
                Err(error)
            }
        }
    }

    fn begin(
        &self,
        inside: &Inside,
        (namespace, id): (&str, &str),
        program: Program,
        size: Option<TtySize>,
    ) -> Result<(u32, UnixStream, Outputs)> {
        let outputs = Outputs::open(&self.stdio, namespace, id)?;
        let stdin = Stdin::open(&self.stdio.stdin)?;
        let stream = inside.patient(START_MAX)?;
        let begun = match program {
            Program::Start(mut start) => {
                start.stdin = stdin.is_some();
                if let Some(size) = size {
                    start.spec.process.console_size = Some(exocell_cell::agent::oci::ConsoleSize {
                        height: size.rows.into(),
                        width: size.cols.into(),
                    });
                }
                client::start(&stream, &stream, &start).map(|session| session.guest_pid)
            }
            Program::Exec(mut exec) => {
                exec.stdin = stdin.is_some();
                exec.tty = exec.tty.map(|own| size.unwrap_or(own));
                client::exec(&stream, &stream, &exec).map(|session| session.guest_pid)
            }
        };
        let guest_pid = begun.map_err(|error| ShimError::not_started(&error))?;
        let failed = || ShimError::host("cannot follow the program");
        let stream = stream.into_endless().map_err(failed())?;
        let sink = stream.try_clone().map_err(ShimError::host("cannot follow the program"))?;
        self.take_input(guest_pid, sink, stdin)?;
        Ok((guest_pid, stream, outputs))
    }

    /// Starts the threads of its input.
    fn take_input(
        &self,
        guest_pid: u32,
        sink: UnixStream,
        stdin: Option<(Stdin, Over)>,
    ) -> Result<()> {
        let (input, frames) = sync_channel::<(Kind, Vec<u8>)>(FRAMES_MAX);
        thread("input", move || {
            let mut writer = FrameWriter::new(sink);
            while let Ok((kind, bytes)) = frames.recv() {
                if writer.write(kind, &bytes).is_err() {
                    return;
                }
            }
        })?;
        let mut state = self.lock();
        if let Some((stdin, over)) = stdin {
            let input = input.clone();
            thread("stdin", move || {
                stdin.pump(|bytes| input.send((Kind::Stdin, bytes.to_vec())).is_ok());
                let _ = input.send((Kind::StdinEof, Vec::new()));
            })?;
            state.over = Some(over);
        }
        (state.guest_pid, state.input) = (guest_pid, Some(input));
        state.stage = Stage::Running;
        Ok(())
    }

    /// Passes its output on until it has ended.
    fn follow(
        self: &Arc<Self>,
        stream: UnixStream,
        mut outputs: Outputs,
        finished: impl FnOnce(Ended) + Send + 'static,
    ) -> Result<()> {
        let process = self.clone();
        thread("output", move || {
            let mut output = ExecOutput::new(&stream);
            let code = loop {
                match output.event() {
                    Ok(ExecEvent::Stdout(bytes)) => {
                        outputs.write(false, &bytes, &process.given_up);
                    }
                    Ok(ExecEvent::Stderr(bytes)) => outputs.write(true, &bytes, &process.given_up),
                    Ok(ExecEvent::Exited(code)) => break u32::from(code),
                    Err(error) => {
                        warn!(exec = process.exec_id, %error, "a program ended with its cell");
                        break KILLED;
                    }
                }
            };
            let out_of_memory = output.is_out_of_memory();
            // Readers see the end before anybody hears of it.
            drop(outputs);
            let _ = stream.shutdown(std::net::Shutdown::Both);
            let ended = Ended { code, at: SystemTime::now(), out_of_memory };
            finished(ended);
            process.end(ended);
        })
    }

    /// It cannot be started: it has ended.
    pub fn fail(&self) {
        // As the runtimes of containers of the host have it.
        self.end(Ended { code: 128, at: SystemTime::now(), out_of_memory: false });
    }

    /// It has ended; the first end counts.
    fn end(&self, ended: Ended) {
        let mut state = self.lock();
        state.stage = Stage::Stopped;
        state.ended.get_or_insert(ended);
        state.input = None;
        if let Some(over) = state.over.take() {
            over.say();
        }
        self.changed.notify_all();
        info!(exec = self.exec_id, code = ended.code, "a program has ended");
    }

    /// Ends one that has not been started, as signal `number` would. Whether it was one.
    pub fn end_before_start(&self, number: u8) -> Option<Ended> {
        let ended = {
            let mut state = self.lock();
            if state.stage != Stage::Created {
                return None;
            }
            state.stage = Stage::Stopped;
            Ended { code: 128 + u32::from(number), at: SystemTime::now(), out_of_memory: false }
        };
        self.end(ended);
        Some(ended)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It does not run, or the guest does not answer.
    pub fn signal(self: &Arc<Self>, inside: &Inside, number: u8) -> Result<()> {
        let guest_pid = match self.stage() {
            Stage::Running => self.guest_pid(),
            Stage::Stopped => return Err(ShimError::not_found("process already finished")),
            Stage::Created | Stage::Starting => {
                return Err(ShimError::state("the process has not been started"));
            }
        };
        let stream = inside.patient(ANSWER_MAX)?;
        client::signal(&stream, &stream, guest_pid, number)?;
        if i32::from(number) == nix::libc::SIGKILL {
            self.give_up_later();
        }
        Ok(())
    }

    /// Does not wait for ever for a reader of what it has written.
    pub fn give_up_later(self: &Arc<Self>) {
        let process = self.clone();
        let _ = thread("give-up", move || {
            if process.wait_within(TAKEN_MAX).is_none() {
                process.given_up.store(true, Ordering::Relaxed);
            }
        });
    }

    /// Changes its terminal's size, now or when it starts.
    ///
    /// # Errors
    /// It does not take its input.
    pub fn resize(&self, size: TtySize) -> Result<()> {
        let mut state = self.lock();
        state.size = Some(size);
        let Some(input) = &state.input else { return Ok(()) };
        let text = format!(r#"{{"rows":{},"cols":{}}}"#, size.rows, size.cols);
        input
            .try_send((Kind::Resize, text.into_bytes()))
            .map_err(|_| ShimError::state("the program does not take what is in front of that"))
    }

    /// Ends its standard input, behind what has come.
    pub fn close_stdin(&self) {
        // The thread that reads the FIFO ends the input when it sees that all writers are gone; a
        // client that keeps it open has said that it writes no more.
        let mut state = self.lock();
        if let Some(over) = state.over.take() {
            over.say();
        }
    }
}

fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(256 << 10)
        .spawn(body)
        .map(drop)
        .map_err(ShimError::host(format!("cannot start the {name} thread")))
}
