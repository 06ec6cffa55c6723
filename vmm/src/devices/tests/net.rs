//! The network device behind real sockets, with a link of a few packets.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use event_manager::{EventOps, EventSet};

use super::guest::*;
use crate::devices::*;

/// Bytes before a packet: the header of virtio and that of Ethernet.
const HEADERS: u32 = 26;

/// A link that has packets for the guest and counts its turns.
#[derive(Default)]
pub struct Packets {
    pub outbox: VecDeque<Vec<u8>>,
    pub turns: Arc<AtomicUsize>,
}

impl Link for Packets {
    fn watch(&mut self, _: &mut EventOps<'_>) {}
    fn packet(&mut self, packet: &[u8]) {
        self.outbox.push_back(packet.to_vec());
    }
    fn host_event(&mut self, _: u32, _: EventSet, _: &mut EventOps<'_>) {}
    fn turn(&mut self, _: &mut EventOps<'_>) -> bool {
        self.turns.fetch_add(1, Ordering::Relaxed);
        false
    }
    fn outbox(&mut self) -> &mut VecDeque<Vec<u8>> {
        &mut self.outbox
    }
    fn delivered(&mut self, _: Vec<u8>) {}
    fn disconnect(&mut self, _: &mut EventOps<'_>) {}
}

#[test]
fn a_packet_waits_at_rest_until_the_guest_has_room_for_all_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let (listener, path) = listen(&folder);
    let memory = memory_file(true);
    let mut devices = DeviceLoop::new(&memory).unwrap();
    let packet: Vec<u8> = (0..3000).map(|at| at as u8).collect();
    let link = Packets { outbox: [packet.clone()].into(), ..Packets::default() };
    let turns = link.turns.clone();
    let metrics = devices
        .add_net(listener, NetConfig { link: Box::new(link), mtu: 65_520, leaves_checksums: true });
    let metrics = metrics.unwrap();
    let _running = Running::new(devices);
    let mut guest = Guest::start(&path, &memory, 2);
    guest.offer(0, &[(BUFFERS, 2048, WRITE)]);
    wait_for(&metrics.transport.kicks, 1);
    // Long enough for millions of turns, if it asked again and again.
    std::thread::sleep(Duration::from_millis(100));
    assert!(turns.load(Ordering::Relaxed) < 20, "{turns:?} turns for one doorbell");
    assert_eq!(metrics.received_packets.get(), 0);

    guest.offer(0, &[(BUFFERS + 0x1000, 2048, WRITE)]);
    assert_eq!((guest.used(0), guest.used(0)), (2048, 3000 + HEADERS - 2048));
    let first = guest.bytes(BUFFERS + u64::from(HEADERS), 2048 - HEADERS as usize);
    let rest = guest.bytes(BUFFERS + 0x1000, 3000 - first.len());
    assert!([first, rest].concat() == packet);
    assert_eq!(guest.bytes(BUFFERS + 10, 2), 2_u16.to_le_bytes(), "buffers of the packet");
}
