//! The devices of a `vm` cell: vhost-user messages, rings of descriptors, and
//! vsock packets from a hostile guest kernel.

use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, channel};

use exocell_vmm::devices::{
    BlockConfig, ConsoleConfig, DeviceLoop, VsockConfig, VsockHandle, VsockListener, Windows,
};
use nix::sys::eventfd::EventFd;

use crate::Input;
use crate::frontend::{BUFFERS, ENTRIES, Frontend, MEMORY_BYTES, region, ring_at, state};

/// A descriptor's flags (virtio 1.2, 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// The host port that takes streams.
const PORT: u32 = 1024;
/// How many such ports there are.
const PORTS: u32 = 4;
/// Bytes of a vsock header, and of the slot each packet lies in.
const HEADER_BYTES: u32 = 44;
const SLOT_BYTES: u64 = 512;

/// Puts the device that `choice` names behind `listener`.
fn add(devices: &mut DeviceLoop, listener: UnixListener, choice: u8) {
    match choice % 4 {
        0 => {
            let file = tempfile::tempfile().expect("a disk");
            file.set_len(1 << 20).expect("its size");
            let config = BlockConfig {
                contents: file.into(),
                read_only: choice & 4 != 0,
                id: "disk".to_owned(),
                windows: (choice & 8 != 0).then(windows),
            };
            drop(devices.add_block(listener, config).expect("a disk"));
        }
        1 => {
            let sink = Box::new(std::io::sink());
            let config = ConsoleConfig { sink, output_bytes_max: 1000, input: None };
            drop(devices.add_console(listener, config).expect("a console"));
        }
        2 => drop(devices.add_rng(listener).expect("entropy")),
        _ => drop(add_vsock(devices, listener)),
    }
}

/// One that has a file, and one that has none any more.
fn windows() -> Windows {
    let windows = Windows::default();
    for is_kept in [true, false] {
        let file = tempfile::tempfile().expect("a disk");
        file.set_len(1 << 16).expect("its size");
        let window = windows.open(file).expect("a window");
        if is_kept {
            std::mem::forget(window);
        }
    }
    windows
}

/// How many rings the device that `choice` names has.
fn queues(choice: u8) -> u16 {
    [1, 2, 1, 3][usize::from(choice % 4)]
}

/// A vsock device, and the streams that the guest opens from [`PORT`] on.
fn add_vsock(
    devices: &mut DeviceLoop,
    listener: UnixListener,
) -> (VsockHandle, Receiver<UnixStream>) {
    let (opened, streams) = channel();
    // Each takes one stream.
    let listen = |port| -> (u32, VsockListener) {
        let opened = opened.clone();
        (port, Box::new(move |stream| drop(opened.send(stream))))
    };
    let listeners = (PORT..PORT + PORTS).map(listen).collect();
    let config = VsockConfig { listeners, connections_max: 4 };
    (devices.add_vsock(listener, config).expect("vsock").0, streams)
}

/// A device's number, then messages: request, flags, what is attached, length,
/// payload.
pub fn messages(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choice = input.u8();
    let front = Frontend::connect(|devices, listener| add(devices, listener, choice));
    let event = EventFd::new().expect("an event");
    for _ in 0..64 {
        if input.is_empty() {
            break;
        }
        let (request, flags, attached) = (input.u8(), input.u8(), input.u8());
        let length = usize::from(input.u8());
        let payload = input.take(length);
        let file = if attached & 1 == 0 { front.memory.as_raw_fd() } else { event.as_raw_fd() };
        let files = [file; 3];
        let files = &files[..usize::from(attached >> 1) % 4];
        // Most inputs should get past the version.
        let flags = u32::from(flags) ^ 1;
        if !front.send(u32::from(request), flags, payload, files) {
            break;
        }
    }
    front.finish();
}

/// The set-up of an honest driver, as `messages` reads it.
pub fn message_seeds() -> Vec<Vec<u8>> {
    (0..4).map(|device| [vec![device], honest(queues(device))].concat()).collect()
}

fn honest(queues: u16) -> Vec<u8> {
    let number = |value: u64| value.to_le_bytes().to_vec();
    let message = |request: u8, attached: u8, payload: &[u8]| {
        [&[request, 0, attached, payload.len() as u8][..], payload].concat()
    };
    let mut all = vec![
        message(3, 0, &[]),
        message(1, 0, &[]),
        message(15, 0, &[]),
        message(16, 0, &number(1 << 9)),
        message(2, 0, &number(1 << 32 | 1 << 30)),
        message(5, 2, &region()),
        message(24, 0, &[&[0; 4][..], &[8, 0, 0, 0], &[0; 12]].concat()),
    ];
    for index in 0..queues {
        let base = ring_at(index);
        let parts = [base, base + 0x400, base + 0x200, u64::MAX];
        let parts = parts.iter().flat_map(|part| part.to_le_bytes());
        let addresses: Vec<u8> = state(index, 0).into_iter().chain(parts).collect();
        all.extend([
            message(8, 0, &state(index, ENTRIES.into())),
            message(10, 0, &state(index, 0)),
            message(9, 0, &addresses),
            message(12, 3, &number(index.into())),
            message(13, 3, &number(index.into())),
            message(18, 0, &state(index, 1)),
            message(11, 0, &state(index, 0)),
        ]);
    }
    all.concat()
}

/// A device's number, 16 descriptors of 6 bytes, the ring of what is available,
/// and what lies in the buffers.
pub fn rings(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choice = input.u8();
    let mut front = Frontend::connect(|devices, listener| add(devices, listener, choice));
    let queues = queues(choice);
    front.start(queues);
    let table: Vec<u8> = (0..ENTRIES).flat_map(|_| descriptor(&mut input)).collect();
    let count = u16::from(input.u8());
    let heads = (0..ENTRIES).flat_map(|_| u16::from(input.u8() % 20).to_le_bytes());
    let available: Vec<u8> =
        [0, 0].into_iter().chain(count.to_le_bytes()).chain(heads.collect::<Vec<_>>()).collect();
    for index in 0..queues {
        front.put(ring_at(index), &table);
        front.put(ring_at(index) + 0x200, &available);
    }
    front.put(BUFFERS, input.take(0x8000));
    front.kick_all();
    front.finish();
}

/// An address and a length, mostly within memory, flags and the next index.
fn descriptor(input: &mut Input<'_>) -> Vec<u8> {
    let (address, length) = (u64::from(input.u16()), u32::from(input.u16()));
    let (flags, next) = (u16::from(input.u8() & 7), u16::from(input.u8() % 20));
    let address = match address {
        0xffff => u64::MAX - 7,
        0xfff0..0xffff => MEMORY_BYTES - (0xffff - address),
        inside => BUFFERS + inside,
    };
    let length = if length == 0xffff { u32::MAX } else { length };
    raw_descriptor(address, length, flags, next)
}

fn raw_descriptor(address: u64, length: u32, flags: u16, next: u16) -> Vec<u8> {
    let mut bytes = address.to_le_bytes().to_vec();
    bytes.extend(length.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(next.to_le_bytes());
    bytes
}

/// A read of one sector, a write of one, and a chain that runs in a circle.
pub fn ring_seeds() -> Vec<Vec<u8>> {
    let raw = |address: u16, length: u16, flags: u16, next: u8| {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend([flags as u8, next]);
        bytes
    };
    let chain = |data_flags: u16| {
        [raw(0, 16, NEXT, 1), raw(512, 512, NEXT | data_flags, 2), raw(16, 1, WRITE, 0)].concat()
    };
    let circle = [raw(0, 16, NEXT, 1), raw(64, 16, NEXT, 0)].concat();
    let with = |device: u8, descriptors: Vec<u8>, buffers: &[u8]| {
        let mut table = descriptors;
        table.resize(6 * usize::from(ENTRIES), 0);
        [&[device][..], &table, &[1], &[0; 16], buffers].concat()
    };
    let read = [0; 32];
    let mut write = read;
    write[0] = 1;
    vec![
        with(0, chain(WRITE), &read),
        with(0, chain(0), &write),
        with(1, raw(0, 64, 0, 0), b"to the console"),
        with(2, raw(0, 64, WRITE, 0), &[]),
        with(3, circle, &[]),
    ]
}

/// Packets of a guest that knows the protocol: per packet an operation, ports,
/// lengths and credit; streams that are accepted get an answer.
pub fn vsock(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut streams = None;
    let mut front = Frontend::connect(|devices, listener| {
        streams = Some(add_vsock(devices, listener));
    });
    let Some((handle, opened)) = streams else { return };
    front.start(3);
    // A stream from the host waits for the guest's answer.
    let dialled = handle.connect(7);
    let mut count = 0;
    let mut sent = Vec::new();
    while !input.is_empty() && count < ENTRIES {
        let at = BUFFERS + SLOT_BYTES * u64::from(count);
        let (packet, length) = packet(&mut input);
        front.put(at, &packet);
        sent.extend(raw_descriptor(at, length, 0, 0));
        count += 1;
    }
    let received = (0..ENTRIES).flat_map(|index| {
        raw_descriptor(2 * BUFFERS + 0x1000 * u64::from(index), 0x1000, WRITE, 0)
    });
    front.put(ring_at(0), &received.collect::<Vec<_>>());
    front.put(ring_at(0) + 0x200, &available(ENTRIES));
    front.put(ring_at(1), &sent);
    front.put(ring_at(1) + 0x200, &available(count));
    front.kick_all();
    drop(dialled);
    front.finish();
    drop(opened);
}

/// `count` heads, in order.
fn available(count: u16) -> Vec<u8> {
    let words = [0, count].into_iter().chain(0..ENTRIES);
    words.flat_map(u16::to_le_bytes).collect()
}

/// A header and what follows it, and the length that its descriptor has.
fn packet(input: &mut Input<'_>) -> (Vec<u8>, u32) {
    let (operation, choice) = (input.u8(), input.u8());
    let (length, extra, flags) = (u32::from(input.u16()), u32::from(input.u16()), input.u8());
    let (buffer, taken) = (input.u32(), input.u32());
    let guest_port = u32::from(choice & 3);
    let host_port = if choice & 4 == 0 { PORT + guest_port } else { 7 };
    let kind = if choice & 0x80 == 0 { 1_u16 } else { u16::from(choice) };
    let mut bytes = [3_u64.to_le_bytes(), 2_u64.to_le_bytes()].concat();
    for word in [guest_port, host_port, length] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(kind.to_le_bytes());
    bytes.extend(u16::from(operation % 10).to_le_bytes());
    for word in [u32::from(flags), buffer, taken] {
        bytes.extend(word.to_le_bytes());
    }
    (bytes, HEADER_BYTES + extra % 1024)
}

/// A stream that is opened, used and closed; one that the host opened; nonsense.
pub fn vsock_seeds() -> Vec<Vec<u8>> {
    let step = |operation: u8, choice: u8, length: u16| {
        let mut bytes = vec![operation, choice];
        bytes.extend(length.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.push(if operation == 4 { 3 } else { 0 });
        bytes.extend(0x4_0000_u32.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        bytes
    };
    let talk = [step(1, 1, 0), step(5, 1, 100), step(6, 1, 0), step(4, 1, 0), step(3, 1, 0)];
    let answer = [step(2, 7, 0), step(5, 7, 10), step(7, 7, 0)];
    let nonsense = [step(9, 0x81, 3), step(5, 2, 400), step(1, 6, 0)];
    vec![talk.concat(), answer.concat(), nonsense.concat()]
}
