//! What the dialer answers.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use event_manager::{EventOps, EventSet, Events};
use exocell_xgate::Protocol;

use super::flow::{Flow, Stage};
use super::stream::{Ends, Stream};
use super::{STREAMS, Stack};
use crate::audit::{Decision, Entry};
use crate::dialer::protocol::{Failure, Id, Reply, Request};
use crate::dialer::sys;
use crate::dns;
use crate::guard::Guard;
use crate::packet::{self, Refusal};
use crate::policy::{Peer, Target};

/// Answers taken before the guest gets its turn.
const TURN_MAX: usize = 256;

impl Stack {
    pub(super) fn replies(&mut self, ops: &mut EventOps<'_>) {
        for _ in 0..TURN_MAX {
            let received = sys::receive_with(self.dialer.as_fd(), &mut self.buffer);
            let Ok((bytes, passed)) = received else { return };
            if bytes == 0 {
                return;
            }
            if let Some(reply) = Reply::decode(self.buffer.get(..bytes).unwrap_or_default()) {
                self.reply(reply, passed, ops);
            }
        }
        // The event was for all of them, and will not come again.
        self.wants_replies = true;
    }

    fn reply(&mut self, reply: Reply, passed: Option<OwnedFd>, ops: &mut EventOps<'_>) {
        match reply {
            Reply::Connected { id, peer } => match self.flows.slot(id) {
                Some(slot) => self.connected(slot, peer, passed, ops),
                None => self.dialer.say(&Request::Close { id }),
            },
            Reply::Failed { id, why, text } => self.failed(id, why, &text, ops),
            Reply::Datagram { id, data } => self.answer(id, &data),
            Reply::Called { door, from, data } => self.called(door, from, &data),
            Reply::Resolved { id, addresses } => {
                let known = (!addresses.is_empty()).then_some(addresses.as_slice());
                self.resolved(id, known);
            }
        }
    }

    fn resolved(&mut self, id: Id, addresses: Option<&[std::net::IpAddr]>) {
        if let Some((asked, from, to)) = self.questions.remove(&id) {
            self.outbox.push(packet::datagram(to, from, &dns::resolved(&asked, addresses)));
        }
    }

    fn connected(
        &mut self,
        slot: usize,
        peer: Peer,
        passed: Option<OwnedFd>,
        ops: &mut EventOps<'_>,
    ) {
        let (now, seed, id) = (self.now(), self.seed(), self.flows.id(slot));
        let Some(flow) = self.flows.get(slot) else { return };
        let protocol = flow.key.protocol;
        // The dialer may have connected it before it heard of the rules of now.
        if let Err(denied) = self.policy.permits(protocol, &flow.target, peer, flow.port) {
            self.dialer.say(&Request::Close { id });
            return self.failed(id, Failure::Denied, &denied.to_string(), ops);
        }
        flow.peer = Some(peer);
        flow.moved = Instant::now();
        let entry = Entry::new("connect", Decision::Allowed, &flow.target)
            .by(protocol, flow.port)
            .to(peer.at);
        self.audit.record(entry);
        let Stage::Asking { first, early } = &mut flow.stage else { return };
        let Some(host) = passed else {
            let early = std::mem::take(early);
            flow.stage = Stage::Datagrams;
            early.iter().for_each(|data| self.pass(id, data));
            return;
        };
        let guard = match &flow.target {
            Target::Name(name) => {
                let secrets = |tls| self.secrets.of(name, flow.port, tls);
                let has_none = secrets(true).is_empty() && secrets(false).is_empty();
                flow.is_raw = has_none && self.policy.is_raw(name, flow.port);
                let authority = self.authority.as_ref();
                let opener = authority.and_then(|own| own.opener(name, flow.port, secrets(true)));
                match flow.is_raw {
                    true => Guard::open(),
                    false => Guard::of(name, flow.port, secrets(false), opener),
                }
            }
            Target::Address(_) => Guard::open(),
        };
        let other = flow.key.other;
        let first = std::mem::take(first);
        // Its own flow is among them.
        let ends = Ends { host, guard, others: self.flows.len().saturating_sub(1) };
        match Stream::accept(other, &first, ends, now, seed, &mut self.outbox) {
            Some(stream) => self.join(slot, stream, ops),
            None => self.forget(slot),
        }
    }

    /// Puts a stream in its flow's place and watches its socket.
    pub(super) fn join(&mut self, slot: usize, stream: Stream, ops: &mut EventOps<'_>) {
        let both = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        let token = STREAMS + slot as u32;
        let watched = ops.add(Events::with_data(&stream.host(), token, both)).is_ok();
        let Some(flow) = self.flows.get(slot) else { return };
        flow.wants_turn = true;
        flow.stage = Stage::Stream(Box::new(stream));
        if !watched {
            self.end(slot, Decision::Failed, "the host cannot watch so many sockets", ops);
        }
    }

    fn failed(&mut self, id: Id, why: Failure, text: &str, ops: &mut EventOps<'_>) {
        if self.questions.contains_key(&id) {
            return self.resolved(id, None);
        }
        let Some(slot) = self.flows.slot(id) else { return };
        let Some(Flow { key, target, port, stage, .. }) = self.flows.get(slot) else { return };
        let decision = if why == Failure::Denied { Decision::Denied } else { Decision::Failed };
        let Stage::Asking { first, .. } = stage else {
            return self.end(slot, decision, text, ops);
        };
        let entry = Entry::new("connect", decision, target).by(key.protocol, *port);
        self.audit.record(entry.because(text));
        let refusal = match (why, key.protocol) {
            (Failure::Refused, Protocol::Tcp) => packet::reset(first),
            (Failure::Refused, _) => packet::refuse(first, Refusal::Port),
            (Failure::Denied, _) => packet::refuse(first, Refusal::Prohibited),
            _ => packet::refuse(first, Refusal::Unreachable),
        };
        self.outbox.push(refusal);
        self.flows.remove(slot);
    }

    /// A datagram or an echo's answer for the guest.
    fn answer(&mut self, id: Id, data: &[u8]) {
        self.rate.fill(Instant::now());
        let Some(slot) = self.flows.slot(id).filter(|_| !self.rate.is_empty()) else { return };
        self.rate.spend(data.len());
        let Some(flow) = self.flows.get(slot) else { return };
        flow.moved = Instant::now();
        flow.bytes.1 += data.len() as u64;
        let (guest, other) = (flow.key.guest, flow.key.other);
        let packet = match (flow.key.protocol, data) {
            (Protocol::Icmp, [high, low, data @ ..]) => {
                let sequence = u16::from_be_bytes([*high, *low]);
                packet::echo_reply(other.ip(), guest.ip(), guest.port(), sequence, data)
            }
            (Protocol::Udp, data) => packet::datagram(other, guest, data),
            _ => None,
        };
        let fits = packet.filter(|packet| packet.len() <= usize::from(crate::link::MTU));
        self.outbox.push(fits);
    }
}
