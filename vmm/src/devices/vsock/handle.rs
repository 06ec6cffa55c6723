//! Opening streams into the guest from any thread.

use std::any::Any;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Requests that may wait for the device thread.
const WAITING_MAX: usize = 64;
/// How long a request waits for its place among them.
const PLACE_MAX: Duration = Duration::from_secs(5);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(1);

/// What a handle asks of the device.
pub(super) enum Dial {
    /// A stream to this guest port, under a name for later.
    Open { port: u32, stream: UnixStream, name: u64 },
    /// Another end of it on the host.
    HandOver { name: u64, to: Successor, former: UnixStream },
}

/// What takes the place of a host program at the end of a stream.
pub struct Successor {
    /// Connected, to whomever the guest is to speak with from now on.
    pub stream: UnixStream,
    /// What the guest is told first.
    pub word: u8,
    /// Held as long as the stream is.
    pub held: Arc<dyn Any + Send + Sync>,
}

/// A stream that was opened, by which it is named to [`VsockHandle::hand_over`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamName(u64);

/// Opens streams into the guest; may be cloned and used from any thread.
#[derive(Clone, Debug)]
pub struct VsockHandle {
    dials: SyncSender<Dial>,
    event: Arc<EventFd>,
    next_name: Arc<AtomicU64>,
}

impl VsockHandle {
    /// Opens a stream to `port` of the guest.
    ///
    /// Does not wait for the guest. What is written waits until the guest accepts; if it
    /// refuses, or no driver runs yet, the stream is closed and reads as ended.
    ///
    /// # Errors
    /// `NotConnected` when the device is gone, `TimedOut` when it has taken none of the requests
    /// that wait for five seconds, and what socketpair(2) says.
    pub fn connect(&self, port: u32) -> io::Result<UnixStream> {
        self.open(port).map(|(stream, _)| stream)
    }

    /// The same, for a stream that may be handed over.
    ///
    /// # Errors
    /// As of [`Self::connect`].
    pub fn open(&self, port: u32) -> io::Result<(UnixStream, StreamName)> {
        let (ours, stream) = UnixStream::pair()?;
        let name = self.next_name.fetch_add(1, Ordering::Relaxed);
        self.ask(Dial::Open { port, stream, name })?;
        Ok((ours, StreamName(name)))
    }

    /// Has the guest speak with another from now on than with the holder of `former`, which is the
    /// stream `name` as [`Self::open`] gave it: no byte passes through this process's hands then.
    /// All that the guest had said by it must have been read, and the guest must wait for a word.
    ///
    /// Does not wait for the guest. If the guest has closed the stream, its successor is dropped.
    ///
    /// # Errors
    /// As of [`Self::connect`].
    pub fn hand_over(&self, name: StreamName, former: UnixStream, to: Successor) -> io::Result<()> {
        self.ask(Dial::HandOver { name: name.0, to, former })
    }

    /// A burst of requests waits for its turns: the device takes them as soon as it runs.
    fn ask(&self, mut dial: Dial) -> io::Result<()> {
        let late = Instant::now() + PLACE_MAX;
        loop {
            dial = match self.dials.try_send(dial) {
                Ok(()) => break,
                Err(TrySendError::Disconnected(_)) => {
                    return Err(io::ErrorKind::NotConnected.into());
                }
                Err(TrySendError::Full(_)) if Instant::now() > late => {
                    let text = "the cell's vsock device takes no more streams; it may be stopped \
                                or short of CPU: try again later";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
                Err(TrySendError::Full(dial)) => dial,
            };
            thread::sleep(LOOK);
        }
        self.event.write(1)?;
        Ok(())
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
    let next_name = Arc::default();
    Ok((VsockHandle { dials, event: event.clone(), next_name }, Dials { waiting, event }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_streams_at_once_than_may_wait_are_all_opened() {
        let (handle, dials) = pair().unwrap();
        let asked = thread::spawn(move || {
            (0..2 * WAITING_MAX).map(|_| handle.connect(1)).collect::<io::Result<Vec<_>>>()
        });
        // The device runs when no more may wait.
        let mut come = 0;
        while come < WAITING_MAX as u64 {
            come += dials.event.read().unwrap_or(0);
            thread::yield_now();
        }
        let taken: Vec<_> = dials.waiting.iter().collect();
        assert_eq!(taken.len(), 2 * WAITING_MAX);
        assert!(asked.join().unwrap().is_ok());
    }

    #[test]
    fn a_device_that_is_gone_takes_none() {
        let (handle, dials) = pair().unwrap();
        drop(dials);
        assert_eq!(handle.connect(1).unwrap_err().kind(), io::ErrorKind::NotConnected);
    }
}
