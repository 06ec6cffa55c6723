//! One head of a request of HTTP/1, by the grammar alone (RFC 9112): what two
//! servers could read in two ways is refused.

use super::unlike::printable;
use super::{Asked, Unlike};

/// Bytes of a method, of any one line, and of a head; fields of a head.
pub const METHOD_BYTES_MAX: usize = 32;
pub const LINE_BYTES_MAX: usize = 16 << 10;
const HEAD_BYTES_MAX: usize = 48 << 10;
const FIELDS_MAX: usize = 100;
/// Digits of a length, which so fits every server's numbers.
const LENGTH_DIGITS_MAX: usize = 15;
/// Bytes in which an absolute target shows that it is one.
const SCHEME_BYTES_MAX: usize = 16;

/// What a line is called that is no request's at all.
pub const REQUEST_LINE: &str = "the line that begins a request of HTTP";
const TARGET: Unlike = Unlike::Unreadable("the target of a request of HTTP");
const VERSION: Unlike = Unlike::Unreadable("the version of a request of HTTP");
const FIELD: Unlike = Unlike::Unreadable("a field of HTTP");
const LENGTH: Unlike = Unlike::Unreadable("the length of a request of HTTP");
const UPGRADE: Unlike =
    Unlike::Unreadable("a wish for another protocol, but for websockets in a first request,");

/// Fields on which a request's host or its end depends.
const FRAMING: [&str; 3] = ["host", "content-length", "transfer-encoding"];
/// Fields by which proxies tell servers of another host or target than was asked for.
const OF_PROXIES: [&str; 11] = [
    "forwarded",
    "x-envoy-original-host",
    "x-forwarded-authority",
    "x-forwarded-host",
    "x-forwarded-server",
    "x-host",
    "x-http-host-override",
    "x-original-host",
    "x-original-url",
    "x-real-host",
    "x-rewrite-url",
];

/// A head that may go on.
#[derive(Debug, PartialEq, Eq)]
pub struct Head {
    pub bytes: usize,
    pub rest: Rest,
    /// Whether it has a field `Expect`.
    pub expects: bool,
}

/// What comes after a head (RFC 9112, 6.3).
#[derive(Debug, PartialEq, Eq)]
pub enum Rest {
    Nothing,
    Body(u64),
    Chunks,
    /// The frames of websockets, if the server agrees.
    Websocket,
}

/// Reads the head that `bytes` begin with; `None` where it is not all there. What there
/// is of it is judged nonetheless.
pub fn read(bytes: &[u8], asked: &Asked, is_first: bool) -> Result<Option<Head>, Unlike> {
    let mut lines = Lines { bytes, taken: 0 };
    let Some(line) = lines.next(|line, is_whole| request_line(line, is_whole, asked).map(drop))?
    else {
        return Ok(None);
    };
    let Some(line) = request_line(line, true, asked)? else { return Err(VERSION) };
    let mut fields = Fields::default();
    for _ in 0..=FIELDS_MAX {
        match lines.next(|line, _| check_text(line))? {
            None => return Ok(None),
            Some([]) => {
                let rest = fields.rest(&line, is_first)?;
                return Ok(Some(Head { bytes: lines.taken, rest, expects: fields.expects }));
            }
            Some(line) => fields.add(line, asked)?,
        }
    }
    Err(Unlike::Unreadable("a head of HTTP of more than 100 fields"))
}

/// Whether there is nothing new to say of a head of which the first `seen` bytes were read
/// before: its last field has only become longer.
pub fn goes_on(bytes: &[u8], seen: usize) -> bool {
    let (old, fresh) = bytes.split_at_checked(seen).unwrap_or((&[], bytes));
    let line = old.iter().rposition(|byte| *byte == b'\n').map(|end| bytes.len() - end - 1);
    line.is_some_and(|line| line <= LINE_BYTES_MAX)
        && bytes.len() <= HEAD_BYTES_MAX
        && old.last() != Some(&b'\r')
        && check_text(fresh).is_ok()
}

/// The head without its field `Expect`. The client then gets no `100 Continue`, which it must
/// not wait for without end, and no server answers before it has the body: what comes after
/// such an answer some take for the body, others for a request.
pub fn without_expect(head: &[u8]) -> Vec<u8> {
    let is_other =
        |line: &&[u8]| !line.get(..7).is_some_and(|name| name.eq_ignore_ascii_case(b"expect:"));
    head.split_inclusive(|byte| *byte == b'\n').filter(is_other).collect::<Vec<_>>().concat()
}

/// Lines that end with CR LF.
struct Lines<'a> {
    bytes: &'a [u8],
    taken: usize,
}

impl<'a> Lines<'a> {
    /// The next line without its end; `None` where it is not all there. Then `check`
    /// judges its beginning.
    fn next(
        &mut self,
        check: impl Fn(&[u8], bool) -> Result<(), Unlike>,
    ) -> Result<Option<&'a [u8]>, Unlike> {
        let rest = self.bytes.get(self.taken..).unwrap_or_default();
        let end = rest.iter().position(|byte| *byte == b'\n');
        let line = rest.get(..end.unwrap_or(rest.len())).unwrap_or_default();
        let bare = line.strip_suffix(b"\r");
        if line.len() > LINE_BYTES_MAX || self.taken + line.len() > HEAD_BYTES_MAX {
            return Err(Unlike::Unreadable("a line or a head of HTTP that is too long"));
        }
        let Some(end) = end else {
            return check(bare.unwrap_or(line), false).map(|()| None);
        };
        let Some(bare) = bare else {
            check(line, true)?;
            return Err(Unlike::Unreadable("a line of HTTP that ends without CR"));
        };
        check(bare, true)?;
        self.taken += end + 1;
        Ok(Some(bare))
    }
}

struct Line<'a> {
    method: &'a [u8],
    is_1_1: bool,
}

/// Characters of tokens (RFC 9110, 5.6.2).
fn is_token_byte(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte)
}

fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(is_token_byte)
}

/// The first line; of one that is not `is_whole` what can be said of it, with `None`.
fn request_line<'a>(
    line: &'a [u8],
    is_whole: bool,
    asked: &Asked,
) -> Result<Option<Line<'a>>, Unlike> {
    let foreign = Unlike::Unreadable(REQUEST_LINE);
    let mut parts = line.splitn(3, |byte| *byte == b' ');
    let method = parts.next().unwrap_or_default();
    let is_method = method.iter().all(is_token_byte) && method.len() <= METHOD_BYTES_MAX;
    let (target, version) = (parts.next(), parts.next());
    if !is_method || (method.is_empty() && (is_whole || target.is_some())) {
        return Err(foreign);
    }
    let Some(target) = target else {
        return if is_whole { Err(foreign) } else { Ok(None) };
    };
    if method.eq_ignore_ascii_case(b"CONNECT") {
        return Err(Unlike::Tunnel);
    }
    check_target(method, target, version.is_some() || is_whole, asked)?;
    let is_1_1 = match version {
        Some(b"HTTP/1.1") => true,
        Some(b"HTTP/1.0") => false,
        Some(version) if version.starts_with(b"HTTP/2") => return Err(Unlike::Http2),
        Some(version) if !is_whole && b"HTTP/1.".starts_with(version) => return Ok(None),
        None if !is_whole => return Ok(None),
        None => return Err(Unlike::Unreadable("a request of HTTP/0.9")),
        Some(_) => return Err(VERSION),
    };
    Ok(is_whole.then_some(Line { method, is_1_1 }))
}

/// A target that names no host: a path with a query, or `*` (RFC 9112, 3.2). What clients
/// leave unquoted in these is let be, but for what ends or splits a target for some servers.
fn check_target(method: &[u8], target: &[u8], is_whole: bool, asked: &Asked) -> Result<(), Unlike> {
    match target {
        [b'/', ..] => {}
        b"*" if method == b"PRI" => return Err(Unlike::Http2),
        b"*" if method == b"OPTIONS" => return Ok(()),
        [] if !is_whole => return Ok(()),
        _ => return absolute(target, is_whole, asked),
    }
    let bare = |byte: &u8| byte.is_ascii_graphic() && !b"\"#<>\\".contains(byte);
    let quoted = |rest: &[u8]| {
        let two = rest.get(1..3).unwrap_or(rest.get(1..).unwrap_or_default());
        (two.len() == 2 || !is_whole) && two.iter().all(u8::is_ascii_hexdigit)
    };
    let percents = target.iter().enumerate().filter(|(_, byte)| **byte == b'%');
    let mut quotes = percents.map(|(at, _)| target.get(at..).unwrap_or_default());
    match target.iter().all(bare) && quotes.all(quoted) {
        true => Ok(()),
        false => Err(TARGET),
    }
}

/// What proxies are asked, `http://host/path`; servers differ on whether its host counts.
fn absolute(target: &[u8], is_whole: bool, asked: &Asked) -> Result<(), Unlike> {
    let scheme = target.windows(3).take(SCHEME_BYTES_MAX).position(|part| part == b"://");
    let Some(scheme) = scheme else {
        let may_come = !is_whole && target.len() < SCHEME_BYTES_MAX;
        return if may_come { Ok(()) } else { Err(Unlike::Unreadable(REQUEST_LINE)) };
    };
    if !is_whole {
        return Ok(());
    }
    let rest = target.get(scheme + 3..).unwrap_or_default();
    let authority = rest.split(|byte| b"/?#\\".contains(byte)).next().unwrap_or_default();
    check_host(authority, asked)?;
    Err(Unlike::Unreadable("a target of HTTP that names its host, as for proxies,"))
}

/// Characters of a field; servers differ on all others, some of which end lines for some.
fn check_text(line: &[u8]) -> Result<(), Unlike> {
    match line.iter().all(|byte| matches!(byte, b'\t' | 0x20..=0x7e)) {
        true => Ok(()),
        false => Err(Unlike::Unreadable("a character in a head of HTTP")),
    }
}

/// `value` must be the granted name, with its port or without one.
fn check_host(value: &[u8], asked: &Asked) -> Result<(), Unlike> {
    let (name, port) = (asked.name.as_bytes(), format!(":{}", asked.port));
    if value == name || value.strip_prefix(name) == Some(port.as_bytes()) {
        return Ok(());
    }
    let host = value.strip_suffix(port.as_bytes()).unwrap_or(value);
    match host.strip_suffix(b".").unwrap_or(host).eq_ignore_ascii_case(name) {
        true => Err(Unlike::Spelling(printable(value))),
        false => Err(Unlike::Host(printable(value))),
    }
}

/// What the fields of a head say.
#[derive(Default)]
struct Fields {
    has_host: bool,
    length: Option<u64>,
    is_chunked: bool,
    /// What is wished for with `Upgrade`.
    upgrade: Option<Vec<u8>>,
    connection_upgrades: bool,
    expects: bool,
}

impl Fields {
    fn add(&mut self, line: &[u8], asked: &Asked) -> Result<(), Unlike> {
        let colon = line.iter().position(|byte| *byte == b':').ok_or(FIELD)?;
        let (name, value) = line.split_at_checked(colon).unwrap_or_default();
        if !is_token(name) {
            return Err(FIELD);
        }
        let name = String::from_utf8_lossy(name).to_ascii_lowercase();
        // Servers that hand fields on as variables of an environment write all of these alike.
        let dashed = name.replace(['_', '.', '~'], "-");
        if dashed != name && FRAMING.contains(&dashed.as_str()) {
            return Err(FIELD);
        }
        // Nothing but spaces may stand before what decides something.
        let value = value.get(1..).unwrap_or_default();
        let spaces = value.iter().take_while(|byte| **byte == b' ').count();
        let value = value.get(spaces..).unwrap_or_default();
        match dashed.as_str() {
            "host" if self.has_host => return Err(Unlike::NoHost),
            "host" => {
                check_host(value, asked)?;
                self.has_host = true;
            }
            "content-length" if self.length.is_some() => return Err(LENGTH),
            "content-length" => self.length = Some(length(value)?),
            "transfer-encoding" if self.is_chunked || value != b"chunked" => return Err(LENGTH),
            "transfer-encoding" => self.is_chunked = true,
            "upgrade" if self.upgrade.is_some() => return Err(UPGRADE),
            "upgrade" => self.upgrade = Some(value.to_ascii_lowercase()),
            "expect" if self.expects || !value.eq_ignore_ascii_case(b"100-continue") => {
                return Err(Unlike::Unreadable("what a request of HTTP expects"));
            }
            "expect" => self.expects = true,
            "connection" => self.connection(value)?,
            other if OF_PROXIES.contains(&other) => {
                return Err(Unlike::Unreadable("a field by which proxies name a host"));
            }
            _ => {}
        }
        Ok(())
    }

    /// Fields that are listed here proxies take out, so what decides must not be among them.
    fn connection(&mut self, value: &[u8]) -> Result<(), Unlike> {
        for option in value.split(|byte| *byte == b',') {
            let option = option.trim_ascii().to_ascii_lowercase();
            let is_framing = FRAMING.iter().any(|name| name.as_bytes() == option);
            if is_framing || !(option.is_empty() || is_token(&option)) {
                return Err(FIELD);
            }
            self.connection_upgrades |= option == b"upgrade";
        }
        Ok(())
    }

    fn rest(&self, line: &Line<'_>, is_first: bool) -> Result<Rest, Unlike> {
        if !self.has_host {
            return Err(Unlike::NoHost);
        }
        if self.is_chunked && (self.length.is_some() || !line.is_1_1) {
            return Err(LENGTH);
        }
        let body = match self.length {
            _ if self.is_chunked => Rest::Chunks,
            Some(length @ 1..) => Rest::Body(length),
            Some(0) | None => Rest::Nothing,
        };
        match self.upgrade.as_deref() {
            None => Ok(body),
            // Its streams would name hosts of their own.
            Some(to) if to.starts_with(b"h2") => Err(Unlike::Http2),
            Some(b"websocket") => {
                let is_plain = line.is_1_1 && line.method == b"GET" && body == Rest::Nothing;
                match is_plain && is_first && self.connection_upgrades {
                    true => Ok(Rest::Websocket),
                    false => Err(UPGRADE),
                }
            }
            Some(_) => Err(UPGRADE),
        }
    }
}

/// Digits alone, and no zeros before them.
fn length(value: &[u8]) -> Result<u64, Unlike> {
    let is_number = value.iter().all(u8::is_ascii_digit)
        && (1..=LENGTH_DIGITS_MAX).contains(&value.len())
        && (value.len() == 1 || value.first() != Some(&b'0'));
    let text = std::str::from_utf8(value).ok().filter(|_| is_number);
    text.and_then(|text| text.parse().ok()).ok_or(LENGTH)
}
