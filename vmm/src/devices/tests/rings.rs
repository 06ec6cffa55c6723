//! A split virtqueue that a test writes into guest memory as a driver would: the
//! descriptor table, then the available ring, then the used ring (virtio 1.2, 2.7).

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const DESCRIPTOR: u64 = size_of::<Descriptor>() as u64;

/// Where the parts of a queue of `size` entries lie in `mem`.
pub(super) struct Written<'m> {
    mem: &'m GuestMemoryMmap,
    table: GuestAddress,
    size: u16,
}

impl<'m> Written<'m> {
    pub(super) fn at(mem: &'m GuestMemoryMmap, table: GuestAddress, size: u16) -> Self {
        Written { mem, table, size }
    }

    fn available(&self) -> GuestAddress {
        GuestAddress(self.table.0 + DESCRIPTOR * u64::from(self.size))
    }

    /// Flags, index, an entry of 2 bytes for each descriptor and `used_event` come before it.
    fn used(&self) -> GuestAddress {
        let end = self.available().0 + 6 + 2 * u64::from(self.size);
        GuestAddress(end.next_multiple_of(4))
    }

    pub(super) fn descriptor(&self, index: u16, descriptor: Descriptor) {
        let at = GuestAddress(self.table.0 + DESCRIPTOR * u64::from(index));
        self.mem.write_obj(descriptor, at).unwrap();
    }

    /// Puts the head of a chain into entry `at` of the available ring.
    pub(super) fn offer(&self, at: u16, head: u16) {
        let entry = GuestAddress(self.available().0 + 4 + 2 * u64::from(at));
        self.mem.write_obj(head.to_le(), entry).unwrap();
    }

    pub(super) fn index(&self, index: u16) {
        self.mem.write_obj(index.to_le(), GuestAddress(self.available().0 + 2)).unwrap();
    }

    /// The device's side of the queue.
    pub(super) fn queue(&self) -> Queue {
        let mut queue = Queue::new(self.size).unwrap();
        queue.set_size(self.size);
        queue.try_set_desc_table_address(self.table).unwrap();
        queue.try_set_avail_ring_address(self.available()).unwrap();
        queue.try_set_used_ring_address(self.used()).unwrap();
        queue.set_ready(true);
        assert!(queue.is_valid(self.mem));
        queue
    }
}
