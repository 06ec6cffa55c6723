//! Streams between a guest made by hand and the host.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::guest::*;
use crate::devices::*;

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
    let accept = |port| -> (u32, VsockListener) {
        let send = send.clone();
        (port, Box::new(move |stream| send.send(stream).unwrap()))
    };
    let listeners = HashMap::from([80, 82, 83].map(accept));
    let config = VsockConfig { listeners, connections_max: 2 };
    let (handle, metrics) = devices.add_vsock(listener, config).unwrap();
    let running = Running::new(devices);
    let guest = Guest::start(&path, &memory, 3);
    Stream { guest, handle, metrics, accepted, _loop: running, _folder: folder }
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
        self.guest.mem.write_slice(&bytes, GuestAddress(BUFFERS)).unwrap();
        self.guest.offer(1, &[(BUFFERS, 44, 0), (BUFFERS + 44, packet.payload.len() as u32, 0)]);
        assert_eq!(self.guest.used(1), 0);
    }

    fn control(&mut self, ports: (u32, u32), op: u16, flags: u32) {
        self.send(Packet { ports, op, flags, taken: 0, payload: &[] });
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
    stream.send(Packet { ports, op: 5, flags: 0, taken: 0, payload: b"question" });
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
    stream.send(Packet { ports, op: 6, flags: 0, taken: GUEST_BUFFER, payload: &[] });
    assert_eq!(stream.receive().3.len(), 6000 - GUEST_BUFFER as usize);
}

#[test]
fn a_guest_that_sends_past_its_credit_is_reset() {
    let mut stream = vsock();
    let ports = (1000, 80);
    let _host = stream.open(ports);
    let payload = vec![1; 60_000];
    for _ in 0..20 {
        stream.send(Packet { ports, op: 5, flags: 0, taken: 0, payload: &payload });
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
        stream.send(Packet { ports, op: 5, flags: 0, taken: 0, payload: &payload });
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
    let _second = stream.open((2, 82));
    stream.control((3, 83), 1, 0);
    assert_eq!(stream.receive(), ((3, 83), 3, 0, vec![]), "too many");
    stream.control((1, 80), 1, 0);
    assert_eq!(stream.receive(), ((1, 80), 3, 0, vec![]), "open already");
    assert_eq!(stream.metrics.refused.get(), 2);
}

/// Whoever comes after the guest's init finds no port of the host's open.
#[test]
fn a_port_of_the_host_takes_one_stream() {
    let mut stream = vsock();
    let first = stream.open((1, 80));
    stream.control((2, 80), 1, 0);
    assert_eq!(stream.receive(), ((2, 80), 3, 0, vec![]));
    drop(first);
    stream.control((1, 80), 3, 0);
    wait_for(&stream.metrics.closed, 1);
    for guest_port in [1, 3, 1023] {
        stream.control((guest_port, 80), 1, 0);
        loop {
            let (ports, op, ..) = stream.receive();
            if ports == (guest_port, 80) && op == 3 {
                break;
            }
        }
    }
    assert!(stream.accepted.try_recv().is_err(), "nobody was let in");
}

#[test]
fn resets_that_a_guest_provokes_keep_no_packet_of_the_hosts_back() {
    let mut stream = vsock();
    for guest_port in 0..200 {
        stream.control((guest_port, 9999), 1, 0);
    }
    let _host = stream.handle.connect(5000).unwrap();
    // Only the guest's next doorbell tells the device that there is room.
    let ops: Vec<u16> = (0..6).map(|_| stream.receive().1).collect();
    assert!(ops.contains(&1), "the host's request is among the first: {ops:?}");
}

#[test]
fn a_guest_that_ends_no_stream_uses_none_of_the_hosts_up() {
    let mut stream = vsock();
    for _ in 0..10 {
        let host = stream.handle.connect(5000).unwrap();
        let ports = loop {
            let (ports, op, ..) = stream.receive();
            if op == 1 {
                break ports;
            }
        };
        // Accepted, and never heard of again: no credit, no answer to the end.
        stream.control(ports, 2, 0);
        drop(host);
    }
    assert_eq!(stream.metrics.opened.get(), 10);
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

/// Whoever asked for the stream gives it away, with a word for the guest.
#[test]
fn a_stream_that_is_handed_over_is_anothers_from_there_on() {
    let mut stream = vsock();
    let (mut former, name) = stream.handle.open(5000).unwrap();
    former.write_all(b"question").unwrap();
    let (ports, op, ..) = stream.receive();
    assert_eq!((ports.0, op), (5000, 1));
    stream.control(ports, 2, 0);
    assert_eq!(stream.receive(), (ports, 5, 0, b"question".to_vec()));
    stream.send(Packet { ports, op: 5, flags: 0, taken: 8, payload: b"answer" });
    former.read_exact(&mut [0; 6]).unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(b"server").unwrap();
    let held = Arc::new(());
    let to = Successor { stream: ours, word: b'+', held: held.clone() };
    stream.handle.hand_over(name, former, to).unwrap();
    assert_eq!(stream.receive(), (ports, 5, 0, b"+".to_vec()), "the word comes first");
    assert_eq!(stream.receive(), (ports, 5, 0, b"server".to_vec()));
    stream.send(Packet { ports, op: 5, flags: 0, taken: 15, payload: b"guest" });
    let mut got = [0; 5];
    theirs.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"guest");
    // Each direction ends by itself, as before.
    theirs.shutdown(Shutdown::Write).unwrap();
    assert_eq!(stream.receive(), (ports, 4, 2, vec![]));
    stream.send(Packet { ports, op: 5, flags: 0, taken: 15, payload: b"still" });
    theirs.read_exact(&mut got).unwrap();
    assert_eq!((&got, Arc::strong_count(&held)), (b"still", 2));
    stream.control(ports, 4, 3);
    assert_eq!(stream.receive(), (ports, 3, 0, vec![]));
    assert_eq!(theirs.read(&mut got).unwrap(), 0);
    wait_for(&stream.metrics.closed, 1);
    await_let_go(&held);
}

/// The device's thread lets go of what was held for a stream once it has closed that.
fn await_let_go(held: &Arc<()>) {
    let until = Instant::now() + Duration::from_secs(10);
    while Arc::strong_count(held) > 1 && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(Arc::strong_count(held), 1, "what was held for it is let go");
}

#[test]
fn what_cannot_be_handed_over_is_closed() {
    let mut stream = vsock();
    let held = Arc::new(());
    let end = || {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Successor { stream: ours, word: b'+', held: held.clone() }, theirs)
    };
    // One that the guest has not accepted, and one that it has reset.
    let (former, name) = stream.handle.open(5000).unwrap();
    let (ports, ..) = stream.receive();
    let (to, mut theirs) = end();
    stream.handle.hand_over(name, former, to).unwrap();
    assert_eq!(theirs.read(&mut [0; 1]).unwrap(), 0);
    stream.control(ports, 3, 0);
    let (former, name) = stream.handle.open(5000).unwrap();
    let ports = loop {
        let (ports, op, ..) = stream.receive();
        if op == 1 {
            break ports;
        }
    };
    stream.control(ports, 2, 0);
    stream.control(ports, 3, 0);
    wait_for(&stream.metrics.closed, 2);
    let (to, mut theirs) = end();
    stream.handle.hand_over(name, former, to).unwrap();
    assert_eq!(theirs.read(&mut [0; 1]).unwrap(), 0);
    wait_for(&stream.metrics.refused, 2);
    await_let_go(&held);
}
