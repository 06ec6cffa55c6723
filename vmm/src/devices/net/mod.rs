//! virtio-net (virtio 1.2, 5.1): IP packets between the guest and a [`Link`].
//!
//! There is no Ethernet beyond the device: the link is between two, so it drops
//! what the guest asks about neighbours and says nothing of them. The driver is
//! told to leave checksums out where the link wants none, and large packets travel in several
//! buffers.

mod device;
mod metrics;

use std::collections::VecDeque;

use event_manager::{EventOps, EventSet};

pub use device::MAC;
pub(crate) use device::Net;
pub use metrics::NetMetrics;

/// The first event token that a link may use.
pub const LINK_TOKENS: u32 = super::transport::DEVICE_TOKENS;

/// What is at the other end of a guest's link; called on the device thread, so
/// it must not wait.
pub trait Link: Send + 'static {
    /// Registers host descriptors, with tokens from [`LINK_TOKENS`].
    fn watch(&mut self, ops: &mut EventOps<'_>);
    /// Takes one IP packet of the guest, which may hold anything.
    fn packet(&mut self, packet: &[u8]);
    /// A host descriptor is ready.
    fn host_event(&mut self, token: u32, set: EventSet, ops: &mut EventOps<'_>);
    /// Does what is due after packets, events, and room in the outbox; whether there is more
    /// that need not wait for any of these.
    fn turn(&mut self, ops: &mut EventOps<'_>) -> bool;
    /// IP packets for the guest, of at most the MTU.
    fn outbox(&mut self) -> &mut VecDeque<Vec<u8>>;
    /// Takes back what was delivered.
    fn delivered(&mut self, packet: Vec<u8>);
    /// The guest is gone: close all that it had open.
    fn disconnect(&mut self, ops: &mut EventOps<'_>);
}

/// A guest's link.
pub struct NetConfig {
    /// Where its packets go.
    pub link: Box<dyn Link>,
    /// Bytes of the largest packet, headers of IP included.
    pub mtu: u16,
    /// Whether the driver leaves checksums out of what it sends.
    pub leaves_checksums: bool,
}
