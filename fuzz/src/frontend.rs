//! A vhost-user frontend in a few lines: the guest kernel's side of one device,
//! honest or not, with split rings of 16 entries.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::Duration;

use exocell_vmm::devices::{DeviceLoop, DeviceStop};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

/// Bytes of guest memory, which starts at 0.
pub const MEMORY_BYTES: u64 = 1 << 20;
/// Rings lie below, one page each; buffers from here on.
pub const BUFFERS: u64 = 0x1_0000;
/// Entries of a ring.
pub const ENTRIES: u16 = 16;
/// Longer than a device may take for any one message.
const PATIENCE: Duration = Duration::from_secs(20);

/// vhost-user requests (the specification's front-end message types).
mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
}

/// A device loop on a thread of its own, with the one device that `add` puts
/// behind the socket. A panic in it is one of [`Frontend::finish`].
pub struct Frontend {
    control: UnixStream,
    pub memory: File,
    kicks: Vec<EventFd>,
    stop: DeviceStop,
    thread: JoinHandle<()>,
}

impl Frontend {
    pub fn connect(add: impl FnOnce(&mut DeviceLoop, UnixListener)) -> Self {
        let memory = memfd_create("guest", MFdFlags::MFD_ALLOW_SEALING).expect("a memory file");
        nix::unistd::ftruncate(&memory, MEMORY_BYTES as i64).expect("its size");
        fcntl(&memory, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).expect("its seal");
        let memory = File::from(memory);
        let folder = tempfile::tempdir().expect("a temporary directory");
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).expect("a socket");
        let mut devices = DeviceLoop::new(&memory).expect("a device loop");
        add(&mut devices, listener);
        let stop = devices.stop_handle();
        let thread = std::thread::spawn(move || devices.run().expect("the loop runs"));
        let control = UnixStream::connect(&path).expect("a connection");
        control.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        control.set_write_timeout(Some(PATIENCE)).expect("a time limit");
        Self { control, memory, kicks: Vec::new(), stop, thread }
    }

    /// Sends one message, as wrong as it may be; false when nobody listens.
    pub fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[RawFd]) -> bool {
        let words = [request, flags, payload.len() as u32];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(payload);
        let rights = [ControlMessage::ScmRights(fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights };
        let parts = [IoSlice::new(&bytes)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        sendmsg::<()>(self.control.as_raw_fd(), &parts, rights, flags, None).is_ok()
    }

    fn ask(&mut self, request: u32, payload: &[u8]) -> u64 {
        self.send(request, 1, payload, &[]);
        let mut header = [0; 12];
        self.control.read_exact(&mut header).expect("an answer");
        let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        let mut number = [0; 8];
        let wanted = &mut number[..(length as usize).min(8)];
        self.control.read_exact(wanted).expect("an answer");
        u64::from_le_bytes(number)
    }

    /// Negotiates all that is offered, shares the memory and starts `queues`
    /// rings, as an honest driver does.
    pub fn start(&mut self, queues: u16) {
        self.send(request::SET_OWNER, 1, &[], &[]);
        let features = self.ask(request::GET_FEATURES, &[]);
        let protocol = self.ask(request::GET_PROTOCOL_FEATURES, &[]) & 1 << 9;
        self.send(request::SET_PROTOCOL_FEATURES, 1, &protocol.to_le_bytes(), &[]);
        self.send(request::SET_FEATURES, 1, &features.to_le_bytes(), &[]);
        self.send(request::SET_MEM_TABLE, 1, &region(), &[self.memory.as_raw_fd()]);
        for index in 0..queues {
            self.start_ring(index);
        }
    }

    fn start_ring(&mut self, index: u16) {
        let kick = EventFd::new().expect("an event");
        self.send(request::SET_VRING_NUM, 1, &state(index, ENTRIES.into()), &[]);
        self.send(request::SET_VRING_BASE, 1, &state(index, 0), &[]);
        let mut addresses = state(index, 0);
        let base = ring_at(index);
        for part in [base, base + 0x400, base + 0x200, u64::MAX] {
            addresses.extend(part.to_le_bytes());
        }
        self.send(request::SET_VRING_ADDR, 1, &addresses, &[]);
        let number = u64::from(index).to_le_bytes();
        self.send(request::SET_VRING_KICK, 1, &number, &[kick.as_raw_fd()]);
        self.send(request::SET_VRING_ENABLE, 1, &state(index, 1), &[]);
        self.kicks.push(kick);
    }

    /// Rings every doorbell and waits until the device has answered a message
    /// that came after.
    pub fn kick_all(&mut self) {
        for kick in &self.kicks {
            kick.write(1).expect("an event");
        }
        for index in 0..self.kicks.len() as u16 {
            self.ask(request::GET_VRING_BASE, &state(index, 0));
        }
    }

    /// Writes into guest memory.
    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at).expect("guest memory");
    }

    /// Hangs up, and waits for the device to do the same and for the loop.
    pub fn finish(mut self) {
        let _ = self.control.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        if let Err(error) = self.control.read_to_end(&mut rest) {
            let expected = std::io::ErrorKind::ConnectionReset;
            assert_eq!(error.kind(), expected, "the device does not hang up");
        }
        self.stop.stop();
        self.thread.join().expect("the device loop does not panic");
    }
}

/// Where ring `index` lies.
pub fn ring_at(index: u16) -> u64 {
    0x1000 * u64::from(index)
}

/// A memory table of one region: all of it, at 0.
pub fn region() -> Vec<u8> {
    let words = [1, 0, MEMORY_BYTES, 0, 0_u64];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A vring state: two numbers.
pub fn state(index: u16, number: u32) -> Vec<u8> {
    [u32::from(index), number].iter().flat_map(|word| word.to_le_bytes()).collect()
}
