//! A running loop behind real sockets.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::guest::*;
use crate::devices::metrics::Counter;
use crate::devices::*;

const READ: u32 = 0;
const WRITE_OUT: u32 = 1;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const STATUS: u64 = BUFFERS + 0x8000;

fn wait_for(counter: &Counter, count: u64) {
    let start = Instant::now();
    while counter.get() < count {
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "counter stays at {}",
            counter.get()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Disk {
    guest: Guest,
    metrics: Arc<BlockMetrics>,
    file: File,
    _loop: Running,
    _folder: tempfile::TempDir,
}

fn disk(read_only: bool) -> Disk {
    let folder = tempfile::tempdir().unwrap();
    let (listener, path) = listen(&folder);
    let memory = memory_file(true);
    let mut devices = DeviceLoop::new(&memory).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(64 * 512).unwrap();
    let copy = file.try_clone().unwrap();
    let config = BlockConfig {
        file: copy,
        read_only,
        id: "serial".into(),
    };
    let metrics = devices.add_block(listener, config).unwrap();
    let running = Running::new(devices);
    let guest = Guest::start(&path, &memory, 1);
    Disk {
        guest,
        metrics,
        file,
        _loop: running,
        _folder: folder,
    }
}

impl Disk {
    /// One request with one data buffer; its status byte.
    fn request(&mut self, kind: u32, sector: u64, data: (u64, u32, u16)) -> u8 {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        self.guest
            .mem
            .write_slice(&header, GuestAddress(BUFFERS))
            .unwrap();
        self.guest
            .mem
            .write_obj(0xff_u8, GuestAddress(STATUS))
            .unwrap();
        self.guest
            .offer(0, &[(BUFFERS, 16, 0), data, (STATUS, 1, WRITE)]);
        self.guest.used(0);
        self.guest.bytes(STATUS, 1)[0]
    }
}

#[test]
fn a_disk_reads_writes_and_discards() {
    let mut disk = disk(false);
    let data = BUFFERS + 0x1000;
    assert_eq!(
        u64::from_le_bytes(disk.guest.config(8).try_into().unwrap()),
        64
    );
    disk.guest
        .mem
        .write_slice(&[7; 1024], GuestAddress(data))
        .unwrap();
    assert_eq!(disk.request(WRITE_OUT, 2, (data, 1024, 0)), 0);
    let mut found = [0; 2048];
    std::os::unix::fs::FileExt::read_exact_at(&disk.file, &mut found, 512).unwrap();
    assert!(
        found[..512]
            .iter()
            .chain(&found[1536..])
            .all(|byte| *byte == 0)
    );
    assert!(found[512..1536].iter().all(|byte| *byte == 7));
    assert_eq!(disk.request(READ, 3, (data + 0x1000, 512, WRITE)), 0);
    assert_eq!(disk.guest.bytes(data + 0x1000, 512), [7; 512]);
    assert_eq!(disk.request(GET_ID, 0, (data, 20, WRITE)), 0);
    assert_eq!(disk.guest.bytes(data, 8), b"serial\0\0");
    let erase = [2_u64.to_le_bytes(), 2_u64.to_le_bytes()].concat();
    disk.guest
        .mem
        .write_slice(&erase, GuestAddress(data))
        .unwrap();
    assert_eq!(disk.request(DISCARD, 0, (data, 16, 0)), 0);
    assert_eq!(disk.request(READ, 2, (data, 512, WRITE)), 0);
    assert_eq!(disk.guest.bytes(data, 512), [0; 512]);
    assert_eq!(disk.metrics.requests.get(), 5);
    assert_eq!(disk.metrics.errors.get(), 0);
}

#[test]
fn a_disk_refuses_what_is_out_of_range() {
    let mut disk = disk(false);
    let data = BUFFERS + 0x1000;
    assert_eq!(disk.request(READ, 64, (data, 512, WRITE)), 1);
    assert_eq!(disk.request(READ, u64::MAX, (data, 512, WRITE)), 1);
    assert_eq!(disk.request(WRITE_OUT, 63, (data, 1024, 0)), 1);
    assert_eq!(disk.request(READ, 0, (data, 100, WRITE)), 1);
    assert_eq!(disk.request(DISCARD, 0, (data, 15, 0)), 1);
    assert_eq!(disk.request(99, 0, (data, 512, WRITE)), 2);
    assert_eq!(disk.metrics.errors.get(), 6);
}

#[test]
fn a_read_only_disk_stays_as_it_is() {
    let mut disk = disk(true);
    disk.guest
        .mem
        .write_slice(&[7; 512], GuestAddress(BUFFERS + 0x1000))
        .unwrap();
    assert_eq!(disk.request(WRITE_OUT, 0, (BUFFERS + 0x1000, 512, 0)), 1);
    assert_eq!(disk.request(DISCARD, 0, (BUFFERS + 0x1000, 0, 0)), 1);
    assert_eq!(disk.request(READ, 0, (BUFFERS + 0x1000, 512, WRITE)), 0);
    assert_eq!(disk.guest.bytes(BUFFERS + 0x1000, 512), [0; 512]);
}

#[test]
fn a_full_host_disk_is_an_error_of_the_guest() {
    // /dev/full takes no byte, and as a device it has no length of its own.
    let full = File::options()
        .read(true)
        .write(true)
        .open("/dev/full")
        .unwrap();
    let config = BlockConfig {
        file: full,
        read_only: false,
        id: String::new(),
    };
    let refused = block::Block::new(config, Arc::default());
    assert!(matches!(
        refused,
        Err(DeviceError::DiskTooSmall { bytes: 0 })
    ));
    // A file that its own limit keeps from growing fails the same way.
    let mut disk = disk(false);
    disk.file.set_len(512).unwrap();
    assert_eq!(disk.request(READ, 8, (BUFFERS + 0x1000, 512, WRITE)), 1);
    assert_eq!(disk.request(READ, 0, (BUFFERS + 0x1000, 512, WRITE)), 0);
}

#[test]
fn malformed_chains_come_back_unused() {
    let mut disk = disk(false);
    let outside = BASE - 0x1000;
    disk.guest.offer(0, &[(outside, 16, 0), (STATUS, 1, WRITE)]);
    assert_eq!(disk.guest.used(0), 0);
    disk.guest
        .offer(0, &[(BASE + SIZE - 8, 16, 0), (STATUS, 1, WRITE)]);
    assert_eq!(disk.guest.used(0), 0);
    disk.guest.offer(0, &[(u64::MAX, u32::MAX, WRITE)]);
    assert_eq!(disk.guest.used(0), 0);
    disk.guest.offer(0, &[(STATUS, 1, WRITE), (BUFFERS, 16, 0)]);
    assert_eq!(disk.guest.used(0), 0);
    // The last of all descriptors goes on to the first.
    disk.guest.offer(0, &[(BUFFERS, 16, NEXT); 16]);
    assert_eq!(disk.guest.used(0), 0);
    assert_eq!(disk.metrics.transport.malformed_chains.get(), 5);
    // A header too short, and no room for a status: well-formed but useless.
    disk.guest.offer(0, &[(BUFFERS, 15, 0), (STATUS, 1, WRITE)]);
    assert_eq!(disk.guest.used(0), 0);
    assert_eq!(disk.request(READ, 0, (BUFFERS + 0x1000, 512, WRITE)), 0);
    assert_eq!(disk.metrics.errors.get(), 1);
}

#[test]
fn a_broken_ring_stops_and_the_loop_goes_on() {
    let mut disk = disk(false);
    disk.guest.set_available(0, 500);
    wait_for(&disk.metrics.transport.ring_faults, 1);
    disk.guest.set_available(0, 1);
    assert_eq!(disk.guest.config(4).len(), 4);
    assert_eq!(disk.metrics.requests.get(), 0);
}

#[test]
fn bad_set_up_is_refused() {
    let mut disk = disk(false);
    let other = memory_file(true);
    assert_eq!(disk.guest.set_region(&other, [BASE, SIZE, BASE, BASE]), 1);
    let file = disk.guest.file().try_clone().unwrap();
    assert_eq!(
        disk.guest
            .set_region(&file, [BASE, SIZE + 0x1000, BASE, BASE]),
        1
    );
    assert_eq!(
        disk.guest.set_region(&file, [BASE + 1, SIZE, BASE, BASE]),
        1
    );
    assert_eq!(disk.guest.set_addresses(0, BASE), 1, "no memory any more");
    assert_eq!(disk.guest.set_memory(&file), 0);
    assert_eq!(disk.guest.set_addresses(0, BASE + SIZE - 0x400), 1);
    assert_eq!(disk.guest.set_addresses(7, BASE), 1);
    let plain = tempfile::tempfile().unwrap();
    assert_eq!(
        disk.guest
            .set(13, &0_u64.to_le_bytes(), &[plain.as_raw_fd()]),
        1
    );
    wait_for(&disk.metrics.transport.control_faults, 7);
    assert_eq!(disk.metrics.transport.disconnected.get(), 0);
}

#[test]
fn half_a_message_ends_the_device() {
    let mut disk = disk(false);
    disk.guest.control.write_all(&[1, 0, 0, 0, 1]).unwrap();
    wait_for(&disk.metrics.transport.disconnected, 1);
    assert_eq!(disk.guest.control.read(&mut [0; 8]).unwrap_or(0), 0);
}

#[test]
fn a_frontend_that_reads_no_answers_is_cut_off() {
    let mut disk = disk(false);
    for _ in 0..10_000 {
        disk.guest.send(1, &[], &[], false);
    }
    wait_for(&disk.metrics.transport.disconnected, 1);
}

#[test]
fn memory_that_could_shrink_is_refused() {
    let refused = DeviceLoop::new(&memory_file(false)).err().unwrap();
    assert!(refused.to_string().contains("F_SEAL_SHRINK"), "{refused}");
}

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_console_passes_output_up_to_its_limit_and_input_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let (listener, path) = listen(&folder);
    let memory = memory_file(true);
    let mut devices = DeviceLoop::new(&memory).unwrap();
    let (mut keyboard, input) = UnixStream::pair().unwrap();
    let sink = Sink::default();
    let config = ConsoleConfig {
        sink: Box::new(sink.clone()),
        output_bytes_max: 8,
        input: Some(input),
    };
    let metrics = devices.add_console(listener, config).unwrap();
    let _running = Running::new(devices);
    let mut guest = Guest::start(&path, &memory, 2);
    keyboard.write_all(b"typed").unwrap();
    guest.offer(0, &[(BUFFERS, 64, WRITE)]);
    guest
        .mem
        .write_slice(b"hello world", GuestAddress(BUFFERS + 0x100))
        .unwrap();
    guest.offer(1, &[(BUFFERS + 0x100, 11, 0)]);
    assert_eq!(guest.used(1), 0);
    assert_eq!(guest.used(0), 5);
    assert_eq!(guest.bytes(BUFFERS, 5), b"typed");
    assert_eq!(*sink.0.lock().unwrap(), b"hello wo");
    assert_eq!(metrics.dropped_bytes.get(), 3);
    drop(guest);
    wait_for(&metrics.transport.disconnected, 1);
    assert_eq!(keyboard.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn entropy_is_bounded_for_each_request() {
    let folder = tempfile::tempdir().unwrap();
    let (listener, path) = listen(&folder);
    let memory = memory_file(true);
    let mut devices = DeviceLoop::new(&memory).unwrap();
    let metrics = devices.add_rng(listener).unwrap();
    let _running = Running::new(devices);
    let mut guest = Guest::start(&path, &memory, 1);
    guest.offer(
        0,
        &[(BUFFERS, 100, WRITE), (BUFFERS + 0x1000, 0x10_0000, WRITE)],
    );
    assert_eq!(guest.used(0), 4096);
    assert!(guest.bytes(BUFFERS, 64).iter().any(|byte| *byte != 0));
    assert_eq!(guest.bytes(BUFFERS + 0x2000, 64), [0; 64]);
    guest.offer(0, &[(BUFFERS, 100, 0)]);
    assert_eq!(guest.used(0), 0);
    assert_eq!((metrics.bytes.get(), metrics.errors.get()), (4096, 1));
}

/// A packet as it lies in guest memory.
struct Packet<'a> {
    ports: (u32, u32),
    op: u16,
    flags: u32,
    taken: u32,
    payload: &'a [u8],
}

struct Stream {
    guest: Guest,
    handle: VsockHandle,
    metrics: Arc<VsockMetrics>,
    accepted: mpsc::Receiver<UnixStream>,
    _loop: Running,
    _folder: tempfile::TempDir,
}

const GUEST_BUFFER: u32 = 4096;

fn vsock() -> Stream {
    let folder = tempfile::tempdir().unwrap();
    let (listener, path) = listen(&folder);
    let memory = memory_file(true);
    let mut devices = DeviceLoop::new(&memory).unwrap();
    let (send, accepted) = mpsc::channel();
    let accept: VsockListener = Box::new(move |stream| send.send(stream).unwrap());
    let config = VsockConfig {
        listeners: HashMap::from([(80, accept)]),
        connections_max: 2,
    };
    let (handle, metrics) = devices.add_vsock(listener, config).unwrap();
    let running = Running::new(devices);
    let guest = Guest::start(&path, &memory, 3);
    Stream {
        guest,
        handle,
        metrics,
        accepted,
        _loop: running,
        _folder: folder,
    }
}

impl Stream {
    fn send(&mut self, packet: Packet<'_>) {
        let mut bytes = [3_u64.to_le_bytes(), 2_u64.to_le_bytes()].concat();
        bytes.extend(packet.ports.0.to_le_bytes());
        bytes.extend(packet.ports.1.to_le_bytes());
        bytes.extend((packet.payload.len() as u32).to_le_bytes());
        bytes.extend(1_u16.to_le_bytes());
        bytes.extend(packet.op.to_le_bytes());
        bytes.extend(packet.flags.to_le_bytes());
        bytes.extend(GUEST_BUFFER.to_le_bytes());
        bytes.extend(packet.taken.to_le_bytes());
        bytes.extend(packet.payload);
        self.guest
            .mem
            .write_slice(&bytes, GuestAddress(BUFFERS))
            .unwrap();
        self.guest.offer(
            1,
            &[
                (BUFFERS, 44, 0),
                (BUFFERS + 44, packet.payload.len() as u32, 0),
            ],
        );
        assert_eq!(self.guest.used(1), 0);
    }

    fn control(&mut self, ports: (u32, u32), op: u16, flags: u32) {
        self.send(Packet {
            ports,
            op,
            flags,
            taken: 0,
            payload: &[],
        });
    }

    /// Gives room for one packet and waits for it: ports, op, flags, payload.
    fn receive(&mut self) -> ((u32, u32), u16, u32, Vec<u8>) {
        let at = BUFFERS + 0x2_0000;
        self.guest.offer(0, &[(at, 44 + 8192, WRITE)]);
        let len = self.guest.used(0) as usize;
        let bytes = self.guest.bytes(at, len);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(word(24) as usize, len - 44);
        let op = u16::from_le_bytes([bytes[30], bytes[31]]);
        ((word(20), word(16)), op, word(32), bytes[44..].to_vec())
    }

    fn open(&mut self, ports: (u32, u32)) -> UnixStream {
        self.control(ports, 1, 0);
        assert_eq!(self.receive(), (ports, 2, 0, vec![]));
        self.accepted.recv_timeout(Duration::from_secs(5)).unwrap()
    }
}

#[test]
fn a_guest_stream_carries_data_and_both_ends_of_it() {
    let mut stream = vsock();
    let ports = (1000, 80);
    let mut host = stream.open(ports);
    stream.send(Packet {
        ports,
        op: 5,
        flags: 0,
        taken: 0,
        payload: b"question",
    });
    let mut got = [0; 8];
    host.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"question");
    stream.control(ports, 4, 2);
    assert_eq!(host.read(&mut got).unwrap(), 0, "the guest sends no more");
    host.write_all(b"answer").unwrap();
    assert_eq!(stream.receive(), (ports, 5, 0, b"answer".to_vec()));
    host.shutdown(Shutdown::Write).unwrap();
    let (_, op, flags, _) = stream.receive();
    assert_eq!((op, flags & 2), (4, 2), "the host sends no more");
    stream.control(ports, 4, 3);
    assert_eq!(stream.receive(), (ports, 3, 0, vec![]));
    wait_for(&stream.metrics.closed, 1);
}

#[test]
fn the_guest_gets_no_more_than_its_credit() {
    let mut stream = vsock();
    let ports = (1000, 80);
    let mut host = stream.open(ports);
    host.write_all(&[7; 6000]).unwrap();
    let mut got = 0;
    while got < GUEST_BUFFER as usize {
        let (_, op, _, payload) = stream.receive();
        assert_eq!(op, 5);
        got += payload.len();
    }
    assert_eq!(got, GUEST_BUFFER as usize);
    assert_eq!(stream.metrics.to_guest_bytes.get(), u64::from(GUEST_BUFFER));
    stream.send(Packet {
        ports,
        op: 6,
        flags: 0,
        taken: GUEST_BUFFER,
        payload: &[],
    });
    assert_eq!(stream.receive().3.len(), 6000 - GUEST_BUFFER as usize);
}

#[test]
fn a_guest_that_sends_past_its_credit_is_reset() {
    let mut stream = vsock();
    let ports = (1000, 80);
    let _host = stream.open(ports);
    let payload = vec![1; 60_000];
    for _ in 0..20 {
        stream.send(Packet {
            ports,
            op: 5,
            flags: 0,
            taken: 0,
            payload: &payload,
        });
    }
    assert_eq!(stream.receive(), (ports, 3, 0, vec![]));
    assert!(stream.metrics.bad_packets.get() >= 1);
}

#[test]
fn what_the_guest_sent_before_it_left_still_arrives() {
    let mut stream = vsock();
    let ports = (1000, 80);
    let mut host = stream.open(ports);
    let payload = vec![1; 60_000];
    for _ in 0..6 {
        stream.send(Packet {
            ports,
            op: 5,
            flags: 0,
            taken: 0,
            payload: &payload,
        });
    }
    stream.control(ports, 4, 3);
    stream.control(ports, 3, 0);
    let mut all = Vec::new();
    host.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), 6 * payload.len());
}

#[test]
fn refused_streams_are_reset_and_closed() {
    let mut stream = vsock();
    stream.control((1, 81), 1, 0);
    assert_eq!(stream.receive(), ((1, 81), 3, 0, vec![]), "nobody listens");
    stream.control((1, 80), 5, 0);
    assert_eq!(stream.receive(), ((1, 80), 3, 0, vec![]), "no such stream");
    let _first = stream.open((1, 80));
    let _second = stream.open((2, 80));
    stream.control((3, 80), 1, 0);
    assert_eq!(stream.receive(), ((3, 80), 3, 0, vec![]), "too many");
    stream.control((1, 80), 1, 0);
    assert_eq!(stream.receive(), ((1, 80), 3, 0, vec![]), "open already");
    assert_eq!(stream.metrics.refused.get(), 2);
}

#[test]
fn the_host_opens_a_stream_and_the_guest_may_refuse() {
    let mut stream = vsock();
    let mut host = stream.handle.connect(5000).unwrap();
    let (ports, op, ..) = stream.receive();
    assert_eq!((ports.0, op), (5000, 1));
    host.write_all(b"early").unwrap();
    stream.control(ports, 2, 0);
    assert_eq!(stream.receive(), (ports, 5, 0, b"early".to_vec()));
    let mut refused = stream.handle.connect(5001).unwrap();
    let (ports, ..) = stream.receive();
    stream.control(ports, 3, 0);
    assert_eq!(refused.read(&mut [0; 1]).unwrap(), 0);
    drop(stream.guest);
    assert_eq!(host.read(&mut [0; 1]).unwrap_or(0), 0, "the guest is gone");
    wait_for(&stream.metrics.transport.disconnected, 1);
    let mut late = stream.handle.connect(5000).unwrap();
    assert_eq!(late.read(&mut [0; 1]).unwrap(), 0);
}
