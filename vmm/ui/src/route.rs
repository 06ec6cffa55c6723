//! Which call is which: the one list of what a page may ask for.

use std::sync::Arc;
use std::time::Duration;

use exocell_cell::signal::Signal;
use exocell_cell::{CellSpec, Layout, Record, State, end};
use exocell_door::Work;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, StatusCode};
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::{Refusal, Result, blocking};
use crate::gate::Gate;
use crate::reply::{Reply, Stream, done, refused};
use crate::terminal::{INPUT_MAX, Terminals};
use crate::watch::Watch;
use crate::{logs, page};

/// Streams at once, of all pages. A browser has six connections to one server.
const STREAMS_MAX: usize = 32;
/// How long the body of a request may take to come.
const BODY_TIME: Duration = Duration::from_secs(10);
const WORDS_MAX: usize = 1 << 10;

pub struct Server {
    pub layout: Layout,
    pub gate: Gate,
    pub watch: Arc<Watch>,
    pub terminals: Terminals,
    streams: Arc<Semaphore>,
}

impl Server {
    pub fn new(layout: Layout, gate: Gate) -> Self {
        let watch = Watch::new(&layout);
        let streams = Arc::new(Semaphore::new(STREAMS_MAX));
        Self { layout, gate, watch, terminals: Terminals::default(), streams }
    }

    fn place(&self) -> Result<OwnedSemaphorePermit> {
        self.streams.clone().try_acquire_owned().map_err(|_| {
            Refusal::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!("there are {STREAMS_MAX} streams of pages; close one of those"),
            )
        })
    }

    /// Answers a request; `work` is whose it is from when that has shown the key.
    pub async fn answer(&self, request: Request<Incoming>, work: &Work) -> Reply {
        self.try_answer(request, work).await.unwrap_or_else(|refusal| refused(&refusal))
    }

    async fn try_answer(&self, request: Request<Incoming>, work: &Work) -> Result<Reply> {
        self.gate.admit(request.uri(), request.headers())?;
        let path = request.uri().path().to_owned();
        if let Some(file) = page::file(request.method(), &path) {
            return Ok(file);
        }
        self.gate.permit(request.headers())?;
        work.count("", ());
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        match (request.method().as_str(), parts.as_slice()) {
            ("GET", ["api", "stream"]) => {
                let (place, (stream, reply)) = (self.place()?, Stream::open());
                let watch = self.watch.clone();
                tokio::spawn(async move {
                    watch.follow(&stream).await;
                    drop(place);
                });
                Ok(reply)
            }
            ("GET", ["api", "cells", id, "log"]) => {
                let place = self.place()?;
                let log = logs::open(self.layout.clone(), checked(id)?).await?;
                let (stream, reply) = Stream::open();
                tokio::spawn(async move {
                    log.tell(&stream).await;
                    drop(place);
                });
                Ok(reply)
            }
            ("POST", ["api", "cells", id, "terminal"]) => {
                let (place, id) = (self.place()?, checked(id)?);
                let size = words(request).await?;
                let begun = self.terminals.begin(self.layout.clone(), id, size).await?;
                let (stream, reply) = Stream::open();
                tokio::spawn(async move {
                    begun.show(&stream).await;
                    drop(place);
                });
                Ok(reply)
            }
            ("POST", ["api", "terminals", name, "input"]) => {
                let bytes = body(request, INPUT_MAX).await?;
                self.terminals.input(name, bytes.into()).await.map(|()| done())
            }
            ("POST", ["api", "terminals", name, "size"]) => {
                let size = words(request).await?;
                self.terminals.resize(name, size).await.map(|()| done())
            }
            ("POST", ["api", "cells", id, verb @ ("pause" | "resume" | "kill")]) => {
                self.act(checked(id)?, verb).await
            }
            _ => Err(Refusal::new(StatusCode::NOT_FOUND, "there is no such call")),
        }
    }

    async fn act(&self, id: String, verb: &str) -> Result<Reply> {
        let (layout, verb) = (self.layout.clone(), verb.to_owned());
        let acted = blocking(move || {
            let (record, _, status) = Record::find(&layout, &id)?;
            if status.state != State::Running {
                return Err(Refusal::new(StatusCode::CONFLICT, "the cell does not run"));
            }
            match verb.as_str() {
                "kill" => end::kill(&layout, &record, Signal::KILL)?,
                verb => end::pause(&record, verb == "pause")?,
            }
            Ok(done())
        })
        .await;
        self.watch.hurry();
        acted
    }
}

/// The id of a cell: whole, and no name.
fn checked(id: &str) -> Result<String> {
    match CellSpec::is_id(id) {
        true => Ok(id.to_owned()),
        false => Err(Refusal::new(StatusCode::NOT_FOUND, "this is no id of a cell")),
    }
}

/// The whole body, of at most so many bytes.
async fn body(request: Request<Incoming>, most: usize) -> Result<Bytes> {
    let whole = timeout(BODY_TIME, Limited::new(request.into_body(), most).collect()).await;
    let late = |_| Refusal::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
    let long = |_| {
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {most} bytes"))
    };
    Ok(whole.map_err(late)?.map_err(long)?.to_bytes())
}

async fn words<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T> {
    let body = body(request, WORDS_MAX).await?;
    serde_json::from_slice(&body)
        .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.to_string()))
}
