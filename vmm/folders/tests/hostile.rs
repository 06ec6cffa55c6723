//! A guest that breaks the rules, and one that loses its rights.

mod common;

use std::fs;

use common::{Msg, ROOT, mount, start};
use exocell_folders::{Errno, Limits, Rights};
use proptest::prelude::*;

#[test]
fn a_read_only_folder_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), "content").unwrap();
    let mut guest = mount(dir.path(), Rights::READ);
    let node = guest.find("f").unwrap().node;
    let handle = guest.open(node, libc::O_RDONLY).unwrap();
    assert_eq!(guest.read(handle, 0, 7).unwrap(), b"content");
    assert_eq!(guest.open(node, libc::O_WRONLY), Err(Errno::ROFS));
    assert_eq!(guest.open(node, libc::O_RDONLY | libc::O_TRUNC), Err(Errno::ROFS));
    assert_eq!(guest.write(handle, 0, b"x"), Err(Errno::ROFS));
    assert_eq!(guest.create(ROOT, "n", libc::O_RDONLY, 0o600).err(), Some(Errno::ROFS));
    assert_eq!(guest.setattr(node, 1, (0o777, 0, 0), 0), Err(Errno::ROFS));
    for opcode in [6, 8, 9, 10, 11, 12, 13, 21, 24, 43, 45, 47, 51, 53] {
        assert_eq!(guest.ask(opcode, ROOT, Msg::new()), Err(Errno::ROFS), "{opcode}");
    }
    assert_eq!(fs::read(dir.path().join("f")).unwrap(), b"content");
}

#[test]
fn the_end_of_access_ends_what_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = mount(dir.path(), Rights::READ_WRITE);
    let (file, handle) = guest.create(ROOT, "f", libc::O_RDWR, 0o600).unwrap();
    guest.server.end();
    assert_eq!(guest.write(handle, 0, b"x"), Err(Errno::ACCESS));
    assert_eq!(guest.read(handle, 0, 1), Err(Errno::ACCESS));
    assert_eq!(guest.lookup(ROOT, "f"), Err(Errno::ACCESS));
    assert_eq!(guest.getattr(file.node), Err(Errno::ACCESS));
    assert_eq!(guest.init(), Err(Errno::ACCESS));
    assert_eq!(fs::metadata(dir.path().join("f")).unwrap().len(), 0);
}

#[test]
fn numbers_that_are_nobodys_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), "").unwrap();
    let mut guest = mount(dir.path(), Rights::READ_WRITE);
    let node = guest.find("f").unwrap().node;
    for bad in [0, 2 + (1 << 32), u64::MAX, 77] {
        assert_eq!(guest.getattr(bad), Err(Errno::STALE), "{bad:#x}");
        assert_eq!(guest.read(bad, 0, 1), Err(Errno::BADF), "{bad:#x}");
    }
    // Forgotten is forgotten, and more often than known is no harm.
    let forget = guest.request(2, node, &Msg::new().u64(u64::MAX));
    assert!(guest.raw(forget, 0).is_none(), "there is no answer");
    assert_eq!(guest.getattr(node), Err(Errno::STALE));
    let forget = guest.request(2, ROOT, &Msg::new().u64(u64::MAX));
    assert!(guest.raw(forget, 0).is_none());
    assert!(guest.getattr(ROOT).is_ok());
    let file = guest.find("f").unwrap().node;
    assert_eq!(guest.lookup(file, "x"), Err(Errno::NOTDIR));
}

#[test]
fn what_is_held_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    for number in 0..100 {
        fs::write(dir.path().join(number.to_string()), "").unwrap();
    }
    let limits = Limits { nodes_max: 10, opened_max: 5, lockers_max: 2, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.init().unwrap();
    assert_eq!(guest.names(ROOT, true).unwrap().len(), 102, "a listing takes what there is");
    let known = (0..100).filter(|number| guest.lookup(ROOT, number.to_string()).is_ok()).count();
    assert!((5..=9).contains(&known), "{known}");
    assert_eq!(guest.create(ROOT, "new", libc::O_RDWR, 0o600).err(), Some(Errno::NFILE));
    let node = (0..100).find_map(|number| guest.lookup(ROOT, number.to_string()).ok()).unwrap();
    let opened: Vec<_> = (0..10).map(|_| guest.open(node.node, libc::O_RDWR)).collect();
    assert_eq!(opened.iter().filter(|handle| handle.is_ok()).count(), 5);
    assert_eq!(opened.last(), Some(&Err(Errno::NFILE)));
    let handle = opened[0].unwrap();
    let lock = |owner: u64| {
        let lock = Msg::new().u64(handle).u64(owner).u64(owner).u64(owner);
        lock.u32(libc::F_WRLCK as u32).u32(0).u32(0).u32(0)
    };
    let locked: Vec<_> = (0..3).map(|owner| guest.ask(32, node.node, lock(owner))).collect();
    assert_eq!(locked.last(), Some(&Err(Errno::NOLCK)));
}

#[test]
fn the_hosts_disk_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { grown_bytes_max: 1 << 20, made_max: 3, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.init().unwrap();
    let (_, handle) = guest.create(ROOT, "f", libc::O_RDWR, 0o600).unwrap();
    let block = vec![1; 256 << 10];
    let written = (0..100).take_while(|at| guest.write(handle, at << 18, &block).is_ok()).count();
    assert!((4..=5).contains(&written), "{written}");
    assert_eq!(guest.write(handle, 0, &block), Err(Errno::DQUOT));
    let allocate = Msg::new().u64(handle).u64(0).u64(1 << 40).u32(0).u32(0);
    assert_eq!(guest.ask(43, ROOT, allocate), Err(Errno::DQUOT));
    guest.ask(10, ROOT, Msg::new().s("f")).unwrap();
    for name in ["a", "b", "c"] {
        guest.create(ROOT, name, libc::O_RDWR, 0o600).unwrap();
    }
    assert_eq!(guest.create(ROOT, "d", libc::O_RDWR, 0o600).err(), Some(Errno::DQUOT));
    let over = guest.ask(9, ROOT, Msg::new().u32(0o755).u32(0).s("d"));
    assert_eq!(over, Err(Errno::DQUOT));
}

/// What serves the folder next goes on from what was taken before, however that ended.
#[test]
fn the_hosts_disk_is_bounded_over_several_servers() {
    let dir = tempfile::tempdir().unwrap();
    let tally = tempfile::tempfile().unwrap();
    let limits = Limits { grown_bytes_max: 20 << 20, made_max: 1500, ..Limits::default() };
    let serve = || {
        let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
        guest.server.go_on(tally.try_clone().unwrap().into()).unwrap();
        guest.init().unwrap();
        guest
    };
    let block = vec![1; 1 << 20];
    let mut guest = serve();
    let (_, handle) = guest.create(ROOT, "f", libc::O_RDWR, 0o600).unwrap();
    for at in 0..3 {
        guest.write(handle, at << 20, &block).unwrap();
    }
    // What has no name is gone with the guest.
    let (_, unnamed) = guest.create(ROOT, "u", libc::O_RDWR, 0o600).unwrap();
    guest.write(unnamed, 0, &block).unwrap();
    guest.ask(10, ROOT, Msg::new().s("u")).unwrap();
    guest.server.finish();
    let mut guest = serve();
    let (_, handle) = guest.create(ROOT, "g", libc::O_RDWR, 0o600).unwrap();
    let written = (0..100).take_while(|at| guest.write(handle, at << 20, &block).is_ok()).count();
    assert!((17..=18).contains(&written), "{written}");
    // One that is killed has said more than it took: never less.
    drop(guest);
    let mut guest = serve();
    let (_, handle) = guest.create(ROOT, "h", libc::O_RDWR, 0o600).unwrap();
    assert_eq!(guest.write(handle, 0, &block), Err(Errno::DQUOT));
    let made = (0..2000)
        .take_while(|at| {
            guest.ask(9, ROOT, Msg::new().u32(0o755).u32(0).s(format!("d{at}"))).is_ok()
        })
        .count();
    drop(guest);
    assert!((400..1500).contains(&made), "{made}");
    let mut guest = serve();
    assert_eq!(guest.create(ROOT, "i", libc::O_RDWR, 0o600).err(), Some(Errno::DQUOT));
    // A file with something else in it is no tally, and one that cannot be written gives nothing.
    tally.set_len(17).unwrap();
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    assert_eq!(guest.server.go_on(tally.try_clone().unwrap().into()), Err(Errno::INVAL));
    let null = std::fs::File::open("/dev/null").unwrap();
    guest.server.go_on(null.into()).unwrap();
    guest.init().unwrap();
    guest.create(ROOT, "j", libc::O_RDWR, 0o600).unwrap_err();
}

/// Bytes are given back when they are gone, and once.
#[test]
fn what_has_no_name_is_counted_as_long_as_it_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { grown_bytes_max: 1 << 20, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.init().unwrap();
    let block = vec![1; 512 << 10];
    let mut kept = Vec::new();
    for name in ["a", "b", "c"] {
        let (entry, handle) = guest.create(ROOT, name, libc::O_RDWR, 0o600).unwrap();
        kept.push((entry.node, handle, guest.write(handle, 0, &block).is_ok()));
        guest.ask(10, ROOT, Msg::new().s(name)).unwrap();
    }
    let [(a, a_handle, true), (b, b_handle, true), (_, c_handle, false)] = kept[..] else {
        panic!("{kept:?}");
    };
    // One is forgotten and then closed, the other closed and then forgotten.
    guest.forget(a);
    assert_eq!(guest.write(c_handle, 0, &block), Err(Errno::DQUOT));
    guest.release(a_handle).unwrap();
    guest.release(b_handle).unwrap();
    assert!(guest.write(c_handle, 0, &block).is_ok());
    assert_eq!(guest.write(c_handle, 1 << 20, &block), Err(Errno::DQUOT));
    guest.forget(b);
    assert!(guest.write(c_handle, 1 << 20, &block).is_ok());
    // Given back by its length, it is not given back once more at its end.
    let (entry, handle) = guest.create(ROOT, "d", libc::O_RDWR, 0o600).unwrap();
    guest.ask(10, ROOT, Msg::new().s("d")).unwrap();
    assert_eq!(guest.write(handle, 0, &block), Err(Errno::DQUOT));
    guest.release(handle).unwrap();
    guest.forget(entry.node);
    guest.setattr(kept[2].0, 8, (0, 0, 0), 0).unwrap();
    guest.release(c_handle).unwrap();
    guest.forget(kept[2].0);
    let (_, handle) = guest.create(ROOT, "e", libc::O_RDWR, 0o600).unwrap();
    let written = (0..10).take_while(|at| guest.write(handle, at << 19, &block).is_ok()).count();
    assert_eq!(written, 2);
}

/// One who saves by another name has one file.
#[test]
fn what_is_renamed_over_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { grown_bytes_max: 1 << 20, made_max: 4, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.init().unwrap();
    for _ in 0..20 {
        let (entry, handle) = guest.create(ROOT, "new", libc::O_RDWR, 0o600).unwrap();
        guest.write(handle, 0, &vec![1; 256 << 10]).unwrap();
        guest.release(handle).unwrap();
        guest.ask(12, ROOT, Msg::new().u64(ROOT).s("new").s("file")).unwrap();
        guest.forget(entry.node);
    }
}

#[test]
fn lengths_that_lie_are_of_no_use() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = mount(dir.path(), Rights::READ_WRITE);
    // Shorter than a head, longer than what comes, a body that is not one.
    assert!(guest.raw(vec![0; 39], 4096).is_none());
    let mut lookup = guest.request(1, ROOT, &Msg::new().s("f"));
    lookup[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(guest.raw(lookup, 4096).unwrap().is_ok());
    let large = guest.request(21, ROOT, &Msg(vec![1; 1 << 20]));
    assert_eq!(guest.raw(large, 4096), Some(Err(Errno::TOOBIG)));
    let (_, handle) = guest.create(ROOT, "f", libc::O_RDWR, 0o600).unwrap();
    let body = Msg::new().u64(handle).u64(0).u32(u32::MAX).u32(0).u64(0).u32(0).u32(0);
    let write = guest.request(16, ROOT, &body.bytes(b"short"));
    assert_eq!(guest.raw(write, 4096).unwrap().unwrap()[..4], 5_u32.to_le_bytes());
    // No room for the answer.
    let stat = guest.request(3, ROOT, &Msg::new().u32(0).u32(0).u64(0));
    assert_eq!(guest.raw(stat, 10), Some(Err(Errno::OVERFLOW)));
    assert_eq!(guest.read(handle, u64::MAX, u32::MAX), Err(Errno::INVAL));
}

#[test]
fn nothing_is_served_before_a_greeting() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = start(dir.path(), Rights::READ_WRITE, Limits::default());
    assert_eq!(guest.getattr(ROOT), Err(Errno::PROTO));
    let old = Msg::new().u32(7).u32(12).u32(0).u32(0);
    assert_eq!(guest.ask(26, 0, old), Err(Errno::PROTO));
    guest.init().unwrap();
    assert!(guest.getattr(ROOT).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn no_bytes_harm_the_server(
        requests in prop::collection::vec(
            (0_u32..60, 0_u64..4, prop::collection::vec(any::<u8>(), 0..120)), 1..30)
    ) {
        let outside = tempfile::tempdir().unwrap();
        let inside = outside.path().join("folder");
        fs::create_dir_all(inside.join("d")).unwrap();
        fs::write(inside.join("f"), "content").unwrap();
        let mut guest = mount(&inside, Rights::READ_WRITE);
        guest.find("f").unwrap();
        guest.find("d").unwrap();
        for (opcode, node, body) in requests {
            let request = guest.request(opcode, node, &Msg(body));
            let _ = guest.raw(request, 8192);
        }
        prop_assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
    }
}

/// A file that is moved onto itself is still there.
#[test]
fn what_is_moved_onto_itself_gives_nothing_back() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { grown_bytes_max: 1 << 20, made_max: 4, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.init().unwrap();
    let (entry, handle) = guest.create(ROOT, "f", libc::O_RDWR, 0o600).unwrap();
    let block = vec![1; 512 << 10];
    guest.write(handle, 0, &block).unwrap();
    guest.ask(13, ROOT, Msg::new().u64(entry.node).s("g")).unwrap();
    guest.release(handle).unwrap();
    guest.forget(entry.node);
    for _ in 0..8 {
        guest.ask(12, ROOT, Msg::new().u64(ROOT).s("f").s("f")).unwrap();
        guest.ask(12, ROOT, Msg::new().u64(ROOT).s("f").s("g")).unwrap();
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    let (_, handle) = guest.create(ROOT, "h", libc::O_RDWR, 0o600).unwrap();
    guest.write(handle, 0, &block).unwrap();
    assert_eq!(guest.write(handle, 1 << 20, &block), Err(Errno::DQUOT));
    guest.create(ROOT, "i", libc::O_RDWR, 0o600).unwrap();
    assert_eq!(guest.create(ROOT, "j", libc::O_RDWR, 0o600).err(), Some(Errno::DQUOT));
}

/// Who is told that a file was not made finds none.
#[test]
fn what_cannot_be_answered_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { nodes_max: 4, made_max: 3, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.init().unwrap();
    let own = std::mem::replace(&mut guest.uid, u32::MAX);
    for number in 0..10 {
        let name = number.to_string();
        guest.create(ROOT, &name, libc::O_RDWR, 0o600).unwrap_err();
        guest.ask(9, ROOT, Msg::new().u32(0o755).u32(0).s(&name)).unwrap_err();
        guest.ask(6, ROOT, Msg::new().s(&name).s("to")).unwrap_err();
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    guest.uid = own;
    for name in ["a", "b", "c"] {
        guest.create(ROOT, name, libc::O_RDWR, 0o600).unwrap();
    }
    guest.ask(10, ROOT, Msg::new().s("a")).unwrap();
    // It knows as many as it may.
    assert_eq!(guest.create(ROOT, "d", libc::O_RDWR, 0o600).err(), Some(Errno::NFILE));
    let made = guest.ask(9, ROOT, Msg::new().u32(0o755).u32(0).s("d"));
    assert_eq!(made, Err(Errno::NFILE));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn files_without_a_name_take_none() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { made_max: 2, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.init().unwrap();
    for _ in 0..8 {
        let flags = (libc::O_RDWR | libc::O_TMPFILE) as u32;
        let body = Msg::new().u32(flags).u32(0o600).u32(0).u32(0).s("");
        let answer = guest.ask(51, ROOT, body).unwrap();
        let node = common::Entry::parse(&answer).node;
        let handle = u64::from_le_bytes(answer[128..136].try_into().unwrap());
        guest.release(handle).unwrap();
        guest.forget(node);
    }
    guest.create(ROOT, "a", libc::O_RDWR, 0o600).unwrap();
}

/// Attributes are of the host's disk too.
#[test]
fn attributes_are_counted_and_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { grown_bytes_max: 8 << 10, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.init().unwrap();
    let set = |guest: &mut common::Guest, node: u64, name: String, bytes: usize| {
        let body = Msg::new().u32(bytes as u32).u32(0).u64(0).s(name);
        guest.ask(21, node, body.bytes(&vec![b'x'; bytes]))
    };
    // The same one again takes no more, and what is gone takes nothing.
    for _ in 0..16 {
        let (entry, handle) = guest.create(ROOT, "f", libc::O_RDWR, 0o600).unwrap();
        for _ in 0..16 {
            set(&mut guest, entry.node, "user.a".to_owned(), 1000).unwrap();
        }
        guest.ask(10, ROOT, Msg::new().s("f")).unwrap();
        guest.release(handle).unwrap();
        guest.forget(entry.node);
    }
    let (mut last, mut refused) = (ROOT, None);
    for number in 0..100 {
        let name = number.to_string();
        last = guest.create(ROOT, &name, libc::O_RDWR, 0o600).unwrap().0.node;
        refused = refused.or(set(&mut guest, last, "user.a".to_owned(), 1000).err());
    }
    assert_eq!(refused, Some(Errno::DQUOT));
    let acl = set(&mut guest, last, "system.posix_acl_access".to_owned(), 8 << 10);
    assert_eq!(acl, Err(Errno::NOSPC));
}

/// The host's kernel keeps each lock of bytes, and counts them for nobody.
#[test]
fn locks_of_bytes_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { locks_max: 6, file_locks_max: 4, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.init().unwrap();
    let lock = |handle: u64, kind: i32, start: u64, end: u64| {
        Msg::new().u64(handle).u64(1).u64(start).u64(end).u32(kind as u32).u32(0).u32(0).u32(0)
    };
    let (a, a_handle) = guest.create(ROOT, "a", libc::O_RDWR, 0o600).unwrap();
    let (b, b_handle) = guest.create(ROOT, "b", libc::O_RDWR, 0o600).unwrap();
    let mut set = |(node, handle): (u64, u64), kind: i32, (start, end): (u64, u64)| {
        guest.ask(32, node, lock(handle, kind, start, end)).map(drop)
    };
    let (a, b) = ((a.node, a_handle), (b.node, b_handle));
    let count = (0..100).take_while(|at| set(a, libc::F_WRLCK, (at * 10, at * 10)).is_ok()).count();
    assert_eq!(count, 4, "of one file");
    let count = (0..100).take_while(|at| set(b, libc::F_WRLCK, (at * 10, at * 10)).is_ok()).count();
    assert_eq!(count, 2, "of all");
    assert_eq!(set(b, libc::F_WRLCK, (500, 500)), Err(Errno::NOLCK));
    // One that takes the place of others is none more, and gives theirs up.
    set(a, libc::F_WRLCK, (0, 100)).unwrap();
    assert_eq!(set(b, libc::F_WRLCK, (500, 500)), Ok(()));
    set(a, libc::F_UNLCK, (0, u64::MAX)).unwrap();
    set(a, libc::F_WRLCK, (7, 7)).unwrap();
}
