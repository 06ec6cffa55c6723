//! One TCP connection of the guest: smoltcp's end of it, and the host's socket
//! that it is joined to.
//!
//! ```text
//! guest <-> packets <-> smoltcp's socket <-> bytes <-> host's socket <-> peer
//! ```
//! Each stream has an interface of its own, with the address that the guest
//! dialled: IPv4 and IPv6 are the same, and no stream's packets search others.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, recv, send, shutdown};
use smoltcp::iface::{Config, Interface, PollResult, SocketHandle, SocketSet, SocketStorage};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, IpListenEndpoint};

use super::opened::{HostEnd, Opened, Stop};
use super::outbox::{May, Outbox, Wire};
use super::rate::Rate;
use crate::guard::{Guard, Unlike};

/// Bytes that wait here in each direction of one of few streams, so that one fills the link, and
/// of one of many. 256 streams that are stuck hold 78 MiB here, and what their sockets hold in
/// the host's kernel ([`crate::dialer::sys::bound`]): 62 MiB, and of the few 8 MiB each.
const BUFFER_OF_FEW: usize = 1 << 20;
const BUFFER_OF_MANY: usize = 128 << 10;
pub const FEW: usize = 8;
/// Bytes that a stream moves before the others get their turn. On their way they are copied
/// several times, so they should fit the cache of a processor core.
const TURN_BYTES: usize = 512 << 10;
/// From so many bytes that wait for the guest on they go in whole segments: crumbs, which
/// a window that is nearly full would make, use up the guest's memory for the stream and
/// it drops what comes next. Whoever waits for the rest of less is not kept waiting.
const WHOLE_BYTES_MIN: usize = 256 << 10;

/// Whether a stream goes on.
#[derive(Debug, PartialEq, Eq)]
pub enum After {
    /// It waits for an event.
    Idle,
    /// It wants another turn: bytes are left.
    Again,
    /// It waits for its share of the cell's rate.
    Slowed,
    Over,
    /// Its bytes say that it is for someone else.
    Misused(Unlike),
}

/// A connection and its two ends.
pub struct Stream {
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    host: OwnedFd,
    guard: Guard,
    opened: Option<Box<Opened>>,
    /// The host's socket may have something to read, or room.
    pub readable: bool,
    pub writable: bool,
    host_ended: bool,
    guest_ended: bool,
    /// Bytes from the guest and to it.
    pub bytes: (u64, u64),
}

/// What a stream is made of, beside its addresses.
pub struct Ends {
    pub host: OwnedFd,
    pub guard: Guard,
    /// Flows that are there already.
    pub others: usize,
}

/// One way through opened TLS.
type Way = fn(&mut Opened, &mut Socket<'static>, &mut HostEnd<'_>) -> Result<usize, Stop>;

/// What a call on the host's socket said.
pub enum Moved {
    Bytes(usize),
    Nothing,
    Broken,
}

/// What a call that moves bytes said.
pub fn moved(result: nix::Result<usize>) -> Moved {
    match result {
        Ok(bytes) => Moved::Bytes(bytes),
        Err(Errno::EAGAIN | Errno::EINTR) => Moved::Nothing,
        Err(_) => Moved::Broken,
    }
}

impl Stream {
    fn new(own: IpAddr, ends: Ends, now: Instant, seed: u64) -> Self {
        let Ends { host, guard, others } = ends;
        let mut nowhere = Outbox::default();
        let mut wire = Wire { received: None, may: May::Stream, outbox: &mut nowhere };
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let mut interface = Interface::new(config, &mut wire, now);
        interface.update_ip_addrs(|addresses| {
            // Everyone is a neighbour; one address always fits.
            let _ = addresses.push(IpCidr::new(own.into(), 0));
        });
        let bytes = if others < FEW { BUFFER_OF_FEW } else { BUFFER_OF_MANY };
        let buffer = || SocketBuffer::new(vec![0; bytes]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.set_ack_delay(None);
        let mut sockets = SocketSet::new(vec![SocketStorage::EMPTY]);
        let handle = sockets.add(socket);
        Self {
            interface,
            sockets,
            handle,
            host,
            guard,
            opened: None,
            readable: true,
            writable: true,
            host_ended: false,
            guest_ended: false,
            bytes: (0, 0),
        }
    }

    /// The stream that the guest opened to `destination` with the segment
    /// `first`; the host's end is connected. `None` for an address that no stream has.
    pub fn accept(
        destination: SocketAddr,
        first: &[u8],
        ends: Ends,
        now: Instant,
        seed: u64,
        outbox: &mut Outbox,
    ) -> Option<Self> {
        let mut stream = Self::new(destination.ip(), ends, now, seed);
        let here = IpListenEndpoint {
            addr: Some(IpAddress::from(destination.ip())),
            port: destination.port(),
        };
        stream.socket().listen(here).ok()?;
        stream.receive(first, now, outbox);
        stream.socket().is_active().then_some(stream)
    }

    /// A stream from `here` to the guest's `there`, for a caller on the host.
    pub fn dial(
        here: SocketAddr,
        there: SocketAddr,
        ends: Ends,
        now: Instant,
        seed: u64,
    ) -> Option<Self> {
        let mut stream = Self::new(here.ip(), ends, now, seed);
        let socket = stream.sockets.get_mut::<Socket>(stream.handle);
        let context = stream.interface.context();
        socket
            .connect(
                context,
                (IpAddress::from(there.ip()), there.port()),
                (IpAddress::from(here.ip()), here.port()),
            )
            .ok()?;
        Some(stream)
    }

    fn socket(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    /// The host's socket, to be watched.
    pub fn host(&self) -> BorrowedFd<'_> {
        self.host.as_fd()
    }

    /// Takes a packet of the guest that belongs to this stream.
    pub fn receive(&mut self, packet: &[u8], now: Instant, outbox: &mut Outbox) {
        let mut wire = Wire { received: Some(packet), may: May::Stream, outbox };
        self.interface.poll_ingress_single(now, &mut wire, &mut self.sockets);
    }

    /// The names of the secrets that the guest's requests got since the last call.
    pub fn given(&mut self) -> Vec<String> {
        match &mut self.opened {
            Some(opened) => opened.given(),
            None => self.guard.given(),
        }
    }

    /// The guard of what the guest says, of opened TLS the one inside.
    fn guard(&self) -> &Guard {
        self.opened.as_ref().map_or(&self.guard, |opened| opened.guard())
    }

    /// When the guest must have said something that could be judged.
    pub fn silent_until(&self) -> Option<std::time::Instant> {
        self.guard().due()
    }

    /// When a timer of the stream goes off.
    pub fn due(&mut self, now: Instant) -> Option<Instant> {
        self.interface.poll_at(now, &self.sockets)
    }

    /// Moves what can be moved.
    pub fn turn(&mut self, now: Instant, outbox: &mut Outbox, rate: &mut Rate) -> After {
        if let Err(unlike) = self.guard().expire(std::time::Instant::now()) {
            return self.cut(After::Misused(unlike), now, outbox);
        }
        let mut left = TURN_BYTES;
        loop {
            let from_guest = match self.move_out(rate) {
                Ok(bytes) => bytes,
                Err(after) => return self.cut(after, now, outbox),
            };
            // What the guest has no room for stays where it is.
            let most = if outbox.is_full() { 0 } else { left };
            let to_guest = match self.move_in(most, rate) {
                Ok(bytes) => bytes,
                Err(after) => return self.cut(after, now, outbox),
            };
            self.emit(now, outbox);
            let bytes = from_guest + to_guest;
            if self.is_over() {
                return After::Over;
            }
            if bytes == 0 {
                return self.rest(outbox, rate);
            }
            left = left.saturating_sub(bytes);
            if left == 0 || outbox.is_full() {
                return After::Again;
            }
        }
    }

    /// Why nothing moved.
    fn rest(&mut self, outbox: &Outbox, rate: &Rate) -> After {
        let waits_for_rate = rate.is_empty()
            && (self.socket().can_recv()
                || self.readable && self.socket().can_send()
                || self.opened.as_ref().is_some_and(|opened| opened.wants_host()));
        match (waits_for_rate, outbox.is_full()) {
            (true, _) => After::Slowed,
            (_, true) => After::Again,
            _ => After::Idle,
        }
    }

    fn cut(&mut self, after: After, now: Instant, outbox: &mut Outbox) -> After {
        // What it was told before comes first.
        self.emit(now, outbox);
        self.abort(now, outbox);
        after
    }

    /// Resets the guest's end, unless both ends are done already.
    pub fn abort(&mut self, now: Instant, outbox: &mut Outbox) {
        if !self.is_over() {
            self.socket().abort();
            self.send(May::Reset, now, outbox);
        }
    }

    fn emit(&mut self, now: Instant, outbox: &mut Outbox) {
        let socket = self.socket();
        socket.set_nagle_enabled(socket.send_queue() >= WHOLE_BYTES_MIN);
        self.send(May::Stream, now, outbox);
    }

    fn send(&mut self, may: May, now: Instant, outbox: &mut Outbox) {
        let mut wire = Wire { received: None, may, outbox };
        while self.interface.poll_egress(now, &mut wire, &mut self.sockets) != PollResult::None {}
    }

    fn is_over(&mut self) -> bool {
        // A stream that its opener took back listens again.
        matches!(self.socket().state(), State::Closed | State::TimeWait | State::Listen)
    }

    /// Bytes of the guest to the host's socket.
    fn move_out(&mut self, rate: &mut Rate) -> Result<usize, After> {
        let mut total = 0;
        while self.writable && self.opened.is_none() {
            let socket = self.sockets.get_mut::<Socket>(self.handle);
            let held = take_in(&mut self.guard, socket, rate).map_err(After::Misused)?;
            if let Some((opener, first)) = self.guard.opener() {
                let opened = Opened::new(opener, first).map_err(After::Misused)?;
                self.opened = Some(Box::new(opened));
                break;
            }
            let moved = match held {
                true => self.guard.pass_on(|bytes| moved_out(&self.host, bytes)),
                false if rate.is_empty() || !socket.can_recv() => break,
                false => {
                    let host = &self.host;
                    let sent = socket.recv(|bytes| {
                        let share = bytes.get(..rate.share(bytes.len())).unwrap_or_default();
                        match moved_out(host, share) {
                            Moved::Bytes(count) => (count, Moved::Bytes(count)),
                            other => (0, other),
                        }
                    });
                    sent.unwrap_or(Moved::Nothing)
                }
            };
            match moved {
                Moved::Bytes(0) => break,
                Moved::Bytes(count) => {
                    rate.spend(count);
                    self.bytes.0 += count as u64;
                    total += count;
                }
                Moved::Nothing => self.writable = false,
                Moved::Broken => return Err(After::Over),
            }
        }
        total += self.move_opened(rate, Opened::move_out)?;
        self.pass_end_on()?;
        Ok(total)
    }

    /// Moves what can be moved of opened TLS, one way.
    fn move_opened(&mut self, rate: &mut Rate, way: Way) -> Result<usize, After> {
        let Some(opened) = &mut self.opened else { return Ok(0) };
        let socket = self.sockets.get_mut::<Socket>(self.handle);
        let (readable, writable) = (&mut self.readable, &mut self.writable);
        let mut end =
            HostEnd { socket: self.host.as_fd(), rate, readable, writable, moved: (0, 0) };
        let result = way(opened, socket, &mut end);
        self.bytes.0 += end.moved.0 as u64;
        self.bytes.1 += end.moved.1 as u64;
        result.map_err(|stop| match stop {
            Stop::Unlike(unlike) => After::Misused(unlike),
            Stop::Broken => After::Over,
        })
    }

    /// The guest has said all, and all of it has been passed on.
    fn pass_end_on(&mut self) -> Result<(), After> {
        let socket = self.sockets.get_mut::<Socket>(self.handle);
        let said_all = matches!(
            socket.state(),
            State::CloseWait | State::LastAck | State::Closing | State::TimeWait
        );
        let passed = self.opened.as_ref().is_none_or(|opened| opened.has_passed_end());
        let said_all = said_all && socket.recv_queue() == 0;
        if said_all {
            self.guard.end().map_err(After::Misused)?;
        }
        if said_all && self.guard.is_empty() && passed && !self.guest_ended {
            self.guest_ended = true;
            // A peer that is gone already needs no telling.
            let _ = shutdown(self.host.as_raw_fd(), Shutdown::Write);
        }
        Ok(())
    }

    /// Bytes of the peer to the guest, not many more than `most`.
    fn move_in(&mut self, most: usize, rate: &mut Rate) -> Result<usize, After> {
        if self.opened.is_some() {
            return self.move_opened(rate, Opened::move_in);
        }
        let mut total = 0;
        let socket = self.sockets.get_mut::<Socket>(self.handle);
        while total < most
            && self.readable
            && !self.host_ended
            && socket.can_send()
            && !rate.is_empty()
        {
            let (host, guard, mut heard) = (&self.host, &mut self.guard, Ok(()));
            let read = socket.send(|room| {
                let share = rate.share(room.len().min(most - total));
                let room = room.get_mut(..share).unwrap_or_default();
                match moved(recv(host.as_raw_fd(), room, MsgFlags::MSG_DONTWAIT)) {
                    Moved::Bytes(count) => {
                        heard = guard.answered(room.get(..count).unwrap_or_default());
                        (if heard.is_ok() { count } else { 0 }, Moved::Bytes(count))
                    }
                    other => (0, other),
                }
            });
            heard.map_err(After::Misused)?;
            match read.unwrap_or(Moved::Nothing) {
                Moved::Bytes(0) => {
                    self.host_ended = true;
                    socket.close();
                }
                Moved::Bytes(count) => {
                    rate.spend(count);
                    self.bytes.1 += count as u64;
                    total += count;
                }
                Moved::Nothing => self.readable = false,
                Moved::Broken => return Err(After::Over),
            }
        }
        Ok(total)
    }
}

/// Takes bytes of the guest where they must be judged; whether any go through the
/// guard at all.
fn take_in(guard: &mut Guard, socket: &mut Socket<'_>, rate: &Rate) -> Result<bool, Unlike> {
    if guard.is_open() {
        return Ok(false);
    }
    // What is held back may be judged by now.
    let mut judged = guard.hold(&[]);
    while judged.is_ok() && socket.can_recv() && guard.room() > 0 && !rate.is_empty() {
        let taken = socket.recv(|bytes| {
            let bytes = bytes.get(..bytes.len().min(guard.room())).unwrap_or_default();
            judged = guard.hold(bytes);
            (bytes.len(), bytes.len())
        });
        if taken.unwrap_or(0) == 0 {
            break;
        }
    }
    judged.map(|()| true)
}

fn moved_out(host: &OwnedFd, bytes: &[u8]) -> Moved {
    if bytes.is_empty() {
        return Moved::Bytes(0);
    }
    moved(send(host.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL))
}

#[cfg(test)]
mod tests;
