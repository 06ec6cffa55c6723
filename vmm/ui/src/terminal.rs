//! Terminals in cells: a shell each, whose output is a stream and whose input comes in calls.
//!
//! One ends with its shell, with its cell, and with the page that has it.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use exocell_cell::agent::client::{self, ExecEvent, ExecInput, ExecOutput};
use exocell_cell::agent::{Exec, TtySize};
use exocell_cell::control::Client;
use exocell_cell::{CellError, Layout, Record, State, Strength, key, plan};
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::json;
use tokio::time::interval;

use crate::error::{Refusal, Result, blocking};
use crate::reply::{ALIVE_TIME, Stream};

/// Terminals at once.
const TERMINALS_MAX: usize = 16;
/// The most that may come at once for one, in bytes.
pub const INPUT_MAX: usize = 64 << 10;
/// How long a guest may take to take that.
const INPUT_TIME: Duration = Duration::from_secs(10);
/// What runs in one. What the page shows is a terminal like that of Linux (console_codes(4)).
const SHELL: &str = "command -v bash >/dev/null 2>&1 && exec bash; exec sh";
const TERM: &str = "TERM=linux";
/// The largest terminal.
const SIDE_MAX: u16 = 500;

/// How large a page shows it.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Size {
    columns: u16,
    rows: u16,
}

impl Size {
    fn checked(self) -> Result<TtySize> {
        let range = 2..=SIDE_MAX;
        match range.contains(&self.columns) && range.contains(&self.rows) {
            true => Ok(TtySize { rows: self.rows, cols: self.columns }),
            false => Err(Refusal::new(
                StatusCode::BAD_REQUEST,
                format!("a terminal has 2 to {SIDE_MAX} columns and rows"),
            )),
        }
    }
}

/// All of a server's.
#[derive(Clone, Default)]
pub struct Terminals(Arc<Mutex<HashMap<String, Option<Terminal>>>>);

/// One that runs; a place that is taken has none yet.
#[derive(Clone)]
struct Terminal {
    input: ExecInput<UnixStream>,
    stream: Arc<UnixStream>,
}

/// A terminal that was begun: its page has to be told of it.
pub struct Begun {
    place: Place,
    output: ExecOutput<UnixStream>,
    stream: Arc<UnixStream>,
    guest_pid: u32,
    record: Record,
}

/// Its place among the others, until it is over.
struct Place(Terminals, String);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

impl Terminals {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Option<Terminal>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self) -> Result<Place> {
        let failed = |error| Refusal::internal(format!("no name for a terminal: {error}"));
        let name = key::random().map_err(failed)?;
        let mut all = self.lock();
        if all.len() >= TERMINALS_MAX {
            return Err(Refusal::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!("there are {TERMINALS_MAX} terminals, as many as there may be; close one"),
            ));
        }
        all.insert(name.clone(), None);
        Ok(Place(self.clone(), name))
    }

    /// Begins one in cell `id`.
    ///
    /// # Errors
    /// The cell does not run, or has no guest; there are as many as may be.
    pub async fn begin(&self, layout: Layout, id: String, size: Size) -> Result<Begun> {
        let (size, place) = (size.checked()?, self.place()?);
        blocking(move || begin(&layout, &id, size, place)).await
    }

    fn find(&self, name: &str) -> Result<Terminal> {
        let found = self.lock().get(name).cloned().flatten();
        found.ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, "this terminal has ended"))
    }

    /// Types `bytes`.
    ///
    /// # Errors
    /// It has ended; it does not read, which ends it.
    pub async fn input(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        self.with(name, move |input| input.stdin(&bytes)).await
    }

    /// Makes it as large as the page shows it.
    ///
    /// # Errors
    /// As of [`Self::input`].
    pub async fn resize(&self, name: &str, size: Size) -> Result<()> {
        let size = size.checked()?;
        self.with(name, move |input| input.resize(size)).await
    }

    async fn with(
        &self,
        name: &str,
        what: impl FnOnce(&ExecInput<UnixStream>) -> std::result::Result<(), client::ClientError>
        + Send
        + 'static,
    ) -> Result<()> {
        let terminal = self.find(name)?;
        blocking(move || {
            what(&terminal.input).map_err(|error| {
                // A part of a message may have gone: nothing can follow it.
                let _ = terminal.stream.shutdown(Shutdown::Both);
                error.into()
            })
        })
        .await
    }
}

fn begin(layout: &Layout, id: &str, size: TtySize, place: Place) -> Result<Begun> {
    let (record, spec, status) = Record::find(layout, id)?;
    let conflict = |why: &str| Err(Refusal::new(StatusCode::CONFLICT, why));
    match status.state {
        State::Running if record.is_paused() => return conflict("the cell is paused"),
        State::Running => {}
        _ => return conflict("the cell does not run"),
    }
    if spec.strength == Strength::Isolate {
        return conflict("the cell is an isolate: it has one program, and no shell beside it");
    }
    let request = Exec {
        args: ["/bin/sh", "-c", SHELL].map(str::to_owned).into(),
        env: plan::environment_beside(layout, &spec, &[TERM.to_owned()], true),
        cwd: String::new(),
        user: String::new(),
        privileged: false,
        rules: None,
        tty: Some(size),
        stdin: true,
        lasting: false,
    };
    let guest = Client::connect(&record)?.guest_stream()?;
    let guest_pid = client::exec(&guest, &guest, &request)?.guest_pid;
    let parts = guest.into_endless().and_then(|stream| {
        stream.set_write_timeout(Some(INPUT_TIME))?;
        Ok((stream.try_clone()?, stream.try_clone()?, Arc::new(stream)))
    });
    let (input, output, stream) = parts.map_err(CellError::host("cannot follow the terminal"))?;
    let terminal = Terminal { input: ExecInput::new(input), stream: stream.clone() };
    place.0.lock().insert(place.1.clone(), Some(terminal));
    Ok(Begun { output: ExecOutput::new(output), stream, guest_pid, record, place })
}

impl Begun {
    /// Shows what comes out of it until it is over.
    pub async fn show(self, stream: &Stream) {
        let Self { place, mut output, stream: line, guest_pid, record } = self;
        if !stream.say(&json!({ "terminal": place.1 })).await {
            return end(record, guest_pid, &line).await;
        }
        let to = stream.clone();
        // A thread of its own: it waits as long as the shell does.
        let mut reading = tokio::task::spawn_blocking(move || {
            loop {
                let said = match output.event() {
                    Ok(ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes)) => {
                        to.say_blocking(&json!({ "output": STANDARD.encode(bytes) }))
                    }
                    Ok(ExecEvent::Exited(code)) => {
                        to.say_blocking(&json!({ "exit_code": code }));
                        return true;
                    }
                    Err(_) => {
                        to.say_blocking(&json!({ "exit_code": null }));
                        return false;
                    }
                };
                if !said {
                    return false;
                }
            }
        });
        let mut alive = interval(ALIVE_TIME);
        let has_exited = loop {
            tokio::select! {
                read = &mut reading => break read.unwrap_or(false),
                _ = alive.tick() => if !stream.live().await { break false },
                () = stream.closed() => break false,
            }
        };
        // The number of one that has exited may be another's by now.
        if !has_exited {
            end(record, guest_pid, &line).await;
        }
        drop(place);
    }
}

/// Ends its shell with what that has started.
async fn end(record: Record, guest_pid: u32, line: &UnixStream) {
    let _ = line.shutdown(Shutdown::Both);
    let _ = blocking(move || {
        let guest = Client::connect(&record)?.guest_stream()?;
        Ok(client::kill_group(&guest, &guest, guest_pid)?)
    })
    .await;
}
