//! Opening streams into the guest from any thread.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Requests that may wait for the device thread.
const WAITING_MAX: usize = 64;

/// A stream to be opened to this guest port.
pub(super) struct Dial {
    pub port: u32,
    pub stream: UnixStream,
}

/// Opens streams into the guest; may be cloned and used from any thread.
#[derive(Clone, Debug)]
pub struct VsockHandle {
    dials: SyncSender<Dial>,
    event: Arc<EventFd>,
}

impl VsockHandle {
    /// Opens a stream to `port` of the guest.
    ///
    /// Returns at once. What is written waits until the guest accepts; if it
    /// refuses, or no driver runs yet, the stream is closed and reads as ended.
    ///
    /// # Errors
    /// `NotConnected` when the device is gone, `WouldBlock` when too many
    /// requests are waiting, and what socketpair(2) says.
    pub fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let (ours, stream) = UnixStream::pair()?;
        self.dials.try_send(Dial { port, stream }).map_err(|error| match error {
            TrySendError::Full(_) => io::ErrorKind::WouldBlock,
            TrySendError::Disconnected(_) => io::ErrorKind::NotConnected,
        })?;
        self.event.write(1)?;
        Ok(ours)
    }
}

/// The device's side of all handles.
pub(super) struct Dials {
    pub waiting: Receiver<Dial>,
    pub event: Arc<EventFd>,
}

/// A handle and what it leads to.
pub(super) fn pair() -> io::Result<(VsockHandle, Dials)> {
    let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
    let event = Arc::new(EventFd::from_flags(flags)?);
    let (dials, waiting) = sync_channel(WAITING_MAX);
    Ok((VsockHandle { dials, event: event.clone() }, Dials { waiting, event }))
}
