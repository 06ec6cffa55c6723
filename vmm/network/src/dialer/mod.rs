//! The dialer: a process of the cell that is in the host's network, where the
//! rest of the cell is in none. It alone turns names into addresses and opens
//! sockets, and it does so only where the policy permits it.
//!
//! ```text
//! guest packets -> stack (a thread of the supervisor, no network)
//!                    | Connect, Resolve, Datagram        sockets of streams |
//!                    v                                                      |
//!                  dialer (this process, the host's network) ---------------+
//! ```
//! It reads no packet of the guest. A stack that a guest has taken over can ask
//! it for what the policy permits, and no more; the sockets of streams that it
//! hands over are connected, and no filter of the supervisor's threads lets
//! them be connected to anyone else.

mod attempt;
mod client;
mod doors;
mod hosts;
pub mod protocol;
mod resolver;
pub mod sys;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use exocell_xgate::Protocol;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use attempt::{Attempt, Step, Wish};
pub use client::Client;
use doors::Doors;
pub use hosts::Hosts;
use protocol::{Failure, Id, MESSAGE_BYTES_MAX, Reply, Request};
use resolver::{Outcome, Resolved, Resolver};

use crate::policy::{Peer, Policy, Target};

/// Flows of datagrams, and connections under way, that may exist at once.
const FLOWS_MAX: usize = 1024;
/// Messages taken from one socket before the others get their turn.
const TURN_MAX: usize = 64;
/// Answers that wait for the stack; when there are more it is gone or broken.
const BACKLOG_MAX: usize = 4 * FLOWS_MAX;

/// A flow of datagrams or echoes.
struct Flow {
    protocol: Protocol,
    target: Target,
    peer: Peer,
    socket: OwnedFd,
}

/// Someone who waits for a name.
enum Waiter {
    Connect(Wish),
    Resolve { id: Id },
}

impl Waiter {
    fn id(&self) -> Id {
        match self {
            Self::Connect(Wish { id, .. }) | Self::Resolve { id } => *id,
        }
    }
}

/// The state of a dialer.
pub struct Dialer {
    channel: OwnedFd,
    policy: Policy,
    resolver: Resolver,
    waiting: HashMap<String, Vec<Waiter>>,
    attempts: Vec<Attempt>,
    flows: HashMap<Id, Flow>,
    doors: Doors,
    backlog: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    buffer: Vec<u8>,
}

impl Dialer {
    /// A dialer for the stack at the other end of `channel`.
    pub fn new(channel: OwnedFd, policy: Policy, hosts: Hosts) -> Self {
        Self {
            channel,
            policy,
            resolver: Resolver::new(hosts),
            waiting: HashMap::new(),
            attempts: Vec::new(),
            flows: HashMap::new(),
            doors: Doors::default(),
            backlog: VecDeque::new(),
            buffer: vec![0; MESSAGE_BYTES_MAX],
        }
    }

    /// With published ports of datagrams: sockets that are bound and do not wait, by their numbers.
    #[must_use]
    pub fn with_doors(self, sockets: Vec<UdpSocket>) -> Self {
        Self { doors: Doors::new(sockets), ..self }
    }

    /// Serves the stack until it is gone.
    ///
    /// # Errors
    /// The host's, when poll(2) or the channel itself fails.
    pub fn run(mut self) -> io::Result<()> {
        loop {
            self.wait()?;
            if !self.take_requests()? {
                return Ok(());
            }
            let resolved = [self.resolver.ready(), self.resolver.expire()].concat();
            resolved.into_iter().for_each(|resolved| self.resolved(resolved));
            self.advance();
            self.take_datagrams();
            self.take_calls();
            self.flush()?;
        }
    }

    /// Waits for anything to do.
    fn wait(&self) -> io::Result<()> {
        let input = PollFlags::POLLIN;
        let output = if self.backlog.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
        let mut watched = vec![PollFd::new(self.channel.as_fd(), input | output)];
        watched.extend(self.resolver.watched().map(|(socket, events)| PollFd::new(socket, events)));
        let connecting = self.attempts.iter().filter_map(Attempt::socket);
        watched.extend(connecting.map(|socket| PollFd::new(socket, PollFlags::POLLOUT)));
        watched.extend(self.flows.values().map(|flow| PollFd::new(flow.socket.as_fd(), input)));
        watched.extend(self.doors.watched().map(|socket| PollFd::new(socket, input)));
        let due = self.resolver.due().into_iter().chain(self.attempts.iter().map(Attempt::due));
        let timeout = match due.min() {
            // A millisecond more: poll's clock is coarser than ours.
            Some(at) => at.saturating_duration_since(Instant::now()) + Duration::from_millis(1),
            None => return none_or_interrupted(poll(&mut watched, PollTimeout::NONE)),
        };
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        none_or_interrupted(poll(&mut watched, timeout))
    }

    /// Whether the stack is still there.
    fn take_requests(&mut self) -> io::Result<bool> {
        for _ in 0..TURN_MAX {
            let mut buffer = std::mem::take(&mut self.buffer);
            let received = sys::receive(self.channel.as_fd(), &mut buffer);
            let request = match &received {
                Ok(bytes) => Request::decode(buffer.get(..*bytes).unwrap_or_default()),
                Err(_) => None,
            };
            self.buffer = buffer;
            match received {
                Ok(0) => return Ok(false),
                Ok(_) => request.into_iter().for_each(|request| self.take(request)),
                Err(error) if is_passing(&error) => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn take(&mut self, request: Request) {
        match request {
            Request::Connect { id, protocol, target, port, few } => {
                let waiting: usize = self.waiting.values().map(Vec::len).sum();
                if self.flows.len() + self.attempts.len() + waiting >= FLOWS_MAX {
                    return self.fail(id, Failure::Busy, "too many connections at once");
                }
                self.connect(Wish { id, protocol, port, few }, target);
            }
            Request::Resolve { id, name } => self.resolve(id, &name),
            Request::Datagram { id, data } => {
                if let Some(flow) = self.flows.get(&id) {
                    attempt::send_datagram(flow.protocol, flow.peer.at, &flow.socket, &data);
                }
            }
            Request::Close { id } => {
                self.flows.remove(&id);
                self.attempts.retain(|attempt| attempt.id() != id);
                for waiters in self.waiting.values_mut() {
                    waiters.retain(|waiter| waiter.id() != id);
                }
            }
            Request::Answer { door, to, data } => self.doors.answer(door, to, &data),
            Request::Policy { rules } => self.change(Policy::from_text(&rules).unwrap_or_default()),
        }
    }

    fn connect(&mut self, wish: Wish, target: Target) {
        match target {
            Target::Address(address) => {
                let target = Target::Address(address);
                self.attempt(Attempt::new(wish, target, vec![address]));
            }
            Target::Name(name) => {
                if let Err(denied) = self.policy.permits_name(wish.protocol, &name, wish.port) {
                    return self.fail(wish.id, Failure::Denied, &denied.to_string());
                }
                match self.resolver.start(&name) {
                    Outcome::Now(addresses) => {
                        let target = Target::Name(name);
                        self.attempt(Attempt::new(wish, target, addresses));
                    }
                    Outcome::Later => {
                        let waiter = Waiter::Connect(wish);
                        self.waiting.entry(name).or_default().push(waiter);
                    }
                    Outcome::Busy => self.fail(wish.id, Failure::Busy, "too many names at once"),
                }
            }
        }
    }

    fn resolve(&mut self, id: Id, name: &str) {
        if !self.policy.resolves(name) {
            return self.fail(id, Failure::Denied, "no rule covers it");
        }
        if self.waiting.values().map(Vec::len).sum::<usize>() >= FLOWS_MAX {
            return self.fail(id, Failure::Busy, "too many names at once");
        }
        match self.resolver.start(name) {
            Outcome::Now(addresses) => self.say(&Reply::Resolved { id, addresses }),
            Outcome::Later => {
                self.waiting.entry(name.to_owned()).or_default().push(Waiter::Resolve { id });
            }
            Outcome::Busy => self.fail(id, Failure::Busy, "too many names at once"),
        }
    }

    fn resolved(&mut self, (name, addresses): Resolved) {
        for waiter in self.waiting.remove(&name).unwrap_or_default() {
            let addresses = addresses.clone();
            match waiter {
                Waiter::Resolve { id } => self.say(&Reply::Resolved { id, addresses }),
                Waiter::Connect(wish) => {
                    let target = Target::Name(name.clone());
                    self.attempt(Attempt::new(wish, target, addresses));
                }
            }
        }
    }

    fn attempt(&mut self, attempt: Attempt) {
        let step = attempt.next(&self.policy);
        self.step(step);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Wait(attempt) => self.attempts.push(attempt),
            Step::Failed { id, why, text } => self.fail(id, why, &text),
            Step::Done { id, protocol, target, peer, socket } => {
                let reply = Reply::Connected { id, peer }.encode();
                if protocol == Protocol::Tcp {
                    return self.backlog.push_back((reply, Some(socket)));
                }
                self.flows.insert(id, Flow { protocol, target, peer, socket });
                self.backlog.push_back((reply, None));
            }
        }
    }

    /// Takes every connection under way one step on.
    fn advance(&mut self) {
        for attempt in std::mem::take(&mut self.attempts) {
            let step = attempt.advance(&self.policy);
            self.step(step);
        }
    }

    fn take_datagrams(&mut self) {
        let mut ended = Vec::new();
        for (id, flow) in &self.flows {
            for _ in 0..TURN_MAX {
                match sys::receive(flow.socket.as_fd(), &mut self.buffer) {
                    Ok(bytes) => {
                        let data = self.buffer.get(..bytes).unwrap_or_default();
                        let Some(data) = attempt::received(flow.protocol, flow.peer.at, data)
                        else {
                            continue;
                        };
                        // A full channel loses datagrams, as networks do.
                        let reply = Reply::Datagram { id: *id, data }.encode();
                        let _ = sys::send(self.channel.as_fd(), &reply);
                    }
                    Err(error) if is_passing(&error) => break,
                    Err(error) => {
                        ended.push((*id, error));
                        break;
                    }
                }
            }
        }
        for (id, error) in ended {
            self.flows.remove(&id);
            self.fail(id, Failure::Refused, &error.to_string());
        }
    }

    /// What callers of published ports say.
    fn take_calls(&mut self) {
        for door in 0..self.doors.len() {
            for _ in 0..TURN_MAX {
                let Some((bytes, from)) = self.doors.take(door, &mut self.buffer) else { break };
                let data = self.buffer.get(..bytes).unwrap_or_default().to_vec();
                // A full channel loses datagrams, as networks do.
                let reply = Reply::Called { door: door as u32, from, data }.encode();
                let _ = sys::send(self.channel.as_fd(), &reply);
            }
        }
    }

    /// Ends what the new rules do not permit.
    fn change(&mut self, policy: Policy) {
        self.policy = policy;
        let policy = &self.policy;
        self.flows.retain(|_, flow| {
            policy.permits(flow.protocol, &flow.target, flow.peer, flow.peer.at.port()).is_ok()
        });
        // Those under way are asked again before each step.
    }

    fn fail(&mut self, id: Id, why: Failure, text: &str) {
        self.say(&Reply::Failed { id, why, text: text.to_owned() });
    }

    fn say(&mut self, reply: &Reply) {
        self.backlog.push_back((reply.encode(), None));
    }

    fn flush(&mut self) -> io::Result<()> {
        while let Some((message, passed)) = self.backlog.front() {
            match sys::send_with(self.channel.as_fd(), message, passed.as_ref()) {
                Ok(()) => drop(self.backlog.pop_front()),
                Err(error) if is_passing(&error) => break,
                // The next read finds that the stack is gone.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
                Err(error) => return Err(error),
            }
        }
        match self.backlog.len() > BACKLOG_MAX {
            true => Err(io::Error::other("the stack takes no answers")),
            false => Ok(()),
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn none_or_interrupted(polled: nix::Result<i32>) -> io::Result<()> {
    match polled {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests;
