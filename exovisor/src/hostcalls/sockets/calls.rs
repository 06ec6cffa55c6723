//! WASI's calls on sockets, and WasmEdge's beside them.

use super::Sockets;
use super::address::{self, Hint};
use super::socket::{Socket, Way};
use crate::hostcalls::context::{Attached, HostState};
use crate::hostcalls::guest::{self, bytes, copy_out, number, put};
use crate::imports::Wasi;
use exocell_xgate::Protocol;
use nix::sys::socket::Shutdown;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::MutexGuard;
use wasmtime_wasi::p1::types::{
    Errno, Fdflags, Fdstat, Filestat, Filetype, Riflags, Rights, Roflags, Sdflags,
};
use wiggle::GuestMemory;

/// Bytes that one call reads or writes at most; a datagram has no more.
const PIECE_BYTES_MAX: usize = 64 << 10;
/// The longest name of a host or a service, in bytes, with the zero that may end it.
const NAME_BYTES_MAX: u32 = 256;
/// Results of one look-up.
const RESULTS_MAX: u32 = 16;
/// Ports by name (services(5)), where a name is given instead of a number.
const SERVICES: [(&str, u16); 4] = [("", 0), ("http", 80), ("https", 443), ("domain", 53)];

/// Options of level 0, the socket's own (`SocketOptName` of WasmEdge).
mod option {
    pub const TYPE: u32 = 1;
    pub const ERROR: u32 = 2;
    pub const RECEIVE_TIMEOUT: u32 = 11;
    pub const SEND_TIMEOUT: u32 = 12;
    pub const LISTENS: u32 = 13;
    pub const DEVICE: u32 = 14;
}

/// Whether a call is for sockets: because of its name, or of the descriptors that it is given.
pub(crate) fn is_for(sockets: &Sockets, call: Wasi, arguments: &[i64]) -> bool {
    let is_socket = |fd: Option<&i64>| fd.is_some_and(|fd| sockets.get(number(*fd)).is_some());
    match call {
        Wasi::sock_accept | Wasi::sock_recv | Wasi::sock_send | Wasi::sock_shutdown => {
            is_socket(arguments.first())
        }
        Wasi::fd_renumber => is_socket(arguments.first()) || is_socket(arguments.get(1)),
        _ if call.is_of_sockets() => true,
        _ => !sockets.open.is_empty() && call.is_on_descriptor() && is_socket(arguments.first()),
    }
}

/// Answers a call that is for sockets with its errno. The lock on the host's state is released
/// before the call waits, so that other threads of the isolate go on.
pub(crate) async fn call(
    attached: &Attached,
    host_state: MutexGuard<'_, HostState>,
    call: Wasi,
    arguments: &[i64],
    memory: &mut GuestMemory<'_>,
) -> i32 {
    let result = match (call, arguments) {
        (Wasi::sock_open, [family, kind, out]) => open(host_state, *family, *kind, *out, memory),
        (Wasi::sock_getaddrinfo, [host, host_len, port, port_len, hint, first, most, out]) => {
            let asked = Question {
                host: (number(*host), number(*host_len)),
                service: (number(*port), number(*port_len)),
                hint: number(*hint),
                first: number(*first),
                most: number(*most),
            };
            asked.answer(host_state, memory).await.and_then(|count| put(memory, *out, count))
        }
        (_, [fd, rest @ ..]) => match host_state.sockets.get(number(*fd)) {
            Some(socket) => {
                on_socket(attached, host_state, socket, (call, *fd, rest), memory).await
            }
            None => Err(Errno::Badf),
        },
        _ => Err(Errno::Notsup),
    };
    i32::from(u16::from(result.err().unwrap_or(Errno::Success)))
}

fn open(
    mut host_state: MutexGuard<'_, HostState>,
    family: i64,
    kind: i64,
    out: i64,
    memory: &mut GuestMemory<'_>,
) -> Result<(), Errno> {
    let small = |number: i64| u8::try_from(number).map_err(|_| Errno::Inval);
    let is_v6 = address::is_v6(small(family)?)?;
    let socket = Socket::new(address::protocol(small(kind)?)?, is_v6);
    let fd = add(&mut host_state, socket)?;
    put(memory, out, fd)
}

/// A new descriptor, behind which the network's capability stands.
fn add(host_state: &mut HostState, socket: Socket) -> Result<u32, Errno> {
    let fd = host_state.sockets.add(socket)?;
    host_state.gate.open_socket(fd);
    Ok(fd)
}

/// What needs the network or the table of descriptors.
async fn on_socket(
    attached: &Attached,
    mut host_state: MutexGuard<'_, HostState>,
    socket: Arc<Socket>,
    (call, fd, arguments): (Wasi, i64, &[i64]),
    memory: &mut GuestMemory<'_>,
) -> Result<(), Errno> {
    match (call, arguments) {
        (Wasi::fd_close, []) => {
            host_state.sockets.close(number(fd));
            host_state.gate.close(number(fd));
            Ok(())
        }
        (Wasi::sock_listen, [_]) => {
            let network = host_state.sockets.network()?;
            drop(host_state);
            socket.listen(&*network).await
        }
        (Wasi::sock_connect, [address, port]) => {
            let peer = peer(memory, *address, *port)?;
            let network = host_state.sockets.network()?;
            drop(host_state);
            socket.connect(&*network, peer).await
        }
        (Wasi::sock_send_to, [buffers, count, address, port, _, out]) => {
            let peer = peer(memory, *address, *port)?;
            let network = host_state.sockets.network()?;
            drop(host_state);
            match socket.protocol {
                Protocol::Udp if socket.leads_to(peer) => {}
                Protocol::Udp => socket.connect(&*network, peer).await?,
                _ => return Err(Errno::Isconn),
            }
            send(&socket, (*buffers, *count, *out), memory).await
        }
        (Wasi::sock_accept, [flags, out]) => {
            drop(host_state);
            let caller = socket.accept().await?;
            let flags = Fdflags::from_bits_truncate(*flags as u16);
            caller.at_once.store(flags.contains(Fdflags::NONBLOCK), Ordering::Relaxed);
            let fd = add(&mut *attached.0.lock().await, caller)?;
            put(memory, *out, fd)
        }
        _ => {
            drop(host_state);
            on_socket_alone(&socket, call, arguments, memory).await
        }
    }
}

/// What needs the socket only.
async fn on_socket_alone(
    socket: &Socket,
    call: Wasi,
    arguments: &[i64],
    memory: &mut GuestMemory<'_>,
) -> Result<(), Errno> {
    match (call, arguments) {
        // The address is the network's.
        (Wasi::sock_bind, [address, port]) => socket.bind(peer(memory, *address, *port)?.port()),
        (Wasi::sock_recv, [buffers, count, flags, out, flags_out]) => {
            let (bytes, _) = receive(socket, (*buffers, *count, *flags), memory).await?;
            put(memory, *out, bytes)?;
            put(memory, *flags_out, Roflags::empty())
        }
        (Wasi::sock_recv_from, [buffers, count, address, flags, port, out, flags_out]) => {
            let (bytes, peer) = receive(socket, (*buffers, *count, *flags), memory).await?;
            address::write(memory, number(*address), peer.ip())?;
            put(memory, *port, u32::from(peer.port()))?;
            put(memory, *out, bytes)?;
            put(memory, *flags_out, 0u32)
        }
        (Wasi::fd_read, [buffers, count, out]) => {
            let (bytes, _) = receive(socket, (*buffers, *count, 0), memory).await?;
            put(memory, *out, bytes)
        }
        (Wasi::sock_send, [buffers, count, 0, out]) | (Wasi::fd_write, [buffers, count, out]) => {
            send(socket, (*buffers, *count, *out), memory).await
        }
        (Wasi::sock_shutdown, [how]) => {
            let how = Sdflags::from_bits(*how as u8).ok_or(Errno::Inval)?;
            let how = match (how.contains(Sdflags::RD), how.contains(Sdflags::WR)) {
                (true, true) => Shutdown::Both,
                (true, false) => Shutdown::Read,
                (false, true) => Shutdown::Write,
                (false, false) => return Err(Errno::Inval),
            };
            socket.shut_down(how).await
        }
        (Wasi::sock_getpeeraddr, [address, family, port]) => {
            let peer = socket.peer().await?;
            tell(memory, peer, (*address, *family, *port))
        }
        (Wasi::sock_getlocaladdr, [address, family, port]) => {
            tell(memory, socket.local(), (*address, *family, *port))
        }
        (Wasi::sock_getsockopt, [level, name, value, len]) => {
            option(*level, *name)?;
            get_option(socket, number(*name), (number(*value), number(*len)), memory)
        }
        (Wasi::sock_setsockopt, [level, name, value, len]) => {
            option(*level, *name)?;
            set_option(socket, number(*name), (number(*value), number(*len)), memory)
        }
        (Wasi::fd_fdstat_get, [out]) => put(memory, *out, stat(socket)),
        (Wasi::fd_fdstat_set_flags, [flags]) => {
            let flags = Fdflags::from_bits_truncate(*flags as u16);
            socket.at_once.store(flags.contains(Fdflags::NONBLOCK), Ordering::Relaxed);
            Ok(())
        }
        (Wasi::fd_filestat_get, [out]) => {
            let filetype = filetype(socket);
            let (dev, ino, nlink, size, atim, mtim, ctim) = (0, 0, 0, 0, 0, 0, 0);
            put(memory, *out, Filestat { dev, ino, filetype, nlink, size, atim, mtim, ctim })
        }
        (Wasi::fd_seek | Wasi::fd_tell | Wasi::fd_pread | Wasi::fd_pwrite, _) => Err(Errno::Spipe),
        _ => Err(Errno::Notsup),
    }
}

fn port16(port: i64) -> Result<u16, Errno> {
    u16::try_from(port).map_err(|_| Errno::Inval)
}

fn peer(memory: &GuestMemory<'_>, address: i64, port: i64) -> Result<SocketAddr, Errno> {
    Ok(SocketAddr::new(address::read(memory, number(address))?, port16(port)?))
}

fn tell(
    memory: &mut GuestMemory<'_>,
    at: SocketAddr,
    (address, family, port): (i64, i64, i64),
) -> Result<(), Errno> {
    address::write(memory, number(address), at.ip())?;
    put(memory, family, u32::from(address::family(at.ip())))?;
    put(memory, port, u32::from(at.port()))
}

/// How many bytes were received, and from whom.
async fn receive(
    socket: &Socket,
    (buffers, count, flags): (i64, i64, i64),
    memory: &mut GuestMemory<'_>,
) -> Result<(u32, SocketAddr), Errno> {
    let flags = Riflags::from_bits(flags as u16).ok_or(Errno::Inval)?;
    let buffers = guest::buffers(memory, number(buffers), number(count))?;
    let len = buffers.iter().map(|(_, len)| *len as usize).sum::<usize>().min(PIECE_BYTES_MAX);
    let is_whole = flags.contains(Riflags::RECV_WAITALL) && socket.protocol == Protocol::Tcp;
    let mut room = vec![0; len];
    let (mut filled, from) = socket.receive(&mut room, flags.contains(Riflags::RECV_PEEK)).await?;
    while is_whole && filled > 0 && filled < len {
        match socket.receive(room.get_mut(filled..).unwrap_or_default(), false).await {
            Ok((0, _)) | Err(_) => break,
            Ok((more, _)) => filled += more,
        }
    }
    guest::scatter(memory, buffers, room.get(..filled).unwrap_or_default())?;
    Ok((filled as u32, from))
}

async fn send(
    socket: &Socket,
    (buffers, count, out): (i64, i64, i64),
    memory: &mut GuestMemory<'_>,
) -> Result<(), Errno> {
    let buffers = guest::buffers(memory, number(buffers), number(count))?;
    let bytes = guest::gather(memory, buffers, PIECE_BYTES_MAX)?;
    let sent = socket.send(&bytes).await?;
    put(memory, out, sent as u32)
}

fn filetype(socket: &Socket) -> Filetype {
    match socket.protocol {
        Protocol::Udp => Filetype::SocketDgram,
        _ => Filetype::SocketStream,
    }
}

fn stat(socket: &Socket) -> Fdstat {
    let mut fs_flags = Fdflags::empty();
    fs_flags.set(Fdflags::NONBLOCK, socket.at_once.load(Ordering::Relaxed));
    let fs_rights_base = Rights::FD_READ
        | Rights::FD_WRITE
        | Rights::FD_FDSTAT_SET_FLAGS
        | Rights::FD_FILESTAT_GET
        | Rights::POLL_FD_READWRITE;
    let fs_filetype = filetype(socket);
    Fdstat { fs_filetype, fs_flags, fs_rights_base, fs_rights_inheriting: fs_rights_base }
}

/// Options of the socket itself are the only ones, and no device is named.
fn option(level: i64, name: i64) -> Result<(), Errno> {
    match (level, number(name)) {
        (0, ..option::DEVICE) => Ok(()),
        (0, option::DEVICE) => Err(Errno::Notcapable),
        _ => Err(Errno::Noprotoopt),
    }
}

/// Which way an option's time is for, if it is one.
fn way(name: u32) -> Option<Way> {
    match name {
        option::RECEIVE_TIMEOUT => Some(Way::In),
        option::SEND_TIMEOUT => Some(Way::Out),
        _ => None,
    }
}

fn get_option(
    socket: &Socket,
    name: u32,
    (value, len): (u32, u32),
    memory: &mut GuestMemory<'_>,
) -> Result<(), Errno> {
    let number = match name {
        option::TYPE => u32::from(address::kind(socket.protocol)),
        option::ERROR => socket.take_error().map_or(0, |errno| u32::from(u16::from(errno))),
        option::LISTENS => u32::from(socket.listens()),
        _ => match way(name) {
            Some(way) => {
                let patience = socket.patience_of(way).unwrap_or_default();
                let (s, us) = (patience.as_secs(), u64::from(patience.subsec_micros()));
                copy_out(memory, value, &[s.to_le_bytes(), us.to_le_bytes()].concat())?;
                return put(memory, len.into(), 16u32);
            }
            None => return Err(Errno::Noprotoopt),
        },
    };
    put(memory, value.into(), number)?;
    put(memory, len.into(), 4u32)
}

/// Times are kept to; what is about buffers, addresses and probes is the network's.
fn set_option(
    socket: &Socket,
    name: u32,
    (value, len): (u32, u32),
    memory: &GuestMemory<'_>,
) -> Result<(), Errno> {
    let Some(way) = way(name) else { return Ok(()) };
    if len < 16 {
        return Err(Errno::Inval);
    }
    let all = bytes(memory, value, 16)?;
    let (s, us) = all.split_first_chunk::<8>().ok_or(Errno::Fault)?;
    let us = us.first_chunk::<8>().ok_or(Errno::Fault)?;
    let (s, us) = (u64::from_le_bytes(*s), u64::from_le_bytes(*us));
    let patience = Duration::from_secs(s.min(u32::MAX.into()))
        + Duration::from_micros(us.min(u32::MAX.into()));
    socket.set_patience(way, Some(patience).filter(|patience| !patience.is_zero()));
    Ok(())
}

/// The arguments of `sock_getaddrinfo`.
struct Question {
    host: (u32, u32),
    service: (u32, u32),
    hint: u32,
    first: u32,
    most: u32,
}

impl Question {
    /// Writes the results down; how many there are.
    async fn answer(
        self,
        host_state: MutexGuard<'_, HostState>,
        memory: &mut GuestMemory<'_>,
    ) -> Result<u32, Errno> {
        let network = host_state.sockets.network()?;
        drop(host_state);
        let host = name(memory, self.host)?;
        let port = port_of(&name(memory, self.service)?)?;
        let hint = Hint::read(memory, self.hint)?;
        let addresses = match host.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => {
                let (send, found) = tokio::sync::oneshot::channel();
                network.look_up(&host, Box::new(move |result| drop(send.send(result))));
                let found = found.await.map_err(|_| Errno::Netdown)?;
                found.map_err(super::NetworkError::errno)?
            }
        };
        let is_wanted = |address: &IpAddr| hint.is_v6.is_none_or(|v6| v6 == address.is_ipv6());
        let most = self.most.min(RESULTS_MAX) as usize;
        let found: Vec<SocketAddr> = addresses
            .into_iter()
            .filter(is_wanted)
            .map(|address| SocketAddr::new(address, port))
            .take(most)
            .collect();
        if found.is_empty() {
            return Err(Errno::Noent);
        }
        address::write_list(memory, self.first, &found, hint.protocol)
    }
}

/// A name, which may end with a zero.
fn name(memory: &GuestMemory<'_>, (start, len): (u32, u32)) -> Result<String, Errno> {
    let name = guest::text(memory, start, len, NAME_BYTES_MAX as usize)?;
    Ok(name.strip_suffix('\0').unwrap_or(&name).to_owned())
}

fn port_of(service: &str) -> Result<u16, Errno> {
    let known = SERVICES.iter().find(|(name, _)| *name == service).map(|(_, port)| *port);
    known.or_else(|| service.parse().ok()).ok_or(Errno::Inval)
}
