//! Every message does what 9P2000.L says, against real files.

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::sync::atomic::Ordering;

use common::*;
use exocell_folders::{Limits, Rights};
use libc::{O_APPEND, O_CREAT, O_DIRECTORY, O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY};

fn tree() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    fs::write(dir.path().join("a/b/file"), "hello").unwrap();
    symlink("a/b/file", dir.path().join("link")).unwrap();
    dir
}

fn writable() -> (tempfile::TempDir, Guest) {
    let dir = tree();
    let guest = mount(dir.path(), Rights::READ_WRITE);
    (dir, guest)
}

#[test]
fn version_takes_the_smaller_size_and_drops_every_fid() {
    let (dir, mut guest) = writable();
    let answer = guest.version(1 << 30).unwrap();
    assert_eq!(answer[..4], exocell_folders::MSIZE_MAX.to_le_bytes());
    assert_eq!(answer[6..], *b"9P2000.L");
    assert_eq!(guest.getattr(0).unwrap_err(), EBADF);
    assert!(guest.end().is_ok());
    let mut guest =
        start(dir.path(), Rights::READ, Limits { msize_max: 8192, ..Limits::default() });
    assert_eq!(guest.version(65536).unwrap()[..4], 8192u32.to_le_bytes());
}

#[test]
fn an_unknown_version_is_answered_and_nothing_else_is() {
    let mut guest = start(tree().path(), Rights::READ, Limits::default());
    let answer = guest.call(100, Msg::new().u32(8192).s("9P2000.u")).unwrap();
    assert_eq!(answer[6..], *b"unknown");
    guest.stream.write_all(&Msg::new().u32(0).frame(120, 7)).unwrap();
    assert!(guest.server_error().contains("before agreeing on a version"));
}

#[test]
fn attach_gives_the_root_and_auth_is_refused() {
    let (dir, mut guest) = writable();
    assert_eq!(guest.attach(1).unwrap()[0], 0x80);
    let ino = fs::metadata(dir.path()).unwrap().ino();
    assert_eq!(guest.getattr(1).unwrap().qid_path, ino);
    assert_eq!(guest.attach(1).unwrap_err(), EINVAL);
    let elsewhere = Msg::new().u32(2).u32(u32::MAX).s("root").s("/etc").u32(0);
    assert_eq!(guest.call(104, elsewhere).unwrap_err(), ENOENT);
    assert_eq!(guest.call(102, Msg::new().u32(9).s("root").s("").u32(0)).unwrap_err(), EOPNOTSUPP);
}

#[test]
fn walk_clones_descends_and_stops_where_the_names_end() {
    let (_dir, mut guest) = writable();
    assert_eq!(guest.walk(0, 1, &[]).unwrap(), [0, 0]);
    assert_eq!(guest.walk(0, 2, &["a", "b", "file"]).unwrap().len(), 2 + 3 * 13);
    assert_eq!(guest.getattr(2).unwrap().size, 5);
    assert_eq!(guest.walk(0, 3, &["a", "none", "x"]).unwrap().len(), 2 + 13);
    assert_eq!(guest.getattr(3).unwrap_err(), EBADF);
    assert_eq!(guest.walk(0, 3, &["none"]).unwrap_err(), ENOENT);
    assert_eq!(guest.walk(2, 3, &["x"]).unwrap_err(), ENOTDIR);
    assert_eq!(guest.walk(0, 2, &["a"]).unwrap_err(), EINVAL);
    assert_eq!(guest.walk(99, 3, &[]).unwrap_err(), EBADF);
    assert_eq!(guest.walk(0, u32::MAX, &[]).unwrap_err(), EINVAL);
    guest.walk(1, 1, &["a"]).unwrap();
    assert_eq!(guest.getattr(1).unwrap().mode & libc::S_IFMT, libc::S_IFDIR);
}

#[test]
fn getattr_reports_the_host_state() {
    let (dir, mut guest) = writable();
    guest.find(1, "a/b/file").unwrap();
    let (attr, meta) =
        (guest.getattr(1).unwrap(), fs::metadata(dir.path().join("a/b/file")).unwrap());
    assert_eq!((attr.valid, attr.qid_kind, attr.qid_path), (0x7ff, 0, meta.ino()));
    assert_eq!((attr.mode, attr.uid, attr.nlink, attr.size), (meta.mode(), meta.uid(), 1, 5));
    assert_eq!(attr.mtime, (meta.mtime() as u64, meta.mtime_nsec() as u64));
    guest.find(2, "link").unwrap();
    let link = guest.getattr(2).unwrap();
    assert_eq!((link.qid_kind, link.mode & libc::S_IFMT), (2, libc::S_IFLNK));
}

#[test]
fn setattr_changes_mode_size_and_times() {
    let (dir, mut guest) = writable();
    let path = dir.path().join("a/b/file");
    guest.find(1, "a/b/file").unwrap();
    guest.setattr(1, 1, Set { mode: 0o100600, ..Set::default() }).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    guest.setattr(1, 8, Set { size: 2, ..Set::default() }).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"he");
    let times = Set { atime: (1000, 5), mtime: (2000, 7), ..Set::default() };
    guest.setattr(1, 0x10 | 0x20 | 0x80 | 0x100, times).unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert_eq!(
        (meta.atime(), meta.atime_nsec(), meta.mtime(), meta.mtime_nsec()),
        (1000, 5, 2000, 7)
    );
    guest.setattr(1, 0x20, Set::default()).unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert!(meta.mtime() > 2000 && meta.atime() == 1000);
}

#[test]
fn setattr_refuses_what_makes_no_sense_and_drops_set_id() {
    let (dir, mut guest) = writable();
    guest.find(1, "a/b/file").unwrap();
    let late = Set { mtime: (0, 1_000_000_000), ..Set::default() };
    assert_eq!(guest.setattr(1, 0x120, late).unwrap_err(), EINVAL);
    assert_eq!(guest.setattr(1, 2, Set { uid: u32::MAX, ..Set::default() }).unwrap_err(), EINVAL);
    assert_eq!(guest.setattr(1, 8, Set { size: u64::MAX, ..Set::default() }).unwrap_err(), EINVAL);
    guest.setattr(1, 1, Set { mode: 0o6755, ..Set::default() }).unwrap();
    assert_eq!(fs::metadata(dir.path().join("a/b/file")).unwrap().mode() & 0o7777, 0o755);
    guest.find(2, "link").unwrap();
    assert_eq!(guest.setattr(2, 1, Set { mode: 0o777, ..Set::default() }).unwrap_err(), EOPNOTSUPP);
}

#[test]
fn files_are_created_written_and_read_back() {
    let (dir, mut guest) = writable();
    guest.walk(0, 1, &["a"]).unwrap();
    guest.lcreate(1, "new", O_RDWR | O_CREAT | O_EXCL, 0o666).unwrap();
    assert_eq!(guest.write(1, 0, b"some text").unwrap(), 9u32.to_le_bytes());
    guest.write(1, 5, b"T").unwrap();
    assert_eq!(guest.read(1, 0, 100).unwrap(), b"some Text");
    assert_eq!(guest.read(1, 5, 2).unwrap(), b"Te");
    assert_eq!(guest.read(1, 100, 2).unwrap(), b"");
    guest.call(50, Msg::new().u32(1).u32(1)).unwrap();
    guest.call(50, Msg::new().u32(1).u32(0)).unwrap();
    let meta = fs::metadata(dir.path().join("a/new")).unwrap();
    assert_eq!(meta.mode() & 0o7777, 0o666, "the server's umask must not matter");
    assert_eq!(guest.metrics.bytes_written.load(Ordering::SeqCst), 10);
    assert_eq!(guest.metrics.bytes_read.load(Ordering::SeqCst), 11);
}

#[test]
fn lcreate_opens_what_exists_unless_it_must_be_new() {
    let (_dir, mut guest) = writable();
    guest.find(1, "a/b").unwrap();
    guest.find(2, "a/b").unwrap();
    assert_eq!(guest.lcreate(1, "file", O_RDWR | O_CREAT | O_EXCL, 0o644).unwrap_err(), EEXIST);
    guest.lcreate(1, "file", O_RDWR | O_CREAT, 0o644).unwrap();
    assert_eq!(guest.read(1, 0, 10).unwrap(), b"hello");
    assert_eq!(guest.lcreate(1, "x", O_RDWR, 0o644).unwrap_err(), EINVAL);
    guest.lcreate(2, "file", O_RDWR | O_CREAT | O_TRUNC, 0o644).unwrap();
    assert_eq!(guest.getattr(2).unwrap().size, 0);
}

#[test]
fn lopen_honours_its_flags() {
    let (dir, mut guest) = writable();
    for fid in 1..6 {
        guest.find(fid, "a/b/file").unwrap();
    }
    guest.lopen(1, O_RDONLY).unwrap();
    assert_eq!(guest.lopen(1, O_RDONLY).unwrap_err(), EINVAL);
    assert_eq!(guest.write(1, 0, b"x").unwrap_err(), EBADF);
    guest.lopen(2, O_WRONLY | O_APPEND).unwrap();
    guest.write(2, 0, b"!").unwrap();
    assert_eq!(fs::read(dir.path().join("a/b/file")).unwrap(), b"hello!");
    assert_eq!(guest.read(2, 0, 1).unwrap_err(), EBADF);
    assert_eq!(guest.lopen(3, O_DIRECTORY).unwrap_err(), ENOTDIR);
    assert_eq!(guest.lopen(3, 3).unwrap_err(), EINVAL);
    guest.lopen(4, O_RDWR | O_TRUNC).unwrap();
    assert_eq!(guest.getattr(4).unwrap().size, 0);
    assert_eq!(guest.read(5, 0, 1).unwrap_err(), EBADF);
    guest.find(6, "a").unwrap();
    assert_eq!(guest.lopen(6, O_RDWR).unwrap_err(), EISDIR);
    guest.lopen(6, O_RDONLY).unwrap();
    assert_eq!(guest.read(6, 0, 1).unwrap_err(), EISDIR);
}

#[test]
fn an_open_file_outlives_its_name() {
    let (dir, mut guest) = writable();
    guest.find(1, "a/b/file").unwrap();
    guest.find(2, "a/b").unwrap();
    guest.find(3, "a/b/file").unwrap();
    guest.lopen(1, O_RDWR).unwrap();
    guest.unlinkat(2, "file", 0).unwrap();
    assert_eq!(guest.read(1, 0, 10).unwrap(), b"hello");
    guest.write(1, 5, b" again").unwrap();
    guest.setattr(1, 8, Set { size: 7, ..Set::default() }).unwrap();
    guest.setattr(1, 1, Set { mode: 0o600, ..Set::default() }).unwrap();
    let attr = guest.getattr(1).unwrap();
    assert_eq!((attr.size, attr.nlink, attr.mode & 0o777), (7, 0, 0o600));
    guest.walk(1, 4, &[]).unwrap();
    guest.lopen(3, O_RDONLY).unwrap();
    assert_eq!(guest.read(3, 0, 10).unwrap(), b"hello a");
    assert_eq!(guest.lopen(4, O_WRONLY | O_APPEND).unwrap_err(), ESTALE);
    guest.clunk(1).unwrap();
    assert_eq!(guest.lopen(4, O_WRONLY).unwrap_err(), ESTALE);
    assert!(!dir.path().join("a/b/file").exists());
}

#[test]
fn readdir_lists_everything_once_whatever_the_chunk() {
    let (dir, mut guest) = writable();
    let mut names: Vec<_> = (0..300).map(|n| format!("{n}-{}", "x".repeat(n % 90))).collect();
    fs::create_dir(dir.path().join("many")).unwrap();
    for name in &names {
        fs::write(dir.path().join("many").join(name), "").unwrap();
    }
    names.extend([".".to_string(), "..".to_string()]);
    names.sort();
    for (fid, count) in [(1, 128), (2, 700), (3, 4096), (4, 1 << 20)] {
        guest.find(fid, "many").unwrap();
        guest.lopen(fid, O_RDONLY | O_DIRECTORY).unwrap();
        assert_eq!(guest.list(fid, count), names, "chunks of {count}");
        assert_eq!(guest.list(fid, count), names, "rewound");
    }
    assert_eq!(guest.readdir(1, 0, 10).unwrap_err(), EINVAL);
}

#[test]
fn readdir_tells_types_and_the_inodes_of_getattr() {
    let (_dir, mut guest) = writable();
    guest.walk(0, 1, &[]).unwrap();
    guest.lopen(1, O_RDONLY).unwrap();
    let entries = guest.readdir(1, 0, 4096).unwrap();
    let entry = |name: &str| entries.iter().find(|e| e.0 == name).unwrap();
    assert_eq!((entry("a").2, entry("link").2), (libc::DT_DIR, libc::DT_LNK));
    guest.find(2, "a").unwrap();
    assert_eq!(guest.getattr(2).unwrap().qid_path, entry("a").3);
    assert_eq!(entry("..").3, guest.getattr(0).unwrap().qid_path, "the parent stays hidden");
    guest.find(3, "a").unwrap();
    assert_eq!(guest.readdir(3, 0, 4096).unwrap_err(), EBADF);
    guest.find(4, "a/b/file").unwrap();
    guest.lopen(4, O_RDONLY).unwrap();
    assert_eq!(guest.readdir(4, 0, 4096).unwrap_err(), ENOTDIR);
}

#[test]
fn statfs_reports_the_host_file_system() {
    let (_dir, mut guest) = writable();
    let body = guest.call(8, Msg::new().u32(0)).unwrap();
    assert_eq!(body.len(), 60);
    assert_eq!(body[..4], 0x0102_1997u32.to_le_bytes());
    assert_ne!(body[8..16], [0; 8], "blocks");
}

#[test]
fn names_are_made_and_removed() {
    let (dir, mut guest) = writable();
    let at = |name: &str| dir.path().join(name);
    assert_eq!(guest.mkdir(0, "d", 0o1777).unwrap()[0], 0x80);
    assert_eq!(fs::metadata(at("d")).unwrap().mode() & 0o7777, 0o1777);
    assert_eq!(guest.symlink(0, "s", "../anywhere").unwrap()[0], 2);
    assert_eq!(fs::read_link(at("s")).unwrap().as_os_str(), "../anywhere");
    guest.find(1, "s").unwrap();
    assert_eq!(guest.readlink(1).unwrap(), b"../anywhere");
    assert_eq!(guest.readlink(0).unwrap_err(), EINVAL);
    assert_eq!(guest.unlinkat(0, "d", 0).unwrap_err(), EISDIR);
    assert_eq!(guest.unlinkat(0, "d", 1).unwrap_err(), EINVAL);
    guest.unlinkat(0, "d", 0x200).unwrap();
    guest.unlinkat(0, "s", 0).unwrap();
    assert!(!at("d").exists() && fs::symlink_metadata(at("s")).is_err());
}

#[test]
fn mknod_makes_files_fifos_and_sockets_but_no_devices() {
    let (dir, mut guest) = writable();
    guest.mknod(0, "file", libc::S_IFREG | 0o640).unwrap();
    assert_eq!(fs::metadata(dir.path().join("file")).unwrap().permissions().mode() & 0o7777, 0o640);
    guest.mknod(0, "fifo", libc::S_IFIFO | 0o600).unwrap();
    guest.mknod(0, "socket", libc::S_IFSOCK | 0o600).unwrap();
    assert!(fs::metadata(dir.path().join("fifo")).unwrap().file_type().is_fifo());
    for kind in [libc::S_IFCHR, libc::S_IFBLK, libc::S_IFDIR, libc::S_IFLNK, 0] {
        assert_eq!(guest.mknod(0, "dev", kind | 0o600).unwrap_err(), EPERM);
    }
    assert_eq!(guest.denials(), 5);
}

#[test]
fn link_makes_a_second_name() {
    let (dir, mut guest) = writable();
    guest.find(1, "a/b/file").unwrap();
    guest.link(0, 1, "second").unwrap();
    assert_eq!(guest.getattr(1).unwrap().nlink, 2);
    assert_eq!(fs::read(dir.path().join("second")).unwrap(), b"hello");
    guest.find(2, "a").unwrap();
    assert_eq!(guest.link(0, 2, "dir").unwrap_err(), EPERM);
    assert_eq!(guest.link(1, 1, "x").unwrap_err(), ENOTDIR);
}

#[test]
fn a_renamed_file_can_still_be_opened() {
    let (_dir, mut guest) = writable();
    guest.find(1, "a/b/file").unwrap();
    guest.find(2, "a/b/file").unwrap();
    guest.find(3, "a/b").unwrap();
    guest.renameat(3, "file", 0, "moved").unwrap();
    guest.lopen(1, O_RDONLY).unwrap();
    guest.rename(2, 3, "back").unwrap();
    guest.lopen(2, O_RDONLY).unwrap();
    assert_eq!(guest.read(2, 0, 9).unwrap(), b"hello");
    guest.find(4, "a/b/back").unwrap();
    guest.renameat(0, "a", 0, "z").unwrap();
    guest.lopen(4, O_RDONLY).unwrap();
    assert_eq!(guest.rename(0, 0, "root").unwrap_err(), libc::EBUSY as u32);
}

#[test]
fn remove_unlinks_and_always_ends_the_fid() {
    let (dir, mut guest) = writable();
    guest.find(1, "a/b/file").unwrap();
    guest.find(2, "a").unwrap();
    guest.remove(1).unwrap();
    assert!(!dir.path().join("a/b/file").exists());
    assert_eq!(guest.remove(2).unwrap_err(), libc::ENOTEMPTY as u32);
    assert_eq!(guest.getattr(2).unwrap_err(), EBADF);
    guest.find(3, "a/b").unwrap();
    guest.remove(3).unwrap();
}

#[test]
fn locks_are_granted_and_attributes_are_not_there() {
    let (_dir, mut guest) = writable();
    let range = |msg: Msg| msg.u64(5).u64(10).u32(42).s("node");
    let lock = range(Msg::new().u32(0).u8(1).u32(1));
    assert_eq!(guest.call(52, lock).unwrap(), [0]);
    let answer = guest.call(54, range(Msg::new().u32(0).u8(1))).unwrap();
    assert_eq!(answer, range(Msg::new().u8(2)).0);
    assert_eq!(guest.call(30, Msg::new().u32(0).u32(9).s("user.x")).unwrap_err(), EOPNOTSUPP);
    assert_eq!(
        guest.call(32, Msg::new().u32(0).s("user.x").u64(1).u32(0)).unwrap_err(),
        EOPNOTSUPP
    );
    assert_eq!(guest.call(52, range(Msg::new().u32(9).u8(1).u32(1))).unwrap_err(), EBADF);
}

#[test]
fn flush_clunk_and_unknown_messages() {
    let (_dir, mut guest) = writable();
    guest.call(108, Msg::new().u16(3)).unwrap();
    guest.walk(0, 1, &[]).unwrap();
    guest.clunk(1).unwrap();
    assert_eq!(guest.clunk(1).unwrap_err(), EBADF);
    for number in [2, 60, 112, 200, 254] {
        assert_eq!(guest.call(number, Msg::new().u32(1)).unwrap_err(), EOPNOTSUPP);
    }
    let requests = guest.metrics.requests.load(Ordering::SeqCst);
    assert!(guest.end().is_ok());
    assert_eq!(requests, 2 + 4 + 5);
}

#[test]
fn a_reply_that_does_not_fit_is_an_error_not_a_broken_stream() {
    let dir = tree();
    symlink("t".repeat(4090), dir.path().join("long")).unwrap();
    let mut guest = start(dir.path(), Rights::READ, Limits::default());
    guest.version(4096).unwrap();
    guest.attach(0).unwrap();
    guest.find(1, "long").unwrap();
    assert_eq!(guest.readlink(1).unwrap_err(), libc::EOVERFLOW as u32);
    guest.find(2, "a/b/file").unwrap();
    guest.lopen(2, O_RDONLY).unwrap();
    assert_eq!(guest.read(2, 0, u32::MAX).unwrap(), b"hello");
}
