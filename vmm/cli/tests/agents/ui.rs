//! The page of `exocell serve --ui` as a browser and as a hostile page sees it, on a state root of
//! its own with cells that run.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::e2b_server::base64_lite::decode;
use crate::common::e2b::{Answer, read};
use crate::common::host::state_root;
use crate::common::{IMAGE, eventually, finish, given, program, text};

/// A server of the page, and its state root; its cells end with the test.
struct Page {
    root: TempDir,
    child: Child,
    address: String,
    key: String,
}

/// A name and a text that would be a script in a page that believed them.
const MARKUP: &str = "<img src=x onerror=alert(1)>";

impl Page {
    fn start() -> Self {
        Self::with("127.0.0.1:0", &[])
    }

    fn with(address: &str, flags: &[&str]) -> Self {
        let root = tempfile::tempdir().expect("a state root");
        let images = state_root().join("images");
        std::os::unix::fs::symlink(images, root.path().join("images")).expect("a link");
        let mut command = in_root(&root, &["serve", "--ui", address]);
        let mut child = command.args(flags).stdout(Stdio::piped()).spawn().expect("exocell serve");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("the server says that it serves");
        let url = line.trim().strip_prefix("exocell serves http://");
        let url = url.unwrap_or_else(|| panic!("it said {line:?}"));
        let (address, key) = url.split_once('/').expect("a path");
        let key = key.trim_start_matches('#').to_owned();
        Self { address: address.to_owned(), key, root, child }
    }

    fn exocell(&self, words: &[&str]) -> Command {
        in_root(&self.root, words)
    }

    /// A cell that runs `script`; its id.
    fn cell(&self, name: &str, flags: &[&str], script: &str) -> String {
        let common = ["run", "-d", "--memory", "256m", "--disk", "256m", "--name", name];
        let words = [&common[..], flags, &[IMAGE, "sh", "-c", script]].concat();
        finish(&mut self.exocell(&words), b"").ok().text().trim().to_owned()
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(90))).expect("a time");
        stream
    }

    /// A request with these headers alone, beside what belongs to its body.
    fn say(&self, line: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        let words = format!("{line} HTTP/1.1\r\n{headers}Content-Length: {length}\r\n\r\n{body}");
        // Who is refused early is not listened to.
        let _ = stream.write_all(words.as_bytes());
        stream
    }

    /// The headers of the page's own script.
    fn own(&self) -> String {
        let Self { address, key, .. } = self;
        format!(
            "Host: {address}\r\nOrigin: http://{address}\r\nSec-Fetch-Site: same-origin\r\n\
             Authorization: Bearer {key}\r\n"
        )
    }

    fn call(&self, line: &str, body: &str) -> Answer {
        read(&mut self.say(line, &format!("{}Connection: close\r\n", self.own()), body))
    }

    fn asked(&self, line: &str, headers: &str) -> u16 {
        read(&mut self.say(line, &format!("{headers}Connection: close\r\n"), "")).status
    }

    /// A stream of the page's.
    fn stream(&self, line: &str, body: &str) -> Events {
        Events(BufReader::new(self.say(line, &self.own(), body)))
    }

    /// Gives a cell a name that no command would: whoever writes records may.
    fn rename(&self, id: &str, name: &str) {
        let path = self.root.path().join("cells").join(id).join("spec.json");
        let spec = fs::read(&path).expect("a specification");
        let mut spec: Value = serde_json::from_slice(&spec).expect("JSON");
        spec["name"] = json!(name);
        fs::write(&path, spec.to_string()).expect("a file");
    }

    fn state(&self, id: &str) -> Value {
        let shown = finish(&mut self.exocell(&["inspect", "--json", id]), b"").ok();
        shown.one()["state"].clone()
    }
}

fn in_root(root: &TempDir, words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("--root").arg(root.path()).args(words);
    command.env("EXOCELL_KERNEL", given("EXOCELL_TEST_KERNEL"));
    command
}

impl Drop for Page {
    fn drop(&mut self) {
        // It may be over.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let all = finish(&mut self.exocell(&["ps", "-aq"]), b"");
        for id in all.text().split_whitespace() {
            finish(&mut self.exocell(&["rm", "-f", id]), b"");
        }
    }
}

/// What a stream says, one event after the other.
struct Events(BufReader<TcpStream>);

impl Events {
    /// The first event that `wanted` takes.
    fn find(&mut self, what: &str, mut wanted: impl FnMut(&Value) -> bool) -> Value {
        let until = Instant::now() + Duration::from_secs(90);
        let mut line = String::new();
        while Instant::now() < until {
            line.clear();
            let count = self.0.read_line(&mut line).expect(what);
            assert!(count > 0, "{what}: the stream has ended");
            if let Some(event) = line.trim_end().strip_prefix("data: ") {
                let event = serde_json::from_str(event).expect("JSON");
                if wanted(&event) {
                    return event;
                }
            }
        }
        panic!("{what} was not told")
    }

    /// The row of cell `id` once `wanted` takes it.
    fn row(&mut self, id: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut found = Value::Null;
        self.find(what, |event| {
            let rows = event["cells"].as_array().into_iter().flatten();
            let own = rows.filter(|row| row["id"] == id).find(|row| wanted(row));
            found = own.cloned().unwrap_or(Value::Null);
            own.is_some()
        });
        found
    }
}

#[test]
fn what_cells_use_and_reach_is_shown_as_it_changes() {
    let page = Page::start();
    let flags = ["--allow-net", "localhost:9"];
    let script = "while :; do (echo > /dev/tcp/192.0.2.1/80) 2>/dev/null; sleep 1; done";
    let id = page.cell("shown", &flags, &format!("exec bash -c '{script}'"));
    let mut events = page.stream("GET /api/stream", "");
    let first = events.find("all", |event| event["all"] == true);
    let row = events.row(&id, "figures", |row| row["figures"]["used_bytes"].is_u64());
    assert_eq!((&row["name"], &row["state"]), (&json!("shown"), &json!("running")), "{first}");
    assert_eq!(row["strength"], "vm");
    let bytes = |name: &str| row["figures"][name].as_u64().expect("a number");
    assert_eq!(bytes("limit_bytes"), 256 << 20);
    assert!(bytes("held_bytes") > 1 << 20 && bytes("used_bytes") > 1 << 20, "{row}");
    events.row(&id, "what it computes", |row| row["figures"]["cpu_percent"].is_number());
    let told = events.find("a decision", |event| {
        event["decisions"].as_array().is_some_and(|all| !all.is_empty())
    });
    let decision = &told["decisions"][0];
    assert_eq!((&decision["cell"], &decision["target"]), (&json!(id), &json!("192.0.2.1")));
    assert_eq!((&decision["decision"], &decision["port"]), (&json!("denied"), &json!(80)));

    // What was decided before is told to who comes later.
    let all = page.stream("GET /api/stream", "").find("all", |event| event["all"] == true);
    assert!(!all["decisions"].as_array().expect("a list").is_empty(), "{all}");

    assert_eq!(page.call(&format!("POST /api/cells/{id}/pause"), "").status, 204);
    events.row(&id, "the pause", |row| row["state"] == "paused");
    assert_eq!(page.call(&format!("POST /api/cells/{id}/pause"), "").status, 409);
    assert_eq!(page.call(&format!("POST /api/cells/{id}/resume"), "").status, 204);
    events.row(&id, "that it goes on", |row| row["state"] == "running");
    assert_eq!(page.call(&format!("POST /api/cells/{id}/kill"), "").status, 204);
    events.row(&id, "the end", |row| row["state"] == "exited" && row["figures"].is_null());
    assert_eq!(page.state(&id), "exited");
    assert_eq!(page.call(&format!("POST /api/cells/{id}/kill"), "").status, 409);
    finish(&mut page.exocell(&["rm", &id]), b"").ok();
    events.find("that it is gone", |event| {
        event["gone"].as_array().is_some_and(|gone| gone.contains(&json!(id)))
    });
}

#[test]
fn a_log_and_a_terminal_are_streams_that_end_with_their_cell_and_their_page() {
    let page = Page::start();
    let script =
        "echo before; until test -e /tmp/go; do sleep 0.1; done; echo after >&2; sleep 600";
    let id = page.cell("told", &[], script);
    let mut log = page.stream(&format!("GET /api/cells/{id}/log"), "");
    let has = |event: &Value, text: &str, error: bool| {
        let lines = event["lines"].as_array().into_iter().flatten();
        lines.into_iter().any(|line| line["text"] == text && line["error"] == error)
    };
    log.find("what was", |event| has(event, "before", false));

    let begin = format!("POST /api/cells/{id}/terminal");
    let mut shown = page.stream(&begin, r#"{"columns": 97, "rows": 31}"#);
    let name = shown.find("a name", |event| event["terminal"].is_string())["terminal"].clone();
    let name = name.as_str().expect("a text").to_owned();
    let type_in =
        |words: &str| page.call(&format!("POST /api/terminals/{name}/input"), words).status;
    let size = |body: &str| page.call(&format!("POST /api/terminals/{name}/size"), body).status;
    let mut all = String::new();
    let mut hear = |words: &str| {
        shown.find(words, |event| {
            all.push_str(&decode(event["output"].as_str().unwrap_or_default()));
            all.contains(words)
        });
    };
    assert_eq!(type_in("stty size; echo $TERM\r"), 204);
    hear("31 97");
    hear("linux");
    assert_eq!(size(r#"{"columns": 60, "rows": 20}"#), 204);
    assert_eq!(type_in("stty size; touch /tmp/go\r"), 204);
    hear("20 60");
    log.find("what came", |event| has(event, "after", true));
    assert_eq!(size(r#"{"columns": 0, "rows": 20}"#), 400);
    assert_eq!(size(r#"{"columns": 60000, "rows": 20}"#), 400);
    assert_eq!(type_in(&"x".repeat((64 << 10) + 1)), 413);
    assert_eq!(type_in("exit 7\r"), 204);
    shown.find("its end", |event| event["exit_code"] == 7);
    eventually("it is forgotten", || type_in("x") == 404);

    // One whose page is closed ends, with what runs in it.
    let mut closed = page.stream(&begin, r#"{"columns": 80, "rows": 24}"#);
    let name = closed.find("a name", |event| event["terminal"].is_string())["terminal"].clone();
    let line = format!("POST /api/terminals/{}/input", name.as_str().expect("a text"));
    assert_eq!(page.call(&line, "exec sleep 4711\r").status, 204);
    let runs = || {
        let words = ["exec", &id, "pgrep", "-x", "-f", "sleep 4711"];
        finish(&mut page.exocell(&words), b"").text().lines().count()
    };
    eventually("it runs", || runs() == 1);
    drop(closed);
    eventually("it has ended", || runs() == 0);

    finish(&mut page.exocell(&["rm", "-f", &id]), b"").ok();
    log.find("the end", |event| event["over"] == true);
    assert_eq!(page.call(&begin, r#"{"columns": 80, "rows": 24}"#).status, 404);
}

#[test]
fn other_pages_and_who_has_no_key_are_refused() {
    let page = Page::start();
    let id = page.cell("safe", &[], "sleep 600");
    let (address, key) = (&page.address, &page.key);
    let host = format!("Host: {address}\r\n");
    let with_key = format!("{host}Authorization: Bearer {key}\r\n");
    // The page itself says nothing of cells.
    assert_eq!(page.asked("GET /", &host), 200);
    for line in ["GET /api/stream", "GET /x", "POST /", "GET /page.html", "GET /../page.js"] {
        assert_eq!(page.asked(line, &host), 401, "{line}");
        assert_ne!(page.asked(&line.replace("/api/stream", "/api/no"), &with_key), 200, "{line}");
    }
    let calls = [
        "GET /api/stream".to_owned(),
        format!("GET /api/cells/{id}/log"),
        format!("POST /api/cells/{id}/kill"),
        format!("POST /api/cells/{id}/terminal"),
    ];
    for line in &calls {
        for (headers, status) in [
            (host.clone(), 401),
            (format!("{host}Authorization: Bearer {}\r\n", "0".repeat(64)), 401),
            (format!("{host}Cookie: key={key}\r\n"), 401),
            (with_key.replace(&host, "Host: attacker.example\r\n"), 403),
            (with_key.replace(&host, "Host: localhost.attacker.example:80\r\n"), 403),
            (format!("{with_key}Host: attacker.example\r\n"), 400),
            (with_key.replace(&host, ""), 400),
            (format!("{with_key}Origin: https://attacker.example\r\n"), 403),
            (format!("{with_key}Origin: http://127.0.0.1:1\r\n"), 403),
            (format!("{with_key}Origin: null\r\n"), 403),
            (format!("{with_key}Sec-Fetch-Site: same-site\r\n"), 403),
            (format!("{with_key}Sec-Fetch-Site: cross-site\r\n"), 403),
        ] {
            assert_eq!(page.asked(line, &headers), status, "{line} {headers}");
        }
    }
    // A name that was made to lead here gets not even the page.
    assert_eq!(page.asked("GET /", "Host: attacker.example\r\n"), 403);
    assert_eq!(page.asked("GET http://attacker.example/", &host), 403);
    // Nothing that is no id reaches a path.
    for id in ["..", "safe", "../../etc", "%2e%2e", &id[..12], "", &"0".repeat(5000)] {
        let status = page.call(&format!("POST /api/cells/{id}/kill"), "").status;
        assert_eq!(status, 404, "{id}");
    }
    assert_eq!(page.call(&format!("POST /api/cells/{}/kill", "0".repeat(64)), "").status, 404);
    assert_eq!(page.call(&format!("POST /api/cells/{id}/terminal"), "{").status, 400);
    assert_eq!(page.state(&id), "running");
    let answer = page.call("GET /", "");
    let head = answer.head.to_ascii_lowercase();
    for header in [
        "content-security-policy: default-src 'none'; script-src 'self';",
        "frame-ancestors 'none'",
        "x-content-type-options: nosniff",
        "cache-control: no-store",
        "referrer-policy: no-referrer",
    ] {
        assert!(head.contains(header), "{header}: {head}");
    }
    assert!(!head.contains("set-cookie") && !head.contains("access-control"), "{head}");
}

#[test]
fn what_a_cell_says_is_text() {
    let page = Page::start();
    let script =
        format!("printf '%s\\n' '{MARKUP}'; printf '\\033[2J\\342\\200\\256x\\n'; sleep 600");
    let label = format!("x={MARKUP}");
    let id = page.cell("markup", &["--label", &label], &script);
    let mut log = page.stream(&format!("GET /api/cells/{id}/log"), "");
    let mut told = String::new();
    log.find("the lines", |event| {
        let lines = event["lines"].as_array().into_iter().flatten();
        lines.for_each(|line| told += line["text"].as_str().expect("a text"));
        told.contains('x') && told.contains("onerror") && told.contains("2J")
    });
    // JSON, of a type that is no page, and without what moves a cursor or turns text around.
    assert!(!told.contains('\u{1b}') && !told.contains('\u{202e}'), "{told:?}");
    let mut stream = page.say("GET /api/stream", &page.own(), "");
    let mut head = [0; 512];
    let count = stream.read(&mut head).expect("a head");
    let head = String::from_utf8_lossy(&head[..count]).to_ascii_lowercase();
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    assert!(head.contains("nosniff"), "{head}");
    page.rename(&id, MARKUP);
    let mut events = page.stream("GET /api/stream", "");
    let row = events.row(&id, "the name", |row| row["name"] == MARKUP);
    assert_eq!(row["state"], "running");
}

/// The script runs as its policy lets it, and makes no markup of what cells say.
#[test]
#[ignore = "needs the command chromium, of Debian's package"]
fn a_browser_shows_the_cells() {
    let page = Page::start();
    let id = page.cell("seen", &[], &format!("echo '{MARKUP}'; sleep 600"));
    page.rename(&id, MARKUP);
    let mut browser = Command::new("chromium");
    browser.args(["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]);
    browser.args(["--dump-dom", &format!("http://{}/#{}", page.address, page.key)]);
    let shown = finish(&mut browser, b"").ok();
    let shown = shown.text();
    assert!(
        shown.contains(">live<") && shown.contains(r#"<td class="running">running"#),
        "{shown}"
    );
    assert!(shown.contains("&lt;img src=x onerror") && !shown.contains("<img"), "{shown}");
    assert!(!shown.contains(&page.key), "the key stays in no address and in no text");
}

#[test]
fn streams_and_terminals_have_an_end_in_number() {
    let page = Page::start();
    let id = page.cell("many", &[], "sleep 600");
    let begin = format!("POST /api/cells/{id}/terminal");
    let size = r#"{"columns": 80, "rows": 24}"#;
    let named = |mut stream: Events| {
        stream.find("a name", |event| event["terminal"].is_string());
        stream
    };
    let mut open: Vec<Events> = (0..16).map(|_| named(page.stream(&begin, size))).collect();
    let answer = page.call(&begin, size);
    assert_eq!(answer.status, 429, "{}", answer.text());
    for _ in 0..16 {
        let mut more = page.stream("GET /api/stream", "");
        more.find("all", |event| event["all"] == true);
        open.push(more);
    }
    assert_eq!(page.call("GET /api/stream", "").status, 429);
    // Calls are answered beside them.
    assert_eq!(page.call(&format!("POST /api/cells/{id}/pause"), "").status, 204);
    assert_eq!(page.call(&format!("POST /api/cells/{id}/resume"), "").status, 204);
    open.clear();
    eventually("there is room again", || {
        let mut line = String::new();
        page.stream(&begin, size).0.read_line(&mut line).expect("an answer");
        line.starts_with("HTTP/1.1 200 ")
    });
}

#[test]
fn an_address_that_others_reach_needs_a_key_that_is_kept() {
    let root = tempfile::tempdir().expect("a state root");
    let refused = finish(&mut in_root(&root, &["serve", "--ui", "0.0.0.0:0"]), b"");
    refused.complains_of(&["--ui 0.0.0.0:0", "--ui-key"]);
    finish(&mut in_root(&root, &["serve", "--ui", "nowhere"]), b"").complains_of(&["nowhere"]);
    let file = root.path().join("page-key");
    let flags = ["--ui-key", text(&file), "--ui-host", "cells.example"];
    let mut page = Page::with("0.0.0.0:0", &flags);
    assert_eq!(page.key, "", "a key that is kept is not printed");
    let mode = fs::metadata(&file).expect("a key").permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);
    let key = fs::read_to_string(&file).expect("a key");
    let port = page.address.rsplit_once(':').expect("a port").1;
    (page.address, page.key) = (format!("127.0.0.1:{port}"), key.trim().to_owned());
    let all = page.stream("GET /api/stream", "").find("all", |event| event["all"] == true);
    assert_eq!(all["cells"], json!([]));
    assert_eq!(page.asked("GET /", "Host: cells.example\r\n"), 200);
    assert_eq!(page.asked("GET /", "Host: other.example\r\n"), 403);
}

/// Writes floods of sequences that clear or move much on a screen of the page's, and plain text; how
/// long each took.
const FLOODS: &str = r"
const fs = require('fs');
global.document = { createElement: () => ({ append() {}, replaceChildren() {} }) };
global.requestAnimationFrame = () => 1;
const Screen = new Function(fs.readFileSync(process.argv[1], 'utf8') + ';return Screen;')();
const timed = (words) => {
  const screen = new Screen({ append() {}, replaceChildren() {} }, () => {});
  screen.resize(300, 100);
  const flood = Buffer.from(words.repeat(Math.ceil(65536 / words.length)).slice(0, 65536));
  const begun = process.hrtime.bigint();
  screen.write(flood);
  return Number(process.hrtime.bigint() - begun);
};
const all = ['hello world\r\n', '\x1bc', '\x1b[2J', '\x1b[99L', '\x1b[99M', '\x1b[999P', '\x1b[999@'];
console.log(JSON.stringify(all.map((words) => Math.min(timed(words), timed(words)))));
";

#[test]
fn hostile_output_holds_the_page_up_little_longer_than_text() {
    let screen = concat!(env!("CARGO_MANIFEST_DIR"), "/../ui/src/page/screen.js");
    let out = Command::new("node").args(["-e", FLOODS, screen]).output().expect("node");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let times: Vec<f64> = serde_json::from_slice(&out.stdout).expect("times");
    // It was some hundred times as long where each place of the screen was made anew.
    for time in &times[1..] {
        assert!(*time < 30.0 * times[0], "{times:?}");
    }
}

#[test]
fn who_has_no_key_keeps_nobody_out() {
    let page = Page::start();
    // More than there are places for.
    let mut idle: Vec<_> = (0..300)
        .map(|_| {
            let mut stream = page.connect();
            let _ = stream.write_all(b"GET / HTTP/1.1\r\n");
            stream
        })
        .collect();
    let events = page.stream("GET /api/stream", "");
    assert_eq!(page.asked("GET /", &page.own()), 200);
    // Who has waited longest has gone, and nobody had to wait for the others to go by themselves.
    assert!(matches!(idle[0].read(&mut [0]), Ok(0) | Err(_)));
    let last = idle.last_mut().expect("the last one");
    last.set_nonblocking(true).expect("a socket");
    assert_eq!(last.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    // Whoever has the key stays: more come, and the stream goes on.
    let more: Vec<_> = (0..300).map(|_| page.connect()).collect();
    assert_eq!(page.asked("GET /", &page.own()), 200);
    let mut events = events;
    events.0.read_line(&mut String::new()).expect("it goes on");
    assert!(events.0.get_ref().peek(&mut [0]).is_ok_and(|count| count > 0), "it goes on");
    drop(more);
}
