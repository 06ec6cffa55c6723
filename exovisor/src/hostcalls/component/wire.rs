//! The two ways of a connection as streams of WASI 0.2.

use crate::hostcalls::sockets::{Errno, Way, Wire};
use bytes::Bytes;
use nix::sys::socket::MsgFlags;
use std::io;
use std::sync::Arc;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::bindings::sockets::network::ErrorCode;
use wasmtime_wasi::p2::{InputStream, OutputStream, Pollable, StreamError, StreamResult};

/// Bytes that are read or taken at once.
const BYTES_MAX: usize = 16 << 10;

/// One way of a connection.
pub(super) struct Half {
    wire: Arc<Wire>,
    /// What was taken and could not be sent yet.
    unsent: Bytes,
    way: Way,
}

impl Half {
    pub fn input(wire: Arc<Wire>) -> Self {
        Self { wire, unsent: Bytes::new(), way: Way::In }
    }

    pub fn output(wire: Arc<Wire>) -> Self {
        Self { wire, unsent: Bytes::new(), way: Way::Out }
    }

    fn send(&mut self) -> StreamResult<()> {
        while !self.unsent.is_empty() {
            match self.wire.send(&self.unsent) {
                Ok(sent) => drop(self.unsent.split_to(sent)),
                Err(Errno::Again) => return Ok(()),
                Err(Errno::Pipe) => return Err(StreamError::Closed),
                Err(errno) => return Err(failed(errno)),
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Pollable for Half {
    async fn ready(&mut self) {
        match self.way {
            // What the call itself then says is the answer.
            Way::In => {
                let _ = self.wire.ready(Way::In).await;
            }
            Way::Out => {
                while self.send().is_ok() && !self.unsent.is_empty() {
                    if self.wire.until(Way::Out).await.is_err() {
                        return;
                    }
                }
            }
        }
    }
}

impl InputStream for Half {
    fn read(&mut self, size: usize) -> StreamResult<Bytes> {
        let mut room = vec![0; size.min(BYTES_MAX)];
        if room.is_empty() {
            return Ok(Bytes::new());
        }
        match self.wire.receive(&mut room, MsgFlags::empty()) {
            Ok(0) => Err(StreamError::Closed),
            Ok(length) => {
                room.truncate(length);
                Ok(room.into())
            }
            Err(Errno::Again) => Ok(Bytes::new()),
            Err(errno) => Err(failed(errno)),
        }
    }
}

impl OutputStream for Half {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        if !self.unsent.is_empty() || bytes.len() > BYTES_MAX {
            return Err(StreamError::trap("more is written than `check-write` permits"));
        }
        self.unsent = bytes;
        self.send()
    }

    fn flush(&mut self) -> StreamResult<()> {
        self.send()
    }

    /// Nothing more is taken before all is sent.
    fn check_write(&mut self) -> StreamResult<usize> {
        self.send()?;
        Ok(if self.unsent.is_empty() { BYTES_MAX } else { 0 })
    }
}

fn failed(errno: Errno) -> StreamError {
    let kind = match errno {
        Errno::Connreset => io::ErrorKind::ConnectionReset,
        Errno::Pipe => io::ErrorKind::BrokenPipe,
        _ => io::ErrorKind::Other,
    };
    StreamError::LastOperationFailed(io::Error::from(kind).into())
}

/// What WASI 0.2 calls an error of a socket.
pub(super) fn code(errno: Errno) -> ErrorCode {
    match errno {
        Errno::Acces | Errno::Netdown => ErrorCode::AccessDenied,
        Errno::Connrefused => ErrorCode::ConnectionRefused,
        Errno::Connreset | Errno::Pipe => ErrorCode::ConnectionReset,
        Errno::Hostunreach => ErrorCode::RemoteUnreachable,
        Errno::Already => ErrorCode::ConcurrencyConflict,
        Errno::Again => ErrorCode::WouldBlock,
        Errno::Nfile => ErrorCode::NewSocketLimit,
        Errno::Msgsize => ErrorCode::DatagramTooLarge,
        Errno::Inval | Errno::Isconn | Errno::Notconn => ErrorCode::InvalidState,
        _ => ErrorCode::Unknown,
    }
}
