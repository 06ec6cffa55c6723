//! What a cell's program writes, line by line: the end of it, and what comes then.

use std::time::Duration;

use exocell_cell::agent::printable;
use exocell_cell::lines::{Line, Tail, Wanted};
use exocell_cell::{Layout, Record, State};
use serde::Serialize;
use serde_json::json;
use tokio::time::{interval, sleep};

use crate::error::{Refusal, Result, blocking};
use crate::reply::{ALIVE_TIME, Stream};

/// Lines of before that are told.
const BEFORE_MAX: usize = 500;
/// Lines, and bytes of them, that are told at once; the next come after a rest.
const LINES_MAX: usize = 200;
const BYTES_MAX: usize = 128 << 10;
/// The longest line that is told, in characters.
const CHARS_MAX: usize = 4096;
/// How often the log is looked at.
const PERIOD: Duration = Duration::from_millis(250);

#[derive(Serialize)]
struct Told {
    time_ms: u64,
    error: bool,
    text: String,
}

impl Told {
    fn of(line: &Line) -> Self {
        let text = String::from_utf8_lossy(&line.bytes);
        let text = text.trim_end_matches(['\n', '\r']);
        let short: String = text.chars().take(CHARS_MAX).collect();
        Self { time_ms: line.time_ms, error: line.stderr, text: printable(&short).into_owned() }
    }
}

/// A log, and whether its cell has ended.
struct Following {
    layout: Layout,
    record: Record,
    log: Tail,
    is_over: bool,
}

impl Following {
    fn open(layout: Layout, id: &str) -> Result<Self> {
        let (record, _, status) = Record::find(&layout, id)?;
        let mut log = Tail::open(record.directory()).map_err(unreadable)?;
        let is_over = status.state == State::Exited;
        let wanted = Wanted { tail: Some(BEFORE_MAX), ..Wanted::streams(true, true) };
        log.skip(&wanted, is_over).map_err(unreadable)?;
        Ok(Self { layout, record, log, is_over })
    }

    /// The next lines that are there; none where that is all for now.
    fn next(&mut self) -> Result<Vec<Told>> {
        let (mut all, mut bytes) = (Vec::new(), 0);
        while all.len() < LINES_MAX && bytes < BYTES_MAX {
            let line = match self.log.line().map_err(unreadable)? {
                None if self.is_over => self.log.rest(),
                line => line,
            };
            let Some(line) = line else { break };
            let told = Told::of(&line);
            bytes += told.text.len();
            all.push(told);
        }
        Ok(all)
    }

    /// Looks at what was written since. A cell that has ended writes no more after that.
    fn look(&mut self) -> Result<()> {
        let status = self.record.look(&self.layout)?;
        self.is_over = status.is_none_or(|(_, status)| status.state == State::Exited);
        self.log.look().map_err(unreadable)
    }
}

fn unreadable(error: std::io::Error) -> Refusal {
    Refusal::internal(format!("cannot read the log: {error}"))
}

/// The log of cell `id`; nothing is told of it yet.
///
/// # Errors
/// There is no such cell.
pub async fn open(layout: Layout, id: String) -> Result<Log> {
    blocking(move || Following::open(layout, &id)).await.map(Log)
}

pub struct Log(Following);

impl Log {
    /// Tells the log until its cell has ended, or nobody listens.
    pub async fn tell(self, stream: &Stream) {
        let why = match follow(self.0, stream).await {
            Ok(()) => String::new(),
            Err(refusal) => refusal.message,
        };
        stream.say(&json!({ "over": true, "message": why })).await;
    }
}

async fn follow(mut log: Following, stream: &Stream) -> Result<()> {
    let mut alive = interval(ALIVE_TIME);
    loop {
        let (again, lines) = blocking(move || {
            let lines = log.next()?;
            Ok((log, lines))
        })
        .await?;
        log = again;
        if !lines.is_empty() {
            if !stream.say(&json!({ "lines": lines })).await {
                return Ok(());
            }
        } else if log.is_over {
            return Ok(());
        }
        let is_all = lines.len() < LINES_MAX;
        tokio::select! {
            () = sleep(PERIOD) => {}
            _ = alive.tick() => if !stream.live().await { return Ok(()) },
            () = stream.closed() => return Ok(()),
        }
        if is_all {
            log = blocking(move || {
                log.look()?;
                Ok(log)
            })
            .await?;
        }
    }
}
