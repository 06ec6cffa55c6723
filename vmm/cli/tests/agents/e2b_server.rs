//! The server of E2B's protocol: its end and its next beginning, tenants, and clients that know
//! better than any SDK.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::common::e2b::{Server, read};
use crate::common::eventually;

/// The messages of a stream of Connect's.
fn messages(body: &[u8]) -> Vec<(u8, Value)> {
    let (mut rest, mut all) = (body, Vec::new());
    while let Some([flags, a, b, c, d, more @ ..]) = rest.first_chunk::<5>().map(|_| rest) {
        let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        let Some(text) = more.get(..length) else { break };
        all.push((*flags, serde_json::from_slice(text).unwrap_or(Value::Null)));
        rest = &more[length..];
    }
    all
}

pub fn message(value: &Value) -> Vec<u8> {
    let text = value.to_string();
    [&[0][..], &(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

/// The head of a call of Connect's with many answers.
pub fn stream_head(own: &(String, String), verb: &str, length: usize) -> String {
    let (id, token) = own;
    format!(
        "POST /{verb} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nE2b-Sandbox-Id: {id}\r\n\
         X-Access-Token: {token}\r\nContent-Type: application/connect+json\r\n\
         Content-Length: {length}\r\n\r\n"
    )
}

/// What a command says and how it ends.
fn run(server: &Server, own: &(String, String), script: &str) -> (String, Value) {
    use base64_lite::decode;
    let wanted = json!({
        "process": { "cmd": "/bin/sh", "args": ["-c", script] }, "stdin": false,
    });
    let body = message(&wanted);
    let head = stream_head(own, "process.Process/Start", body.len());
    let answer = server.say(&[head.as_bytes(), &body].concat());
    let (mut out, mut end) = (String::new(), Value::Null);
    for (_, message) in messages(&answer.body) {
        if let Some(text) = message["event"]["data"]["stdout"].as_str() {
            out += &decode(text);
        }
        if message["event"]["end"].is_object() {
            end = message["event"]["end"].clone();
        }
    }
    (out, end)
}

/// As much of base64 as a test reads.
pub mod base64_lite {
    pub fn decode(text: &str) -> String {
        const ALL: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
        for at in text.bytes().filter_map(|byte| ALL.iter().position(|own| *own == byte)) {
            (bits, count) = (bits << 6 | at as u32, count + 6);
            if count >= 8 {
                count -= 8;
                bytes.push((bits >> count) as u8);
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[test]
fn a_server_that_was_killed_loses_nothing() {
    let mut server = Server::start();
    let own = server.sandbox();
    let (id, _) = &own;
    let until = |server: &Server| {
        server.call(&format!("GET /sandboxes/{id}"), &[], b"").json()["endAt"].clone()
    };
    let before = until(&server);
    // A command that waits for input, whose client is gone.
    let wanted = json!({
        "process": { "cmd": "/bin/sh", "args": ["-c", "read x; echo $x > /tmp/heard; read y"] },
        "stdin": true, "tag": "waits",
    });
    let body = message(&wanted);
    let mut stream = server.connect();
    let head = stream_head(&own, "process.Process/Start", body.len());
    stream.write_all(&[head.as_bytes(), &body].concat()).unwrap();
    stream.read_exact(&mut [0; 15]).unwrap();
    drop(stream);
    let list = |server: &Server| {
        server.ask(&own, "process.Process/List", "{}").json()["processes"].clone()
    };
    eventually("it runs", || list(&server).as_array().is_some_and(|all| all.len() == 1));
    eventually("it is written down", || server.notes().iter().any(|it| it.ends_with(".programs")));
    let [paused, short] = [server.sandbox(), server.sandbox()];
    assert_eq!(server.call(&format!("POST /sandboxes/{}/pause", paused.0), &[], b"").status, 204);
    let time = br#"{"timeout": 1}"#;
    let line = format!("POST /sandboxes/{}/timeout", short.0);
    assert_eq!(server.call(&line, &[], time).status, 204);
    server.kill();
    server.resume();
    assert_eq!(until(&server), before);
    let listed = list(&server);
    assert_eq!(
        (&listed[0]["tag"], &listed[0]["config"]["cmd"]),
        (&json!("waits"), &json!("/bin/sh"))
    );
    // Its input is open still ("it\n").
    let input = r#"{"process": {"tag": "waits"}, "input": {"stdin": "aXQK"}}"#;
    let sent = server.ask(&own, "process.Process/SendInput", input);
    assert_eq!(sent.status, 200, "{}", sent.text());
    eventually("it is heard", || run(&server, &own, "cat /tmp/heard").0 == "it\n");
    let kill = r#"{"process": {"tag": "waits"}, "signal": "SIGNAL_SIGKILL"}"#;
    assert_eq!(server.ask(&own, "process.Process/SendSignal", kill).status, 200);
    eventually("it has ended", || list(&server).as_array().is_some_and(Vec::is_empty));
    let state = |id: &str| server.call(&format!("GET /sandboxes/{id}"), &[], b"");
    assert_eq!(state(&paused.0).json()["state"], "paused");
    eventually("its time is over", || state(&short.0).status == 404);
    assert_eq!(
        server.call(&format!("POST /v2/sandboxes/{}/connect", paused.0), &[], b"").status,
        201
    );
    assert_eq!(run(&server, &paused, "echo on").0, "on\n");
    // Killed beside the server.
    crate::common::finish(&mut server.exocell(&["rm", "-f", id]), b"").ok();
    eventually("it is noticed", || state(id).status == 404);
    assert_eq!(server.ask(&own, "process.Process/List", "{}").status, 502);
}

#[test]
fn a_tenant_sees_its_own_sandboxes_alone() {
    let hash = |key: &str| -> String {
        Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect()
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = format!(
        "[[tenant]]\nname = \"ann\"\nkey_sha256 = \"{}\"\nsandboxes = 1\n\
         [[tenant]]\nname = \"bob\"\nkey_sha256 = \"{}\"\ntemplates = [\"base\"]\n",
        hash("key of ann"),
        hash("key of bob"),
    );
    std::fs::write(file.path(), text).unwrap();
    let server = Server::with(&["--e2b-keys", crate::common::text(file.path())]);
    let call = |key: &str, line: &str, body: &str| {
        server.call(line, &[("X-API-KEY", key)], body.as_bytes())
    };
    let (ann, bob) = ("key of ann", "key of bob");
    let create = r#"{"templateID": "base"}"#;
    let made = call(ann, "POST /v2/sandboxes", create);
    assert_eq!(made.status, 201, "{}", made.text());
    let id = made.json()["sandboxID"].as_str().unwrap().to_owned();
    let full = call(ann, "POST /sandboxes", create);
    assert_eq!(full.status, 429, "{}", full.text());
    assert!(full.head.to_ascii_lowercase().contains("retry-after"), "{}", full.head);
    let other = call(bob, "POST /sandboxes", r#"{"templateID": "exocell/base"}"#);
    assert_eq!(other.status, 404, "it is not among its templates: {}", other.text());
    for line in [
        "GET /sandboxes/ID",
        "DELETE /sandboxes/ID",
        "POST /sandboxes/ID/pause",
        "POST /v2/sandboxes/ID/connect",
        "POST /sandboxes/ID/timeout",
        "GET /sandboxes/ID/metrics",
        "PUT /sandboxes/ID/network",
        "GET /sandboxes/ID/anything",
    ] {
        let line = line.replace("ID", &id);
        assert_eq!(call(bob, &line, "{}").status, 404, "{line}");
        for key in ["", "key", "KEY OF ANN", &"x".repeat(10_000)] {
            assert_eq!(call(key, &line, "{}").status, 401, "{line}");
        }
    }
    assert_eq!(call(bob, "GET /v2/sandboxes", "").json(), json!([]));
    assert_eq!(call(ann, "GET /v2/sandboxes", "").json().as_array().unwrap().len(), 1);
    assert_eq!(call(ann, &format!("DELETE /sandboxes/{id}"), "").status, 204);
}

#[test]
fn clients_that_know_better_are_refused_and_others_are_served() {
    let server = Server::start();
    let own = server.sandbox();
    let (id, token) = &own;
    // Nobody is let in without the sandbox' own token.
    for token in ["", "x", &token.to_uppercase(), &token[1..]] {
        let wrong = (id.clone(), token.to_owned());
        let answer = server.ask(&wrong, "process.Process/List", "{}");
        assert_eq!((answer.status, &answer.json()["code"]), (401, &json!("unauthenticated")));
        let file = [("E2b-Sandbox-Id", id.as_str()), ("X-Access-Token", token)];
        assert_eq!(server.call("GET /files?path=/etc/passwd", &file, b"").status, 401);
    }
    let long = "x".repeat(60_000);
    for (verb, body, status) in [
        ("process.Process/List", "{", 400),
        ("process.Process/List", "[1", 400),
        ("process.Process/SendInput", "{}", 400),
        ("process.Process/SendInput", r#"{"process": {"pid": 4294967295}}"#, 404),
        ("process.Process/SendInput", r#"{"process": {"pid": -1}}"#, 400),
        (
            "process.Process/SendSignal",
            r#"{"process": {"pid": 1}, "signal": "SIGNAL_SIGKILL"}"#,
            404,
        ),
        ("process.Process/Nothing", "{}", 501),
        ("filesystem.Filesystem/Stat", r#"{"path": "/a\u0000b"}"#, 400),
        ("filesystem.Filesystem/Stat", &format!(r#"{{"path": "{long}"}}"#), 400),
        ("filesystem.Filesystem/Stat", r#"{"path": "/no\n/such\r\n"}"#, 404),
        ("filesystem.Filesystem/Remove", r#"{"path": "/"}"#, 400),
        ("filesystem.Filesystem/ListDir", r#"{"path": "/etc", "depth": -1}"#, 400),
        ("filesystem.Filesystem/GetWatcherEvents", r#"{"watcherId": "../../x"}"#, 404),
    ] {
        let answer = server.ask(&own, verb, body);
        assert_eq!(answer.status, status, "{verb} {:.80} {}", body, answer.text());
        assert!(answer.json()["code"].is_string(), "{}", answer.text());
    }
    // Frames that are none.
    for bytes in [
        &b""[..],
        b"\0\0\0\0",
        b"\0\xff\xff\xff\xff{}",
        b"\x01\0\0\0\x02{}",
        b"\0\0\0\0\x02[]",
        b"\0\0\0\0\x10{}",
        b"\xff\0\0\0\x02{}",
    ] {
        let head = stream_head(&own, "process.Process/Start", bytes.len());
        let answer = server.say(&[head.as_bytes(), bytes].concat());
        let told = messages(&answer.body);
        let [(2, last)] = &told[..] else { panic!("{bytes:?}: {answer:?}") };
        assert!(last["error"]["code"].is_string(), "{last}");
    }
    // Bodies that are cut short, too long, or no form.
    let file = |more: &str| {
        format!(
            "POST /files?path=/tmp/f HTTP/1.1\r\nHost: x\r\nConnection: close\r\nE2b-Sandbox-Id: {id}\r\nX-Access-Token: {token}\r\n{more}\r\n"
        )
    };
    let mut cut = server.connect();
    cut.write_all(file("Content-Length: 1000\r\n").as_bytes()).unwrap();
    cut.write_all(b"a part").unwrap();
    cut.shutdown(Shutdown::Write).unwrap();
    assert_ne!(read(&mut cut).status, 200);
    for (head, body) in [
        ("Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 7\r\n", &b"no form"[..]),
        ("Content-Type: multipart/form-data\r\nContent-Length: 0\r\n", b""),
        ("Content-Encoding: gzip\r\nContent-Length: 7\r\n", b"no gzip"),
        ("Content-Encoding: br\r\nContent-Length: 1\r\n", b"x"),
    ] {
        let answer = server.say(&[file(head).as_bytes(), body].concat());
        assert!((400..=501).contains(&answer.status), "{head}: {answer:?}");
    }
    let endless = vec![b' '; 5 << 20];
    assert_eq!(server.call("POST /v2/sandboxes", &[], &endless).status, 413);
    for body in [
        "[]",
        "{",
        r#"{"templateID": 1}"#,
        r#"{"templateID": "base", "surprise": 1}"#,
        r#"{"templateID": "base", "timeout": -1}"#,
        r#"{"templateID": "base", "envVars": {"A=B": "c"}}"#,
        r#"{"templateID": "base", "envVars": {"A": "b\u0000c"}}"#,
        r#"{"templateID": "base", "metadata": {"a": 1}}"#,
        r#"{"templateID": "base", "network": {"allowOut": ["not a host\n"]}}"#,
        r#"{"templateID": "base", "network": {"allowOut": ["example.org"]}}"#,
    ] {
        let answer = server.call("POST /v2/sandboxes", &[], body.as_bytes());
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
    }
    for name in ["../../etc", "a\\u0000b", "\\n", &"x".repeat(10_000), "sha256:00", "0000"] {
        let body = format!(r#"{{"templateID": "{name}"}}"#);
        let answer = server.call("POST /v2/sandboxes", &[], body.as_bytes());
        assert_eq!(answer.status, 404, "{name:.20}: {}", answer.text());
    }
    for line in ["GET /", "GET /sandboxes/../..", "PATCH /sandboxes", "GET /v2/v2/sandboxes"] {
        assert_eq!(server.call(line, &[], b"").status, 404, "{line}");
    }
    for (line, port) in [("GET /", "0"), ("GET /", "x"), ("GET /", "99999")] {
        let headers = [("E2b-Sandbox-Id", id.as_str()), ("E2b-Sandbox-Port", port)];
        assert_eq!(server.call(line, &headers, b"").status, 400);
    }
    assert_eq!(server.say(b"no HTTP\r\n\r\n").status, 400);
    // It is as well as before.
    assert_eq!(run(&server, &own, "echo well; exit 3").0, "well\n");
    assert_eq!(server.records().len(), 1, "none of these made a sandbox");
}

#[test]
fn who_does_not_read_holds_up_nobody() {
    let server = Server::start();
    let own = server.sandbox();
    let wanted = json!({ "process": { "cmd": "/bin/sh", "args": ["-c", "yes"] }, "stdin": false });
    let body = message(&wanted);
    let mut stuck = Vec::new();
    for _ in 0..8 {
        let mut stream = server.connect();
        let head = stream_head(&own, "process.Process/Start", body.len());
        stream.write_all(&[head.as_bytes(), &body].concat()).unwrap();
        stuck.push(stream);
    }
    let count = || {
        let listed = server.ask(&own, "process.Process/List", "{}").json();
        listed["processes"].as_array().map_or(0, Vec::len)
    };
    eventually("they run", || count() == 8);
    // Heads that never end.
    let halves: Vec<_> = (0..200)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(b"GET / HTTP/1.1\r\nHost:").unwrap();
            stream
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(run(&server, &own, "echo served").0, "served\n");
    }
    assert!(server.memory() < 200 << 10, "{} KiB", server.memory());
    drop((stuck, halves));
    // They run on, though nobody listens; their output goes nowhere.
    assert_eq!(count(), 8);
    let listed = server.ask(&own, "process.Process/List", "{}").json();
    for program in listed["processes"].as_array().unwrap() {
        let kill = json!({ "process": { "pid": program["pid"] }, "signal": "SIGNAL_SIGKILL" });
        let killed = server.ask(&own, "process.Process/SendSignal", &kill.to_string());
        assert_eq!(killed.status, 200, "{}", killed.text());
    }
    eventually("they have ended", || count() == 0);
}

#[test]
fn who_says_nothing_keeps_nobody_out() {
    // 64 connections.
    let server = Server::limited(&[], Some(256));
    let mut idle: Vec<_> = (0..300).map(|_| server.connect()).collect();
    // Such as do not read their answers are no better.
    for stream in idle.iter_mut().skip(250) {
        let _ = stream.write_all(&b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100));
    }
    for _ in 0..3 {
        assert_eq!(server.call("GET /health", &[], b"").status, 200);
        assert_eq!(server.call("GET /sandboxes", &[], b"").status, 200);
    }
    // Who has waited longest has gone.
    assert!(matches!(idle[0].read(&mut [0]), Ok(0) | Err(_)));
}

/// A server at three ports of a sandbox: one takes no connection, one answers nobody, and one has
/// connections for other uses. None closes what it has.
const RUDE: &str = r#"
import select, socket, os
def listen(port, backlog):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("0.0.0.0", port))
    s.listen(backlog)
    return s
full, kept = listen(8000, 0), []
for _ in range(20):
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex(("127.0.0.1", 8000))
    kept.append(s)
silent, other = listen(8001, 500), listen(8002, 500)
os.write(1, b"up\n")
while True:
    for s in select.select([silent, other], [], [])[0]:
        c, _ = s.accept()
        if s is other:
            c.recv(4000)
            c.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n")
        kept.append(c)
"#;

/// Reads until `words` come; all that came.
pub fn hear(stream: &mut TcpStream, words: &str) -> String {
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let text = String::from_utf8_lossy(&all).into_owned();
        if text.contains(words) {
            return text;
        }
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => panic!("{words:?} did not come: {text}"),
            Ok(count) => all.extend(&buffer[..count]),
        }
    }
}

/// What has come on a stream by now.
fn came(stream: &TcpStream) -> String {
    let mut buffer = [0; 1024];
    stream.set_nonblocking(true).unwrap();
    let count = stream.peek(&mut buffer).unwrap_or(0);
    stream.set_nonblocking(false).unwrap();
    String::from_utf8_lossy(&buffer[..count]).into_owned()
}

/// Descriptors that calls of the owner have for a moment.
const SPARE: usize = 10;

/// A visitor of a sandbox' port who knows no key.
pub fn visit(server: &Server, id: &str, port: u16, more: &str) -> TcpStream {
    let mut stream = server.connect();
    let words = format!(
        "GET / HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n{more}\r\n"
    );
    stream.write_all(words.as_bytes()).unwrap();
    stream
}

#[test]
fn visitors_that_go_away_leave_nothing_and_do_not_lock_the_owner_out() {
    let server = Server::start();
    let own = server.sandbox();
    let (id, _) = &own;
    let wanted = json!({
        "process": { "cmd": "/usr/bin/python3", "args": ["-u", "-c", RUDE] }, "stdin": false,
    });
    let body = message(&wanted);
    let mut program = server.connect();
    let head = stream_head(&own, "process.Process/Start", body.len());
    program.write_all(&[head.as_bytes(), &body].concat()).unwrap();
    // "up\n"
    hear(&mut program, "dXAK");
    let stat = || server.ask(&own, "filesystem.Filesystem/Stat", r#"{"path": "/etc"}"#);
    assert_eq!(stat().status, 200);
    // The call above may still be among these, with less than SPARE.
    let before = server.open();
    // Dials that nobody takes hold no threads.
    for _ in 0..200 {
        drop(visit(&server, id, 8000, ""));
    }
    assert!(server.threads() < 60, "{} threads", server.threads());
    assert_eq!(stat().status, 200);
    // Half of the guest's streams are the owner's.
    let all: Vec<_> = (0..140).map(|_| visit(&server, id, 8001, "")).collect();
    let refused = || all.iter().map(came).filter(|text| text.contains(" 429 ")).count();
    eventually("128 are let in", || refused() == 12);
    assert!(all.iter().map(came).all(|text| text.is_empty() || text.contains("retry-after")));
    assert_eq!(run(&server, &own, "echo served").0, "served\n");
    eventually("they are there", || server.open() >= before + 256 - SPARE);
    drop(all);
    eventually("they are gone", || server.open() <= before + SPARE);
    // As often as a guest has streams, with more words than a request has.
    for _ in 0..2 {
        let more: Vec<_> = (0..100)
            .map(|_| visit(&server, id, 8001, "\r\nGET / HTTP/1.1\r\nHost: x\r\n"))
            .collect();
        let let_in = || {
            let texts: Vec<_> = more.iter().map(came).filter(|text| !text.is_empty()).collect();
            assert!(texts.is_empty(), "{texts:?}");
            server.open() >= before + 200 - SPARE
        };
        eventually("they are there", let_in);
        drop(more);
        eventually("they are gone", || server.open() <= before + SPARE);
    }
    // Connections for other uses end with their client, too.
    let upgrade = "Connection: Upgrade\r\nUpgrade: x\r\n";
    let mut tunnels: Vec<_> = (0..40).map(|_| visit(&server, id, 8002, upgrade)).collect();
    for tunnel in &mut tunnels {
        hear(tunnel, "101 Switching");
    }
    let mut refused = (0..120).map(|_| visit(&server, id, 8002, upgrade)).collect::<Vec<_>>();
    let count =
        |all: &[TcpStream], words| all.iter().map(came).filter(|text| text.contains(words)).count();
    eventually("they count", || (count(&refused, " 101 "), count(&refused, " 429 ")) == (88, 32));
    refused.clear();
    tunnels.clear();
    eventually("they are gone", || server.open() <= before + SPARE);
    assert_eq!(stat().status, 200);
    assert_eq!(run(&server, &own, "echo served").0, "served\n");
}

/// gzip -9 of "words\n".
const PACKED: [u8; 26] = [
    31, 139, 8, 0, 0, 0, 0, 0, 2, 255, 43, 207, 47, 74, 41, 230, 2, 0, 134, 180, 168, 214, 6, 0, 0,
    0,
];

#[test]
fn answers_that_nobody_reads_take_bounded_memory_and_end() {
    let server = Server::start();
    // Told of it takes a mebibyte: each of these is six bytes in JSON.
    let metadata = json!({ "templateID": "base", "metadata": { "x": "\u{1}".repeat(170 << 10) } });
    let made = server.call("POST /v2/sandboxes", &[], metadata.to_string().as_bytes());
    assert_eq!(made.status, 201, "{}", made.text());
    let (memory, open) = (server.memory(), server.open());
    let ask = |more: &str| {
        let key = server.key();
        format!("GET /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {key}\r\n{more}\r\n")
    };
    // More than sockets hold.
    let ask = ask("").repeat(16) + &ask("Connection: close\r\n");
    let unread: Vec<_> = (0..90)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(ask.as_bytes()).unwrap();
            stream
        })
        .collect();
    eventually("they are there", || server.open() >= open + 60);
    eventually("those that nobody reads have ended", || {
        // Half of what all share is one key's; and what an answer takes while it is made.
        let more = server.memory().saturating_sub(memory);
        assert!(more < 192 << 10, "{more} KiB");
        server.open() < open + 10
    });
    assert_eq!(server.call("GET /sandboxes", &[], b"").status, 200);
    drop(unread);
}

#[test]
fn many_listings_at_once_do_not_end_the_sandbox() {
    let server = Server::with(&["--memory", "192m"]);
    let own = server.sandbox();
    let make = "mkdir /tmp/d && cd /tmp/d && python3 -c 'import os\nfor i in range(40000): \
                os.close(os.open(\"f%05d\" % i, os.O_CREAT))' && echo made";
    assert_eq!(run(&server, &own, make).0, "made\n");
    for _ in 0..2 {
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let list = r#"{"path": "/tmp/d", "depth": 1}"#;
                    let told = server.ask(&own, "filesystem.Filesystem/ListDir", list);
                    assert!([200, 429, 503].contains(&told.status), "{}", told.status);
                });
            }
        });
    }
    assert_eq!(run(&server, &own, "echo lives").0, "lives\n");
    let told = server.ask(&own, "filesystem.Filesystem/ListDir", r#"{"path": "/tmp/d"}"#);
    assert_eq!(told.json()["entries"].as_array().unwrap().len(), 40_000);
}

#[test]
fn what_is_never_finished_takes_bounded_memory_and_no_process() {
    let server = Server::start();
    let own = server.sandbox();
    let (id, token) = &own;
    // A message of many is short.
    let mut stream = server.connect();
    let head = stream_head(&own, "process.Process/StreamInput", 5 << 20);
    let long = (256_u32 << 10) + 1;
    stream.write_all(&[head.as_bytes(), &[0], &long.to_be_bytes()].concat()).unwrap();
    hear(&mut stream, "resource_exhausted");
    drop(stream);
    // Packed files of which little has come.
    let before = server.open();
    let upload = |path: &str, length: usize| {
        format!(
            "POST /files?path={path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
             E2b-Sandbox-Id: {id}\r\nX-Access-Token: {token}\r\n\
             Content-Type: application/octet-stream\r\nContent-Encoding: gzip\r\n\
             Content-Length: {length}\r\n\r\n"
        )
    };
    let stalled: Vec<_> = (0..40)
        .map(|_| {
            let mut stream = server.connect();
            let words = [upload("/tmp/never", 1000).as_bytes(), &PACKED[..10]].concat();
            stream.write_all(&words).unwrap();
            stream
        })
        .collect();
    eventually("they are there", || server.open() >= before + 35);
    let whole = server.say(&[upload("/tmp/whole", PACKED.len()).as_bytes(), &PACKED].concat());
    assert_eq!(whole.status, 200, "{}", whole.text());
    assert_eq!(run(&server, &own, "cat /tmp/whole").0, "words\n");
    assert!(server.open() < before + 80, "{} of {before}", server.open());
    drop(stalled);
    // Bodies that do not end, of one key.
    let length = 4 << 20;
    let blank = vec![b' '; length - 1];
    let bodies: Vec<_> = (0..24)
        .map(|_| {
            let mut stream = server.connect();
            let head = format!(
                "POST /v3/templates HTTP/1.1\r\nHost: x\r\nX-API-KEY: {}\r\n\
                 Content-Length: {length}\r\n\r\n",
                server.key()
            );
            // Who is refused is not listened to.
            let _ = stream.write_all(&[head.as_bytes(), &blank].concat());
            stream
        })
        .collect();
    eventually("the last ones are refused", || {
        bodies.iter().any(|stream| came(stream).contains(" 429 "))
    });
    assert!(server.memory() < 250 << 10, "{} KiB", server.memory());
    // Bodies that nobody wants.
    let unwanted = vec![b'x'; 1_000_000];
    let strangers: Vec<_> = (0..200)
        .map(|_| {
            let mut stream = server.connect();
            let head = "POST /sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 1048570\r\n\r\n";
            let _ = stream.write_all(&[head.as_bytes(), &unwanted].concat());
            stream
        })
        .collect();
    eventually("they hear that", || strangers.iter().all(|it| came(it).contains(" 401 ")));
    assert!(server.memory() < 250 << 10, "{} KiB", server.memory());
    // They hold what their key may have of the server's memory.
    drop(bodies);
    eventually("others are served", || run(&server, &own, "echo served").0 == "served\n");
}
