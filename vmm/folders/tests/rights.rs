//! The capability: what the rights refuse, and revocation.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::*;
use exocell_folders::{Folder, FolderError, Limits, Rights, serve};
use libc::{O_CREAT, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY};

fn tree() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("file"), "hello").unwrap();
    symlink("file", dir.path().join("link")).unwrap();
    dir
}

/// Fid 1 is the file, 2 a directory, 3 the symlink, 10 and up are free.
fn mounted(dir: &Path, rights: Rights) -> Guest {
    let mut guest = mount(dir, rights);
    for (fid, name) in [(1, "file"), (2, "d"), (3, "link"), (4, "file")] {
        guest.find(fid, name).unwrap();
    }
    guest
}

/// Every request that changes something, in one order.
fn changes(guest: &mut Guest) -> Vec<Answer> {
    vec![
        guest.lopen(1, O_WRONLY),
        guest.lopen(1, O_RDWR),
        guest.lopen(1, O_RDONLY | O_TRUNC),
        guest.lcreate(0, "new", O_RDWR | O_CREAT, 0o600),
        guest.lcreate(0, "file", O_RDONLY | O_CREAT, 0o600),
        guest.write(1, 0, b"x"),
        guest.setattr(1, 1, Set { mode: 0o777, ..Set::default() }),
        guest.setattr(1, 0, Set::default()),
        guest.symlink(0, "s", "t"),
        guest.mkdir(0, "m", 0o700),
        guest.mknod(0, "n", libc::S_IFREG | 0o600),
        guest.link(0, 1, "l"),
        guest.rename(1, 2, "r"),
        guest.renameat(0, "file", 2, "r"),
        guest.unlinkat(0, "file", 0),
        guest.unlinkat(0, "d", 0x200),
        guest.remove(4),
    ]
}

/// Every request that only looks.
fn looks(guest: &mut Guest) -> Vec<Answer> {
    let lock = |msg: Msg| msg.u64(0).u64(0).u32(1).s("node");
    vec![
        guest.attach(20),
        guest.walk(0, 21, &["d"]),
        guest.getattr(1).map(|_| vec![]),
        guest.call(8, Msg::new().u32(0)),
        guest.lopen(1, O_RDONLY),
        guest.read(1, 0, 10),
        guest.lopen(2, O_RDONLY),
        guest.readdir(2, 0, 4096).map(|_| vec![]),
        guest.readlink(3),
        guest.call(50, Msg::new().u32(1).u32(0)),
        guest.call(52, lock(Msg::new().u32(1).u8(1).u32(0))),
        guest.call(54, lock(Msg::new().u32(1).u8(1))),
    ]
}

fn names(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

#[test]
fn without_the_write_right_every_change_is_refused() {
    let dir = tree();
    let before = names(dir.path());
    let mut guest = mounted(dir.path(), Rights::READ);
    let answers = changes(&mut guest);
    for (at, answer) in answers.iter().enumerate() {
        assert_eq!(answer.as_ref().unwrap_err(), &EROFS, "change {at}");
    }
    assert_eq!(guest.denials(), answers.len() as u64);
    assert_eq!(guest.getattr(4).unwrap_err(), EBADF, "a refused remove still ends the fid");
    assert!(looks(&mut guest).iter().all(Result::is_ok));
    assert_eq!(names(dir.path()), before);
    assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"hello");
}

#[test]
fn without_the_read_right_no_content_is_given() {
    let dir = tree();
    let mut guest = mounted(dir.path(), Rights { read: false, write: true });
    assert_eq!(guest.lopen(1, O_RDONLY).unwrap_err(), EACCES);
    assert_eq!(guest.lopen(1, O_RDWR).unwrap_err(), EACCES);
    assert_eq!(guest.lopen(2, O_RDONLY).unwrap_err(), EACCES);
    assert_eq!(guest.readlink(3).unwrap_err(), EACCES);
    assert_eq!(guest.lcreate(0, "new", O_RDWR | O_CREAT, 0o600).unwrap_err(), EACCES);
    guest.lopen(1, O_WRONLY).unwrap();
    guest.write(1, 0, b"J").unwrap();
    assert_eq!(guest.read(1, 0, 5).unwrap_err(), EACCES);
    assert_eq!(guest.readdir(2, 0, 4096).unwrap_err(), EACCES);
    assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"Jello");
}

#[test]
fn without_any_right_the_folder_is_not_seen() {
    let dir = tree();
    let mut guest = start(dir.path(), Rights::default(), Limits::default());
    assert_eq!(guest.version(8192).unwrap_err(), EACCES);
}

#[test]
fn revocation_closes_every_file_and_refuses_everything() {
    let dir = tree();
    let before = names(dir.path());
    let mut guest = mounted(dir.path(), Rights::READ_WRITE);
    guest.lopen(4, O_RDWR).unwrap();
    guest.write(4, 0, b"J").unwrap();
    let held = open_in(dir.path());
    assert!(held > 0);
    guest.live.store(false, Ordering::SeqCst);
    let first = guest.write(4, 0, b"X");
    assert_eq!(open_in(dir.path()), 0, "descriptors below the folder");
    let mut answers = changes(&mut guest);
    answers.extend(looks(&mut guest));
    answers.push(guest.version(8192));
    answers.push(first);
    answers.push(guest.call(30, Msg::new().u32(0).u32(9).s("x")));
    answers.push(guest.call(200, Msg::new()));
    for (at, answer) in answers.iter().enumerate() {
        assert_eq!(answer.as_ref().unwrap_err(), &EACCES, "request {at}");
    }
    guest.clunk(4).unwrap();
    guest.call(108, Msg::new().u16(1)).unwrap();
    assert_eq!(names(dir.path()), before);
    assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"Jello");
    guest.live.store(true, Ordering::SeqCst);
    assert_eq!(guest.attach(50).unwrap_err(), EACCES, "revocation is for good");
    assert!(guest.end().is_ok());
}

/// How many of this process' descriptors are files below `dir`.
fn open_in(dir: &Path) -> usize {
    let held = fs::read_dir("/proc/self/fd").unwrap();
    held.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok())
        .filter(|path| path.starts_with(dir) && path != dir)
        .count()
}

#[test]
fn fids_are_bounded_and_come_back() {
    let dir = tree();
    let mut guest = start(dir.path(), Rights::READ, Limits { fids_max: 10, ..Limits::default() });
    guest.version(8192).unwrap();
    for fid in 0..10 {
        guest.attach(fid).unwrap();
    }
    assert_eq!(guest.attach(10).unwrap_err(), ENFILE);
    assert_eq!(guest.walk(0, 10, &["file"]).unwrap_err(), ENFILE);
    assert!(guest.walk(0, 0, &["file"]).is_ok(), "a walk in place needs no new fid");
    guest.clunk(9).unwrap();
    guest.walk(1, 10, &["file"]).unwrap();
    assert_eq!(open_in(dir.path()), 2);
    guest.version(8192).unwrap();
    assert_eq!(open_in(dir.path()), 0);
}

#[test]
fn a_folder_that_is_not_a_directory_is_the_callers_error() {
    let dir = tree();
    let file = fs::File::open(dir.path().join("file")).unwrap();
    let folder = Folder::new(file.into(), Rights::READ, Arc::new(|| true));
    let (_guest, far) = UnixStream::pair().unwrap();
    assert!(matches!(serve(folder, far), Err(FolderError::NotADirectory)));
}

#[test]
fn what_a_guest_takes_of_the_disk_is_bounded_and_comes_back() {
    const BOUND: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { grown_bytes_max: BOUND, made_max: 3, ..Limits::default() };
    let mut guest = start(dir.path(), Rights::READ_WRITE, limits);
    guest.version(65536).unwrap();
    guest.attach(0).unwrap();
    let create = |guest: &mut Guest, fid, name| {
        guest.walk(0, fid, &[]).unwrap();
        guest.lcreate(fid, name, O_RDWR | O_CREAT, 0o600)
    };
    create(&mut guest, 1, "a").unwrap();
    let chunk = vec![7; 32 << 10];
    let fill = |guest: &mut Guest, fid| {
        (0..).map(|at| guest.write(fid, at * chunk.len() as u64, &chunk)).find_map(Result::err)
    };
    assert_eq!(fill(&mut guest, 1), Some(libc::EDQUOT as u32));
    let taken = fs::metadata(dir.path().join("a")).unwrap().len();
    assert!((BOUND..=BOUND + chunk.len() as u64).contains(&taken), "{taken} bytes");
    // What is given back can be had again, by any file.
    guest.setattr(1, 1 << 3, Set::default()).unwrap();
    create(&mut guest, 2, "b").unwrap();
    assert_eq!(fill(&mut guest, 2), Some(libc::EDQUOT as u32));
    guest.unlinkat(0, "b", 0).unwrap();
    guest.write(1, 0, b"x").unwrap();
    guest.mkdir(0, "c", 0o700).unwrap();
    guest.symlink(0, "d", "a").unwrap();
    assert_eq!(guest.mkdir(0, "e", 0o700).unwrap_err(), libc::EDQUOT as u32);
    assert_eq!(create(&mut guest, 3, "f").unwrap_err(), libc::EDQUOT as u32);
    guest.walk(0, 4, &[]).unwrap();
    guest.lcreate(4, "a", O_RDWR | O_CREAT, 0o600).expect("it is there");
    guest.unlinkat(0, "d", 0).unwrap();
    guest.link(0, 1, "g").unwrap();
}
