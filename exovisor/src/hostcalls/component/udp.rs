//! Datagrams, through the isolate's [`Network`](crate::Network): the sockets are those of modules
//! ([`crate::hostcalls::sockets`]), under the names of WASI 0.2. They lead to one peer at a time:
//! to another once something is sent there.

use super::network::{failed, family, missing, ours};
use super::wasi::Wasi;
use super::wire::code;
use crate::hostcalls::sockets::{Errno, Network, Socket, Way, own_address};
use exocell_xgate::Protocol;
use nix::sys::socket::MsgFlags;
use std::net::SocketAddr;
use std::sync::Arc;
use wasmtime::component::Resource;
use wasmtime::{Result, format_err};
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::bindings::sockets::network::{
    ErrorCode, IpAddressFamily, IpSocketAddress, Network as NetworkHandle,
};
use wasmtime_wasi::p2::bindings::sockets::udp::{
    self, HostIncomingDatagramStream, HostOutgoingDatagramStream, HostUdpSocket, IncomingDatagram,
    IncomingDatagramStream, OutgoingDatagram, OutgoingDatagramStream, UdpSocket,
};
use wasmtime_wasi::p2::bindings::sockets::udp_create_socket;
use wasmtime_wasi::p2::{DynPollable, Pollable, SocketError, SocketResult, subscribe};

type Fd = Resource<UdpSocket>;
type Streams = (Resource<IncomingDatagramStream>, Resource<OutgoingDatagramStream>);

/// Datagrams that are handed over at once, and bytes of them.
const DATAGRAMS_MAX: usize = 16;
const BYTES_MAX: usize = 64 << 10;
/// Of a datagram over IPv4, without the headers (RFC 768, RFC 791).
const DATAGRAM_BYTES_MAX: usize = 65_507;

/// What a handle of a socket stands for.
struct Udp {
    is_v6: bool,
    bound: Bound,
    peer: Option<SocketAddr>,
}

/// To which port, which means nothing outside.
#[derive(Clone, Copy)]
enum Bound {
    Not,
    Soon(u16),
    To(u16),
}

struct Incoming {
    socket: Arc<Socket>,
}

struct Outgoing {
    socket: Arc<Socket>,
    network: Arc<dyn Network>,
    /// Whom all goes to, if it is connected.
    peer: Option<SocketAddr>,
    is_v6: bool,
    /// How many may be sent.
    permitted: usize,
    /// What was taken and could not be sent yet.
    unsent: Option<Vec<u8>>,
    /// Why it was not sent then.
    failure: Option<ErrorCode>,
}

impl Udp {
    /// Whether datagrams can go to `peer`.
    fn check(is_v6: bool, peer: SocketAddr) -> std::result::Result<(), ErrorCode> {
        let ip = peer.ip();
        if ip.is_ipv6() != is_v6 || ip.is_unspecified() || peer.port() == 0 {
            return Err(ErrorCode::InvalidArgument);
        }
        Ok(())
    }
}

/// Bound and connected at once.
#[async_trait]
impl Pollable for Udp {
    async fn ready(&mut self) {}
}

#[async_trait]
impl Pollable for Incoming {
    async fn ready(&mut self) {
        self.socket.joined().await;
        // What the call itself then says is the answer.
        let _ = self.socket.ready(Way::In).await;
    }
}

#[async_trait]
impl Pollable for Outgoing {
    async fn ready(&mut self) {
        while !self.has_sent() {
            let Ok(wire) = self.socket.wire().await else { continue };
            if wire.until(Way::Out).await.is_err() {
                return;
            }
        }
    }
}

impl Outgoing {
    /// Sends what was taken; whether nothing of it is left.
    fn has_sent(&mut self) -> bool {
        let Some(datagram) = &self.unsent else { return true };
        let sent = match self.socket.settled() {
            None => return false,
            Some(Ok(wire)) => match wire.send(datagram) {
                Err(Errno::Again) => return false,
                sent => sent.map(drop).map_err(code),
            },
            // Unless the other stream has told it.
            Some(Err(_)) => self.socket.take_error().map_or(Ok(()), |errno| Err(failed(errno))),
        };
        self.unsent = None;
        self.failure = sent.err();
        true
    }

    /// Takes a datagram, and sends it if that is possible now.
    fn take(&mut self, datagram: OutgoingDatagram) -> Result<(), ErrorCode> {
        let given = datagram.remote_address.map(SocketAddr::from);
        let peer = match (self.peer, given) {
            (Some(peer), None) => peer,
            (Some(peer), Some(given)) if peer == given => peer,
            (None, Some(given)) => given,
            _ => return Err(ErrorCode::InvalidArgument),
        };
        Udp::check(self.is_v6, peer)?;
        if datagram.data.len() > DATAGRAM_BYTES_MAX {
            return Err(ErrorCode::DatagramTooLarge);
        }
        let led = if self.socket.leads_to(peer) { self.socket.settled() } else { None };
        match led.and_then(Result::ok).map(|wire| wire.send(&datagram.data)) {
            Some(Ok(_)) => return Ok(()),
            Some(Err(Errno::Again)) => {}
            None => match self.socket.begin_connect(&*self.network, peer) {
                // A connected one is on its way there from the beginning.
                Ok(()) | Err(Errno::Already) => {}
                Err(errno) => return Err(code(errno)),
            },
            Some(Err(errno)) => return Err(code(errno)),
        }
        self.unsent = Some(datagram.data);
        self.has_sent();
        Ok(())
    }
}

impl Wasi {
    fn udp(&mut self, fd: &Fd) -> SocketResult<&mut Udp> {
        self.peers()?;
        Ok(self.table.get_mut(&ours(fd))?)
    }

    fn has_streams(&self, fd: &Fd) -> SocketResult<bool> {
        let mut children = self.table.iter_children(&ours::<_, Udp>(fd))?;
        Ok(children.any(|child| child.is::<Incoming>() || child.is::<Outgoing>()))
    }

    fn outgoing(
        &mut self,
        stream: &Resource<OutgoingDatagramStream>,
    ) -> SocketResult<&mut Outgoing> {
        self.peers()?;
        Ok(self.table.get_mut(&ours(stream))?)
    }
}

impl udp_create_socket::Host for Wasi {
    async fn create_udp_socket(&mut self, family: IpAddressFamily) -> SocketResult<Fd> {
        self.peers()?;
        let is_v6 = family == IpAddressFamily::Ipv6;
        let handle = self.table.push(Udp { is_v6, bound: Bound::Not, peer: None })?;
        Ok(Resource::new_own(handle.rep()))
    }
}

impl udp::Host for Wasi {}

impl HostUdpSocket for Wasi {
    missing! { udp:
        unicast_hop_limit() -> u8;
        set_unicast_hop_limit(value: u8) -> ();
        receive_buffer_size() -> u64;
        set_receive_buffer_size(value: u64) -> ();
        send_buffer_size() -> u64;
        set_send_buffer_size(value: u64) -> ();
    }

    async fn start_bind(
        &mut self,
        fd: Fd,
        _: Resource<NetworkHandle>,
        address: IpSocketAddress,
    ) -> SocketResult<()> {
        let address = SocketAddr::from(address);
        let udp = self.udp(&fd)?;
        match udp.bound {
            Bound::Not if address.is_ipv6() == udp.is_v6 => {
                udp.bound = Bound::Soon(address.port());
                Ok(())
            }
            Bound::Not => Err(ErrorCode::InvalidArgument.into()),
            Bound::Soon(_) => Err(ErrorCode::ConcurrencyConflict.into()),
            Bound::To(_) => Err(ErrorCode::InvalidState.into()),
        }
    }

    fn finish_bind(&mut self, fd: Fd) -> SocketResult<()> {
        let udp = self.udp(&fd)?;
        let Bound::Soon(port) = udp.bound else { return Err(ErrorCode::NotInProgress.into()) };
        udp.bound = Bound::To(port);
        Ok(())
    }

    async fn stream(
        &mut self,
        fd: Fd,
        remote_address: Option<IpSocketAddress>,
    ) -> SocketResult<Streams> {
        let network = self.network()?;
        if self.has_streams(&fd)? {
            return Err(SocketError::trap(format_err!("a socket's streams are not dropped yet")));
        }
        let udp = self.udp(&fd)?;
        let Bound::To(_) = udp.bound else { return Err(ErrorCode::InvalidState.into()) };
        let (is_v6, peer) = (udp.is_v6, remote_address.map(SocketAddr::from));
        if let Some(peer) = peer {
            Udp::check(is_v6, peer)?;
        }
        udp.peer = peer;
        let socket = Socket::new(Protocol::Udp, is_v6);
        // Waiting is what pollables are for.
        socket.never_waits();
        let socket = Arc::new(socket);
        if let Some(peer) = peer {
            socket.begin_connect(&*network, peer).map_err(code)?;
        }
        let incoming = Incoming { socket: Arc::clone(&socket) };
        let outgoing =
            Outgoing { socket, network, peer, is_v6, permitted: 0, unsent: None, failure: None };
        let incoming = self.table.push_child(incoming, &ours::<_, Udp>(&fd))?;
        let outgoing = self.table.push_child(outgoing, &ours::<_, Udp>(&fd))?;
        Ok((Resource::new_own(incoming.rep()), Resource::new_own(outgoing.rep())))
    }

    fn local_address(&mut self, fd: Fd) -> SocketResult<IpSocketAddress> {
        let udp = self.udp(&fd)?;
        let Bound::To(port) = udp.bound else { return Err(ErrorCode::InvalidState.into()) };
        Ok(own_address(udp.is_v6, port).into())
    }

    fn remote_address(&mut self, fd: Fd) -> SocketResult<IpSocketAddress> {
        let peer = self.udp(&fd)?.peer.ok_or(ErrorCode::InvalidState)?;
        Ok(peer.into())
    }

    fn address_family(&mut self, fd: Fd) -> Result<IpAddressFamily> {
        Ok(family(self.table.get(&ours::<_, Udp>(&fd))?.is_v6))
    }

    fn subscribe(&mut self, fd: Fd) -> Result<Resource<DynPollable>> {
        subscribe(&mut self.table, ours::<_, Udp>(&fd))
    }

    fn drop(&mut self, fd: Fd) -> Result<()> {
        self.table.delete(Resource::<Udp>::new_own(fd.rep()))?;
        Ok(())
    }
}

impl HostIncomingDatagramStream for Wasi {
    fn receive(
        &mut self,
        stream: Resource<IncomingDatagramStream>,
        count: u64,
    ) -> SocketResult<Vec<IncomingDatagram>> {
        self.peers()?;
        let Incoming { socket } = self.table.get(&ours(&stream))?;
        let wire = match socket.settled() {
            Some(Ok(wire)) => wire,
            None => return Ok(Vec::new()),
            Some(Err(_)) => match socket.take_error() {
                Some(errno) => return Err(failed(errno).into()),
                // Nothing was sent so far.
                None => return Ok(Vec::new()),
            },
        };
        let most = usize::try_from(count).unwrap_or(usize::MAX).min(DATAGRAMS_MAX);
        let (mut datagrams, mut bytes) = (Vec::new(), 0);
        let mut room = vec![0; BYTES_MAX];
        while datagrams.len() < most && bytes < BYTES_MAX {
            match wire.receive(&mut room, MsgFlags::empty()) {
                Ok(length) => {
                    bytes += length;
                    let data = room.get(..length).unwrap_or_default().to_vec();
                    let remote_address = wire.peer.into();
                    datagrams.push(IncomingDatagram { data, remote_address });
                }
                Err(Errno::Again) => break,
                // It comes again.
                Err(_) if !datagrams.is_empty() => break,
                Err(errno) => {
                    // It is told once: nothing comes on this way any more.
                    socket.disconnect();
                    return Err(code(errno).into());
                }
            }
        }
        Ok(datagrams)
    }

    fn subscribe(
        &mut self,
        stream: Resource<IncomingDatagramStream>,
    ) -> Result<Resource<DynPollable>> {
        subscribe(&mut self.table, ours::<_, Incoming>(&stream))
    }

    fn drop(&mut self, stream: Resource<IncomingDatagramStream>) -> Result<()> {
        self.table.delete(Resource::<Incoming>::new_own(stream.rep()))?;
        Ok(())
    }
}

impl HostOutgoingDatagramStream for Wasi {
    fn check_send(&mut self, stream: Resource<OutgoingDatagramStream>) -> SocketResult<u64> {
        let outgoing = self.outgoing(&stream)?;
        outgoing.permitted = if outgoing.has_sent() { DATAGRAMS_MAX } else { 0 };
        match outgoing.failure.take() {
            Some(code) => Err(code.into()),
            None => Ok(outgoing.permitted as u64),
        }
    }

    fn send(
        &mut self,
        stream: Resource<OutgoingDatagramStream>,
        datagrams: Vec<OutgoingDatagram>,
    ) -> SocketResult<u64> {
        let outgoing = self.outgoing(&stream)?;
        if datagrams.is_empty() {
            return Ok(0);
        }
        if datagrams.len() > outgoing.permitted {
            return Err(SocketError::trap(format_err!(
                "more datagrams are sent than `check-send` permits"
            )));
        }
        outgoing.permitted = 0;
        let mut taken = 0;
        for datagram in datagrams {
            // What is behind one that waits, waits with the caller; so does what is behind one that
            // was refused, which is told first.
            if outgoing.unsent.is_some() || outgoing.failure.is_some() {
                break;
            }
            match outgoing.take(datagram) {
                Ok(()) => taken += 1,
                // The caller sends it again, and is told then.
                Err(_) if taken > 0 => break,
                Err(code) => return Err(code.into()),
            }
        }
        Ok(taken)
    }

    fn subscribe(
        &mut self,
        stream: Resource<OutgoingDatagramStream>,
    ) -> Result<Resource<DynPollable>> {
        subscribe(&mut self.table, ours::<_, Outgoing>(&stream))
    }

    /// What was taken is sent first.
    async fn drop(&mut self, stream: Resource<OutgoingDatagramStream>) -> Result<()> {
        let mut outgoing = self.table.delete(Resource::<Outgoing>::new_own(stream.rep()))?;
        if self.peers().is_ok() {
            outgoing.ready().await;
        }
        Ok(())
    }
}
