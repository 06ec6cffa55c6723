//! 9P2000.L messages from a hostile guest, against a folder that may be
//! written.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use exocell_folders::{Folder, Limits, Rights, serve};

use crate::Input;

/// The largest message the guest may agree on, in bytes.
const MSIZE_MAX: u32 = 8192;
/// Longer than any input takes to be answered.
const PATIENCE: Duration = Duration::from_secs(20);

/// A list of messages: number, length, body. The first byte says whether an
/// honest version and attach come before them.
pub fn messages(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut wire = if input.u8() & 1 == 0 { greeting() } else { Vec::new() };
    while !input.is_empty() && wire.len() < 64 << 10 {
        let (number, length) = (input.u8(), input.u16());
        let body = input.take(usize::from(length));
        // Rarely, the size is not what it says.
        let size = if length == u16::MAX { u32::MAX } else { body.len() as u32 + 7 };
        wire.extend(message(number, size, body));
    }
    converse(&wire);
}

fn message(number: u8, size: u32, body: &[u8]) -> Vec<u8> {
    [&size.to_le_bytes()[..], &[number, 1, 0], body].concat()
}

/// Tversion and Tattach of fid 0.
fn greeting() -> Vec<u8> {
    let version = [&MSIZE_MAX.to_le_bytes()[..], &8_u16.to_le_bytes(), b"9P2000.L"].concat();
    let attach = [&0_u32.to_le_bytes()[..], &[0xff; 4], &[0; 8]].concat();
    [
        message(100, version.len() as u32 + 7, &version),
        message(104, attach.len() as u32 + 7, &attach),
    ]
    .concat()
}

fn converse(wire: &[u8]) {
    let outside = tempfile::tempdir().expect("a temporary directory");
    let inside = outside.path().join("folder");
    furnish(&inside);
    let (mut guest, host) = UnixStream::pair().expect("a socket pair");
    guest.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    let dir = fs::File::open(&inside).expect("the folder").into();
    let mut folder = Folder::new(dir, Rights::READ_WRITE, Arc::new(|| true));
    folder.limits = Limits { fids_max: 64, msize_max: MSIZE_MAX, ..Limits::default() };
    let server = std::thread::spawn(move || serve(folder, host));
    let reader = guest.try_clone().expect("a descriptor");
    let answers = std::thread::spawn(move || drain(reader));
    // The server may hang up first.
    let _ = guest.write_all(wire);
    let _ = guest.shutdown(std::net::Shutdown::Write);
    answers.join().expect("answers end in time");
    // A guest that breaks the protocol is an error, not a panic.
    let _ = server.join().expect("the server does not panic");
    let left: Vec<_> = fs::read_dir(outside.path()).expect("a directory").flatten().collect();
    assert_eq!(left.len(), 1, "nothing is made outside the folder: {left:?}");
}

fn furnish(folder: &Path) {
    fs::create_dir_all(folder.join("d")).expect("a directory");
    fs::write(folder.join("f"), "content").expect("a file");
    std::os::unix::fs::symlink("../..", folder.join("l")).expect("a link");
}

fn drain(mut from: UnixStream) {
    let mut buffer = [0; 4096];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("the server neither answers nor hangs up: {error}"),
        }
    }
}

/// Walks, opens, reads, creates, renames and removes.
pub fn seeds() -> Vec<Vec<u8>> {
    let fid = |number: u32| number.to_le_bytes().to_vec();
    let text = |word: &str| [&(word.len() as u16).to_le_bytes()[..], word.as_bytes()].concat();
    let walk = |from, to, name: &str| {
        (110, [fid(from), fid(to), 1_u16.to_le_bytes().to_vec(), text(name)].concat())
    };
    let clone = |from, to| (110, [fid(from), fid(to), vec![0, 0]].concat());
    let open = |number| (12, [fid(number), fid(2)].concat());
    let at = 0_u64.to_le_bytes().to_vec();
    let read = (116, [fid(1), at.clone(), fid(100)].concat());
    let write = (118, [fid(1), at.clone(), fid(3), b"new".to_vec()].concat());
    let list = (40, [fid(1), at, fid(1000)].concat());
    let attributes = (24, [fid(1), vec![0xff; 8]].concat());
    let create = (14, [fid(1), text("n"), fid(0x42), fid(0o644), fid(0)].concat());
    let rename = (74, [fid(0), text("f"), fid(0), text("g")].concat());
    let remove = (76, [fid(0), text("f"), fid(0)].concat());
    let make = (72, [fid(0), text("m"), fid(0o755), fid(0)].concat());
    let link = (16, [fid(0), text("s"), text("../x"), fid(0)].concat());
    let follow = (22, fid(1));
    let close = (120, fid(1));
    let conversations = [
        vec![walk(0, 1, "f"), open(1), read, write, attributes.clone(), close.clone()],
        vec![clone(0, 1), open(1), list, close.clone()],
        vec![clone(0, 1), create, close.clone(), make, rename, remove],
        vec![walk(0, 1, "l"), follow, walk(1, 2, ".."), close, link, walk(0, 1, ".."), attributes],
    ];
    conversations.iter().map(|list| encoded(list)).collect()
}

fn encoded(messages: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = vec![0];
    for (number, body) in messages {
        bytes.push(*number);
        bytes.extend((body.len() as u16).to_le_bytes());
        bytes.extend(body);
    }
    bytes
}
