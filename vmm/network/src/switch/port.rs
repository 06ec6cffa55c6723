//! A member's end of a network: what a stack sends its guest's packets by.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};

use super::protocol::{Answer, ends_of, read};
use super::{Addresses, CONNECTIONS_MAX};

/// Bytes that wait in a socket: some tens of the largest packets. Who may not have so many has
/// what the host gives everybody (socket(7), `net.core.wmem_max`).
const SOCKET_BYTES: usize = 2 << 20;
/// Bytes that wait for the switch; what comes then is lost.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Networks that one cell is in.
pub const PORTS_MAX: usize = exocell_xgate::CapabilitySet::JOINED_MAX;

/// Lets more wait in `socket`.
pub(super) fn widen(socket: &OwnedFd) {
    if setsockopt(socket, sockopt::SndBufForce, &SOCKET_BYTES).is_err() {
        let _ = setsockopt(socket, sockopt::SndBuf, &SOCKET_BYTES);
    }
}

/// Sends one message, or says that there is no room now.
pub(super) fn send(socket: &OwnedFd, bytes: &[u8]) -> Result<(), Errno> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    nix::sys::socket::send(socket.as_raw_fd(), bytes, flags).map(drop)
}

/// One cell's end in one network.
#[derive(Debug)]
pub struct Port {
    socket: OwnedFd,
    network: String,
    addresses: Addresses,
    address: Ipv4Addr,
    /// What the cell alone calls others: a name of its own, and theirs.
    links: BTreeMap<String, String>,
    /// What each member may be called.
    members: BTreeMap<Ipv4Addr, Vec<String>>,
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    /// Packets that there was no room for.
    lost: u64,
    is_over: bool,
    /// Whether more may have come than was taken.
    pub(crate) is_readable: bool,
}

/// What came by a port.
pub(crate) enum Came {
    Packet(Vec<u8>),
    News,
    Nothing,
}

impl Port {
    /// Of a socket that has joined network `name` as `address`.
    #[must_use]
    pub fn new(socket: OwnedFd, name: &str, addresses: Addresses, address: Ipv4Addr) -> Self {
        Self {
            socket,
            network: name.to_owned(),
            addresses,
            address,
            links: BTreeMap::new(),
            members: BTreeMap::new(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            lost: 0,
            is_over: false,
            is_readable: true,
        }
    }

    /// The same, where the cell calls others by names of its own, in lower case.
    #[must_use]
    pub fn with_links(self, links: BTreeMap<String, String>) -> Self {
        Self { links, ..self }
    }

    /// The network's name.
    #[must_use]
    pub fn network(&self) -> &str {
        &self.network
    }

    /// The cell's address.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Those of the network.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// The descriptor itself, for a supervisor to take over.
    #[must_use]
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Whether the network is gone.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Sends a packet on its way; one that there is no room for is lost.
    pub(crate) fn send(&mut self, packet: &[u8]) {
        if self.is_over {
            return;
        }
        self.flush();
        if self.waiting.is_empty() {
            match send(&self.socket, packet) {
                Ok(()) => return,
                Err(Errno::EAGAIN | Errno::ENOBUFS) => {}
                Err(_) => return self.end(),
            }
        }
        if self.waiting_bytes + packet.len() > WAITING_BYTES_MAX {
            self.lost += 1;
            return;
        }
        self.waiting_bytes += packet.len();
        self.waiting.push_back(packet.to_vec());
    }

    /// Sends what waits, as far as there is room.
    pub(crate) fn flush(&mut self) {
        while let Some(packet) = self.waiting.front() {
            match send(&self.socket, packet) {
                Ok(()) => {}
                Err(Errno::EAGAIN | Errno::ENOBUFS) => return,
                Err(_) => return self.end(),
            }
            self.waiting_bytes -= packet.len();
            self.waiting.pop_front();
        }
    }

    /// Takes what has come next; `buffer` has room for any message.
    pub(crate) fn receive(&mut self, buffer: &mut [u8]) -> Came {
        if self.is_over {
            return Came::Nothing;
        }
        let length = match recv(self.socket.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => {
                self.end();
                return Came::Nothing;
            }
            Ok(length) => length,
            Err(Errno::EAGAIN | Errno::EINTR) => {
                self.is_readable = false;
                return Came::Nothing;
            }
            Err(_) => {
                self.end();
                return Came::Nothing;
            }
        };
        let Some(bytes) = buffer.get(..length) else { return Came::News };
        match ends_of(bytes) {
            Some((_, to)) if to == self.address => Came::Packet(bytes.to_vec()),
            Some(_) => Came::News,
            None => {
                self.learn(bytes);
                Came::News
            }
        }
    }

    fn learn(&mut self, bytes: &[u8]) {
        match read(bytes) {
            Some(Answer::Member(member)) if self.members.len() < CONNECTIONS_MAX => {
                self.members.insert(member.address, member.names);
            }
            Some(Answer::Gone { address }) => drop(self.members.remove(&address)),
            _ => {}
        }
    }

    /// Nothing comes or goes any more, and nobody is known.
    fn end(&mut self) {
        self.is_over = true;
        self.is_readable = false;
        self.members.clear();
        self.waiting.clear();
        self.waiting_bytes = 0;
    }
}

impl AsRawFd for Port {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The networks of one cell, each in its place.
#[derive(Debug, Default)]
pub struct Ports {
    ports: Vec<Option<Port>>,
    /// Which of several members of one name is named first.
    turn: usize,
}

/// Where a packet of the guest goes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Not to a network between cells.
    Elsewhere,
    /// By the port at this place.
    Port(usize),
    /// To the address that stands for the way out of the network.
    Gateway,
    /// Its source is not the cell's address there.
    Foreign,
}

impl Ports {
    /// Those that a cell begins with.
    #[must_use]
    pub fn new(ports: Vec<Port>) -> Self {
        Self { ports: ports.into_iter().map(Some).collect(), turn: 0 }
    }

    pub(crate) fn get(&mut self, place: usize) -> Option<&mut Port> {
        self.ports.get_mut(place)?.as_mut()
    }

    /// The places that are taken.
    pub(crate) fn places(&self) -> Vec<usize> {
        let taken = self.ports.iter().enumerate().filter(|(_, port)| port.is_some());
        taken.map(|(place, _)| place).collect()
    }

    /// Puts `port` at `place`; what was there.
    pub(crate) fn put(&mut self, place: usize, port: Option<Port>) -> Option<Port> {
        if place >= PORTS_MAX {
            return port;
        }
        if self.ports.len() <= place {
            self.ports.resize_with(place + 1, || None);
        }
        self.ports.get_mut(place).and_then(|own| std::mem::replace(own, port))
    }

    /// Where a packet of the guest goes.
    pub(crate) fn way(&self, packet: &[u8]) -> Way {
        let Some((source, destination)) = ends_of(packet) else { return Way::Elsewhere };
        let all = self.ports.iter().enumerate();
        for (place, port) in all.filter_map(|(place, port)| Some((place, port.as_ref()?))) {
            let is_within = port.addresses.subnet.contains(destination);
            if is_within && source != port.address {
                return Way::Foreign;
            }
            if is_within && destination == port.addresses.gateway {
                return Way::Gateway;
            }
            if is_within {
                return Way::Port(place);
            }
        }
        Way::Elsewhere
    }

    /// The addresses of who is called `name`: with the network's own name behind it, or without.
    /// `None` where nobody is.
    pub(crate) fn find(&mut self, name: &str) -> Option<Vec<IpAddr>> {
        let name = name.strip_suffix('.').unwrap_or(name);
        let mut found: Vec<IpAddr> = Vec::new();
        for port in self.ports.iter().flatten() {
            let name = port.links.get(name).map_or(name, String::as_str);
            let whole = |own: &String| {
                let rest = name.strip_prefix(own.as_str())?.strip_prefix('.')?;
                rest.eq_ignore_ascii_case(&port.network).then_some(())
            };
            let is_it =
                |names: &&Vec<String>| names.iter().any(|own| own == name || whole(own).is_some());
            let named = port.members.iter().filter(|(_, names)| is_it(names));
            found.extend(named.map(|(address, _)| IpAddr::from(*address)));
        }
        if found.is_empty() {
            return None;
        }
        self.turn = self.turn.wrapping_add(1);
        let first = self.turn % found.len();
        found.rotate_left(first);
        Some(found)
    }
}
