//! A folder behind real sockets: FUSE requests in queues, and the end of access beside them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use event_manager::{EventManager, SubscriberOps};
use exocell_folders::{Descriptors, Folder, Limits, Owners, Rights, Server, What};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::guest::*;
use super::hostile::Nobody;
use super::rings::Written;
use crate::devices::fs::{END, Fs};
use crate::devices::transport::{Device, Io, Ring};
use crate::devices::*;

const REQUESTS: usize = 1;
/// Bytes of the heads of a request and of its answer.
const HEAD: u32 = 40;
const ANSWER_HEAD: u32 = 16;
/// Descriptors of a ring that is full.
const SLOTS: u16 = 16;

/// Asks by two buffers, and has the answer in two others; its error and its body.
fn ask(guest: &mut Guest, opcode: u32, node: u64, body: &[u8]) -> (i32, Vec<u8>) {
    let len = HEAD + body.len() as u32;
    let numbers = [len, opcode, 7, 0, node as u32, 0, 0, 0, 0, 0].map(u32::to_le_bytes).concat();
    guest.mem.write_slice(&numbers, GuestAddress(BUFFERS)).unwrap();
    guest.mem.write_slice(body, GuestAddress(BUFFERS + 0x100)).unwrap();
    let (out, rest) = (BUFFERS + 0x1000, BUFFERS + 0x2000);
    let request = [(BUFFERS, HEAD, 0), (BUFFERS + 0x100, body.len() as u32, 0)];
    let answer = [(out, ANSWER_HEAD, WRITE), (rest, 4096, WRITE)];
    guest.offer(REQUESTS, &[request, answer].concat());
    let written = guest.used(REQUESTS);
    let head = guest.bytes(out, ANSWER_HEAD as usize);
    let number = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap());
    assert_eq!(number(0), written, "the answer's own length");
    assert_eq!(number(8), 7, "whose answer it is");
    (number(4).cast_signed(), guest.bytes(rest, (written - ANSWER_HEAD) as usize))
}

#[test]
fn a_folder_is_read_until_its_end() {
    let place = tempfile::tempdir().unwrap();
    let shared = tempfile::tempdir().unwrap();
    std::fs::write(shared.path().join("f"), "content").unwrap();
    let (listener, path) = listen(&place);
    let memory = memory_file(true);
    let server = Server::new(Folder {
        what: What::Directory(std::fs::File::open(shared.path()).unwrap().into()),
        rights: Rights::READ_WRITE,
        owners: Owners::Host,
        limits: Limits::default(),
        descriptors: Descriptors::of_host().unwrap(),
        metrics: Arc::default(),
    });
    let (mut ours, control) = UnixStream::pair().unwrap();
    let left = Arc::new(AtomicUsize::new(0));
    let counted = left.clone();
    let gone = Box::new(move || {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    let config = FsConfig { server: server.unwrap(), tag: "folder7".to_owned(), control, gone };
    let mut devices = DeviceLoop::new(&memory).unwrap();
    devices.add_fs(listener, config).unwrap();
    let _running = Running::new(devices);
    let mut guest = Guest::start(&path, &memory, 2);
    let config = guest.config(40);
    assert_eq!((&config[..8], &config[36..]), (&b"folder7\0"[..], &[1, 0, 0, 0][..]));

    let greeting = [7, 45, 1 << 17, u32::MAX].map(u32::to_le_bytes).concat();
    assert_eq!(ask(&mut guest, 26, 0, &greeting).0, 0);
    let (error, entry) = ask(&mut guest, 1, 1, b"f\0");
    assert_eq!((error, entry.len()), (0, 128));
    let node = u64::from_le_bytes(entry[..8].try_into().unwrap());
    let (error, opened) = ask(&mut guest, 14, node, &[2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(error, 0);
    let transfer = |size: u32| [&opened[..8], &[0; 8], &size.to_le_bytes(), &[0; 20]].concat();
    assert_eq!(ask(&mut guest, 15, node, &transfer(100)), (0, b"content".to_vec()));
    let write = [&transfer(3)[..], b"CON"].concat();
    assert_eq!(ask(&mut guest, 16, node, &write).0, 0);
    assert_eq!(std::fs::read(shared.path().join("f")).unwrap(), b"CONtent");

    ours.write_all(&[END]).unwrap();
    ours.read_exact(&mut [0]).unwrap();
    assert_eq!(ask(&mut guest, 16, node, &write).0, -libc::EACCES);
    assert_eq!(ask(&mut guest, 1, 1, b"f\0").0, -libc::EACCES);
    assert_eq!(left.load(Ordering::SeqCst), 0);
    drop(ours);
    while left.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
}

/// A device that is told `word` before it looks at a ring full of requests; its folder's
/// counters, its socket, and whether it found the other end gone.
fn serve_told(word: Option<u8>) -> (Arc<exocell_folders::Metrics>, UnixStream, bool) {
    let dir = tempfile::tempdir().unwrap();
    let metrics = Arc::<exocell_folders::Metrics>::default();
    let server = Server::new(Folder {
        what: What::Directory(std::fs::File::open(dir.path()).unwrap().into()),
        rights: Rights::READ,
        owners: Owners::Host,
        limits: Limits::default(),
        descriptors: Descriptors::of_host().unwrap(),
        metrics: metrics.clone(),
    });
    let (mut ours, control) = UnixStream::pair().unwrap();
    const AT: u64 = 0x1000;
    let (left, is_gone) = std::sync::mpsc::channel();
    let gone = Box::new(move || left.send(()).unwrap());
    let config = FsConfig { server: server.unwrap(), tag: "t".to_owned(), control, gone };
    let mut device = Fs::new(config, Arc::default());
    let mem = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x2_0000)]).unwrap();
    // FUSE_INIT, again and again.
    let head = [40 + 24_u32, 26].map(u32::to_le_bytes).concat();
    mem.write_slice(&head, GuestAddress(AT)).unwrap();
    let body = [7_u32, 38].map(u32::to_le_bytes).concat();
    mem.write_slice(&body, GuestAddress(AT + 40)).unwrap();
    let written = Written::at(&mem, GuestAddress(0x1_0000), SLOTS);
    for chain in 0..SLOTS / 2 {
        let at = chain * 2;
        written.descriptor(at, Descriptor::new(AT, 64, 1, at + 1));
        written.descriptor(at + 1, Descriptor::new(0x4000, 256, WRITE, 0));
        written.offer(chain, at);
    }
    written.index(SLOTS / 2);
    let mut rings = vec![Ring::running(written.queue(), device.transport())];
    let mut manager = EventManager::<Nobody>::new().unwrap();
    let id = manager.add_subscriber(Nobody);
    let mut ops = manager.event_ops(id).unwrap();
    match word {
        Some(word) => ours.write_all(&[word]).unwrap(),
        None => ours.shutdown(std::net::Shutdown::Both).unwrap(),
    }
    device.queue_event(0, &mut Io { mem: &mem, rings: &mut rings, ops: &mut ops });
    (metrics, ours, is_gone.try_recv().is_ok())
}

#[test]
fn an_end_of_access_is_heard_before_what_the_guest_has_asked_already() {
    let (metrics, _ours, gone) = serve_told(Some(b'?'));
    assert_eq!((metrics.denials.load(Ordering::Relaxed), gone), (0, false));
    let (metrics, mut ours, gone) = serve_told(Some(END));
    assert_eq!((metrics.denials.load(Ordering::Relaxed), gone), (u64::from(SLOTS / 2), false));
    let mut word = [0];
    ours.read_exact(&mut word).unwrap();
    assert_eq!(word[0], END);
    assert!(serve_told(None).2, "the other end is gone");
}
