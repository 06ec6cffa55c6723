//! The console and the entropy device behind real sockets.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use vm_memory::{Bytes, GuestAddress};

use super::guest::*;
use crate::devices::*;

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
    let config =
        ConsoleConfig { sink: Box::new(sink.clone()), output_bytes_max: 8, input: Some(input) };
    let metrics = devices.add_console(listener, config).unwrap();
    let _running = Running::new(devices);
    let mut guest = Guest::start(&path, &memory, 2);
    keyboard.write_all(b"typed").unwrap();
    guest.offer(0, &[(BUFFERS, 64, WRITE)]);
    guest.mem.write_slice(b"hello world", GuestAddress(BUFFERS + 0x100)).unwrap();
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
    guest.offer(0, &[(BUFFERS, 100, WRITE), (BUFFERS + 0x1000, 0x10_0000, WRITE)]);
    assert_eq!(guest.used(0), 4096);
    assert!(guest.bytes(BUFFERS, 64).iter().any(|byte| *byte != 0));
    assert_eq!(guest.bytes(BUFFERS + 0x2000, 64), [0; 64]);
    guest.offer(0, &[(BUFFERS, 100, 0)]);
    assert_eq!(guest.used(0), 0);
    assert_eq!((metrics.bytes.get(), metrics.errors.get()), (4096, 1));
}
