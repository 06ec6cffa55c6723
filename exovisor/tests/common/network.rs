//! A network of this machine: it connects its real sockets, or refuses.

use exocell_exovisor::{Arrived, Connection, Done, Network, NetworkError};
use exocell_xgate::Protocol;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// What a listening isolate gave the network.
pub type Callers = Arc<Mutex<Option<(u16, Arrived)>>>;

/// Connects to this machine, and knows one name.
#[derive(Clone, Default)]
pub struct Here {
    pub refuses: bool,
    pub callers: Callers,
    /// Ways of datagrams that are gone as soon as they are there, or as one was sent.
    pub refused_flows: Arc<AtomicUsize>,
    pub refuses_late: bool,
}

pub fn connection(socket: impl Into<OwnedFd>, peer: SocketAddr) -> Connection {
    let socket = socket.into();
    let was_reset = Arc::new(AtomicBool::new(false));
    Connection { socket, peer, was_reset }
}

impl Network for Here {
    fn look_up(&self, name: &str, done: Done<Vec<IpAddr>>) {
        match name {
            "here.test" => done(Ok(vec!["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()])),
            _ => done(Err(NetworkError::Denied)),
        }
    }

    /// On another thread, as the networks of cells do.
    fn connect(&self, protocol: Protocol, peer: SocketAddr, done: Done<Connection>) {
        if self.refuses {
            return done(Err(NetworkError::Denied));
        }
        let one_less = |count: usize| count.checked_sub(1);
        let counted =
            self.refused_flows.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        if protocol == Protocol::Udp && counted.is_ok() {
            let kind = (AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_NONBLOCK);
            let (ours, gone) = socketpair(kind.0, kind.1, None, kind.2).unwrap();
            if self.refuses_late {
                thread::spawn(move || {
                    while recv(gone.as_raw_fd(), &mut [0; 16], MsgFlags::empty()).is_err() {
                        thread::yield_now();
                    }
                });
            }
            return done(Ok(connection(ours, peer)));
        }
        thread::spawn(move || {
            let refused = |_| NetworkError::Refused;
            done(match protocol {
                Protocol::Tcp => TcpStream::connect(peer).map_err(refused).map(|stream| {
                    stream.set_nonblocking(true).unwrap();
                    connection(stream, peer)
                }),
                _ => UdpSocket::bind("127.0.0.1:0").map_err(refused).map(|socket| {
                    socket.connect(peer).unwrap();
                    socket.set_nonblocking(true).unwrap();
                    connection(socket, peer)
                }),
            });
        });
    }

    fn listen(&self, port: u16, arrived: Arrived, done: Done<()>) {
        *self.callers.lock().unwrap() = Some((port, arrived));
        done(Ok(()));
    }
}
