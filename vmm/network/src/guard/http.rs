//! Requests of HTTP/1 on one stream, each of which must be for the granted
//! host (RFC 9112). Bodies are counted, and looked at only where they begin: a
//! server that does not read one takes it for the next request.

use super::head::{self, LINE_BYTES_MAX, METHOD_BYTES_MAX, Rest};
use super::{Asked, Unlike};

/// Digits of a chunk's size, which so fits every server's numbers.
const SIZE_DIGITS_MAX: usize = 7;
/// How a server begins that accepts another protocol (RFC 9110, 15.2.2).
const SWITCHING: &[u8] = b"HTTP/1.1 101 ";

/// Where in a request the stream is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum At {
    Head,
    BodyStart(u64),
    Body(u64),
    ChunkSize,
    Chunk(u64),
    ChunkEnd,
    /// The end of the last line, after the chunk of no bytes.
    LastEnd,
    /// A wish for websockets was passed on; what of the answer was heard.
    Upgrade(Vec<u8>),
    /// The wish was granted; the first frame is awaited.
    Frame,
}

/// Requests, one after the other.
#[derive(Debug)]
pub struct State {
    at: At,
    is_first: bool,
    /// Bytes of an unfinished head that have been judged as far as they can be.
    seen: usize,
}

/// What bytes that may go on are.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// A whole head; whether it has a field `Expect`.
    Head {
        expects: bool,
    },
    Go,
    /// No more of HTTP: the server has accepted websockets.
    Websocket,
}

impl Default for State {
    fn default() -> Self {
        Self { at: At::Head, is_first: true, seen: 0 }
    }
}

type Step = Result<Option<(usize, Next)>, Unlike>;

impl State {
    /// How many of `bytes` may go on; `None` where more bytes are needed to say.
    pub fn step(&mut self, bytes: &[u8], asked: &Asked) -> Step {
        if bytes.is_empty() {
            return Ok(None);
        }
        let (count, at) = match &self.at {
            At::Head => return self.head(bytes, asked),
            At::BodyStart(left) => match body_start(bytes, *left)? {
                true => count_down(bytes, *left, At::Body, At::Head),
                false => return Ok(None),
            },
            At::Body(left) => count_down(bytes, *left, At::Body, At::Head),
            At::ChunkSize => match chunk_size(bytes)? {
                Some(step) => step,
                None => return Ok(None),
            },
            At::Chunk(left) => count_down(bytes, *left, At::Chunk, At::ChunkEnd),
            At::ChunkEnd => match line_end(bytes)? {
                true => (2, At::ChunkSize),
                false => return Ok(None),
            },
            At::LastEnd => match line_end(bytes)? {
                true => (2, At::Head),
                false => return Ok(None),
            },
            At::Upgrade(_) => return Ok(None),
            At::Frame => return frame(bytes),
        };
        self.at = at;
        Ok(Some((count, Next::Go)))
    }

    /// Hears the peer's answer to a wish for websockets, if one is awaited. It is the answer
    /// to the first request, so nothing that a request asks for can pass for it.
    pub fn answered(&mut self, bytes: &[u8]) {
        let At::Upgrade(heard) = &mut self.at else { return };
        let missing = SWITCHING.len().saturating_sub(heard.len());
        heard.extend(bytes.iter().take(missing));
        if !SWITCHING.starts_with(heard) {
            self.at = At::Head;
        } else if heard.len() == SWITCHING.len() {
            self.at = At::Frame;
        }
    }

    /// Whether what comes next depends on the peer's answer.
    pub fn waits(&self) -> bool {
        matches!(self.at, At::Upgrade(_))
    }

    fn head(&mut self, bytes: &[u8], asked: &Asked) -> Step {
        // Heads that come in crumbs are not read from their beginning for each.
        let is_same = head::goes_on(bytes, std::mem::replace(&mut self.seen, bytes.len()));
        if is_same {
            return Ok(None);
        }
        let Some(head) = head::read(bytes, asked, self.is_first)? else { return Ok(None) };
        (self.is_first, self.seen) = (false, 0);
        self.at = match head.rest {
            Rest::Nothing => At::Head,
            Rest::Body(length) => At::BodyStart(length),
            Rest::Chunks => At::ChunkSize,
            Rest::Websocket => At::Upgrade(Vec::new()),
        };
        Ok(Some((head.bytes, Next::Head { expects: head.expects })))
    }
}

fn count_down(bytes: &[u8], left: u64, more: impl Fn(u64) -> At, done: At) -> (usize, At) {
    let count = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
    let left = left - count as u64;
    (count, if left == 0 { done } else { more(left) })
}

/// Whether the line's end is there.
fn line_end(bytes: &[u8]) -> Result<bool, Unlike> {
    match bytes {
        [b'\r', b'\n', ..] => Ok(true),
        [b'\r'] => Ok(false),
        _ => Err(Unlike::Unreadable("the end of a chunk of HTTP, or a trailer,")),
    }
}

/// The size of a chunk, in digits alone: of extensions and leading zeros servers
/// think differently.
fn chunk_size(bytes: &[u8]) -> Result<Option<(usize, At)>, Unlike> {
    let wrong = Err(Unlike::Unreadable("the size of a chunk of HTTP"));
    let digits = bytes.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (size, rest) = bytes.split_at_checked(digits).unwrap_or_default();
    if digits > SIZE_DIGITS_MAX || (digits > 1 && size.first() == Some(&b'0')) {
        return wrong;
    }
    match rest {
        [b'\r', b'\n', ..] if digits > 0 => {}
        [] => return Ok(None),
        [b'\r'] if digits > 0 => return Ok(None),
        _ => return wrong,
    }
    let size = std::str::from_utf8(size).ok().and_then(|size| u64::from_str_radix(size, 16).ok());
    match size {
        Some(0) => Ok(Some((digits + 2, At::LastEnd))),
        Some(size) => Ok(Some((digits + 2, At::Chunk(size)))),
        None => wrong,
    }
}

/// Whether enough of a body of `length` bytes is there to say that it does not begin
/// as a request does.
fn body_start(bytes: &[u8], length: u64) -> Result<bool, Unlike> {
    let is_all = bytes.len() as u64 >= length;
    let body = bytes.get(..usize::try_from(length).unwrap_or(usize::MAX)).unwrap_or(bytes);
    match is_request(body, is_all) {
        Some(false) => Ok(true),
        Some(true) => Err(Unlike::Unreadable("a body of HTTP that begins as a request")),
        None => Ok(false),
    }
}

/// Whether a lenient server would take the first line for that of a request: of two or
/// three words, whatever is between them. `None` where that cannot be said yet.
fn is_request(body: &[u8], is_all: bool) -> Option<bool> {
    let space = |byte: &u8| matches!(byte, 9 | 11..=13 | 0x1c..=0x20 | 0x85 | 0xa0);
    let start = body.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(body.len());
    let body = body.get(start..).unwrap_or_default();
    let end = body.iter().position(|byte| *byte == b'\n');
    let line = body.get(..end.unwrap_or(body.len())).unwrap_or_default();
    let is_long = line.len() > LINE_BYTES_MAX || start > LINE_BYTES_MAX;
    let line = line.get(..LINE_BYTES_MAX).unwrap_or(line);
    let is_whole = !is_long && (end.is_some() || is_all);
    let words: Vec<&[u8]> = line.split(space).filter(|word| !word.is_empty()).take(4).collect();
    let version = |word: &[u8]| word.iter().zip(b"HTTP/").all(|(a, b)| a.eq_ignore_ascii_case(b));
    match (words.as_slice(), is_whole) {
        ([method, ..], _) if !is_method(method) => Some(false),
        ([_, _, last], _) if !version(last) => Some(false),
        ([_, _, last], true) => Some(last.len() >= 5),
        ([method, _], true) => Some(method.eq_ignore_ascii_case(b"GET")),
        ([_, _, _, _, ..], _) | (_, true) => Some(false),
        _ if is_long => Some(true),
        _ => None,
    }
}

/// Whether a lenient server could have this for a method: it has no delimiters
/// (RFC 9110, 5.6.2).
fn is_method(word: &[u8]) -> bool {
    let delimits = |byte: &u8| b"\"(),/:;<=>?@[\\]{}".contains(byte);
    word.len() <= METHOD_BYTES_MAX && !word.iter().any(delimits)
}

/// The first bytes of a frame from a client: an operation, and a mask (RFC 6455, 5.2).
/// Nothing of HTTP or TLS has these, so a server that only seemed to accept websockets
/// takes them for neither.
fn frame(bytes: &[u8]) -> Step {
    let wrong = Err(Unlike::Unreadable("what follows a wish for websockets"));
    match bytes {
        [first, ..] if !matches!(first & 0xf, 0..=2 | 8..=10) => wrong,
        [_, second, ..] if second & 0x80 == 0 => wrong,
        [_] | [] => Ok(None),
        _ => Ok(Some((bytes.len(), Next::Websocket))),
    }
}
