//! One stream: the module's end, which is ours of a pair of sockets, and the host's socket that
//! it is joined to.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use nix::poll::PollFlags;
use nix::sys::socket::{MsgFlags, Shutdown, recv, send, shutdown};

use crate::guard::{Guard, Unlike};
use crate::stack::rate::Rate;
use crate::stack::stream::{Moved, moved};

/// Bytes that a stream moves before the others get their turn.
const TURN_BYTES: usize = 512 << 10;

/// Whether a stream goes on.
#[derive(Debug, PartialEq, Eq)]
pub enum After {
    Idle,
    Over,
    /// One of its ends failed.
    Broken,
    /// Its bytes say that it is for someone else.
    Misused(Unlike),
}

/// A stream and its two ends.
pub struct Joint {
    module: OwnedFd,
    host: OwnedFd,
    guard: Guard,
    /// Bytes of the host that the module had no room for.
    waiting: Vec<u8>,
    module_ended: bool,
    /// What the module said is all passed on, its end too.
    end_passed: bool,
    host_ended: bool,
    /// The module closed its socket.
    is_abandoned: bool,
    /// Bytes from the module and to it.
    pub bytes: (u64, u64),
    pub was_reset: Arc<AtomicBool>,
}

fn take(from: &OwnedFd, room: &mut [u8]) -> Moved {
    moved(recv(from.as_raw_fd(), room, MsgFlags::MSG_DONTWAIT))
}

fn give(to: &OwnedFd, bytes: &[u8]) -> Moved {
    if bytes.is_empty() {
        return Moved::Bytes(0);
    }
    moved(send(to.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL))
}

impl Joint {
    pub fn new(module: OwnedFd, host: OwnedFd, guard: Guard, was_reset: Arc<AtomicBool>) -> Self {
        Self {
            module,
            host,
            guard,
            waiting: Vec::new(),
            module_ended: false,
            end_passed: false,
            host_ended: false,
            is_abandoned: false,
            bytes: (0, 0),
            was_reset,
        }
    }

    /// What the ends are waited for, and whether that end is the module's. poll(2) tells of one
    /// that is gone unasked: so an end of which nothing is wanted is not among them.
    pub fn watched(&self) -> Vec<(BorrowedFd<'_>, PollFlags, bool)> {
        let if_so = |so: bool, flag| if so { flag } else { PollFlags::empty() };
        let module = if_so(!self.module_ended && self.guard.room() > 0, PollFlags::POLLIN)
            | if_so(!self.waiting.is_empty(), PollFlags::POLLOUT);
        let host = if_so(!self.host_ended && self.waiting.is_empty(), PollFlags::POLLIN)
            | if_so(self.guard.has_judged(), PollFlags::POLLOUT);
        let mut watched = Vec::with_capacity(2);
        if !self.is_abandoned || !module.is_empty() {
            watched.push((self.module.as_fd(), module, true));
        }
        if !host.is_empty() {
            watched.push((self.host.as_fd(), host, false));
        }
        watched
    }

    /// When the module must have said something that could be judged.
    pub fn silent_until(&self) -> Option<Instant> {
        self.guard.due()
    }

    /// Moves what can be moved. `is_abandoned` says that the module closed its socket.
    pub fn turn(&mut self, is_abandoned: bool, rate: &mut Rate, buffer: &mut [u8]) -> After {
        self.is_abandoned |= is_abandoned;
        if let Err(unlike) = self.guard.expire(Instant::now()) {
            self.was_reset.store(true, Ordering::Release);
            return After::Misused(unlike);
        }
        let mut left = TURN_BYTES;
        while left > 0 {
            let moved = self.move_out(rate, buffer).and_then(|out| {
                let into = self.move_in(rate, buffer)?;
                Ok(out + into)
            });
            match moved {
                Ok(0) => break,
                Ok(bytes) => left = left.saturating_sub(bytes),
                Err(after) => {
                    // A module that closed its socket wants no more of it.
                    let cut = matches!(after, After::Misused(_) | After::Broken);
                    self.was_reset.store(cut, Ordering::Release);
                    return after;
                }
            }
        }
        let is_heard = self.host_ended && self.waiting.is_empty();
        match self.end_passed && (is_heard || self.is_abandoned) {
            true => After::Over,
            false => After::Idle,
        }
    }

    /// Bytes of the module to the host's socket; how many came or went.
    fn move_out(&mut self, rate: &mut Rate, buffer: &mut [u8]) -> Result<usize, After> {
        let mut total = 0;
        let room = rate.share(self.guard.room().min(buffer.len()));
        if !self.module_ended && room > 0 {
            let room = buffer.get_mut(..room).unwrap_or_default();
            match take(&self.module, room) {
                Moved::Bytes(0) => self.module_ended = true,
                Moved::Bytes(count) => {
                    total += count;
                    let said = room.get(..count).unwrap_or_default();
                    self.guard.hold(said).map_err(After::Misused)?;
                }
                Moved::Nothing => {}
                // It is closed, with something in it that was never read.
                Moved::Broken => return Err(After::Over),
            }
        }
        // What is held back may be judged by now.
        self.guard.hold(&[]).map_err(After::Misused)?;
        let host = &self.host;
        match self.guard.pass_on(|bytes| give(host, bytes)) {
            Moved::Bytes(count) => {
                rate.spend(count);
                self.bytes.0 += count as u64;
                total += count;
            }
            Moved::Nothing => {}
            Moved::Broken => return Err(After::Broken),
        }
        self.pass_end_on()?;
        Ok(total)
    }

    /// The module has said all, and all of it has been passed on.
    fn pass_end_on(&mut self) -> Result<(), After> {
        if !self.module_ended || self.end_passed || self.guard.has_judged() {
            return Ok(());
        }
        self.guard.end().map_err(After::Misused)?;
        if !self.guard.is_empty() {
            return Ok(());
        }
        self.end_passed = true;
        // A peer that is gone already needs no telling.
        let _ = shutdown(self.host.as_raw_fd(), Shutdown::Write);
        Ok(())
    }

    /// Bytes of the peer to the module; how many came or went.
    fn move_in(&mut self, rate: &mut Rate, buffer: &mut [u8]) -> Result<usize, After> {
        if !self.waiting.is_empty() {
            return match give(&self.module, &self.waiting) {
                Moved::Bytes(count) => {
                    self.waiting.drain(..count);
                    self.show_end();
                    Ok(count)
                }
                Moved::Nothing => Ok(0),
                Moved::Broken => Err(After::Over),
            };
        }
        let room = rate.share(buffer.len());
        if self.host_ended || room == 0 {
            return Ok(0);
        }
        let room = buffer.get_mut(..room).unwrap_or_default();
        match take(&self.host, room) {
            Moved::Bytes(0) => {
                self.host_ended = true;
                self.show_end();
                Ok(0)
            }
            Moved::Bytes(count) => {
                rate.spend(count);
                self.bytes.1 += count as u64;
                let said = room.get(..count).unwrap_or_default();
                self.guard.answered(said).map_err(After::Misused)?;
                let given = match give(&self.module, said) {
                    Moved::Bytes(given) => given,
                    Moved::Nothing => 0,
                    Moved::Broken => return Err(After::Over),
                };
                self.waiting.extend_from_slice(said.get(given..).unwrap_or_default());
                Ok(count)
            }
            Moved::Nothing => Ok(0),
            Moved::Broken => Err(After::Broken),
        }
    }

    /// The peer has said all, and the module has it.
    fn show_end(&mut self) {
        if self.host_ended && self.waiting.is_empty() {
            let _ = shutdown(self.module.as_raw_fd(), Shutdown::Write);
        }
    }
}
