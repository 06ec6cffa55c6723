//! `Dial`: the operator's way to a port of the guest's own.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use exocell_agent::{FrameWriter, Kind, Reply};
use nix::sys::socket;

use crate::error::{Context, InitError};

/// Stack of the thread that passes bytes on inwards.
const STACK_BYTES: usize = 64 * 1024;
/// How long a port may take to accept.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Connects to `port` and passes bytes on, both ways, until both have ended.
pub fn run(stream: &File, port: u16) -> Result<(), InitError> {
    let closed = |error: io::Error| InitError::not_found(format!("port {port}: {error}"));
    let own: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let [first, second] = own.map(|host| SocketAddr::new(host, port));
    let connected = TcpStream::connect_timeout(&first, CONNECT_MAX)
        .or_else(|_| TcpStream::connect_timeout(&second, CONNECT_MAX))
        .map_err(closed)?;
    let _ = connected.set_nodelay(true);
    FrameWriter::new(stream).write_json(Kind::Reply, &Reply::Done)?;
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("dial".into()).stack_size(STACK_BYTES);
        let inwards = builder.spawn_scoped(scope, || {
            let passed = io::copy(&mut &*stream, &mut &connected);
            let _ =
                connected.shutdown(if passed.is_ok() { Shutdown::Write } else { Shutdown::Both });
        });
        inwards.context(|| "a thread for the connection")?;
        let passed = io::copy(&mut &connected, &mut &*stream);
        let how = if passed.is_ok() { socket::Shutdown::Write } else { socket::Shutdown::Both };
        let _ = socket::shutdown(stream.as_raw_fd(), how);
        if passed.is_err() {
            let _ = connected.shutdown(Shutdown::Both);
        }
        Ok(())
    })
}
