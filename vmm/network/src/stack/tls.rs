//! The first message of TLS, as far as the server's name (RFC 8446, RFC 6066).

use super::guard::Unlike;

const HANDSHAKE: u8 = 0x16;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const HOST_NAME: u8 = 0;

/// The server names that the client asks for, none where it asks for none.
/// `None` where the message is not all there.
pub fn server_names(bytes: &[u8]) -> Result<Option<Vec<String>>, Unlike> {
    let Some(message) = first_message(bytes)? else { return Ok(None) };
    match hello(&message) {
        Some(names) => Ok(Some(names)),
        None => Err(Unlike::Unreadable("the first message of TLS")),
    }
}

/// Puts the first message together from as many records as it takes.
fn first_message(mut bytes: &[u8]) -> Result<Option<Vec<u8>>, Unlike> {
    let wrong = Unlike::Unreadable("the first record of TLS");
    let mut message = Vec::new();
    loop {
        if let [CLIENT_HELLO, a, b, c, body @ ..] = message.as_slice() {
            let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
            if let Some(body) = body.get(..length) {
                return Ok(Some(body.to_vec()));
            }
        } else if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
            return Err(wrong);
        }
        let [kind, _, _, high, low, rest @ ..] = bytes else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        if *kind != HANDSHAKE || length == 0 {
            return Err(wrong);
        }
        let Some((record, after)) = rest.split_at_checked(length) else { return Ok(None) };
        message.extend_from_slice(record);
        bytes = after;
    }
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

fn hello(message: &[u8]) -> Option<Vec<String>> {
    let mut fields = Fields(message);
    fields.take(2 + 32)?;
    fields.short()?;
    fields.long()?;
    fields.short()?;
    let mut names = Vec::new();
    if fields.0.is_empty() {
        return Some(names);
    }
    let mut extensions = fields.long()?;
    while !extensions.0.is_empty() {
        let kind = extensions.u16()?;
        let mut extension = extensions.long()?;
        if kind == SERVER_NAME {
            let mut list = extension.long()?;
            while !list.0.is_empty() {
                let kind = list.u8()?;
                let name = list.long()?;
                if kind == HOST_NAME {
                    names.push(String::from_utf8_lossy(name.0).into_owned());
                }
            }
        }
    }
    Some(names)
}
