//! Random rings, descriptors and packets: nothing may panic, hang or touch
//! memory outside the guest's.

use std::fs::File;
use std::sync::Arc;

use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use proptest::prelude::*;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::net::Packets;
use super::rings::Written;
use crate::devices::block::Block;
use crate::devices::console::Console;
use crate::devices::net::Net;
use crate::devices::rng::Rng;
use crate::devices::transport::{Device, Io, Ring};
use crate::devices::vsock::Vsock;
use crate::devices::*;

const MEMORY: usize = 0x10_0000;
const ENTRIES: u16 = 16;
/// Queues start here, one each 64 KiB.
const RINGS: u64 = 0x8_0000;

pub(super) struct Nobody;

impl MutEventSubscriber for Nobody {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {}
    fn init(&mut self, _: &mut EventOps<'_>) {}
}

#[derive(Clone, Debug)]
struct Attack {
    descriptors: Vec<(u64, u32, u16, u16)>,
    available: Vec<u16>,
    index: u16,
    bytes: Vec<u8>,
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![0..0x2000_u64, Just(RINGS), (MEMORY as u64 - 64)..MEMORY as u64 + 64, any::<u64>()]
}

fn length() -> impl Strategy<Value = u32> {
    prop_oneof![0..64_u32, Just(44), Just(512), 0..0x2_0000_u32, any::<u32>()]
}

fn attack() -> impl Strategy<Value = Attack> {
    let descriptor = (address(), length(), 0..8_u16, 0..20_u16);
    (
        prop::collection::vec(descriptor, ENTRIES as usize),
        prop::collection::vec(0..20_u16, ENTRIES as usize),
        prop_oneof![0..=ENTRIES, any::<u16>()],
        prop::collection::vec(prop_oneof![Just(0), Just(1), Just(2), any::<u8>()], 0..0x400),
    )
        .prop_map(|(descriptors, available, index, bytes)| Attack {
            descriptors,
            available,
            index,
            bytes,
        })
}

/// Lays the attack out in every queue of `device` and rings them all.
fn run(device: &mut impl Device, attack: &Attack) {
    let mem = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    mem.write_slice(&attack.bytes, GuestAddress(0)).unwrap();
    let mut rings = Vec::new();
    for queue in 0..device.queues() as u64 {
        let start = GuestAddress(RINGS + 0x1_0000 * queue);
        let written = Written::at(&mem, start, ENTRIES);
        for (at, &(address, len, flags, next)) in (0..).zip(&attack.descriptors) {
            written.descriptor(at, Descriptor::new(address, len, flags, next));
        }
        for (at, head) in (0..).zip(&attack.available) {
            written.offer(at, *head);
        }
        written.index(attack.index);
        rings.push(Ring::running(written.queue(), device.transport()));
    }
    let mut manager = EventManager::<Nobody>::new().unwrap();
    let id = manager.add_subscriber(Nobody);
    let mut ops = manager.event_ops(id).unwrap();
    device.watch(&mut ops);
    for queue in 0..device.queues() {
        let mut io = Io { mem: &mem, rings: &mut rings, ops: &mut ops };
        device.queue_event(queue, &mut io);
        device.queue_event(queue, &mut io);
    }
    device.disconnect(&mut ops);
}

fn disk() -> (Block, File, Arc<BlockMetrics>) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let metrics = Arc::<BlockMetrics>::default();
    let copy = file.try_clone().unwrap();
    let config =
        BlockConfig { contents: copy.into(), read_only: false, id: "x".repeat(40), windows: None };
    (Block::new(config, metrics.clone()).unwrap(), file, metrics)
}

fn vsock() -> (Vsock, Arc<VsockMetrics>) {
    let accept: VsockListener = Box::new(drop);
    let config = VsockConfig { listeners: [(0x0101_0101, accept)].into(), connections_max: 4 };
    let metrics = Arc::<VsockMetrics>::default();
    (Vsock::new(config, metrics.clone()).unwrap().0, metrics)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn random_rings_hurt_no_disk(attack in attack()) {
        let (mut device, file, _) = disk();
        run(&mut device, &attack);
        prop_assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    }

    #[test]
    fn random_rings_hurt_no_console_and_no_entropy(attack in attack()) {
        let (_, input) = std::os::unix::net::UnixStream::pair().unwrap();
        let config = ConsoleConfig {
            sink: Box::new(std::io::sink()),
            output_bytes_max: 1000,
            input: Some(input),
        };
        let metrics = Arc::<ConsoleMetrics>::default();
        run(&mut Console::new(config, metrics.clone()), &attack);
        prop_assert!(metrics.output_bytes.get() <= 1000);
        run(&mut Rng::new(Arc::default()), &attack);
    }

    #[test]
    fn random_rings_hurt_no_vsock(attack in attack()) {
        let (mut device, metrics) = vsock();
        run(&mut device, &attack);
        prop_assert_eq!(metrics.opened.get(), metrics.closed.get());
    }

    #[test]
    fn random_rings_hurt_no_network(attack in attack()) {
        let link = Packets { outbox: [vec![1; 60_000], vec![2; 40]].into(), ..Packets::default() };
        let config = NetConfig { link: Box::new(link), mtu: 65_520, leaves_checksums: true };
        run(&mut Net::new(config, Arc::default()), &attack);
    }

    /// Well-formed chains with headers that are nearly right.
    #[test]
    fn random_packets_hurt_no_vsock(
        packets in prop::collection::vec(
            (0..3_u32, 0..3_u32, length(), 0..3_u16, 0..9_u16, 0..5_u32, length(), length()), 1..16,
        ),
    ) {
        let mut bytes = Vec::new();
        let mut descriptors = Vec::new();
        for (from, to, len, kind, op, flags, buffer, taken) in packets {
            descriptors.push((bytes.len() as u64, 44 + len % 256, 0, 0));
            bytes.extend([3_u64.to_le_bytes(), 2_u64.to_le_bytes()].concat());
            bytes.extend([from, if to == 2 { 7 } else { 0x0101_0101 }, len]
                .iter().flat_map(|word| word.to_le_bytes()));
            bytes.extend([kind.max(1), op].iter().flat_map(|half| half.to_le_bytes()));
            bytes.extend([flags, buffer, taken].iter().flat_map(|word| word.to_le_bytes()));
        }
        let index = descriptors.len() as u16;
        let (mut device, metrics) = vsock();
        run(&mut device, &Attack { descriptors, available: (0..index).collect(), index, bytes });
        prop_assert_eq!(metrics.opened.get(), metrics.closed.get());
        prop_assert!(metrics.opened.get() <= 16);
    }
}
