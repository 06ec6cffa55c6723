//! Two stream sockets joined: what comes out of one goes into the other, both ways.
//!
//! ```text
//!          ┌── recv ──> a buffer ── send ──┐
//! one ─────┤                               ├───── other
//!          └── send <── a buffer <── recv ─┘
//! ```
//! A direction ends by itself (shutdown(2)): its end is passed on, and the other goes on. Whoever has
//! closed its socket altogether hears nothing more, so that ends the other direction, too.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, Shutdown, recv, send, shutdown};

/// What is on the way in one direction, in bytes.
const BUFFER_BYTES: usize = 32 * 1024;
/// How often a direction moves something before the other has its turn.
const TURNS_MAX: usize = 16;
const NOW: MsgFlags = MsgFlags::MSG_DONTWAIT.union(MsgFlags::MSG_NOSIGNAL);

/// Joins `one` and `other`, and returns when both directions have ended.
pub fn run(one: BorrowedFd<'_>, other: BorrowedFd<'_>) {
    let ends = [one, other];
    let mut ways = [Way::new(one, other), Way::new(other, one)];
    // Whether an end was closed altogether.
    let mut gone = [false; 2];
    loop {
        ways.iter_mut().for_each(Way::run);
        for at in 0..2 {
            let (from, to) = (at, 1 - at);
            // An end that says no more is asked whether it hears.
            if ways[from].source_ended && !gone[at] && !ways[to].over && !hears(ends[at]) {
                gone[at] = true;
            }
            if gone[at] {
                ways[from].source_gone = true;
                ways[to].give_up();
            }
        }
        if ways.iter().all(|way| way.over) {
            return;
        }
        // One that moved all it could at once is not waited for.
        if ways.iter().any(|way| way.has_more) {
            continue;
        }
        wait(ends, &ways, &mut gone);
    }
}

/// Waits until one of `ways` has something to do, or an end is found to be `gone`.
fn wait(ends: [BorrowedFd<'_>; 2], ways: &[Way<'_>; 2], gone: &mut [bool; 2]) {
    let wanted = |at: usize| {
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLIN, ways[at].wants_input());
        events.set(PollFlags::POLLOUT, ways[1 - at].wants_room());
        events
    };
    // One that is gone tells nothing but that, again and again.
    let mut waits = Vec::with_capacity(2);
    for at in (0..2).filter(|at| !gone[*at]) {
        waits.push((at, PollFd::new(ends[at], wanted(at))));
    }
    let (places, mut polled): (Vec<usize>, Vec<PollFd<'_>>) = waits.into_iter().unzip();
    while poll(&mut polled, PollTimeout::NONE) == Err(Errno::EINTR) {}
    let over = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
    for (at, wait) in places.into_iter().zip(&polled) {
        gone[at] = wait.revents().is_some_and(|found| found.intersects(over));
    }
}

/// Whether an end takes what is said to it. No byte is sent: a socket of another machine refuses
/// even that once its peer is gone, and one of this machine has a hang-up then (poll(2)).
fn hears(end: BorrowedFd<'_>) -> bool {
    let mut waits = [PollFd::new(end, PollFlags::empty())];
    let _ = poll(&mut waits, PollTimeout::ZERO);
    let is_up = |found: PollFlags| !found.intersects(PollFlags::POLLHUP | PollFlags::POLLERR);
    let says = send(end.as_raw_fd(), &[], NOW);
    waits[0].revents().is_none_or(is_up) && matches!(says, Ok(_) | Err(Errno::EAGAIN))
}

/// One direction.
struct Way<'a> {
    from: BorrowedFd<'a>,
    to: BorrowedFd<'a>,
    buffer: Vec<u8>,
    /// What of the buffer is on its way.
    begin: usize,
    end: usize,
    source_ended: bool,
    /// Nothing comes that is not there.
    source_gone: bool,
    /// The last turn ended for the other direction's sake.
    has_more: bool,
    /// All was passed on, the end too; or nobody wants it.
    over: bool,
}

impl<'a> Way<'a> {
    fn new(from: BorrowedFd<'a>, to: BorrowedFd<'a>) -> Self {
        let buffer = vec![0; BUFFER_BYTES];
        let (begin, end, source_ended, source_gone) = (0, 0, false, false);
        let (has_more, over) = (false, false);
        Self { from, to, buffer, begin, end, source_ended, source_gone, has_more, over }
    }

    fn is_empty(&self) -> bool {
        self.begin == self.end
    }

    fn wants_input(&self) -> bool {
        !self.over && !self.source_ended && self.is_empty()
    }

    fn wants_room(&self) -> bool {
        !self.over && !self.is_empty()
    }

    /// Moves what can be moved without waiting.
    fn run(&mut self) {
        self.has_more = false;
        for _ in 0..TURNS_MAX {
            if self.over || !(self.fill() && self.empty()) {
                return;
            }
        }
        self.has_more = true;
    }

    /// Has something in the buffer, or an end to pass on; whether that is so.
    fn fill(&mut self) -> bool {
        if !self.wants_input() {
            return true;
        }
        match recv(self.from.as_raw_fd(), &mut self.buffer, NOW) {
            Ok(0) => self.source_ended = true,
            Ok(bytes) => (self.begin, self.end) = (0, bytes),
            Err(Errno::EAGAIN) if self.source_gone => self.source_ended = true,
            Err(Errno::EAGAIN) => return false,
            Err(Errno::EINTR) => return true,
            // Reset: what it had said is lost, as it would be between the two alone.
            Err(_) => self.source_ended = true,
        }
        true
    }

    /// Passes on what is in the buffer, or the end; whether more can be moved.
    fn empty(&mut self) -> bool {
        if self.is_empty() {
            if self.source_ended {
                let _ = shutdown(self.to.as_raw_fd(), Shutdown::Write);
                self.over = true;
            }
            return !self.over;
        }
        let waiting = self.buffer.get(self.begin..self.end).unwrap_or_default();
        match send(self.to.as_raw_fd(), waiting, NOW) {
            Ok(bytes) => self.begin += bytes,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return false,
            Err(_) => self.give_up(),
        }
        !self.over
    }

    /// Nobody hears it any more: whoever says it is told so.
    fn give_up(&mut self) {
        if self.over {
            return;
        }
        (self.begin, self.end) = (0, 0);
        let _ = shutdown(self.from.as_raw_fd(), Shutdown::Read);
        self.source_ended = true;
        self.over = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    /// The two outer ends, and what joins the inner ones.
    fn joined() -> (UnixStream, UnixStream, thread::JoinHandle<()>) {
        let ((one, inner), (other, second)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let relay = thread::spawn(move || run(inner.as_fd(), second.as_fd()));
        (one, other, relay)
    }

    fn ended(mut stream: &UnixStream) {
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
    }

    #[test]
    fn each_direction_ends_by_itself() {
        for swapped in [false, true] {
            let (mut one, mut other, relay) = joined();
            if swapped {
                std::mem::swap(&mut one, &mut other);
            }
            one.write_all(b"question").unwrap();
            one.shutdown(std::net::Shutdown::Write).unwrap();
            let mut said = String::new();
            other.read_to_string(&mut said).unwrap();
            assert_eq!(said, "question");
            other.write_all(b"answer").unwrap();
            let mut got = [0; 6];
            one.read_exact(&mut got).unwrap();
            assert_eq!(&got, b"answer");
            other.shutdown(std::net::Shutdown::Write).unwrap();
            ended(&one);
            relay.join().unwrap();
        }
    }

    #[test]
    fn more_than_all_buffers_hold_comes_whole_both_ways() {
        let (one, other, relay) = joined();
        let data: Vec<u8> = (0..6 << 20).map(|at: u32| (at % 251) as u8).collect();
        let (written, expected) = (data.clone(), data.clone());
        let mut sink = one.try_clone().unwrap();
        let writer = thread::spawn(move || {
            sink.write_all(&written).unwrap();
            sink.shutdown(std::net::Shutdown::Write).unwrap();
        });
        // An echo, which writes while it is written to.
        let echo = thread::spawn(move || {
            let mut source = other.try_clone().unwrap();
            std::io::copy(&mut source, &mut &other).unwrap();
            other.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let (mut got, mut source) = (Vec::new(), one);
        source.read_to_end(&mut got).unwrap();
        assert!(got == expected);
        writer.join().unwrap();
        echo.join().unwrap();
        relay.join().unwrap();
    }

    #[test]
    fn one_that_is_closed_ends_the_other() {
        let (one, other, relay) = joined();
        drop(one);
        ended(&other);
        relay.join().unwrap();
        // After its own half was ended in order, too.
        let (one, other, relay) = joined();
        one.shutdown(std::net::Shutdown::Write).unwrap();
        ended(&other);
        drop(one);
        relay.join().unwrap();
        let mut other = other;
        let refused = other.write_all(b"x").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::BrokenPipe);
        // And while what it said is not taken.
        let (mut one, other, relay) = joined();
        one.set_nonblocking(true).unwrap();
        let chunk = [7; 64 << 10];
        let mut sent = 0;
        let mut idle = 0;
        while idle < 200 {
            match one.write(&chunk) {
                Ok(bytes) => (sent, idle) = (sent + bytes, 0),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    idle += 1;
                    thread::sleep(std::time::Duration::from_millis(1));
                }
                Err(error) => panic!("{error}"),
            }
        }
        drop(one);
        let (mut got, mut source) = (Vec::new(), other);
        source.read_to_end(&mut got).unwrap();
        assert_eq!(got.len(), sent);
        relay.join().unwrap();
    }
}
