//! Wasm modules behind HTTP, by the command.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

use crate::common::lan::{Lan, OTHER, PEER};
use crate::common::program;
use crate::common::servers::echo;

const SUMS: &str = r#"(module (func (export "add") (param i32 i32) (result i32)
  (i32.add (local.get 0) (local.get 1))))"#;

fn exocell(root: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("--root").arg(root).args(words);
    command
}

fn output(root: &Path, words: &[&str]) -> Output {
    exocell(root, words).output().expect("the command runs")
}

/// A root with the module `sums` of the tenant `alice`, and her key.
fn with_sums() -> (TempDir, String) {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("sums.wat");
    std::fs::write(&file, SUMS).unwrap();
    with_module(root, "sums", &file)
}

/// A root with this module of `alice`, and her key.
fn with_module(root: TempDir, name: &str, file: &Path) -> (TempDir, String) {
    let file = file.to_string_lossy().into_owned();
    let added = output(root.path(), &["module", "add", "--tenant", "alice", name, &file]);
    assert!(added.status.success(), "{added:?}");
    let key = String::from_utf8(added.stdout).unwrap().trim().to_owned();
    assert_eq!(key.len(), 64);
    (root, key)
}

/// Ends the server with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(root: &Path, socket: &Path) -> Server {
    let place = socket.to_string_lossy().into_owned();
    let mut command = exocell(root, &["serve", "--http", &place]);
    let mut server = Server(command.stdout(Stdio::piped()).spawn().expect("the command runs"));
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains(&place), "{line}");
    server
}

fn post(socket: &Path, path: &str, key: &str, body: &str) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_module_is_served_to_its_tenant() {
    let (root, key) = with_sums();
    let socket = root.path().join("http.sock");
    // The second finds the socket that the first left when it was killed.
    for _ in 0..2 {
        let _server = serve(root.path(), &socket);
        let answer = post(&socket, "/v1/call/sums/add", &key, "[40, 2]");
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("[42]"), "{answer}");
        let refused = post(&socket, "/v1/call/sums/add", "wrong", "[40, 2]");
        assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
    }
}

#[test]
fn a_command_is_served_as_it_is_run() {
    let hello = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/hello.wat");
    let (root, key) = with_module(tempfile::tempdir().unwrap(), "hello", &hello);
    let ran = output(root.path(), &["run", "--rm", &hello.to_string_lossy()]);
    let said = String::from_utf8(ran.stdout).unwrap();
    assert!(said.contains("Hello from an isolate"), "{said}");
    let socket = root.path().join("http.sock");
    let _server = serve(root.path(), &socket);
    let answer = post(&socket, "/v1/run/hello", &key, "");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(answer.split_once("\r\n\r\n").unwrap().1, said);
}

#[test]
fn modules_are_listed_and_removed() {
    let (root, _) = with_sums();
    let listed = output(root.path(), &["module", "ls"]);
    let text = String::from_utf8(listed.stdout).unwrap();
    assert!(text.contains("sums") && text.contains("alice"), "{text}");
    assert!(output(root.path(), &["module", "rm", "sums"]).status.success());
    let gone = output(root.path(), &["module", "rm", "sums"]);
    assert_eq!(gone.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&gone.stderr).contains("no module sums"), "{gone:?}");
}

#[test]
fn a_server_needs_a_front() {
    let root = tempfile::tempdir().unwrap();
    let ended = output(root.path(), &["serve"]);
    assert!(!ended.status.success());
    assert!(String::from_utf8_lossy(&ended.stderr).contains("--docker"), "{ended:?}");
}

/// `ask` connects to the four octets that it is given, says "hi" and answers with how many bytes
/// came back, or with the errno below zero.
const ASK: &str = r#"(module
  (import "wasi_snapshot_preview1" "sock_open" (func $open (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_connect" (func $connect (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_send" (func $send (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_recv" (func $recv (param i32 i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "\10\00\00\00\04\00\00\00")
  (data (i32.const 32) "\00\01\00\00\02\00\00\00")
  (data (i32.const 256) "hi")
  (func (export "ask") (param $host i32) (param $port i32) (result i32)
    (local $errno i32)
    (i32.store (i32.const 16) (local.get $host))
    (if (local.tee $errno (call $open (i32.const 1) (i32.const 2) (i32.const 48)))
      (then (return (i32.sub (i32.const 0) (local.get $errno)))))
    (if (local.tee $errno (call $connect (i32.load (i32.const 48)) (i32.const 0) (local.get $port)))
      (then (return (i32.sub (i32.const 0) (local.get $errno)))))
    (drop (call $send (i32.load (i32.const 48)) (i32.const 32) (i32.const 1) (i32.const 0) (i32.const 52)))
    (if (local.tee $errno (call $recv (i32.load (i32.const 48)) (i32.const 32) (i32.const 1) (i32.const 0) (i32.const 56) (i32.const 52)))
      (then (return (i32.sub (i32.const 0) (local.get $errno)))))
    (i32.load (i32.const 56))))"#;

#[test]
fn a_served_module_reaches_what_its_table_grants() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo("0.0.0.0:0"));
    let root = tempfile::tempdir().unwrap();
    let (module, caps) = (root.path().join("ask.wat"), root.path().join("ask.toml"));
    std::fs::write(&module, ASK).unwrap();
    let table =
        format!("version = 1\n[memory]\nlimit = \"1M\"\n[network]\nconnect = [\"{PEER}:{port}\"]");
    std::fs::write(&caps, table).unwrap();
    let (module, caps) = (module.to_string_lossy(), caps.to_string_lossy());
    let add = ["module", "add", "--tenant", "alice", "--caps", &*caps, "ask", &*module];
    let added = output(root.path(), &add);
    assert!(added.status.success(), "{added:?}");
    let key = String::from_utf8(added.stdout).unwrap().trim().to_owned();
    let socket = root.path().join("http.sock");
    let _server = serve(root.path(), &socket);
    let ask = |host: &str| {
        let host: std::net::Ipv4Addr = host.parse().unwrap();
        let host = i32::from_le_bytes(host.octets());
        post(&socket, "/v1/call/ask/ask", &key, &format!("[{host}, {port}]"))
    };
    for _ in 0..20 {
        assert!(ask(PEER).contains("\"results\":[2]"), "{}", ask(PEER));
    }
    // EACCES.
    assert!(ask(OTHER).contains("\"results\":[-2]"), "{}", ask(OTHER));
    let log = root.path().join("networks/ask/network.log");
    crate::common::eventually("it is written down", || {
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        log.contains("\"denied\"") && log.contains("\"closed\"")
    });
    assert!(output(root.path(), &["module", "rm", "ask"]).status.success());
    assert!(!log.exists());
}
