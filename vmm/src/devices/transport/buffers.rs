//! Descriptor chains as checked pieces of guest memory.
//!
//! A descriptor is an allegation: nothing of a chain is used before every
//! address, length and the order of the whole chain have been checked.

use std::mem;

use smallvec::SmallVec;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

/// The longest chain taken, in descriptors: virtio_uml's largest queue
/// (`MAX_SUPPORTED_QUEUE_SIZE`), which no chain may exceed (virtio 1.2, 2.7.5.3).
pub(crate) const DESCRIPTORS_MAX: usize = 256;

/// Bytes of a descriptor (virtio 1.2, 2.7.5).
pub(crate) const DESCRIPTOR_BYTES: usize = 16;

/// Why a chain was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChainFault {
    /// An indirect table is in another one, or of no whole descriptors.
    Table,
    /// It goes on for more descriptors than there are, or past 4 GiB.
    Endless,
    /// A descriptor lies outside its table, or a buffer outside the guest's memory.
    Address,
    /// A buffer the device reads follows one that it writes (virtio 1.2, 2.7.4.2).
    Order,
}

/// The buffers of one direction of a request, in order.
#[derive(Debug, Default)]
pub(crate) struct Buffers<'m> {
    /// Mostly one or two: a header and what it heads.
    slices: SmallVec<[VolatileSlice<'m>; 2]>,
    len: usize,
}

/// One request of the guest: what the device reads and what it may write.
#[derive(Debug)]
pub(crate) struct Chain<'m> {
    /// The descriptor that goes into the used ring.
    pub head: u16,
    /// Guest to device.
    pub readable: Buffers<'m>,
    /// Device to guest.
    pub writable: Buffers<'m>,
}

impl<'m> Chain<'m> {
    /// Walks the chain that begins with descriptor `head` of `table`, and checks all of it.
    pub fn parse(
        mem: &'m GuestMemoryMmap,
        table: VolatileSlice<'m>,
        head: u16,
    ) -> Result<Self, ChainFault> {
        let (mut readable, mut writable) = (Buffers::default(), Buffers::default());
        let mut walk = Walk { table, next: head, left: descriptors(&table), is_indirect: false };
        loop {
            let part = walk.step()?;
            if part.refers_to_indirect_table() {
                walk = walk.enter(mem, part)?;
                continue;
            }
            let bytes = readable.len() + writable.len() + part.len() as usize;
            if bytes > u32::MAX as usize {
                return Err(ChainFault::Endless);
            }
            match part.is_write_only() {
                true => writable.map(mem, part)?,
                false if writable.is_empty() => readable.map(mem, part)?,
                false => return Err(ChainFault::Order),
            }
            if !part.has_next() {
                return Ok(Self { head, readable, writable });
            }
            walk.next = part.next();
        }
    }
}

/// Where a walk over a chain stands.
struct Walk<'m> {
    table: VolatileSlice<'m>,
    next: u16,
    /// Descriptors that may follow.
    left: usize,
    is_indirect: bool,
}

impl<'m> Walk<'m> {
    /// The next descriptor.
    fn step(&mut self) -> Result<Descriptor, ChainFault> {
        self.left = self.left.checked_sub(1).ok_or(ChainFault::Endless)?;
        let at = DESCRIPTOR_BYTES * usize::from(self.next);
        self.table.read_obj(at).map_err(|_| ChainFault::Address)
    }

    /// Goes on in the table that `part` names (virtio 1.2, 2.7.5.3).
    fn enter(&self, mem: &'m GuestMemoryMmap, part: Descriptor) -> Result<Self, ChainFault> {
        let bytes = part.len() as usize;
        if self.is_indirect || bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(ChainFault::Table);
        }
        let table = mem.get_slice(part.addr(), bytes).map_err(|_| ChainFault::Address)?;
        Ok(Self { table, next: 0, left: descriptors(&table), is_indirect: true })
    }
}

/// How many descriptors of `table` a chain may have.
fn descriptors(table: &VolatileSlice<'_>) -> usize {
    (table.len() / DESCRIPTOR_BYTES).min(DESCRIPTORS_MAX)
}

impl<'m> Buffers<'m> {
    /// One piece.
    pub fn of(slice: VolatileSlice<'m>) -> Self {
        let mut buffers = Self::default();
        buffers.push(slice);
        buffers
    }

    fn map(&mut self, mem: &'m GuestMemoryMmap, part: Descriptor) -> Result<(), ChainFault> {
        let len = part.len() as usize;
        if len > 0 {
            let slice = mem.get_slice(part.addr(), len).map_err(|_| ChainFault::Address)?;
            self.push(slice);
        }
        Ok(())
    }

    fn push(&mut self, slice: VolatileSlice<'m>) {
        if !slice.is_empty() {
            self.len += slice.len();
            self.slices.push(slice);
        }
    }

    /// Bytes in all buffers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is not one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pieces of guest memory, for [`super::super::sys`].
    pub fn slices(&self) -> &[VolatileSlice<'m>] {
        &self.slices
    }

    /// Cuts off and returns the first `count` bytes, or all if there are fewer.
    pub fn take(&mut self, count: usize) -> Buffers<'m> {
        let mut front = Buffers::default();
        let mut back = Buffers::default();
        for slice in mem::take(&mut self.slices) {
            let room = count - front.len;
            if let Ok((head, tail)) = slice.split_at(room.min(slice.len())) {
                front.push(head);
                back.push(tail);
            }
        }
        *self = back;
        front
    }

    /// Takes the first `N` bytes as a copy; `None` where there are fewer.
    pub fn take_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        if self.len < N {
            return None;
        }
        let mut bytes = [0; N];
        (self.take(N).copy_to(&mut bytes) == N).then_some(bytes)
    }

    /// Copies to `out` as much as both hold, and returns how many bytes.
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        let mut done = 0;
        for slice in &self.slices {
            let Some(rest) = out.get_mut(done..) else {
                break;
            };
            done += slice.read(rest, 0).unwrap_or(0);
        }
        done
    }

    /// Copies from the fronts of `parts`, one after the other, as much as both
    /// hold, and leaves what is left of them; returns how many bytes it copied.
    pub fn copy_on(&self, parts: &mut [&[u8]]) -> usize {
        let mut done = 0;
        for slice in &self.slices {
            let mut at = 0;
            for part in parts.iter_mut() {
                let (head, rest) = part.split_at(part.len().min(slice.len() - at));
                at += slice.write(head, at).unwrap_or(0);
                *part = rest;
            }
            done += at;
        }
        done
    }

    /// Copies from `bytes` as much as both hold, and returns how many bytes.
    pub fn copy_from(&self, bytes: &[u8]) -> usize {
        let mut done = 0;
        for slice in &self.slices {
            let Some(rest) = bytes.get(done..) else { break };
            done += slice.write(rest, 0).unwrap_or(0);
        }
        done
    }
}
