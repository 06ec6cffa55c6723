//! A frontend and driver in a few lines: vhost-user messages as virtio_uml sends
//! them, and split rings of 16 entries in a sealed memfd.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use crate::devices::metrics::Counter;
use crate::devices::{DeviceLoop, DeviceStop};

/// Where guest memory starts: like the guest kernel's, not at 0.
pub const BASE: u64 = 0x10_0000;
/// Bytes of guest memory.
pub const SIZE: u64 = 0x40_0000;
/// Where tests may put their buffers.
pub const BUFFERS: u64 = BASE + 0x1_0000;
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
const ENTRIES: u16 = 16;

/// A memory file of [`SIZE`] bytes at offset [`BASE`], sealed if `sealed`.
pub fn memory_file(sealed: bool) -> File {
    let file = memfd_create("guest", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&file, (BASE + SIZE) as i64).unwrap();
    if sealed {
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
    }
    File::from(file)
}

/// A loop on its own thread that is stopped when the test ends.
pub struct Running {
    stop: DeviceStop,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    pub fn new(devices: DeviceLoop) -> Self {
        let stop = devices.stop_handle();
        let thread = Some(std::thread::spawn(move || devices.run().unwrap()));
        Self { stop, thread }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A socket for a device in `folder`.
pub fn listen(folder: &tempfile::TempDir) -> (UnixListener, std::path::PathBuf) {
    let path = folder.path().join("s");
    (UnixListener::bind(&path).unwrap(), path)
}

/// One virtqueue, from the driver's side.
pub struct Queue {
    index: u16,
    base: u64,
    kick: EventFd,
    call: UnixStream,
    free: u16,
    offered: u16,
    seen: u16,
}

/// A connected frontend.
pub struct Guest {
    pub mem: GuestMemoryMmap,
    pub control: UnixStream,
    file: File,
    pub queues: Vec<Queue>,
}

impl Guest {
    /// Connects, negotiates and starts `queues` rings.
    pub fn start(path: &std::path::Path, file: &File, queues: u16) -> Self {
        let mut guest = Self::connect(path, file);
        assert_eq!(guest.set_memory(file), 0);
        for index in 0..queues {
            guest.start_queue(index);
        }
        guest
    }

    /// Connects and negotiates as `vhost_user_init` does.
    pub fn connect(path: &std::path::Path, file: &File) -> Self {
        let control = UnixStream::connect(path).unwrap();
        control.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let map = FileOffset::new(file.try_clone().unwrap(), BASE);
        let mem = [(GuestAddress(BASE), SIZE as usize, Some(map))];
        let mem = GuestMemoryMmap::from_ranges_with_files(mem).unwrap();
        let file = file.try_clone().unwrap();
        let mut guest = Self { mem, control, file, queues: Vec::new() };
        guest.send(3, &[], &[], false);
        let features = guest.ask(1);
        assert_ne!(features & 1 << 30, 0, "protocol features are offered");
        let protocol = guest.ask(15) & (1 | 1 << 3 | 1 << 9);
        guest.send(16, &protocol.to_le_bytes(), &[], false);
        assert_eq!(guest.set(2, &(features & !(1 << 29)).to_le_bytes(), &[]), 0);
        guest
    }

    /// Sends one message; `ack` asks for a reply.
    pub fn send(&mut self, request: u32, payload: &[u8], fds: &[RawFd], ack: bool) {
        let flags: u32 = if ack { 1 | 1 << 3 } else { 1 };
        let words = [request, flags, payload.len() as u32];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(payload);
        let rights = [ControlMessage::ScmRights(fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights };
        let parts = [IoSlice::new(&bytes)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        let _ = sendmsg::<()>(self.control.as_raw_fd(), &parts, rights, flags, None);
    }

    /// A request whose answer is one number.
    pub fn ask(&mut self, request: u32) -> u64 {
        self.send(request, &[], &[], false);
        self.number()
    }

    /// A request with acknowledgement; 0 is success.
    pub fn set(&mut self, request: u32, payload: &[u8], fds: &[RawFd]) -> u64 {
        self.send(request, payload, fds, true);
        self.number()
    }

    fn number(&mut self) -> u64 {
        let mut reply = [0; 20];
        self.control.read_exact(&mut reply).unwrap();
        u64::from_le_bytes(reply[12..].try_into().unwrap())
    }

    /// Reads the configuration space as `vhost_user_get_config` does.
    pub fn config(&mut self, size: u32) -> Vec<u8> {
        let mut payload: Vec<u8> =
            [0, size, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
        payload.resize(12 + size as usize, 0);
        self.send(24, &payload, &[], false);
        let mut reply = vec![0; 24 + size as usize];
        self.control.read_exact(&mut reply).unwrap();
        reply.split_off(24)
    }

    /// SET_MEM_TABLE with one region backed by `file`.
    pub fn set_memory(&mut self, file: &File) -> u64 {
        self.set_region(file, [BASE, SIZE, BASE, BASE])
    }

    /// SET_MEM_TABLE with this guest address, size, user address and offset.
    pub fn set_region(&mut self, file: &File, region: [u64; 4]) -> u64 {
        let mut payload = vec![1, 0, 0, 0, 0, 0, 0, 0];
        region.iter().for_each(|field| payload.extend(field.to_le_bytes()));
        self.set(5, &payload, &[file.as_raw_fd()])
    }

    fn state(index: u16, number: u32) -> Vec<u8> {
        [u32::from(index), number].iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// SET_VRING_ADDR for rings at `base`.
    pub fn set_addresses(&mut self, index: u16, base: u64) -> u64 {
        let mut payload = Self::state(index, 0);
        for part in [base, base + 0x400, base + 0x200, u64::MAX] {
            payload.extend(part.to_le_bytes());
        }
        self.set(9, &payload, &[])
    }

    fn start_queue(&mut self, index: u16) {
        let base = BASE + 0x1000 * u64::from(index);
        let kick = EventFd::new().unwrap();
        let (call, theirs) = UnixStream::pair().unwrap();
        call.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let number = u64::from(index).to_le_bytes();
        assert_eq!(self.set(13, &number, &[theirs.as_raw_fd()]), 0);
        assert_eq!(self.set(8, &Self::state(index, ENTRIES.into()), &[]), 0);
        assert_eq!(self.set(10, &Self::state(index, 0), &[]), 0);
        assert_eq!(self.set_addresses(index, base), 0);
        assert_eq!(self.set(12, &number, &[kick.as_raw_fd()]), 0);
        assert_eq!(self.set(18, &Self::state(index, 1), &[]), 0);
        self.queues.push(Queue { index, base, kick, call, free: 0, offered: 0, seen: 0 });
    }

    /// Writes descriptors (address, length, flags) as one chain and rings.
    pub fn offer(&mut self, queue: usize, chain: &[(u64, u32, u16)]) {
        let ring = &mut self.queues[queue];
        let head = ring.free;
        for (position, &(address, len, flags)) in chain.iter().enumerate() {
            let at = GuestAddress(ring.base + 16 * u64::from(ring.free));
            ring.free = (ring.free + 1) % ENTRIES;
            let last = position + 1 == chain.len();
            let flags = if last { flags } else { flags | NEXT };
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(ring.free.to_le_bytes());
            self.mem.write_slice(&bytes, at).unwrap();
        }
        let slot = ring.base + 0x200 + 4 + 2 * u64::from(ring.offered % ENTRIES);
        self.mem.write_obj(head, GuestAddress(slot)).unwrap();
        ring.offered = ring.offered.wrapping_add(1);
        self.set_available(queue, self.queues[queue].offered);
    }

    /// Writes the available index and rings.
    pub fn set_available(&mut self, queue: usize, index: u16) {
        let ring = &self.queues[queue];
        let at = GuestAddress(ring.base + 0x202);
        self.mem.store(index, at, std::sync::atomic::Ordering::Release).unwrap();
        ring.kick.write(1).unwrap();
    }

    /// Waits for the next used chain; its written length.
    pub fn used(&mut self, queue: usize) -> u32 {
        let ring = &mut self.queues[queue];
        let used = GuestAddress(ring.base + 0x402);
        let order = std::sync::atomic::Ordering::Acquire;
        while self.mem.load::<u16>(used, order).unwrap() == ring.seen {
            let mut interrupt = [0; 8];
            let what = format!("queue {} gets an interrupt", ring.index);
            ring.call.read_exact(&mut interrupt).expect(&what);
        }
        let at = ring.base + 0x404 + 8 * u64::from(ring.seen % ENTRIES);
        ring.seen = ring.seen.wrapping_add(1);
        self.mem.read_obj(GuestAddress(at + 4)).unwrap()
    }

    /// Another handle on the memory file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Copies bytes out of guest memory.
    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }
}

/// Waits until `counter` has reached `count`.
pub fn wait_for(counter: &Counter, count: u64) {
    let start = Instant::now();
    while counter.get() < count {
        assert!(start.elapsed() < Duration::from_secs(5), "counter stays at {}", counter.get());
        std::thread::sleep(Duration::from_millis(1));
    }
}
