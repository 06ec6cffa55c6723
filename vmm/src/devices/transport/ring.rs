//! One virtqueue with its two signals.
//!
//! The ring trusts nothing of the guest: a malformed chain is counted and given
//! back unused, a broken ring is counted and stopped for good. Devices therefore
//! see only well-formed chains and need no error handling of their own here.

use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::num::Wrapping;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{MsgFlags, SockType, getsockopt, send, sockopt};
use nix::sys::stat::fstat;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

use super::buffers::{Chain, DESCRIPTOR_BYTES};
use crate::devices::metrics::TransportMetrics;

/// The most entries of a queue; what virtio_uml asks for at most.
pub(crate) const QUEUE_SIZE_MAX: u16 = 256;
/// Requests served in one go before the other devices get their turn.
const TURN_MAX: usize = 256;

/// Bytes before the entries of the two rings (virtio 1.2, 2.7.6 and 2.7.8).
const AVAILABLE_HEADER: u64 = 4;
const USED_HEADER: u64 = 4;

/// What a frontend is interrupted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// A stream, of one in a guest kernel.
    Stream,
    /// An event, of a machine of KVM.
    Event,
}

/// What interrupts the guest.
#[derive(Debug)]
enum Call {
    /// A frontend in the guest's kernel (virtio_uml) hears a stream.
    Stream(OwnedFd),
    /// A machine of KVM is interrupted by an event that it takes at once (irqfd).
    Event(File),
}

impl Call {
    fn new(file: File, kind: CallKind) -> io::Result<Self> {
        match (kind, getsockopt(&file, sockopt::SockType)) {
            (CallKind::Stream, Ok(SockType::Stream)) => Ok(Self::Stream(file.into())),
            // Events have no type of file (anon_inodes), and are not to be waited for. A frontend
            // that has another descriptor of that kind written to, or takes the flag away later
            // and has its event full, harms its own guest's devices.
            (CallKind::Event, Err(nix::Error::ENOTSOCK)) => {
                let kind = fstat(&file)?.st_mode & libc::S_IFMT;
                let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
                match kind == 0 && flags.contains(OFlag::O_NONBLOCK) {
                    true => Ok(Self::Event(file)),
                    false => Err(io::ErrorKind::InvalidInput.into()),
                }
            }
            (_, Err(errno)) if errno != nix::Error::ENOTSOCK => Err(errno.into()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// A full one already has an unread interrupt, so failure is fine.
    fn interrupt(&self) {
        // The frontend reads 8 bytes at a time (vu_interrupt in virtio_uml.c); so do events.
        let one = 1_u64.to_ne_bytes();
        match self {
            Self::Stream(socket) => {
                let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
                let _ = send(socket.as_raw_fd(), &one, flags);
            }
            Self::Event(event) => {
                let _ = (&*event).write(&one);
            }
        }
    }
}

/// One virtqueue of a device.
#[derive(Debug)]
pub(crate) struct Ring {
    queue: Queue,
    call: Option<Call>,
    kick: Option<File>,
    retired_kicks: Vec<File>,
    registered: bool,
    enabled: bool,
    failed: bool,
    unsignalled: bool,
    /// Entries given back since the guest was last told.
    added: Wrapping<u16>,
    /// Up to where the guest is known to offer entries.
    offered: Wrapping<u16>,
    again: bool,
    metrics: Arc<TransportMetrics>,
}

impl Ring {
    pub fn new(metrics: Arc<TransportMetrics>) -> Self {
        let queue = Queue::new(QUEUE_SIZE_MAX).expect("256 is a valid queue size");
        Self::with_queue(queue, metrics)
    }

    fn with_queue(queue: Queue, metrics: Arc<TransportMetrics>) -> Self {
        Self {
            offered: Wrapping(queue.next_avail()),
            queue,
            call: None,
            kick: None,
            retired_kicks: Vec::new(),
            registered: false,
            enabled: false,
            failed: false,
            unsignalled: false,
            added: Wrapping(0),
            again: false,
            metrics,
        }
    }

    /// A ring that runs on `queue`, which a test has laid out.
    #[cfg(test)]
    pub fn running(queue: Queue, metrics: Arc<TransportMetrics>) -> Self {
        let mut ring = Self::with_queue(queue, metrics);
        ring.enabled = true;
        ring
    }

    /// Forgets everything the frontend set, but keeps a registered kick
    /// descriptor for [`Self::retired_kicks`].
    pub fn reset(&mut self) {
        self.set_kick(None);
        let retired = mem::take(&mut self.retired_kicks);
        *self = Self::new(self.metrics.clone());
        self.retired_kicks = retired;
    }

    // Set-up by the frontend.

    /// Sets the number of entries, a power of two up to [`QUEUE_SIZE_MAX`].
    pub fn set_size(&mut self, size: u32) -> Result<(), virtio_queue::Error> {
        let size = u16::try_from(size).map_err(|_| virtio_queue::Error::InvalidSize)?;
        self.queue.try_set_size(size)
    }

    /// Sets where the three parts lie and checks that they are in `mem`.
    pub fn set_addresses(
        &mut self,
        mem: &GuestMemoryMmap,
        [descriptors, available, used]: [u64; 3],
    ) -> Result<(), virtio_queue::Error> {
        self.queue.try_set_desc_table_address(GuestAddress(descriptors))?;
        self.queue.try_set_avail_ring_address(GuestAddress(available))?;
        self.queue.try_set_used_ring_address(GuestAddress(used))?;
        self.queue.set_ready(true);
        if self.queue.is_valid(mem) {
            return Ok(());
        }
        self.queue.set_ready(false);
        Err(virtio_queue::Error::QueueNotReady)
    }

    /// Sets the index of the next request to take.
    pub fn set_base(&mut self, base: u16) {
        self.queue.set_next_avail(base);
        self.queue.set_next_used(base);
        self.offered = Wrapping(base);
    }

    /// Stops the ring and returns the index of the next request it had taken.
    pub fn stop(&mut self) -> u16 {
        self.queue.set_ready(false);
        self.set_kick(None);
        self.queue.next_avail()
    }

    /// Turns `VIRTIO_RING_F_EVENT_IDX` on or off.
    pub fn set_event_idx(&mut self, on: bool) {
        self.queue.set_event_idx(on);
    }

    /// Lets the device take requests, or not.
    pub fn set_enabled(&mut self, on: bool) {
        self.enabled = on;
        self.again |= on;
    }

    /// Sets the descriptor whose readability is the guest's doorbell.
    pub fn set_kick(&mut self, kick: Option<File>) {
        if let Some(old) = mem::replace(&mut self.kick, kick)
            && mem::take(&mut self.registered)
        {
            self.retired_kicks.push(old);
        }
        self.again |= self.kick.is_some();
    }

    /// Sets what interrupts the guest; must be a Unix stream socket, or where the frontend is a
    /// machine's an event, because only those can be written without waiting for the guest.
    pub fn set_call(&mut self, call: Option<File>, kind: CallKind) -> io::Result<()> {
        self.call = call.map(|file| Call::new(file, kind)).transpose()?;
        Ok(())
    }

    /// Kick descriptors to take out of the event loop before they are closed.
    pub fn take_retired_kicks(&mut self) -> Vec<File> {
        mem::take(&mut self.retired_kicks)
    }

    /// The kick descriptor if the event loop does not know it yet; it counts as
    /// known from now on.
    pub fn register_kick(&mut self) -> Option<&File> {
        match mem::replace(&mut self.registered, self.kick.is_some()) {
            true => None,
            false => self.kick.as_ref(),
        }
    }

    /// Forgets a kick descriptor that cannot be watched.
    pub fn drop_kick(&mut self) {
        self.registered = false;
        self.kick = None;
    }

    // Work, by the device.

    /// Whether the ring asked for another turn since this was last called.
    pub fn take_again(&mut self) -> bool {
        mem::take(&mut self.again)
    }

    /// Asks for another turn after the other devices had theirs.
    pub fn ask_again(&mut self) {
        self.again = true;
    }

    /// Whether another turn has been asked for.
    pub fn wants_again(&self) -> bool {
        self.again
    }

    fn runs(&self) -> bool {
        self.enabled && !self.failed && self.queue.ready()
    }

    /// The next well-formed chain; `None` where there is none now or the ring
    /// does not run.
    pub fn pop<'m>(&mut self, mem: &'m GuestMemoryMmap) -> Option<Chain<'m>> {
        // Each malformed chain takes an entry of a ring of bounded size.
        for _ in 0..QUEUE_SIZE_MAX {
            if !self.runs() {
                return None;
            }
            let popped = self.next_head(mem);
            let head = self.check(popped)??;
            let table = self.table(mem);
            match Chain::parse(mem, self.check(table)?, head) {
                Ok(chain) => {
                    self.metrics.chains.inc();
                    return Some(chain);
                }
                Err(_) => {
                    self.metrics.malformed_chains.inc();
                    self.push(mem, head, 0);
                }
            }
        }
        self.again = true;
        None
    }

    /// Takes the next entry of what the guest offers: a chain's first descriptor.
    fn next_head(&mut self, mem: &GuestMemoryMmap) -> Result<Option<u16>, virtio_queue::Error> {
        let next = Wrapping(self.queue.next_avail());
        if self.offered == next {
            let offered = self.queue.avail_idx(mem, Ordering::Acquire)?;
            if (offered - next).0 > self.queue.size() {
                return Err(virtio_queue::Error::InvalidAvailRingIndex);
            }
            self.offered = offered;
        }
        if self.offered == next {
            return Ok(None);
        }
        let offset = AVAILABLE_HEADER + 2 * u64::from(next.0 % self.queue.size());
        let at = GuestAddress(self.queue.avail_ring()).checked_add(offset);
        let at = at.ok_or(virtio_queue::Error::AddressOverflow)?;
        let head: u16 =
            mem.load(at, Ordering::Relaxed).map_err(virtio_queue::Error::GuestMemory)?;
        self.queue.set_next_avail((next + Wrapping(1)).0);
        Ok(Some(u16::from_le(head)))
    }

    /// The table of descriptors.
    fn table<'m>(
        &self,
        mem: &'m GuestMemoryMmap,
    ) -> Result<VolatileSlice<'m>, virtio_queue::Error> {
        let bytes = DESCRIPTOR_BYTES * usize::from(self.queue.size());
        let at = GuestAddress(self.queue.desc_table());
        mem.get_slice(at, bytes).map_err(virtio_queue::Error::GuestMemory)
    }

    /// Puts the chain that was popped last back, for later.
    pub fn unpop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Gives a chain back to the guest with `written` bytes in it.
    pub fn push(&mut self, mem: &GuestMemoryMmap, head: u16, written: u32) {
        let pushed = self.queue.add_used(mem, head, written);
        self.added += Wrapping(1);
        self.unsignalled |= self.check(pushed).is_some();
    }

    /// Gives several chains back at once, each with so many bytes in it: the
    /// guest sees all of them or none.
    pub fn push_all(&mut self, mem: &GuestMemoryMmap, used: &[(u16, u32)]) {
        let [first @ .., (head, written)] = used else { return };
        let next = Wrapping(self.queue.next_used());
        for (&(head, written), offset) in first.iter().zip(0..) {
            let slot = u64::from((next + Wrapping(offset)).0 % self.queue.size());
            let at = GuestAddress(self.queue.used_ring()).checked_add(USED_HEADER + slot * 8);
            let entry = u64::from(head) | u64::from(written) << 32;
            let put = at.ok_or(virtio_queue::Error::AddressOverflow).and_then(|at| {
                mem.write_obj(entry.to_le(), at).map_err(virtio_queue::Error::GuestMemory)
            });
            self.check(put);
        }
        // The last one publishes the index behind all of them.
        let before = Wrapping(first.len() as u16);
        self.added += before;
        self.queue.set_next_used((next + before).0);
        self.push(mem, *head, *written);
    }

    /// Whether the guest wants to know of what was given back.
    fn is_awaited(&mut self, mem: &GuestMemoryMmap) -> Result<bool, virtio_queue::Error> {
        let counted = self.queue.needs_notification(mem)?;
        let added = mem::take(&mut self.added);
        if counted {
            return Ok(true);
        }
        // The queue counts one of each batch only. The guest's mark stands
        // behind the ring of what is available (virtio 1.2, 2.7.7).
        let offset = AVAILABLE_HEADER + 2 * u64::from(self.queue.size());
        let at = GuestAddress(self.queue.avail_ring()).checked_add(offset);
        let at = at.ok_or(virtio_queue::Error::AddressOverflow)?;
        let mark: u16 =
            mem.load(at, Ordering::Relaxed).map_err(virtio_queue::Error::GuestMemory)?;
        let behind = Wrapping(self.queue.next_used()) - Wrapping(u16::from_le(mark)) - Wrapping(1);
        Ok(behind < added)
    }

    /// Interrupts the guest if anything was pushed and the guest wants to know.
    pub fn signal(&mut self, mem: &GuestMemoryMmap) {
        if !mem::take(&mut self.unsignalled) {
            return;
        }
        let needed = self.is_awaited(mem);
        if self.check(needed) == Some(true) {
            self.interrupt();
        }
    }

    /// Asks for a doorbell at the next chain, and says whether there is one
    /// already.
    pub fn arm(&mut self, mem: &GuestMemoryMmap) -> bool {
        if !self.runs() {
            return false;
        }
        let pending = self.queue.enable_notification(mem);
        self.check(pending).unwrap_or(false)
    }

    /// Asks for no doorbells until [`Self::arm`].
    pub fn disarm(&mut self, mem: &GuestMemoryMmap) {
        if self.runs() {
            let done = self.queue.disable_notification(mem);
            self.check(done);
        }
    }

    /// Serves a turn of requests, then interrupts the guest once.
    ///
    /// `each` returns the bytes it wrote into the chain.
    pub fn serve(&mut self, mem: &GuestMemoryMmap, mut each: impl FnMut(Chain<'_>) -> u32) {
        self.disarm(mem);
        for _ in 0..TURN_MAX {
            match self.pop(mem) {
                Some(chain) => {
                    let head = chain.head;
                    let written = each(chain);
                    self.push(mem, head, written);
                }
                None if self.arm(mem) => {}
                None => return self.signal(mem),
            }
        }
        self.again = true;
        self.signal(mem);
    }

    fn interrupt(&mut self) {
        let Some(call) = &self.call else { return };
        call.interrupt();
        self.metrics.interrupts.inc();
    }

    fn check<T>(&mut self, result: Result<T, virtio_queue::Error>) -> Option<T> {
        if result.is_err() && !mem::replace(&mut self.failed, true) {
            self.metrics.ring_faults.inc();
        }
        result.ok()
    }
}
