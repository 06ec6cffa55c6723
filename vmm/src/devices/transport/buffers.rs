//! Descriptor chains as checked pieces of guest memory.
//!
//! A descriptor is an allegation: nothing of a chain is used before every
//! address, length and the order of the whole chain have been checked.

use std::mem;

use smallvec::SmallVec;
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

/// The longest chain taken, in descriptors: virtio_uml's largest queue
/// (`MAX_SUPPORTED_QUEUE_SIZE`), which no chain may exceed (virtio 1.2, 2.7.5.3).
pub(crate) const DESCRIPTORS_MAX: usize = 256;

/// Why a chain was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChainFault {
    /// It has no descriptor that can be read, or an indirect table is bad.
    Empty,
    /// It goes on past the table, in a loop, or past 4 GiB.
    Endless,
    /// A buffer lies outside the guest's memory.
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
    /// Walks `chain` and checks all of it.
    pub fn parse(
        mem: &'m GuestMemoryMmap,
        chain: DescriptorChain<&GuestMemoryMmap>,
    ) -> Result<Self, ChainFault> {
        let head = chain.head_index();
        let (mut readable, mut writable) = (Buffers::default(), Buffers::default());
        let mut last: Option<Descriptor> = None;
        for (index, descriptor) in chain.enumerate() {
            if index == DESCRIPTORS_MAX {
                return Err(ChainFault::Endless);
            }
            match descriptor.is_write_only() {
                true => writable.map(mem, descriptor)?,
                false if writable.is_empty() => readable.map(mem, descriptor)?,
                false => return Err(ChainFault::Order),
            }
            last = Some(descriptor);
        }
        match last {
            None => Err(ChainFault::Empty),
            Some(descriptor) if descriptor.has_next() => Err(ChainFault::Endless),
            Some(_) => Ok(Self { head, readable, writable }),
        }
    }
}

impl<'m> Buffers<'m> {
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
