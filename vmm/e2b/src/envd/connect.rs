//! Connect's protocol with JSON (connectrpc.com/docs/protocol): what goes over the wire.
//!
//! A call with one answer is a POST of `application/json`. A stream is `application/connect+json`:
//! messages, each behind a byte of flags and a length of four bytes (big endian). The last one has
//! the flag 2, and says how the call ended.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use exocell_cell::agent::printable_lines;
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::body::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use crate::bounds::Share;
use crate::error::{Problem, Result};
use crate::http::{
    Body, BodySender, Call, Inlet, JSON_BYTES_MAX, Response, for_later, json_reply, read_json,
    reply, too_much,
};

const UNARY: &str = "application/json";
const STREAM: &str = "application/connect+json";
const HEAD_BYTES: usize = 5;
/// Flags of a message.
const COMPRESSED: u8 = 1;
const LAST: u8 = 2;
/// The longest message of many.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// How long a client may leave a stream of its messages alone: between two, and within one.
const SILENCE_MAX: Duration = Duration::from_secs(3600);
const MESSAGE_TIME_MAX: Duration = Duration::from_secs(30);
/// The longest time that a client may name for a call; what is longer is none.
const TIME_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

fn content_type(call: &Call) -> &str {
    let whole = call.header("content-type").unwrap_or_default();
    whole.split(';').next().unwrap_or_default().trim()
}

/// How long the client gives the call (`Connect-Timeout-Ms`).
pub fn time_limit(call: &Call) -> Result<Option<Duration>> {
    let Some(text) = call.header("connect-timeout-ms") else { return Ok(None) };
    let wrong = || Problem::invalid("Connect-Timeout-Ms is no number of up to ten digits");
    let digits = text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = digits.then(|| text.parse().ok()).flatten().ok_or_else(wrong)?;
    let limit = Duration::from_millis(number);
    Ok(Some(limit).filter(|limit| !limit.is_zero() && *limit < TIME_MAX))
}

/// The one message of a call with one answer.
pub async fn unary<T: DeserializeOwned>(call: Call) -> Result<T> {
    if content_type(&call) != UNARY {
        return Err(Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("send {UNARY}: this is the protocol of Connect with JSON"),
        ));
    }
    check_plain(&call, "content-encoding")?;
    call.json().await
}

fn check_plain(call: &Call, header: &str) -> Result<()> {
    match call.header(header) {
        None | Some("identity" | "") => Ok(()),
        Some(other) => {
            Err(Problem::unsupported(format!("compression ({other}) of a call"), "send it plain"))
        }
    }
}

/// The answer of a call with one.
pub fn answer(answer: Result<Value>) -> Response {
    match answer {
        Ok(value) => json_reply(StatusCode::OK, &value),
        Err(problem) => for_later(json_reply(problem.unary_status(), &told(&problem))),
    }
}

/// The same for one that may be long.
pub fn whole(reply: Result<Response>) -> Response {
    reply.unwrap_or_else(|problem| answer(Err(problem)))
}

fn told(problem: &Problem) -> Value {
    json!({ "code": problem.code(), "message": printable_lines(&problem.message) })
}

/// A refusal in the form that the call has.
pub fn refused(call: &Call, problem: &Problem) -> Response {
    refused_as(content_type(call) == STREAM, problem)
}

fn refused_as(is_stream: bool, problem: &Problem) -> Response {
    match is_stream {
        true => {
            let last = frame(LAST, &json!({ "error": told(problem) }));
            reply(StatusCode::OK, STREAM, Body::Whole(Some(last)))
        }
        false => answer(Err(problem.clone())),
    }
}

/// The one message of a call with many answers. It is read before the first answer: what a client
/// has not said by then is lost.
///
/// # Errors
/// The reply that says why there is none.
pub async fn only<T: DeserializeOwned>(call: Call) -> std::result::Result<T, Response> {
    let is_stream = content_type(&call) == STREAM;
    let read = async {
        let mut messages = Messages::of(call)?;
        // The only one is what another call has as its body.
        messages.bytes_max = JSON_BYTES_MAX;
        let first = messages.next().await?;
        first.ok_or_else(|| Problem::invalid("the stream has no message"))
    };
    read.await.map_err(|problem| refused_as(is_stream, &problem))
}

/// The messages of a client, one after the other.
pub struct Messages {
    body: Option<Incoming>,
    bytes_max: usize,
    came: BytesMut,
    /// As many bytes, of the caller's share.
    held: Share,
    /// When the next one has to have come.
    until: Instant,
}

impl Messages {
    /// # Errors
    /// The call is not in the form of a stream.
    pub fn of(call: Call) -> Result<Self> {
        if content_type(&call) != STREAM {
            return Err(Problem::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                format!("send {STREAM}: this is a stream of the protocol of Connect with JSON"),
            ));
        }
        check_plain(&call, "connect-content-encoding")?;
        Ok(Self {
            body: call.body.open(),
            bytes_max: MESSAGE_BYTES_MAX,
            came: BytesMut::new(),
            held: call.held,
            until: Instant::now() + MESSAGE_TIME_MAX,
        })
    }

    /// The next one; `None` after the last.
    ///
    /// # Errors
    /// It is broken, too long, or does not come.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            let before = self.came.len();
            if let Some(message) = take(&mut self.came, self.bytes_max)? {
                self.held.shrink((before - self.came.len()) as u64);
                let most = if self.came.is_empty() { SILENCE_MAX } else { MESSAGE_TIME_MAX };
                self.until = Instant::now() + most;
                return read_json(if message.is_empty() { b"{}" } else { &message }).map(Some);
            }
            let Some(body) = &mut self.body else {
                return match self.came.is_empty() {
                    true => Ok(None),
                    false => Err(Problem::invalid("the stream ends within a message")),
                };
            };
            let late = |_| Problem::deadline("the client has said nothing for too long");
            match timeout_at(self.until, body.frame()).await.map_err(late)? {
                None => self.body = None,
                Some(Err(error)) => {
                    return Err(Problem::invalid(format!("the stream was cut short: {error}")));
                }
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    if !self.held.grow(data.len() as u64) {
                        return Err(too_much());
                    }
                    if self.came.is_empty() {
                        self.until = self.until.min(Instant::now() + MESSAGE_TIME_MAX);
                    }
                    self.came.extend_from_slice(&data);
                }
            }
        }
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        if let Some(body) = self.body.take() {
            // A client that is refused while it still sends would not hear why.
            drop(Inlet::new(body));
        }
    }
}

/// A whole message at the beginning of what came.
fn take(held: &mut BytesMut, bytes_max: usize) -> Result<Option<Bytes>> {
    let Some([flags, length @ ..]) = held.first_chunk::<HEAD_BYTES>() else { return Ok(None) };
    let (flags, length) = (*flags, u32::from_be_bytes(*length) as usize);
    if flags & COMPRESSED != 0 {
        return Err(Problem::unsupported("compression of a message", "send it plain"));
    }
    if flags & !LAST != 0 {
        return Err(Problem::invalid(format!("a message has flags {flags:#x}, which are none")));
    }
    if length > bytes_max {
        return Err(Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("a message is longer than {bytes_max} bytes"),
        ));
    }
    if held.len() < HEAD_BYTES + length {
        return Ok(None);
    }
    held.advance(HEAD_BYTES);
    let message = held.split_to(length).freeze();
    // A client's last one says nothing.
    Ok(Some(message).filter(|_| flags & LAST == 0)).map(|message| message.or(Some(Bytes::new())))
}

fn frame(flags: u8, value: &impl Serialize) -> Bytes {
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mut bytes = Vec::with_capacity(HEAD_BYTES + text.len());
    bytes.push(flags);
    bytes.extend((text.len() as u32).to_be_bytes());
    bytes.extend(text);
    bytes.into()
}

/// What a call with many answers says.
#[derive(Clone)]
pub struct Stream(Arc<BodySender>);

impl Stream {
    /// A stream, and the reply that brings it to the client.
    pub fn open() -> (Self, Response) {
        let (sender, body) = Body::stream();
        (Self(Arc::new(sender)), reply(StatusCode::OK, STREAM, body))
    }

    /// False when the client is gone.
    pub async fn say(&self, message: &Value) -> bool {
        self.0.send(frame(0, message)).await
    }

    /// Says how it ended.
    pub async fn end(self, ended: Result<()>) {
        let last = match ended {
            Ok(()) => json!({}),
            Err(problem) => json!({ "error": told(&problem) }),
        };
        self.0.send(frame(LAST, &last)).await;
    }

    /// Breaks the connection off: the sandbox is gone, as it would be for one that was in it.
    pub async fn break_off(self) {
        self.0.break_off(io::ErrorKind::ConnectionReset.into()).await;
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

/// The reply to a stream of a client's that has one answer.
pub fn last_answer(answered: Result<Value>) -> Response {
    let frames = match answered {
        Ok(value) => [frame(0, &value), frame(LAST, &json!({}))].concat(),
        Err(problem) => frame(LAST, &json!({ "error": told(&problem) })).to_vec(),
    };
    reply(StatusCode::OK, STREAM, Body::Whole(Some(frames.into())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn held(bytes: &[u8]) -> BytesMut {
        BytesMut::from(bytes)
    }

    #[test]
    fn messages_are_taken_one_after_the_other() {
        let mut both = held(&[frame(0, &json!({ "a": 1 })), frame(0, &json!([]))].concat());
        assert_eq!(take(&mut both, MESSAGE_BYTES_MAX).unwrap().unwrap(), "{\"a\":1}");
        assert_eq!(take(&mut both, MESSAGE_BYTES_MAX).unwrap().unwrap(), "[]");
        assert!(take(&mut both, MESSAGE_BYTES_MAX).unwrap().is_none() && both.is_empty());
        assert!(take(&mut held(b"\0\0\0\0\x05{\"a\""), MESSAGE_BYTES_MAX).unwrap().is_none());
    }

    #[test]
    fn hostile_messages_are_refused() {
        assert_eq!(take(&mut held(b"\x01\0\0\0\0"), MESSAGE_BYTES_MAX).unwrap_err().status, 501);
        assert_eq!(take(&mut held(b"\x80\0\0\0\0"), MESSAGE_BYTES_MAX).unwrap_err().status, 400);
        let too_long = (MESSAGE_BYTES_MAX as u32 + 1).to_be_bytes();
        for length in [[0xff; 4], too_long] {
            let mut head = held(&[&[0][..], &length].concat());
            assert_eq!(take(&mut head, MESSAGE_BYTES_MAX).unwrap_err().status, 413);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let mut held = held(&bytes);
            while let Ok(Some(_)) = take(&mut held, MESSAGE_BYTES_MAX) {}
        }
    }
}
