//! Bodies and replies.

use std::io::{self, Read, Write};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::timeout;

use crate::caller::Caller;
use crate::error::{ApiError, ApiResult};
use crate::fields::{self, Field, Once};
use crate::place::Place;
use crate::target::Target;

/// The longest JSON that a client may send, in bytes.
const JSON_BYTES_MAX: usize = 4 << 20;
/// How long it may take to send it.
const JSON_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a body that is streamed may pause.
const PAUSE_MAX: Duration = Duration::from_secs(600);
/// How soon it is tried again to hand a chunk to a client that is slow.
const AGAIN_MIN: Duration = Duration::from_millis(1);
const AGAIN_MAX: Duration = Duration::from_millis(50);
/// How much is read, in bytes and in time, of a body that nobody wants.
const DRAIN_BYTES_MAX: usize = 1 << 20;
const DRAIN_TIME_MAX: Duration = Duration::from_secs(10);
/// Chunks that wait between two ends of a stream.
const CHUNKS_WAITING: usize = 16;
/// Longest chunk of a reply, in bytes.
const CHUNK_BYTES: usize = 64 << 10;

/// A reply.
pub type Response = hyper::Response<Body>;

/// One call of a client.
pub struct Call {
    pub target: Target,
    pub headers: HeaderMap,
    pub body: Inlet,
    /// The connection itself, for a call that takes it over.
    pub upgrade: Option<hyper::upgrade::OnUpgrade>,
    /// Whether the client asked for that (`Upgrade: tcp`).
    pub wants_upgrade: bool,
    /// The connection's place among those that are open.
    pub place: Place,
    /// Who makes it.
    pub caller: Caller,
}

impl Call {
    /// The body as JSON; an empty one is read as `null`.
    ///
    /// # Errors
    /// 400 for anything else, 413 and 408 for what is too long in bytes or time.
    pub async fn json<T: DeserializeOwned>(self) -> ApiResult<T> {
        let bytes = read_all(self.body.open()).await?;
        read_json(if bytes.is_empty() { b"null" } else { &bytes })
    }
}

/// What `text` says, in which nothing is said twice.
fn read_json<T: DeserializeOwned>(text: &[u8]) -> ApiResult<T> {
    let read = serde_json::from_slice(text).and_then(|Once(value)| serde_json::from_value(value));
    read.map_err(|error| ApiError::bad_request(format!("the body cannot be read: {error}")))
}

impl Call {
    /// The body as an object whose fields are those of `table`; an empty one has none of them.
    ///
    /// # Errors
    /// As [`Call::json`]; 501 for a field that says something and is not there.
    pub async fn fields<T: DeserializeOwned>(self, table: &[Field]) -> ApiResult<T> {
        of_fields(self.json().await?, table)
    }
}

fn of_fields<T: DeserializeOwned>(mut body: Value, table: &[Field]) -> ApiResult<T> {
    if body.is_null() {
        body = Value::Object(Map::new());
    }
    // A list would be taken for the fields in their order.
    if !body.is_object() {
        return Err(ApiError::bad_request("the body cannot be read: it is no object"));
    }
    fields::canonical(&mut body, table)?;
    serde_json::from_value(body)
        .map_err(|error| ApiError::bad_request(format!("the body cannot be read: {error}")))
}

/// The body of a call. Of one that nobody wants a little is read all the same:
/// a client that is refused while it still sends would not hear why.
pub struct Inlet(Option<Incoming>);

impl Inlet {
    pub fn new(body: Incoming) -> Self {
        Self(Some(body))
    }

    fn open(mut self) -> Option<Incoming> {
        self.0.take()
    }
}

impl Drop for Inlet {
    fn drop(&mut self) {
        let runtime = tokio::runtime::Handle::try_current();
        if let (Some(body), Ok(runtime)) = (self.0.take(), runtime) {
            runtime.spawn(drain(body));
        }
    }
}

/// Reads a little of a body that nobody wants, and keeps nothing of it.
pub async fn drain<B: hyper::body::Body + Unpin>(mut body: B) {
    let read = async {
        let mut count = 0;
        // What comes beyond that ends the connection.
        while count <= DRAIN_BYTES_MAX
            && let Some(Ok(frame)) = body.frame().await
        {
            count += frame.data_ref().map_or(0, Buf::remaining);
        }
    };
    let _ = timeout(DRAIN_TIME_MAX, read).await;
}

async fn read_all(body: Option<Incoming>) -> ApiResult<Bytes> {
    let Some(body) = body else { return Ok(Bytes::new()) };
    let collected = timeout(JSON_TIME_MAX, Limited::new(body, JSON_BYTES_MAX).collect()).await;
    let collected = collected.map_err(|_| {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")
    })?;
    collected.map(|body| body.to_bytes()).map_err(|error| {
        match error.is::<http_body_util::LengthLimitError>() {
            true => ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the body is longer than {JSON_BYTES_MAX} bytes"),
            ),
            false => ApiError::bad_request(format!("the body was cut short: {error}")),
        }
    })
}

/// The body of a reply: all of it, or what a channel brings.
pub enum Body {
    Whole(Option<Bytes>),
    Stream(mpsc::Receiver<io::Result<Bytes>>),
    /// A stream for a client that is still there.
    Heard(mpsc::Receiver<io::Result<Bytes>>, Gone),
}

type Gone = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Body {
    pub fn empty() -> Self {
        Self::Whole(None)
    }

    /// A body and the end that feeds it; an error cuts it short.
    pub fn stream() -> (BodySender, Self) {
        let (sender, receiver) = mpsc::channel(CHUNKS_WAITING);
        (BodySender(sender), Self::Stream(receiver))
    }

    /// The same body, cut short when the client at `place` is gone: who feeds it may have
    /// nothing to say for a long time, and is to hear of that.
    pub fn for_client(self, place: Place) -> Self {
        self.until(async move { place.gone().await })
    }

    /// The same body, cut short at `gone`.
    pub fn until(self, gone: impl Future<Output = ()> + Send + 'static) -> Self {
        match self {
            Self::Stream(receiver) => Self::Heard(receiver, Box::pin(gone)),
            other => other,
        }
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Self::Heard(_, gone) = &mut *self
            && gone.as_mut().poll(context).is_ready()
        {
            *self = Self::empty();
            return Poll::Ready(Some(Err(io::ErrorKind::BrokenPipe.into())));
        }
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(receiver) | Self::Heard(receiver, _) => {
                receiver.poll_recv(context).map(|chunk| chunk.map(|chunk| chunk.map(Frame::data)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Self::Stream(_) | Self::Heard(..) => SizeHint::default(),
        }
    }
}

/// Feeds a body; the body ends when it is dropped.
#[derive(Clone)]
pub struct BodySender(mpsc::Sender<io::Result<Bytes>>);

impl BodySender {
    /// False when the client is gone.
    pub async fn send(&self, bytes: impl Into<Bytes>) -> bool {
        self.0.send(Ok(bytes.into())).await.is_ok()
    }

    /// Sends `value` as a line of JSON.
    pub async fn line(&self, value: &impl Serialize) -> bool {
        self.send(json_line(value)).await
    }

    /// As [`BodySender::line`], from a thread that may block.
    pub fn line_now(&self, value: &impl Serialize) -> bool {
        self.0.blocking_send(Ok(json_line(value).into())).is_ok()
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.0.closed().await;
    }

    /// Cuts the body short, so that the client sees that it is not whole.
    pub fn fail(&self, error: io::Error) {
        let _ = self.0.blocking_send(Err(error));
    }

    /// The same from a task.
    pub async fn break_off(&self, error: io::Error) {
        let _ = self.0.send(Err(error)).await;
    }

    /// A writer for threads that may block.
    pub fn writer(self) -> BodyWriter {
        BodyWriter { sender: self.0, pause: PAUSE_MAX }
    }
}

fn json_line(value: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.extend(b"\r\n");
    line
}

/// The blocking side of a [`BodySender`].
pub struct BodyWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    /// How long the client may take no more.
    pause: Duration,
}

impl Write for BodyWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let chunk = &bytes[..bytes.len().min(CHUNK_BYTES)];
        let mut waiting = Ok(Bytes::copy_from_slice(chunk));
        let (until, mut again) = (Instant::now() + self.pause, AGAIN_MIN);
        loop {
            match self.sender.try_send(waiting) {
                Ok(()) => return Ok(chunk.len()),
                Err(TrySendError::Closed(_)) => return Err(io::ErrorKind::BrokenPipe.into()),
                Err(TrySendError::Full(_)) if Instant::now() > until => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(TrySendError::Full(bytes)) => waiting = bytes,
            }
            std::thread::sleep(again);
            again = AGAIN_MAX.min(2 * again);
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A request's body for a thread that may block.
pub struct BodyReader {
    chunks: mpsc::Receiver<io::Result<Bytes>>,
    chunk: Bytes,
}

impl BodyReader {
    /// Reads `body` on a task of its own, a few chunks ahead.
    pub fn new(body: Inlet) -> Self {
        let (sender, chunks) = mpsc::channel(CHUNKS_WAITING);
        tokio::spawn(async move {
            let Some(mut body) = body.open() else { return };
            loop {
                let chunk = match timeout(PAUSE_MAX, body.frame()).await {
                    Err(_) => Err(io::ErrorKind::TimedOut.into()),
                    Ok(None) => return,
                    Ok(Some(Err(error))) => Err(io::Error::other(error)),
                    Ok(Some(Ok(frame))) => match frame.into_data() {
                        Ok(data) => Ok(data),
                        Err(_) => continue,
                    },
                };
                let ended = chunk.is_err();
                if sender.send(chunk).await.is_err() {
                    return drain(body).await;
                }
                if ended {
                    return;
                }
            }
        });
        Self { chunks, chunk: Bytes::new() }
    }
}

impl Read for BodyReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match self.chunks.blocking_recv() {
                Some(chunk) => self.chunk = chunk?,
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.chunk.len());
        self.chunk.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

/// A reply without a body.
pub fn empty(status: StatusCode) -> Response {
    reply(status, "", Body::empty())
}

/// A reply of one JSON value.
pub fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => reply(status, "application/json", Body::Whole(Some(text.into()))),
        Err(error) => failed(&ApiError::internal(format!("the reply cannot be written: {error}"))),
    }
}

/// A reply of plain text.
pub fn text(status: StatusCode, text: &'static str) -> Response {
    reply(
        status,
        "text/plain; charset=utf-8",
        Body::Whole(Some(Bytes::from_static(text.as_bytes()))),
    )
}

/// A 200 reply whose body comes bit by bit.
pub fn stream(content_type: &'static str, body: Body) -> Response {
    reply(StatusCode::OK, content_type, body)
}

/// The API's error form. Clients print its message to a terminal as it is.
pub fn failed(error: &ApiError) -> Response {
    let message = exocell_cell::agent::printable_lines(&error.message);
    let text = serde_json::json!({ "message": message }).to_string();
    reply(error.status, "application/json", Body::Whole(Some(text.into())))
}

/// Adds a header whose value is plain text.
pub fn with_header(mut response: Response, name: &'static str, value: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(HeaderName::from_static(name), value);
    }
    response
}

fn reply(status: StatusCode, content_type: &'static str, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    if !content_type.is_empty() {
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{ExecCreate, ExecStart};
    use serde_json::json;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn what_is_said_twice_is_refused_however_deep() {
        for twice in [
            r#"{"HostConfig": {"ReadonlyRootfs": true, "ReadonlyRootfs": false}}"#,
            r#"{"HostConfig": {"NetworkMode": "none"}, "Image": "i", "HostConfig": {}}"#,
            r#"{"HostConfig": {"Mounts": [{"Target": "/a", "\u0054arget": "/b"}]}}"#,
        ] {
            let error = read_json::<Value>(twice.as_bytes()).unwrap_err();
            assert!(error.status == 400 && error.message.contains("twice"), "{twice}: {error}");
        }
        let once =
            r#"{"a": [1, -2, 2.5, null, true, "x"], "b": {"a": {}}, "c": 18446744073709551615}"#;
        let value: Value = serde_json::from_str(once).unwrap();
        assert_eq!(read_json::<Value>(once.as_bytes()).unwrap(), value);
    }

    /// A body without an end, of which it is known how much is kept.
    struct Endless(Arc<AtomicUsize>, usize);

    struct Piece(Arc<AtomicUsize>, Bytes);

    impl Drop for Piece {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    impl Buf for Piece {
        fn remaining(&self) -> usize {
            self.1.remaining()
        }

        fn chunk(&self) -> &[u8] {
            self.1.chunk()
        }

        fn advance(&mut self, count: usize) {
            self.1.advance(count);
        }
    }

    impl hyper::body::Body for Endless {
        type Data = Piece;
        type Error = io::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<io::Result<Frame<Piece>>>> {
            assert!(self.0.fetch_add(1, Ordering::Relaxed) < 2, "nothing of it is kept");
            self.1 += 1;
            assert!(self.1 < 100, "it is not read for ever");
            let piece = Piece(self.0.clone(), Bytes::from_static(&[0; CHUNK_BYTES]));
            Poll::Ready(Some(Ok(Frame::data(piece))))
        }
    }

    #[tokio::test]
    async fn of_a_body_that_nobody_wants_a_little_is_read_and_nothing_kept() {
        let kept = Arc::new(AtomicUsize::new(0));
        drain(Endless(kept.clone(), 0)).await;
        assert_eq!(kept.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_client_that_stops_reading_ends_its_stream() {
        let (sender, mut receiver) = mpsc::channel(CHUNKS_WAITING);
        let mut writer = BodyWriter { sender, pause: Duration::from_millis(10) };
        let mut taken = 0;
        let error = loop {
            match writer.write(&[7; 2 * CHUNK_BYTES]) {
                Ok(count) => taken += count,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(taken, CHUNKS_WAITING * CHUNK_BYTES);
        assert!(receiver.try_recv().is_ok());
        assert!(writer.write(b"more").is_ok(), "it reads again");
        drop(receiver);
        assert_eq!(writer.write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_body_is_read_whatever_the_case_of_its_names() {
        let exec: ExecCreate = of_fields(
            json!({"cmd": ["id"], "USER": "1", "attachStdin": true, "Tty": false}),
            fields::EXEC_CREATE,
        )
        .unwrap();
        assert_eq!((exec.cmd.unwrap().join(" ").as_str(), exec.user.as_str()), ("id", "1"));
        assert!(exec.attach_stdin);
        let start: ExecStart =
            of_fields(json!({"detach": true, "hijack": true}), fields::EXEC_START).unwrap();
        assert!(start.detach);
        assert!(!of_fields::<ExecStart>(Value::Null, fields::EXEC_START).unwrap().detach);
        for (body, status) in [
            (json!([true]), 400),
            (json!({"Whatever": 1}), 501),
            (json!({"User": "1", "user": "0"}), 400),
            (json!({"User": 1}), 400),
        ] {
            let read = of_fields::<ExecCreate>(body.clone(), fields::EXEC_CREATE);
            assert_eq!(read.unwrap_err().status.as_u16(), status, "{body}");
        }
    }
}
