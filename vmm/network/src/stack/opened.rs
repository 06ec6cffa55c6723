//! A stream whose TLS is opened: it ends here, and goes on to the host as TLS of
//! the stack's own, so that requests can be read and get their secrets.
//!
//! ```text
//! guest <── TLS, by the cell's authority ──> guard: judged, filled <── TLS, verified ──> host
//! ```
//! The guest gets no answer before the host's certificate is verified.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use rustls::{ClientConnection, ServerConnection};
use smoltcp::socket::tcp::Socket;

use super::rate::Rate;
use super::stream::Moved;
use crate::authority::Opener;
use crate::guard::{Guard, Unlike};

/// What a guest is told of a host that cannot be verified: the fatal alert
/// bad_certificate, in a record of its own (RFC 8446, 5.1 and 6).
const ALERT: [u8; 7] = [0x15, 3, 3, 0, 2, 2, 42];
const PIECE_BYTES: usize = 16 << 10;

/// Both halves, and what is between them.
pub struct Opened {
    guest: ServerConnection,
    host: ClientConnection,
    guard: Guard,
    /// What the guest said before it was opened.
    first: Vec<u8>,
    guest_ended: bool,
    host_ended: bool,
    end_passed_out: bool,
    end_passed_in: bool,
}

/// Why nothing more can be moved.
pub enum Stop {
    Unlike(Unlike),
    Broken,
}

impl From<Unlike> for Stop {
    fn from(unlike: Unlike) -> Self {
        Self::Unlike(unlike)
    }
}

/// The host's socket, within the cell's rate.
pub struct HostEnd<'a> {
    pub socket: BorrowedFd<'a>,
    pub rate: &'a mut Rate,
    pub readable: &'a mut bool,
    pub writable: &'a mut bool,
    /// Bytes to the host and from it.
    pub moved: (usize, usize),
}

fn later() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}

fn within<T>(result: nix::Result<T>, ready: &mut bool) -> io::Result<T> {
    if matches!(result, Err(Errno::EAGAIN | Errno::EINTR)) {
        *ready = false;
    }
    result.map_err(io::Error::from)
}

impl Read for HostEnd<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let share = self.rate.share(room.len());
        if !*self.readable || share == 0 {
            return Err(later());
        }
        let room = room.get_mut(..share).unwrap_or_default();
        let received = recv(self.socket.as_raw_fd(), room, MsgFlags::MSG_DONTWAIT);
        let count = within(received, self.readable)?;
        self.rate.spend(count);
        self.moved.1 += count;
        Ok(count)
    }
}

impl Write for HostEnd<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let share = self.rate.share(bytes.len());
        if !*self.writable || share == 0 {
            return Err(later());
        }
        let bytes = bytes.get(..share).unwrap_or_default();
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let count = within(send(self.socket.as_raw_fd(), bytes, flags), self.writable)?;
        self.rate.spend(count);
        self.moved.0 += count;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The guest's end, which is smoltcp's.
struct GuestEnd<'a, 'b>(&'a mut Socket<'b>);

impl Read for GuestEnd<'_, '_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        match self.0.can_recv() {
            true => self.0.recv_slice(room).map_err(io::Error::other),
            false if self.0.may_recv() => Err(later()),
            false => Ok(0),
        }
    }
}

impl Write for GuestEnd<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.can_send() {
            true => self.0.send_slice(bytes).map_err(io::Error::other),
            false if self.0.may_send() => Err(later()),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a step moved; nothing where it has to wait.
fn step(result: io::Result<usize>) -> Result<Option<usize>, Stop> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(_) => Err(Stop::Broken),
    }
}

impl Opened {
    /// For a guest that has said `first` and is to be opened by `opener`.
    ///
    /// # Errors
    /// Where TLS cannot be begun with the host.
    pub fn new(opener: Opener, first: Vec<u8>) -> Result<Self, Unlike> {
        let Opener { server, client, name, port, secrets } = opener;
        let failed = |error: rustls::Error| Unlike::Server(error.to_string());
        let host_name = name.to_str().into_owned();
        let mut guest = ServerConnection::new(server).map_err(failed)?;
        let mut host = ClientConnection::new(client, name).map_err(failed)?;
        // Bounded by what is read: nothing is while something waits to be sent.
        guest.set_buffer_limit(None);
        host.set_buffer_limit(None);
        Ok(Self {
            guest,
            host,
            guard: Guard::inside(&host_name, port, secrets),
            first,
            guest_ended: false,
            host_ended: false,
            end_passed_out: false,
            end_passed_in: false,
        })
    }

    /// The guard of what the guest says inside.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// The names of the secrets that were put into requests since the last call.
    pub fn given(&mut self) -> Vec<String> {
        self.guard.given()
    }

    /// Whether the guest has said all, and all of it has been passed on.
    pub fn has_passed_end(&self) -> bool {
        self.end_passed_out && !self.host.wants_write()
    }

    /// Whether something waits for the host to take it.
    pub fn wants_host(&self) -> bool {
        self.host.wants_write()
    }

    /// Moves what can be moved towards the host; how many bytes came or went.
    pub fn move_out(
        &mut self,
        socket: &mut Socket<'_>,
        end: &mut HostEnd<'_>,
    ) -> Result<usize, Stop> {
        let mut total = self.flush_out(end)?;
        // The guest is not heard before the host is known to be the one.
        while !self.host.is_handshaking() && !self.host.wants_write() {
            let heard = self.hear_guest(socket)?;
            self.pass_on()?;
            let sent = self.flush_out(end)?;
            total += heard + sent;
            if heard + sent == 0 {
                break;
            }
        }
        Ok(total)
    }

    fn flush_out(&mut self, end: &mut HostEnd<'_>) -> Result<usize, Stop> {
        let mut total = 0;
        while self.host.wants_write() {
            match step(self.host.write_tls(end))? {
                Some(count) => total += count,
                None => break,
            }
        }
        Ok(total)
    }

    /// Takes records of the guest, as long as what was in them was taken out.
    fn hear_guest(&mut self, socket: &mut Socket<'_>) -> Result<usize, Stop> {
        if self.guest_ended || !self.guest.wants_read() {
            return Ok(0);
        }
        let read = match self.first.is_empty() {
            true => self.guest.read_tls(&mut GuestEnd(socket)),
            false => {
                let mut first = self.first.as_slice();
                let read = self.guest.read_tls(&mut first);
                let left = first.len();
                self.first.drain(..self.first.len() - left);
                read
            }
        };
        let Some(count) = step(read)? else { return Ok(0) };
        let heard = self.guest.process_new_packets();
        let heard = heard.map_err(|error| Unlike::Guest(error.to_string()))?;
        self.guest_ended = count == 0 || heard.peer_has_closed();
        Ok(count)
    }

    /// Has what the guest says judged, and passes on what may go.
    fn pass_on(&mut self) -> Result<(), Stop> {
        let mut piece = [0; PIECE_BYTES];
        loop {
            let room = self.guard.room().min(piece.len());
            let piece = piece.get_mut(..room).unwrap_or_default();
            // At the end of what the guest says, clean or not, nothing comes.
            let count = self.guest.reader().read(piece).unwrap_or(0);
            self.guard.hold(piece.get(..count).unwrap_or_default())?;
            let mut writer = self.host.writer();
            let passed = self.guard.pass_on(|bytes| match writer.write(bytes) {
                Ok(count) => Moved::Bytes(count),
                Err(_) => Moved::Broken,
            });
            match passed {
                Moved::Bytes(0) if count == 0 => break,
                Moved::Broken => return Err(Stop::Broken),
                Moved::Bytes(_) | Moved::Nothing => {}
            }
        }
        if self.guest_ended {
            self.guard.end()?;
        }
        if self.guest_ended && self.guard.is_empty() && !self.end_passed_out {
            self.end_passed_out = true;
            self.host.send_close_notify();
        }
        Ok(())
    }

    /// Moves what can be moved towards the guest; how many bytes came or went.
    pub fn move_in(
        &mut self,
        socket: &mut Socket<'_>,
        end: &mut HostEnd<'_>,
    ) -> Result<usize, Stop> {
        let mut total = self.flush_in(socket)?;
        while !self.guest.wants_write() || self.host.is_handshaking() {
            let heard = match self.hear_host(end) {
                Err(Stop::Unlike(unlike)) if !self.guest_was_answered() => {
                    // Told as well as can be; the stream is cut in any case.
                    let _ = socket.send_slice(&ALERT);
                    return Err(unlike.into());
                }
                heard => heard?,
            };
            let sent = self.flush_in(socket)?;
            total += heard + sent;
            if heard + sent == 0 {
                break;
            }
        }
        if self.host_ended && !self.guest.wants_write() && !self.end_passed_in {
            self.end_passed_in = true;
            socket.close();
        }
        Ok(total)
    }

    /// Nothing was read of what the guest said first.
    fn guest_was_answered(&self) -> bool {
        self.first.is_empty()
    }

    fn flush_in(&mut self, socket: &mut Socket<'_>) -> Result<usize, Stop> {
        let mut total = 0;
        while self.guest.wants_write() {
            match step(self.guest.write_tls(&mut GuestEnd(socket)))? {
                Some(count) => total += count,
                None => break,
            }
        }
        Ok(total)
    }

    fn hear_host(&mut self, end: &mut HostEnd<'_>) -> Result<usize, Stop> {
        if self.host_ended || !self.host.wants_read() {
            return Ok(0);
        }
        let Some(count) = step(self.host.read_tls(end))? else { return Ok(0) };
        let heard = self.host.process_new_packets();
        if heard.is_err() {
            // The host is told why, if it listens.
            let _ = self.flush_out(end);
        }
        let heard = heard.map_err(|error| Unlike::Server(error.to_string()))?;
        if count == 0 && self.host.is_handshaking() {
            return Err(Unlike::Server("it ended the connection".to_owned()).into());
        }
        let mut piece = [0; PIECE_BYTES];
        while let Ok(count @ 1..) = self.host.reader().read(&mut piece) {
            let piece = piece.get(..count).unwrap_or_default();
            self.guard.answered(piece)?;
            self.guest.writer().write_all(piece).map_err(|_| Stop::Broken)?;
        }
        if heard.peer_has_closed() {
            self.guest.send_close_notify();
        }
        // One that ends without a word is cut off for the guest too.
        self.host_ended = count == 0 || heard.peer_has_closed();
        Ok(count)
    }
}
