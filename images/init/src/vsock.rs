//! Streams between the guest and the host (vsock(7)).

use std::os::fd::{AsRawFd, OwnedFd};
use std::thread::sleep;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, connect, getpeername, listen,
    socket,
};

use crate::sys;

/// The host's context id.
const HOST_CID: u32 = libc::VMADDR_CID_HOST;
/// Streams that wait to be accepted, at most: what nix allows.
const BACKLOG: i32 = 511;
/// How often and how far apart the host is tried.
const TRIES: u32 = 50;
const TRY_PAUSE: Duration = Duration::from_millis(20);

fn new_socket() -> nix::Result<OwnedFd> {
    socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
}

/// Connects to the host's `port`, which may not listen quite yet.
pub fn connect_host(port: u32) -> nix::Result<OwnedFd> {
    let mut tries = 0;
    loop {
        let socket = new_socket()?;
        match connect(socket.as_raw_fd(), &VsockAddr::new(HOST_CID, port)) {
            Ok(()) => return Ok(socket),
            Err(errno) if tries >= TRIES => return Err(errno),
            Err(_) => sleep(TRY_PAUSE),
        }
        tries += 1;
    }
}

/// Listens on the guest's `port`.
pub fn listen_on(port: u32) -> nix::Result<OwnedFd> {
    let socket = new_socket()?;
    bind(socket.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_ANY, port))?;
    // Whoever else connects is refused, but waits here until then.
    listen(&socket, Backlog::new(BACKLOG)?)?;
    Ok(socket)
}

/// The next stream of the host; a peer that is not the host is refused, since a
/// program of the cell may not act as the host.
pub fn accept_host(listener: &OwnedFd) -> nix::Result<OwnedFd> {
    let stream = sys::accept(listener)?;
    let peer: VsockAddr = getpeername(stream.as_raw_fd())?;
    if peer.cid() == HOST_CID { Ok(stream) } else { Err(Errno::EPERM) }
}
