//! One socket: how far it got, and what can be done with it then.

use super::{Connection, Network, own_address};
use exocell_xgate::Protocol;
use nix::errno::Errno as HostErrno;
use nix::sys::socket::{MsgFlags, Shutdown, recv, send, shutdown};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use wasmtime_wasi::p1::types::Errno;

/// Which way bytes go, as seen from the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    In,
    Out,
}

/// A socket of an isolate. Its threads share it.
pub(crate) struct Socket {
    pub protocol: Protocol,
    pub is_v6: bool,
    stage: Mutex<Stage>,
    /// Wakes those who wait for another stage or for a caller.
    changed: Notify,
    /// Whether a call that would have to wait fails.
    pub at_once: AtomicBool,
    /// How long it is waited in each way.
    patience: Mutex<[Option<Duration>; 2]>,
}

enum Stage {
    /// With the port that it was bound to.
    New(Option<u16>),
    Connecting,
    /// Connected, and not yet waited for.
    Connected(Connection),
    Joined(Arc<Wire>),
    Listening(u16, VecDeque<Connection>),
    Failed(Errno),
}

/// What is open of a connection.
pub(crate) struct Wire {
    socket: AsyncFd<OwnedFd>,
    pub peer: SocketAddr,
    was_reset: Arc<AtomicBool>,
    /// Whether its other end was seen to be gone.
    is_over: AtomicBool,
    protocol: Protocol,
}

/// What waits to be read, and whether the peer is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Readiness {
    pub bytes: u64,
    pub is_ended: bool,
}

impl Socket {
    pub fn new(protocol: Protocol, is_v6: bool) -> Self {
        Self::at(Stage::New(None), protocol, is_v6)
    }

    fn at(stage: Stage, protocol: Protocol, is_v6: bool) -> Self {
        let at_once = AtomicBool::new(false);
        let (stage, patience) = (Mutex::new(stage), Mutex::default());
        Self { protocol, is_v6, stage, changed: Notify::new(), at_once, patience }
    }

    /// From now on a call that would have to wait fails.
    pub fn never_waits(&self) {
        self.at_once.store(true, Ordering::Relaxed);
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn patience(&self) -> MutexGuard<'_, [Option<Duration>; 2]> {
        self.patience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_patience(&self, way: Way, patience: Option<Duration>) {
        self.patience()[way as usize] = patience;
    }

    pub fn patience_of(&self, way: Way) -> Option<Duration> {
        self.patience()[way as usize]
    }

    /// Names the port that it will listen at; the address is the network's.
    pub fn bind(&self, port: u16) -> Result<(), Errno> {
        match &mut *self.stage() {
            Stage::New(own) => {
                *own = Some(port);
                Ok(())
            }
            _ => Err(Errno::Inval),
        }
    }

    /// Asks for a connection, and waits for it unless the module does not want to.
    pub async fn connect(
        self: &Arc<Self>,
        network: &dyn Network,
        peer: SocketAddr,
    ) -> Result<(), Errno> {
        self.begin_connect(network, peer)?;
        let is_connecting = || matches!(&*self.stage(), Stage::Connecting);
        if self.at_once.load(Ordering::Relaxed) && is_connecting() {
            return Err(Errno::Inprogress);
        }
        self.wire().await.map(drop)
    }

    /// Asks for a connection.
    pub fn begin_connect(
        self: &Arc<Self>,
        network: &dyn Network,
        peer: SocketAddr,
    ) -> Result<(), Errno> {
        {
            let mut stage = self.stage();
            match (&*stage, self.protocol) {
                (Stage::New(_) | Stage::Failed(_), _) => {}
                // Datagrams may go to somebody else from now on.
                (Stage::Connected(_) | Stage::Joined(_), Protocol::Udp) => {}
                (Stage::Connecting, _) => return Err(Errno::Already),
                (Stage::Listening(..), _) => return Err(Errno::Inval),
                _ => return Err(Errno::Isconn),
            }
            *stage = Stage::Connecting;
        }
        let socket = Arc::clone(self);
        network.connect(
            self.protocol,
            peer,
            Box::new(move |result| {
                *socket.stage() = match result {
                    Ok(connection) => Stage::Connected(connection),
                    Err(error) => Stage::Failed(error.errno()),
                };
                socket.changed.notify_waiters();
            }),
        );
        Ok(())
    }

    /// The connection, once there is one.
    pub async fn wire(&self) -> Result<Arc<Wire>, Errno> {
        loop {
            let changed = self.changed.notified();
            if let Some(settled) = self.settled() {
                return settled;
            }
            changed.await;
        }
    }

    /// Waits until it leads somewhere, or does not though it was to.
    pub async fn joined(&self) {
        loop {
            let changed = self.changed.notified();
            if !matches!(self.settled(), None | Some(Err(Errno::Notconn))) {
                return;
            }
            changed.await;
        }
    }

    /// What became of connecting, if it is over.
    pub fn settled(&self) -> Option<Result<Arc<Wire>, Errno>> {
        let mut stage = self.stage();
        if let Stage::Connected(_) = &*stage {
            let taken = std::mem::replace(&mut *stage, Stage::Connecting);
            if let Stage::Connected(connection) = taken {
                *stage = match Wire::new(connection, self.protocol) {
                    Ok(wire) => Stage::Joined(Arc::new(wire)),
                    Err(_) => Stage::Failed(Errno::Nfile),
                };
            }
        }
        match &*stage {
            Stage::Joined(wire) => Some(Ok(Arc::clone(wire))),
            Stage::Failed(errno) => Some(Err(*errno)),
            Stage::New(_) | Stage::Listening(..) => Some(Err(Errno::Notconn)),
            Stage::Connecting | Stage::Connected(_) => None,
        }
    }

    /// The error of a connection that failed, once: the next one may do better.
    pub fn take_error(&self) -> Option<Errno> {
        let mut stage = self.stage();
        let Stage::Failed(errno) = *stage else { return None };
        *stage = Stage::New(None);
        Some(errno)
    }

    /// It leads nowhere any more, until it is connected again.
    pub fn disconnect(&self) {
        *self.stage() = Stage::New(None);
    }

    /// Takes callers of the port that it was bound to.
    pub async fn listen(self: &Arc<Self>, network: &dyn Network) -> Result<(), Errno> {
        let port = match &*self.stage() {
            Stage::New(Some(port)) if self.protocol == Protocol::Tcp => *port,
            Stage::Listening(..) => return Ok(()),
            _ => return Err(Errno::Inval),
        };
        // A module that closed the socket wants no callers.
        let socket = Arc::downgrade(self);
        let arrived = Box::new(move |connection| {
            let Some(socket) = socket.upgrade() else { return };
            if let Stage::Listening(_, callers) = &mut *socket.stage() {
                callers.push_back(connection);
            }
            socket.changed.notify_waiters();
        });
        *self.stage() = Stage::Listening(port, VecDeque::new());
        let (send, listens) = tokio::sync::oneshot::channel();
        // A module that ended waits for no answer.
        let done = Box::new(move |result| send.send(result).unwrap_or_default());
        network.listen(port, arrived, done);
        let failed = match listens.await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error.errno(),
            Err(_) => Errno::Netdown,
        };
        *self.stage() = Stage::New(Some(port));
        Err(failed)
    }

    /// The next caller.
    pub async fn accept(&self) -> Result<Socket, Errno> {
        let accepted = async {
            loop {
                let changed = self.changed.notified();
                match &mut *self.stage() {
                    Stage::Listening(_, callers) => {
                        if let Some(connection) = callers.pop_front() {
                            return Ok(connection);
                        }
                    }
                    _ => return Err(Errno::Inval),
                }
                if self.at_once.load(Ordering::Relaxed) {
                    return Err(Errno::Again);
                }
                changed.await;
            }
        };
        let connection = self.patiently(Way::In, accepted).await?;
        let is_v6 = connection.peer.is_ipv6();
        Ok(Socket::at(Stage::Connected(connection), Protocol::Tcp, is_v6))
    }

    /// Reads what is there into `room`, or waits for something.
    pub async fn receive(&self, room: &mut [u8], peek: bool) -> Result<(usize, SocketAddr), Errno> {
        let flags = if peek { MsgFlags::MSG_PEEK } else { MsgFlags::empty() };
        let received = async {
            let wire = self.wire().await?;
            loop {
                match wire.receive(room, flags) {
                    Err(Errno::Again) if !self.at_once.load(Ordering::Relaxed) => {
                        wire.until(Way::In).await?;
                    }
                    result => return result.map(|bytes| (bytes, wire.peer)),
                }
            }
        };
        self.patiently(Way::In, received).await
    }

    /// Sends as much of `bytes` as there is room for, or waits for room.
    pub async fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let sent = async {
            let wire = self.wire().await?;
            loop {
                match wire.send(bytes) {
                    Err(Errno::Again) if !self.at_once.load(Ordering::Relaxed) => {
                        wire.until(Way::Out).await?;
                    }
                    result => return result,
                }
            }
        };
        self.patiently(Way::Out, sent).await
    }

    async fn patiently<T>(
        &self,
        way: Way,
        work: impl Future<Output = Result<T, Errno>>,
    ) -> Result<T, Errno> {
        match self.patience_of(way) {
            Some(patience) => {
                tokio::time::timeout(patience, work).await.unwrap_or(Err(Errno::Again))
            }
            None => work.await,
        }
    }

    /// Waits until something can be read, written or accepted without waiting.
    pub async fn ready(&self, way: Way) -> Result<Readiness, Errno> {
        loop {
            let changed = self.changed.notified();
            let has_callers = match &*self.stage() {
                Stage::Listening(_, callers) => Some(!callers.is_empty()),
                _ => None,
            };
            match has_callers {
                None => break,
                Some(true) => return Ok(Readiness { bytes: 1, is_ended: false }),
                Some(false) => changed.await,
            }
        }
        match self.wire().await {
            Ok(wire) => wire.ready(way).await,
            // What the call itself then says is the answer.
            Err(Errno::Notconn) => Err(Errno::Notconn),
            Err(_) => Ok(Readiness { bytes: 0, is_ended: true }),
        }
    }

    pub async fn shut_down(&self, how: Shutdown) -> Result<(), Errno> {
        let wire = self.wire().await?;
        shutdown(wire.socket.as_raw_fd(), how).map_err(errno)
    }

    pub async fn peer(&self) -> Result<SocketAddr, Errno> {
        Ok(self.wire().await?.peer)
    }

    /// Its own address, of which only a port that is listened at means anything.
    pub fn local(&self) -> SocketAddr {
        let port = match &*self.stage() {
            Stage::New(Some(port)) | Stage::Listening(port, _) => *port,
            _ => 0,
        };
        own_address(self.is_v6, port)
    }

    pub fn listens(&self) -> bool {
        matches!(&*self.stage(), Stage::Listening(..))
    }

    /// Whether datagrams go to `peer` already.
    pub fn leads_to(&self, peer: SocketAddr) -> bool {
        match &*self.stage() {
            Stage::Connected(connection) => connection.peer == peer,
            Stage::Joined(wire) => wire.peer == peer && !wire.is_over.load(Ordering::Relaxed),
            _ => false,
        }
    }
}

fn errno(errno: HostErrno) -> Errno {
    match errno {
        HostErrno::EAGAIN | HostErrno::EINTR => Errno::Again,
        HostErrno::EPIPE | HostErrno::ENOTCONN => Errno::Pipe,
        HostErrno::ECONNRESET => Errno::Connreset,
        HostErrno::EMSGSIZE => Errno::Msgsize,
        _ => Errno::Io,
    }
}

impl Wire {
    /// Must be called inside a tokio runtime.
    // The constructor is deprecated for types whose descriptor can change; a descriptor's own
    // cannot.
    #[expect(deprecated, reason = "its successor is unsafe, which this crate forbids")]
    fn new(connection: Connection, protocol: Protocol) -> io::Result<Self> {
        let Connection { socket, peer, was_reset } = connection;
        let interest = Interest::READABLE | Interest::WRITABLE;
        let socket = AsyncFd::try_with_interest(socket, interest)?;
        Ok(Self { socket, peer, was_reset, is_over: AtomicBool::new(false), protocol })
    }

    fn is_reset(&self) -> bool {
        self.was_reset.load(Ordering::Acquire)
    }

    pub fn receive(&self, room: &mut [u8], flags: MsgFlags) -> Result<usize, Errno> {
        let received = self.socket.try_io(Interest::READABLE, |socket| {
            Ok(recv(socket.as_raw_fd(), room, flags | MsgFlags::MSG_DONTWAIT)?)
        });
        match received {
            Ok(0) if self.is_reset() => Err(Errno::Connreset),
            Ok(0) if self.protocol == Protocol::Udp => Err(self.refused()),
            Ok(bytes) => Ok(bytes),
            Err(error) => Err(of_host(&error)),
        }
    }

    pub fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let sent = self
            .socket
            .try_io(Interest::WRITABLE, |socket| Ok(send(socket.as_raw_fd(), bytes, flags)?));
        match sent {
            Err(_) if self.is_reset() => Err(Errno::Connreset),
            result => result.map_err(|error| match of_host(&error) {
                Errno::Pipe if self.protocol == Protocol::Udp => self.refused(),
                errno => errno,
            }),
        }
    }

    /// What the end of a pair of messages means, which is that of the flow: what is sent next may
    /// have another.
    fn refused(&self) -> Errno {
        self.is_over.store(true, Ordering::Relaxed);
        Errno::Connrefused
    }

    pub async fn until(&self, way: Way) -> Result<(), Errno> {
        let ready = match way {
            Way::In => self.socket.readable().await,
            Way::Out => self.socket.writable().await,
        };
        ready.map(drop).map_err(|error| of_host(&error))
    }

    /// Waits until a call of that way would not wait.
    pub async fn ready(&self, way: Way) -> Result<Readiness, Errno> {
        loop {
            self.until(way).await?;
            if way == Way::Out {
                return Ok(Readiness { bytes: 1, is_ended: false });
            }
            let mut first = [0];
            match self.receive(&mut first, MsgFlags::MSG_PEEK) {
                Err(Errno::Again) => {}
                Ok(0) | Err(_) => return Ok(Readiness { bytes: 0, is_ended: true }),
                Ok(bytes) => return Ok(Readiness { bytes: bytes as u64, is_ended: false }),
            }
        }
    }
}

fn of_host(error: &io::Error) -> Errno {
    match error.raw_os_error() {
        Some(number) => errno(HostErrno::from_raw(number)),
        // What tokio says where an event was for something that is past.
        None if error.kind() == io::ErrorKind::WouldBlock => Errno::Again,
        None => Errno::Io,
    }
}
