//! Preopened folders: rights, and revoking one while it is in use.

use exocell_exovisor::{Outcome, Spec};
use exocell_xgate::CapabilitySet;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::common::{FILES, caps_with, ready, table};

const NOTCAPABLE: i32 = 76;
const RIGHT_READ: i64 = 1 << 1;
const RIGHT_WRITE: i64 = 1 << 6;
const CREATE: i32 = 1;

fn grant(host: &Path, rights: &str) -> CapabilitySet {
    let host = host.display();
    caps_with(&format!("[[folder]]\nhost = \"{host}\"\nguest = \"/data\"\nrights = [{rights}]"))
}

fn module(body: &str) -> String {
    format!("{FILES} (func (export \"_start\") (local $n i32) {body}))")
}

fn run(body: &str, caps: &CapabilitySet) -> i32 {
    match ready(&module(body), caps, &table(caps), Spec::default()).run() {
        Outcome::Exited(code) => code,
        other => panic!("{other:?}"),
    }
}

/// Opens `file` and exits with the errno.
fn open(flags: i32, rights: i64) -> String {
    format!(
        "(call $exit (call $open (i32.const 0) (i32.const 4) (i32.const {flags}) (i64.const {rights})))"
    )
}

/// Writes `file` into the file that is open at 100 and exits with the errno.
const WRITE: &str = r#"
  (i32.store (i32.const 200) (i32.const 0)) (i32.store (i32.const 204) (i32.const 4))
  (call $exit (call $fd_write (i32.load (i32.const 100)) (i32.const 200) (i32.const 1) (i32.const 208)))"#;

#[test]
fn a_writable_folder_takes_files() {
    let folder = tempfile::tempdir().unwrap();
    let create = format!(
        "(drop (call $open (i32.const 0) (i32.const 4) (i32.const {CREATE}) (i64.const {}))) {WRITE}",
        RIGHT_READ | RIGHT_WRITE
    );
    assert_eq!(run(&create, &grant(folder.path(), r#""read", "write""#)), 0);
    assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"file");
}

#[test]
fn a_read_only_folder_is_only_read() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "old").unwrap();
    let caps = grant(folder.path(), r#""read""#);
    assert_eq!(run(&open(0, RIGHT_READ), &caps), 0);
    for (flags, rights) in
        [(0, RIGHT_WRITE), (CREATE, RIGHT_READ), (8, RIGHT_READ), (8, RIGHT_WRITE)]
    {
        assert_ne!(run(&open(flags, rights), &caps), 0, "flags {flags}, rights {rights}");
    }
    assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"old");
}

#[test]
fn nothing_outside_the_folder_is_reached() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("inner");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(outer.path().join("file"), "secret").unwrap();
    let caps = grant(&folder, r#""read""#);
    let climb = "(call $exit (call $open (i32.const 4) (i32.const 7) (i32.const 0) (i64.const 2)))";
    assert_ne!(run(climb, &caps), 0);
    std::os::unix::fs::symlink(outer.path().join("file"), folder.join("file")).unwrap();
    let follow = r#"(call $exit (call $path_open (i32.const 3) (i32.const 1) (i32.const 0) (i32.const 4)
      (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 100)))"#;
    assert_ne!(run(follow, &caps), 0);
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let caps = grant(Path::new("/nonexistent/folder"), r#""read""#);
    let admitted = crate::common::admit(&module(""), &caps).unwrap();
    let error =
        exocell_exovisor::Isolate::prepare(&admitted, &table(&caps), "isolate", Spec::default());
    let error = error.err().expect("it is refused").to_string();
    assert!(error.contains("/nonexistent/folder") && error.contains("folder:/data"), "{error}");
}

/// Opens the file, moves its descriptor to 3's neighbour if `renumber`, says so on standard
/// output, waits for a byte on standard input, then exits with the errno of reading the file,
/// plus 256 times that of opening it again.
fn use_twice(renumber: bool) -> String {
    let renumber = if renumber {
        r#"(drop (call $renumber (i32.load (i32.const 100)) (i32.const 0)))
           (i32.store (i32.const 100) (i32.const 0))"#
    } else {
        ""
    };
    module(&format!(
        r#"
      (drop (call $open (i32.const 0) (i32.const 4) (i32.const 0) (i64.const {RIGHT_READ})))
      (i32.store (i32.const 200) (i32.const 300)) (i32.store (i32.const 204) (i32.const 1))
      (drop (call $fd_write (i32.const 1) (i32.const 200) (i32.const 1) (i32.const 208)))
      (drop (call $fd_read (i32.const 0) (i32.const 200) (i32.const 1) (i32.const 208)))
      {renumber}
      (local.set $n (call $fd_read (i32.load (i32.const 100)) (i32.const 200) (i32.const 1) (i32.const 208)))
      (call $exit (i32.add (local.get $n) (i32.mul (i32.const 256)
        (call $open (i32.const 0) (i32.const 4) (i32.const 0) (i64.const {RIGHT_READ})))))"#
    ))
}

fn revoke_between(text: &str, revoke: bool) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "content").unwrap();
    let caps = grant(folder.path(), r#""read""#);
    let mut table = table(&caps);
    let (stdin, mut feed) = std::io::pipe().unwrap();
    let (mut drain, stdout) = std::io::pipe().unwrap();
    let (stdin, stdout) = (Some(OwnedFd::from(stdin)), Some(OwnedFd::from(stdout)));
    let isolate = ready(text, &caps, &table, Spec { stdin, stdout, ..Spec::default() });
    let running = std::thread::spawn(move || isolate.run());
    drain.read_exact(&mut [0]).unwrap();
    if revoke {
        let handle = table.find("isolate", "folder:/data").expect("it was installed");
        assert_eq!(table.revoke(handle).unwrap().len(), 1);
    }
    feed.write_all(b"x").unwrap();
    running.join().unwrap()
}

#[test]
fn revoking_acts_on_a_file_that_is_open() {
    for renumber in [false, true] {
        let text = use_twice(renumber);
        assert_eq!(revoke_between(&text, false), Outcome::Exited(0), "renumber {renumber}");
        let denied = NOTCAPABLE + 256 * NOTCAPABLE;
        assert_eq!(revoke_between(&text, true), Outcome::Exited(denied), "renumber {renumber}");
    }
}
