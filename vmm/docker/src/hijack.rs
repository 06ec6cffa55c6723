//! Calls that take their connection over: output one way, input the other.

use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use exocell_cell::agent::TtySize;
use hyper::StatusCode;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::watch;

use crate::error::{ApiError, ApiResult};
use crate::frames::Chunk;
use crate::http::{Body, BodySender, Call, Response, stream};
use crate::keys::Keys;
use crate::place::Place;

/// From this version on (as its part after `1.`) the content type says
/// whether output is multiplexed.
const NAMED_STREAMS: u32 = 42;
/// Bytes read from a client at a time.
const INPUT_BYTES: usize = 32 << 10;

/// The content type of output.
pub fn content_type(version: u32, tty: bool) -> &'static str {
    match version >= NAMED_STREAMS && !tty {
        true => "application/vnd.docker.multiplexed-stream",
        false => "application/vnd.docker.raw-stream",
    }
}

/// The terminal size in a call's `h` and `w`.
///
/// # Errors
/// 400 when one is missing or none.
pub fn wanted_size(call: &Call) -> ApiResult<TtySize> {
    let query = &call.target.query;
    let (rows, cols) = (query.number::<u16>("h")?, query.number::<u16>("w")?);
    match (rows, cols) {
        (Some(rows), Some(cols)) => Ok(TtySize { rows, cols }),
        _ => Err(ApiError::bad_request("a terminal's size is h and w")),
    }
}

/// A connection that a call may take over.
pub struct Offer {
    upgrade: Option<OnUpgrade>,
    version: u32,
    place: Place,
}

impl Offer {
    pub fn of(call: &mut Call) -> Self {
        let upgrade = call.upgrade.take().filter(|_| call.wants_upgrade);
        Self { upgrade, version: call.target.version, place: call.place.clone() }
    }

    /// The reply, and the client once it has it. A client that did not ask to
    /// take the connection over gets output as a body, and gives no input.
    pub fn accept(self, tty: bool) -> (Response, impl Future<Output = Option<Hijacked>> + Send) {
        let (sender, body) = Body::stream();
        let mut response = stream(content_type(self.version, tty), body);
        if self.upgrade.is_some() {
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            *response.body_mut() = Body::empty();
            let headers = response.headers_mut();
            headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
            headers.insert(UPGRADE, HeaderValue::from_static("tcp"));
        }
        let client = async move {
            let end = match self.upgrade {
                None => End::Body(sender),
                Some(upgrade) => End::Io(TokioIo::new(upgrade.await.ok()?)),
            };
            Some(Hijacked { end, tty, place: self.place })
        };
        (response, client)
    }
}

enum End {
    Io(TokioIo<Upgraded>),
    Body(BodySender),
}

/// A client whose connection was taken over.
pub struct Hijacked {
    end: End,
    tty: bool,
    place: Place,
}

impl Hijacked {
    pub fn into_split(self) -> (Input, Listener) {
        let (input, end) = match self.end {
            End::Io(io) => {
                let (read, write) = tokio::io::split(io);
                (Input(Some(read)), Ear::Io(write))
            }
            End::Body(sender) => (Input(None), Ear::Body(sender)),
        };
        (input, Listener { end, tty: self.tty, place: self.place, has_read: false })
    }

    /// Says one thing and hangs up.
    pub async fn say(self, chunk: &Chunk) {
        let (_, mut listener) = self.into_split();
        if listener.say(chunk).await {
            listener.end().await;
        }
    }
}

enum Ear {
    Io(WriteHalf<TokioIo<Upgraded>>),
    Body(BodySender),
}

/// Where a program's output goes.
pub struct Listener {
    end: Ear,
    tty: bool,
    place: Place,
    /// Whether the client has the head of the answer.
    has_read: bool,
}

impl Listener {
    /// False when nobody listens any more.
    pub async fn say(&mut self, chunk: &Chunk) -> bool {
        let bytes = chunk.encoded(self.tty);
        if !std::mem::replace(&mut self.has_read, true) {
            self.place.read().await;
        }
        match &mut self.end {
            Ear::Io(io) => io.write_all(&bytes).await.is_ok() && io.flush().await.is_ok(),
            Ear::Body(sender) => sender.send(bytes).await,
        }
    }

    /// Where it is known whether anybody listens.
    pub fn place(&self) -> Place {
        self.place.clone()
    }

    /// Ends the output.
    pub async fn end(&mut self) {
        if let Ear::Io(io) = &mut self.end {
            // A client that is gone needs no end.
            let _ = io.shutdown().await;
        }
    }
}

/// Where a program's input comes from, if it may come.
pub struct Input(Option<ReadHalf<TokioIo<Upgraded>>>);

/// What takes a client's input.
pub trait Feed: Send + Sync + 'static {
    /// Takes bytes, or with `None` their end. False when there is no use.
    fn feed(&self, bytes: Option<Bytes>) -> impl Future<Output = bool> + Send;
}

/// Hands on what the client says, until it ends or nobody takes it. True when the client has
/// pressed its `keys` to leave: the program runs on.
pub async fn feed<F: Feed>(input: Input, to: Arc<F>, mut keys: Option<Keys>) -> bool {
    let Some(mut stream) = input.0 else { return false };
    let mut buffer = vec![0; INPUT_BYTES];
    loop {
        match stream.read(&mut buffer).await {
            Ok(count @ 1..) => {
                let typed = &buffer[..count];
                let (passed, leaves) = match &mut keys {
                    Some(keys) => keys.pass(typed),
                    None => (typed.to_vec(), false),
                };
                if !passed.is_empty() && !to.feed(Some(passed.into())).await {
                    return leaves;
                }
                if leaves {
                    return true;
                }
            }
            // A client that broke off has nothing more to say either.
            Ok(0) | Err(_) => {
                to.feed(None).await;
                return false;
            }
        }
    }
}

/// The keys by which a client leaves a terminal, as it wrote them; docker's own where it did not.
///
/// # Errors
/// 400 for what is none.
pub fn keys(text: &str) -> ApiResult<Keys> {
    match text.is_empty() {
        true => Ok(Keys::default()),
        false => text
            .parse()
            .map_err(|error| ApiError::bad_request(format!("Invalid detach keys: {error}"))),
    }
}

/// Waits until a client has pressed its keys to leave.
pub async fn left(left: &mut watch::Receiver<bool>) {
    if left.wait_for(|left| *left).await.is_err() {
        // Whoever would have told is gone.
        std::future::pending().await
    }
}
