//! `exocell mcp` with the protocol's reference client, pinned by hash and kept under
//! EXOCELL_CACHE, and with clients that are none.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::common::host::{command_line, state_root};
use crate::common::{IMAGE, Started, eventually, finish, given, pip, program, text};

const PINS: &str = include_str!("../mcp/pins.txt");
const TOUR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mcp/tour.py");
const STEPS: &str = "made commands files resources ports killed";
const FLAGS: [&str; 9] =
    ["--image", IMAGE, "--sandboxes", "1", "--", "--memory", "256m", "--disk", "256m"];

/// A state root of its own, with this machine's images.
fn root() -> TempDir {
    let root = tempfile::tempdir().expect("a state root");
    let images = state_root().join("images");
    std::os::unix::fs::symlink(images, root.path().join("images")).expect("a link");
    root
}

fn in_root(root: &TempDir, words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("--root").arg(root.path()).args(words);
    command.env("EXOCELL_KERNEL", given("EXOCELL_TEST_KERNEL"));
    command
}

fn cells(root: &TempDir) -> String {
    finish(&mut in_root(root, &["ps", "-aq"]), b"").ok().text().to_owned()
}

fn tour(words: &[&str]) -> String {
    let packages = pip::wheels("mcp", PINS);
    let mut client = Command::new("python3");
    client.arg(TOUR).args(words).env("EXOCELL_KERNEL", given("EXOCELL_TEST_KERNEL"));
    client.env("PYTHONPATH", text(&packages)).env("PYTHONDONTWRITEBYTECODE", "1");
    let told = finish(&mut client, b"").ok();
    told.text().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A server of HTTP.
struct Http {
    root: TempDir,
    child: Child,
    address: String,
}

impl Http {
    fn start() -> Self {
        Self::start_with(&[])
    }

    /// With more flags for every sandbox.
    fn start_with(more: &[&str]) -> Self {
        let root = root();
        let mut command = in_root(&root, &["mcp", "--http", "127.0.0.1:0"]);
        let mut child =
            command.args(FLAGS).args(more).stdout(Stdio::piped()).spawn().expect("exocell mcp");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("the server says that it serves");
        let address = line.trim().strip_prefix("exocell serves http://");
        let address = address.unwrap_or_else(|| panic!("it said {line:?}")).to_owned();
        Self { root, child, address: address.trim_end_matches("/mcp").to_owned() }
    }

    fn key(&self) -> String {
        let key = fs::read_to_string(self.root.path().join("mcp/key")).expect("a key");
        key.trim().to_owned()
    }

    /// What the server answers to bytes, until it closes the connection.
    fn answer(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.write_all(request.as_bytes()).expect("a request");
        let mut told = String::new();
        stream.read_to_string(&mut told).expect("an answer");
        told
    }

    fn asks(&self, path: &str, headers: &str) -> String {
        let body = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
        self.answer(&format!(
            "POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Accept: application/json, text/event-stream\r\n{headers}Content-Length: {}\r\n\r\n{body}",
            body.len()
        ))
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        // It may be over.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_reference_client_is_given_a_tour_by_standard_input() {
    let root = root();
    let command = [text(&program()), "--root", text(root.path()), "mcp"].map(str::to_owned);
    let words: Vec<&str> = command.iter().map(String::as_str).chain(FLAGS).collect();
    assert_eq!(tour(&[&["stdio"], &words[..]].concat()), format!("{STEPS} {STEPS}"));
    eventually("nothing is left", || cells(&root).is_empty());
}

#[test]
fn the_reference_client_is_given_a_tour_by_http() {
    let server = Http::start();
    let url = format!("http://{}/mcp", server.address);
    assert_eq!(tour(&["http", &url, &server.key()]), STEPS);
    eventually("nothing is left", || cells(&server.root).is_empty());
}

#[test]
fn what_sandboxes_are_given_is_not_in_the_servers_command_line() {
    let given = ["-e", "TOKEN=sk-not-for-others", "--secret", "KEY=also-not@example.org"];
    let server = Http::start_with(&given);
    let line = command_line(server.child.id() as i32);
    assert!(line.contains("TOKEN=***") && line.contains("KEY=***"), "{line}");
    assert!(!line.contains("not-for-others") && !line.contains("also-not"), "{line}");
}

#[test]
fn http_is_for_whoever_has_the_key_and_is_no_page_of_a_browser() {
    let server = Http::start();
    let (host, key) = (&server.address, server.key());
    let owner = fs::metadata(server.root.path().join("mcp/key")).expect("a key");
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&owner.permissions()) & 0o777, 0o600);
    let host = format!("Host: {host}\r\n");
    let mine = format!("{host}Authorization: Bearer {key}\r\n");
    for (path, headers, status) in [
        ("/mcp", host.clone(), 401),
        ("/mcp", format!("{host}Authorization: Bearer {}\r\n", "0".repeat(64)), 401),
        ("/other", mine.clone(), 404),
        ("/mcp", mine.replace(&host, "Host: attacker.example\r\n"), 403),
        ("/mcp", format!("{mine}Origin: https://attacker.example\r\n"), 403),
    ] {
        let told = server.asks(path, &headers);
        assert!(told.starts_with(&format!("HTTP/1.1 {status} ")), "{path} {headers}: {told}");
    }
}

#[test]
fn who_has_no_key_keeps_nobody_out() {
    let server = Http::start();
    // More than there are places for.
    let mut idle: Vec<_> = (0..600)
        .map(|_| {
            let mut stream = TcpStream::connect(&server.address).expect("a connection");
            let _ = stream.write_all(b"POST /mcp HTTP/1.1\r\n");
            stream
        })
        .collect();
    let mine = format!("Host: {}\r\nAuthorization: Bearer {}\r\n", server.address, server.key());
    assert!(server.asks("/other", &mine).starts_with("HTTP/1.1 404 "));
    // Who has waited longest has gone, and nobody had to wait for the others to go by themselves.
    assert!(matches!(idle[0].read(&mut [0]), Ok(0) | Err(_)));
    let last = idle.last_mut().expect("the last one");
    last.set_nonblocking(true).expect("a socket");
    assert_eq!(last.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn sessions_of_http_have_an_end_in_number() {
    let server = Http::start();
    let headers = format!(
        "Host: {}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\n\
         Accept: application/json, text/event-stream\r\n",
        server.address,
        server.key()
    );
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"test","version":"1"}}}"#;
    let say = |verb: &str, headers: &str, body: &str| {
        let length = body.len();
        server.answer(&format!(
            "{verb} /mcp HTTP/1.1\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
        ))
    };
    let mut id = String::new();
    for _ in 0..256 {
        let told = say("POST", &headers, body);
        let line = told.lines().find_map(|line| line.strip_prefix("mcp-session-id: "));
        id = line.unwrap_or_else(|| panic!("no session: {told}")).to_owned();
    }
    let told = say("POST", &headers, body);
    assert!(told.starts_with("HTTP/1.1 429 ") && told.contains("as many sessions"), "{told}");
    let own = format!("{headers}Mcp-Session-Id: {id}\r\n");
    let told = say("DELETE", &own, "");
    assert!(told.starts_with("HTTP/1.1 2"), "{told}");
    let told = say("POST", &headers, body);
    assert!(told.starts_with("HTTP/1.1 200 "), "{told}");
}

/// Speaks the protocol by hand up to a sandbox.
fn with_sandbox(root: &TempDir) -> Started {
    let mut command = in_root(root, &["mcp"]);
    let mut server = Started::new(command.args(FLAGS));
    for message in [
        r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"test","version":"1"}}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#,
        r#"{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"create_sandbox","arguments":{}}}"#,
    ] {
        server.write(format!("{message}\n").as_bytes());
    }
    eventually("a sandbox runs", || {
        let listed = finish(&mut in_root(root, &["ps", "-q", "--filter", "status=running"]), b"");
        !listed.ok().text().is_empty()
    });
    server
}

#[test]
fn sandboxes_end_with_their_server_however_that_ends() {
    let root = root();
    // What would end them in order is stopped by a program of theirs.
    let stop = |root: &TempDir| {
        let id = cells(root);
        let script = "until pkill -STOP -x cat; do sleep 0.1; done";
        finish(&mut in_root(root, &["exec", &id, "sh", "-c", script]), b"").ok();
    };
    let mut gone = with_sandbox(&root);
    stop(&root);
    gone.close_stdin();
    gone.finish(std::time::Duration::from_secs(60)).expect("it ends with its client").ok();
    eventually("nothing is left", || cells(&root).is_empty());

    let killed = with_sandbox(&root);
    stop(&root);
    let pid = nix::unistd::Pid::from_raw(killed.pid());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("kill");
    killed.finish(std::time::Duration::from_secs(60)).expect("it is killed").exited(137);
    eventually("nothing is left", || cells(&root).is_empty());
}

#[test]
fn what_is_wrong_is_said_before_a_client_comes() {
    let root = root();
    for (words, named) in [
        (&["mcp", "--", "--name", "x"][..], "--name"),
        (&["mcp", "--", "--no-such-flag"], "--no-such-flag"),
        (&["mcp", "--http", "nowhere"], "nowhere"),
    ] {
        finish(&mut in_root(&root, words), b"").complains_of(&[named]);
    }
    let short = root.path().join("short");
    fs::write(&short, "guess\n").expect("a file");
    let words = ["mcp", "--http", "127.0.0.1:0", "--key-file", text(&short)];
    finish(&mut in_root(&root, &words), b"").complains_of(&["at least 32"]);
}

#[test]
fn lines_that_are_none_of_the_protocol_end_nothing_but_their_client() {
    let root = root();
    let told = finish(&mut in_root(&root, &["mcp"]), b"not json\n\xff\xfe\n{}\n");
    assert!(!told.stderr.contains("panicked"), "{}", told.stderr);
    assert!(cells(&root).is_empty());
}
