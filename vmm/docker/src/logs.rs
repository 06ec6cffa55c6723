//! `GET /containers/{id}/logs`: what a container wrote, line by line.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exocell_cell::agent::{FrameReader, Kind};
use tokio::time::timeout;

use crate::clock;
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
/// A line longer than this is several, in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;

/// What of a log is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    stdout: bool,
    stderr: bool,
    timestamps: bool,
    /// Milliseconds since 1970.
    since: u64,
    until: u64,
    /// Only so many lines at the end.
    tail: Option<usize>,
}

impl Wanted {
    /// Everything of these streams.
    pub fn streams(stdout: bool, stderr: bool) -> Self {
        Self { stdout, stderr, timestamps: false, since: 0, until: u64::MAX, tail: None }
    }

    fn of(call: &Call) -> ApiResult<Self> {
        let query = &call.target.query;
        let time = |name| query.get(name).filter(|text| *text != "0").map(time_ns).transpose();
        let (stdout, stderr) = (query.flag("stdout"), query.flag("stderr"));
        if !stdout && !stderr {
            return Err(ApiError::bad_request(
                "Bad parameters: you must choose at least one stream",
            ));
        }
        Ok(Self {
            stdout,
            stderr,
            timestamps: query.flag("timestamps"),
            since: time("since")?.unwrap_or(0) / 1_000_000,
            until: time("until")?.map_or(u64::MAX, |until| until / 1_000_000),
            // A number below zero and a word both mean all.
            tail: query.get("tail").and_then(|text| text.parse().ok()),
        })
    }

    fn takes(&self, line: &Line) -> bool {
        (if line.stderr { self.stderr } else { self.stdout })
            && (self.since..=self.until).contains(&line.time_ms)
    }

    fn chunk(&self, line: Line) -> Chunk {
        let bytes = match self.timestamps {
            false => line.bytes,
            true => {
                [format!("{} ", clock::rfc3339_ms(line.time_ms)).into_bytes(), line.bytes].concat()
            }
        };
        Chunk { stderr: line.stderr, bytes: Bytes::from(bytes) }
    }
}

/// A line of a program's output, its newline with it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    stderr: bool,
    /// When it began, in milliseconds since 1970.
    time_ms: u64,
    bytes: Vec<u8>,
}

/// Makes lines of frames. The two streams do not mix within a line.
#[derive(Default)]
struct Lines {
    time_ms: u64,
    open: [Option<Line>; 2],
}

impl Lines {
    fn take(&mut self, kind: Kind, payload: &[u8], done: &mut Vec<Line>) {
        match kind {
            Kind::Time => {
                if let Ok(time) = payload.try_into() {
                    self.time_ms = u64::from_le_bytes(time);
                }
            }
            Kind::Stdout | Kind::Stderr => self.text(kind == Kind::Stderr, payload, done),
            _ => {}
        }
    }

    fn text(&mut self, stderr: bool, payload: &[u8], done: &mut Vec<Line>) {
        let time_ms = self.time_ms;
        let open = &mut self.open[usize::from(stderr)];
        for part in payload.split_inclusive(|byte| *byte == b'\n') {
            let line = open.get_or_insert_with(|| Line { stderr, time_ms, bytes: Vec::new() });
            line.bytes.extend(part);
            if part.ends_with(b"\n") || line.bytes.len() >= LINE_BYTES_MAX {
                done.extend(open.take());
            }
        }
    }

    /// What has no newline and will get none.
    fn rest(&mut self) -> impl Iterator<Item = Line> {
        self.open.each_mut().map(Option::take).into_iter().flatten()
    }
}

/// A log that is read while it is written: `log.old`, then `log`, which may
/// become `log.old` at any moment.
struct Tail {
    directory: PathBuf,
    file: Option<File>,
    lines: Lines,
    /// Read, but not yet a whole frame.
    bytes: Vec<u8>,
}

impl Tail {
    fn open(directory: &Path) -> Self {
        let file = File::open(directory.join("log.old")).ok();
        let file = file.or_else(|| File::open(directory.join("log")).ok());
        Self { directory: directory.to_owned(), file, lines: Lines::default(), bytes: Vec::new() }
    }

    /// The lines that have been finished since the last call.
    fn read(&mut self) -> io::Result<Vec<Line>> {
        let mut done = Vec::new();
        loop {
            // Looked at first: what is written after the switch is in the other.
            let next = self.next();
            if let Some(file) = &mut self.file {
                file.read_to_end(&mut self.bytes)?;
                self.frames(&mut done);
            }
            match next {
                Some(next) => (self.file, self.bytes) = (Some(next), Vec::new()),
                None => return Ok(done),
            }
        }
    }

    /// The file that is written to now, if it is another one.
    fn next(&self) -> Option<File> {
        let current = File::open(self.directory.join("log")).ok()?;
        let same = |file: &File| {
            let id = |file: &File| file.metadata().map(|data| (data.dev(), data.ino())).ok();
            id(file) == id(&current)
        };
        (!self.file.as_ref().is_some_and(same)).then_some(current)
    }

    fn frames(&mut self, done: &mut Vec<Line>) {
        let mut rest = io::Cursor::new(self.bytes.as_slice());
        let mut whole = 0;
        while let Ok(Some(frame)) = FrameReader::new(&mut rest).read() {
            whole = rest.position() as usize;
            self.lines.take(frame.kind, &frame.payload, done);
        }
        self.bytes.drain(..whole);
    }
}

/// What was written so far.
pub async fn past(server: &Arc<Server>, directory: &Path, wanted: Wanted) -> ApiResult<Vec<Chunk>> {
    let mut tail = Tail::open(directory);
    let lines = server.blocking(move |_| {
        let mut lines = tail.read().map_err(unreadable)?;
        lines.extend(tail.lines.rest());
        Ok(lines)
    });
    Ok(chosen(lines.await?, wanted).collect())
}

fn unreadable(error: io::Error) -> ApiError {
    ApiError::internal(format!("the log cannot be read: {error}"))
}

/// The wanted ones of `lines`, no more than `tail` of them.
fn chosen(lines: Vec<Line>, wanted: Wanted) -> impl Iterator<Item = Chunk> {
    let mut kept: VecDeque<Line> = lines.into_iter().filter(|line| wanted.takes(line)).collect();
    if let Some(tail) = wanted.tail {
        kept.drain(..kept.len().saturating_sub(tail));
    }
    kept.into_iter().map(move |line| wanted.chunk(line))
}

/// `GET /containers/{id}/logs`
pub async fn logs(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let wanted = Wanted::of(call)?;
    let seen = server.find(key).await?;
    let tty = seen.container.config.tty;
    let (sender, body) = Body::stream();
    let response = stream(content_type(call.target.version, tty), body);
    let Some((record, _)) = &seen.cell else { return Ok(response) };
    if call.target.query.flag("follow") && seen.is_running() {
        let tail = Tail::open(record.directory());
        tokio::spawn(follow(server.clone(), seen, tail, wanted, sender));
        return Ok(response);
    }
    let past = past(server, record.directory(), wanted).await?;
    tokio::spawn(async move {
        for chunk in past {
            if !sender.send(chunk.encoded(tty)).await {
                return;
            }
        }
    });
    Ok(response)
}

/// Sends what is there and what comes, until the container ends.
async fn follow(
    server: Arc<Server>,
    seen: Seen,
    mut tail: Tail,
    mut wanted: Wanted,
    sender: BodySender,
) {
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
        let read = server.blocking(move |_| {
            let lines = tail.read().map_err(unreadable)?;
            Ok((tail, lines))
        });
        let Ok((returned, mut lines)) = read.await else { return };
        tail = returned;
        if over {
            lines.extend(tail.lines.rest());
        }
        for chunk in chosen(lines, wanted) {
            if !sender.send(chunk.encoded(seen.container.config.tty)).await {
                return;
            }
        }
        wanted.tail = None;
        if over {
            return;
        }
        tokio::select! {
            _ = timeout(LOOK, written.changed()) => {}
            _ = life.changed() => {}
            () = sender.closed() => return,
        }
    }
}
