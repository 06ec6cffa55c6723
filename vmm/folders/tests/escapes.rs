//! Nothing outside the folder is reached: not by names, not by symlinks, not
//! by races, and not through special files of the host.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::*;
use exocell_folders::{Folder, Rights};
use libc::{O_CREAT, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY};

/// A secret beside a shared folder.
fn beside() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("outside")).unwrap();
    fs::write(dir.path().join("outside/secret"), "secret").unwrap();
    fs::create_dir_all(dir.path().join("shared/in")).unwrap();
    fs::write(dir.path().join("shared/in/secret"), "public").unwrap();
    let shared = dir.path().join("shared");
    (dir, shared)
}

const HOSTILE_NAMES: &[&str] =
    &["..", ".", "/", "/etc", "a/b", "../outside", "in/../..", "..\0", "", "x\0y"];

#[test]
fn hostile_names_are_refused_by_every_message_that_takes_one() {
    let (dir, shared) = beside();
    let mut guest = mount(&shared, Rights::READ_WRITE);
    guest.find(1, "in/secret").unwrap();
    let long = "n".repeat(256);
    for name in HOSTILE_NAMES.iter().copied().chain([long.as_str()]) {
        let answers = [
            guest.walk(0, 9, &[name]),
            guest.lcreate(0, name, O_RDWR | O_CREAT, 0o600),
            guest.mkdir(0, name, 0o700),
            guest.mknod(0, name, libc::S_IFREG),
            guest.symlink(0, name, "target"),
            guest.link(0, 1, name),
            guest.rename(1, 0, name),
            guest.renameat(0, name, 0, "in2"),
            guest.renameat(0, "in", 0, name),
            guest.unlinkat(0, name, 0),
            guest.unlinkat(0, name, 0x200),
        ];
        for (at, answer) in answers.iter().enumerate() {
            let errno = *answer.as_ref().unwrap_err();
            assert!([EACCES, EINVAL, ENAMETOOLONG].contains(&errno), "{name:?} by {at}: {errno}");
        }
    }
    assert!(guest.denials() >= 11 * 5);
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 1);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn a_walk_stops_at_parents_and_symlinks() {
    let (dir, shared) = beside();
    symlink(dir.path().join("outside"), shared.join("abs")).unwrap();
    symlink("../outside", shared.join("rel")).unwrap();
    symlink("/etc/passwd", shared.join("passwd")).unwrap();
    let mut guest = mount(&shared, Rights::READ_WRITE);
    assert_eq!(guest.walk(0, 1, &["in", "..", "..", "outside"]).unwrap()[..2], [1, 0]);
    for (fid, link) in [(1, "abs"), (2, "rel"), (3, "passwd")] {
        guest.find(fid, link).unwrap();
        assert_eq!(guest.walk(fid, 9, &["secret"]).unwrap_err(), ENOTDIR);
        assert_eq!(guest.lopen(fid, O_RDONLY).unwrap_err(), ELOOP);
        assert_eq!(guest.lopen(fid, O_RDWR | O_TRUNC).unwrap_err(), ELOOP);
        assert_eq!(guest.setattr(fid, 8, Set::default()).unwrap_err(), ELOOP);
        assert_eq!(guest.lcreate(0, link, O_RDWR | O_CREAT, 0o600).unwrap_err(), ELOOP);
        assert_eq!(guest.mkdir(fid, "new", 0o700).unwrap_err(), ENOTDIR);
        assert_eq!(guest.unlinkat(fid, "secret", 0).unwrap_err(), ENOTDIR);
    }
    assert_eq!(fs::read(dir.path().join("outside/secret")).unwrap(), b"secret");
}

#[test]
fn setattr_and_link_act_on_a_symlink_itself() {
    let (dir, shared) = beside();
    let secret = dir.path().join("outside/secret");
    let before = fs::metadata(&secret).unwrap();
    symlink(&secret, shared.join("link")).unwrap();
    let mut guest = mount(&shared, Rights::READ_WRITE);
    guest.find(1, "link").unwrap();
    let times = Set { mtime: (1, 0), atime: (1, 0), uid: 12345, ..Set::default() };
    guest.setattr(1, 0x1b0, times).unwrap();
    let _ = guest.setattr(1, 6, times);
    guest.link(0, 1, "hard").unwrap();
    assert!(fs::symlink_metadata(shared.join("hard")).unwrap().is_symlink());
    let after = fs::metadata(&secret).unwrap();
    assert_eq!(before.modified().unwrap(), after.modified().unwrap());
    use std::os::unix::fs::MetadataExt;
    assert_eq!(
        (before.uid(), before.nlink(), before.ctime_nsec()),
        (after.uid(), after.nlink(), after.ctime_nsec())
    );
}

#[test]
fn a_file_replaced_by_a_symlink_is_stale_not_followed() {
    let (dir, shared) = beside();
    let mut guest = mount(&shared, Rights::READ_WRITE);
    for fid in 1..4 {
        guest.find(fid, "in/secret").unwrap();
    }
    fs::remove_file(shared.join("in/secret")).unwrap();
    symlink(dir.path().join("outside/secret"), shared.join("in/secret")).unwrap();
    assert_eq!(guest.lopen(1, O_RDONLY).unwrap_err(), ESTALE);
    assert_eq!(guest.setattr(2, 8, Set::default()).unwrap_err(), ESTALE);
    assert_eq!(guest.rename(2, 0, "stolen").unwrap_err(), ESTALE);
    assert_eq!(guest.link(0, 2, "stolen").unwrap_err(), ESTALE);
    assert_eq!(guest.remove(3).unwrap_err(), ESTALE);
    assert_eq!(fs::read(dir.path().join("outside/secret")).unwrap(), b"secret");
}

#[test]
fn a_directory_replaced_by_a_symlink_keeps_meaning_the_directory() {
    let (dir, shared) = beside();
    let mut guest = mount(&shared, Rights::READ_WRITE);
    guest.find(1, "in").unwrap();
    guest.find(2, "in/secret").unwrap();
    fs::rename(shared.join("in"), shared.join("moved")).unwrap();
    symlink(dir.path().join("outside"), shared.join("in")).unwrap();
    guest.walk(1, 3, &["secret"]).unwrap();
    guest.lopen(3, O_RDONLY).unwrap();
    assert_eq!(guest.read(3, 0, 100).unwrap(), b"public");
    guest.lopen(2, O_WRONLY).unwrap();
    guest.write(2, 0, b"PUBLIC").unwrap();
    assert_eq!(fs::read(dir.path().join("outside/secret")).unwrap(), b"secret");
}

/// The host swaps a directory with a symlink to the outside as fast as it can
/// while the guest walks, opens, reads and writes through it.
#[test]
fn a_race_of_directory_and_symlink_never_leads_out() {
    let (dir, shared) = beside();
    let stop = Arc::new(AtomicBool::new(false));
    let (swapping, at, outside) = (stop.clone(), shared.clone(), dir.path().join("outside"));
    let swapper = std::thread::spawn(move || {
        symlink(outside, at.join("evil")).unwrap();
        let path = |name: &str| std::ffi::CString::new(at.join(name).to_str().unwrap()).unwrap();
        let (real, evil) = (path("in"), path("evil"));
        while !swapping.load(Ordering::Relaxed) {
            let flags = libc::RENAME_EXCHANGE;
            // SAFETY: both paths are C strings that outlive the call. Needed
            // because the standard library cannot exchange two entries.
            unsafe {
                libc::renameat2(libc::AT_FDCWD, real.as_ptr(), libc::AT_FDCWD, evil.as_ptr(), flags)
            };
        }
    });
    let mut guest = mount(&shared, Rights::READ_WRITE);
    let mut reached = 0;
    for _ in 0..3000 {
        if guest.find(1, "in/secret").is_ok() && guest.lopen(1, O_RDWR).is_ok() {
            assert_eq!(guest.read(1, 0, 100).unwrap(), b"public");
            guest.write(1, 0, b"public").unwrap();
            reached += 1;
        }
        let _ = guest.clunk(1);
    }
    stop.store(true, Ordering::Relaxed);
    swapper.join().unwrap();
    assert!(reached > 0, "the race never let the guest through");
    assert_eq!(fs::read(dir.path().join("outside/secret")).unwrap(), b"secret");
    assert_eq!(fs::read_dir(dir.path().join("outside")).unwrap().count(), 1);
}

#[test]
fn special_files_of_the_host_cannot_be_opened() {
    let (_dir, shared) = beside();
    let fifo = std::ffi::CString::new(shared.join("fifo").to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string that outlives the call. Needed because the
    // standard library makes no fifos.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o666) }, 0);
    let _listener = UnixListener::bind(shared.join("socket")).unwrap();
    let null = std::ffi::CString::new(shared.join("null").to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string that outlives the call. Needed because the
    // standard library makes no devices.
    let made =
        unsafe { libc::mknod(null.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, 3)) } == 0;
    let mut guest = mount(&shared, Rights::READ_WRITE);
    let names = ["fifo", "socket", "null"];
    for (fid, name) in names.into_iter().enumerate().take(if made { 3 } else { 2 }) {
        let fid = fid as u32 + 1;
        guest.find(fid, name).unwrap();
        assert!(guest.getattr(fid).is_ok());
        for flags in [O_RDONLY, O_WRONLY, O_RDWR] {
            assert_eq!(guest.lopen(fid, flags).unwrap_err(), EACCES, "{name}");
        }
        assert_eq!(guest.lcreate(0, name, O_RDWR | O_CREAT, 0o600).unwrap_err(), EACCES);
        let refused = if name == "null" { EPERM } else { EACCES };
        assert_eq!(guest.setattr(fid, 8, Set::default()).unwrap_err(), refused, "{name}");
        if name == "null" {
            assert_eq!(guest.setattr(fid, 1, Set::default()).unwrap_err(), EPERM);
        }
    }
}

#[test]
fn a_file_replaced_by_a_fifo_is_stale_and_does_not_block() {
    let (_dir, shared) = beside();
    let mut guest = mount(&shared, Rights::READ);
    guest.find(1, "in/secret").unwrap();
    fs::remove_file(shared.join("in/secret")).unwrap();
    let fifo = std::ffi::CString::new(shared.join("in/secret").to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string that outlives the call. Needed because the
    // standard library makes no fifos.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o666) }, 0);
    assert_eq!(guest.lopen(1, O_RDONLY).unwrap_err(), ESTALE);
}

/// `/proc` is a mount of its own below `/`.
#[test]
fn what_is_mounted_below_the_folder_stays_out_unless_asked_for() {
    let mut guest = mount(Path::new("/"), Rights::READ);
    assert_eq!(guest.walk(0, 1, &["proc"]).unwrap_err(), EACCES);
    assert_eq!(guest.denials(), 1);
    let mut folder =
        Folder::new(fs::File::open("/").unwrap().into(), Rights::READ, Arc::new(|| true));
    folder.submounts = true;
    let mut guest = start_folder(folder, Arc::default());
    guest.version(8192).unwrap();
    guest.attach(0).unwrap();
    guest.find(1, "proc/sys").unwrap();
    guest.find(2, "proc/self").unwrap();
    assert_eq!(guest.walk(2, 3, &["root"]).unwrap_err(), ENOTDIR, "a magic link is not followed");
}
