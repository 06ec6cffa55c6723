//! TCP, through the isolate's [`Network`](crate::Network): the sockets are those of modules
//! ([`crate::hostcalls::sockets`]), under the names of WASI 0.2.

use super::network::{failed, family, missing, ours};
use super::streams::Guarded;
use super::wasi::Wasi;
use super::wire::{Half, code};
use crate::hostcalls::sockets::{Errno, Socket, Way};
use exocell_xgate::{Kind, Live, Protocol};
use nix::sys::socket::Shutdown;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use wasmtime::Result;
use wasmtime::component::Resource;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::bindings::sockets::network::{
    ErrorCode, IpAddressFamily, IpSocketAddress, Network,
};
use wasmtime_wasi::p2::bindings::sockets::tcp::{self, HostTcpSocket, ShutdownType, TcpSocket};
use wasmtime_wasi::p2::bindings::sockets::tcp_create_socket;
use wasmtime_wasi::p2::{
    DynInputStream, DynOutputStream, DynPollable, Pollable, SocketResult, subscribe,
};

type Fd = Resource<TcpSocket>;
type Streams = (Resource<DynInputStream>, Resource<DynOutputStream>);

/// What a handle of a socket stands for.
pub(super) struct Tcp {
    socket: Arc<Socket>,
    /// What was started and not yet finished.
    started: Option<Step>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Bind,
    Connect,
    Listen,
}

impl Tcp {
    fn new(socket: Socket) -> Self {
        // Waiting is what pollables are for.
        socket.never_waits();
        Self { socket: Arc::new(socket), started: None }
    }

    fn start(&mut self, step: Step) -> SocketResult<()> {
        match self.started {
            None => {
                self.started = Some(step);
                Ok(())
            }
            Some(_) => Err(ErrorCode::ConcurrencyConflict.into()),
        }
    }

    fn finish(&mut self, step: Step) -> SocketResult<()> {
        if self.started != Some(step) {
            return Err(ErrorCode::NotInProgress.into());
        }
        self.started = None;
        Ok(())
    }
}

#[async_trait]
impl Pollable for Tcp {
    async fn ready(&mut self) {
        match self.started {
            Some(Step::Connect) => drop(self.socket.wire().await),
            None if self.socket.listens() => {
                // What the next call then says is the answer.
                let _ = self.socket.ready(Way::In).await;
            }
            _ => {}
        }
    }
}

/// The result of what never waits.
fn now<T>(work: impl Future<Output = std::result::Result<T, Errno>>) -> SocketResult<T> {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result.map_err(|errno| code(errno).into()),
        Poll::Pending => Err(ErrorCode::WouldBlock.into()),
    }
}

impl Wasi {
    /// The token of the network.
    ///
    /// # Errors
    /// `access-denied` without one, and once it was revoked.
    pub(super) fn peers(&self) -> SocketResult<Live> {
        self.live(Kind::Network).cloned().ok_or_else(|| ErrorCode::AccessDenied.into())
    }

    fn tcp(&mut self, fd: &Fd) -> SocketResult<&mut Tcp> {
        self.peers()?;
        Ok(self.table.get_mut(&ours(fd))?)
    }

    fn add_tcp(&mut self, socket: Socket) -> SocketResult<Fd> {
        let handle = self.table.push(Tcp::new(socket))?;
        Ok(Resource::new_own(handle.rep()))
    }

    /// Both ways of a connected socket.
    fn streams(&mut self, fd: &Fd) -> SocketResult<Streams> {
        let live = self.peers()?;
        let wire = now(self.tcp(fd)?.socket.wire())?;
        let input: DynInputStream = Box::new(Half::input(Arc::clone(&wire)));
        let output: DynOutputStream = Box::new(Half::output(wire));
        let input: DynInputStream = Box::new(Guarded { stream: input, live: live.clone() });
        let output: DynOutputStream = Box::new(Guarded { stream: output, live });
        let input = self.table.push_child(input, &ours::<_, Tcp>(fd))?;
        Ok((input, self.table.push_child(output, &ours::<_, Tcp>(fd))?))
    }
}

impl tcp_create_socket::Host for Wasi {
    fn create_tcp_socket(&mut self, family: IpAddressFamily) -> SocketResult<Fd> {
        self.peers()?;
        self.add_tcp(Socket::new(Protocol::Tcp, family == IpAddressFamily::Ipv6))
    }
}

impl tcp::Host for Wasi {}

impl HostTcpSocket for Wasi {
    missing! { tcp:
        set_listen_backlog_size(value: u64) -> ();
        keep_alive_enabled() -> bool;
        set_keep_alive_enabled(value: bool) -> ();
        keep_alive_idle_time() -> u64;
        set_keep_alive_idle_time(value: u64) -> ();
        keep_alive_interval() -> u64;
        set_keep_alive_interval(value: u64) -> ();
        keep_alive_count() -> u32;
        set_keep_alive_count(value: u32) -> ();
        hop_limit() -> u8;
        set_hop_limit(value: u8) -> ();
        receive_buffer_size() -> u64;
        set_receive_buffer_size(value: u64) -> ();
        send_buffer_size() -> u64;
        set_send_buffer_size(value: u64) -> ();
    }

    async fn start_bind(
        &mut self,
        fd: Fd,
        _: Resource<Network>,
        address: IpSocketAddress,
    ) -> SocketResult<()> {
        let port = std::net::SocketAddr::from(address).port();
        let tcp = self.tcp(&fd)?;
        tcp.start(Step::Bind)?;
        let bound = tcp.socket.bind(port);
        bound.map_err(|errno| {
            tcp.started = None;
            code(errno).into()
        })
    }

    fn finish_bind(&mut self, fd: Fd) -> SocketResult<()> {
        self.tcp(&fd)?.finish(Step::Bind)
    }

    fn start_connect(
        &mut self,
        fd: Fd,
        _: Resource<Network>,
        address: IpSocketAddress,
    ) -> SocketResult<()> {
        let network = self.network()?;
        let tcp = self.tcp(&fd)?;
        tcp.start(Step::Connect)?;
        let began = tcp.socket.begin_connect(&*network, address.into());
        began.map_err(|errno| {
            tcp.started = None;
            code(errno).into()
        })
    }

    fn finish_connect(&mut self, fd: Fd) -> SocketResult<Streams> {
        let tcp = self.tcp(&fd)?;
        tcp.finish(Step::Connect)?;
        match tcp.socket.settled() {
            Some(Ok(_)) => self.streams(&fd),
            Some(Err(errno)) => Err(failed(errno).into()),
            None => {
                tcp.started = Some(Step::Connect);
                Err(ErrorCode::WouldBlock.into())
            }
        }
    }

    async fn start_listen(&mut self, fd: Fd) -> SocketResult<()> {
        let network = self.network()?;
        let tcp = self.tcp(&fd)?;
        tcp.start(Step::Listen)?;
        let listens = tcp.socket.listen(&*network).await;
        listens.map_err(|errno| {
            tcp.started = None;
            code(errno).into()
        })
    }

    fn finish_listen(&mut self, fd: Fd) -> SocketResult<()> {
        self.tcp(&fd)?.finish(Step::Listen)
    }

    fn accept(
        &mut self,
        fd: Fd,
    ) -> SocketResult<(Fd, Resource<DynInputStream>, Resource<DynOutputStream>)> {
        let caller = now(self.tcp(&fd)?.socket.accept())?;
        let caller = self.add_tcp(caller)?;
        let (input, output) = self.streams(&caller)?;
        Ok((caller, input, output))
    }

    fn local_address(&mut self, fd: Fd) -> SocketResult<IpSocketAddress> {
        Ok(self.tcp(&fd)?.socket.local().into())
    }

    fn remote_address(&mut self, fd: Fd) -> SocketResult<IpSocketAddress> {
        Ok(now(self.tcp(&fd)?.socket.peer())?.into())
    }

    fn is_listening(&mut self, fd: Fd) -> Result<bool> {
        Ok(self.table.get(&ours::<_, Tcp>(&fd))?.socket.listens())
    }

    fn address_family(&mut self, fd: Fd) -> Result<IpAddressFamily> {
        Ok(family(self.table.get(&ours::<_, Tcp>(&fd))?.socket.is_v6))
    }

    fn subscribe(&mut self, fd: Fd) -> Result<Resource<DynPollable>> {
        subscribe(&mut self.table, ours::<_, Tcp>(&fd))
    }

    fn shutdown(&mut self, fd: Fd, how: ShutdownType) -> SocketResult<()> {
        let how = match how {
            ShutdownType::Receive => Shutdown::Read,
            ShutdownType::Send => Shutdown::Write,
            ShutdownType::Both => Shutdown::Both,
        };
        now(self.tcp(&fd)?.socket.shut_down(how))
    }

    fn drop(&mut self, fd: Fd) -> Result<()> {
        self.table.delete(Resource::<Tcp>::new_own(fd.rep()))?;
        Ok(())
    }
}
