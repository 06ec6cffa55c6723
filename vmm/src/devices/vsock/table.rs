//! All streams of a cell, and what guest and host do to them.

use std::collections::{HashMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events};

use super::connection::{Connection, Phase, Produced, Violation};
use super::packet::*;
use super::{GUEST_CID, HOST_CID, Successor, VsockConfig, VsockListener, VsockMetrics};
use crate::devices::transport::DEVICE_TOKENS;
use crate::devices::transport::buffers::{Buffers, Chain};

/// The event token of slot 0; the one before belongs to the dials.
const FIRST_TOKEN: u32 = DEVICE_TOKENS + 1;
/// Slots are not used again before this many others were.
const SLOTS: u32 = 1 << 30;
/// Resets that may wait for room in the guest's ring.
const RESETS_MAX: usize = 256;
/// Ports of the host's own streams; below are well-known listeners.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// All streams.
pub(super) struct Table {
    connections: HashMap<u32, Connection>,
    slots: HashMap<Ports, u32>,
    ready: VecDeque<u32>,
    resets: VecDeque<Ports>,
    /// The last packet was a reset: a guest that asks for many keeps none of the
    /// host's packets back.
    reset_last: bool,
    next_slot: u32,
    next_port: u32,
    listeners: HashMap<u32, VsockListener>,
    limit: usize,
    metrics: Arc<VsockMetrics>,
}

impl Table {
    pub fn new(config: VsockConfig, metrics: Arc<VsockMetrics>) -> Self {
        Self {
            connections: HashMap::new(),
            slots: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            reset_last: false,
            next_slot: 0,
            next_port: FIRST_HOST_PORT,
            listeners: config.listeners,
            limit: config.connections_max,
            metrics,
        }
    }

    /// Opens a stream to a port of the guest; drops `stream` where it cannot.
    pub fn dial(&mut self, port: u32, stream: UnixStream, name: u64, ops: &mut EventOps<'_>) {
        let ports = Ports { guest: port, host: self.next_port };
        self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_HOST_PORT);
        if self.slots.contains_key(&ports) {
            return self.metrics.refused.inc();
        }
        self.insert(Connection::dialled(ports, stream, name), ops);
    }

    /// Gives the host's stream `name` another end; drops that where there is no such stream.
    pub fn hand_over(&mut self, name: u64, to: Successor, ops: &mut EventOps<'_>) {
        let open = |connection: &Connection| connection.phase == Phase::Open;
        let named = |connection: &Connection| connection.name == Some(name) && open(connection);
        let mut found = self.connections.iter_mut().filter(|(_, connection)| named(connection));
        let Some((&slot, connection)) = found.next() else {
            return self.metrics.refused.inc();
        };
        let _ = ops.remove(Events::empty(&connection.stream));
        connection.hand_over(to);
        if ops.add(watch(slot, &connection.stream, EventSet::empty())).is_err() {
            return self.abort(slot, ops);
        }
        self.settle(slot, ops);
    }

    /// Drops every stream.
    pub fn clear(&mut self, ops: &mut EventOps<'_>) {
        let slots: Vec<u32> = self.connections.keys().copied().collect();
        slots.into_iter().for_each(|slot| self.remove(slot, ops));
        self.ready.clear();
        self.resets.clear();
    }

    fn insert(&mut self, connection: Connection, ops: &mut EventOps<'_>) -> bool {
        let slot = self.next_slot;
        let events = watch(slot, &connection.stream, EventSet::empty());
        if self.connections.len() >= self.limit {
            self.evict(ops);
        }
        let full = self.connections.len() >= self.limit || self.connections.contains_key(&slot);
        if full || ops.add(events).is_err() {
            self.metrics.refused.inc();
            return false;
        }
        self.next_slot = (slot + 1) % SLOTS;
        self.slots.insert(connection.ports, slot);
        self.connections.insert(slot, connection);
        self.metrics.opened.inc();
        self.settle(slot, ops);
        true
    }

    /// Ends the oldest stream that the host has closed and the guest has not: a guest
    /// that ends nothing uses up no streams.
    fn evict(&mut self, ops: &mut EventOps<'_>) {
        let left = self.connections.iter().filter(|(_, connection)| connection.host_is_gone());
        if let Some(slot) = left.map(|(slot, _)| *slot).min() {
            self.abort(slot, ops);
        }
    }

    fn remove(&mut self, slot: u32, ops: &mut EventOps<'_>) {
        if let Some(connection) = self.connections.remove(&slot) {
            let _ = ops.remove(Events::empty(&connection.stream));
            if connection.phase != Phase::Detached {
                self.slots.remove(&connection.ports);
            }
            self.metrics.closed.inc();
        }
    }

    /// Ends a stream and tells the guest.
    fn abort(&mut self, slot: u32, ops: &mut EventOps<'_>) {
        if let Some(connection) = self.connections.get(&slot)
            && connection.phase != Phase::Detached
        {
            self.reset(connection.ports);
        }
        self.remove(slot, ops);
    }

    fn reset(&mut self, ports: Ports) {
        match self.resets.len() < RESETS_MAX {
            true => self.resets.push_back(ports),
            false => self.metrics.dropped_resets.inc(),
        }
    }

    /// Brings watches, lists and life of a stream in line with its state.
    fn settle(&mut self, slot: u32, ops: &mut EventOps<'_>) {
        let Some(connection) = self.connections.get_mut(&slot) else {
            return;
        };
        let over = match connection.phase {
            Phase::Detached => !connection.lingers(),
            Phase::Open | Phase::Connecting => connection.finished(),
        };
        if over {
            return self.abort(slot, ops);
        }
        if connection.wants_room() != connection.watching_room {
            connection.watching_room = connection.wants_room();
            let room = if connection.watching_room { EventSet::OUT } else { EventSet::empty() };
            if ops.modify(watch(slot, &connection.stream, room)).is_err() {
                return self.abort(slot, ops);
            }
        }
        if connection.has_output() && !connection.scheduled {
            connection.scheduled = true;
            self.ready.push_back(slot);
        }
    }

    // From the host.

    /// The host socket of a stream is ready for `set`.
    pub fn host_event(&mut self, token: u32, set: EventSet, ops: &mut EventOps<'_>) {
        let Some(slot) = token.checked_sub(FIRST_TOKEN) else {
            return;
        };
        let Some(connection) = self.connections.get_mut(&slot) else {
            return;
        };
        connection.host_is_readable();
        if set.intersects(EventSet::OUT) {
            connection.drain();
        }
        if set.intersects(EventSet::HANG_UP | EventSet::ERROR) {
            connection.host_left();
            if connection.phase == Phase::Connecting {
                return self.abort(slot, ops);
            }
        }
        self.settle(slot, ops);
    }

    // From the guest.

    /// Carries out one packet of the guest; it never writes into the chain.
    pub fn packet(&mut self, mut chain: Chain<'_>, ops: &mut EventOps<'_>) -> u32 {
        let Some(bytes) = chain.readable.take_array() else {
            self.metrics.bad_packets.inc();
            return 0;
        };
        let header = Header::from_guest(&bytes);
        match self.check(&header, &chain.readable) {
            Some(op) => self.dispatch(op, header, chain.readable, ops),
            None => self.metrics.bad_packets.inc(),
        }
        0
    }

    /// The operation of a header whose every field is legal for it.
    fn check(&mut self, header: &Header, payload: &Buffers<'_>) -> Option<Op> {
        if (header.source_cid, header.target_cid) != (GUEST_CID, HOST_CID) {
            return None;
        }
        let op = header.op.filter(|_| header.kind == TYPE_STREAM);
        if op.is_none() {
            // Virtio 1.2, 5.10.6.4.2: an unknown type or operation is reset.
            self.reset(header.ports);
        }
        let payload_max = if op == Some(Op::Data) { PAYLOAD_MAX } else { 0 };
        let fits = header.len <= payload_max && header.len as usize <= payload.len();
        op.filter(|_| fits)
    }

    fn dispatch(&mut self, op: Op, header: Header, data: Buffers<'_>, ops: &mut EventOps<'_>) {
        let slot = self.slots.get(&header.ports).copied();
        match (op, slot) {
            (Op::Request, None) => self.accept(&header, ops),
            (Op::Reset, Some(slot)) => self.guest_reset(slot, ops),
            (Op::Reset, None) => {}
            (_, None) => self.reset(header.ports),
            (op, Some(slot)) => {
                if self.advance(slot, op, &header, data).is_err() {
                    self.metrics.bad_packets.inc();
                    return self.abort(slot, ops);
                }
                self.settle(slot, ops);
            }
        }
    }

    fn advance(
        &mut self,
        slot: u32,
        op: Op,
        header: &Header,
        mut data: Buffers<'_>,
    ) -> Result<(), Violation> {
        let connection = self.connections.get_mut(&slot).ok_or(Violation)?;
        connection.credit(header)?;
        match op {
            Op::Response => connection.opened(),
            Op::Data => {
                self.metrics.from_guest_bytes.add(header.len.into());
                connection.data(data.take(header.len as usize))
            }
            Op::Shutdown => connection.shutdown(header.flags),
            Op::CreditRequest => {
                connection.owe_credit();
                Ok(())
            }
            Op::CreditUpdate => Ok(()),
            Op::Request | Op::Reset => Err(Violation),
        }
    }

    fn accept(&mut self, request: &Header, ops: &mut EventOps<'_>) {
        let pair = UnixStream::pair();
        let listener = self.listeners.contains_key(&request.ports.host);
        let (true, Ok((theirs, ours))) = (listener, pair) else {
            self.metrics.refused.inc();
            return self.reset(request.ports);
        };
        if !self.insert(Connection::accepted(request, ours), ops) {
            return self.reset(request.ports);
        }
        if let Some(listener) = self.listeners.remove(&request.ports.host) {
            listener(theirs);
        }
    }

    fn guest_reset(&mut self, slot: u32, ops: &mut EventOps<'_>) {
        match self.connections.get_mut(&slot) {
            Some(connection) if connection.lingers() => {
                connection.phase = Phase::Detached;
                self.slots.remove(&connection.ports);
            }
            _ => self.remove(slot, ops),
        }
    }

    // To the guest.

    /// Whether a packet waits for the guest.
    pub fn has_output(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Puts one packet into `room`, which holds a header and at least one byte
    /// more; returns its bytes, or `None` where the next stream has nothing.
    pub fn fill(&mut self, mut room: Buffers<'_>, ops: &mut EventOps<'_>) -> Option<u32> {
        let header = room.take(HEADER_BYTES);
        self.reset_last = !self.resets.is_empty() && (self.ready.is_empty() || !self.reset_last);
        let reset = if self.reset_last { self.resets.pop_front() } else { None };
        let reply = match reset {
            Some(ports) => Reply::reset(ports),
            None => self.produce(room, ops)?,
        };
        header.copy_from(&reply.bytes());
        self.metrics.to_guest_bytes.add(reply.len.into());
        Some(HEADER_BYTES as u32 + reply.len)
    }

    fn produce(&mut self, room: Buffers<'_>, ops: &mut EventOps<'_>) -> Option<Reply> {
        let slot = self.ready.pop_front()?;
        let connection = self.connections.get_mut(&slot)?;
        connection.scheduled = false;
        let produced = connection.produce(room);
        self.settle(slot, ops);
        match produced {
            Produced::Packet(reply) => Some(reply),
            Produced::Nothing => None,
        }
    }
}

fn watch(slot: u32, stream: &UnixStream, room: EventSet) -> Events {
    let set = EventSet::IN | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED | room;
    Events::with_data(stream, FIRST_TOKEN + slot, set)
}
