//! The messages by which TLS begins: the client's hello, as far as the server's
//! name, and the server's, as far as what comes after it (RFC 8446, 4.1 and 5.1;
//! RFC 6066, 3).

use super::unlike::printable;
use super::{Asked, Unlike};

/// Kinds of records.
pub const CHANGE_CIPHER_SPEC: u8 = 20;
pub const ALERT: u8 = 21;
pub const HANDSHAKE: u8 = 22;
pub const APPLICATION_DATA: u8 = 23;
/// Bytes of a record that is not encrypted, and of one that is (RFC 5246, 6.2.3).
const PLAIN_BYTES_MAX: usize = 1 << 14;
pub const RECORD_BYTES_MAX: usize = PLAIN_BYTES_MAX + 2048;
/// Bytes of a hello in all its records.
const HELLO_BYTES_MAX: usize = 32 << 10;

const CLIENT_HELLO: u8 = 1;
const SERVER_HELLO: u8 = 2;
const SERVER_NAME: u16 = 0;
const SUPPORTED_VERSIONS: u16 = 43;
const TLS_1_3: u16 = 0x0304;
/// What hides a server's name: drafts of RFC 9849 and of what was before it.
const HIDING: [u16; 2] = [0xfe0d, 0xffce];
const HOST_NAME: u8 = 0;
/// The `random` of a HelloRetryRequest (RFC 8446, 4.1.3).
const RETRY: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
    0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];

const RECORD: Unlike = Unlike::Unreadable("a record of TLS");
const HELLO: Unlike = Unlike::Unreadable("the first message of TLS");
const ANSWER: Unlike = Unlike::Unreadable("the server's answer to TLS");

/// One record: its kind, what is in it, and its bytes.
pub struct Record<'a> {
    pub kind: u8,
    pub body: &'a [u8],
    pub bytes: usize,
}

/// The record that `bytes` begin with; `None` where it is not all there.
pub fn record(bytes: &[u8]) -> Result<Option<Record<'_>>, Unlike> {
    let is_head = |part: &[u8]| match part {
        [] => true,
        [kind, rest @ ..] if (CHANGE_CIPHER_SPEC..=APPLICATION_DATA).contains(kind) => {
            // TLS 1.0, 1.1, and 1.2, by whose number 1.3 goes too.
            matches!(rest, [] | [3] | [3, 1..=3, ..])
        }
        _ => false,
    };
    if !is_head(bytes) {
        return Err(RECORD);
    }
    let [kind, _, _, high, low, rest @ ..] = bytes else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if length == 0 || length > RECORD_BYTES_MAX {
        return Err(RECORD);
    }
    let body = rest.get(..length);
    Ok(body.map(|body| Record { kind: *kind, body, bytes: 5 + length }))
}

/// Puts the first message together from as many records as it takes; how many bytes
/// those are. Nothing may come after it in them where it `is_alone`.
fn message(
    mut bytes: &[u8],
    kind: u8,
    is_alone: bool,
    wrong: &Unlike,
) -> Result<Option<(Vec<u8>, usize)>, Unlike> {
    let (mut message, mut taken) = (Vec::new(), 0);
    loop {
        if message.first().is_some_and(|first| *first != kind) {
            return Err(wrong.clone());
        }
        if let [_, a, b, c, body @ ..] = message.as_slice() {
            let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
            if length > HELLO_BYTES_MAX || (is_alone && body.len() > length) {
                return Err(wrong.clone());
            }
            if let Some(body) = body.get(..length) {
                return Ok(Some((body.to_vec(), taken)));
            }
        }
        if bytes.first().is_some_and(|kind| *kind != HANDSHAKE) {
            return Err(wrong.clone());
        }
        let Some(record) = record(bytes)? else { return Ok(None) };
        if record.body.len() > PLAIN_BYTES_MAX {
            return Err(RECORD);
        }
        message.extend_from_slice(record.body);
        taken += record.bytes;
        bytes = bytes.get(record.bytes..).unwrap_or_default();
    }
}

/// Judges the client's hello with which `bytes` begin; how many of them it is, or `None`
/// where it is not all there.
pub fn first(bytes: &[u8], asked: &Asked) -> Result<Option<usize>, Unlike> {
    let Some((hello, taken)) = message(bytes, CLIENT_HELLO, true, &HELLO)? else {
        return Ok(None);
    };
    let name = server_name(&hello)?.ok_or(Unlike::NoServerName)?;
    let granted = asked.name.as_bytes();
    match name.strip_suffix(b".").unwrap_or(name).eq_ignore_ascii_case(granted) {
        true if name == granted => Ok(Some(taken)),
        true => Err(Unlike::Spelling(printable(name))),
        false => Err(Unlike::ServerName(printable(name))),
    }
}

/// What a server has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It wants another hello.
    Retry,
    /// Nothing that is not encrypted comes after it.
    Tls13,
    /// Up to TLS 1.2: the client goes on unencrypted for a while.
    Older,
}

/// The server's answer with which `bytes` begin, after alerts that only warn; `None` where
/// it is not all there.
pub fn answer(mut bytes: &[u8]) -> Result<Option<Answer>, Unlike> {
    while bytes.first() == Some(&ALERT) {
        let Some(alert) = record(bytes).map_err(|_| ANSWER)? else { return Ok(None) };
        bytes = bytes.get(alert.bytes..).unwrap_or_default();
    }
    let read = message(bytes, SERVER_HELLO, false, &ANSWER).map_err(|_| ANSWER)?;
    let Some((hello, _)) = read else { return Ok(None) };
    answered(&hello).map(Some).ok_or(ANSWER)
}

fn answered(hello: &[u8]) -> Option<Answer> {
    let mut fields = Fields(hello);
    fields.u16()?;
    let random = fields.take(32)?;
    fields.short()?;
    fields.take(3)?;
    let mut version = None;
    let mut extensions = if fields.0.is_empty() { Fields(&[]) } else { fields.long()? };
    while !extensions.0.is_empty() {
        let (kind, mut extension) = (extensions.u16()?, extensions.long()?);
        if kind == SUPPORTED_VERSIONS {
            version = extension.u16();
        }
    }
    Some(match version {
        Some(TLS_1_3) if random == RETRY => Answer::Retry,
        Some(TLS_1_3) => Answer::Tls13,
        _ => Answer::Older,
    })
}

/// Takes fields off the front; `None` past the end.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().ok()?))
    }

    fn short(&mut self) -> Option<Fields<'a>> {
        let length = self.u8()?;
        self.take(length.into()).map(Fields)
    }

    fn long(&mut self) -> Option<Fields<'a>> {
        let length = self.u16()?;
        self.take(length.into()).map(Fields)
    }
}

/// The one server name of a client's hello; `None` where there is none or more.
fn server_name(hello: &[u8]) -> Result<Option<&[u8]>, Unlike> {
    let extensions = extensions(hello).ok_or(HELLO)?;
    if extensions.iter().any(|(kind, _)| HIDING.contains(kind)) {
        return Err(Unlike::HiddenServerName);
    }
    for (at, (kind, _)) in extensions.iter().enumerate() {
        if extensions.iter().skip(at + 1).any(|(other, _)| other == kind) {
            return Err(if *kind == SERVER_NAME { Unlike::NoServerName } else { HELLO });
        }
    }
    let named = extensions.iter().find(|(kind, _)| *kind == SERVER_NAME);
    Ok(named.and_then(|(_, names)| one_name(names)))
}

/// The only entry of a list of names, if it is a host's.
fn one_name(names: &[u8]) -> Option<&[u8]> {
    let mut fields = Fields(names);
    let mut list = fields.long()?;
    let (kind, name) = (list.u8()?, list.long()?);
    let is_one = kind == HOST_NAME && !name.0.is_empty();
    (is_one && list.0.is_empty() && fields.0.is_empty()).then_some(name.0)
}

/// The extensions of a client's hello that has all that there must be and no more.
fn extensions(hello: &[u8]) -> Option<Vec<(u16, &[u8])>> {
    let mut fields = Fields(hello);
    if !(0x0301..=0x0303).contains(&fields.u16()?) {
        return None;
    }
    fields.take(32)?;
    let (session, suites, compressions) = (fields.short()?, fields.long()?, fields.short()?);
    let is_sound = session.0.len() <= 32
        && !suites.0.is_empty()
        && suites.0.len().is_multiple_of(2)
        && !compressions.0.is_empty();
    let mut list = fields.long().filter(|_| is_sound && fields.0.is_empty())?;
    let mut extensions = Vec::new();
    while !list.0.is_empty() {
        extensions.push((list.u16()?, list.long()?.0));
    }
    Some(extensions)
}
