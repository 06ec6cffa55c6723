//! One connection under way: address after address until one answers. Before
//! each, the policy is asked again.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use exocell_xgate::Protocol;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::protocol::{Failure, Id};
use super::sys;
use crate::address;
use crate::policy::{Denied, Peer, Policy, Target};

/// How long an address has, if there is another one after it.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long the last one has; the guest's own patience is longer.
const PATIENCE_LAST: Duration = Duration::from_secs(30);
/// Bytes before an echo's data: kind, code, checksum, number, place in sequence.
const ECHO_HEADER_BYTES: usize = 8;

/// What came of a step.
pub enum Step {
    Wait(Attempt),
    Done { id: Id, protocol: Protocol, target: Target, peer: Peer, socket: OwnedFd },
    Failed { id: Id, why: Failure, text: String },
}

/// What the stack asked for, but for where.
#[derive(Clone, Copy)]
pub struct Wish {
    pub id: Id,
    pub protocol: Protocol,
    pub port: u16,
    /// See [`sys::start`].
    pub few: bool,
}

/// What is dialled, and how far it got.
pub struct Attempt {
    id: Id,
    protocol: Protocol,
    target: Target,
    port: u16,
    few: bool,
    left: VecDeque<IpAddr>,
    current: Option<(SocketAddr, OwnedFd, Instant)>,
    failure: (Failure, String),
}

impl Attempt {
    /// Nothing is dialled before [`Attempt::next`].
    pub fn new(wish: Wish, target: Target, addresses: Vec<IpAddr>) -> Self {
        let Wish { id, protocol, port, few } = wish;
        let failure = (Failure::Unreachable, "the name does not resolve".to_owned());
        Self { id, protocol, target, port, few, left: addresses.into(), current: None, failure }
    }

    pub fn id(&self) -> Id {
        self.id
    }

    /// The socket that becomes writable, if one is dialled.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.current.as_ref().map(|(_, socket, _)| socket.as_fd())
    }

    /// When the current address has had its time.
    pub fn due(&self) -> Instant {
        self.current.as_ref().map_or_else(Instant::now, |(_, _, until)| *until)
    }

    /// Dials the next address that the policy permits.
    pub fn next(mut self, policy: &Policy) -> Step {
        self.current = None;
        while let Some(address) = self.left.pop_front() {
            let address = address::plain(address);
            if let Err(denied) = self.permitted(policy, address) {
                self.failure = (Failure::Denied, denied.to_string());
                continue;
            }
            let peer = SocketAddr::new(address, self.port);
            match sys::start(self.protocol, peer, self.few) {
                Ok((socket, true)) => return self.done(peer, socket),
                Ok((socket, false)) => {
                    let patience = if self.left.is_empty() { PATIENCE_LAST } else { PATIENCE };
                    self.current = Some((peer, socket, Instant::now() + patience));
                    return Step::Wait(self);
                }
                Err(error) => self.failure = failure(self.protocol, peer, &error),
            }
        }
        Step::Failed { id: self.id, why: self.failure.0, text: self.failure.1 }
    }

    /// Looks whether the current address answered.
    pub fn advance(mut self, policy: &Policy) -> Step {
        let Some((peer, socket, until)) = self.current.take() else {
            return self.next(policy);
        };
        // The rules may have changed under it.
        if let Err(denied) = self.permitted(policy, peer.ip()) {
            self.failure = (Failure::Denied, denied.to_string());
            return self.next(policy);
        }
        let mut watched = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
        let ready = poll(&mut watched, PollTimeout::ZERO) == Ok(1);
        match ready {
            true => match sys::outcome(&socket) {
                Ok(()) => self.done(peer, socket),
                Err(error) => {
                    self.failure = failure(self.protocol, peer, &error);
                    self.next(policy)
                }
            },
            false if until <= Instant::now() => {
                self.failure = (Failure::Unreachable, format!("{peer} does not answer"));
                self.next(policy)
            }
            false => {
                self.current = Some((peer, socket, until));
                Step::Wait(self)
            }
        }
    }

    fn permitted(&self, policy: &Policy, address: IpAddr) -> Result<(), Denied> {
        match &self.target {
            Target::Name(name) => {
                policy.permits_address_of(self.protocol, name, address, self.port, is_own)
            }
            Target::Address(_) => policy.permits_address(self.protocol, address, self.port, is_own),
        }
    }

    fn done(self, at: SocketAddr, socket: OwnedFd) -> Step {
        let Self { id, protocol, target, .. } = self;
        let peer = Peer { at, is_own: is_own(address::reached(at.ip())) };
        Step::Done { id, protocol, target, peer, socket }
    }
}

/// What cannot be found out counts as the host's own.
fn is_own(address: IpAddr) -> bool {
    sys::is_own(address).unwrap_or(true)
}

fn failure(protocol: Protocol, peer: SocketAddr, error: &io::Error) -> (Failure, String) {
    let why = match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => Failure::Refused,
        Some(libc::EACCES | libc::EPERM | libc::EPROTONOSUPPORT) if protocol == Protocol::Icmp => {
            let text = "the host does not let this user ping; \
                        its sysctl net.ipv4.ping_group_range says who may";
            return (Failure::NotOffered, text.to_owned());
        }
        _ => Failure::Unreachable,
    };
    (why, format!("{peer}: {error}"))
}

/// Sends one datagram, or one echo request made of its place in the sequence
/// and its data. What does not go is lost, as in any network.
pub fn send_datagram(protocol: Protocol, peer: SocketAddr, socket: &OwnedFd, data: &[u8]) {
    let sent = match (protocol, data.split_at_checked(2)) {
        (Protocol::Icmp, Some((sequence, data))) => {
            let request = if peer.is_ipv4() { 8 } else { 128 };
            // The host fills in the checksum and a number of its own.
            let header = [request, 0, 0, 0, 0, 0];
            sys::send(socket.as_fd(), &[&header[..], sequence, data].concat())
        }
        (Protocol::Icmp, None) => return,
        _ => sys::send(socket.as_fd(), data),
    };
    // An error that has to do with the flow comes with the next read too.
    drop(sent);
}

/// What of a received message goes to the guest.
pub fn received(protocol: Protocol, peer: SocketAddr, data: &[u8]) -> Option<Vec<u8>> {
    if protocol != Protocol::Icmp {
        return Some(data.to_vec());
    }
    let reply = if peer.is_ipv4() { 0 } else { 129 };
    let (header, data) = data.split_at_checked(ECHO_HEADER_BYTES)?;
    (header[0] == reply).then(|| [&header[6..], data].concat())
}
