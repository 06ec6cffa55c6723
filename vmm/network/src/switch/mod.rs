//! The switch of a network between cells: passes IP packets on between its members, and tells
//! each of them who the others are.
//!
//! ```text
//! guest ── its stack: is it for this network? ──> port ══ socket ══> switch ──> port ──> guest
//!                                                  Join, Member, Gone <┘
//! ```
//! The switch believes nobody: a packet goes on only if its source is the address of the member
//! that sent it. There is no Ethernet, so there is nothing to spoof beside that. Whoever may
//! connect to its socket may join; that is the network's operator. It reads no more of a packet
//! than both addresses.

mod addresses;
mod client;
mod port;
mod protocol;
mod subnet;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::MsgFlags;
use serde::{Deserialize, Serialize};

pub use addresses::{Addresses, Reserved};
pub use client::{join, list, rename};
pub(crate) use port::{Came, Way};
pub use port::{PORTS_MAX, Port, Ports};
pub use protocol::{Join, Member};
pub use subnet::Subnet;

use crate::link::MTU;
use protocol::{Answer, Ask, ends_of, message, read};

/// Connections at once: members, and who asks for them.
pub const CONNECTIONS_MAX: usize = 1024;
/// Bytes that wait for one member that does not read; what comes then is lost.
const WAITING_BYTES_MAX: usize = 4 << 20;
/// Bytes that wait for all of them together.
const ALL_WAITING_BYTES_MAX: usize = 96 << 20;
/// Bytes of news that wait for one member beyond that: packets never keep it from news.
const NEWS_BYTES_MAX: usize = 256 << 10;
/// What each message takes beside its bytes.
const MESSAGE_BYTES: usize = 128;
/// Messages that are taken from one member before others get their turn.
const TURN_MAX: usize = 32;
/// How long the switch waits for its first member, and for another after the last.
const ALONE_MAX: Duration = Duration::from_secs(5);
/// How long a connection may take to say what it wants.
const ASKING_MAX: Duration = Duration::from_secs(10);

/// What a switch is made of.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    pub addresses: Addresses,
}

/// One connection.
struct Connection {
    socket: OwnedFd,
    since: Instant,
    /// `None` until it has joined.
    member: Option<Member>,
    waiting: VecDeque<Vec<u8>>,
    /// Of packets, and of news.
    waiting_bytes: [usize; 2],
    /// Whether it is gone, or broke the protocol.
    is_over: bool,
}

/// The switch of one network.
pub struct Switch {
    /// Its connections are of sequenced messages, whatever the type says.
    listener: UnixListener,
    addresses: Addresses,
    connections: Vec<Connection>,
    /// Where in `connections` who has an address is.
    places: BTreeMap<Ipv4Addr, usize>,
    buffer: Vec<u8>,
}

impl Switch {
    /// A switch whose members come by `listener`, which does not wait.
    pub fn new(settings: Settings, listener: UnixListener) -> Self {
        Self {
            listener,
            addresses: settings.addresses,
            connections: Vec::new(),
            places: BTreeMap::new(),
            buffer: vec![0; usize::from(MTU).max(protocol::MESSAGE_BYTES_MAX)],
        }
    }

    /// Serves until nobody has been a member for a while.
    ///
    /// # Errors
    /// The host's, when poll(2) fails.
    pub fn run(mut self) -> io::Result<()> {
        let mut alone_since = Instant::now();
        loop {
            let left = ALONE_MAX.saturating_sub(alone_since.elapsed());
            if self.connections.is_empty() && left.is_zero() {
                return Ok(());
            }
            for ready in self.wait(left)? {
                match ready {
                    None => self.accept(),
                    Some(index) => self.serve(index),
                }
            }
            self.remove();
            if !self.connections.is_empty() {
                alone_since = Instant::now();
            }
        }
    }

    /// Who has something to say, or room for what waits: `None` is the listener.
    fn wait(&self, alone: Duration) -> io::Result<Vec<Option<usize>>> {
        let mut polled = vec![PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        for connection in &self.connections {
            let more = !connection.waiting.is_empty();
            let flags = if more { PollFlags::POLLOUT } else { PollFlags::empty() };
            polled.push(PollFd::new(connection.socket.as_fd(), flags | PollFlags::POLLIN));
        }
        let is_asking = |connection: &Connection| connection.member.is_none();
        let timeout = match (self.connections.is_empty(), self.connections.iter().any(is_asking)) {
            (true, _) => PollTimeout::try_from(alone + Duration::from_millis(1)),
            (false, true) => Ok(PollTimeout::from(1000_u16)),
            (false, false) => Ok(PollTimeout::NONE),
        };
        match poll(&mut polled, timeout.unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let is_ready = |polled: &PollFd<'_>| polled.any().unwrap_or(true);
        let ready = polled.iter().enumerate().filter(|(_, polled)| is_ready(polled));
        Ok(ready.map(|(index, _)| index.checked_sub(1)).collect())
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let socket = OwnedFd::from(stream);
            // One more than there may be hears nothing, and asks again.
            if self.connections.len() < CONNECTIONS_MAX {
                port::widen(&socket);
                self.connections.push(Connection {
                    socket,
                    since: Instant::now(),
                    member: None,
                    waiting: VecDeque::new(),
                    waiting_bytes: [0; 2],
                    is_over: false,
                });
            }
        }
    }

    fn serve(&mut self, index: usize) {
        if let Some(connection) = self.connections.get_mut(index) {
            connection.flush();
        }
        for _ in 0..TURN_MAX {
            let Some(connection) = self.connections.get_mut(index) else { return };
            if connection.is_over {
                return;
            }
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
            let number = connection.socket.as_raw_fd();
            match nix::sys::socket::recv(number, &mut self.buffer, flags) {
                Ok(0) => return connection.is_over = true,
                // Longer than any packet.
                Ok(length) if length > self.buffer.len() => {}
                Ok(length) => self.take(index, length),
                Err(Errno::EAGAIN | Errno::EINTR) => return,
                Err(_) => return connection.is_over = true,
            }
        }
    }

    /// Takes the message of `length` bytes that connection `index` has sent.
    fn take(&mut self, index: usize, length: usize) {
        let Some(bytes) = self.buffer.get(..length) else { return };
        let most = ALL_WAITING_BYTES_MAX / self.connections.len().max(1);
        let Some(connection) = self.connections.get_mut(index) else { return };
        if let Some(member) = &connection.member {
            let Some((source, destination)) = ends_of(bytes) else { return };
            let place = self.places.get(&destination).copied();
            if source == member.address
                && let Some(other) = place.and_then(|place| self.connections.get_mut(place))
            {
                other.send(bytes, most.min(WAITING_BYTES_MAX));
            }
            return;
        }
        match read::<Ask>(bytes) {
            Some(Ask::Join(join)) => self.join(index, join),
            Some(Ask::List) => {
                self.tell_all(index);
                self.say(index, &Answer::End);
            }
            Some(Ask::Rename { cell, names }) => self.rename(index, &cell, &names),
            None => connection.is_over = true,
        }
    }

    fn rename(&mut self, index: usize, cell: &str, names: &[String]) {
        if let Err(message) = protocol::check_names(names) {
            return self.say(index, &Answer::Refused { message });
        }
        let mut renamed = Vec::new();
        for member in self.connections.iter_mut().filter_map(|other| other.member.as_mut()) {
            if member.cell == cell {
                member.names = names.to_vec();
                renamed.push(member.clone());
            }
        }
        for member in renamed {
            self.tell_members(&message(&Answer::Member(member)));
        }
        self.say(index, &Answer::End);
    }

    fn join(&mut self, index: usize, join: Join) {
        let given = self.addresses.give(join.address, |address| self.places.contains_key(&address));
        let checked = protocol::check_names(&join.names).and(given);
        let address = match checked {
            Ok(address) => address,
            Err(message) => return self.say(index, &Answer::Refused { message }),
        };
        let member = Member { cell: join.cell, address, names: join.names };
        self.say(index, &Answer::Joined { address });
        self.tell_all(index);
        let news = message(&Answer::Member(member.clone()));
        self.places.insert(address, index);
        if let Some(connection) = self.connections.get_mut(index) {
            connection.member = Some(member);
        }
        self.tell_members(&news);
    }

    fn say(&mut self, index: usize, answer: &Answer) {
        if let Some(connection) = self.connections.get_mut(index) {
            connection.send(&message(answer), NEWS_BYTES_MAX);
        }
    }

    /// Tells connection `index` who is there.
    fn tell_all(&mut self, index: usize) {
        let members = self.connections.iter().filter_map(|other| other.member.clone());
        for member in members.collect::<Vec<_>>() {
            self.say(index, &Answer::Member(member));
        }
    }

    fn tell_members(&mut self, news: &[u8]) {
        let members = self.connections.iter_mut().filter(|other| other.member.is_some());
        members.for_each(|member| member.send(news, NEWS_BYTES_MAX));
    }

    /// Forgets who is gone, and tells the others.
    fn remove(&mut self) {
        for connection in &mut self.connections {
            let is_asking = connection.member.is_none();
            connection.is_over |= is_asking && connection.since.elapsed() > ASKING_MAX;
        }
        if !self.connections.iter().any(|connection| connection.is_over) {
            return;
        }
        let (gone, stay): (Vec<_>, Vec<_>) = std::mem::take(&mut self.connections)
            .into_iter()
            .partition(|connection| connection.is_over);
        self.connections = stay;
        let places = self.connections.iter().enumerate();
        let addresses = places.filter_map(|(at, other)| Some((other.member.as_ref()?.address, at)));
        self.places = addresses.collect();
        for member in gone.into_iter().filter_map(|connection| connection.member) {
            self.tell_members(&message(&Answer::Gone { address: member.address }));
        }
    }
}

impl Connection {
    /// Sends a message now, or once there is room for it: behind at most `most` bytes of its kind.
    fn send(&mut self, bytes: &[u8], most: usize) {
        if self.waiting.is_empty() {
            match port::send(&self.socket, bytes) {
                Ok(()) => return,
                Err(Errno::EAGAIN | Errno::ENOBUFS) => {}
                Err(_) => return self.is_over = true,
            }
        }
        let (kind, taken) = accounted(bytes);
        if self.waiting_bytes[kind] + taken <= most {
            self.waiting_bytes[kind] += taken;
            self.waiting.push_back(bytes.to_vec());
        } else if kind == NEWS {
            // Who does not hear of the others is no member any more.
            self.is_over = true;
        }
    }

    fn flush(&mut self) {
        while let Some(bytes) = self.waiting.front() {
            match port::send(&self.socket, bytes) {
                Ok(()) => {}
                Err(Errno::EAGAIN | Errno::ENOBUFS) => return,
                Err(_) => return self.is_over = true,
            }
            let (kind, taken) = accounted(bytes);
            self.waiting_bytes[kind] -= taken;
            self.waiting.pop_front();
        }
    }
}

/// Places of [`Connection::waiting_bytes`].
const PACKETS: usize = 0;
const NEWS: usize = 1;

/// Of which kind a message is, and what it takes while it waits.
fn accounted(bytes: &[u8]) -> (usize, usize) {
    let kind = if bytes.first() == Some(&protocol::NEWS) { NEWS } else { PACKETS };
    (kind, bytes.len() + MESSAGE_BYTES)
}

#[cfg(test)]
mod tests;
