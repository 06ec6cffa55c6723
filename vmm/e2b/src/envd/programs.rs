//! The commands that run in a sandbox, and who listens to them.
//!
//! ```text
//! Start ──> runs: its output goes to all who listen ──> ends: they are told, it is forgotten
//!              ^     └── nobody: it is dropped, as by a closed terminal that a command outlives
//!           Connect
//! ```
//! A command outlives the connection that started it, and the server: the next one follows it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use exocell_cell::agent::client::{self, ClientError, cleaned};
use exocell_cell::agent::{Exec, FrameWriter, Kind, Reply, Request};
use exocell_cell::logging::tracing::debug;
use exocell_docker::frames::{read_frame, write_json};
use exocell_docker::input::Input;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use crate::blocking::blocking;
use crate::bounds::Share;
use crate::error::{Problem, Result};
use crate::note::{Command, USER};
use crate::sandbox::{Sandbox, until};
use crate::state::Server;

/// Commands of a sandbox at once.
const PROGRAMS_MAX: usize = 1024;
/// Pieces of output that wait for one who listens; then the command waits, as for a pipe.
const EVENTS_WAITING: usize = 64;
/// How long a command waits for one who does not read; then that one is left.
const STALL_MAX: Duration = Duration::from_secs(60);
/// How long a guest may take to start a command.
const START_MAX: Duration = Duration::from_secs(20);
/// How long input may wait for a command that does not read.
const INPUT_MAX: Duration = Duration::from_secs(60);

/// What is told of a command.
#[derive(Debug, Clone)]
pub enum Event {
    Stdout(Bytes),
    Stderr(Bytes),
    End(End),
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    pub code: u8,
    /// The signal that ended it, if it was one of a client's.
    pub signal: Option<u8>,
    /// Whether its time was over.
    pub is_late: bool,
}

/// One command.
pub struct Program {
    pub command: Command,
    input: Input,
    listeners: Mutex<Vec<mpsc::Sender<Event>>>,
    /// The last signal that a client sent.
    signal: AtomicU8,
    /// Of what its tenant may have the server remember.
    _words: Option<Share>,
}

impl Program {
    fn listeners(&self) -> MutexGuard<'_, Vec<mpsc::Sender<Event>>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it says from now on. The stream ends without an end where the sandbox does.
    pub fn listen(&self) -> mpsc::Receiver<Event> {
        let (sender, receiver) = mpsc::channel(EVENTS_WAITING);
        self.listeners().push(sender);
        receiver
    }

    async fn tell(&self, event: Event) {
        let all = self.listeners().clone();
        for listener in all {
            let sent = timeout(STALL_MAX, listener.send(event.clone())).await;
            if !matches!(sent, Ok(Ok(()))) {
                self.listeners().retain(|other| !other.same_channel(&listener));
            }
        }
    }

    /// Gives it input; nothing is its end.
    pub async fn feed(&self, bytes: Option<Bytes>) -> Result<()> {
        if !self.command.stdin && !self.command.pty {
            return Err(Problem::invalid("the command was started without standard input"));
        }
        let sent = match bytes {
            Some(bytes) => self.input.send(Kind::Stdin, bytes),
            None => self.input.send(Kind::StdinEof, Bytes::new()),
        };
        match timeout(INPUT_MAX, sent).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(Problem::not_found("the command has ended")),
            Err(_) => Err(Problem::exhausted("the command does not read its input")),
        }
    }

    pub fn resize(&self, rows: u16, cols: u16) -> Result<()> {
        if !self.command.pty {
            return Err(Problem::invalid("the command has no terminal"));
        }
        self.input.resize(exocell_cell::agent::TtySize { rows, cols });
        Ok(())
    }
}

/// All of a sandbox, by their pids.
#[derive(Default)]
pub struct Programs(Mutex<BTreeMap<u32, Arc<Program>>>);

/// By what a client names a command.
#[derive(Debug, Clone, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Selector {
    pid: Option<u32>,
    tag: Option<String>,
}

impl Programs {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<Program>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn all(&self) -> Vec<Arc<Program>> {
        self.lock().values().cloned().collect()
    }

    /// # Errors
    /// 404: no such command runs.
    pub fn find(&self, wanted: &Selector) -> Result<Arc<Program>> {
        let all = self.lock();
        let found = match (wanted.pid, &wanted.tag) {
            (Some(pid), _) => all.get(&pid),
            (None, Some(tag)) => all.values().find(|it| it.command.tag.as_ref() == Some(tag)),
            (None, None) => return Err(Problem::invalid("no process is named (pid or tag)")),
        };
        found.cloned().ok_or_else(|| match (wanted.pid, &wanted.tag) {
            (Some(pid), _) => Problem::not_found(format!("process with pid {pid} not found")),
            (None, tag) => Problem::not_found(format!("process with tag {tag:?} not found")),
        })
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn commands(&self) -> Vec<Command> {
        self.lock().values().map(|program| program.command.clone()).collect()
    }
}

/// Starts a command; who is the first to listen.
pub async fn start(
    server: &Arc<Server>,
    sandbox: &Arc<Sandbox>,
    command: Command,
    mut program: Exec,
) -> Result<(Arc<Program>, mpsc::Receiver<Event>)> {
    if sandbox.programs.lock().len() >= PROGRAMS_MAX {
        return Err(Problem::exhausted(format!(
            "{PROGRAMS_MAX} commands run in the sandbox, as many as may; end one"
        )));
    }
    let words = sandbox.bytes(command.bytes()).ok_or_else(|| {
        Problem::exhausted("the commands of this key have too many words and variables; end one")
    })?;
    let begun = match begin(sandbox, &program).await {
        // Clients name bash, which small images lack.
        Err(error) if error.status == hyper::StatusCode::NOT_FOUND && has_bash(&program) => {
            program.args[0] = "/bin/sh".to_owned();
            begin(sandbox, &program).await?
        }
        begun => begun?,
    };
    let (pid, stream) = begun;
    Ok(follow(server, sandbox, Command { pid, ..command }, stream, Some(words)))
}

fn has_bash(program: &Exec) -> bool {
    program.args.first().is_some_and(|name| name == "/bin/bash")
}

/// Has the guest start it; its pid, and its stream.
async fn begin(sandbox: &Arc<Sandbox>, program: &Exec) -> Result<(u32, UnixStream)> {
    let mut stream = sandbox.line(|_| Ok(())).await?;
    let request = Request::Exec(program.clone());
    let asked = async {
        write_json(&mut stream, Kind::Request, &request).await?;
        read_frame(&mut stream).await
    };
    let late = |_| Problem::unavailable("the sandbox did not start the command in time");
    let answer = timeout(START_MAX, asked).await.map_err(late)?;
    let reply = match answer {
        Ok(Some(frame)) if frame.kind == Kind::Reply => frame.json::<Reply>().ok(),
        _ => None,
    };
    match reply {
        Some(Reply::Started { guest_pid }) => Ok((guest_pid, stream)),
        Some(Reply::Failed { kind, message }) => {
            let error = ClientError::Failed { kind, message: cleaned(&message) };
            Err(super::of_user(error.into()))
        }
        _ => Err(Problem::unavailable("the sandbox ended before the command was started")),
    }
}

/// Takes a running command in, and follows it to its end.
fn follow(
    server: &Arc<Server>,
    sandbox: &Arc<Sandbox>,
    command: Command,
    stream: UnixStream,
    words: Option<Share>,
) -> (Arc<Program>, mpsc::Receiver<Event>) {
    let (output, input) = stream.into_split();
    let program = Arc::new(Program {
        command,
        input: Input::new(input),
        listeners: Mutex::default(),
        signal: AtomicU8::new(0),
        _words: words,
    });
    let first = program.listen();
    sandbox.programs.lock().insert(program.command.pid, program.clone());
    let (server, sandbox, own) = (server.clone(), sandbox.clone(), program.clone());
    tokio::spawn(async move {
        write_down(&server, &sandbox).await;
        let end = hear(&sandbox, &own, output).await;
        {
            let mut all = sandbox.programs.lock();
            // Its number may be another's by now.
            if all.get(&own.command.pid).is_some_and(|other| Arc::ptr_eq(other, &own)) {
                all.remove(&own.command.pid);
            }
        }
        own.input.end();
        if let Some(end) = end {
            own.tell(Event::End(end)).await;
        }
        own.listeners().clear();
        write_down(&server, &sandbox).await;
    });
    (program, first)
}

/// Notes what runs, for the next server.
pub async fn write_down(server: &Arc<Server>, sandbox: &Arc<Sandbox>) {
    // One that is over has no notes any more.
    if server.get(&sandbox.id).is_none() {
        return;
    }
    let (notes, own) = (server.notes.clone(), sandbox.clone());
    let written = blocking(move || {
        let failed = |error: std::io::Error| Problem::internal(error.to_string());
        notes.write_commands(&own.id, || own.programs.commands()).map_err(failed)
    });
    if let Err(error) = written.await {
        debug!(sandbox = sandbox.id, "its commands are not written down: {error}");
    }
}

/// Passes on what it says, until it ends or its time is over.
async fn hear(sandbox: &Arc<Sandbox>, program: &Program, mut output: OwnedReadHalf) -> Option<End> {
    let far = Duration::from_secs(365 * 24 * 3600);
    let time = program.command.deadline_ms.map_or(far, until);
    let (sleep, mut is_late) = (sleep_until(Instant::now() + time), false);
    let mut sleep = std::pin::pin!(sleep);
    loop {
        let mut next = std::pin::pin!(read_frame(&mut output));
        let frame = loop {
            tokio::select! {
                frame = &mut next => break frame,
                () = &mut sleep, if !is_late => {
                    is_late = true;
                    let pid = program.command.pid;
                    let _ = sandbox.order(move |guest| client::kill_group(guest, guest, pid)).await;
                }
                () = sandbox.gone() => return None,
            }
        };
        let frame = frame.ok().flatten()?;
        match frame.kind {
            Kind::Stdout => program.tell(Event::Stdout(frame.payload.into())).await,
            Kind::Stderr => program.tell(Event::Stderr(frame.payload.into())).await,
            Kind::Reply => {
                let Ok(Reply::Exited { code, .. }) = frame.json() else { return None };
                let sent = program.signal.load(Ordering::Relaxed);
                let sent = if is_late { KILL } else { sent };
                let signal =
                    (sent != 0 && u32::from(code) == 128 + u32::from(sent)).then_some(sent);
                return Some(End { code, signal, is_late });
            }
            _ => return None,
        }
    }
}

const KILL: u8 = 9;

/// Sends a command a signal.
pub async fn signal(sandbox: &Arc<Sandbox>, program: &Program, number: u8) -> Result<()> {
    let pid = program.command.pid;
    program.signal.store(number, Ordering::Relaxed);
    let sent = match number {
        // It ends with all that it has started.
        KILL => sandbox.ask(move |guest| client::kill_group(guest, guest, pid)).await,
        _ => sandbox.ask(move |guest| client::signal(guest, guest, pid, number)).await,
    };
    // It has ended meanwhile.
    let over = |error: Problem| match error.status == hyper::StatusCode::BAD_REQUEST {
        true => Problem::not_found(format!("process with pid {pid} not found")),
        false => error,
    };
    sent.map_err(over)
}

/// Follows the commands that an earlier server has started.
pub async fn adopt(server: &Arc<Server>, sandbox: &Arc<Sandbox>) {
    let _ = sandbox.ask(|guest| client::account(guest, guest, USER)).await;
    for command in server.notes.commands(&sandbox.id) {
        let guest_pid = command.pid;
        let line = sandbox.line(move |guest| {
            let wanted = Request::Follow { guest_pid };
            let asked = FrameWriter::new(guest).write_json(Kind::Request, &wanted);
            asked.map_err(|error| Problem::internal(error.to_string()))
        });
        let Ok(mut stream) = line.await else { continue };
        let first = timeout(START_MAX, read_frame(&mut stream)).await;
        // Another answer: it has ended.
        let goes_on = matches!(
            first, Ok(Ok(Some(frame))) if matches!(frame.json(), Ok(Reply::Started { .. }))
        );
        if goes_on {
            let words = sandbox.bytes(command.bytes());
            let _ = follow(server, sandbox, command, stream, words);
        }
    }
}
