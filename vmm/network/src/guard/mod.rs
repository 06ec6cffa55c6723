//! Whether what a guest says on a stream is for the host that was dialled:
//! the server name of TLS and the host of HTTP/1 must be the granted name. What
//! cannot be read as one of the two does not go on.
//!
//! ```text
//! First --0x16--> Tls: hello, the server's answer, hello again -> Open
//!                   --a host with secrets--> Opened: TLS ends here (see stack/opened.rs)
//!       --a request line--> Http: head -> body, chunks -> head -> ...
//!                                      -> upgrade that the server accepted -> Open
//!       --anything else, silence, or a server that speaks first--> an error
//! ```
//! Heads of HTTP get the cell's secrets for that host on their way.
//!
//! The granted name is what was dialled, whatever is said here; this keeps a
//! server of many names from being asked for its others. What is encrypted
//! cannot be seen: the host inside TLS is not checked, unless it is opened.
//! Nothing of this holds for a raw grant, an address, or datagrams.

mod head;
mod hello;
mod http;
mod tls;
mod unlike;

use std::time::{Duration, Instant};

use crate::authority::Opener;
use crate::secrets::Secrets;
use crate::stack::stream::Moved;
pub use unlike::Unlike;

/// Bytes that are held back until they can be judged.
pub const HELD_MAX: usize = 64 << 10;
/// How long a guest may take until the first thing that it says is understood.
pub const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Whom a stream must be for, in the spelling that is asked for.
#[derive(Clone, Debug)]
struct Asked {
    /// In lower case.
    name: String,
    port: u16,
}

/// What may be spoken.
#[derive(Debug)]
enum Spoken {
    Either,
    /// TLS, which is opened.
    Tls(Box<Opener>),
    /// HTTP/1, in TLS that is opened.
    Http,
}

#[derive(Debug)]
enum State {
    /// Nothing has gone on; how far the first head was read, if it is one.
    First(http::State),
    Http(http::State),
    Tls(tls::State),
    Open,
    /// TLS is to be opened, or is.
    Opened,
}

/// What a guest may say on one stream.
#[derive(Debug)]
pub struct Guard {
    asked: Asked,
    spoken: Spoken,
    state: State,
    held: Vec<u8>,
    /// Bytes at the start of `held` that have been judged.
    ready: usize,
    secrets: Secrets,
    /// Names of the secrets that were put in and not told of yet.
    given: Vec<String>,
    /// Until when something must have been understood.
    until: Option<Instant>,
}

impl Guard {
    /// Lets everything through.
    pub fn open() -> Self {
        let guard = Self::new("", 0, Secrets::default(), Spoken::Either);
        Self { state: State::Open, until: None, ..guard }
    }

    /// For a stream to `name`, in lower case, and `port`. Requests of plain HTTP may
    /// get `secrets`; where there is an `opener` it must be TLS, which is opened.
    pub fn of(name: &str, port: u16, secrets: Secrets, opener: Option<Opener>) -> Self {
        let spoken = opener.map_or(Spoken::Either, |opener| Spoken::Tls(Box::new(opener)));
        Self::new(name, port, secrets, spoken)
    }

    /// For what is said in TLS that is opened.
    pub fn inside(name: &str, port: u16, secrets: Secrets) -> Self {
        Self::new(name, port, secrets, Spoken::Http)
    }

    fn new(name: &str, port: u16, secrets: Secrets, spoken: Spoken) -> Self {
        Self {
            asked: Asked { name: name.to_owned(), port },
            spoken,
            state: State::First(http::State::default()),
            held: Vec::new(),
            ready: 0,
            secrets,
            given: Vec::new(),
            until: Some(Instant::now() + SILENCE_MAX),
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

    /// Whether nothing will be held back any more.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open) && self.held.is_empty()
    }

    /// Whether bytes wait that may go on.
    pub fn has_judged(&self) -> bool {
        self.ready > 0
    }

    /// How many bytes may be held back beside those that are.
    pub fn room(&self) -> usize {
        HELD_MAX.saturating_sub(self.held.len())
    }

    /// Takes bytes of the guest, no more than there is room for, and judges what
    /// is held back.
    ///
    /// # Errors
    /// Where they must not go on; nor may anything after them.
    pub fn hold(&mut self, bytes: &[u8]) -> Result<(), Unlike> {
        self.held.extend_from_slice(bytes);
        self.judge()
    }

    /// The guest has ended its half of the stream.
    ///
    /// # Errors
    /// Where it did in the middle of what must be judged as a whole.
    pub fn end(&self) -> Result<(), Unlike> {
        match !self.waits() && self.held.len() > self.ready {
            true => Err(Unlike::Unreadable("what ends before it can be judged")),
            false => Ok(()),
        }
    }

    /// What opens the stream's TLS, if it is to be opened, and what was held back of it.
    pub(crate) fn opener(&mut self) -> Option<(Opener, Vec<u8>)> {
        if !matches!(self.state, State::Opened) {
            return None;
        }
        match std::mem::replace(&mut self.spoken, Spoken::Either) {
            Spoken::Tls(opener) => Some((*opener, std::mem::take(&mut self.held))),
            _ => None,
        }
    }

    /// Gives `write` what has been judged.
    pub(crate) fn pass_on(&mut self, write: impl FnOnce(&[u8]) -> Moved) -> Moved {
        let moved = write(self.held.get(..self.ready).unwrap_or_default());
        if let Moved::Bytes(count) = moved {
            self.held.drain(..count);
            self.ready -= count;
        }
        moved
    }

    /// Takes what has been judged.
    pub fn passed(&mut self) -> Vec<u8> {
        let passed = self.held.drain(..self.ready).collect();
        self.ready = 0;
        passed
    }

    /// When [`Guard::expire`] wants to be asked.
    pub fn due(&self) -> Option<Instant> {
        self.until
    }

    /// # Errors
    /// Where the guest has said nothing that could be judged, for too long.
    pub fn expire(&self, now: Instant) -> Result<(), Unlike> {
        match self.until {
            Some(until) if until <= now => Err(Unlike::Silence),
            _ => Ok(()),
        }
    }

    /// Hears what the peer says, where that decides what the guest may say next.
    /// What is held back is to be judged again after it.
    ///
    /// # Errors
    /// Where what it says belongs to another protocol.
    pub fn answered(&mut self, bytes: &[u8]) -> Result<(), Unlike> {
        match &mut self.state {
            State::First(_) if !bytes.is_empty() => return Err(Unlike::ServerFirst),
            State::Http(state) => state.answered(bytes),
            State::Tls(state) => state.answered(bytes)?,
            State::First(_) | State::Open | State::Opened => {}
        }
        Ok(())
    }

    /// Goes on judging until more bytes are needed.
    fn judge(&mut self) -> Result<(), Unlike> {
        loop {
            let fresh = self.held.get(self.ready..).unwrap_or_default();
            let (count, next) = match &mut self.state {
                State::Open => (fresh.len(), None),
                State::Opened => return Ok(()),
                State::First(_) if fresh.is_empty() => return Ok(()),
                State::First(_) => match self.begin()? {
                    Some((count, next)) => (count, Some(next)),
                    None => return self.want_more(),
                },
                State::Http(state) => match state.step(fresh, &self.asked)? {
                    Some((count, http::Next::Websocket)) => (count, Some(State::Open)),
                    Some((count, http::Next::Go)) => (count, None),
                    Some((count, http::Next::Head { expects })) => {
                        (self.fill(count, expects)?, None)
                    }
                    None => return self.want_more(),
                },
                State::Tls(state) => match state.step(fresh, &self.asked)? {
                    Some((count, is_open)) => (count, is_open.then_some(State::Open)),
                    None => return self.want_more(),
                },
            };
            let is_done = count == 0 && next.is_none();
            self.ready += count;
            if let Some(next) = next {
                self.state = next;
                self.until = None;
            }
            if is_done {
                return Ok(());
            }
        }
    }

    /// Whether what comes next depends on what the peer answers.
    fn waits(&self) -> bool {
        match &self.state {
            State::Http(state) => state.waits(),
            State::Tls(state) => state.waits(),
            State::First(_) | State::Open | State::Opened => false,
        }
    }

    /// More is needed to judge what is held back, and there must be room for it.
    fn want_more(&self) -> Result<(), Unlike> {
        match !self.waits() && self.held.len() - self.ready >= HELD_MAX {
            true => Err(Unlike::Unreadable("what is held back and has no end")),
            false => Ok(()),
        }
    }

    /// Judges what the guest begins with; how many bytes may go on, and what follows.
    fn begin(&mut self) -> Result<Option<(usize, State)>, Unlike> {
        let fresh = self.held.get(self.ready..).unwrap_or_default();
        let is_tls = fresh.first() == Some(&tls::HANDSHAKE);
        match (&self.spoken, is_tls) {
            (Spoken::Either | Spoken::Tls(_), true) => {
                let Some(count) = hello::first(fresh, &self.asked)? else { return Ok(None) };
                Ok(Some(match self.spoken {
                    // It is read once more, by who answers it.
                    Spoken::Tls(_) => (0, State::Opened),
                    _ => (count, State::Tls(tls::State::default())),
                }))
            }
            (Spoken::Tls(_), false) => Err(Unlike::NotTls),
            (Spoken::Http, true) => Err(Unlike::NotHttp),
            (Spoken::Either | Spoken::Http, false) => {
                let foreign = match self.spoken {
                    Spoken::Http => Unlike::NotHttp,
                    _ => Unlike::Foreign,
                };
                let State::First(state) = &mut self.state else { return Ok(None) };
                let step = match state.step(fresh, &self.asked) {
                    Err(Unlike::Unreadable(head::REQUEST_LINE)) => return Err(foreign),
                    step => step?,
                };
                let Some((count, http::Next::Head { expects })) = step else { return Ok(None) };
                let state = std::mem::take(state);
                Ok(Some((self.fill(count, expects)?, State::Http(state))))
            }
        }
    }

    /// Puts secrets into the head that the next `count` bytes are, and takes out the
    /// field by which it `expects` an answer before its body; its length from then on.
    fn fill(&mut self, count: usize, expects: bool) -> Result<usize, Unlike> {
        let end = self.ready + count;
        let head = self.held.get(self.ready..end).unwrap_or_default();
        let bare = expects.then(|| head::without_expect(head));
        let filled = self.secrets.fill(bare.as_deref().unwrap_or(head));
        let head = match filled.map_err(|_| Unlike::Secrets)? {
            Some(filled) => {
                self.given.extend(filled.names);
                Some(filled.head)
            }
            None => bare,
        };
        let Some(head) = head else { return Ok(count) };
        let length = head.len();
        self.held.splice(self.ready..end, head);
        Ok(length)
    }
}

#[cfg(test)]
mod tests;
