//! The vhost-user transport that all devices share.
//!
//! `server` waits for the one frontend and passes events on, `session` answers
//! its messages, `ring` serves one virtqueue, `buffers` checks descriptor
//! chains, `memory` maps what SET_MEM_TABLE names.

pub(crate) mod buffers;
mod memory;
pub(crate) mod ring;
mod server;
mod session;

use std::sync::Arc;

use event_manager::{EventOps, EventSet};
use vm_memory::GuestMemoryMmap;

pub(crate) use memory::MemoryFile;
pub(crate) use ring::{CallKind, Ring};
pub(crate) use server::Server;

use super::metrics::TransportMetrics;

/// The first event token that belongs to a device and not to its transport.
pub(crate) const DEVICE_TOKENS: u32 = 256;

/// What a device works with while it has a frontend.
pub(crate) struct Io<'a, 'o> {
    /// The guest's memory.
    pub mem: &'a GuestMemoryMmap,
    /// The device's virtqueues.
    pub rings: &'a mut [Ring],
    /// The event loop, to watch host descriptors with.
    pub ops: &'a mut EventOps<'o>,
}

/// A virtio device behind the transport.
pub(crate) trait Device: Send + 'static {
    /// How many virtqueues it has.
    fn queues(&self) -> usize;
    /// Its feature bits beyond the transport's.
    fn features(&self) -> u64;
    /// Its configuration space.
    fn config(&self) -> &[u8];
    /// Where the transport counts.
    fn transport(&self) -> Arc<TransportMetrics>;
    /// The guest rang queue `index`, or the queue has come to life.
    fn queue_event(&mut self, index: usize, io: &mut Io<'_, '_>);
    /// Registers host descriptors, with tokens from [`DEVICE_TOKENS`].
    fn watch(&mut self, _ops: &mut EventOps<'_>) {}
    /// A host descriptor is ready; `io` is `None` without a frontend.
    fn host_event(&mut self, _token: u32, _set: EventSet, _io: Option<&mut Io<'_, '_>>) {}
    /// The frontend is gone: free what belonged to it.
    fn disconnect(&mut self, _ops: &mut EventOps<'_>) {}
}
