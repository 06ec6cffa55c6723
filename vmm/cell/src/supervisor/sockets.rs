//! Sockets of the host that the guest's programs connect to: one thread for each.
//!
//! ```text
//! agent: Socket ──a program connects──> Done ──> the door connects ──> handed over to the device
//!      <─────────── the next ───────────────┘        └ refused: the stream is closed
//! ```
//! The thread passes no byte on: it has the vsock device take the connection for the stream's end.
//! What ends the access ends all connections, and the listening in the guest.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use exocell_agent::client::{self, ClientError};
use exocell_agent::{AGENT_PORT, SOCKET_OPEN};
use exocell_vmm::devices::{Successor, VsockHandle};
use tracing::{debug, info};

use super::guest::connect;
use super::thread;
use crate::CellError;
use crate::socket::Door;

/// Connections of one socket at once; others wait in the guest.
pub(super) const CONNECTIONS_MAX: usize = 64;
/// How long is waited after something went wrong, and how long at most after several.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long a guest may take to close its end of a socket.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// A socket whose access may end.
#[derive(Clone)]
pub(super) struct Served(Arc<Shared>);

struct Shared {
    door: Door,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    ended: bool,
    /// The stream on which a program is waited for.
    waiting: Option<UnixStream>,
    connections: BTreeMap<u64, UnixStream>,
    next: u64,
}

/// A connection's place, which is free again when the device has done with it.
struct Place {
    of: Arc<Shared>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.lock().connections.remove(&self.number);
        self.of.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is room for one more connection; whether there still are any.
    fn await_room(&self) -> bool {
        let full = |state: &mut State| !state.ended && state.connections.len() >= CONNECTIONS_MAX;
        let state = self.changed.wait_while(self.lock(), full);
        !state.unwrap_or_else(PoisonError::into_inner).ended
    }

    /// Waits for a while, or for the end.
    fn rest(&self, pause: Duration) {
        let waits = |state: &mut State| !state.ended;
        drop(self.changed.wait_timeout_while(self.lock(), pause, waits));
    }

    /// Notes what the end is to close; whether that has come already.
    fn wait_on(&self, stream: &UnixStream) -> io::Result<bool> {
        let copy = stream.try_clone()?;
        let mut state = self.lock();
        state.waiting = Some(copy);
        Ok(state.ended)
    }

    /// Connects one program.
    fn serve_one(self: &Arc<Self>, agent: &VsockHandle) -> Result<(), ClientError> {
        let (stream, name) = agent.open(AGENT_PORT).map_err(ClientError::Local)?;
        if self.wait_on(&stream).map_err(ClientError::Local)? {
            return Ok(());
        }
        client::socket(&stream, &stream, self.door.number)?;
        let connected = match self.door.connect() {
            Ok(connected) => connected,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(ClientError::Local(error));
            }
            Err(error) => {
                // The program sees its connection closed.
                info!(socket = self.door.name, "a connection was refused: {error}");
                return Ok(());
            }
        };
        let held = self.place(&connected).map_err(ClientError::Local)?;
        let Some(held) = held else { return Ok(()) };
        let to = Successor { stream: connected, word: SOCKET_OPEN, held: Arc::new(held) };
        agent.hand_over(name, stream, to).map_err(ClientError::Local)
    }

    /// A place for a connection; `None` after the end.
    fn place(self: &Arc<Self>, connected: &UnixStream) -> io::Result<Option<Place>> {
        let copy = connected.try_clone()?;
        let mut state = self.lock();
        if state.ended {
            return Ok(None);
        }
        let number = state.next;
        state.next += 1;
        state.connections.insert(number, copy);
        Ok(Some(Place { of: self.clone(), number }))
    }
}

impl Served {
    pub fn new(door: Door) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Shared { door, state, changed }))
    }

    /// The capability's name.
    pub fn name(&self) -> &str {
        &self.0.door.name
    }

    /// Starts connecting programs of the guest, which is ready.
    ///
    /// # Errors
    /// There is no thread for it.
    pub fn begin(&self, agent: VsockHandle) -> Result<(), CellError> {
        let shared = self.0.clone();
        let serving = thread("socket", move || {
            let mut pause = PAUSE;
            while shared.await_room() {
                match shared.serve_one(&agent) {
                    Ok(()) => pause = PAUSE,
                    // The guest may do what it likes, but not keep the host busy by that.
                    Err(error) => {
                        debug!(socket = shared.door.name, "waits for its guest: {error}");
                        shared.rest(pause);
                        pause = (pause * 2).min(PAUSE_MAX);
                    }
                }
            }
        });
        serving.map(drop)
    }

    /// Ends access: no byte comes through any more when this returns.
    pub fn end(&self) {
        let mut state = self.0.lock();
        state.ended = true;
        self.0.door.close();
        for stream in state.waiting.iter().chain(state.connections.values()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(state);
        self.0.changed.notify_all();
    }

    /// Has the guest refuse whoever connects after the end.
    pub fn close_in(&self, agent: &VsockHandle) {
        // A guest that does not do it gains nothing.
        if let Ok(stream) = connect(agent, ANSWER_MAX) {
            let _ = client::close_socket(&stream, &stream, self.0.door.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn connections_are_bounded_and_end_with_the_access() {
        let (door, mut process) = UnixStream::pair().unwrap();
        let served = Served::new(Door::of(door, "folder:/x", 0));
        let shared = &served.0;
        let pairs: Vec<_> = (0..CONNECTIONS_MAX).map(|_| UnixStream::pair().unwrap()).collect();
        let place = |stream| shared.place(stream).unwrap();
        let mut held: Vec<_> = pairs.iter().map(|(ours, _)| place(ours).unwrap()).collect();
        let waits = shared.clone();
        let waiter = std::thread::spawn(move || waits.await_room());
        assert_eq!(shared.lock().connections.len(), CONNECTIONS_MAX);
        // The device lets one go.
        drop(held.pop());
        assert!(waiter.join().unwrap(), "there is room again");
        let (waiting, mut guest) = UnixStream::pair().unwrap();
        assert!(!shared.wait_on(&waiting).unwrap());
        served.end();
        // The last one is closed already as far as this knows.
        for (_, peer) in pairs.iter().take(CONNECTIONS_MAX - 1) {
            assert_eq!((&mut &*peer).read(&mut [0]).unwrap(), 0);
        }
        assert_eq!(guest.read(&mut [0]).unwrap(), 0, "nobody is waited for");
        assert_eq!(process.read(&mut [0]).unwrap(), 0, "its process ends");
        assert!(place(&pairs[0].0).is_none() && !shared.await_room());
        assert!(shared.wait_on(&waiting).unwrap());
    }
}
