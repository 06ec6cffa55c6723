//! TLS that is passed through: each hello of the client is judged, and nothing that
//! is not encrypted comes after the last one but what belongs to the handshake.
//!
//! ```text
//! hello ─> server's answer ── TLS 1.3 ─────────> alerts, one change of ciphers, encrypted: open
//!                          ── asks again ─ hello ─> the same
//!                          ── TLS 1.2, older ──> certificate, key exchange, change of ciphers: open
//! ```
//! Before the server has answered nothing follows the hello, so bytes that another
//! protocol's server would take for something are not passed on.

pub use super::hello::HANDSHAKE;
use super::hello::{self, ALERT, APPLICATION_DATA, Answer, CHANGE_CIPHER_SPEC};
use super::{Asked, Unlike};

/// Messages of a client after its hello, up to TLS 1.2 (RFC 5246, 7.4).
const CERTIFICATE: u8 = 11;
const CERTIFICATE_VERIFY: u8 = 15;
const CLIENT_KEY_EXCHANGE: u8 = 16;
/// Bytes of the server until its answer must be understood.
const ANSWER_BYTES_MAX: usize = 48 << 10;

const RECORD: Unlike = Unlike::Unreadable("a record of TLS after the first message");

/// Where in the handshake a stream is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// A hello was passed on; what of the answer was heard.
    Asked(Vec<u8>),
    /// The server wants another hello.
    Again,
    /// TLS 1.3: what comes is encrypted.
    Tls13,
    /// The client's part of the handshake, and how many bytes its present message lacks.
    Older(Message),
}

/// How far a message in records has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    head: Vec<u8>,
    left: usize,
}

impl Default for State {
    fn default() -> Self {
        Self::Asked(Vec::new())
    }
}

impl State {
    /// How many of `bytes` may go on, and whether all after them may; `None` where more
    /// bytes are needed to say.
    pub fn step(&mut self, bytes: &[u8], asked: &Asked) -> Result<Option<(usize, bool)>, Unlike> {
        if bytes.is_empty() || matches!(self, Self::Asked(_)) {
            return Ok(None);
        }
        if matches!(self, Self::Again) && bytes.first() == Some(&HANDSHAKE) {
            let hello = hello::first(bytes, asked)?;
            return Ok(hello.map(|count| {
                *self = Self::Tls13;
                (count, false)
            }));
        }
        let Some(record) = hello::record(bytes)? else { return Ok(None) };
        let is_open = match (&mut *self, record.kind) {
            (_, ALERT) => false,
            (Self::Again | Self::Tls13, CHANGE_CIPHER_SPEC) if record.body == [1] => false,
            // Data that was sent early, which the server passes over.
            (Self::Again, APPLICATION_DATA) => false,
            (Self::Tls13, APPLICATION_DATA) => true,
            (Self::Older(message), HANDSHAKE) => {
                message.take(record.body)?;
                false
            }
            (Self::Older(message), CHANGE_CIPHER_SPEC)
                if record.body == [1] && *message == Message::default() =>
            {
                true
            }
            _ => return Err(RECORD),
        };
        Ok(Some((record.bytes, is_open)))
    }

    /// Whether what comes next depends on the server's answer.
    pub fn waits(&self) -> bool {
        matches!(self, Self::Asked(_))
    }

    /// Hears the server's answer.
    pub fn answered(&mut self, bytes: &[u8]) -> Result<(), Unlike> {
        let Self::Asked(heard) = self else { return Ok(()) };
        let room = ANSWER_BYTES_MAX.saturating_sub(heard.len());
        heard.extend(bytes.iter().take(room));
        let answer = hello::answer(heard)?;
        if answer.is_none() && heard.len() >= ANSWER_BYTES_MAX {
            return Err(Unlike::Unreadable("the server's answer to TLS"));
        }
        match answer {
            None => {}
            Some(Answer::Retry) => *self = Self::Again,
            Some(Answer::Tls13) => *self = Self::Tls13,
            Some(Answer::Older) => *self = Self::Older(Message::default()),
        }
        Ok(())
    }
}

impl Message {
    /// Passes over messages that belong to the handshake and are no hello.
    fn take(&mut self, mut bytes: &[u8]) -> Result<(), Unlike> {
        while let Some((first, rest)) = bytes.split_first() {
            if self.left > 0 {
                let count = self.left.min(bytes.len());
                self.left -= count;
                bytes = bytes.get(count..).unwrap_or_default();
                continue;
            }
            self.head.push(*first);
            bytes = rest;
            let kind = self.head.first();
            if !matches!(kind, Some(&CERTIFICATE | &CERTIFICATE_VERIFY | &CLIENT_KEY_EXCHANGE)) {
                return Err(RECORD);
            }
            if let [_, a, b, c] = self.head[..] {
                self.left = u32::from_be_bytes([0, a, b, c]) as usize;
                self.head.clear();
            }
        }
        Ok(())
    }
}
