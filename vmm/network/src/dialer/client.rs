//! Who asks a dialer: requests go out in order, now or when it listens again.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use super::protocol::Request;
use super::sys;

/// Messages that wait for the dialer before it is asked for nothing more.
const BACKLOG_MAX: usize = 1024;

/// The channel to a dialer, and what is yet to go there.
pub struct Client {
    channel: OwnedFd,
    backlog: VecDeque<Vec<u8>>,
}

impl Client {
    #[must_use]
    pub fn new(channel: OwnedFd) -> Self {
        Self { channel, backlog: VecDeque::new() }
    }

    /// Says something, now or when the dialer listens again.
    pub fn say(&mut self, request: &Request) {
        self.backlog.push_back(request.encode());
        self.flush();
    }

    /// Says something now or never, as is the way of datagrams; what waits goes first.
    pub fn pass(&self, request: &Request) {
        if !self.has_more() {
            let _ = sys::send(self.channel.as_fd(), &request.encode());
        }
    }

    /// Says what waits, as far as the dialer listens.
    pub fn flush(&mut self) {
        while let Some(message) = self.backlog.front() {
            if sys::send(self.channel.as_fd(), message).is_err() {
                return;
            }
            self.backlog.pop_front();
        }
    }

    /// Whether something waits for the dialer.
    #[must_use]
    pub fn has_more(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Whether so much waits that it should be asked for nothing more.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.backlog.len() >= BACKLOG_MAX
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

impl AsRawFd for Client {
    fn as_raw_fd(&self) -> RawFd {
        self.channel.as_raw_fd()
    }
}
