//! Packets on their way to the guest, and smoltcp's view of the link.

use std::collections::VecDeque;

use smoltcp::phy::{Checksum, ChecksumCapabilities, Device, DeviceCapabilities, Medium};
use smoltcp::phy::{RxToken, TxToken};
use smoltcp::time::Instant;

use super::CONNECTIONS_MAX;
use crate::link::MTU;

/// Packets that wait for the guest; smoltcp sends no more until some are gone. That is a MiB
/// of large ones: with twice as much, or half of it and half the turns, 8 streams are slower.
const WAITING_MAX: usize = 16;
/// Packets that the stack itself may add to those, refusals and datagrams; large ones have no
/// more room than smoltcp's.
const EXTRA_MAX: usize = 256;
const LARGE_BYTES: usize = 16 << 10;
/// Resets beside all of those, one for each flow that may be open: none is lost when all are
/// ended at once.
const RESETS_MAX: usize = CONNECTIONS_MAX as usize;
/// Buffers kept for the next packets.
const SPARE_MAX: usize = WAITING_MAX;
/// Bytes from which on a packet's buffer is worth keeping.
const SPARE_BYTES_MIN: usize = 16 << 10;

/// What smoltcp may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum May {
    /// As much as the guest takes.
    Stream,
    /// The reset of a stream that is over, in any case.
    Reset,
}

/// The queue towards the guest.
#[derive(Debug, Default)]
pub struct Outbox {
    pub queue: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
}

impl Outbox {
    pub fn is_full(&self) -> bool {
        self.queue.len() >= WAITING_MAX
    }

    /// Adds a packet, unless the guest takes none: what it asks for without
    /// reading the answers is lost.
    pub fn push(&mut self, packet: Option<Vec<u8>>) {
        let is_large = packet.as_ref().is_some_and(|packet| packet.len() > LARGE_BYTES);
        let most = if is_large { WAITING_MAX } else { WAITING_MAX + EXTRA_MAX };
        if self.queue.len() < most {
            self.queue.extend(packet);
        }
    }

    fn push_reset(&mut self, packet: Vec<u8>) {
        if self.queue.len() < WAITING_MAX + EXTRA_MAX + RESETS_MAX {
            self.queue.push_back(packet);
        }
    }

    /// Keeps the buffer for another packet.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < SPARE_MAX && buffer.len() >= SPARE_BYTES_MIN {
            self.spare.push(buffer);
        }
    }
}

/// The link of one stream: at most one packet comes in.
pub struct Wire<'a> {
    pub received: Option<&'a [u8]>,
    pub may: May,
    pub outbox: &'a mut Outbox,
}

/// A packet of the guest.
pub struct Received<'a>(&'a [u8]);

/// Room for a packet to it.
pub struct Room<'a>(&'a mut Outbox, May);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

impl TxToken for Room<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        // A kept one is nearly always as long as the next large packet: nothing is cleared.
        let spare = if len < SPARE_BYTES_MIN { None } else { self.0.spare.pop() };
        let mut buffer = spare.unwrap_or_default();
        buffer.resize(len, 0);
        let result = f(&mut buffer);
        match self.1 {
            May::Stream => self.0.push(Some(buffer)),
            May::Reset => self.0.push_reset(buffer),
        }
        result
    }
}

impl Device for Wire<'_> {
    type RxToken<'a>
        = Received<'a>
    where
        Self: 'a;
    type TxToken<'a>
        = Room<'a>
    where
        Self: 'a;

    fn receive(&mut self, _: Instant) -> Option<(Received<'_>, Room<'_>)> {
        self.received.take().map(|packet| (Received(packet), Room(self.outbox, May::Stream)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Room<'_>> {
        let has_room = self.may == May::Reset || !self.outbox.is_full();
        has_room.then_some(Room(self.outbox, self.may))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = usize::from(MTU);
        // The link is memory, and the driver was told so; only the header of
        // IPv4 is checked by the guest in any case.
        let mut checksums = ChecksumCapabilities::ignored();
        checksums.ipv4 = Checksum::Tx;
        capabilities.checksum = checksums;
        capabilities
    }
}
