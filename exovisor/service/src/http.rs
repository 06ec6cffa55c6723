//! One request from a stream, and one answer to it. Nothing here is unbounded.

use serde::{Deserialize, Serialize};
use std::io::Write;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

/// Headers of a request.
const HEADERS_MAX: usize = 32;
/// More than the head of an answer has.
const HEAD_BYTES: usize = 256;
/// A body up to this goes with its head at once; a longer one is not copied for that.
const SHORT_BODY_BYTES: usize = 16 << 10;

/// How much of clients is borne.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of a request's head.
    pub head_bytes: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Bytes of a command's standard output; of its standard error the first sixteenth of that.
    pub output_bytes: usize,
    /// For a whole request to come, and for an answer to be taken.
    pub client_time: Duration,
    /// Connections at once; more wait unaccepted.
    pub connections: usize,
}

impl Limits {
    /// What a worker's answer may be long: each byte of the output takes six in JSON at most.
    pub(crate) fn answer_bytes(&self) -> usize {
        self.output_bytes.saturating_mul(7).saturating_add(1 << 20)
    }
}

impl Default for Limits {
    /// 8 KiB of head, 64 KiB of body, 1 MiB of output, 10 s, 512 connections.
    fn default() -> Self {
        Self {
            head_bytes: 8 << 10,
            body_bytes: 64 << 10,
            output_bytes: 1 << 20,
            client_time: Duration::from_secs(10),
            connections: 512,
        }
    }
}

/// What a client wants.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub method: String,
    pub path: String,
    /// What follows the path's question mark.
    pub query: String,
    /// What follows `Bearer `.
    pub key: Option<String>,
    pub body: Vec<u8>,
    /// Whether it asks for JSON, by `Accept`.
    pub wants_json: bool,
    pub keep_alive: bool,
}

/// What it gets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub status: u16,
    pub kind: &'static str,
    pub body: Vec<u8>,
}

/// Why a connection is over.
#[derive(Debug)]
pub(crate) enum Over {
    /// The client went, or was too slow to be told.
    Gone,
    /// It is told why.
    Refused(Answer),
}

impl Answer {
    /// The two kinds that calls have.
    pub const JSON: &str = "application/json";
    pub const OUTPUT: &str = "application/octet-stream";

    pub fn json(status: u16, value: &serde_json::Value) -> Self {
        Self { status, kind: Self::JSON, body: value.to_string().into_bytes() }
    }

    pub fn error(status: u16, message: &str) -> Self {
        Self::json(status, &serde_json::json!({ "error": message }))
    }

    pub fn text(body: String) -> Self {
        Self { status: 200, kind: "text/plain; version=0.0.4", body: body.into_bytes() }
    }

    /// What a command wrote.
    pub fn output(body: Vec<u8>) -> Self {
        Self { status: 200, kind: Self::OUTPUT, body }
    }

    /// Whether the client was refused something.
    pub fn is_denial(&self) -> bool {
        (400..500).contains(&self.status)
    }

    /// Its head, and its body where that is short.
    fn first_bytes(&self, keep_alive: bool) -> Vec<u8> {
        let Self { status, kind, body } = self;
        let connection = if keep_alive { "keep-alive" } else { "close" };
        let (reason, length) = (reason(*status), body.len());
        let is_short = length <= SHORT_BODY_BYTES;
        let mut bytes = Vec::with_capacity(HEAD_BYTES + if is_short { length } else { 0 });
        // Writing to memory cannot fail.
        let _ = write!(
            bytes,
            "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
             Connection: {connection}\r\n\r\n"
        );
        if is_short {
            bytes.extend(body);
        }
        bytes
    }

    /// What [`Self::first_bytes`] leaves.
    fn rest(&self) -> &[u8] {
        if self.body.len() <= SHORT_BODY_BYTES { &[] } else { &self.body }
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    }
}

fn refused(status: u16, message: &str) -> Over {
    Over::Refused(Answer::error(status, message))
}

/// Bytes that came and were not used yet stay in `buffer`.
pub(crate) async fn read(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
    limits: &Limits,
) -> Result<Request, Over> {
    // A client that has said nothing yet is not owed an answer.
    if buffer.is_empty() {
        let first = timeout(limits.client_time, stream.read_buf(buffer)).await;
        if !matches!(first, Ok(Ok(1..))) {
            return Err(Over::Gone);
        }
    }
    match timeout(limits.client_time, whole(stream, buffer, limits)).await {
        Ok(request) => request,
        Err(_elapsed) => Err(refused(408, "the request did not come in time")),
    }
}

async fn whole(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
    limits: &Limits,
) -> Result<Request, Over> {
    let (mut request, head, body) = loop {
        if let Some(found) = parse(buffer)? {
            break found;
        }
        if buffer.len() > limits.head_bytes {
            return Err(refused(431, "the request's head is too long"));
        }
        more(stream, buffer).await?;
    };
    if body > limits.body_bytes {
        return Err(refused(413, "the request's body is too long"));
    }
    while buffer.len() < head + body {
        more(stream, buffer).await?;
    }
    request.body = buffer.drain(..head + body).skip(head).collect();
    Ok(request)
}

async fn more(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>) -> Result<(), Over> {
    match stream.read_buf(buffer).await {
        Ok(0) | Err(_) => Err(Over::Gone),
        Ok(_) => Ok(()),
    }
}

/// The request without its body, the length of its head and that of its body; `None` if the head
/// is not whole.
fn parse(bytes: &[u8]) -> Result<Option<(Request, usize, usize)>, Over> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    let head = match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(refused(431, "too many headers")),
        Err(error) => return Err(refused(400, &format!("malformed request: {error}"))),
    };
    let mut length = None;
    let mut key = None;
    let mut wants_json = false;
    let mut keep_alive = parsed.version == Some(1);
    for header in parsed.headers.iter() {
        // Only these two are blanks to HTTP (RFC 9110, 5.6.3).
        let value = std::str::from_utf8(header.value).unwrap_or("").trim_matches([' ', '\t']);
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        if is("content-length") {
            // Two lengths are how requests are smuggled (RFC 9112, 6.3).
            if length.is_some() {
                return Err(refused(400, "two lengths"));
            }
            length = Some(parse_length(value)?);
        } else if is("transfer-encoding") {
            return Err(refused(400, "only plain bodies are taken"));
        } else if is("authorization") {
            if key.is_some() {
                return Err(refused(400, "two keys"));
            }
            key = value.strip_prefix("Bearer ").map(str::to_owned);
        } else if is("accept") {
            wants_json |= value.contains("application/json");
        } else if is("connection") && value.eq_ignore_ascii_case("close") {
            keep_alive = false;
        }
    }
    let target = parsed.path.unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let request = Request {
        method: parsed.method.unwrap_or_default().to_owned(),
        path: path.to_owned(),
        query: query.to_owned(),
        key,
        body: Vec::new(),
        wants_json,
        keep_alive,
    };
    Ok(Some((request, head, length.unwrap_or(0))))
}

fn parse_length(text: &str) -> Result<usize, Over> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let length = digits.then(|| text.parse().ok()).flatten();
    length.ok_or_else(|| refused(400, "Content-Length is no number"))
}

/// Whether the client took it.
pub(crate) async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    answer: &Answer,
    keep_alive: bool,
    limits: &Limits,
) -> bool {
    let whole = async {
        stream.write_all(&answer.first_bytes(keep_alive)).await?;
        stream.write_all(answer.rest()).await
    };
    matches!(timeout(limits.client_time, whole).await, Ok(Ok(())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(bytes: &[u8]) -> Option<u16> {
        match parse(bytes) {
            Err(Over::Refused(answer)) => Some(answer.status),
            _ => None,
        }
    }

    #[test]
    fn requests_are_read() {
        let text =
            b"POST /a?b=c HTTP/1.1\r\nAuthorization: Bearer k\r\nContent-Length: 2\r\n\r\n[]";
        let (request, head, body) = parse(text).unwrap().unwrap();
        assert_eq!((head, body), (text.len() - 2, 2));
        assert_eq!((request.method.as_str(), request.path.as_str()), ("POST", "/a"));
        assert_eq!((request.query.as_str(), request.wants_json), ("b=c", false));
        assert_eq!((request.key.as_deref(), request.keep_alive), (Some("k"), true));
        assert!(parse(&text[..20]).unwrap().is_none());
    }

    #[test]
    fn smuggling_and_nonsense_are_refused() {
        let lengths = ["-1", "+2", "2,2", "0x2", "", "\u{a0}2", "99999999999999999999999"];
        for length in lengths {
            let text = format!("POST / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n");
            assert_eq!(status(text.as_bytes()), Some(400), "{length}");
        }
        let two = b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n";
        let chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!([status(two), status(chunked), status(b"\0\x01 x\r\n\r\n")], [Some(400); 3]);
        let keys = b"GET / HTTP/1.1\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n";
        assert_eq!(status(keys), Some(400));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(HEADERS_MAX + 1));
        assert_eq!(status(many.as_bytes()), Some(431));
    }
}
