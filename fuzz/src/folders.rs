//! FUSE messages from a hostile guest, against a folder that may be written.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use exocell_folders::{Descriptors, Folder, Limits, Owners, Rights, Server, What};
use exocell_vmm::devices::fs::Message;

use crate::Input;

/// Room for the answer to each message.
const ROOM: usize = 8192;
/// Where a message's body begins.
const HEAD_LEN: usize = 40;

/// A list of messages: operation, node, length, body. The first byte says whether an honest
/// greeting and two lookups come before them.
pub fn messages(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut all = if input.u8() & 1 == 0 { greeting() } else { Vec::new() };
    while !input.is_empty() && all.len() < 1000 {
        let (operation, node, length) = (input.u8(), input.u8(), input.u16());
        let body = input.take(usize::from(length));
        // Rarely, the size is not what it says.
        let len = if length == u16::MAX { u32::MAX } else { (HEAD_LEN + body.len()) as u32 };
        all.push(message(len, operation.into(), node.into(), body));
    }
    converse(all);
}

fn message(len: u32, operation: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let head = [&len.to_le_bytes()[..], &operation.to_le_bytes(), &[7, 0, 0, 0, 0, 0, 0, 0]];
    [&head.concat()[..], &node.to_le_bytes(), &[0; 16], body].concat()
}

fn honest(operation: u32, node: u64, body: &[u8]) -> Vec<u8> {
    message((HEAD_LEN + body.len()) as u32, operation, node, body)
}

/// FUSE_INIT, and lookups of what [`furnish`] has made.
fn greeting() -> Vec<Vec<u8>> {
    let numbers = [7_u32, 45, 1 << 17, u32::MAX, 0].map(u32::to_le_bytes).concat();
    vec![honest(26, 0, &numbers), honest(1, 1, b"f\0"), honest(1, 1, b"d\0")]
}

fn converse(messages: Vec<Vec<u8>>) {
    let outside = tempfile::tempdir().expect("a temporary directory");
    let inside = outside.path().join("folder");
    furnish(&inside);
    let folder = Folder {
        what: What::Directory(fs::File::open(&inside).expect("the folder").into()),
        rights: Rights::READ_WRITE,
        owners: Owners::Host,
        limits: Limits { nodes_max: 64, opened_max: 64, lockers_max: 8, ..Limits::default() },
        descriptors: Descriptors::of_host().expect("/proc"),
        metrics: Arc::default(),
    };
    let mut server = Server::new(folder).expect("a server");
    for mut request in messages {
        let mut reply = vec![0; ROOM];
        let mut message = Message::of_slices(&mut request, &mut reply);
        server.serve(&mut message);
        assert!(message.written() <= ROOM);
    }
    let left: Vec<_> = fs::read_dir(outside.path()).expect("a directory").flatten().collect();
    assert_eq!(left.len(), 1, "nothing is made outside the folder: {left:?}");
}

fn furnish(folder: &Path) {
    fs::create_dir_all(folder.join("d")).expect("a directory");
    fs::write(folder.join("f"), "content").expect("a file");
    std::os::unix::fs::symlink("../..", folder.join("l")).expect("a link");
}

/// Lookups, opens, reads, creates, lists, renames and removes.
pub fn seeds() -> Vec<Vec<u8>> {
    let long = |number: u64| number.to_le_bytes().to_vec();
    let short = |number: u32| number.to_le_bytes().to_vec();
    let transfer =
        |handle, size| [long(handle), long(0), short(size), short(0), long(0), long(0)].concat();
    let open = (14, 2, [short(2), short(0)].concat());
    let read = (15, 2, transfer(1, 100));
    let write = (16, 2, [transfer(1, 3), b"new".to_vec()].concat());
    let create = (35, 1, [short(0x42), short(0o644), long(0), b"n\0".to_vec()].concat());
    let opened = (27, 1, long(0));
    let list = (44, 1, transfer(2, 4096));
    let rename = (12, 1, [long(3), b"f\0g\0".to_vec()].concat());
    let change = (4, 2, [short(1), short(0), vec![0; 80]].concat());
    let lock = (32, 2, [long(1), long(1), long(0), long(9), short(1), vec![0; 12]].concat());
    let forget = (2, 2, long(1));
    let all = |list: &[(u8, u8, Vec<u8>)]| {
        let messages = list.iter().flat_map(|(operation, node, body)| {
            [&[*operation, *node][..], &(body.len() as u16).to_le_bytes(), body].concat()
        });
        [0].into_iter().chain(messages).collect::<Vec<u8>>()
    };
    vec![all(&[open, read, write, change, lock]), all(&[create, opened, list, rename, forget])]
}
