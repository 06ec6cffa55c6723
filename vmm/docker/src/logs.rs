//! `GET /containers/{id}/logs`: what a container wrote, line by line.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::lines::{Line, Tail, Wanted};
use exocell_cell::now_ms;
use hyper::StatusCode;
use tokio::time::timeout;

use crate::containers::Seen;
use crate::error::{ApiError, ApiResult};
use crate::events::time_ns;
use crate::frames::Chunk;
use crate::hijack::content_type;
use crate::http::{Body, BodySender, Call, Response, stream};
use crate::lifecycle;
use crate::state::Server;

/// How often a log that nobody tells of is looked at.
const LOOK: Duration = Duration::from_millis(200);
/// Lines and bytes that are read of a log at a time; each client may keep some such reads waiting.
const BATCH_LINES: usize = 1024;
const BATCH_BYTES: usize = 16 << 10;
/// A program that began no longer ago than this may not have said yet what it begins with, and has
/// so long for that: clients ask for the logs of a short one as soon as it is started.
const FRESH_MS: u64 = 500;
const FIRST_WORDS_MAX: Duration = Duration::from_millis(150);

/// What a client wants of a log.
fn wanted(call: &Call) -> ApiResult<Wanted> {
    let query = &call.target.query;
    let time = |name| query.get(name).filter(|text| *text != "0").map(time_ns).transpose();
    let (stdout, stderr) = (query.flag("stdout"), query.flag("stderr"));
    if !stdout && !stderr {
        return Err(ApiError::bad_request("Bad parameters: you must choose at least one stream"));
    }
    Ok(Wanted {
        stdout,
        stderr,
        timestamps: query.flag("timestamps"),
        since: time("since")?.unwrap_or(0) / 1_000_000,
        until: time("until")?.map_or(u64::MAX, |until| until / 1_000_000),
        // A number below zero and a word both mean all.
        tail: query.get("tail").and_then(|text| text.parse().ok()),
    })
}

fn chunk(line: Line) -> Chunk {
    Chunk { stderr: line.stderr, bytes: line.bytes.into() }
}

/// What was written so far. It is read as its client takes it: of a log, which is the guest's to
/// fill, a few lines are held.
pub struct Past {
    log: Option<Tail>,
    wanted: Wanted,
    /// Whether lines that are not finished are among them, and so will not be.
    rest: bool,
}

impl Past {
    /// The log in the directory of a cell's record.
    pub async fn open(server: &Arc<Server>, directory: &Path, wanted: Wanted) -> ApiResult<Self> {
        Self::of(server, directory, wanted, true).await
    }

    async fn of(
        server: &Arc<Server>,
        directory: &Path,
        wanted: Wanted,
        rest: bool,
    ) -> ApiResult<Self> {
        let directory = directory.to_owned();
        let open = move |_: &Server| {
            let mut log = Tail::open(&directory).map_err(unreadable)?;
            log.skip(&wanted, rest).map_err(unreadable)?;
            Ok(log)
        };
        Ok(Self { log: Some(server.blocking(open).await?), wanted, rest })
    }

    /// The next lines; none where those were all.
    pub async fn next(&mut self, server: &Arc<Server>) -> ApiResult<Vec<Chunk>> {
        let Some(mut log) = self.log.take() else { return Ok(Vec::new()) };
        let (wanted, rest) = (self.wanted, self.rest);
        let read = move |_: &Server| {
            let chunks = batch(&mut log, wanted, rest).map_err(unreadable)?;
            Ok((log, chunks))
        };
        let (log, chunks) = server.blocking(read).await?;
        self.log = Some(log);
        Ok(chunks)
    }

    /// Sends a client all that there is. False when it is gone, or the log cannot be read.
    async fn send(&mut self, server: &Arc<Server>, tty: bool, sender: &BodySender) -> bool {
        while let Ok(chunks) = self.next(server).await {
            if chunks.is_empty() {
                return true;
            }
            let bytes: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.encoded(tty)).collect();
            if !sender.send(bytes).await {
                return false;
            }
        }
        false
    }

    /// Finds what was written since; with `rest` nothing more will be.
    async fn look(&mut self, server: &Arc<Server>, rest: bool) -> ApiResult<()> {
        let Some(mut log) = self.log.take() else { return Ok(()) };
        let look = move |_: &Server| log.look().map(|()| log).map_err(unreadable);
        self.log = Some(server.blocking(look).await?);
        self.rest = rest;
        Ok(())
    }
}

/// The next lines, as many as one client may keep waiting.
fn batch(log: &mut Tail, wanted: Wanted, rest: bool) -> io::Result<Vec<Chunk>> {
    let (mut chunks, mut bytes) = (Vec::new(), 0);
    while chunks.len() < BATCH_LINES && bytes < BATCH_BYTES {
        let line = match log.line()? {
            None if rest => log.rest(),
            line => line,
        };
        let Some(line) = line else { break };
        if let Some(line) = wanted.choose(line) {
            bytes += line.bytes.len();
            chunks.push(chunk(line));
        }
    }
    Ok(chunks)
}

fn unreadable(error: io::Error) -> ApiError {
    ApiError::internal(format!("the log cannot be read: {error}"))
}

/// `GET /containers/{id}/logs`
pub async fn logs(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let wanted = wanted(call)?;
    let seen = server.find(key).await?;
    let tty = seen.container.config.tty;
    if seen.container.spec.keeps_no_log {
        return Err(ApiError::new(
            StatusCode::NOT_IMPLEMENTED,
            "configured logging driver does not support reading",
        ));
    }
    let (sender, body) = Body::stream();
    let response = stream(content_type(call.target.version, tty), body);
    let Some((record, _)) = &seen.cell else { return Ok(response) };
    let follows = call.target.query.flag("follow") && seen.is_running();
    if !follows {
        await_first_words(server, &seen).await;
    }
    let mut past = Past::of(server, record.directory(), wanted, !follows).await?;
    let server = server.clone();
    tokio::spawn(async move {
        match follows {
            true => follow(server, seen, past, sender).await,
            false => drop(past.send(&server, tty, &sender).await),
        }
    });
    Ok(response)
}

/// Waits a moment for the end of a program that has just begun.
async fn await_first_words(server: &Arc<Server>, seen: &Seen) {
    let began = seen.cell.as_ref().map_or(0, |(_, status)| status.started_ms);
    if !seen.is_running() || now_ms().saturating_sub(began) > FRESH_MS {
        return;
    }
    let mut life = server.live(seen.id()).life();
    let ends = life.borrow().ends;
    let ended = life.wait_for(|life| life.ends > ends || life.removed);
    // One that goes on is listened to no longer.
    let _ = timeout(FIRST_WORDS_MAX, ended).await;
}

/// Sends what is there and what comes, until the container ends.
async fn follow(server: Arc<Server>, seen: Seen, mut log: Past, sender: BodySender) {
    let live = server.live(seen.id());
    let (mut written, mut life) = (live.written(), live.life());
    let ends = life.borrow().ends;
    // Without it the log is looked at from time to time.
    let _ = lifecycle::adopt(&server, &seen).await;
    loop {
        written.mark_unchanged();
        let over = {
            let life = *life.borrow();
            life.ends > ends || life.removed
        } || !live.is_followed()
            && !server.find(seen.id()).await.is_ok_and(|s| s.is_running());
        if log.look(&server, over).await.is_err()
            || !log.send(&server, seen.container.config.tty, &sender).await
            || over
        {
            return;
        }
        tokio::select! {
            _ = timeout(LOOK, written.changed()) => {}
            _ = life.changed() => {}
            () = sender.closed() => return,
        }
    }
}
