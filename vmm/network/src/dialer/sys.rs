//! The host's sockets, none of which ever waits.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use exocell_xgate::Protocol;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockProtocol, SockType,
    SockaddrIn, SockaddrIn6, UnixAddr, bind, connect, getsockopt, recv, recvmsg, sendmsg,
    setsockopt, socket, socketpair, sockopt,
};

const FLAGS: SockFlag = SockFlag::SOCK_NONBLOCK.union(SockFlag::SOCK_CLOEXEC);

/// The ports of the host that cells' connections leave from end here, in the middle of Linux's
/// own range (32,768 to 60,999). Each that was closed is taken for a minute more, so a cell that
/// opens and closes connections uses them up for its peer: the host keeps the rest.
pub const PORT_LAST: u16 = 46_883;
/// ip(7); of Linux 6.3.
const IP_LOCAL_PORT_RANGE: libc::c_int = 51;

/// The two ends of a channel of messages.
pub fn channel() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, FLAGS)?)
}

/// Bytes that wait in each direction of a TCP socket; Linux counts twice as many. Whoever is at
/// its other end may neither read nor acknowledge anything: what waits is the host's memory.
const BUFFER_BYTES: usize = 64 << 10;
/// Bytes that wait for the peer in one of few sockets. What waits for the guest is the host's own
/// affair there (`net.ipv4.tcp_rmem`), for a window of it decides how fast a far peer sends.
const BUFFER_BYTES_OF_FEW: usize = 1 << 20;

/// Bounds what `socket` holds, which is one of `few` or of many.
///
/// # Errors
/// setsockopt(2).
pub fn bound(socket: &impl AsFd, few: bool) -> io::Result<()> {
    let bytes = if few { BUFFER_BYTES_OF_FEW } else { BUFFER_BYTES };
    setsockopt(socket, sockopt::SndBuf, &bytes)?;
    if !few {
        setsockopt(socket, sockopt::RcvBuf, &bytes)?;
    }
    Ok(())
}

/// A socket of `protocol` that is being connected to `peer`; whether it is
/// connected already. As one of `few` it may hold more.
pub fn start(protocol: Protocol, peer: SocketAddr, few: bool) -> io::Result<(OwnedFd, bool)> {
    let family = if peer.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let (kind, number) = match protocol {
        Protocol::Tcp => (SockType::Stream, None),
        Protocol::Udp => (SockType::Datagram, None),
        Protocol::Icmp if peer.is_ipv4() => (SockType::Datagram, Some(SockProtocol::Icmp)),
        Protocol::Icmp => (SockType::Datagram, Some(SockProtocol::IcmpV6)),
    };
    let socket = socket(family, kind, FLAGS, number)?;
    keep_to_ports(&socket);
    if protocol == Protocol::Tcp {
        // The guest has its own idea of when to send.
        setsockopt(&socket, sockopt::TcpNoDelay, &true)?;
        bound(&socket, few)?;
    }
    let connected = match peer {
        SocketAddr::V4(peer) => connect(socket.as_raw_fd(), &SockaddrIn::from(peer)),
        SocketAddr::V6(peer) => connect(socket.as_raw_fd(), &SockaddrIn6::from(peer)),
    };
    match connected {
        Ok(()) => Ok((socket, true)),
        Err(Errno::EINPROGRESS) => Ok((socket, false)),
        Err(errno) => Err(errno.into()),
    }
}

/// Has `socket` leave by ports to [`PORT_LAST`], where the host's own range goes on after them
/// and its Linux knows of ranges; elsewhere by any.
fn keep_to_ports(socket: &OwnedFd) {
    let range = u32::from(PORT_LAST) << 16;
    // SAFETY: pointer and length describe a local number. Needed because nix does not wrap
    // this option.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            IP_LOCAL_PORT_RANGE,
            (&raw const range).cast(),
            size_of::<u32>() as libc::socklen_t,
        );
    }
}

/// A connected socket for datagrams.
pub fn udp(peer: SocketAddr) -> io::Result<OwnedFd> {
    start(Protocol::Udp, peer, false).map(|(socket, _)| socket)
}

/// How a connection that was started ended.
pub fn outcome(socket: &OwnedFd) -> io::Result<()> {
    match getsockopt(socket, sockopt::SocketError)? {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// No link takes packets that are longer, except the host's to itself: the length of a
/// packet of IPv6 has 16 bits (RFC 8200).
const LINK_BYTES_MAX: libc::c_int = 65_535;

/// Whether `address` is one of the host's own: only those can be bound. There are others in
/// IPv6, those of its subnets that any router of them answers to (RFC 4291, 2.6.1): of them
/// the way is the host's to itself.
pub fn is_own(address: IpAddr) -> io::Result<bool> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = match socket(family, SockType::Datagram, FLAGS, None) {
        // A host without this family has no address of it.
        Err(Errno::EAFNOSUPPORT) => return Ok(false),
        socket => socket?,
    };
    let bound = match SocketAddr::new(address, 0) {
        SocketAddr::V4(own) => bind(socket.as_raw_fd(), &SockaddrIn::from(own)),
        SocketAddr::V6(own) => bind(socket.as_raw_fd(), &SockaddrIn6::from(own)),
    };
    Ok(bound.is_ok() || address.is_ipv6() && stays_here(address)?)
}

/// Whether what is sent to an address of IPv6 never leaves the host.
fn stays_here(address: IpAddr) -> io::Result<bool> {
    // Of datagrams that is only a question to the host's table of ways.
    let Ok(socket) = udp(SocketAddr::new(address, 9)) else { return Ok(false) };
    let (mut most, mut length) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the pointers are to local numbers, and the length is that of the first. Needed
    // because nix does not wrap this option.
    let asked = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU,
            (&raw mut most).cast(),
            &raw mut length,
        )
    };
    if asked == 0 { Ok(most > LINK_BYTES_MAX) } else { Err(io::Error::last_os_error()) }
}

/// One message, if there is one.
pub fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<usize> {
    Ok(recv(socket.as_raw_fd(), into, MsgFlags::MSG_DONTWAIT)?)
}

/// Sends one message, or says why not.
pub fn send(socket: BorrowedFd<'_>, message: &[u8]) -> io::Result<()> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    nix::sys::socket::send(socket.as_raw_fd(), message, flags)?;
    Ok(())
}

/// Sends one message and, where there is one, a descriptor with it.
pub fn send_with(
    socket: BorrowedFd<'_>,
    message: &[u8],
    passed: Option<&OwnedFd>,
) -> io::Result<()> {
    let Some(passed) = passed else { return send(socket, message) };
    let descriptors = [passed.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let parts = [IoSlice::new(message)];
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &parts, &rights, flags, None)?;
    Ok(())
}

/// One message and the descriptor that came with it.
pub fn receive_with(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = nix::cmsg_space!([RawFd; 1]);
    let mut parts = [IoSliceMut::new(into)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    let mut passed = None;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = control {
            for descriptor in descriptors {
                // SAFETY: the kernel just installed this descriptor for us, and
                // nothing else owns it. Needed because nix returns it bare.
                passed = Some(unsafe { OwnedFd::from_raw_fd(descriptor) });
            }
        }
    }
    Ok((message.bytes, passed))
}

/// Sixteen random bits.
pub fn random_u16() -> io::Result<u16> {
    let mut bytes = [0; 2];
    // SAFETY: pointer and length describe a local array. Needed because nix
    // does not wrap getrandom.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    match usize::try_from(got) {
        Ok(2) => Ok(u16::from_ne_bytes(bytes)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Moves `kept` to descriptors 3 and on, in their order, and closes every other but the three
/// standard streams.
pub fn keep_only(kept: Vec<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
    const FIRST: RawFd = 3;
    let after = FIRST + kept.len() as RawFd;
    // Out of the way first: one may have another's number.
    let mut aside = Vec::new();
    for descriptor in kept {
        // SAFETY: the call takes numbers, and makes a descriptor that nothing else owns. Needed
        // because nix's wants an owner of it.
        let number = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, after) };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        std::mem::forget(descriptor);
        aside.push(number);
    }
    for (from, to) in aside.into_iter().zip(FIRST..) {
        // SAFETY: dup2 takes two numbers; what the second was is closed, and this process, which is
        // about to close all, uses it no more. Needed because nix's dup2 wants an owner of it.
        if unsafe { libc::dup2(from, to) } != to {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: close_range takes integers. The owners of what it closes are
    // never dropped: the process ends by _exit. Needed because nix has no
    // wrapper.
    if unsafe { libc::close_range(after as u32, u32::MAX, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: these numbers are open and nothing else owns them now.
    Ok((FIRST..after).map(|number| unsafe { OwnedFd::from_raw_fd(number) }).collect())
}
