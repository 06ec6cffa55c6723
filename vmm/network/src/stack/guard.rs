//! Whether what a guest says on a stream is for the host that was dialled:
//! the server name of TLS and the host of HTTP must be the granted name.
//!
//! ```text
//! First --0x16--> TLS: the first message is read, then Open
//!                   --a host with secrets--> Opened: TLS ends here (see opened.rs)
//!       --a line with HTTP/--> Head -> Body, chunks -> Head -> ...
//!       --anything else--> Open
//! ```
//! Heads of HTTP get the cell's secrets for that host on their way.
//!
//! The granted name is what was dialled, whatever is said here; this keeps a
//! server of many names from being asked for its others. What is encrypted
//! cannot be seen: the host inside TLS is not checked, unless it is opened.

use smoltcp::socket::tcp::Socket;

use super::opened::Opened;
use super::rate::Rate;
use super::stream::Moved;
use super::{http, tls};
use crate::authority::Opener;
use crate::secrets::Secrets;

/// Bytes that are held back until they can be judged.
pub const HELD_MAX: usize = 64 << 10;

/// What does not fit the granted name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unlike {
    #[error("TLS asks for the server {0}")]
    ServerName(String),
    #[error("HTTP asks for the host {0}")]
    Host(String),
    #[error("HTTP asks for a tunnel (CONNECT)")]
    Tunnel,
    #[error("HTTP asks for more secrets than one request has")]
    Secrets,
    #[error("{0} cannot be checked")]
    Unreadable(&'static str),
    /// In opened TLS.
    #[error("TLS of the host cannot be trusted: {0}")]
    Server(String),
    #[error("TLS of the cell ended: {0}")]
    Guest(String),
}

#[derive(Debug)]
enum State {
    First,
    Http(http::State),
    Open,
    Opened,
}

/// What a guest may say on one stream.
#[derive(Debug)]
pub struct Guard {
    name: String,
    state: State,
    held: Vec<u8>,
    /// Bytes at the start of `held` that have been judged.
    ready: usize,
    secrets: Secrets,
    /// Names of the secrets that were put in and not told of yet.
    given: Vec<String>,
    /// Opens TLS, where the name has secrets over it.
    opener: Option<Opener>,
}

impl Guard {
    /// Lets everything through.
    pub fn open() -> Self {
        Self { state: State::Open, ..Self::of("", Secrets::default(), None) }
    }

    /// For a stream to `name`, in lower case, which may get `secrets`; TLS is
    /// opened by `opener`.
    pub fn of(name: &str, secrets: Secrets, opener: Option<Opener>) -> Self {
        Self {
            name: name.to_owned(),
            state: State::First,
            held: Vec::new(),
            ready: 0,
            secrets,
            given: Vec::new(),
            opener,
        }
    }

    /// The names of the secrets that were put into requests since the last call.
    pub fn given(&mut self) -> Vec<String> {
        std::mem::take(&mut self.given)
    }

    /// Whether nothing is held back.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether bytes wait that may go on.
    pub fn has_judged(&self) -> bool {
        self.ready > 0
    }

    /// Takes bytes of the guest where they must be judged; whether any go
    /// through the guard at all.
    pub fn take_in(&mut self, socket: &mut Socket<'_>, rate: &Rate) -> Result<bool, Unlike> {
        if matches!(self.state, State::Open) && self.held.is_empty() {
            return Ok(false);
        }
        while socket.can_recv() && self.room() > 0 && !rate.is_empty() {
            let room = self.room();
            let taken = socket.recv(|bytes| {
                let bytes = bytes.get(..bytes.len().min(room)).unwrap_or_default();
                self.held.extend_from_slice(bytes);
                (bytes.len(), bytes.len())
            });
            if taken.unwrap_or(0) == 0 {
                break;
            }
        }
        self.judge()?;
        Ok(true)
    }

    /// How many bytes may be held back beside those that are.
    pub fn room(&self) -> usize {
        HELD_MAX.saturating_sub(self.held.len())
    }

    /// Takes bytes of the guest, no more than there is room for.
    pub fn hold(&mut self, bytes: &[u8]) -> Result<(), Unlike> {
        self.held.extend_from_slice(bytes);
        self.judge()
    }

    /// The stream's TLS, if it is to be opened, with what was held back of it.
    pub fn opened(&mut self) -> Option<Result<Opened, Unlike>> {
        let opener = self.opener.take_if(|_| matches!(self.state, State::Opened))?;
        Some(Opened::new(opener, std::mem::take(&mut self.held)))
    }

    /// Gives `write` what has been judged.
    pub fn pass_on(&mut self, write: impl FnOnce(&[u8]) -> Moved) -> Moved {
        let moved = write(self.held.get(..self.ready).unwrap_or_default());
        if let Moved::Bytes(count) = moved {
            self.held.drain(..count);
            self.ready -= count;
        }
        moved
    }

    /// The peer's answer to a wish to speak another protocol, if one is awaited.
    pub fn answered(&mut self, bytes: &[u8]) {
        if let State::Http(state @ http::State::Upgrade) = &mut self.state {
            match bytes.starts_with(b"HTTP/1.1 101 ") {
                true => self.state = State::Open,
                false => *state = http::State::Head,
            }
        }
    }

    /// Goes on judging until more bytes are needed.
    fn judge(&mut self) -> Result<(), Unlike> {
        loop {
            let fresh = self.held.get(self.ready..).unwrap_or_default();
            let judged = match &mut self.state {
                State::Open => {
                    self.ready = self.held.len();
                    return Ok(());
                }
                State::Opened => return Ok(()),
                State::First if fresh.is_empty() => return Ok(()),
                State::First => match kind(fresh) {
                    None => None,
                    Some(Kind::Tls) => tls::server_names(fresh)?
                        .map(|names| self.check_names(&names))
                        .transpose()?
                        .map(|()| (0, self.opener.as_ref().map_or(State::Open, |_| State::Opened))),
                    Some(Kind::Http) => Some((0, State::Http(http::State::Head))),
                    Some(Kind::Other) => Some((0, State::Open)),
                },
                State::Http(state) => {
                    state.step(fresh, &self.name)?.map(|(count, next)| (count, State::Http(next)))
                }
            };
            match judged {
                Some((count, next)) => {
                    let is_head = matches!(self.state, State::Http(http::State::Head));
                    self.ready += if is_head { self.fill(count)? } else { count };
                    self.state = next;
                }
                None if fresh.len() >= HELD_MAX => {
                    return Err(Unlike::Unreadable("what begins the connection"));
                }
                None => return Ok(()),
            }
        }
    }

    /// Puts secrets into the head that the next `count` bytes are; its length
    /// from then on.
    fn fill(&mut self, count: usize) -> Result<usize, Unlike> {
        let end = self.ready + count;
        let head = self.held.get(self.ready..end).unwrap_or_default();
        let Some(filled) = self.secrets.fill(head).map_err(|_| Unlike::Secrets)? else {
            return Ok(count);
        };
        let length = filled.head.len();
        self.held.splice(self.ready..end, filled.head);
        self.given.extend(filled.names);
        Ok(length)
    }

    fn check_names(&self, names: &[String]) -> Result<(), Unlike> {
        match names.iter().find(|name| !same_name(name, &self.name)) {
            Some(other) => Err(Unlike::ServerName(printable(other))),
            None => Ok(()),
        }
    }
}

/// Whether `said`, in any spelling, is the granted name.
pub fn same_name(said: &str, granted: &str) -> bool {
    said.strip_suffix('.').unwrap_or(said).eq_ignore_ascii_case(granted)
}

/// For the log: short, and without surprises.
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| c.is_ascii_graphic()).take(100).collect()
}

enum Kind {
    Tls,
    Http,
    Other,
}

/// Bytes of a first line that may still be one of HTTP.
const LINE_BYTES_MAX: usize = 16 << 10;

/// What kind of protocol begins like this; `None` where that cannot be said yet.
fn kind(bytes: &[u8]) -> Option<Kind> {
    match bytes {
        [0x16] => return None,
        [0x16, 3, ..] => return Some(Kind::Tls),
        _ => {}
    }
    // Servers pass over empty lines before a request (RFC 9112, 2.2).
    let start = bytes.iter().position(|byte| !matches!(byte, b'\r' | b'\n'))?;
    let bytes = bytes.get(start..)?;
    let end = bytes.iter().position(|byte| *byte == b'\n');
    let line = bytes.get(..end.unwrap_or(bytes.len()))?;
    let text = |byte: &u8| matches!(byte, b'\t' | b'\r' | 0x20..=0x7e | 0x80..);
    if !line.iter().all(text) || line.len() > LINE_BYTES_MAX {
        return Some(Kind::Other);
    }
    let is_http = line.windows(5).any(|part| part.eq_ignore_ascii_case(b"HTTP/"));
    match end {
        Some(_) if is_http => Some(Kind::Http),
        Some(_) => Some(Kind::Other),
        None => None,
    }
}

#[cfg(test)]
mod tests;
