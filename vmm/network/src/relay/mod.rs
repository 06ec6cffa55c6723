//! The network of a Wasm isolate: what the stack is to a guest's packets, the relay is to a
//! module's sockets. Rules, names, rate and log are the same.
//!
//! ```text
//! module <- pair of sockets -> joint: guard, rate <- host's socket -> peer
//! Connect, Lookup, Listen -> relay ── Connect, Resolve ──> dialer ── sockets of streams ──> relay
//! ```
//! A module's host functions hold ends of pairs, and nothing that leads anywhere else.
//! Start reading at `Relay::run`.

mod flow;
mod joint;
mod orders;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use exocell_xgate::Protocol;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use crate::audit::{Audit, Decision, Entry};
use crate::dialer::protocol::{Failure, Id, MESSAGE_BYTES_MAX, Reply, Request};
use crate::dialer::{Client, sys};
use crate::guard::Guard;
use crate::link;
use crate::names::Names;
use crate::policy::{Peer, Policy, Target};
use crate::secrets::Secrets;
use crate::stack::rate::Rate;
use crate::stack::stream::FEW;
use crate::stack::{Published, may_call, may_open};
use flow::{Flow, Stage};
use joint::{After, Joint};
use orders::Order;
pub use orders::{Arrived, Done, Orders, Requests, orders};

/// Answers of the dialer, callers of a port or datagrams that are taken before others get
/// their turn.
const TURN_MAX: usize = 64;
/// Names that are being looked up for the module.
const LOOKUPS_MAX: usize = 64;
/// Until flows that have used up the rate get another turn.
const SLOWED: Duration = Duration::from_millis(10);
/// poll's clock is coarser than ours.
const A_BIT: Duration = Duration::from_millis(1);
/// How long what was said before an isolate's end has to go out.
const LINGER: Duration = Duration::from_secs(1);

/// What a relay is made of.
pub struct Parts {
    pub policy: Policy,
    /// To the dialer.
    pub channel: OwnedFd,
    pub published: Vec<Published>,
    pub audit: Box<dyn Audit>,
    /// What the module's host functions ask for.
    pub orders: Orders,
}

/// A connection as the module's host functions hold it.
pub struct Connection {
    /// One end of a pair of sockets: of bytes for a stream, else of messages. It does not wait.
    pub socket: OwnedFd,
    /// Whom it leads to, as the module knows it.
    pub peer: SocketAddr,
    /// Set before the end shows where it is not the end that the peer meant.
    pub was_reset: Arc<AtomicBool>,
}

/// A port that is published, and who takes its callers.
struct Port {
    published: Published,
    arrived: Option<Arrived>,
}

/// The relay of one isolate.
pub struct Relay {
    policy: Policy,
    dialer: Client,
    dialer_is_there: bool,
    ports: Vec<Port>,
    audit: Box<dyn Audit>,
    orders: Orders,
    names: Names,
    flows: BTreeMap<Id, Flow>,
    lookups: BTreeMap<Id, Done<Vec<IpAddr>>>,
    next_id: Id,
    rate: Rate,
    buffer: Vec<u8>,
}

/// Whose a descriptor is that was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Orders,
    Dialer,
    Port(usize),
    /// Of a flow: while it is waited for, whether it is the module's end; then, whether the
    /// module closed that.
    Flow(Id, bool),
}

impl Relay {
    pub fn new(parts: Parts) -> Self {
        let Parts { policy, channel, published, audit, orders } = parts;
        let port = |published| Port { published, arrived: None };
        Self {
            rate: Rate::new(policy.scope().rate_bytes, Instant::now()),
            policy,
            dialer: Client::new(channel),
            dialer_is_there: true,
            ports: published.into_iter().map(port).collect(),
            audit,
            orders,
            names: Names::default(),
            flows: BTreeMap::new(),
            lookups: BTreeMap::new(),
            next_id: 0,
            buffer: vec![0; MESSAGE_BYTES_MAX],
        }
    }

    /// Serves until nobody is left who could ask for anything.
    ///
    /// # Errors
    /// The host's, when poll(2) fails.
    pub fn run(mut self) -> io::Result<()> {
        loop {
            let ready = self.wait(None)?;
            self.rate.fill(Instant::now());
            for source in ready {
                match source {
                    Source::Orders if !self.take_orders() => return self.linger(),
                    Source::Orders => {}
                    Source::Dialer => self.replies(),
                    Source::Port(index) => self.callers(index),
                    Source::Flow(id, is_abandoned) => self.turn(id, is_abandoned),
                }
            }
            self.expire();
            self.dialer.flush();
        }
    }

    /// Gives those a turn that were silent for too long.
    fn expire(&mut self) {
        let now = Instant::now();
        let is_due = |flow: &Flow| flow.due().is_some_and(|at| at <= now);
        let due: Vec<Id> =
            self.flows.iter().filter(|(_, flow)| is_due(flow)).map(|(id, _)| *id).collect();
        due.into_iter().for_each(|id| self.turn(id, false));
    }

    /// Ends everything, once what was said has gone out or has had its time.
    fn linger(mut self) -> io::Result<()> {
        let until = Instant::now() + LINGER;
        loop {
            let all: Vec<Id> = self.flows.keys().copied().collect();
            let is_late = Instant::now() >= until;
            for id in all {
                self.turn(id, true);
                let is_asking = |flow: &Flow| matches!(flow.stage, Stage::Asking(_));
                if is_late || self.flows.get(&id).is_some_and(is_asking) {
                    self.end(id, Decision::Closed, "the isolate ended");
                }
            }
            if self.flows.is_empty() {
                return Ok(());
            }
            self.wait(Some(SLOWED))?;
            self.rate.fill(Instant::now());
        }
    }

    /// Waits for anything to do, but not longer than `most`, and says for whom.
    fn wait(&self, most: Option<Duration>) -> io::Result<Vec<Source>> {
        let mut watched: Vec<(BorrowedFd<'_>, PollFlags, Source)> =
            vec![(self.orders.event().as_fd(), PollFlags::POLLIN, Source::Orders)];
        if self.dialer_is_there {
            let out = if self.dialer.has_more() { PollFlags::POLLOUT } else { PollFlags::empty() };
            watched.push((self.dialer.as_fd(), PollFlags::POLLIN | out, Source::Dialer));
        }
        for (index, port) in self.ports.iter().enumerate() {
            let listener = port.published.listener.as_fd();
            watched.push((listener, PollFlags::POLLIN, Source::Port(index)));
        }
        let has_rate = !self.rate.is_empty();
        for (id, flow) in self.flows.iter().filter(|_| has_rate) {
            let ends = flow.watched().into_iter();
            watched.extend(ends.map(|(fd, flags, module)| (fd, flags, Source::Flow(*id, module))));
        }
        let mut polled: Vec<PollFd<'_>> =
            watched.iter().map(|(fd, flags, _)| PollFd::new(*fd, *flags)).collect();
        let slowed = (!has_rate).then_some(SLOWED);
        let due = self.flows.values().filter_map(Flow::due).min();
        let due = due.map(|at| at.saturating_duration_since(Instant::now()) + A_BIT);
        let timeout = match slowed.into_iter().chain(most).chain(due).min() {
            Some(most) => PollTimeout::try_from(most).unwrap_or(PollTimeout::MAX),
            None => PollTimeout::NONE,
        };
        match poll(&mut polled, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let told = polled.iter().map(|polled| polled.revents().unwrap_or(PollFlags::all()));
        let mut ready: Vec<Source> = Vec::new();
        for (events, (_, _, source)) in told.zip(&watched).filter(|(told, _)| !told.is_empty()) {
            let source = match *source {
                // Both ways of a pair are closed only when its other end is.
                Source::Flow(id, true) => Source::Flow(id, events.contains(PollFlags::POLLHUP)),
                other => other,
            };
            ready.push(source);
        }
        Ok(ready)
    }

    /// Does what was asked for; false when nobody is left to ask.
    fn take_orders(&mut self) -> bool {
        let _ = self.orders.event().read();
        while let Ok(order) = self.orders.waiting.try_recv() {
            match order {
                Order::Connect { protocol, peer, done } => self.connect(protocol, peer, done),
                Order::Lookup { name, done } => self.look_up(&name, done),
                Order::Listen { port, arrived, done } => self.listen(port, arrived, done),
                Order::Rules(policy) => self.change(policy),
                Order::End => return false,
            }
        }
        true
    }

    fn id(&mut self) -> Id {
        loop {
            self.next_id = self.next_id.wrapping_add(1);
            let id = self.next_id;
            if !self.flows.contains_key(&id) && !self.lookups.contains_key(&id) {
                return id;
            }
        }
    }

    /// Why nothing more may be asked for, if so.
    fn refusal(&self) -> Option<(Failure, String)> {
        if !self.dialer_is_there {
            Some((Failure::Unreachable, "nobody dials any more".to_owned()))
        } else if self.dialer.is_behind() {
            Some((Failure::Busy, "too much is asked for at once".to_owned()))
        } else {
            let may_open = may_open(&self.policy, self.flows.len(), self.callers_now());
            may_open.err().map(|reason| (Failure::Busy, reason))
        }
    }

    /// How many flows are callers of published ports.
    fn callers_now(&self) -> usize {
        self.flows.values().filter(|flow| flow.inbound).count()
    }

    fn connect(&mut self, protocol: Protocol, other: SocketAddr, done: Done<Connection>) {
        let target = match self.names.name(other.ip()) {
            Some(name) => Target::Name(name.to_owned()),
            None => Target::Address(other.ip()),
        };
        let port = other.port();
        if let Some((why, reason)) = self.refusal() {
            let entry = Entry::new("connect", Decision::Denied, &target).by(protocol, port);
            self.audit.record(entry.because(reason));
            return done(Err(why));
        }
        let id = self.id();
        let stage = Stage::Asking(done);
        let few = self.flows.len() < FEW;
        let request = Request::Connect { id, protocol, target: target.clone(), port, few };
        let flow = Flow {
            protocol,
            other,
            target,
            peer: None,
            inbound: false,
            is_raw: false,
            stage,
            bytes: (0, 0),
        };
        self.flows.insert(id, flow);
        self.dialer.say(&request);
    }

    /// A granted name gets addresses that stand for it, so that it is the name that is dialled.
    fn look_up(&mut self, name: &str, done: Done<Vec<IpAddr>>) {
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let decision = match self.policy.knows(&name) || self.policy.resolves(&name) {
            true => Entry::new("name", Decision::Allowed, &name),
            false => Entry::new("name", Decision::Denied, &name).because("no rule covers it"),
        };
        self.audit.record(decision);
        if self.policy.knows(&name) {
            let (v4, v6) = self.names.addresses(&name);
            return done(Ok(vec![v4.into(), v6.into()]));
        }
        if !self.policy.resolves(&name) {
            return done(Err(Failure::Denied));
        }
        if !self.dialer_is_there || self.lookups.len() >= LOOKUPS_MAX {
            return done(Err(Failure::Busy));
        }
        let id = self.id();
        self.lookups.insert(id, done);
        self.dialer.say(&Request::Resolve { id, name });
    }

    fn listen(&mut self, port: u16, arrived: Arrived, done: Done<()>) {
        let permitted = self.policy.scope().listen.iter().any(|ports| ports.permits(port));
        let mut ports = self.ports.iter_mut();
        let found = ports.find(|known| permitted && known.published.guest_port == port);
        let why = match found {
            None => Some("it is not published"),
            Some(known) if known.arrived.is_some() => Some("it is listened at already"),
            Some(known) => {
                known.arrived = Some(arrived);
                None
            }
        };
        let Some(why) = why else { return done(Ok(())) };
        let entry = Entry::new("listen", Decision::Denied, "the isolate");
        self.audit.record(entry.by(Protocol::Tcp, port).because(why));
        done(Err(Failure::Denied));
    }

    /// Takes the callers of a published port.
    fn callers(&mut self, index: usize) {
        for _ in 0..TURN_MAX {
            let Some(port) = self.ports.get(index) else { return };
            let Ok((caller, at)) = port.published.listener.accept() else { return };
            if caller.set_nonblocking(true).is_ok() {
                self.caller(index, caller.into(), at);
            }
        }
    }

    fn caller(&mut self, index: usize, caller: OwnedFd, at: SocketAddr) {
        let id = self.id();
        let Some(port) = self.ports.get(index) else { return };
        let mut entry = Entry::new("listen", Decision::Allowed, "published port")
            .by(Protocol::Tcp, port.published.guest_port)
            .to(at);
        let other = SocketAddr::new(link::STACK_V4.into(), port.published.guest_port);
        let joined = match &port.arrived {
            None => Err("nobody listens".to_owned()),
            Some(arrived) => {
                let may_call = may_call(self.flows.len(), self.callers_now());
                let joined = may_call.and_then(|()| Ok(join(other, caller, Guard::open())?));
                joined.map(|(stage, connection)| {
                    arrived(connection);
                    stage
                })
            }
        };
        match joined {
            Ok(stage) => {
                let target = Target::Address(other.ip());
                let flow = Flow {
                    protocol: Protocol::Tcp,
                    other,
                    target,
                    peer: Some(Peer { at, is_own: false }),
                    inbound: true,
                    is_raw: false,
                    stage,
                    bytes: (0, 0),
                };
                self.flows.insert(id, flow);
            }
            Err(why) => {
                entry.decision = Decision::Denied;
                entry = entry.because(why);
            }
        }
        self.audit.record(entry);
    }

    fn replies(&mut self) {
        for _ in 0..TURN_MAX {
            match sys::receive_with(self.dialer.as_fd(), &mut self.buffer) {
                Ok((bytes @ 1.., passed)) => {
                    let reply = Reply::decode(self.buffer.get(..bytes).unwrap_or_default());
                    if let Some(reply) = reply {
                        self.reply(reply, passed);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => return self.dialer_is_gone(),
            }
        }
    }

    fn dialer_is_gone(&mut self) {
        self.dialer_is_there = false;
        let lookups = std::mem::take(&mut self.lookups);
        lookups.into_values().for_each(|done| done(Err(Failure::Unreachable)));
        let needs_it = |flow: &Flow| !matches!(flow.stage, Stage::Stream(_));
        let asking: Vec<Id> =
            self.flows.iter().filter(|(_, flow)| needs_it(flow)).map(|(id, _)| *id).collect();
        for id in asking {
            self.failed(id, Failure::Unreachable, "nobody dials any more");
        }
    }

    fn reply(&mut self, reply: Reply, passed: Option<OwnedFd>) {
        match reply {
            Reply::Connected { id, peer } => self.connected(id, peer, passed),
            Reply::Failed { id, why, text } => self.failed(id, why, &text),
            Reply::Datagram { id, data } => self.datagram(id, &data),
            // No port of datagrams is published for a module.
            Reply::Called { .. } => {}
            Reply::Resolved { id, addresses } => {
                if let Some(done) = self.lookups.remove(&id) {
                    done(Ok(addresses));
                }
            }
        }
    }

    fn connected(&mut self, id: Id, peer: Peer, passed: Option<OwnedFd>) {
        let Some(flow) = self.flows.get(&id) else {
            return self.dialer.say(&Request::Close { id });
        };
        // The dialer may have connected it before it heard of the rules of now.
        let permitted = self.policy.permits(flow.protocol, &flow.target, peer, flow.port());
        if let Err(denied) = permitted {
            self.dialer.say(&Request::Close { id });
            return self.failed(id, Failure::Denied, &denied.to_string());
        }
        let Some(flow) = self.flows.remove(&id) else { return };
        let Flow { protocol, other, target, stage, .. } = flow;
        let Stage::Asking(done) = stage else { return };
        let is_raw = match &target {
            Target::Name(name) => self.policy.is_raw(name, other.port()),
            Target::Address(_) => false,
        };
        let guard = match &target {
            Target::Name(_) if is_raw => Guard::open(),
            Target::Name(name) => Guard::of(name, other.port(), Secrets::default(), None),
            Target::Address(_) => Guard::open(),
        };
        let joined = match passed {
            Some(host) => join(other, host, guard),
            None => pair_for_datagrams(other),
        };
        let entry = Entry::new("connect", Decision::Allowed, &target).by(protocol, other.port());
        match joined {
            Ok((stage, connection)) => {
                self.audit.record(entry.to(peer.at));
                let peer = Some(peer);
                let flow = Flow {
                    protocol,
                    other,
                    target,
                    peer,
                    inbound: false,
                    is_raw,
                    stage,
                    bytes: (0, 0),
                };
                self.flows.insert(id, flow);
                done(Ok(connection));
            }
            Err(why) => {
                self.audit.record(Entry { decision: Decision::Failed, ..entry.because(why) });
                self.dialer.say(&Request::Close { id });
                done(Err(Failure::Busy));
            }
        }
    }

    fn failed(&mut self, id: Id, why: Failure, text: &str) {
        if let Some(done) = self.lookups.remove(&id) {
            return done(Err(why));
        }
        let decision = if why == Failure::Denied { Decision::Denied } else { Decision::Failed };
        let Some(flow) = self.flows.get(&id) else { return };
        if !matches!(flow.stage, Stage::Asking(_)) {
            return self.end(id, decision, text);
        }
        let entry =
            Entry::new("connect", decision, &flow.target).by(flow.protocol, flow.other.port());
        self.audit.record(entry.because(text));
        if let Some(Flow { stage: Stage::Asking(done), .. }) = self.flows.remove(&id) {
            done(Err(why));
        }
    }

    /// A datagram for the module; what it does not take at once is lost.
    fn datagram(&mut self, id: Id, data: &[u8]) {
        if self.rate.is_empty() {
            return;
        }
        if let Some(Flow { stage: Stage::Datagrams(module), bytes, .. }) = self.flows.get_mut(&id) {
            self.rate.spend(data.len());
            bytes.1 += data.len() as u64;
            let _ = sys::send(module.as_fd(), data);
        }
    }

    /// Moves what can be moved of one flow. `is_abandoned` says that the module closed it.
    fn turn(&mut self, id: Id, is_abandoned: bool) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let (decision, reason) = match &mut flow.stage {
            Stage::Asking(_) => return,
            Stage::Stream(joint) => {
                match joint.turn(is_abandoned, &mut self.rate, &mut self.buffer) {
                    After::Idle => return,
                    After::Over => (Decision::Closed, String::new()),
                    After::Broken => (Decision::Closed, "reset".to_owned()),
                    After::Misused(unlike) => (Decision::Cut, unlike.to_string()),
                }
            }
            Stage::Datagrams(_) => {
                self.pass_datagrams(id);
                if !is_abandoned {
                    return;
                }
                (Decision::Closed, String::new())
            }
        };
        self.end(id, decision, &reason);
    }

    /// The module's datagrams to the dialer; one that does not go at once is lost.
    fn pass_datagrams(&mut self, id: Id) {
        for _ in 0..TURN_MAX {
            let Some(flow) = self.flows.get_mut(&id) else { return };
            let Stage::Datagrams(module) = &flow.stage else { return };
            if self.rate.is_empty() {
                return;
            }
            let Ok(bytes @ 1..) = sys::receive(module.as_fd(), &mut self.buffer) else { return };
            let data = self.buffer.get(..bytes).unwrap_or_default().to_vec();
            flow.bytes.0 += bytes as u64;
            self.rate.spend(bytes);
            self.dialer.pass(&Request::Datagram { id, data });
        }
    }

    /// Ends a flow on both sides and writes that down.
    fn end(&mut self, id: Id, decision: Decision, reason: &str) {
        let Some(flow) = self.flows.remove(&id) else { return };
        let event = if flow.inbound { "listen" } else { "connect" };
        let mut entry = Entry::new(event, decision, &flow.target).by(flow.protocol, flow.port());
        entry.peer = flow.peer.map(|peer| peer.at);
        entry.bytes = Some(flow.bytes());
        self.audit.record(entry.because(reason));
        match flow.stage {
            Stage::Stream(joint) if decision != Decision::Closed => {
                joint.was_reset.store(true, Ordering::Release);
            }
            Stage::Stream(_) => {}
            Stage::Asking(_) | Stage::Datagrams(_) => self.dialer.say(&Request::Close { id }),
        }
    }

    /// Takes new rules and cuts what they do not permit.
    fn change(&mut self, policy: Policy) {
        self.rate = Rate::new(policy.scope().rate_bytes, Instant::now());
        self.policy = policy;
        self.dialer.say(&Request::Policy { rules: self.policy.to_text() });
        let listens = |port| self.policy.scope().listen.iter().any(|ports| ports.permits(port));
        self.ports.retain(|port| listens(port.published.guest_port));
        let is_kept = |flow: &Flow| match (flow.inbound, flow.peer) {
            (true, _) => listens(flow.port()),
            // The rules are asked when the dialer's answer comes.
            (false, None) => true,
            (false, Some(peer)) => {
                let port = flow.port();
                let permitted = self.policy.permits(flow.protocol, &flow.target, peer, port);
                permitted.is_ok() && self.policy.guards_no_less(flow.is_raw, &flow.target, port)
            }
        };
        let gone: Vec<Id> =
            self.flows.iter().filter(|(_, flow)| !is_kept(flow)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.end(id, Decision::Cut, "no longer permitted"));
    }
}

/// A stream's two halves: the one that is served here, and the module's.
fn join(
    peer: SocketAddr,
    host: OwnedFd,
    guard: Guard,
) -> Result<(Stage, Connection), &'static str> {
    let (ours, socket) = pair(SockType::Stream)?;
    let was_reset = Arc::new(AtomicBool::new(false));
    let joint = Joint::new(ours, host, guard, was_reset.clone());
    let stage = Stage::Stream(Box::new(joint));
    Ok((stage, Connection { socket, peer, was_reset }))
}

fn pair_for_datagrams(peer: SocketAddr) -> Result<(Stage, Connection), &'static str> {
    let (ours, socket) = pair(SockType::SeqPacket)?;
    let was_reset = Arc::default();
    Ok((Stage::Datagrams(ours), Connection { socket, peer, was_reset }))
}

fn pair(kind: SockType) -> Result<(OwnedFd, OwnedFd), &'static str> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socketpair(AddressFamily::Unix, kind, None, flags)
        .map_err(|_| "the host has no descriptors left for it")
}

#[cfg(test)]
mod tests;
