//! Requests and replies: bodies within their bounds, JSON, and what is told of a refusal.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use exocell_cell::agent::printable_lines;
use exocell_cell::clock::rfc3339_ms;
use exocell_docker::http::drain;
pub use exocell_docker::http::{Body, BodySender, Response};
use exocell_door::Work;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::bounds::{Bounds, Share};
use crate::error::{Problem, Result};

/// The longest JSON that a client may send, in bytes.
pub const JSON_BYTES_MAX: usize = 4 << 20;
/// The longest answer of one piece, and what is not counted of one.
const ANSWER_BYTES_MAX: usize = 32 << 20;
const ANSWER_BYTES_FREE: usize = 16 << 10;
/// By how much an answer's part of the caller's share grows.
const ANSWER_STEP: usize = 64 << 10;
/// How long it may take to send it.
const JSON_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a body that is streamed may pause.
pub const PAUSE_MAX: Duration = Duration::from_secs(120);
/// Chunks that wait between two ends of a body.
const CHUNKS_WAITING: usize = 8;
/// Pairs of a query that are read.
const PAIRS_MAX: usize = 64;

/// One call of a client.
pub struct Call {
    pub method: hyper::Method,
    pub path: String,
    pub query: Query,
    pub headers: HeaderMap,
    pub body: Inlet,
    /// Its connection's.
    pub work: Arc<Work>,
    /// What of its body has come and is not dealt with yet: of the caller's share.
    pub held: Share,
    bounds: Arc<Bounds>,
}

impl Call {
    /// A request for the server itself, or for what it does for a sandbox.
    pub fn of(request: hyper::Request<Incoming>, bounds: &Arc<Bounds>, work: &Arc<Work>) -> Self {
        let (head, body) = request.into_parts();
        Self {
            method: head.method,
            path: head.uri.path().to_owned(),
            query: Query::read(head.uri.query().unwrap_or_default()),
            headers: head.headers,
            body: Inlet::new(body),
            work: work.clone(),
            held: bounds.bytes.none(""),
            bounds: bounds.clone(),
        }
    }

    /// It is `tenant`'s, who has shown so: it counts as one of theirs from now on.
    ///
    /// # Errors
    /// 429: they have as many as they may.
    pub fn count(&mut self, tenant: &str) -> Result<()> {
        let share = self.bounds.calls.take(tenant, 1).ok_or_else(|| {
            Problem::exhausted("this key has as many calls at once as it may; end one, or wait")
        })?;
        self.work.count(tenant, share);
        self.held = self.bounds.bytes.none(tenant);
        Ok(())
    }

    /// A header that is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The body as JSON; an empty one is an empty object.
    ///
    /// # Errors
    /// 400 for anything else, 413 and 408 for what is too long in bytes or time.
    pub async fn json<T: DeserializeOwned>(mut self) -> Result<T> {
        let bytes = self.body.whole(JSON_BYTES_MAX, &mut self.held).await?;
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        read_json(text)
    }
}

/// What `text` says.
///
/// # Errors
/// It is not JSON of that form.
pub fn read_json<T: DeserializeOwned>(text: &[u8]) -> Result<T> {
    serde_json::from_slice(text)
        .map_err(|error| Problem::invalid(format!("the body cannot be read: {error}")))
}

/// A client has sent more at once than it may, of what the server has not dealt with yet.
pub fn too_much() -> Problem {
    Problem::exhausted(
        "this key has too many bytes of requests and answers on their way; read an answer, or wait \
         for one",
    )
}

/// An answer that grows within its caller's share, in which it stays until it is taken.
pub struct Growing {
    text: Vec<u8>,
    held: Share,
}

impl AsRef<[u8]> for Growing {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

impl Growing {
    /// What `begin` says, and more to come.
    pub fn new(held: Share, begin: &str) -> Self {
        Self { text: begin.as_bytes().to_vec(), held }
    }

    /// Another element of its list.
    ///
    /// # Errors
    /// It is too long, or its caller has too much on its way.
    pub fn push(&mut self, value: &impl Serialize) -> Result<()> {
        if !self.text.ends_with(b"[") {
            self.say(b",")?;
        }
        let written = serde_json::to_vec(value);
        self.say(&written.map_err(|error| Problem::internal(error.to_string()))?)
    }

    fn say(&mut self, bytes: &[u8]) -> Result<()> {
        if self.text.len() + bytes.len() > ANSWER_BYTES_MAX {
            return Err(too_long());
        }
        if self.text.len() + bytes.len() > self.text.capacity() {
            let more = ANSWER_STEP.max(bytes.len());
            if !self.held.grow(more as u64) {
                return Err(too_much());
            }
            self.text.reserve_exact(more);
        }
        self.text.extend_from_slice(bytes);
        Ok(())
    }

    /// The reply, with `end` behind it.
    ///
    /// # Errors
    /// As [`Self::push`]'s.
    pub fn reply(mut self, end: &str) -> Result<Response> {
        self.say(end.as_bytes())?;
        let body = Body::Whole(Some(Bytes::from_owner(self)));
        let mut response = reply(StatusCode::OK, "application/json", body);
        response.extensions_mut().insert(Counted);
        Ok(response)
    }
}

/// Of an answer that is in its caller's share already.
#[derive(Clone)]
struct Counted;

/// Bytes, and what is held until they are taken.
struct Kept<T>(Bytes, T);

impl<T> AsRef<[u8]> for Kept<T> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

fn too_long() -> Problem {
    Problem::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        format!("the answer is longer than {ANSWER_BYTES_MAX} bytes; ask for less, or for a page"),
    )
}

/// `response` as it is sent to the client of `work`: what it has of one piece is of the caller's
/// share until it is taken, and may not lie untaken for long.
pub fn sent(response: Response, work: &Work, bounds: &Bounds) -> Response {
    let (mut head, body) = response.into_parts();
    let Body::Whole(Some(bytes)) = body else { return Response::from_parts(head, body) };
    let length = bytes.len();
    if head.extensions.remove::<Counted>().is_some() || length <= ANSWER_BYTES_FREE {
        let bytes = Bytes::from_owner(Kept(bytes, work.taking()));
        return Response::from_parts(head, Body::Whole(Some(bytes)));
    }
    let share = match length <= ANSWER_BYTES_MAX {
        true => bounds.bytes.take(work.caller(), length as u64).ok_or_else(too_much),
        false => Err(too_long()),
    };
    match share {
        Ok(share) => {
            let bytes = Bytes::from_owner(Kept(bytes, (share, work.taking())));
            Response::from_parts(head, Body::Whole(Some(bytes)))
        }
        Err(problem) => sent(refusal(&problem), work, bounds),
    }
}

/// The body of a call. Of one that nobody wants a little is read all the same: a client that is
/// refused while it still sends would not hear why.
pub struct Inlet(Option<Incoming>);

impl Inlet {
    pub fn new(body: Incoming) -> Self {
        Self(Some(body))
    }

    pub fn open(mut self) -> Option<Incoming> {
        self.0.take()
    }

    /// All of it, for which `held` grows.
    pub async fn whole(self, bytes_max: usize, held: &mut Share) -> Result<Bytes> {
        let Some(mut body) = self.open() else { return Ok(Bytes::new()) };
        let mut all = BytesMut::new();
        let until = Instant::now() + JSON_TIME_MAX;
        let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
        while let Some(frame) = timeout_at(until, body.frame()).await.map_err(late)? {
            let cut = |error| Problem::invalid(format!("the body was cut short: {error}"));
            let Ok(data) = frame.map_err(cut)?.into_data() else { continue };
            let refused = match all.len() + data.len() > bytes_max {
                true => Problem::new(
                    StatusCode::PAYLOAD_TOO_LARGE,
                    format!("the body is longer than {bytes_max} bytes"),
                ),
                false if held.grow(data.len() as u64) => {
                    all.extend_from_slice(&data);
                    continue;
                }
                false => too_much(),
            };
            // It would not hear why while it still sends.
            drop((all, data));
            drop(Self::new(body));
            return Err(refused);
        }
        Ok(all.freeze())
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

/// A body for a thread that may block.
pub struct ChunkReader {
    chunks: mpsc::Receiver<io::Result<Bytes>>,
    chunk: Bytes,
}

/// The two ends of a body: who sends an error has it cut short.
pub fn chunks() -> (mpsc::Sender<io::Result<Bytes>>, ChunkReader) {
    let (sender, chunks) = mpsc::channel(CHUNKS_WAITING);
    (sender, ChunkReader { chunks, chunk: Bytes::new() })
}

impl Read for ChunkReader {
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

/// The names and values of a URL's query, in their order.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Reads `application/x-www-form-urlencoded` text.
    pub fn read(text: &str) -> Self {
        let decoded = |text: &str| {
            let spaced = text.replace('+', " ");
            percent_decode_str(&spaced).decode_utf8_lossy().into_owned()
        };
        let pairs = text.split('&').filter(|pair| !pair.is_empty()).take(PAIRS_MAX);
        let read = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(name), decoded(value))
        };
        Self(pairs.map(read).collect())
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// A number, if `name` is given.
    pub fn number(&self, name: &str) -> Result<Option<u64>> {
        let wrong = |_| Problem::invalid(format!("`{name}` is no number"));
        self.get(name).map(|text| text.parse().map_err(wrong)).transpose()
    }
}

/// A reply without a body.
pub fn empty(status: StatusCode) -> Response {
    reply(status, "", Body::empty())
}

/// A reply of one JSON value.
pub fn json_reply(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => reply(status, "application/json", Body::Whole(Some(text.into()))),
        Err(error) => refusal(&Problem::internal(format!("the reply cannot be written: {error}"))),
    }
}

/// The form of errors of all but Connect's calls.
pub fn refusal(problem: &Problem) -> Response {
    let code = problem.status.as_u16();
    let mut told = json!({ "code": code, "message": printable_lines(&problem.message) });
    if let Some(reason) = problem.reason {
        told["error_code"] = reason.into();
    }
    let mut response = for_later(json_reply(problem.status, &told));
    if let Some(seconds) = problem.retry_after {
        response.headers_mut().insert("retry-after", seconds.into());
    }
    response
}

/// Says when to come again, where an answer says that it is too much now.
pub fn for_later(mut response: Response) -> Response {
    if [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&response.status())
    {
        response.headers_mut().insert("retry-after", HeaderValue::from_static("1"));
    }
    response
}

/// A time as clients read it: to the millisecond.
pub fn stamp(at_ms: u64) -> String {
    let whole = rfc3339_ms(at_ms);
    format!("{}Z", whole.get(..23).unwrap_or(&whole))
}

pub fn reply(status: StatusCode, content_type: &'static str, body: Body) -> Response {
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

    #[test]
    fn a_time_is_told_to_the_millisecond() {
        assert_eq!(stamp(1_500), "1970-01-01T00:00:01.500Z");
    }

    #[test]
    fn an_answer_is_in_its_callers_share_until_it_is_taken() {
        let bounds = Bounds::new(16);
        let free = || bounds.bytes.take("ann", 64 << 20).is_some();
        let list = |count: usize| {
            let mut growing = Growing::new(bounds.bytes.none("ann"), "{\"all\":[");
            let line = "x".repeat(1 << 20);
            (0..count).try_for_each(|_| growing.push(&line)).and_then(|()| growing.reply("]}"))
        };
        let taken = |response: Response| match response.into_body() {
            Body::Whole(bytes) => bytes.unwrap(),
            _ => panic!("not of one piece"),
        };
        let short = taken(list(2).unwrap());
        assert!(serde_json::from_slice::<serde_json::Value>(&short).unwrap()["all"][1].is_string());
        assert!(!free());
        drop(short);
        assert!(free());
        assert_eq!(list(33).err().unwrap().status, StatusCode::PAYLOAD_TOO_LARGE);
        let all: Vec<_> = (0..6).map_while(|_| list(20).ok().map(taken)).collect();
        assert_eq!(all.len(), 3, "half of what all share");
        assert_eq!(list(20).err().unwrap().status, StatusCode::TOO_MANY_REQUESTS);
        assert!(bounds.bytes.take("bob", 30 << 20).is_some());
        drop(all);
        assert!(free());
    }

    #[test]
    fn a_query_is_read_as_a_form_is() {
        let query = Query::read("a=1&b=x%20y+z&a=2&flag&%6e=%ff");
        assert_eq!(query.get("a"), Some("1"));
        assert_eq!(query.all("a").collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(query.get("b"), Some("x y z"));
        assert_eq!(query.get("flag"), Some(""));
        assert_eq!(query.get("n"), Some("\u{fffd}"));
        assert_eq!(query.number("a").unwrap(), Some(1));
        assert!(query.number("b").is_err() && query.number("c").unwrap().is_none());
        assert_eq!(Query::read(&"x&".repeat(1000)).pairs().count(), PAIRS_MAX);
    }
}
