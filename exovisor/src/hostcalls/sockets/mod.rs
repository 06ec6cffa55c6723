//! Sockets of an isolate, which its owner's [`Network`] connects or does not.
//!
//! ```text
//! sock_connect -> gate -> Socket -> Network: the owner's rules -> one end of a pair of sockets
//! ```
//! Names and layouts of the calls beyond WASI preview 1 are those of WasmEdge's sockets
//! (`wasi_snapshot_preview1.sock_open` and its kin), which Rust's and C's libraries for it use.
//! No descriptor of the host's network is ever in here: what leads outside is the network's.

mod address;
mod calls;
mod poll;
mod socket;

pub(crate) use calls::{call, is_for};
pub(crate) use poll::{Asked, wait};
pub(crate) use socket::{Socket, Way, Wire};
pub(crate) use wasmtime_wasi::p1::types::Errno;

use exocell_xgate::Protocol;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Takes what comes of a request. It never waits.
pub type Done<T> = Box<dyn FnOnce(Result<T, NetworkError>) + Send>;
/// Takes the callers of a port. It never waits.
pub type Arrived = Box<dyn Fn(Connection) + Send>;

/// What isolates reach others through. It decides who may be reached.
pub trait Network: Send + Sync {
    /// The addresses of `name`, or some that stand for it.
    fn look_up(&self, name: &str, done: Done<Vec<IpAddr>>);

    /// Connects to `peer`, by [`Protocol::Tcp`] or [`Protocol::Udp`].
    fn connect(&self, protocol: Protocol, peer: SocketAddr, done: Done<Connection>);

    /// Takes the callers of `port` from now on.
    fn listen(&self, port: u16, arrived: Arrived, done: Done<()>);
}

/// A connection, as a [`Network`] hands it over.
pub struct Connection {
    /// A Unix socket that does not wait: of bytes for a stream, else of messages.
    pub socket: OwnedFd,
    /// Whom it leads to, as the isolate knows it.
    pub peer: SocketAddr,
    /// Set before the socket's end shows, where it is not the end that the peer meant.
    pub was_reset: Arc<AtomicBool>,
}

/// Why a [`Network`] does not do what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetworkError {
    /// By its rules.
    #[error("the rules do not permit it")]
    Denied,
    /// By the peer.
    #[error("the peer refuses")]
    Refused,
    /// There is no such name, no way there, or no answer.
    #[error("it cannot be reached")]
    Unreachable,
    /// Too much at once.
    #[error("too much at once")]
    Busy,
}

impl NetworkError {
    fn errno(self) -> Errno {
        match self {
            Self::Denied => Errno::Acces,
            Self::Refused => Errno::Connrefused,
            Self::Unreachable => Errno::Hostunreach,
            Self::Busy => Errno::Again,
        }
    }
}

/// An isolate's own address: its port is all that it knows.
pub(crate) fn own_address(is_v6: bool, port: u16) -> SocketAddr {
    let anywhere: IpAddr = match is_v6 {
        true => Ipv6Addr::UNSPECIFIED.into(),
        false => Ipv4Addr::UNSPECIFIED.into(),
    };
    SocketAddr::new(anywhere, port)
}

/// The first number of a socket, above those of files.
const FIRST: u32 = 1 << 25;
/// Sockets of one isolate that are open at once.
const OPEN_MAX: usize = 1024;

/// The sockets of one isolate.
#[derive(Default)]
pub(crate) struct Sockets {
    open: BTreeMap<u32, Arc<Socket>>,
    network: Option<Arc<dyn Network>>,
}

impl Sockets {
    pub fn new(network: Option<Arc<dyn Network>>) -> Self {
        Self { open: BTreeMap::new(), network }
    }

    fn network(&self) -> Result<Arc<dyn Network>, Errno> {
        self.network.clone().ok_or(Errno::Netdown)
    }

    fn get(&self, fd: u32) -> Option<Arc<Socket>> {
        self.open.get(&fd).cloned()
    }

    /// Gives `socket` the lowest number that is free.
    fn add(&mut self, socket: Socket) -> Result<u32, Errno> {
        if self.open.len() >= OPEN_MAX {
            return Err(Errno::Nfile);
        }
        let used = self.open.keys().copied();
        let free = (FIRST..).zip(used).find(|(free, used)| free != used);
        let fd = free.map_or(FIRST + self.open.len() as u32, |(free, _)| free);
        self.open.insert(fd, Arc::new(socket));
        Ok(fd)
    }

    fn close(&mut self, fd: u32) {
        self.open.remove(&fd);
    }
}
