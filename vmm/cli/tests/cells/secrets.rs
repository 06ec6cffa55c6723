//! Secrets that the host puts into requests, and a package index that asks for
//! one.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::common::cell::Cell;
use crate::common::lan::{Lan, OTHER, PEER};
use crate::common::servers::{self, Web};
use crate::common::tls::Authority;
use crate::common::{IMAGE, eventually, exocell, finish, host, run};

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
    is_used_and_not_kept(&cell, &placeholder);
}

/// The log says that the value was used, and nothing that is kept has it.
#[track_caller]
fn is_used_and_not_kept(cell: &Cell, placeholder: &str) {
    eventually("its use is written down", || {
        let log = cell.verb(&["logs", "--network"]).ok();
        log.text().lines().any(|line| {
            let entry: serde_json::Value = serde_json::from_str(line).expect("JSON");
            entry["event"] == "secret" && entry["target"] == "peer.test" && entry["reason"] == "KEY"
        })
    });
    let told = cell.inspect();
    assert!(told.to_string().contains(placeholder) && !told.to_string().contains(VALUE), "{told}");
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
        ("KEY=hunter2@192.31.196.80", "host with a name"),
        ("KEY=hunter2@https://peer.test", "peer.test:443"),
        ("KEY=hunter2@ftp://peer.test", "host with a name"),
        ("NOT_SET_ANYWHERE@peer.test", "NOT_SET_ANYWHERE"),
    ] {
        refused(&[&rule[..], &["--secret", secret]].concat()).complains_of(&[word]);
    }
    let raw = ["--allow-net", "peer.test:80/raw", "--secret", "KEY=hunter2@peer.test"];
    refused(&raw).complains_of(&["the secret KEY is for peer.test:80", "/raw"]);
    let many: Vec<String> = (0..65).map(|n| format!("K{n}=hunter2@peer.test")).collect();
    let flags = many.iter().flat_map(|secret| ["--secret", secret]).collect::<Vec<_>>();
    refused(&[&rule[..], &flags].concat()).complains_of(&["at most 64"]);
}

/// The index, at the peer, until its test ends.
struct Index(Child);

impl Index {
    fn at(address: &str, certificate: Option<&Path>) -> Self {
        let mut server = Command::new("python3");
        server.args([INDEX, address]).args(certificate).stdout(Stdio::piped());
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
    let _indexes = lan.at_peer(|| [PEER, OTHER].map(|peer| Index::at(&format!("{peer}:80"), None)));
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

/// Asks the URL of the first argument with the cell's secret; prints who signed the
/// certificate, and what was answered.
const ASK_OVER_TLS: &str = r"
import http.client, os, ssl, sys, urllib.parse
url = urllib.parse.urlparse(sys.argv[1])
context = ssl.create_default_context()
context.load_verify_locations(cadata=sys.argv[2])
connection = http.client.HTTPSConnection(url.hostname, url.port or 443, context=context, timeout=60)
connection.request('GET', '/', headers={'X-Key': 'Bearer ' + os.environ['KEY']})
issuer = dict(pair[0] for pair in connection.sock.getpeercert()['issuer'])
print(issuer['commonName'], connection.getresponse().read().decode())
";
const OWN: &str = "Exocell, this cell alone ok";
const THEIRS: &str = "the test's authority ok";

#[test]
fn a_secret_goes_over_tls_to_its_host_alone() {
    let lan = Lan::new();
    let authority = Authority::new();
    let all = authority.server(&["peer.test", "www.peer.test", "other.test"]);
    let tls = |address: String| Web::over_tls(&address, "ok", all.clone());
    let (own, other, plain) = lan.at_peer(|| {
        let plain = Web::new(&format!("{PEER}:8443"), "ok");
        (tls(format!("{PEER}:443")), tls(format!("{OTHER}:443")), plain)
    });
    let names = ["peer.test:443", "www.peer.test:443", "other.test:443", "peer.test:8443"];
    let rules = names.iter().flat_map(|name| ["--allow-net", name]).collect::<Vec<_>>();
    let key = format!("KEY={VALUE}@https://peer.test");
    let plain_key = format!("PLAIN={VALUE}@https://peer.test:8443");
    let secrets = ["--secret", key.as_str(), "--secret", plain_key.as_str()];
    let flags = [&rules[..], &secrets].concat();
    let cell = Cell::start_as("opened", &flags, &["sleep", "infinity"], |run| {
        run.env("EXOCELL_TLS_ROOTS", authority.path());
    });
    let placeholder = cell.shell("echo $KEY").ok().text().to_owned();
    assert!(placeholder.starts_with("exocell-secret-"), "{placeholder}");
    let theirs = std::fs::read_to_string(authority.path()).unwrap();
    let ask = |url: &str| {
        finish(&mut cell.exec(&[], &["python3", "-c", ASK_OVER_TLS, url, &theirs]), b"").ok()
    };

    // The cell's own authority answers for that host, and for no other.
    assert_eq!(ask("https://peer.test/").text(), OWN);
    for url in ["https://www.peer.test/", "https://other.test/"] {
        assert_eq!(ask(url).text(), THEIRS, "{url}");
    }
    // Without TLS nothing goes out where the secret is for TLS.
    let refused = cell.shell(
        "python3 -c \"import os, urllib.request as u
u.urlopen(u.Request('http://peer.test:8443/', headers=dict(X_Key=os.environ['PLAIN'])))\"",
    );
    assert!(refused.stderr.contains("Connection reset by peer"), "{}", refused.stderr);
    // Each with libraries of its own, which find the authority by the environment.
    cell.shell("git -c http.extraHeader=\"X-Key: $KEY\" ls-remote https://peer.test/").ok();
    cell.shell(
        "node -e \"require('https').get('https://peer.test/',
        { headers: { 'X-Key': process.env.KEY } }, (r) => process.exit(r.statusCode - 200))\"",
    )
    .ok();

    let heads = own.asked();
    // Python's two requests, git's two and node's.
    assert_eq!(heads.len(), 5, "{heads:?}");
    for head in &heads {
        let is_its_own = !head.contains("Host: www.peer.test\r\n");
        assert_eq!(head.contains(VALUE), is_its_own, "{head}");
        assert_eq!(head.contains(&placeholder), !is_its_own, "{head}");
    }
    let head = &other.asked()[0];
    assert!(head.contains("exocell-secret-") && !head.contains(VALUE), "{head}");
    assert!(plain.asked().is_empty(), "{:?}", plain.asked());
    is_used_and_not_kept(&cell, &placeholder);
    let files = cell.shell("cat /run/exocell/tls/*; mount | grep /run/exocell").ok();
    assert!(files.text().contains("BEGIN CERTIFICATE") && !files.text().contains("PRIVATE"));
    // A template has nothing of it.
    let name = format!("{}:1", crate::common::unique("opened"));
    run(["commit", &cell.name, &name]).ok();
    let left = run(["run", "--rm", &name, "sh", "-c", "ls /run/exocell/tls"]);
    run(["image", "rm", &name]).ok();
    assert_eq!(left.ok().text(), "");
}

#[test]
fn a_cell_of_an_image_that_trusts_nobody_trusts_its_authority_alone() {
    let (tree, name) =
        (crate::common::small::tree(), format!("{}:1", crate::common::unique("nobody")));
    run(["image", "import", &format!("{}/", tree.path().display()), "--tag", &name]).ok();
    let grant = ["--allow-net", "peer.test:443", "--secret", "KEY=value@https://peer.test"];
    let files = ["cat", "/run/exocell/tls/authority.pem", "/run/exocell/tls/trusted.pem"];
    let read = run([&["run", "--rm"], &grant[..], &[name.as_str()], &files].concat());
    run(["image", "rm", &name]).ok();
    let read = read.ok();
    let certificates: Vec<&str> = read.text().split_inclusive("END CERTIFICATE-----").collect();
    assert!(matches!(certificates[..], [a, b] if a.trim() == b.trim()), "{}", read.text());
}

/// Sends 20 MiB to the host and takes them back, in both directions at once; then
/// ends its half and hears the rest.
const MUCH: &str = r"
import hashlib, socket, ssl, threading
context = ssl.create_default_context()
stream = context.wrap_socket(socket.create_connection(('peer.test', 443)), server_hostname='peer.test')
sent, heard = hashlib.sha256(), hashlib.sha256()
head = b'POST / HTTP/1.1\r\nHost: peer.test\r\nContent-Length: 20971520\r\n\r\n'
def say():
    stream.sendall(head)
    sent.update(head)
    for n in range(320):
        piece = bytes([n % 251]) * 65536
        sent.update(piece)
        stream.sendall(piece)
thread = threading.Thread(target=say)
thread.start()
left = len(head) + (20 << 20)
while left:
    piece = stream.recv(65536)
    heard.update(piece)
    left -= len(piece)
thread.join()
print(sent.digest() == heard.digest())
";

#[test]
fn what_is_opened_passes_whole_and_in_order() {
    let lan = Lan::new();
    let authority = Authority::new();
    let config = authority.server(&["peer.test"]);
    lan.at_peer(|| servers::echo_over_tls(&format!("{PEER}:443"), config));
    let secret = format!("KEY={VALUE}@https://peer.test");
    let flags = ["--allow-net", "peer.test:443", "--secret", &secret];
    let cell = Cell::start_as("much", &flags, &["sleep", "infinity"], |run| {
        run.env("EXOCELL_TLS_ROOTS", authority.path());
    });
    assert_eq!(cell.shell(&format!("python3 -c \"{MUCH}\"")).ok().text(), "True");
}

#[test]
fn pip_installs_over_tls_with_a_secret() {
    let lan = Lan::new();
    let authority = Authority::new();
    let certificate = authority.file(&["peer.test"]);
    let _index = lan.at_peer(|| Index::at(&format!("{PEER}:443"), Some(certificate.path())));
    let script = "pip install --no-input --no-deps --no-cache-dir --no-compile --retries 1 \
                  --disable-pip-version-check --target /got \
                  --index-url https://user:$KEY@peer.test/simple/ hello >&2 \
                  && PYTHONPATH=/got python3 -c 'import hello'";
    let secret = "KEY@https://peer.test";
    let mut command = exocell(["run", "--rm", "--allow-net", "peer.test:443", "--secret", secret]);
    command.args([IMAGE, "sh", "-c", script]).env("KEY", "the real one");
    let install = |command: &mut std::process::Command| finish(command, b"");
    assert_eq!(
        install(command.env("EXOCELL_TLS_ROOTS", authority.path())).ok().text(),
        "hello from the index"
    );
    // The authority is not one that browsers trust.
    let refused = install(command.env_remove("EXOCELL_TLS_ROOTS")).exited(1);
    assert!(refused.stderr.contains("bad certificate"), "{}", refused.stderr);
    let unread = install(command.env("EXOCELL_TLS_ROOTS", "/no/such/file")).exited(125);
    unread.complains_of(&["/no/such/file", "PEM"]);
}
