//! Requests of HTTP/1 on one stream, each of which must be for the granted
//! host (RFC 9112). Bodies are counted, not looked at.

use super::guard::{Unlike, printable, same_name};

const HEADERS_MAX: usize = 128;
/// Bytes of a line between chunks.
const LINE_BYTES_MAX: usize = 4096;

/// Where in a request the stream is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    Head,
    Body(u64),
    ChunkSize,
    /// Bytes of a chunk and the end of its line.
    Chunk(u64),
    Trailer,
    /// Another protocol was wished for; the peer's answer decides.
    Upgrade,
}

type Step = Result<Option<(usize, State)>, Unlike>;

impl State {
    /// How many of `bytes` may be passed on, and what comes next; `None` where
    /// more bytes are needed to say.
    pub fn step(&self, bytes: &[u8], granted: &str) -> Step {
        if bytes.is_empty() {
            return Ok(None);
        }
        match self {
            Self::Head => head(bytes, granted),
            Self::Body(left) => Ok(Some(count_down(bytes, *left, Self::Body, Self::Head))),
            Self::Chunk(left) => Ok(Some(count_down(bytes, *left, Self::Chunk, Self::ChunkSize))),
            Self::ChunkSize => chunk_size(bytes),
            Self::Trailer => trailer(bytes),
            Self::Upgrade => Ok(None),
        }
    }
}

fn count_down(bytes: &[u8], left: u64, more: impl Fn(u64) -> State, done: State) -> (usize, State) {
    let count = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
    let left = left - count as u64;
    (count, if left == 0 { done } else { more(left) })
}

fn line(bytes: &[u8]) -> Result<Option<&[u8]>, Unlike> {
    match bytes.iter().position(|byte| *byte == b'\n') {
        Some(end) => match bytes.get(..end).and_then(|line| line.strip_suffix(b"\r")) {
            Some(line) => Ok(Some(line)),
            None => Err(Unlike::Unreadable("a line of HTTP")),
        },
        None if bytes.len() > LINE_BYTES_MAX => Err(Unlike::Unreadable("a line of HTTP")),
        None => Ok(None),
    }
}

fn chunk_size(bytes: &[u8]) -> Step {
    let Some(line) = line(bytes)? else { return Ok(None) };
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let size = std::str::from_utf8(digits).ok();
    let size = size.filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
    let size = size.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    match size {
        Some(0) => Ok(Some((line.len() + 2, State::Trailer))),
        // With the end of the line after it.
        Some(size) if size < u64::MAX - 2 => Ok(Some((line.len() + 2, State::Chunk(size + 2)))),
        _ => Err(Unlike::Unreadable("the size of a chunk of HTTP")),
    }
}

fn trailer(bytes: &[u8]) -> Step {
    let Some(line) = line(bytes)? else { return Ok(None) };
    let next = if line.is_empty() { State::Head } else { State::Trailer };
    Ok(Some((line.len() + 2, next)))
}

fn head(bytes: &[u8], granted: &str) -> Step {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let count = match request.parse(bytes) {
        Ok(httparse::Status::Complete(count)) => count,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(Unlike::Unreadable("a request of HTTP")),
    };
    let method = request.method.unwrap_or_default();
    if method.eq_ignore_ascii_case("CONNECT") {
        return Err(Unlike::Tunnel);
    }
    check_authority(request.path.unwrap_or_default(), granted)?;
    for value in values(request.headers, "host") {
        check_host(value, granted)?;
    }
    Ok(Some((count, after(request.headers)?)))
}

fn values<'a>(headers: &'a [httparse::Header<'_>], name: &str) -> impl Iterator<Item = &'a [u8]> {
    let named = headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name));
    named.map(|header| header.value)
}

/// `http://host/path`, as it is said to proxies, must name the host too.
fn check_authority(path: &str, granted: &str) -> Result<(), Unlike> {
    let Some((_, rest)) = path.split_once("://").filter(|_| !path.starts_with('/')) else {
        return Ok(());
    };
    let authority = rest.split(['/', '?', '#', '\\']).next().unwrap_or_default();
    check_host(authority.rsplit('@').next().unwrap_or_default().as_bytes(), granted)
}

fn check_host(value: &[u8], granted: &str) -> Result<(), Unlike> {
    let text = String::from_utf8_lossy(value);
    let text = text.trim();
    let host = match text.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => text,
    };
    match same_name(host, granted) {
        true => Ok(()),
        false => Err(Unlike::Host(printable(text))),
    }
}

/// What follows the head (RFC 9112, 6.3). What two servers could read in two
/// ways is refused.
fn after(headers: &[httparse::Header<'_>]) -> Result<State, Unlike> {
    let mut lengths = values(headers, "content-length");
    let mut codings = values(headers, "transfer-encoding");
    let unclear = Err(Unlike::Unreadable("the length of a request of HTTP"));
    let (length, coding) = (lengths.next(), codings.next());
    if lengths.next().is_some() || codings.next().is_some() || length.and(coding).is_some() {
        return unclear;
    }
    if let Some(coding) = coding {
        return match coding.eq_ignore_ascii_case(b"chunked") {
            true => Ok(State::ChunkSize),
            false => unclear,
        };
    }
    let digits = length.map(|length| String::from_utf8_lossy(length).into_owned());
    let length = match digits.as_deref() {
        None => 0,
        Some(digits)
            if !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit()) =>
        {
            match digits.parse::<u64>() {
                Ok(length) => length,
                Err(_) => return unclear,
            }
        }
        Some(_) => return unclear,
    };
    let upgrade = values(headers, "upgrade").next();
    match upgrade {
        // Its streams would name hosts of their own.
        Some(to) if to.to_ascii_lowercase().windows(2).any(|part| part == b"h2") => {
            Err(Unlike::Unreadable("HTTP/2 without TLS"))
        }
        Some(_) if length == 0 => Ok(State::Upgrade),
        _ if length == 0 => Ok(State::Head),
        _ => Ok(State::Body(length)),
    }
}
