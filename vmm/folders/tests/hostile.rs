//! Bytes no client would send: an error that names what is wrong, never a
//! panic, never a wait.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::time::Duration;

use common::*;
use exocell_folders::{FolderError, Limits, MSIZE_MAX, Rights};
use proptest::prelude::*;

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("file"), "hello").unwrap();
    dir
}

/// Sends `bytes` after a proper start and returns how the server ends.
fn end_after(bytes: &[u8]) -> Result<(), FolderError> {
    let dir = folder();
    let mut guest = mount(dir.path(), Rights::READ_WRITE);
    finish(&mut guest, bytes);
    guest.server.take().unwrap().join().expect("the server panicked")
}

fn finish(guest: &mut Guest, bytes: &[u8]) {
    guest.stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut reader = guest.stream.try_clone().unwrap();
    let drain = std::thread::spawn(move || reader.read_to_end(&mut Vec::new()));
    let _ = guest.stream.write_all(bytes);
    let _ = guest.stream.shutdown(std::net::Shutdown::Write);
    let _ = drain.join();
}

fn error_of(bytes: &[u8]) -> String {
    end_after(bytes).unwrap_err().to_string()
}

#[test]
fn sizes_that_lie_end_the_connection() {
    for size in [0u32, 1, 6, 65537, MSIZE_MAX + 1, u32::MAX] {
        let bytes = [size.to_le_bytes().as_slice(), &[120, 7, 0, 0, 0, 0, 0]].concat();
        assert!(error_of(&bytes).contains(&format!("a message of {size} bytes")));
    }
    let long = [100u32.to_le_bytes().as_slice(), &[120, 7, 0, 1, 0, 0, 0]].concat();
    assert!(matches!(end_after(&long), Err(FolderError::Cut)));
}

#[test]
fn each_malformed_field_is_named() {
    let write = Msg::new().u32(0).u64(0).u32(u32::MAX).u8(1).frame(118, 1);
    assert!(error_of(&write).contains("Twrite whose count"));
    let walk = Msg::new().u32(0).u32(1).u16(17).frame(110, 1);
    assert!(error_of(&walk).contains("Twalk whose nwname"));
    let name = Msg::new().u32(0).u16(500).u8(b'a').frame(72, 1);
    assert!(error_of(&name).contains("Tmkdir whose name"));
    let version = Msg::new().u32(4095).s("9P2000.L").frame(100, 1);
    assert!(error_of(&version).contains("Tversion whose msize"));
    let more = Msg::new().u32(0).u8(0).frame(120, 1);
    assert!(error_of(&more).contains("Tclunk whose size"));
}

/// A message of each number with enough fields, cut at every length.
#[test]
fn every_message_cut_anywhere_is_refused() {
    let numbers = [
        8u8, 12, 14, 16, 18, 20, 22, 24, 26, 30, 32, 40, 50, 52, 54, 70, 72, 74, 76, 100, 102, 104,
        108, 110, 116, 118, 120, 122,
    ];
    for number in numbers {
        let error = error_of(&Msg::new().u8(0).frame(number, 1));
        assert!(error.contains("malformed"), "{number}: {error}");
        let error = error_of(&Msg(vec![0; 1000]).frame(number, 1));
        assert!(error.contains("malformed"), "{number}: {error}");
    }
}

#[test]
fn the_agreed_size_holds() {
    let dir = folder();
    let mut guest = start(dir.path(), Rights::READ_WRITE, Limits::default());
    guest.version(4096).unwrap();
    guest.attach(0).unwrap();
    finish(&mut guest, &Msg(vec![0; 5000]).frame(118, 1));
    assert!(guest.server_error().contains("allowed are 7 to 4096"));
}

/// A message that parses, with numbers that are often those of live fids.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let number = prop::sample::select(vec![
        8u8, 12, 14, 16, 18, 20, 22, 24, 26, 30, 32, 40, 50, 52, 54, 70, 72, 74, 76, 100, 104, 108,
        110, 116, 118, 120, 122,
    ]);
    let word = prop_oneof![0u32..6, any::<u32>()];
    let name =
        prop_oneof![Just("file".to_string()), Just("d".into()), Just("..".into()), "[a-c/.]{0,3}"];
    (number, prop::collection::vec(word, 12), prop::collection::vec(name, 3), any::<u64>())
        .prop_map(shape)
}

fn shape((number, w, n, long): (u8, Vec<u32>, Vec<String>, u64)) -> Vec<u8> {
    let m = Msg::new().u32(w[0]);
    let offset = if long % 2 == 0 { long % 4096 } else { long };
    let m = match number {
        8 | 22 | 120 | 122 => m,
        12 | 50 => m.u32(w[1]),
        14 => m.s(&n[0]).u32(w[1]).u32(w[2]).u32(0),
        16 => m.s(&n[0]).s(&n[1]).u32(0),
        18 => m.s(&n[0]).u32(w[1]).u32(0).u32(0).u32(0),
        20 | 70 => m.u32(w[1]).s(&n[0]),
        24 => m.u64(long),
        26 => m
            .u32(w[1] & 0x1bf)
            .u32(w[2])
            .u32(w[3])
            .u32(w[4])
            .u64(offset % (1 << 20))
            .u64(long)
            .u64(7)
            .u64(long)
            .u64(offset),
        30 => m.u32(w[1]).s(&n[0]),
        32 => m.s(&n[0]).u64(long).u32(0),
        40 | 116 => m.u64(offset).u32(w[1]),
        52 => m.u8(1).u32(0).u64(long).u64(long).u32(0).s(&n[0]),
        54 => m.u8(1).u64(long).u64(long).u32(0).s(&n[0]),
        72 => m.s(&n[0]).u32(w[1]).u32(0),
        74 => m.s(&n[0]).u32(w[1]).s(&n[1]),
        76 => m.s(&n[0]).u32(if w[1] % 2 == 0 { 0 } else { 0x200 }),
        100 => Msg::new().u32(w[0].max(4096)).s("9P2000.L"),
        104 => m.u32(u32::MAX).s("").s("").u32(0),
        108 => Msg::new().u16(1),
        110 => m.u32(w[1]).u16(2).s(&n[0]).s(&n[1]),
        _ => m.u64(offset % (1 << 20)).u32(2).u8(1).u8(2),
    };
    m.frame(number, 7)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic_it(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = end_after(&bytes);
    }

    #[test]
    fn random_bodies_never_panic_it(number: u8, body in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = end_after(&Msg(body).frame(number, 1));
    }

    /// Well-formed requests in any order: the server goes on to the end, and
    /// beside the folder nothing changes.
    #[test]
    fn random_requests_stay_inside(messages in prop::collection::vec(message(), 1..60)) {
        let outer = tempfile::tempdir().unwrap();
        let shared = outer.path().join("shared");
        fs::create_dir_all(shared.join("d")).unwrap();
        fs::write(shared.join("file"), "hello").unwrap();
        fs::write(outer.path().join("file"), "outside").unwrap();
        let mut guest = mount(&shared, Rights::READ_WRITE);
        finish(&mut guest, &messages.concat());
        let end = guest.server.take().unwrap().join().expect("the server panicked");
        prop_assert!(end.is_ok(), "{end:?}");
        prop_assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 2);
        prop_assert_eq!(fs::read(outer.path().join("file")).unwrap(), b"outside");
    }
}
