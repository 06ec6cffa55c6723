//! Secrets that the host puts into requests, and a package index that asks for
//! one.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use common::cell::Cell;
use common::lan::{Lan, OTHER, PEER};
use common::servers::Web;
use common::{IMAGE, eventually, exocell, finish, host, run};

const INDEX: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/network/index.py");
const VALUE: &str = "hunter2 is the value";
/// Keeps what the cell has for a secret, for programs that come later.
const KEEP: &str = "echo $KEY > /key; exec sleep infinity";

/// Asks `url` with the cell's secret in a field.
#[track_caller]
fn ask(cell: &Cell, url: &str) {
    let program = format!(
        "import urllib.request as u
key = open('/key').read().strip()
u.urlopen(u.Request('{url}', headers=dict(X_Key='Bearer ' + key)), timeout=60).read()"
    );
    cell.shell(&format!("python3 -c \"{program}\"")).ok();
}

#[test]
fn a_secret_goes_to_its_host_and_the_cell_never_has_it() {
    let lan = Lan::new();
    let (own, other) = lan.at_peer(|| {
        (Web::new(&format!("{PEER}:80"), "ok"), Web::new(&format!("{OTHER}:80"), "ok"))
    });
    let rules = ["--allow-net", "peer.test:80", "--allow-net", "www.peer.test:80"];
    let more = ["--allow-net", "other.test:80", "--secret"];
    let secret = format!("KEY={VALUE}@peer.test");
    let flags = [&rules[..], &more, &[&secret]].concat();
    let cell = Cell::start("secret", &flags, &["sh", "-c", KEEP]);
    eventually("its program has begun", || cell.shell("test -s /key").code == 0);
    let placeholder = cell.shell("cat /key").ok().text().to_owned();
    assert!(placeholder.starts_with("exocell-secret-"), "{placeholder}");

    ask(&cell, "http://peer.test/");
    ask(&cell, "http://www.peer.test/");
    ask(&cell, "http://other.test/");
    let heads = own.asked();
    assert!(heads[0].contains(&format!("Bearer {VALUE}\r\n")), "{}", heads[0]);
    for head in [&heads[1], &other.asked()[0]] {
        assert!(head.contains(&placeholder) && !head.contains(VALUE), "{head}");
    }
    eventually("its use is written down", || {
        let log = cell.verb(&["logs", "--network"]).ok();
        log.text().lines().any(|line| {
            let entry: serde_json::Value = serde_json::from_str(line).expect("JSON");
            entry["event"] == "secret" && entry["target"] == "peer.test" && entry["reason"] == "KEY"
        })
    });
    let told = cell.inspect();
    assert!(told.to_string().contains(&placeholder) && !told.to_string().contains(VALUE), "{told}");
    let record = host::record(told["id"].as_str().expect("an id"));
    for entry in std::fs::read_dir(record).unwrap().flatten() {
        let bytes = std::fs::read(entry.path()).unwrap_or_default();
        let holds = bytes.windows(VALUE.len()).any(|part| part == VALUE.as_bytes());
        assert!(!holds, "{} holds the value", entry.path().display());
    }
}

#[test]
fn secrets_that_cannot_be_kept_are_refused() {
    let refused = |flags: &[&str]| {
        let ended = run([&["run", "--rm"], flags, &[IMAGE, "true"]].concat()).exited(125);
        assert!(!ended.stderr.contains("hunter2"), "{}", ended.stderr);
        ended
    };
    let rule = ["--allow-net", "peer.test:80"];
    refused(&["--secret", "KEY=hunter2@peer.test"]).complains_of(&["--allow-net peer.test:80"]);
    for (secret, word) in [
        ("KEY=hunter2@peer.test:81", "peer.test:81"),
        ("KEY=hunter2", "NAME=VALUE@HOST"),
        ("hunter2!@peer.test", "NAME=VALUE@HOST"),
        ("KEY=hunter2\n@peer.test", "characters"),
        ("KEY=hunter2@203.0.113.80", "host with a name"),
        ("NOT_SET_ANYWHERE@peer.test", "NOT_SET_ANYWHERE"),
    ] {
        refused(&[&rule[..], &["--secret", secret]].concat()).complains_of(&[word]);
    }
    let many: Vec<String> = (0..65).map(|n| format!("K{n}=hunter2@peer.test")).collect();
    let flags = many.iter().flat_map(|secret| ["--secret", secret]).collect::<Vec<_>>();
    refused(&[&rule[..], &flags].concat()).complains_of(&["at most 64"]);
}

/// The index, at the peer, until its test ends.
struct Index(Child);

impl Index {
    fn at(address: &str) -> Self {
        let mut server = Command::new("python3");
        server.args([INDEX, address]).stdout(Stdio::piped());
        let mut child = server.spawn().expect("python3 is installed by scripts/setup");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn pip_installs_from_the_granted_index_alone() {
    let lan = Lan::new();
    let _indexes =
        lan.at_peer(|| [Index::at(&format!("{PEER}:80")), Index::at(&format!("{OTHER}:80"))]);
    let install = |index: &str| {
        let pip = "pip install --no-input --no-deps --no-cache-dir --no-compile --retries 1 \
                   --disable-pip-version-check --target /got";
        let script = format!(
            "{pip} --trusted-host {index} --index-url http://user:$KEY@{index}/simple/ hello >&2 \
             && PYTHONPATH=/got python3 -c 'import hello'"
        );
        let mut command = exocell(["run", "--rm", "--allow-net", "peer.test:80"]);
        // Its value is in this environment: command lines are for everyone to see.
        command.args(["--secret", "KEY@peer.test", IMAGE, "sh", "-c", &script]);
        finish(command.env("KEY", "the real one"), b"")
    };
    assert_eq!(install("peer.test").ok().text(), "hello from the index");
    let refused = install("other.test").exited(1);
    assert!(refused.stderr.contains("Name or service not known"), "{}", refused.stderr);
}
