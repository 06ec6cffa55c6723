//! A guest's link that leads into a network of the host's as it is: to a tun device in a network
//! namespace of whoever runs the cell (Documentation/networking/tuntap.rst of the kernel).
//!
//! ```text
//! guest ── virtio-net ──> PlugLink ── tun device ──> the namespace's kernel: routes, filters, veth
//! ```
//! Nothing is decided here: what the guest may reach is the namespace's to say. Until a device is
//! plugged in, what the guest sends is dropped. Packets are the guest's word and go to the host's
//! kernel as those of any container do.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use event_manager::{EventOps, EventSet, Events};
use exocell_vmm::devices::net::{LINK_TOKENS, Link};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::link::MTU;

const BELL: u32 = LINK_TOKENS;
const TUN: u32 = LINK_TOKENS + 1;
/// Packets that wait for room in the guest.
const OUTBOX_MAX: usize = 256;
/// Buffers of packets that are kept.
const SPARE_MAX: usize = 64;

/// By which a device is plugged in; clones are the same.
#[derive(Clone)]
pub struct Plug {
    bell: Arc<EventFd>,
    device: Arc<Mutex<Option<File>>>,
}

/// The link itself, for the network device.
pub struct PlugLink {
    plug: Plug,
    device: Option<File>,
    /// Whether the device may hold more.
    is_readable: bool,
    buffer: Vec<u8>,
    outbox: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
}

impl Plug {
    /// A link without a device, and what plugs one in.
    ///
    /// # Errors
    /// The host's (eventfd(2)).
    pub fn pair() -> io::Result<(Self, PlugLink)> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let bell = Arc::new(EventFd::from_flags(flags)?);
        let plug = Self { bell, device: Arc::default() };
        let link = PlugLink {
            plug: plug.clone(),
            device: None,
            is_readable: false,
            buffer: vec![0; usize::from(MTU)],
            outbox: VecDeque::new(),
            spare: Vec::new(),
        };
        Ok((plug, link))
    }

    /// Has `device`, which must not block, be the link's other end.
    ///
    /// # Errors
    /// The host's.
    pub fn put(&self, device: OwnedFd) -> io::Result<()> {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = Some(File::from(device));
        self.bell.write(1).map(drop)?;
        Ok(())
    }
}

impl PlugLink {
    fn take_device(&mut self, ops: &mut EventOps<'_>) {
        let _ = self.plug.bell.read();
        let new = self.plug.device.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(new) = new else { return };
        if let Some(old) = self.device.take() {
            let _ = ops.remove(Events::empty(&old));
        }
        let input = EventSet::IN | EventSet::EDGE_TRIGGERED;
        if ops.add(Events::with_data(&new, TUN, input)).is_ok() {
            (self.device, self.is_readable) = (Some(new), true);
        }
    }

    /// Reads packets while there are some and there is room for them.
    fn fill(&mut self) {
        let Some(device) = &mut self.device else { return };
        while self.is_readable && self.outbox.len() < OUTBOX_MAX {
            match device.read(&mut self.buffer) {
                Ok(0) => self.is_readable = false,
                Ok(count) => {
                    let mut packet = self.spare.pop().unwrap_or_default();
                    packet.clear();
                    packet.extend_from_slice(self.buffer.get(..count).unwrap_or_default());
                    self.outbox.push_back(packet);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Empty; or its namespace is gone, and nothing comes any more.
                Err(_) => self.is_readable = false,
            }
        }
    }
}

impl Link for PlugLink {
    fn watch(&mut self, ops: &mut EventOps<'_>) {
        let input = EventSet::IN | EventSet::EDGE_TRIGGERED;
        // Nothing is registered yet; only a full epoll set can fail.
        let _ = ops.add(Events::with_data(&*self.plug.bell, BELL, input));
    }

    fn packet(&mut self, packet: &[u8]) {
        if let Some(device) = &mut self.device {
            // As any network: what it does not take is lost.
            let _ = device.write(packet);
        }
    }

    fn host_event(&mut self, token: u32, _: EventSet, ops: &mut EventOps<'_>) {
        match token {
            BELL => self.take_device(ops),
            _ => self.is_readable = true,
        }
    }

    fn turn(&mut self, _: &mut EventOps<'_>) -> bool {
        self.fill();
        false
    }

    fn outbox(&mut self) -> &mut VecDeque<Vec<u8>> {
        &mut self.outbox
    }

    fn delivered(&mut self, packet: Vec<u8>) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(packet);
        }
    }

    fn disconnect(&mut self, _: &mut EventOps<'_>) {
        self.outbox.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn packets_pass_both_ways_and_wait_for_room() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let (_plug, mut link) = Plug::pair().unwrap();
        link.packet(b"nobody is there");
        link.device = Some(File::from(OwnedFd::from(theirs)));
        link.is_readable = true;
        link.packet(b"out");
        let mut got = [0; 16];
        let count = ours.recv(&mut got).unwrap();
        assert_eq!(&got[..count], b"out");
        ours.send(b"one").unwrap();
        ours.send(b"two").unwrap();
        link.fill();
        assert_eq!(link.outbox, [b"one".to_vec(), b"two".to_vec()]);
        assert!(!link.is_readable);
        link.outbox = vec![Vec::new(); OUTBOX_MAX].into();
        ours.send(b"three").unwrap();
        link.is_readable = true;
        link.fill();
        // It comes when the guest has taken some.
        assert!(link.is_readable && link.outbox.len() == OUTBOX_MAX);
        link.outbox.clear();
        link.fill();
        assert_eq!(link.outbox, [b"three".to_vec()]);
    }
}
