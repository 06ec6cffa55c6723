//! gRPC over connections that were taken over: HTTP/2 without TLS, each message with a flag and its
//! length before it (gRPC's PROTOCOL-HTTP2.md).
//!
//! Only what BuildKit's protocol needs is here, without compression: calls are answered in
//! [`server`], made in [`client`], and messages are found in [`frames`]. What the other side sends
//! is bounded in each way: heads, messages, streams and time.

pub mod client;
pub mod frames;
pub mod server;

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use h2::{RecvStream, SendStream};
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use prost::Message;
use tokio::time::timeout;

use frames::{Deframer, framed};

/// The longest head, in bytes: a call of a session names what it leaves out in its own.
const HEAD_BYTES_MAX: u32 = 64 << 10;
/// What one call, and a connection, may have sent that was not read yet, in bytes.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// What is kept of a message for a stream whose reader takes his time, in bytes.
const SEND_BYTES_MAX: usize = 1 << 20;
/// How long the other side may read nothing of what it is sent.
const SEND_TIME_MAX: Duration = Duration::from_secs(600);
/// Longer than anybody waits.
const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);
/// The longest words of an error that are taken over, in bytes.
const WORDS_BYTES_MAX: usize = 4 << 10;
/// How an error's words are written in a head.
const IN_HEADS: &AsciiSet = &CONTROLS.add(b'%');

/// Why a call failed (gRPC's statuscodes.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
}

impl Code {
    const ALL: [Self; 12] = [
        Self::Cancelled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
    ];

    /// What has no name here is unknown.
    fn of(number: u32) -> Self {
        Self::ALL.into_iter().find(|code| *code as u32 == number).unwrap_or(Self::Unknown)
    }
}

/// A call's failure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{words}")]
pub struct Status {
    pub code: Code,
    pub words: String,
    /// More for clients that understand it: of what type, and what.
    detail: Option<(&'static str, Vec<u8>)>,
}

/// `google.rpc.Status`
#[derive(Clone, PartialEq, Message)]
struct Detailed {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    words: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// `google.protobuf.Any`
#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// The outcome of a call.
pub type Result<T> = std::result::Result<T, Status>;

impl Status {
    pub fn new(code: Code, words: impl Into<String>) -> Self {
        Self { code, words: words.into(), detail: None }
    }

    /// The same with something for clients that understand it.
    #[must_use]
    pub fn with(self, kind: &'static str, value: Vec<u8>) -> Self {
        Self { detail: Some((kind, value)), ..self }
    }

    pub fn invalid(words: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, words)
    }

    /// Something that is not there; `remedy` says what to do instead.
    pub fn unsupported(what: impl std::fmt::Display, remedy: &str) -> Self {
        Self::new(Code::Unimplemented, format!("{what} is not supported; {remedy}"))
    }

    /// The other side broke off, or does not speak HTTP/2.
    fn broken(error: &h2::Error) -> Self {
        Self::new(Code::Unavailable, format!("the connection broke: {error}"))
    }

    /// What the end of a call says; `None` where that is well.
    fn of_trailers(trailers: &HeaderMap) -> Option<Self> {
        let text = |name| trailers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let number = text("grpc-status").and_then(|code| code.parse().ok());
        if number == Some(0) {
            return None;
        }
        let words = text("grpc-message").unwrap_or("without a word");
        let words: String = percent_decode_str(words).decode_utf8_lossy().into_owned();
        let end = words.floor_char_boundary(WORDS_BYTES_MAX);
        Some(Self::new(Code::of(number.unwrap_or(2)), &words[..end]))
    }

    fn trailers(outcome: &Result<()>) -> HeaderMap {
        let mut trailers = HeaderMap::new();
        let number = outcome.as_ref().err().map_or(0, |status| status.code as u32);
        trailers.insert("grpc-status", number.into());
        if let Err(status) = outcome {
            let end = status.words.floor_char_boundary(WORDS_BYTES_MAX);
            let words = utf8_percent_encode(&status.words[..end], IN_HEADS).to_string();
            if let Ok(words) = HeaderValue::from_str(&words) {
                trailers.insert("grpc-message", words);
            }
            let details = status
                .detail
                .iter()
                .map(|(kind, value)| Any { kind: (*kind).to_owned(), value: value.clone() });
            let words = status.words[..end].to_owned();
            let detailed = Detailed { code: status.code as i32, words, details: details.collect() };
            if !detailed.details.is_empty()
                && let Ok(text) = HeaderValue::from_str(&STANDARD.encode(detailed.encode_to_vec()))
            {
                trailers.insert("grpc-status-details-bin", text);
            }
        }
        trailers
    }
}

/// The messages of one direction of a call, as they come.
pub struct Messages {
    body: RecvStream,
    found: Deframer,
    /// How long the other side may say nothing.
    pause: Duration,
}

impl Messages {
    fn new(body: RecvStream, bytes_max: usize, pause: Duration) -> Self {
        Self { body, found: Deframer::new(bytes_max), pause }
    }

    /// The other side may say nothing for as long as it is there.
    fn wait_for_ever(&mut self) {
        self.pause = FOR_EVER;
    }

    /// The next message; `None` at the end of the stream.
    ///
    /// # Errors
    /// It is too long, or not there in time, or the other side broke off.
    pub async fn next<M: Message + Default>(&mut self) -> Result<Option<M>> {
        loop {
            if let Some(message) = self.found.take()? {
                let read = M::decode(message);
                return read.map(Some).map_err(|error| {
                    Status::invalid(format!("a message cannot be read: {error}"))
                });
            }
            let chunk = timeout(self.pause, self.body.data()).await.map_err(|_| {
                let waited = self.pause.as_secs();
                Status::new(
                    Code::DeadlineExceeded,
                    format!("the other side has said nothing for {waited} s"),
                )
            })?;
            match chunk {
                Some(Ok(chunk)) => {
                    // A reader that fails ends the stream in any case.
                    let _ = self.body.flow_control().release_capacity(chunk.len());
                    self.found.push(&chunk);
                }
                Some(Err(error)) => return Err(Status::broken(&error)),
                None if self.found.is_empty() => return Ok(None),
                None => return Err(Status::invalid("a message was cut short")),
            }
        }
    }

    /// How the call ended; asked for when there are no more messages.
    async fn end(&mut self) -> Result<()> {
        let trailers = timeout(self.pause, self.body.trailers()).await;
        match trailers {
            Ok(Ok(Some(trailers))) => Status::of_trailers(&trailers).map_or(Ok(()), Err),
            Ok(Err(error)) => Err(Status::broken(&error)),
            Ok(Ok(None)) | Err(_) => {
                Err(Status::new(Code::Internal, "the call ended without an outcome"))
            }
        }
    }
}

/// Sends a message, as fast as the other side reads.
async fn send<M: Message>(stream: &mut SendStream<Bytes>, message: &M) -> Result<()> {
    let mut left = framed(message);
    while !left.is_empty() {
        stream.reserve_capacity(left.len().min(SEND_BYTES_MAX));
        let room = timeout(SEND_TIME_MAX, std::future::poll_fn(|cx| stream.poll_capacity(cx)));
        let room = match room.await {
            Ok(Some(Ok(room))) => room,
            Ok(Some(Err(error))) => return Err(Status::broken(&error)),
            Ok(None) => return Err(Status::new(Code::Cancelled, "the call has ended")),
            Err(_) => {
                return Err(Status::new(Code::DeadlineExceeded, "the other side reads nothing"));
            }
        };
        let part = left.split_to(room.min(left.len()));
        if !part.is_empty() {
            stream.send_data(part, false).map_err(|error| Status::broken(&error))?;
        }
    }
    Ok(())
}

/// What a head says of `name`.
pub fn said<'a>(head: &'a HeaderMap, name: &str) -> Option<&'a str> {
    head.get(name).and_then(|value| value.to_str().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_the_same_at_the_other_end() {
        assert_eq!(Status::of_trailers(&Status::trailers(&Ok(()))), None);
        for words in ["plain", "100 % größer\nin two lines", ""] {
            let status = Status::invalid(words);
            assert_eq!(Status::of_trailers(&Status::trailers(&Err(status.clone()))), Some(status));
        }
        let long = Status::trailers(&Err(Status::invalid("ü".repeat(9999)).with("a", vec![1])));
        let heard = Status::of_trailers(&long).unwrap();
        assert_eq!((heard.code, heard.words.len()), (Code::InvalidArgument, WORDS_BYTES_MAX));
        assert!(long.contains_key("grpc-status-details-bin"));
        // What says nothing is a failure.
        assert_eq!(Status::of_trailers(&HeaderMap::new()).unwrap().code, Code::Unknown);
        let mut odd = HeaderMap::new();
        odd.insert("grpc-status", 99.into());
        assert_eq!(Status::of_trailers(&odd).unwrap().code, Code::Unknown);
    }
}
