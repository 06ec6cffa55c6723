//! Published ports of datagrams: what callers say comes from the dialer, which has their sockets.
//!
//! ```text
//! caller -> [dialer] -> Called -> a port of the stack's own -> the guest
//! caller <- [dialer] <- Answer <- the same port             <- the guest
//! ```

use std::net::SocketAddr;
use std::time::Instant;

use exocell_xgate::Protocol;

use super::flow::{Flow, Key, Stage};
use super::{DATAGRAM_CALLERS_MAX, Stack};
use crate::audit::{Decision, Entry};
use crate::dialer::protocol::Request;
use crate::link;
use crate::packet;
use crate::policy::{Peer, Target};

impl Stack {
    /// A datagram of a caller.
    pub(super) fn called(&mut self, door: u32, from: SocketAddr, data: &[u8]) {
        let Some(guest_port) = self.doors.get(door as usize).copied() else { return };
        let listen = &self.policy.scope().listen;
        if !listen.iter().any(|ports| ports.permits(guest_port)) {
            return;
        }
        let found = self.flows.find_call(door, from);
        let Some(slot) = found.or_else(|| self.begin_call(door, from, guest_port)) else { return };
        self.rate.fill(Instant::now());
        if self.rate.is_empty() {
            return;
        }
        self.rate.spend(data.len());
        let Some(flow) = self.flows.get(slot) else { return };
        flow.moved = Instant::now();
        flow.bytes.1 += data.len() as u64;
        let packet = packet::datagram(flow.key.other, flow.key.guest, data);
        let fits = packet.filter(|packet| packet.len() <= usize::from(link::MTU));
        self.outbox.push(fits);
    }

    fn begin_call(&mut self, door: u32, from: SocketAddr, guest_port: u16) -> Option<usize> {
        let entry = Entry::new("listen", Decision::Allowed, "published port");
        let entry = entry.by(Protocol::Udp, guest_port).to(from);
        if self.flows.datagram_callers() >= DATAGRAM_CALLERS_MAX {
            let silent = self.flows.longest_silent_caller()?;
            self.forget(silent);
        }
        let guest = SocketAddr::new(link::GUEST_V4.into(), guest_port);
        let key = self.free_key(Protocol::Udp, guest)?;
        self.audit.record(entry);
        let target = Target::Address(link::STACK_V4.into());
        let mut flow = Flow::new(key, target, guest_port, Stage::Datagrams);
        flow.inbound = true;
        flow.door = Some(door);
        flow.peer = Some(Peer { at: from, is_own: false });
        Some(self.flows.add(flow))
    }

    /// Passes on what the guest says to a caller, if it is to one.
    pub(super) fn answers_call(&mut self, from: SocketAddr, to: SocketAddr, data: &[u8]) -> bool {
        let key = Key { protocol: Protocol::Udp, guest: from, other: to };
        let Some(slot) = self.flows.find(&key) else { return false };
        let Some(flow) = self.flows.get(slot) else { return false };
        let (Some(door), Some(peer)) = (flow.door, flow.peer) else { return false };
        // Only who calls keeps the flow: its source may have been a lie.
        flow.bytes.0 += data.len() as u64;
        self.rate.fill(Instant::now());
        if !self.dialer.has_more() && !self.rate.is_empty() {
            self.rate.spend(data.len());
            self.dialer.pass(&Request::Answer { door, to: peer.at, data: data.to_vec() });
        }
        true
    }
}
