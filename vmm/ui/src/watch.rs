//! One look at the host for all pages that are open, and one stream of what changes to each.
//!
//! ```text
//! a look each second, while a page is open ─> Latest ─┬─> who comes: all that is known
//!                                                     └─> who is there: what is new (a broadcast)
//! ```
//! A page that does not keep up is told all anew. While there is no page nothing is done.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use exocell_cell::logging::tracing::warn;
use exocell_cell::{CellError, Layout, now_ms};
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, broadcast, mpsc};
use tokio::time::{interval, sleep, timeout};

use crate::cells::{Ask, Cells, Changes};
use crate::decisions::{Decision, Decisions};
use crate::reply::{ALIVE_TIME, Stream};
use crate::row::Row;

/// How often the host is looked at.
const PERIOD: Duration = Duration::from_secs(1);
/// Decisions that a page is told when it comes.
const DECISIONS_MAX: usize = 500;
/// Changes that a page may be behind.
const BEHIND_MAX: usize = 32;

pub struct Watch {
    layout: Layout,
    latest: Mutex<Latest>,
    news: broadcast::Sender<Arc<str>>,
    /// A page has come, or something was done to a cell.
    wanted: Notify,
}

#[derive(Default)]
struct Latest {
    rows: BTreeMap<String, Row>,
    decisions: VecDeque<Decision>,
}

impl Latest {
    fn take(&mut self, changes: &Changes, decisions: &[Decision]) {
        for id in &changes.gone {
            self.rows.remove(id);
        }
        for row in &changes.rows {
            self.rows.insert(row.id.clone(), row.clone());
        }
        self.decisions.extend(decisions.iter().cloned());
        let too_many = self.decisions.len().saturating_sub(DECISIONS_MAX);
        self.decisions.drain(..too_many);
    }
}

/// What is looked at. It goes to a thread and comes back.
struct Looked {
    cells: Cells,
    decisions: Decisions,
}

/// What a look has found.
struct Found {
    changes: Changes,
    asks: Vec<Ask>,
    decisions: Vec<Decision>,
    left_out: u64,
}

impl Looked {
    fn look(&mut self) -> Result<Found, CellError> {
        let changes = self.cells.look()?;
        let asks = self.cells.due();
        let (decisions, left_out) = self.decisions.look(&self.cells.living());
        Ok(Found { changes, asks, decisions, left_out })
    }
}

impl Watch {
    pub fn new(layout: &Layout) -> Arc<Self> {
        Arc::new(Self {
            layout: layout.clone(),
            latest: Mutex::default(),
            news: broadcast::Sender::new(BEHIND_MAX),
            wanted: Notify::new(),
        })
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the host looked at soon.
    pub fn hurry(&self) {
        self.wanted.notify_one();
    }

    /// Looks at the host for ever, while somebody wants to know.
    pub async fn look(self: Arc<Self>) {
        let (tell, mut answers) = mpsc::unbounded_channel();
        let mut looked =
            Looked { cells: Cells::new(&self.layout), decisions: Decisions::default() };
        loop {
            if self.news.receiver_count() == 0 {
                self.wanted.notified().await;
                looked.cells.begin_anew();
            }
            let thread = tokio::task::spawn_blocking(move || {
                let found = looked.look();
                (looked, found)
            });
            let Ok((again, found)) = thread.await else { return };
            looked = again;
            match found {
                Ok(mut found) => {
                    for ask in found.asks.drain(..) {
                        let tell = tell.clone();
                        // However long it takes: nobody waits for it.
                        tokio::task::spawn_blocking(move || drop(tell.send(ask.ask())));
                    }
                    while let Ok(answer) = answers.try_recv() {
                        found.changes.rows.extend(looked.cells.hear(answer));
                    }
                    self.publish(&found);
                }
                Err(error) => warn!("the cells cannot be listed: {error}"),
            }
            // Much that is done at once is looked at once.
            sleep(PERIOD / 5).await;
            let _ = timeout(PERIOD * 4 / 5, self.wanted.notified()).await;
        }
    }

    fn publish(&self, found: &Found) {
        let Found { changes, decisions, left_out, .. } = found;
        if changes.rows.is_empty() && changes.gone.is_empty() && decisions.is_empty() {
            return;
        }
        let news = json!({
            "now_ms": now_ms(), "cells": changes.rows, "gone": changes.gone,
            "decisions": decisions, "decisions_left_out": left_out,
        });
        // Who comes now has it in the one or in the other.
        let mut latest = self.latest();
        latest.take(changes, decisions);
        // There may be nobody left.
        let _ = self.news.send(news.to_string().into());
    }

    /// All that is known, and what comes then.
    fn join(&self) -> (String, broadcast::Receiver<Arc<str>>) {
        let latest = self.latest();
        let rows: Vec<&Row> = latest.rows.values().collect();
        let all = json!({
            "all": true, "now_ms": now_ms(), "cells": rows, "decisions": latest.decisions,
        });
        (all.to_string(), self.news.subscribe())
    }

    /// Tells a page what changes, until it is gone.
    pub async fn follow(&self, stream: &Stream) {
        let mut alive = interval(ALIVE_TIME);
        loop {
            let (all, mut news) = self.join();
            self.hurry();
            if !stream.tell(&all).await {
                return;
            }
            loop {
                let goes_on = tokio::select! {
                    new = news.recv() => match new {
                        Ok(new) => stream.tell(&new).await,
                        Err(RecvError::Lagged(_)) => break,
                        Err(RecvError::Closed) => false,
                    },
                    _ = alive.tick() => stream.live().await,
                    () = stream.closed() => false,
                };
                if !goes_on {
                    return;
                }
            }
        }
    }
}
