//! One stream: a host socket, the guest's packets, and the credit between them.
//!
//! ```text
//! Connecting --RESPONSE--> Open --reset by either--> (dropped)
//!                           |  guest shut both ways, backlog sent -> RST, dropped
//!                           +--reset after the guest's last byte--> Detached: send
//!                              the backlog to the host program, then dropped
//! ```
//! The host program of a stream that the host opened may hand its end over to another: what the
//! guest says goes straight to that one then.
//!
//! Data towards the guest is read from the host socket straight into guest
//! memory, and only as much as the guest has credit for. Data from the guest goes
//! straight to the host socket; what that cannot take waits in `backlog`, whose
//! size is the credit the guest gets. So neither direction buffers without bound.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nix::sys::socket::{MsgFlags, send};

use super::Successor;
use super::packet::*;
use crate::devices::sys;
use crate::devices::transport::buffers::Buffers;

/// The credit of the guest: bytes the backlog holds at most.
pub(super) const BACKLOG_MAX: u32 = 256 * 1024;
/// Freed credit that is worth a packet of its own.
const CREDIT_STEP: u32 = BACKLOG_MAX / 4;

/// The guest broke the protocol; the stream must be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Violation;

/// How far a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// We asked, the guest has not answered.
    Connecting,
    /// Both sides know it.
    Open,
    /// The guest has forgotten it; only the backlog is left.
    Detached,
}

/// A packet that opens the stream and is still to be sent.
type Greeting = Option<Op>;

/// One stream.
#[derive(Debug)]
pub(super) struct Connection {
    pub ports: Ports,
    pub stream: UnixStream,
    pub phase: Phase,
    /// By which the host names it, if the host opened it.
    pub name: Option<u64>,
    /// In the table's list of streams with something for the guest.
    pub scheduled: bool,
    /// The event loop watches for room in the host socket.
    pub watching_room: bool,
    greeting: Greeting,
    /// What the guest is told before all that the host program says.
    word: Option<u8>,
    /// Of whoever took the stream over.
    _held: Option<Arc<dyn Any + Send + Sync>>,
    backlog: VecDeque<u8>,
    /// Bytes the host program was given; told to the guest as credit.
    taken: u32,
    taken_told: u32,
    credit_owed: bool,
    guest_sends: bool,
    guest_receives: bool,
    host_receives: bool,
    host_ended: bool,
    /// The host program has closed its end altogether.
    host_gone: bool,
    readable: bool,
    shutdown_told: u32,
    sent: u32,
    guest_buffer: u32,
    guest_taken: u32,
}

/// What [`Connection::produce`] did with the room it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Produced {
    /// A header, and that many payload bytes after it.
    Packet(Reply),
    /// Nothing; the room can be used for another stream.
    Nothing,
}

impl Connection {
    /// A stream the host opens.
    pub fn dialled(ports: Ports, stream: UnixStream, name: u64) -> Self {
        let name = Some(name);
        Self { name, ..Self::new(ports, stream, Phase::Connecting, Op::Request) }
    }

    /// A stream the guest opened with `request`.
    pub fn accepted(request: &Header, stream: UnixStream) -> Self {
        let mut connection = Self::new(request.ports, stream, Phase::Open, Op::Response);
        connection.guest_buffer = request.buffer;
        connection
    }

    fn new(ports: Ports, stream: UnixStream, phase: Phase, greeting: Op) -> Self {
        Self {
            ports,
            stream,
            phase,
            scheduled: false,
            watching_room: false,
            greeting: Some(greeting),
            name: None,
            word: None,
            _held: None,
            backlog: VecDeque::new(),
            taken: 0,
            taken_told: 0,
            credit_owed: false,
            guest_sends: true,
            guest_receives: true,
            host_receives: true,
            host_ended: false,
            host_gone: false,
            readable: true,
            shutdown_told: 0,
            sent: 0,
            guest_buffer: 0,
            guest_taken: 0,
        }
    }

    // From the guest.

    /// Takes the guest's credit from a header.
    pub fn credit(&mut self, header: &Header) -> Result<(), Violation> {
        let in_flight = self.sent.wrapping_sub(self.guest_taken);
        let newly_taken = header.taken.wrapping_sub(self.guest_taken);
        if newly_taken > in_flight {
            return Err(Violation);
        }
        self.guest_taken = header.taken;
        self.guest_buffer = header.buffer;
        Ok(())
    }

    /// The guest accepted.
    pub fn opened(&mut self) -> Result<(), Violation> {
        if self.phase != Phase::Connecting || self.greeting.is_some() {
            return Err(Violation);
        }
        self.phase = Phase::Open;
        Ok(())
    }

    /// Takes payload from the guest.
    pub fn data(&mut self, mut data: Buffers<'_>) -> Result<(), Violation> {
        let room = BACKLOG_MAX as usize - self.backlog.len();
        if self.phase != Phase::Open || !self.guest_sends || data.len() > room {
            return Err(Violation);
        }
        if !self.host_receives {
            self.took(data.len());
            return Ok(());
        }
        if self.backlog.is_empty() {
            self.pass_on(&mut data);
        }
        let start = self.backlog.len();
        self.backlog.resize(start + data.len(), 0);
        copy_into(&mut self.backlog, start, data);
        Ok(())
    }

    fn pass_on(&mut self, data: &mut Buffers<'_>) {
        while !data.is_empty() {
            match sys::send(self.stream.as_fd(), data.slices()) {
                Ok(sent) => self.took(data.take(sent).len()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.took(data.take(usize::MAX).len());
                    self.host_stopped_receiving();
                }
            }
        }
    }

    /// The guest will do no more of what `flags` says.
    pub fn shutdown(&mut self, flags: u32) -> Result<(), Violation> {
        if self.phase != Phase::Open || flags & !(SHUTDOWN_RECEIVE | SHUTDOWN_SEND) != 0 {
            return Err(Violation);
        }
        if flags & SHUTDOWN_SEND != 0 && self.guest_sends {
            self.guest_sends = false;
            self.end_if_drained();
        }
        if flags & SHUTDOWN_RECEIVE != 0 && self.guest_receives {
            self.guest_receives = false;
            let _ = self.stream.shutdown(Shutdown::Read);
        }
        Ok(())
    }

    /// The guest owes nothing and wants to know how much it may send.
    pub fn owe_credit(&mut self) {
        self.credit_owed = true;
    }

    /// Whether bytes of an ended stream are still on the way to the host program.
    pub fn lingers(&self) -> bool {
        !self.guest_sends && !self.backlog.is_empty()
    }

    /// Whether the guest has ended both directions and got all it sent delivered.
    pub fn finished(&self) -> bool {
        !self.guest_sends && !self.guest_receives && self.backlog.is_empty()
    }

    // From the host.

    /// There may be something to read from the host program.
    pub fn host_is_readable(&mut self) {
        self.readable = true;
    }

    /// The host program has closed its end.
    pub fn host_stopped_receiving(&mut self) {
        self.host_receives = false;
        let lost = self.backlog.len();
        self.backlog = VecDeque::new();
        self.took(lost);
    }

    /// The host program has closed both directions.
    pub fn host_left(&mut self) {
        self.host_gone = true;
        self.host_stopped_receiving();
    }

    /// Another is at the host's end from now on. What the guest has said and nobody was given is
    /// for it.
    pub fn hand_over(&mut self, to: Successor) {
        let Successor { stream, word, held } = to;
        (self.stream, self.word, self._held) = (stream, Some(word), Some(held));
        (self.readable, self.host_ended, self.watching_room) = (true, false, false);
        (self.host_receives, self.host_gone) = (true, false);
        if !self.guest_receives {
            let _ = self.stream.shutdown(Shutdown::Read);
        }
        self.drain();
    }

    /// Whether nobody but the guest has to do with the stream.
    pub fn host_is_gone(&self) -> bool {
        self.host_gone
    }

    /// Gives the backlog to the host program as far as it takes it.
    pub fn drain(&mut self) {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while !self.backlog.is_empty() {
            match send(self.stream.as_raw_fd(), self.backlog.as_slices().0, flags) {
                Ok(sent) => {
                    self.backlog.drain(..sent);
                    self.took(sent);
                }
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => return,
                Err(_) => self.host_stopped_receiving(),
            }
        }
        self.backlog = VecDeque::new();
        self.end_if_drained();
    }

    /// Whether the host socket was full when we last wrote.
    pub fn wants_room(&self) -> bool {
        !self.backlog.is_empty()
    }

    fn end_if_drained(&mut self) {
        if !self.guest_sends && self.backlog.is_empty() {
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    fn took(&mut self, bytes: usize) {
        self.taken = self.taken.wrapping_add(bytes as u32);
    }

    // To the guest.

    fn room(&self) -> u32 {
        self.guest_buffer.saturating_sub(self.sent.wrapping_sub(self.guest_taken))
    }

    fn may_send(&self) -> bool {
        self.phase == Phase::Open
            && self.readable
            && !self.host_ended
            && self.guest_receives
            && self.room() > 0
    }

    fn shutdown_due(&self) -> u32 {
        let receive = if self.host_receives { 0 } else { SHUTDOWN_RECEIVE };
        let send = if self.host_ended { SHUTDOWN_SEND } else { 0 };
        (receive | send) & !self.shutdown_told
    }

    fn credit_due(&self) -> bool {
        self.credit_owed || self.taken.wrapping_sub(self.taken_told) >= CREDIT_STEP
    }

    /// Whether [`Self::produce`] has something to say.
    pub fn has_output(&self) -> bool {
        match self.phase {
            Phase::Detached => false,
            _ if self.greeting.is_some() => true,
            Phase::Connecting => false,
            Phase::Open => self.may_send() || self.shutdown_due() != 0 || self.credit_due(),
        }
    }

    /// Makes the next packet; its payload goes into `room`.
    pub fn produce(&mut self, room: Buffers<'_>) -> Produced {
        if let Some(op) = self.greeting.take() {
            return self.packet(op, 0, 0);
        }
        if self.may_send() {
            let payload = self.receive(room);
            if payload > 0 {
                return self.packet(Op::Data, payload, 0);
            }
        }
        if self.phase == Phase::Open && self.shutdown_due() != 0 {
            self.shutdown_told |= self.shutdown_due();
            return self.packet(Op::Shutdown, 0, self.shutdown_told);
        }
        if self.phase == Phase::Open && self.credit_due() {
            return self.packet(Op::CreditUpdate, 0, 0);
        }
        Produced::Nothing
    }

    fn receive(&mut self, mut room: Buffers<'_>) -> u32 {
        let mut room = room.take(self.room().min(PAYLOAD_MAX) as usize);
        if room.is_empty() {
            return 0;
        }
        if let Some(word) = self.word.take() {
            room.take(1).copy_from(&[word]);
            self.sent = self.sent.wrapping_add(1);
            return 1;
        }
        match sys::receive(self.stream.as_fd(), room.slices()) {
            Ok(bytes @ 1..) => {
                self.sent = self.sent.wrapping_add(bytes as u32);
                return bytes as u32;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok(_) => self.host_ended = true,
            Err(_) => {
                self.host_ended = true;
                self.host_stopped_receiving();
            }
        }
        self.readable = false;
        0
    }

    fn packet(&mut self, op: Op, len: u32, flags: u32) -> Produced {
        self.taken_told = self.taken;
        self.credit_owed = false;
        let (ports, taken) = (self.ports, self.taken);
        Produced::Packet(Reply { ports, op, len, flags, buffer: BACKLOG_MAX, taken })
    }
}

/// Copies `data` over the bytes of `backlog` from `start` on.
fn copy_into(backlog: &mut VecDeque<u8>, start: usize, mut data: Buffers<'_>) {
    let (front, back) = backlog.as_mut_slices();
    let split = front.len();
    if let Some(part) = front.get_mut(start.min(split)..) {
        data.take(part.len()).copy_to(part);
    }
    if let Some(part) = back.get_mut(start.saturating_sub(split)..) {
        data.copy_to(part);
    }
}
