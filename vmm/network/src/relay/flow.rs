//! What the relay knows of one connection.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use exocell_xgate::Protocol;
use nix::poll::PollFlags;

use super::joint::Joint;
use super::{Connection, Done};
use crate::policy::{Peer, Target};

/// How far a connection got.
pub enum Stage {
    /// The dialer was asked.
    Asking(Done<Connection>),
    Stream(Box<Joint>),
    /// Datagrams, which the dialer passes on: the relay's end of the pair.
    Datagrams(OwnedFd),
}

pub struct Flow {
    pub protocol: Protocol,
    /// What the module dialled; of a published port, its caller.
    pub other: SocketAddr,
    /// Whom it means by that.
    pub target: Target,
    /// Where it really led.
    pub peer: Option<Peer>,
    /// Whether it came from outside, by a published port.
    pub inbound: bool,
    /// Whether a name's guard lets everything through.
    pub is_raw: bool,
    pub stage: Stage,
    /// Of datagrams: bytes from the module and to it.
    pub bytes: (u64, u64),
}

impl Flow {
    /// The port that was dialled, or that was published.
    pub fn port(&self) -> u16 {
        self.other.port()
    }

    /// Bytes from the module and to it.
    pub fn bytes(&self) -> (u64, u64) {
        match &self.stage {
            Stage::Stream(joint) => joint.bytes,
            _ => self.bytes,
        }
    }

    /// When it wants a turn though nothing comes.
    pub fn due(&self) -> Option<std::time::Instant> {
        match &self.stage {
            Stage::Stream(joint) => joint.silent_until(),
            Stage::Asking(_) | Stage::Datagrams(_) => None,
        }
    }

    /// What is waited for, and whether that is the module's end.
    pub fn watched(&self) -> Vec<(BorrowedFd<'_>, PollFlags, bool)> {
        match &self.stage {
            Stage::Asking(_) => Vec::new(),
            Stage::Stream(joint) => joint.watched(),
            Stage::Datagrams(module) => vec![(module.as_fd(), PollFlags::POLLIN, true)],
        }
    }
}
