//! Published ports: callers from outside, joined to a port of the guest.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};

use event_manager::{EventOps, Events};
use exocell_xgate::Protocol;
use nix::sys::socket::{Shutdown, shutdown};

use super::flow::{Flow, Key, Stage};
use super::stream::{Ends, Stream};
use super::{Stack, may_call};
use crate::audit::{Decision, Entry};
use crate::guard::Guard;
use crate::link;
use crate::policy::{Peer, Target};

/// The ports from which the stack calls the guest.
pub const PORT_FIRST: u16 = 32_768;

/// A port of the host that leads to one of the guest.
#[derive(Debug)]
pub struct Published {
    /// Listens already; must not wait.
    pub listener: TcpListener,
    pub guest_port: u16,
}

impl Stack {
    pub(super) fn accept(&mut self, index: usize, ops: &mut EventOps<'_>) {
        // Until nobody is left: the event was for all of them.
        loop {
            let Some(published) = self.published.get(index) else { return };
            let guest_port = published.guest_port;
            let Ok((caller, at)) = published.listener.accept() else { return };
            if caller.set_nonblocking(true).is_ok() {
                self.call(guest_port, (caller.into(), at), ops);
            }
        }
    }

    fn call(
        &mut self,
        guest_port: u16,
        (caller, at): (OwnedFd, SocketAddr),
        ops: &mut EventOps<'_>,
    ) {
        let target = Target::Address(link::STACK_V4.into());
        let mut entry = Entry::new("listen", Decision::Allowed, "published port");
        entry = entry.by(Protocol::Tcp, guest_port).to(at);
        if let Err(reason) = may_call(self.flows.connections(), self.flows.callers()) {
            entry.decision = Decision::Denied;
            self.audit.record(entry.because(reason));
            return;
        }
        let guest = SocketAddr::new(link::GUEST_V4.into(), guest_port);
        let Some(key) = self.free_key(Protocol::Tcp, guest) else { return };
        let (now, seed) = (self.now(), self.seed());
        let ends = Ends { host: caller, guard: Guard::open(), others: self.flows.len() };
        let Some(stream) = Stream::dial(key.other, guest, ends, now, seed) else { return };
        self.audit.record(entry);
        let mut flow = Flow::new(key, target, guest_port, Stage::Datagrams);
        flow.inbound = true;
        flow.peer = Some(Peer { at, is_own: false });
        let slot = self.flows.add(flow);
        self.join(slot, stream, ops);
    }

    /// A port of the stack that has no flow to `guest` yet.
    pub(super) fn free_key(&mut self, protocol: Protocol, guest: SocketAddr) -> Option<Key> {
        for _ in PORT_FIRST..u16::MAX {
            let port = self.next_port;
            self.next_port = port.checked_add(1).unwrap_or(PORT_FIRST);
            let other = SocketAddr::new(link::STACK_V4.into(), port);
            let key = Key { protocol, guest, other };
            if self.flows.find(&key).is_none() {
                return Some(key);
            }
        }
        None
    }

    /// Stops listening where the rules no longer permit it.
    pub(super) fn unpublish(&mut self, ops: &mut EventOps<'_>) {
        let listen = &self.policy.scope().listen;
        let mut gone = Vec::new();
        for published in &mut self.published {
            let permitted = listen.iter().any(|ports| ports.permits(published.guest_port));
            if !permitted && published.guest_port != 0 {
                let _ = ops.remove(Events::empty(&published.listener));
                // Callers would wait for somebody who never comes.
                let _ = shutdown(published.listener.as_raw_fd(), Shutdown::Both);
                gone.push(published.guest_port);
                // Its place in the list is its token: it stays, and takes nobody.
                published.guest_port = 0;
            }
        }
    }
}
