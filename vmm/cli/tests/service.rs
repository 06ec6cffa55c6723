//! Wasm modules behind HTTP, by the command.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use common::program;
use tempfile::TempDir;

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
    let file = file.to_string_lossy().into_owned();
    let added = output(root.path(), &["module", "add", "--tenant", "alice", "sums", &file]);
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
