//! The stack at the end of a guest's link: it ends every flow of the guest and
//! has the dialer open another one on the host's side.
//!
//! ```text
//! first packet of a flow -> address or name -> [dialer: policy, connect]
//!     Connected -> stream or datagrams, until either end or the policy ends it
//!     Failed    -> a refusal to the guest
//! ```
//! A guest's handshake is answered only when the host's connection stands.
//! Start reading at `Stack::packet` (in), `Stack::reply` (the dialer's answers)
//! and `Stack::turn` (all that moves).

mod calls;
mod flow;
mod opened;
mod outbox;
mod ports;
mod publish;
pub(crate) mod rate;
mod replies;
pub(crate) mod stream;
mod work;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use event_manager::{EventOps, EventSet, Events};
use exocell_vmm::devices::Link;
use exocell_vmm::devices::net::LINK_TOKENS;
use exocell_xgate::Protocol;
use nix::sys::timerfd::TimerFd;

use crate::audit::{Audit, Decision, Entry};
use crate::authority::Authority;
use crate::dialer::protocol::{Id, Request};
use crate::dialer::{Client, sys};
use crate::dns::{self, Asked, Reaction};
use crate::link;
use crate::names::Names;
use crate::packet::{self, Carried, Packet, Refusal};
use crate::policy::{Policy, Target};
use crate::secrets::Secrets;
use crate::switch::{Ports, Way};
use flow::{Flow, Flows, Key, Stage};
use outbox::Outbox;
pub use publish::Published;
use rate::Rate;
use stream::FEW;
pub use work::{Changer, Changes};

/// Flows at once, unless the grant says less of those that the cell opens.
pub const CONNECTIONS_MAX: u32 = 256;
/// Callers of published ports among them: whoever calls and says nothing does not take the
/// cell's own way out.
pub const CALLERS_MAX: usize = 192;
/// Callers of published ports of datagrams, beside all of these. For one more, the one that has
/// said nothing for the longest time is forgotten.
const DATAGRAM_CALLERS_MAX: usize = 256;
/// Questions for names that the host is asked.
const QUESTIONS_MAX: usize = 64;
const DNS_PORT: u16 = 53;

const DIALER: u32 = LINK_TOKENS;
const TIMER: u32 = LINK_TOKENS + 1;
const CHANGES: u32 = LINK_TOKENS + 2;
const PORTS: u32 = LINK_TOKENS + 0x10;
const LISTENERS: u32 = LINK_TOKENS + 0x100;
const STREAMS: u32 = LINK_TOKENS + 0x1_0000;

/// What a stack is made of.
pub struct Parts {
    pub policy: Policy,
    /// To the dialer.
    pub channel: OwnedFd,
    pub published: Vec<Published>,
    /// The guest's ports that datagrams are led to, by the numbers that the dialer knows them by.
    pub doors: Vec<u16>,
    pub audit: Box<dyn Audit>,
    /// Changes of the policy while the cell runs.
    pub changes: Changes,
    pub secrets: Secrets,
    /// `None` where no TLS is opened.
    pub authority: Option<Authority>,
    /// The networks between cells that it is in.
    pub ports: Ports,
}

/// The stack of one cell.
pub struct Stack {
    policy: Policy,
    dialer: Client,
    published: Vec<Published>,
    doors: Vec<u16>,
    audit: Box<dyn Audit>,
    changes: Changes,
    secrets: Secrets,
    authority: Option<Authority>,
    ports: Ports,
    names: Names,
    flows: Flows,
    /// The flow that has the next turn.
    first_slot: usize,
    questions: HashMap<Id, (Asked, SocketAddr, SocketAddr)>,
    next_question: Id,
    outbox: Outbox,
    rate: Rate,
    timer: TimerFd,
    armed: Option<Instant>,
    started: Instant,
    next_port: u16,
    buffer: Vec<u8>,
    seed: u64,
    /// More answers of the dialer are there than were taken.
    wants_replies: bool,
    begun: bool,
}

impl Stack {
    /// A stack for a guest that has not come yet.
    ///
    /// # Errors
    /// The host's, where there is no timer or no random number.
    pub fn new(parts: Parts) -> std::io::Result<Self> {
        use nix::sys::timerfd::{ClockId, TimerFlags};
        let Parts { policy, channel, published, doors, audit, changes, secrets, authority, ports } =
            parts;
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        let now = Instant::now();
        let mut seed = 0;
        for _ in 0..4 {
            seed = seed << 16 | u64::from(sys::random_u16()?);
        }
        Ok(Self {
            rate: Rate::new(policy.scope().rate_bytes, now),
            policy,
            dialer: Client::new(channel),
            published,
            doors,
            audit,
            changes,
            secrets,
            authority,
            ports,
            names: Names::default(),
            flows: Flows::default(),
            first_slot: 0,
            questions: HashMap::new(),
            next_question: 0,
            outbox: Outbox::default(),
            timer: TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?,
            armed: None,
            started: now,
            next_port: publish::PORT_FIRST,
            buffer: vec![0; crate::dialer::protocol::MESSAGE_BYTES_MAX],
            seed,
            wants_replies: false,
            begun: false,
        })
    }

    fn now(&self) -> smoltcp::time::Instant {
        smoltcp::time::Instant::from_micros(self.started.elapsed().as_micros() as i64)
    }

    fn seed(&mut self) -> u64 {
        // A step of a generator with the whole period (Knuth's MMIX).
        self.seed =
            self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(0x14057b7ef767814f);
        self.seed ^ self.seed >> 29
    }

    fn take_packet(&mut self, bytes: &[u8]) {
        // A guest's kernel tells its neighbours of itself; there are none.
        if packet::is_for_group(bytes) && packet::is_control(bytes) {
            return;
        }
        match self.ports.way(bytes) {
            Way::Elsewhere => {}
            Way::Port(place) => return self.send(place, bytes),
            Way::Gateway => return self.gateway(bytes),
            Way::Foreign => return self.drop_packet("?", "not the cell's address in that network"),
        }
        let Some(packet) = packet::parse(bytes) else {
            return self.drop_packet("?", "malformed, a fragment, or with extension headers");
        };
        if !link::is_guest(packet.source.ip()) {
            return self.drop_packet(packet.source.ip(), "not the address of the cell");
        }
        let (source, destination) = (packet.source, packet.destination);
        match packet.carried {
            Carried::Tcp { opens, resets } => self.segment(&packet, bytes, opens, resets),
            Carried::Udp(data) if link::is_stack(destination.ip()) => match destination.port() {
                DNS_PORT => self.question(data, source, destination),
                _ if self.answers_call(source, destination, data) => {}
                _ => {
                    self.nobody_listens(Protocol::Udp, destination);
                    self.refuse(bytes, Refusal::Port);
                }
            },
            Carried::Udp(data) => self.datagram(&packet, bytes, Protocol::Udp, data),
            Carried::Echo { ident, sequence, data } if link::is_stack(destination.ip()) => {
                let (from, to) = (destination.ip(), source.ip());
                self.outbox.push(packet::echo_reply(from, to, ident, sequence, data));
            }
            Carried::Echo { ident, sequence, data } => {
                let packet = Packet { source: SocketAddr::new(source.ip(), ident), ..packet };
                let data = [&sequence.to_be_bytes()[..], data].concat();
                self.datagram(&packet, bytes, Protocol::Icmp, &data);
            }
            Carried::Other(number) => self.other(number, destination.ip(), bytes),
        }
    }

    /// Writes a packet down that goes nowhere and is not answered.
    fn drop_packet(&mut self, who: impl ToString, why: &str) {
        self.audit.record(Entry::new("packet", Decision::Denied, who).because(why));
    }

    fn nobody_listens(&mut self, protocol: Protocol, at: SocketAddr) {
        let entry = Entry::new("connect", Decision::Denied, at.ip()).by(protocol, at.port());
        self.audit.record(entry.because("nobody listens at the link's own address"));
    }

    /// Nothing but TCP, UDP and echoes goes anywhere.
    fn other(&mut self, number: u8, to: IpAddr, bytes: &[u8]) {
        // Messages of ICMP that are no echoes are about flows that are over.
        if !matches!(number, 1 | 58) {
            let entry = Entry::new("packet", Decision::Denied, to);
            self.audit.record(entry.because(format!("protocol {number} is not carried")));
            self.refuse(bytes, Refusal::Prohibited);
        }
    }

    fn refuse(&mut self, packet: &[u8], why: Refusal) {
        self.outbox.push(packet::refuse(packet, why));
    }

    fn question(&mut self, message: &[u8], from: SocketAddr, to: SocketAddr) {
        // A name that a rule grants is never a neighbour's.
        let policy = &self.policy;
        let find = |name: &str| if policy.claims(name) { None } else { self.ports.find(name) };
        let found = dns::neighbour(message, find);
        match found.unwrap_or_else(|| dns::react(message, &self.policy, &mut self.names)) {
            Reaction::Ignore => {}
            Reaction::Answer { bytes, name, granted } => {
                let decision = if granted { Decision::Allowed } else { Decision::Denied };
                let entry = Entry::new("name", decision, &name);
                self.audit.record(if granted { entry } else { entry.because("no rule covers it") });
                self.outbox.push(packet::datagram(to, from, &bytes));
            }
            Reaction::Resolve(asked) => {
                if self.questions.len() >= QUESTIONS_MAX {
                    return;
                }
                self.audit.record(Entry::new("name", Decision::Allowed, &asked.name));
                // Beyond the numbers of flows.
                self.next_question = self.next_question.wrapping_add(1) & 0xffff;
                let id = self.next_question << 16 | 0xffff;
                self.dialer.say(&Request::Resolve { id, name: asked.name.clone() });
                self.questions.insert(id, (asked, from, to));
            }
        }
    }

    fn segment(&mut self, packet: &Packet<'_>, bytes: &[u8], opens: bool, resets: bool) {
        let (guest, other) = (packet.source, packet.destination);
        let key = Key { protocol: Protocol::Tcp, guest, other };
        if let Some(slot) = self.flows.find(&key) {
            let now = self.now();
            let Some(flow) = self.flows.get(slot) else { return };
            flow.moved = Instant::now();
            flow.wants_turn = true;
            match &mut flow.stage {
                Stage::Stream(stream) => stream.receive(bytes, now, &mut self.outbox),
                // The guest has lost patience.
                Stage::Asking { .. } if resets => self.forget(slot),
                Stage::Asking { .. } | Stage::Datagrams => {}
            }
            return;
        }
        match opens {
            true if !link::is_stack(other.ip()) => return self.open(key, bytes, None),
            true => self.nobody_listens(Protocol::Tcp, other),
            // What belongs to no stream is answered as any host does.
            false => {}
        }
        self.outbox.push(packet::reset(bytes));
    }

    fn datagram(&mut self, packet: &Packet<'_>, bytes: &[u8], protocol: Protocol, data: &[u8]) {
        let key = Key { protocol, guest: packet.source, other: packet.destination };
        let Some(slot) = self.flows.find(&key) else {
            return self.open(key, bytes, Some(data));
        };
        let id = self.flows.id(slot);
        let Some(flow) = self.flows.get(slot) else { return };
        flow.moved = Instant::now();
        flow.bytes.0 += data.len() as u64;
        match &flow.stage {
            Stage::Asking { .. } => self.flows.keep(slot, data),
            Stage::Datagrams => self.pass(id, data),
            Stage::Stream(_) => {}
        }
    }

    /// A datagram to the dialer; one that does not go at once is lost.
    fn pass(&mut self, id: Id, data: &[u8]) {
        self.rate.fill(Instant::now());
        if !self.dialer.has_more() && !self.rate.is_empty() {
            self.rate.spend(data.len());
            self.dialer.pass(&Request::Datagram { id, data: data.to_vec() });
        }
    }

    /// Asks the dialer for a flow that the guest wants, whose first datagram `early` is.
    fn open(&mut self, key: Key, first: &[u8], early: Option<&[u8]>) {
        let address = key.other.ip();
        let target = match self.names.name(address) {
            Some(name) => Target::Name(name.to_owned()),
            None => Target::Address(address),
        };
        let (protocol, port) = (key.protocol, key.other.port());
        if self.dialer.is_behind() {
            // The dialer is behind; the guest's next try may find it ready.
            return self.refuse(first, Refusal::Unreachable);
        }
        if let Err(reason) = may_open(&self.policy, self.flows.connections(), self.flows.callers())
        {
            let entry = Entry::new("connect", Decision::Denied, &target).by(protocol, port);
            self.audit.record(entry.because(reason));
            return self.refuse(first, Refusal::Unreachable);
        }
        let first = if early.is_some() { packet::quoted(first) } else { first };
        if first.len() > packet::QUOTED_BYTES_MAX && !self.flows.may_wait(first.len()) {
            // A segment with much in it; the guest's next try may find room.
            return;
        }
        let stage = Stage::Asking { first: first.to_vec(), early: VecDeque::new() };
        let few = self.flows.len() < FEW;
        let slot = self.flows.add(Flow::new(key, target.clone(), port, stage));
        early.into_iter().for_each(|data| self.flows.keep(slot, data));
        let id = self.flows.id(slot);
        self.dialer.say(&Request::Connect { id, protocol, target, port, few });
    }

    /// Drops a flow without a word to anyone but the dialer.
    fn forget(&mut self, slot: usize) {
        let id = self.flows.id(slot);
        if self.flows.remove(slot).is_some() {
            self.dialer.say(&Request::Close { id });
        }
    }
}

/// Whether there is room for one flow more that the cell opens, beside `all` and the callers
/// of published ports among them.
pub(crate) fn may_open(policy: &Policy, all: usize, callers: usize) -> Result<(), String> {
    let limit = policy.scope().connections_max.unwrap_or(CONNECTIONS_MAX);
    let own = all.saturating_sub(callers);
    if own < limit as usize && all < CONNECTIONS_MAX as usize {
        return Ok(());
    }
    let callers = match callers {
        0 => String::new(),
        _ => format!(", {callers} more by callers of published ports"),
    };
    Err(format!("{own} flows are open, which is the limit{callers}"))
}

/// Whether there is room for one caller more.
pub(crate) fn may_call(all: usize, callers: usize) -> Result<(), String> {
    if callers < CALLERS_MAX && all < CONNECTIONS_MAX as usize {
        return Ok(());
    }
    Err(format!(
        "{all} flows are open, {callers} of them by callers, of whom the limit is {CALLERS_MAX}"
    ))
}

impl Link for Stack {
    fn watch(&mut self, ops: &mut EventOps<'_>) {
        // Edge-triggered: what comes before the guest does waits for it without
        // waking anyone (`Stack::begin`).
        let input = EventSet::IN | EventSet::EDGE_TRIGGERED;
        // Nothing is registered yet; only a full epoll set can fail.
        let _ = ops.add(Events::with_data(&self.dialer, DIALER, input | EventSet::OUT));
        let _ = ops.add(Events::with_data(&self.timer.as_fd(), TIMER, input));
        let _ = ops.add(Events::with_data(self.changes.event(), CHANGES, input));
        for (published, token) in self.published.iter().zip(LISTENERS..) {
            let _ = ops.add(Events::with_data(&published.listener, token, input));
        }
        self.ports.places().into_iter().for_each(|place| self.watch_port(place, ops));
    }

    fn packet(&mut self, packet: &[u8]) {
        self.take_packet(packet);
    }

    fn host_event(&mut self, token: u32, set: EventSet, ops: &mut EventOps<'_>) {
        match token {
            DIALER => {
                self.dialer.flush();
                self.replies(ops);
            }
            TIMER => {
                let _ = self.timer.wait();
                self.armed = None;
            }
            CHANGES => self.change(ops),
            PORTS..LISTENERS => self.port_event((token - PORTS) as usize, set),
            STREAMS.. => self.stream_event((token - STREAMS) as usize, set),
            _ => self.accept((token - LISTENERS) as usize, ops),
        }
    }

    fn turn(&mut self, ops: &mut EventOps<'_>) -> bool {
        self.work(ops)
    }

    fn outbox(&mut self) -> &mut VecDeque<Vec<u8>> {
        &mut self.outbox.queue
    }

    fn delivered(&mut self, packet: Vec<u8>) {
        self.outbox.recycle(packet);
    }

    fn disconnect(&mut self, ops: &mut EventOps<'_>) {
        for slot in self.flows.all() {
            self.end(slot, Decision::Closed, "the guest is gone", ops);
        }
        self.outbox.queue.clear();
    }
}

#[cfg(test)]
mod tests;
