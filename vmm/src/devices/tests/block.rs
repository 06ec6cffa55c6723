//! A disk, and the transport seen through it, behind real sockets.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::guest::*;
use crate::devices::*;

const READ: u32 = 0;
const WRITE_OUT: u32 = 1;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const STATUS: u64 = BUFFERS + 0x8000;

struct Disk {
    guest: Guest,
    metrics: Arc<BlockMetrics>,
    file: File,
    _loop: Running,
    _folder: tempfile::TempDir,
}

fn disk(read_only: bool) -> Disk {
    let file = tempfile::tempfile().unwrap();
    file.set_len(64 * 512).unwrap();
    disk_on(file, read_only)
}

fn disk_on(file: File, read_only: bool) -> Disk {
    disk_with(file, read_only, None)
}

fn disk_with(file: File, read_only: bool, windows: Option<Windows>) -> Disk {
    let folder = tempfile::tempdir().unwrap();
    let (listener, path) = listen(&folder);
    let memory = memory_file(true);
    let mut devices = DeviceLoop::new(&memory).unwrap();
    let config = BlockConfig {
        contents: file.try_clone().unwrap().into(),
        read_only,
        id: "serial".into(),
        windows: windows.clone(),
    };
    let metrics = devices.add_block(listener, config).unwrap();
    let running = Running::new(devices);
    let guest = Guest::start(&path, &memory, 1);
    Disk { guest, metrics, file, _loop: running, _folder: folder }
}

impl Disk {
    /// One request with one data buffer; its status byte.
    fn request(&mut self, kind: u32, sector: u64, data: (u64, u32, u16)) -> u8 {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        self.guest.mem.write_slice(&header, GuestAddress(BUFFERS)).unwrap();
        self.guest.mem.write_obj(0xff_u8, GuestAddress(STATUS)).unwrap();
        self.guest.offer(0, &[(BUFFERS, 16, 0), data, (STATUS, 1, WRITE)]);
        self.guest.used(0);
        self.guest.bytes(STATUS, 1)[0]
    }
}

#[test]
fn a_disk_reads_writes_and_discards() {
    let mut disk = disk(false);
    let data = BUFFERS + 0x1000;
    assert_eq!(u64::from_le_bytes(disk.guest.config(8).try_into().unwrap()), 64);
    disk.guest.mem.write_slice(&[7; 1024], GuestAddress(data)).unwrap();
    assert_eq!(disk.request(WRITE_OUT, 2, (data, 1024, 0)), 0);
    let mut found = [0; 2048];
    std::os::unix::fs::FileExt::read_exact_at(&disk.file, &mut found, 512).unwrap();
    assert!(found[..512].iter().chain(&found[1536..]).all(|byte| *byte == 0));
    assert!(found[512..1536].iter().all(|byte| *byte == 7));
    assert_eq!(disk.request(READ, 3, (data + 0x1000, 512, WRITE)), 0);
    assert_eq!(disk.guest.bytes(data + 0x1000, 512), [7; 512]);
    assert_eq!(disk.request(GET_ID, 0, (data, 20, WRITE)), 0);
    assert_eq!(disk.guest.bytes(data, 8), b"serial\0\0");
    let erase = [2_u64.to_le_bytes(), 2_u64.to_le_bytes()].concat();
    disk.guest.mem.write_slice(&erase, GuestAddress(data)).unwrap();
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
    disk.guest.mem.write_slice(&[7; 512], GuestAddress(BUFFERS + 0x1000)).unwrap();
    assert_eq!(disk.request(WRITE_OUT, 0, (BUFFERS + 0x1000, 512, 0)), 1);
    assert_eq!(disk.request(DISCARD, 0, (BUFFERS + 0x1000, 0, 0)), 1);
    assert_eq!(disk.request(READ, 0, (BUFFERS + 0x1000, 512, WRITE)), 0);
    assert_eq!(disk.guest.bytes(BUFFERS + 0x1000, 512), [0; 512]);
}

#[test]
fn files_come_and_go_behind_a_disk_that_stays() {
    let (windows, file) = (Windows::default(), tempfile::tempfile().unwrap());
    file.set_len(4 * 512).unwrap();
    let mut disk = disk_with(file, true, Some(windows.clone()));
    let sector = |window: u64, sector: u64| (window << 40) / 512 + sector;
    let data = BUFFERS + 0x1000;
    let size = u64::from_le_bytes(disk.guest.config(8).try_into().unwrap());
    assert_eq!(size, sector(1 << 22, 0));
    assert_eq!(disk.request(READ, 3, (data, 512, WRITE)), 0);
    // Behind its own file, and where no file is yet.
    assert_eq!(disk.request(READ, 4, (data, 512, WRITE)), 1);
    assert_eq!(disk.request(READ, sector(1, 0), (data, 512, WRITE)), 1);
    let mut other = tempfile::tempfile().unwrap();
    other.write_all(&[5; 1024]).unwrap();
    let window = windows.open(other).unwrap();
    assert_eq!(window.offset_bytes, 1 << 40);
    assert_eq!(disk.request(READ, sector(1, 0), (data, 1024, WRITE)), 0);
    assert_eq!(disk.guest.bytes(data, 1024), [5; 1024]);
    assert_eq!(disk.request(READ, sector(1, 1), (data, 1024, WRITE)), 1);
    assert_eq!(disk.request(READ, sector(1, 0) - 1, (data, 1024, WRITE)), 1);
    assert_eq!(disk.request(WRITE_OUT, sector(1, 0), (data, 512, 0)), 1);
    assert_eq!(disk.request(READ, size - 1, (data, 1024, WRITE)), 1);
    drop(window);
    assert_eq!(disk.request(READ, sector(1, 0), (data, 512, WRITE)), 1);
    assert_eq!(disk.request(READ, 0, (data, 512, WRITE)), 0);
}

#[test]
fn pieces_of_several_files_are_one_disk() {
    let filled = |byte: u8| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[byte; 4 * 512]).unwrap();
        file
    };
    let files = || vec![filled(1), filled(2)];
    let pieces = vec![(0, 0), (512, 1), (1024 + 256, 0)];
    let windows = Windows::default();
    let file = tempfile::tempfile().unwrap();
    file.set_len(512).unwrap();
    let mut disk = disk_with(file, true, Some(windows.clone()));
    let contents = Contents::pieced(files(), pieces, 3 * 512).unwrap();
    let window = windows.open(contents).unwrap();
    assert_eq!(window.length_bytes, 3 * 512);
    let (data, first) = (BUFFERS + 0x1000, (1 << 40) / 512);
    assert_eq!(disk.request(READ, first, (data, 3 * 512, WRITE)), 0);
    let shown = disk.guest.bytes(data, 3 * 512);
    assert_eq!(shown, [vec![1; 512], vec![2; 768], vec![1; 256]].concat());
    assert_eq!(disk.request(READ, first + 2, (data, 1024, WRITE)), 1);
    assert_eq!(disk.request(WRITE_OUT, first, (data, 512, 0)), 1);
    for bad in [vec![], vec![(1, 0)], vec![(0, 2)], vec![(0, 0), (0, 1)]] {
        assert!(Contents::pieced(files(), bad, 512).is_err());
    }
}

#[test]
fn a_file_without_a_sector_is_no_disk() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(511).unwrap();
    let config =
        BlockConfig { contents: file.into(), read_only: false, id: String::new(), windows: None };
    let refused = block::Block::new(config, Arc::default());
    assert!(matches!(refused, Err(DeviceError::DiskTooSmall { bytes: 511 })));
}

#[test]
fn a_failing_host_file_is_an_error_of_the_guest() {
    // A file the host lets nobody write stands in for a full disk.
    let mut sealed = disk_on(memory_file(true), false);
    let seal = FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE);
    fcntl(&sealed.file, seal).unwrap();
    let data = BUFFERS + 0x1000;
    assert_eq!(sealed.request(WRITE_OUT, 0, (data, 512, 0)), 1);
    let erase = [0_u64.to_le_bytes(), 8_u64.to_le_bytes()].concat();
    sealed.guest.mem.write_slice(&erase, GuestAddress(data)).unwrap();
    assert_eq!(sealed.request(DISCARD, 0, (data, 16, 0)), 1);
    assert_eq!(sealed.request(READ, 0, (data, 512, WRITE)), 0);
    // A file that has shrunk fails where its end is now, and only there.
    let mut disk = disk(false);
    disk.file.set_len(512).unwrap();
    assert_eq!(disk.request(READ, 8, (data, 512, WRITE)), 1);
    assert_eq!(disk.request(READ, 0, (data, 512, WRITE)), 0);
}

#[test]
fn malformed_chains_come_back_unused() {
    let mut disk = disk(false);
    let outside = BASE - 0x1000;
    disk.guest.offer(0, &[(outside, 16, 0), (STATUS, 1, WRITE)]);
    assert_eq!(disk.guest.used(0), 0);
    disk.guest.offer(0, &[(BASE + SIZE - 8, 16, 0), (STATUS, 1, WRITE)]);
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
    assert_eq!(disk.guest.set_region(&file, [BASE, SIZE + 0x1000, BASE, BASE]), 1);
    assert_eq!(disk.guest.set_region(&file, [BASE + 1, SIZE, BASE, BASE]), 1);
    assert_eq!(disk.guest.set_addresses(0, BASE), 1, "no memory any more");
    assert_eq!(disk.guest.set_memory(&file), 0);
    assert_eq!(disk.guest.set_addresses(0, BASE + SIZE - 0x400), 1);
    assert_eq!(disk.guest.set_addresses(7, BASE), 1);
    let plain = tempfile::tempfile().unwrap();
    assert_eq!(disk.guest.set(13, &0_u64.to_le_bytes(), &[plain.as_raw_fd()]), 1);
    // A regular file cannot be a doorbell: no event loop can watch it.
    assert_eq!(disk.guest.set(12, &0_u64.to_le_bytes(), &[plain.as_raw_fd()]), 0);
    wait_for(&disk.metrics.transport.control_faults, 8);
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// The loop still stops when told to, which it does at the end of `disk`.
    #[test]
    fn random_messages_hurt_no_loop(
        messages in prop::collection::vec(
            (0..45_u32, prop::collection::vec(prop_oneof![Just(0), any::<u8>()], 0..64)), 1..40,
        ),
    ) {
        let mut disk = disk(false);
        let memory = disk.guest.file().try_clone().unwrap();
        for (request, payload) in messages {
            let fds = [memory.as_raw_fd()];
            let fds = if request % 2 == 0 { &fds[..0] } else { &fds[..] };
            disk.guest.send(request, &payload, fds, request % 3 == 0);
        }
        disk.guest.offer(0, &[(BUFFERS, 16, 0), (STATUS, 1, WRITE)]);
    }
}

#[test]
fn memory_that_could_shrink_is_refused() {
    let refused = DeviceLoop::new(&memory_file(false)).err().unwrap();
    assert!(refused.to_string().contains("F_SEAL_SHRINK"), "{refused}");
}
