//! Packets between the link and the rings: queue 0 towards the guest, 1 from it.

use std::sync::Arc;

use event_manager::{EventOps, EventSet};
use smallvec::SmallVec;
use vm_memory::GuestMemoryMmap;

use super::{Link, NetConfig, NetMetrics};
use crate::devices::metrics::TransportMetrics;
use crate::devices::transport::buffers::Chain;
use crate::devices::transport::{Device, Io, Ring};

const TO_GUEST: usize = 0;
const FROM_GUEST: usize = 1;
/// Packets given to the guest before its other events get their turn.
const TURN_MAX: usize = 256;
/// Buffers that one packet may be spread over: a page each, and some spare.
const BUFFERS_MAX: usize = 64;
/// Pages that the largest packet takes.
const BUFFERS_USUAL: usize = 17;
/// The header before each frame (virtio 1.2, 5.1.6).
const HEADER_BYTES: usize = 12;
const ETHERNET_BYTES: usize = 14;
/// VIRTIO_NET_HDR_F_DATA_VALID: the checksum needs no look.
const DATA_VALID: u8 = 2;

/// VIRTIO_NET_F_GUEST_CSUM, _MTU, _MAC, _MRG_RXBUF.
const FEATURES: u64 = 1 << 1 | 1 << 3 | 1 << 5 | 1 << 15;
/// VIRTIO_NET_F_CSUM.
const LEAVES_CHECKSUMS: u64 = 1;
/// The guest's hardware address; locally administered.
pub const MAC: [u8; 6] = [0x02, 0x65, 0x78, 0x6f, 0x00, 0x02];
/// The other end's.
const PEER_MAC: [u8; 6] = [0x02, 0x65, 0x78, 0x6f, 0x00, 0x01];
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];

/// A virtio-net device with one pair of queues.
pub(crate) struct Net {
    link: Box<dyn Link>,
    /// Hardware address, status, queue pairs, MTU (virtio 1.2, 5.1.4).
    config: [u8; 12],
    packet: Vec<u8>,
    leaves_checksums: bool,
    metrics: Arc<NetMetrics>,
}

impl Net {
    pub fn new(config: NetConfig, metrics: Arc<NetMetrics>) -> Self {
        let NetConfig { link, mtu, leaves_checksums } = config;
        let mut config = [0; 12];
        config[..6].copy_from_slice(&MAC);
        config[10..].copy_from_slice(&mtu.to_le_bytes());
        let packet = vec![0; usize::from(mtu)];
        Self { link, config, packet, leaves_checksums, metrics }
    }

    fn take_packets(&mut self, io: &mut Io<'_, '_>) {
        if let Some(ring) = io.rings.get_mut(FROM_GUEST) {
            ring.serve(io.mem, |chain| self.take(chain));
        }
    }

    fn take(&mut self, mut chain: Chain<'_>) -> u32 {
        let headers: Option<[u8; HEADER_BYTES + ETHERNET_BYTES]> = chain.readable.take_array();
        let is_ip = headers.is_some_and(|headers| {
            [ETHERTYPE_IPV4, ETHERTYPE_IPV6].iter().any(|kind| headers.ends_with(kind))
        });
        let length = chain.readable.len();
        match self.packet.get_mut(..length) {
            Some(packet) if is_ip => {
                chain.readable.copy_to(packet);
                self.metrics.sent_packets.inc();
                self.metrics.sent_bytes.add(length as u64);
                self.link.packet(packet);
            }
            _ => self.metrics.dropped_frames.inc(),
        }
        0
    }

    /// Lets the link work, and gives the guest what it has room for, until
    /// there is nothing left to do.
    fn turn(&mut self, io: &mut Io<'_, '_>) {
        let mut more = self.link.turn(io.ops);
        let Some(ring) = io.rings.get_mut(TO_GUEST) else { return };
        for _ in 0..TURN_MAX {
            if self.link.outbox().is_empty() {
                // The guest works on what it has while the link finds more.
                ring.signal(io.mem);
                // Room in the outbox may be what the link waited for.
                more = self.link.turn(io.ops);
                if self.link.outbox().is_empty() && !more {
                    return;
                }
            }
            let Some(packet) = self.link.outbox().front() else { continue };
            match give(ring, io.mem, packet) {
                Given::Whole => {
                    self.metrics.received_packets.inc();
                    self.metrics.received_bytes.add(packet.len() as u64);
                    let packet = self.link.outbox().pop_front();
                    packet.into_iter().for_each(|packet| self.link.delivered(packet));
                }
                // A doorbell tells us when the guest has more room.
                Given::NoRoom => {
                    if more {
                        ring.ask_again();
                    }
                    return ring.signal(io.mem);
                }
                Given::Unfit => self.metrics.transport.malformed_chains.inc(),
            }
        }
        ring.ask_again();
        ring.signal(io.mem);
    }
}

/// What became of a packet.
enum Given {
    Whole,
    /// The guest has not offered enough; nothing was taken.
    NoRoom,
    /// What the guest offered cannot hold a packet; it got that back.
    Unfit,
}

/// Writes headers and `packet` into as many of the guest's buffers as it takes.
fn give(ring: &mut Ring, mem: &GuestMemoryMmap, packet: &[u8]) -> Given {
    let wanted = HEADER_BYTES + ETHERNET_BYTES + packet.len();
    let mut chains: SmallVec<[Chain<'_>; BUFFERS_USUAL]> = SmallVec::new();
    let mut room = 0;
    while room < wanted {
        if chains.len() == BUFFERS_MAX {
            return take_back(ring, mem, &chains);
        }
        match ring.pop(mem) {
            Some(chain) => {
                room += chain.writable.len();
                chains.push(chain);
            }
            // Armed behind what there is, not before: that is not enough.
            None if ring.arm(mem) => {}
            None => return take_back(ring, mem, &chains),
        }
    }
    let mut used: SmallVec<[(u16, u32); BUFFERS_USUAL]> = SmallVec::new();
    let headers = headers(packet, chains.len() as u16);
    let mut frame = [&headers[..], packet];
    for chain in &chains {
        let written = chain.writable.copy_on(&mut frame);
        used.push((chain.head, written as u32));
    }
    ring.push_all(mem, &used);
    Given::Whole
}

/// Puts the chains back for later, unless that would go on for ever.
fn take_back(ring: &mut Ring, mem: &GuestMemoryMmap, chains: &[Chain<'_>]) -> Given {
    if chains.len() < BUFFERS_MAX {
        chains.iter().for_each(|_| ring.unpop());
        return Given::NoRoom;
    }
    chains.iter().for_each(|chain| ring.push(mem, chain.head, 0));
    Given::Unfit
}

fn headers(packet: &[u8], buffers: u16) -> [u8; HEADER_BYTES + ETHERNET_BYTES] {
    let mut headers = [0; HEADER_BYTES + ETHERNET_BYTES];
    headers[0] = DATA_VALID;
    headers[10..12].copy_from_slice(&buffers.to_le_bytes());
    headers[12..18].copy_from_slice(&MAC);
    headers[18..24].copy_from_slice(&PEER_MAC);
    let is_v6 = packet.first().is_some_and(|first| first >> 4 == 6);
    headers[24..].copy_from_slice(if is_v6 { &ETHERTYPE_IPV6 } else { &ETHERTYPE_IPV4 });
    headers
}

impl Device for Net {
    fn queues(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        if self.leaves_checksums { FEATURES | LEAVES_CHECKSUMS } else { FEATURES }
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn transport(&self) -> Arc<TransportMetrics> {
        self.metrics.transport.clone()
    }

    fn queue_event(&mut self, index: usize, io: &mut Io<'_, '_>) {
        if index == FROM_GUEST {
            self.take_packets(io);
        }
        self.turn(io);
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        self.link.watch(ops);
    }

    fn host_event(&mut self, token: u32, set: EventSet, io: Option<&mut Io<'_, '_>>) {
        // Without a guest nothing is open that could be ready but what the
        // link watches from the start; it is looked at when the guest comes.
        if let Some(io) = io {
            self.link.host_event(token, set, io.ops);
            self.turn(io);
        }
    }

    fn disconnect(&mut self, ops: &mut EventOps<'_>) {
        self.link.disconnect(ops);
    }
}
