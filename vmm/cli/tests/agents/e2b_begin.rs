//! Sandboxes of E2B's protocol before their template's own programs have run, and while a snapshot
//! of them is made.

use std::io::Write;
use std::time::Duration;

use serde_json::json;

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

#[test]
fn the_end_of_a_sandbox_waits_for_no_snapshot() {
    let server = Server::start();
    let (id, _) = server.sandbox();
    // What no compression makes short.
    let fill = ["exec", "-u", "0", &id, "sh", "-c", "head -c 180M /dev/urandom > /root/long"];
    finish(&mut server.exocell(&fill), b"").ok();
    let line = format!("POST /sandboxes/{id}/snapshots");
    std::thread::scope(|scope| {
        let made = scope.spawn(|| server.call(&line, &[], br#"{"name": "never"}"#));
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(server.call(&format!("DELETE /sandboxes/{id}"), &[], b"").status, 204);
        // It was broken off, or had not begun; nothing is left of it.
        let made = made.join().unwrap();
        assert!([404, 409].contains(&made.status), "{}: {}", made.status, made.text());
    });
    assert_eq!(server.call("GET /snapshots", &[], b"").json(), json!([]));
    assert!(server.records().is_empty());
}
