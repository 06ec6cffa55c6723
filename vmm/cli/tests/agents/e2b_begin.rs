//! Sandboxes of E2B's protocol before their template's own programs have run, and while a snapshot
//! of them is made.

use std::io::Write;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::e2b::{Answer, Server, Small, read};
use crate::common::{eventually, finish, run, unique};

/// A template with a label; it goes with the test.
struct Labelled(String);

impl Labelled {
    fn new(small: &Small, label: &str) -> Self {
        let (name, from) = (format!("{}:1", unique("begin")), small.template());
        let folder = tempfile::tempdir().unwrap();
        let file = format!("FROM {}\n", from.trim_start_matches("small="));
        std::fs::write(folder.path().join("Dockerfile"), file).unwrap();
        let place = crate::common::text(folder.path());
        run(["build", "-t", &name, "--label", label, place]).ok();
        Self(name)
    }

    fn server(&self) -> Server {
        Server::with(&["--template", &format!("slow={}", self.0)])
    }
}

impl Drop for Labelled {
    fn drop(&mut self) {
        run(["image", "rm", &self.0]);
    }
}

fn create(server: &Server, timeout: u64) -> Answer {
    let body = json!({ "templateID": "slow", "timeout": timeout }).to_string();
    let mut stream = server.connect();
    stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    let head = format!(
        "POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-API-KEY: {}\r\n\
         Content-Length: {}\r\n\r\n{body}",
        server.key(),
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    read(&mut stream)
}

fn listed(server: &Server) -> Option<String> {
    let all = server.call("GET /v2/sandboxes", &[], b"").json();
    all[0]["sandboxID"].as_str().map(str::to_owned)
}

#[test]
fn nobody_uses_a_sandbox_that_is_being_started() {
    let small = Small::new();
    let template = Labelled::new(&small, "exocell.e2b.ready=sleep 1000 && true");
    let server = template.server();
    std::thread::scope(|scope| {
        let made = scope.spawn(|| create(&server, 300));
        eventually("it is listed", || listed(&server).is_some());
        let id = listed(&server).unwrap();
        for line in [
            "GET /sandboxes/ID",
            "POST /v2/sandboxes/ID/connect",
            "POST /sandboxes/ID/pause",
            "POST /sandboxes/ID/snapshots",
            "PUT /sandboxes/ID/network",
        ] {
            let line = line.replace("ID", &id);
            let refused = server.call(&line, &[], b"{}");
            assert_eq!(refused.status, 409, "{line}: {}", refused.text());
            assert!(refused.text().contains("being started"), "{}", refused.text());
            assert!(!refused.text().to_lowercase().contains("accesstoken"), "{}", refused.text());
        }
        // Neither with its token, which nobody has, nor at one of its ports.
        let list = server.ask(&(id.clone(), String::new()), "process.Process/List", "{}");
        assert_eq!(list.status, 502, "{}", list.text());
        for port in ["49983", "8080"] {
            let headers = [("E2b-Sandbox-Id", id.as_str()), ("E2b-Sandbox-Port", port)];
            assert_eq!(server.call("GET /files?path=/etc/passwd", &headers, b"").status, 502);
        }
        // It can be given up.
        assert_eq!(server.call(&format!("DELETE /sandboxes/{id}"), &[], b"").status, 204);
        let made = made.join().unwrap();
        assert!(made.status >= 500, "{}", made.text());
        assert!(listed(&server).is_none());
    });
    assert!(server.records().is_empty());
}

#[test]
fn a_ready_command_that_never_ends_is_not_waited_for_longer_than_one_that_fails() {
    let small = Small::new();
    let template = Labelled::new(&small, "exocell.e2b.ready=sleep 100000 && true");
    let server = template.server();
    // Much less than the sandbox' time.
    let made = create(&server, 3600);
    assert_eq!(made.status, 500, "{}", made.text());
    assert!(made.text().contains("not ready within 60 s"), "{}", made.text());
    assert!(listed(&server).is_none() && server.records().is_empty());
}

/// A snapshot of a sandbox whose guest stands still.
fn snapshot(server: &Server, id: &str) -> Answer {
    server.call(&format!("POST /sandboxes/{id}/snapshots"), &[], br#"{"name": "never"}"#)
}

/// It was broken off, or had not begun; nothing is left of it.
fn is_over(server: &Server, made: ScopedJoinHandle<'_, Answer>) {
    let made = made.join().unwrap();
    assert!([404, 409].contains(&made.status), "{}: {}", made.status, made.text());
    assert_eq!(server.call("GET /snapshots", &[], b"").json(), Value::Array(Vec::new()));
}

#[test]
fn the_end_of_a_sandbox_waits_for_no_snapshot() {
    let small = Small::new();
    let server = Server::with(&["--template", &small.template().replace("small=", "base=")]);
    for by_deadline in [false, true] {
        let (id, _) = server.sandbox();
        // The server does not know of it: the guest does not answer.
        finish(&mut server.exocell(&["pause", &id]), b"").ok();
        std::thread::scope(|scope| {
            let made = scope.spawn(|| snapshot(&server, &id));
            std::thread::sleep(Duration::from_secs(1));
            if by_deadline {
                let line = format!("POST /sandboxes/{id}/timeout");
                assert_eq!(server.call(&line, &[], br#"{"timeout": 1}"#).status, 204);
                eventually("its time is over", || listed(&server).is_none());
            } else {
                let line = format!("DELETE /sandboxes/{id}");
                assert_eq!(server.call(&line, &[], b"").status, 204);
            }
            is_over(&server, made);
        });
        eventually("nothing is left", || server.records().is_empty());
    }
}
