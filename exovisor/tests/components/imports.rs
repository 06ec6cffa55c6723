//! What components import: explained, refused, denied, revoked.

use exocell_exovisor::{Admission, Effect, ModuleLimits, Outcome, Policy, Spec, Tier};
use exocell_xgate::CapabilitySet;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::common::components::{admit_in, command, program, ready, run, run_with_streams};
use crate::common::{caps_with, table};

const RIGHT_READ: i64 = 1 << 1;
const RIGHT_WRITE: i64 = 1 << 6;
const CREATE: i32 = 1;
/// Errnos of preview 1, as which the programs see those of WASI 0.2.
const PERM: u8 = 63;

fn grant(host: &Path, rights: &str) -> CapabilitySet {
    let host = host.display();
    caps_with(&format!("[[folder]]\nhost = \"{host}\"\nguest = \"/data\"\nrights = [{rights}]"))
}

/// Runs `body` and answers with the bytes that it said.
fn said(body: &str, caps: &CapabilitySet) -> Vec<u8> {
    let (outcome, output) = run_with_streams(program(body), caps, Spec::default(), b"");
    assert_eq!(outcome, Outcome::Exited(0));
    output
}

/// Says the errno of opening the file.
fn open(flags: i32, rights: i64) -> String {
    format!("(drop (call $say (call $open (i32.const {flags}) (i64.const {rights}))))")
}

/// Says the errno of writing the file's name into the file that is open.
const WRITE: &str =
    "(drop (call $say (call $bytes (i32.load (i32.const 100)) (i32.const 0) (i32.const 4))))";

#[test]
fn a_writable_folder_takes_files() {
    let folder = tempfile::tempdir().unwrap();
    let create = open(CREATE, RIGHT_READ | RIGHT_WRITE);
    let caps = grant(folder.path(), r#""read", "write""#);
    assert_eq!(said(&format!("{create}{WRITE}"), &caps), [0, 0]);
    assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"file");
}

#[test]
fn a_read_only_folder_is_only_read() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "old").unwrap();
    let caps = grant(folder.path(), r#""read""#);
    assert_eq!(said(&open(0, RIGHT_READ), &caps), [0]);
    for (flags, rights) in
        [(0, RIGHT_WRITE), (CREATE, RIGHT_WRITE), (8, RIGHT_READ), (8, RIGHT_WRITE)]
    {
        assert_ne!(said(&open(flags, rights), &caps), [0], "flags {flags}, rights {rights}");
    }
    assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"old");
}

#[test]
fn nothing_outside_the_folder_is_reached() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("inner");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(outer.path().join("file"), "secret").unwrap();
    std::os::unix::fs::symlink(outer.path().join("file"), folder.join("file")).unwrap();
    let caps = grant(&folder, r#""read""#);
    let climb = r#"(i64.store (i32.const 50) (i64.const 0x6c69662f2e2e)) (i32.store8 (i32.const 56) (i32.const 101))
      (drop (call $say (call $path_open (i32.const 3) (i32.const 0) (i32.const 50) (i32.const 7)
      (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 100))))"#;
    assert_ne!(said(climb, &caps), [0]);
    let follow = r#"(drop (call $say (call $path_open (i32.const 3) (i32.const 1) (i32.const 0)
      (i32.const 4) (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 100))))"#;
    assert_ne!(said(follow, &caps), [0]);
}

#[test]
fn revoking_a_folder_acts_on_what_is_open() {
    // With the file and the folder's list open, waits, then says the errnos of reading and
    // writing the file, of the file's state, of reading the list and of opening anew.
    let body = format!(
        "(drop (call $open (i32.const 0) (i64.const {rights})))
         (drop (call $read (i32.load (i32.const 100))))
         (drop (call $say (i32.const 65))) (drop (call $ask))
         (drop (call $say (call $read (i32.load (i32.const 100))))) {WRITE}
         (drop (call $say (call $stat (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 4) (i32.const 512))))
         (drop (call $say (call $fd_readdir (i32.const 3) (i32.const 512) (i32.const 128) (i64.const 0) (i32.const 24))))
         {open}",
        rights = RIGHT_READ | RIGHT_WRITE,
        open = open(0, RIGHT_READ),
    );
    for revoke in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "content").unwrap();
        let caps = grant(folder.path(), r#""read", "write""#);
        let mut table = table(&caps);
        let (stdin, mut feed) = std::io::pipe().unwrap();
        let (mut drain, stdout) = std::io::pipe().unwrap();
        let (stdin, stdout) = (Some(OwnedFd::from(stdin)), Some(OwnedFd::from(stdout)));
        let spec = Spec { stdin, stdout, ..Spec::default() };
        let isolate = ready(&program(&body), &caps, &table, spec);
        let running = std::thread::spawn(move || isolate.run());
        drain.read_exact(&mut [0]).unwrap();
        if revoke {
            let handle = table.find("isolate", "folder:/data").expect("it was installed");
            table.revoke(handle).unwrap();
        }
        feed.write_all(b"x").unwrap();
        let mut errnos = Vec::new();
        drain.read_to_end(&mut errnos).unwrap();
        assert_eq!(running.join().unwrap(), Outcome::Exited(0));
        if revoke {
            assert!(errnos.iter().all(|errno| *errno != 0), "{errnos:?}");
            assert_eq!((errnos.len(), errnos[2]), (5, PERM), "{errnos:?}");
            assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"content");
        } else {
            assert_eq!(errnos, [0; 5]);
        }
    }
}

/// Imports what a program needs to make a socket, and answers with whether that was refused with
/// `access-denied`.
fn makes_a_socket() -> String {
    let codes = [
        "unknown",
        "access-denied",
        "not-supported",
        "invalid-argument",
        "out-of-memory",
        "timeout",
        "concurrency-conflict",
        "not-in-progress",
        "would-block",
        "invalid-state",
        "new-socket-limit",
        "address-not-bindable",
        "address-in-use",
        "remote-unreachable",
        "connection-refused",
        "connection-reset",
        "connection-aborted",
        "datagram-too-large",
        "name-unresolvable",
        "temporary-resolver-failure",
        "permanent-resolver-failure",
    ];
    let codes: String = codes.iter().map(|code| format!("\"{code}\" ")).collect();
    command(&format!(
        r#"
        (import "wasi:sockets/network@0.2.0" (instance $network
          (type $code (enum {codes})) (export "error-code" (type (eq $code)))
          (type $family (enum "ipv4" "ipv6")) (export "ip-address-family" (type (eq $family)))))
        (alias export $network "error-code" (type $code))
        (alias export $network "ip-address-family" (type $family))
        (import "wasi:sockets/tcp@0.2.0" (instance $tcp (export "tcp-socket" (type (sub resource)))))
        (alias export $tcp "tcp-socket" (type $socket))
        (import "wasi:sockets/tcp-create-socket@0.2.0" (instance $create
          (alias outer 1 $socket (type $s)) (export "tcp-socket" (type $socket (eq $s)))
          (alias outer 1 $family (type $f)) (export "ip-address-family" (type $family (eq $f)))
          (alias outer 1 $code (type $c)) (export "error-code" (type $code (eq $c)))
          (export "create-tcp-socket" (func (param "address-family" $family)
            (result (result (own $socket) (error $code)))))))
        (core module $memory (memory (export "memory") 1))
        (core instance $memory (instantiate $memory))
        (core func $create (canon lower (func $create "create-tcp-socket")
          (memory (core memory $memory "memory"))))
        (core module $m
          (import "" "create" (func $create (param i32 i32)))
          (import "" "memory" (memory 1))
          (func (export "run") (result i32)
            (call $create (i32.const 0) (i32.const 8))
            (i32.or (i32.ne (i32.load8_u (i32.const 8)) (i32.const 1))
              (i32.ne (i32.load8_u (i32.const 12)) (i32.const 1)))))
        (core instance $main (instantiate $m (with "" (instance
          (export "create" (func $create)) (export "memory" (memory $memory "memory"))))))"#
    ))
}

#[test]
fn sockets_are_imported_and_denied() {
    assert_eq!(run(makes_a_socket(), &caps_with("")), Outcome::Exited(0));
}

#[test]
fn what_components_are_not_given_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let host = folder.path().display();
    let layer = caps_with(&format!(
        "[disk]\nsize = \"1M\"\n[[folder]]\nhost = \"{host}\"\nguest = \"/data\"\n\
         rights = [\"read\", \"overlay\"]"
    ));
    let refused = admit_in(Policy::default(), &program(""), &layer).map(drop);
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("`folder:/data`") && message.contains("layer"), "{message}");
}

const UNKNOWN: &str = r#"
  (import "acme:rockets/launch@1.2.0" (instance $launch
    (export "missile" (type $missile (sub resource)))
    (export "launch" (func (param "count" u32) (result (own $missile))))))
  (core func $launch (canon lower (func $launch "launch")))
  (core module $m (import "" "launch" (func $launch (param i32) (result i32)))
    (func (export "run") (result i32) BODY))
  (core instance $main (instantiate $m (with "" (instance (export "launch" (func $launch))))))"#;

#[test]
fn an_import_that_nobody_has_traps_when_it_is_called() {
    let text = |body: &str| command(&UNKNOWN.replace("BODY", body));
    assert_eq!(run(text("(i32.const 0)"), &caps_with("")), Outcome::Exited(0));
    let ended = run(text("(call $launch (i32.const 1))"), &caps_with(""));
    let Outcome::Trap(message) = ended else { panic!("{ended:?}") };
    assert!(message.contains("acme:rockets/launch@1.2.0#launch"), "{message}");
}

#[test]
fn what_only_another_component_has_is_refused_by_name() {
    for (import, what) in [
        (r#"(import "code" (core module))"#, "module"),
        (r#"(import "code" (component))"#, "component"),
    ] {
        let text = format!("(component {import})");
        let refused = admit_in(Policy::default(), text.as_bytes(), &caps_with("")).map(drop);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("code") && message.contains(what), "{message}");
    }
}

#[test]
fn what_is_not_a_command_is_refused() {
    for text in
        ["(component)", r#"(component (instance $i) (export "wasi:cli/run@0.2.0" (instance $i)))"#]
    {
        let refused = admit_in(Policy::default(), text.as_bytes(), &caps_with("")).map(drop);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("wasi:cli/run"), "{message}");
    }
}

#[test]
fn imports_are_explained_by_interface() {
    let limits = ModuleLimits::default();
    let found = Admission::requirements(&program("(drop (call $ask))"), &limits).unwrap();
    let told = |name: &str| {
        let found = found.iter().find(|found| found.name.starts_with(name));
        let import = found.unwrap_or_else(|| panic!("{name}")).import.expect("it is known");
        (import.tier, import.effect, import.needs_text())
    };
    assert_eq!(told("wasi:cli/stdin@0.2."), (Tier::Wasi, Effect::Read, "stdio".to_owned()));
    assert_eq!(told("wasi:io/streams@0.2."), (Tier::Wasi, Effect::Pure, String::new()));
    let files = (Tier::Gated, Effect::Write, "folder".to_owned());
    assert_eq!(told("wasi:filesystem/types@0.2."), files);
    let unknown = command(&UNKNOWN.replace("BODY", "(i32.const 0)"));
    let found = Admission::requirements(unknown.as_bytes(), &limits).unwrap();
    let [found] = &found[..] else { panic!("{found:?}") };
    assert_eq!((found.name.as_str(), found.import.is_none()), ("acme:rockets/launch@1.2.0", true));
}
