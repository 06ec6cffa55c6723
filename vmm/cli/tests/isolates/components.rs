//! Components under the same verbs and the same table as modules.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;

use tempfile::TempDir;
use wasi_preview1_component_adapter_provider as adapter;
use wit_component::ComponentEncoder;

use crate::common::cell::{self, Cell};
use crate::common::lan::{Lan, PEER};
use crate::common::servers::answered;
use crate::common::{eventually, exocell, finish, run, text, unique};

/// A program for preview 1, which is translated to WASI 0.2 inside the component: `$say` writes
/// one byte, `$ask` reads one, `$touch` makes a file and answers with the errno, `$sleep` waits a
/// hundredth of a second.
const PROGRAM: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_read" (func $fd_read (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "path_open" (func $path_open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_close" (func $close (param i32) (result i32)))
  (import "wasi_snapshot_preview1" "args_sizes_get" (func $args_sizes (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "args_get" (func $args (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "file")
  (func $bytes (param $from i32) (param $length i32) (result i32)
    (i32.store (i32.const 16) (local.get $from)) (i32.store (i32.const 20) (local.get $length))
    (call $fd_write (i32.const 1) (i32.const 16) (i32.const 1) (i32.const 24)))
  (func $say (param $byte i32)
    (i32.store8 (i32.const 32) (local.get $byte))
    (drop (call $bytes (i32.const 32) (i32.const 1))))
  (func $ask (result i32)
    (i32.store (i32.const 16) (i32.const 40)) (i32.store (i32.const 20) (i32.const 1))
    (drop (call $fd_read (i32.const 0) (i32.const 16) (i32.const 1) (i32.const 24)))
    (i32.load8_u (i32.const 40)))
  (func $touch (result i32) (local $errno i32)
    (local.set $errno (call $path_open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 4)
      (i32.const 1) (i64.const 64) (i64.const 0) (i32.const 0) (i32.const 100)))
    (if (i32.eqz (local.get $errno)) (then (drop (call $close (i32.load (i32.const 100))))))
    (local.get $errno))
  (func $sleep
    (i32.store (i32.const 216) (i32.const 1)) (i64.store (i32.const 224) (i64.const 10000000))
    (drop (call $poll (i32.const 200) (i32.const 300) (i32.const 1) (i32.const 400))))
"#;

/// A component file whose program has `body` as its `_start`.
fn component(body: &str) -> (TempDir, PathBuf) {
    let source = format!("{PROGRAM} (func (export \"_start\") {body}))");
    let module = wat::parse_str(source).unwrap();
    let name = adapter::WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME;
    let translator = adapter::WASI_SNAPSHOT_PREVIEW1_COMMAND_ADAPTER;
    let encoder = ComponentEncoder::default().module(&module);
    let encoder = encoder.and_then(|encoder| encoder.adapter(name, translator));
    let component = encoder.and_then(|mut encoder| encoder.encode()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("component.wasm");
    std::fs::write(&path, component).unwrap();
    (dir, path)
}

#[test]
fn a_component_has_arguments_input_output_and_an_exit_code() {
    let (_dir, path) = component(
        "(drop (call $args_sizes (i32.const 200) (i32.const 204)))
         (drop (call $args (i32.const 300) (i32.const 400)))
         (drop (call $bytes (i32.const 400) (i32.load (i32.const 204))))
         (call $say (i32.add (call $ask) (i32.const 1)))
         (call $exit (i32.const 1))",
    );
    let flags = ["run", "--rm", "-i", "--strength", "isolate", text(&path), "two words"];
    let ended = finish(&mut exocell(flags), b"a").exited(1);
    assert_eq!(ended.stdout, b"component.wasm\0two words\0b");
    let (_dir, path) = component("");
    run(["run", "--rm", text(&path)]).ok();
}

#[test]
fn a_read_only_folder_stays_as_it_is() {
    let folder = TempDir::new().unwrap();
    let (_dir, path) = component("(call $exit (i32.ne (call $touch) (i32.const 0)))");
    let volume = |rights: &str| format!("{}:/data{rights}", folder.path().display());
    run(["run", "--rm", "-v", &volume(":ro"), text(&path)]).exited(1);
    assert!(!folder.path().join("file").exists());
    run(["run", "--rm", "-v", &volume(""), text(&path)]).exited(0);
    assert!(folder.path().join("file").exists());
    run(["run", "--rm", text(&path)]).exited(1);
}

#[test]
fn a_file_can_be_waited_for_in_the_jail() {
    let folder = TempDir::new().unwrap();
    let volume = format!("{}:/data", folder.path().display());
    std::fs::write(folder.path().join("file"), "content").unwrap();
    // One subscription: that the file is read.
    let (_dir, path) = component(
        "(drop (call $path_open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 4)
           (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 216)))
         (i32.store8 (i32.const 208) (i32.const 1))
         (call $exit (call $poll (i32.const 200) (i32.const 300) (i32.const 1) (i32.const 400)))",
    );
    run(["run", "--rm", "-v", &volume, text(&path)]).ok();
}

#[test]
fn a_large_component_is_compiled_once() {
    let root = TempDir::new().unwrap();
    let (_dir, path) = component("(call $say (i32.const 65))");
    let mut bytes = std::fs::read(&path).unwrap();
    // A section of 128 KiB that means nothing: its length, and that its name has none.
    bytes.extend([0, 0x81, 0x80, 0x08, 0]);
    bytes.extend(vec![0; 128 << 10]);
    std::fs::write(&path, bytes).unwrap();
    let entries = || {
        let entries = std::fs::read_dir(root.path().join("compiled")).unwrap();
        let names = entries.map(|entry| entry.unwrap().path());
        names.filter(|path| !path.ends_with("key")).collect::<Vec<_>>()
    };
    let run_once = || {
        let flags = ["run", "--rm", "--root", text(root.path()), text(&path)];
        assert_eq!(run(flags).ok().stdout, b"A");
    };
    run_once();
    let [entry] = &entries()[..] else { panic!("{:?}", entries()) };
    let written = std::fs::metadata(entry).unwrap().modified().unwrap();
    run_once();
    assert_eq!(std::fs::metadata(entry).unwrap().modified().unwrap(), written);
    std::fs::write(entry, "not what was sealed").unwrap();
    run_once();
    assert_ne!(std::fs::metadata(entry).unwrap().len(), 19);
}

#[test]
fn a_folder_can_be_revoked_while_a_component_uses_it() {
    let folder = TempDir::new().unwrap();
    let volume = format!("{}:/data", folder.path().display());
    let (_dir, path) = component(
        "(loop $again (call $sleep) (br_if $again (i32.eqz (call $touch)))) (call $exit (i32.const 1))",
    );
    let cell = Cell { name: unique("component") };
    run(["run", "-d", "--name", &cell.name, "-v", &volume, text(&path)]).ok();
    eventually("it made its file", || folder.path().join("file").exists());
    assert!(cell::row(&cell.name).is_some_and(|row| row["state"] == "running"));
    run(["update", "--revoke", "folder:/data", &cell.name]).ok();
    eventually("it was told", || cell.state() == "exited");
    assert_eq!(cell.inspect()["exit_code"].as_i64(), Some(1));
}

/// Ends with 0 if the peer answers its `ping` with `pong`.
const CLIENT: &str = include_str!("../../../../exovisor/tests/common/client.wat");
const CODES: &str = r#""unknown" "access-denied" "not-supported" "invalid-argument" "out-of-memory"
  "timeout" "concurrency-conflict" "not-in-progress" "would-block" "invalid-state"
  "new-socket-limit" "address-not-bindable" "address-in-use" "remote-unreachable"
  "connection-refused" "connection-reset" "connection-aborted" "datagram-too-large"
  "name-unresolvable" "temporary-resolver-failure" "permanent-resolver-failure""#;
const ACCESS_DENIED: i32 = 11;

#[test]
fn a_granted_name_is_reached_and_no_other() {
    let lan = Lan::new();
    let listener = lan.at_peer(|| TcpListener::bind((PEER, 0)).unwrap());
    let port = listener.local_addr().unwrap().port();
    let answers = std::thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        peer.read_exact(&mut [0; 5]).unwrap();
        peer.write_all(b"pong").unwrap();
    });
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("client.wat");
    let client = CLIENT.replace("here.test", "peer.test").replace("CODES", CODES);
    std::fs::write(&path, client.replace("PORT", &port.to_string())).unwrap();
    let other = ["--allow-net", "other.test:80"];
    for flags in [&[][..], &other] {
        run([&["run", "--rm"], flags, &[text(&path)]].concat()).exited(ACCESS_DENIED);
    }
    run(["run", "--rm", "--allow-net", &format!("peer.test:{port}/raw"), text(&path)]).ok();
    answers.join().unwrap();
}

/// The same by datagrams.
const DATAGRAMS: &str = include_str!("../../../../exovisor/tests/common/datagrams.wat");

#[test]
fn datagrams_go_where_they_are_granted_to() {
    let lan = Lan::new();
    let socket = lan.at_peer(|| UdpSocket::bind((PEER, 0)).unwrap());
    let port = socket.local_addr().unwrap().port();
    let answers = std::thread::spawn(move || {
        let (_, from) = socket.recv_from(&mut [0; 5]).unwrap();
        socket.send_to(b"pong", from).unwrap();
    });
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("datagrams.wat");
    let address: String =
        PEER.split('.').map(|byte| format!("\\{:02x}", byte.parse::<u8>().unwrap())).collect();
    let component = DATAGRAMS
        .replace("ADDRESS\"", &format!("{address}\""))
        .replace("CODES", CODES)
        .replace("PORT", &port.to_string())
        .replace("CONNECTED", "0")
        .replace("ADDRESSED", "1")
        .replace("RETRIES", "0");
    std::fs::write(&path, component).unwrap();
    let streams_only = format!("{PEER}:{port}");
    for flags in [&[][..], &["--allow-net", &streams_only]] {
        run([&["run", "--rm"], flags, &[text(&path)]].concat()).exited(ACCESS_DENIED);
    }
    run(["run", "--rm", "--allow-net", &format!("{PEER}:{port}/udp"), text(&path)]).ok();
    answers.join().unwrap();
}

/// Answers who calls at its port with `welcome`.
const SERVER: &str = include_str!("../network/server.wat");

#[test]
fn a_published_port_leads_into_a_component() {
    let _lan = Lan::new();
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("server.wat");
    std::fs::write(&path, SERVER.replace("CODES", CODES).replace("PORT", "80")).unwrap();
    run(["run", "--rm", text(&path)]).exited(ACCESS_DENIED);
    let cell = Cell { name: unique("component") };
    run(["run", "-d", "--name", &cell.name, "-p", "8081:80", text(&path)]).ok();
    assert_eq!(answered("127.0.0.1:8081"), "welcome");
    eventually("it has ended", || cell.state() == "exited");
    assert_eq!(cell.inspect()["exit_code"].as_i64(), Some(0));
    assert!(TcpStream::connect("127.0.0.1:8081").is_err(), "nobody listens any more");
}

#[test]
fn limits_end_a_component() {
    let (_dir, path) = component("(loop $again (br $again))");
    run(["run", "--rm", "--timeout", "1s", text(&path)]).exited(137).complains_of(&["deadline"]);
    let cell = Cell { name: unique("component") };
    run(["run", "-d", "--name", &cell.name, text(&path)]).ok();
    eventually("it runs", || cell::row(&cell.name).is_some_and(|row| row["state"] == "running"));
    cell.verb(&["kill"]).ok();
    assert_eq!(cell.inspect()["exit_code"].as_i64(), Some(137));

    let (_dir, path) =
        component("(if (i32.eq (memory.grow (i32.const 1000)) (i32.const -1)) (then unreachable))");
    run(["run", "--rm", "--memory", "16M", text(&path)])
        .exited(137)
        .complains_of(&["memory limit"]);
    run(["run", "--rm", "--memory", "128M", text(&path)]).ok();
}

#[test]
fn a_components_imports_are_explained() {
    let (dir, path) = component("(drop (call $touch)) (call $say (call $ask)) (call $sleep)");
    let nothing = dir.path().join("nothing.toml");
    std::fs::write(&nothing, "version = 1\n").unwrap();
    let told = run(["caps", "explain", "--caps", text(&nothing), text(&path)]).ok();
    let rows: Vec<Vec<&str>> =
        told.text().lines().map(|line| line.split_whitespace().collect()).collect();
    for (name, words) in [
        ("wasi:cli/stdout@0.2.", ["1'", "write", "no", "stdio"]),
        ("wasi:cli/exit@0.2.", ["1'", "pure", "yes", "nothing"]),
        ("wasi:clocks/monotonic-clock@0.2.", ["1'", "read", "no", "clock"]),
        ("wasi:filesystem/types@0.2.", ["3", "write", "no", "folder"]),
    ] {
        let row = rows.iter().find(|row| row[0].starts_with(name));
        assert_eq!(row.unwrap_or_else(|| panic!("{name} in {}", told.text()))[1..], words);
    }
    let unknown = dir.path().join("unknown.wat");
    let import = r#"(import "acme:rockets/launch@1.0.0" (instance (export "f" (func))))"#;
    std::fs::write(&unknown, format!("(component {import})")).unwrap();
    let told = run(["caps", "explain", text(&unknown)]).ok();
    assert!(told.text().contains("nobody has acme:rockets/launch@1.0.0:"), "{}", told.text());
    run(["run", "--rm", text(&unknown)]).exited(125).complains_of(&["wasi:cli/run"]);
}

#[test]
fn what_components_are_not_given_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let volume = format!("{}:/data:overlay", folder.path().display());
    let (_dir, path) = component("");
    run(["run", "--rm", "-v", &volume, text(&path)])
        .exited(125)
        .complains_of(&["folder:/data", "components are not given"]);
    let root = text(folder.path());
    run(["module", "add", "--root", root, "--tenant", "a", "name", text(&path)])
        .exited(125)
        .complains_of(&["component", "run as a command"]);
}
