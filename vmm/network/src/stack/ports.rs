//! The networks between cells that a cell is in: its packets to their members, and theirs to it.

use std::net::Ipv4Addr;

use event_manager::{EventOps, EventSet, Events};
use exocell_xgate::Protocol;

use super::{PORTS, Stack};
use crate::audit::{Decision, Entry};
use crate::packet::{self, Carried, Refusal};
use crate::switch::{Came, Port};

/// Messages of one network that are taken before others get their turn.
const TURN_MAX: usize = 64;

impl Stack {
    pub(super) fn watch_port(&mut self, place: usize, ops: &mut EventOps<'_>) {
        let set = EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED;
        if let Some(port) = self.ports.get(place) {
            // A full epoll set leaves it silent.
            let _ = ops.add(Events::with_data(&*port, PORTS + place as u32, set));
        }
    }

    pub(super) fn port_event(&mut self, place: usize, set: EventSet) {
        let Some(port) = self.ports.get(place) else { return };
        port.is_readable |= set != EventSet::OUT;
        port.flush();
    }

    pub(super) fn send(&mut self, place: usize, packet: &[u8]) {
        let Some(port) = self.ports.get(place) else { return };
        if !port.is_over() {
            return port.send(packet);
        }
        self.refuse(packet, Refusal::Unreachable);
    }

    /// What answers at a network's gateway is this stack, which has no other way out of it.
    pub(super) fn gateway(&mut self, bytes: &[u8]) {
        let Some(packet) = packet::parse(bytes) else { return };
        let (source, at) = (packet.source, packet.destination);
        match packet.carried {
            Carried::Tcp { .. } => {
                self.nobody_listens(Protocol::Tcp, at);
                self.outbox.push(packet::reset(bytes));
            }
            Carried::Udp(_) => {
                self.nobody_listens(Protocol::Udp, at);
                self.refuse(bytes, Refusal::Port);
            }
            Carried::Echo { ident, sequence, data } => {
                let reply = packet::echo_reply(at.ip(), source.ip(), ident, sequence, data);
                self.outbox.push(reply);
            }
            Carried::Other(_) => {}
        }
    }

    /// Gives the guest what has come; whether there is more that need not wait.
    pub(super) fn take_from_ports(&mut self, ops: &mut EventOps<'_>) -> bool {
        let mut more = false;
        for place in self.ports.places() {
            for _ in 0..TURN_MAX {
                let Some(port) = self.ports.get(place).filter(|port| port.is_readable) else {
                    break;
                };
                if self.outbox.is_full() {
                    break;
                }
                if let Came::Packet(packet) = port.receive(&mut self.buffer) {
                    self.outbox.push(Some(packet));
                }
                if port.is_over() {
                    let _ = ops.remove(Events::empty(&*port));
                    let at = port.address();
                    self.note_network(Decision::Closed, at, "the network's switch has ended");
                }
            }
            more |= self.ports.get(place).is_some_and(|port| port.is_readable);
        }
        more
    }

    /// Puts `port` at `place`, or nothing, in the stead of what was there.
    pub(super) fn change_port(&mut self, place: usize, port: Option<Port>, ops: &mut EventOps<'_>) {
        let (decision, address, why) = match &port {
            Some(port) => (Decision::Allowed, Some(port.address()), "joined"),
            None => (Decision::Cut, None, "left"),
        };
        let before = self.ports.put(place, port);
        if let Some(before) = &before {
            let _ = ops.remove(Events::empty(before));
        }
        if let Some(at) = address.or(before.map(|before| before.address())) {
            self.note_network(decision, at, why);
        }
        self.watch_port(place, ops);
    }

    fn note_network(&mut self, decision: Decision, at: Ipv4Addr, why: &str) {
        self.audit.record(Entry::new("network", decision, at).because(why));
    }
}
