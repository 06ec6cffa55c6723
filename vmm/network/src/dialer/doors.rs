//! Published ports of datagrams: sockets of the host that callers send to, and who called.
//!
//! The stack is told who says what, and answers. Only who called is answered, and with so much for
//! a call: a stack that a guest has taken over reaches nobody else by these sockets, and whoever
//! calls in another's name has little said to that one.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Callers of one port that are known at once; who has not called for the longest time is
/// forgotten first.
const CALLERS_MAX: usize = 1024;
/// How long a caller may be answered: longer than the stack keeps a flow that is silent.
const CALLER_MAX: Duration = Duration::from_secs(90);
/// Bytes of answers to one call. Who is to get more calls again, as programs do that stream.
const ANSWERS_BYTES_MAX: u64 = 4 << 20;

/// One port.
struct Door {
    socket: UdpSocket,
    callers: HashMap<SocketAddr, Call>,
}

/// The last call of one caller.
struct Call {
    at: Instant,
    /// Bytes of answers that it may still get.
    left: u64,
}

impl Call {
    fn may_be_answered(&self, bytes: usize) -> bool {
        self.at.elapsed() < CALLER_MAX && bytes as u64 <= self.left
    }
}

/// All of a cell, each with its number.
#[derive(Default)]
pub(super) struct Doors(Vec<Door>);

impl Doors {
    /// `sockets` are bound and do not wait.
    pub fn new(sockets: Vec<UdpSocket>) -> Self {
        let door = |socket| Door { socket, callers: HashMap::new() };
        Self(sockets.into_iter().map(door).collect())
    }

    pub fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|door| door.socket.as_fd())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The next datagram at `door`, its length in `into` and whose it is.
    pub fn take(&mut self, door: usize, into: &mut [u8]) -> Option<(usize, SocketAddr)> {
        let door = self.0.get_mut(door)?;
        loop {
            match door.socket.recv_from(into) {
                Ok((bytes, from)) => {
                    door.note(from);
                    return Some((bytes, from));
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                // What an answer before that came to: its caller is gone.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {}
                Err(_) => return None,
            }
        }
    }

    /// Answers a caller. What does not go at once is lost, as in any network.
    pub fn answer(&mut self, door: u32, to: SocketAddr, data: &[u8]) {
        let Some(door) = self.0.get_mut(door as usize) else { return };
        let called = door.callers.iter_mut().find(|(caller, call)| {
            (caller.ip().to_canonical(), caller.port()) == (to.ip(), to.port())
                && call.may_be_answered(data.len())
        });
        if let Some((caller, call)) = called {
            call.left -= data.len() as u64;
            let _ = door.socket.send_to(data, caller);
        }
    }
}

impl Door {
    fn note(&mut self, caller: SocketAddr) {
        if self.callers.len() >= CALLERS_MAX && !self.callers.contains_key(&caller) {
            let oldest = self.callers.iter().min_by_key(|(_, call)| call.at).map(|(own, _)| *own);
            oldest.map(|oldest| self.callers.remove(&oldest));
        }
        self.callers.insert(caller, Call { at: Instant::now(), left: ANSWERS_BYTES_MAX });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_called_is_answered() {
        let bind = || UdpSocket::bind("127.0.0.1:0").unwrap();
        let (door, caller, other) = (bind(), bind(), bind());
        let at = door.local_addr().unwrap();
        door.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        let mut doors = Doors::new(vec![door]);
        let mut buffer = [0; 16];
        assert_eq!(doors.take(0, &mut buffer), None);
        caller.send_to(b"hello", at).unwrap();
        let (bytes, from) = doors.take(0, &mut buffer).unwrap();
        assert_eq!((&buffer[..bytes], from), (&b"hello"[..], caller.local_addr().unwrap()));
        doors.answer(0, other.local_addr().unwrap(), b"no");
        doors.answer(1, from, b"no");
        doors.answer(0, from, b"yes");
        assert_eq!(caller.recv(&mut buffer).unwrap(), 3);
        other.recv(&mut buffer).unwrap_err();
    }

    #[test]
    fn a_call_is_answered_with_so_much() {
        let bind = || UdpSocket::bind("127.0.0.1:0").unwrap();
        let (door, caller) = (bind(), bind());
        let at = door.local_addr().unwrap();
        let mut doors = Doors::new(vec![door]);
        let mut buffer = [0; 16];
        let from = caller.local_addr().unwrap();
        let left = |doors: &Doors| doors.0[0].callers[&from].left;
        caller.send_to(b"hello", at).unwrap();
        doors.take(0, &mut buffer).unwrap();
        let answer = [0; 1024];
        (0..=ANSWERS_BYTES_MAX / 1024).for_each(|_| doors.answer(0, from, &answer));
        assert_eq!(left(&doors), 0);
        caller.send_to(b"more", at).unwrap();
        doors.take(0, &mut buffer).unwrap();
        assert_eq!(left(&doors), ANSWERS_BYTES_MAX);
    }

    #[test]
    fn callers_are_bounded() {
        let mut door =
            Door { socket: UdpSocket::bind("127.0.0.1:0").unwrap(), callers: HashMap::new() };
        let caller = |number: usize| SocketAddr::from(([10, 0, 0, 1], 1000 + number as u16));
        (0..=CALLERS_MAX).for_each(|number| door.note(caller(number)));
        assert_eq!(door.callers.len(), CALLERS_MAX);
        assert!(!door.callers.contains_key(&caller(0)));
    }
}
