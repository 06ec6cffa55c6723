//! A cell's network: what is granted is reached, what is not is refused and
//! written down, and a change of the rules holds at once.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

use crate::common::cell::Cell;
use crate::common::lan::{Lan, PEER, PEER_V6};
use crate::common::servers::{Web, echo, echo_datagrams, greeter};
use crate::common::{IMAGE, eventually, finish, run, shell, text};

/// Fetches `url` with Python's own client, or says the error's name.
fn fetch(cell: &Cell, url: &str) -> String {
    let program = format!(
        "import urllib.request as u, urllib.error as e
try: print(u.urlopen('{url}', timeout=20).read().decode())
except e.URLError as error: print(error.reason)
except OSError as error: print(error)"
    );
    cell.shell(&format!("python3 -c \"{program}\"")).ok().text().to_owned()
}

/// The decisions of a cell.
fn decisions(cell: &Cell) -> Vec<Value> {
    let log = cell.verb(&["logs", "--network"]).ok();
    log.text().lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

#[track_caller]
fn is_logged(cell: &Cell, decision: &str, target: &str, reason: &str) {
    eventually(&format!("{decision} {target} is logged"), || {
        decisions(cell).iter().any(|entry| {
            entry["decision"] == decision
                && entry["target"] == target
                && entry["reason"].as_str().unwrap_or_default().contains(reason)
        })
    });
}

#[test]
fn a_granted_name_is_reached_and_no_other() {
    let lan = Lan::new();
    let (granted, other) = lan.at_peer(|| {
        (Web::new(&format!("{PEER}:80"), "hello"), Web::new("192.31.196.81:80", "secret"))
    });
    let cell = Cell::idle("net", &["--allow-net", "peer.test:80"]);
    assert_eq!(fetch(&cell, "http://peer.test/"), "hello");
    assert!(fetch(&cell, "http://other.test/").contains("Name or service not known"));
    assert!(fetch(&cell, "http://192.31.196.81/").contains("No route to host"));
    assert!(fetch(&cell, &format!("http://{PEER}/")).contains("No route to host"), "only by name");
    assert!(fetch(&cell, "http://peer.test:81/").contains("No route to host"));
    assert_eq!((granted.asked().len(), other.asked().len()), (1, 0));
    is_logged(&cell, "allowed", "peer.test", "");
    is_logged(&cell, "denied", "other.test", "no rule");
    is_logged(&cell, "denied", "192.31.196.81", "no rule");
    is_logged(&cell, "denied", "peer.test", "no rule");
}

#[test]
fn addresses_are_reached_by_both_families() {
    let lan = Lan::new();
    let (v4, v6) = lan.at_peer(|| {
        (Web::new(&format!("{PEER}:80"), "four"), Web::new(&format!("[{PEER_V6}]:80"), "six"))
    });
    let cell = Cell::idle(
        "net",
        &["--allow-net", "192.31.196.80/31:80", "--allow-net", "[2620:4f:8000::/64]:80"],
    );
    assert_eq!(fetch(&cell, &format!("http://{PEER}/")), "four");
    assert_eq!(fetch(&cell, &format!("http://[{PEER_V6}]/")), "six");
    assert_eq!((v4.asked().len(), v6.asked().len()), (1, 1));
}

#[test]
fn an_empty_list_means_no_device() {
    let table = "version = 1\n[memory]\nlimit = \"256M\"\n[cpu]\n[processes]\nmax = 64\n[stdio]\n[network]\nconnect = []\n";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.toml");
    std::fs::write(&path, table).unwrap();
    let ended = shell(&["--caps", text(&path)], "ls /sys/class/net").ok();
    assert_eq!(ended.text(), "lo");
}

#[test]
fn much_data_goes_both_ways_unharmed() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo(&format!("{PEER}:0")));
    let cell = Cell::idle("net", &["--allow-net", &format!("{PEER}:{port}"), "-m", "512m"]);
    let program = format!(
        "import socket, threading, os
data = os.urandom(1 << 20) * 24
s = socket.create_connection(('{PEER}', {port}), 60)
def send():
    s.sendall(data); s.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
back = b''.join(iter(lambda: s.recv(1 << 20), b''))
print(len(back), back == data)"
    );
    let ended = cell.shell(&format!("python3 -c \"{program}\"")).ok();
    assert_eq!(ended.text(), format!("{} True", 24 << 20));
}

#[test]
fn datagrams_are_granted_by_themselves() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo_datagrams(&format!("{PEER}:0")));
    let cell = Cell::idle("net", &["--allow-net", &format!("peer.test:{port}/udp")]);
    let ask = |host: &str, port: u16| {
        let program = format!(
            "import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20)
try:
    s.connect(('{host}', {port})); s.send(b'x' * 9000); print(len(s.recv(65536)))
except OSError as error: print(error.strerror)"
        );
        cell.shell(&format!("python3 -c \"{program}\"")).ok().text().to_owned()
    };
    // Nothing of them is read: whose they are is the server's to say.
    assert_eq!(ask("peer.test", port), "9000");
    assert_eq!(ask("peer.test", port - 1), "No route to host");
    assert_eq!(ask(PEER, port), "No route to host");
    is_logged(&cell, "denied", PEER, "no rule");
}

#[test]
fn a_change_of_the_rules_cuts_what_is_open() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo(&format!("{PEER}:0")));
    let rule = format!("peer.test:{port}/raw");
    let cell = Cell::idle("net", &["--allow-net", &rule]);
    let program = format!(
        "import socket
s = socket.create_connection(('peer.test', {port}), 30)
s.sendall(b'\\0one'); print(s.recv(9), flush=True)
try:
    print('ended', s.recv(9))
except OSError as error: print(error.strerror)
try: socket.create_connection(('peer.test', {port}), 30)
except OSError as error: print(error.strerror)"
    );
    let script = format!("python3 -c \"{program}\" > /tmp/said 2>&1");
    finish(&mut cell.exec(&["-d"], &["sh", "-c", &script]), b"").ok();
    eventually("it is connected", || cell.shell("cat /tmp/said").text().contains("one"));
    cell.verb(&["update", "--deny-net", &rule]).ok();
    eventually("it is cut", || cell.shell("cat /tmp/said").text().lines().count() == 3);
    let said = cell.shell("cat /tmp/said").ok();
    assert!(said.text().contains("Connection reset by peer"), "{}", said.text());
    is_logged(&cell, "cut", "peer.test", "no longer permitted");
    cell.verb(&["update", "--allow-net", &rule]).ok();
    let again = format!(
        "python3 -c \"import socket; socket.create_connection(('peer.test', {port}), 30)\""
    );
    cell.shell(&again).ok();
    cell.verb(&["update", "--revoke", "network"]).ok();
    cell.shell(&again).exited(1);
}

/// What a program hears that connects to `peer.test`, says `words` and waits, or the error.
fn hears(cell: &Cell, port: u16, words: &str) -> String {
    let program = format!(
        "import socket
try:
    # What is cut at once may be so before the connection is the program's.
    s = socket.create_connection(('peer.test', {port}), 30)
    s.sendall(b'{words}'); print(s.recv(64).decode().strip() or 'nothing')
except OSError as error: print(error.strerror)"
    );
    cell.shell(&format!("python3 -c \"{program}\"")).ok().text().to_owned()
}

#[test]
fn another_protocol_to_a_name_needs_a_raw_rule() {
    let lan = Lan::new();
    let (port, greets) =
        lan.at_peer(|| (echo(&format!("{PEER}:0")), greeter(&format!("{PEER}:0"), "220 hello")));
    let rules = [format!("peer.test:{port}"), format!("peer.test:{greets}")];
    let cell = Cell::idle("raw", &["--allow-net", &rules[0], "--allow-net", &rules[1]]);
    assert_eq!(hears(&cell, port, "SSH-2.0-x\\r\\n"), "Connection reset by peer");
    is_logged(&cell, "cut", "peer.test", "it is neither HTTP/1 nor TLS");
    // A client that waits for the server to begin.
    assert_eq!(hears(&cell, greets, ""), "Connection reset by peer");
    is_logged(&cell, "cut", "peer.test", "the server spoke first");
    is_logged(&cell, "cut", "peer.test", "HOST:PORT/raw");

    let raw = rules.map(|rule| rule + "/raw");
    cell.verb(&["update", "--allow-net", &raw[0], "--allow-net", &raw[1]]).ok();
    assert_eq!(hears(&cell, port, "SSH-2.0-x\\r\\n"), "SSH-2.0-x");
    assert_eq!(hears(&cell, greets, ""), "220 hello");
    // With the raw rule gone the guard is there again.
    cell.verb(&["update", "--deny-net", &raw[0]]).ok();
    assert_eq!(hears(&cell, port, "SSH-2.0-x\\r\\n"), "Connection reset by peer");
}

#[test]
fn an_open_raw_stream_ends_with_its_rule() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo(&format!("{PEER}:0")));
    let (guarded, raw) = (format!("peer.test:{port}"), format!("peer.test:{port}/raw"));
    let cell = Cell::idle("raw", &["--allow-net", &guarded, "--allow-net", &raw]);
    let program = format!(
        "import socket
s = socket.create_connection(('peer.test', {port}), 30)
s.sendall(b'one'); print(s.recv(9), flush=True)
try: s.recv(9)
except OSError as error: print(error.strerror)"
    );
    let script = format!("python3 -c \"{program}\" > /tmp/said 2>&1");
    finish(&mut cell.exec(&["-d"], &["sh", "-c", &script]), b"").ok();
    eventually("it is connected", || cell.shell("cat /tmp/said").text().contains("one"));
    cell.verb(&["update", "--deny-net", &raw]).ok();
    eventually("it is cut", || cell.shell("cat /tmp/said").text().contains("reset by peer"));
    is_logged(&cell, "cut", "peer.test", "no longer permitted");
}

#[test]
fn raw_is_for_names_and_says_so() {
    let refused = |rule: &str| run(["run", "--rm", "--allow-net", rule, IMAGE, "true"]).exited(125);
    refused("192.31.196.80:22/raw").complains_of(&["leave `/raw` out"]);
    refused("peer.test:22/RAW").complains_of(&["22/RAW"]);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.toml");
    let table = "version = 1\n[network]\nconnect = [\"a.test:22/raw\", \"a.test:443\"]\n";
    std::fs::write(&path, table).unwrap();
    let told = run(["caps", "explain", text(&path)]).ok();
    for words in ["a.test:22/raw", "HTTP/1 or TLS for that name", "by /raw anything"] {
        assert!(told.text().contains(words), "{}", told.text());
    }
}

#[test]
fn a_published_port_leads_into_the_cell() {
    let _lan = Lan::new();
    let cell = Cell::start(
        "net",
        &["-p", "8080:80"],
        &["python3", "-m", "http.server", "80", "--directory", "/etc"],
    );
    let get = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect("127.0.0.1:8080")?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        stream.write_all(b"GET /hostname HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    eventually("the server answers", || get().is_ok_and(|answer| answer.contains("200 OK")));
    assert!(TcpStream::connect("192.31.196.1:8080").is_err(), "only on the loopback");
    // Being called gives no right to call.
    assert!(fetch(&cell, "http://192.31.196.80/").contains("No route to host"));
    is_logged(&cell, "allowed", "published port", "");
}

#[test]
fn a_port_that_is_free_is_found_and_told() {
    let server = ["python3", "-m", "http.server", "80", "--directory", "/etc"];
    let cell = Cell::start("port", &["-p", "80", "-p", "127.0.0.1:0:81"], &server);
    let told = cell.verb(&["port"]).ok();
    let ports: Vec<&str> = told.text().lines().collect();
    assert!(ports.len() == 2 && ports[1].starts_with("81/tcp -> 127.0.0.1:"), "{ports:?}");
    let place = ports[0].strip_prefix("80/tcp -> ").expect("the first");
    let get = || {
        let mut answer = String::new();
        let mut stream = TcpStream::connect(place)?;
        stream.write_all(b"GET /hostname HTTP/1.0\r\n\r\n")?;
        stream.read_to_string(&mut answer).map(|_| answer)
    };
    eventually("the server answers", || get().is_ok_and(|answer| answer.contains("200 OK")));
    assert_eq!(run(["port", &cell.name, "80"]).ok().text(), place);
    run(["port", &cell.name, "82"]).complains_of(&["82", "not published", "-p"]);
    let row = crate::common::cell::row(&cell.name).expect("a row");
    assert_eq!(row["ports"][0], format!("{place}->80/tcp"));
    assert_eq!(row["command"][0], "python3");
}

#[test]
fn limits_are_kept() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo(&format!("{PEER}:0")));
    let table = format!(
        "version = 1\n[memory]\nlimit = \"256M\"\n[cpu]\n[disk]\nsize = \"64M\"\n[processes]\nmax = 64\n\
         [clock]\n[random]\n[stdio]\n[network]\nconnect = [\"{PEER}:{port}\"]\nconnections = 3\n"
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.toml");
    std::fs::write(&path, table).unwrap();
    let cell = Cell::idle("net", &["--caps", text(&path)]);
    let program = format!(
        "import socket
held = []
for _ in range(4):
    try: held.append(socket.create_connection(('{PEER}', {port}), 30))
    except OSError as error: print(len(held), error.strerror)"
    );
    let ended = cell.shell(&format!("python3 -c \"{program}\"")).ok();
    assert_eq!(ended.text(), "3 No route to host");
    is_logged(&cell, "denied", PEER, "the limit");
}

/// Answers each question for an IPv4 address with `address`; the names that were asked for.
fn names(at: &str, address: [u8; 4]) -> std::sync::mpsc::Receiver<String> {
    let socket = std::net::UdpSocket::bind(at).expect("a server for names");
    let (asked, names) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut question = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut question) {
            let mut at = 12;
            let mut name = Vec::new();
            while at < length && question[at] != 0 {
                let end = at + 1 + usize::from(question[at]);
                name.push(String::from_utf8_lossy(&question[at + 1..end]).to_lowercase());
                at = end;
            }
            let end = at + 5;
            let is_v4 = question[at + 1..at + 3] == [0, 1];
            let mut answer = question[..2].to_vec();
            answer.extend([0x81, 0x80, 0, 1, 0, u8::from(is_v4), 0, 0, 0, 0]);
            answer.extend(&question[12..end]);
            if is_v4 {
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
                answer.extend(address);
            }
            let _ = socket.send_to(&answer, from);
            if asked.send(name.join(".")).is_err() {
                return;
            }
        }
    });
    names
}

#[test]
fn an_operator_says_who_is_asked_for_names() {
    let lan = Lan::new();
    let (web, names) = lan.at_peer(|| {
        let web = Web::new(&format!("{PEER}:80"), "found");
        (web, names("192.31.196.81:53", [192, 31, 196, 80]))
    });
    let flags = ["--dns", "192.31.196.81", "--dns-search", "own.test", "--dns-option", "ndots:2"];
    let cell = Cell::idle("dns", &[&flags[..], &["--allow-net", "web.own.test:80"]].concat());
    let told = cell.shell("grep -v nameserver /etc/resolv.conf").ok();
    assert_eq!(told.text(), "search own.test\noptions ndots:2");
    assert_eq!(fetch(&cell, "http://web.own.test/"), "found");
    assert_eq!(names.recv_timeout(Duration::from_secs(30)).expect("a question"), "web.own.test");
    // A name stands for an address of the cell's own; the short one is that name, too.
    let address = "getent ahostsv4 web | head -1 | cut -d. -f1-2";
    assert_eq!(cell.shell(address).ok().text(), "198.18");
    assert_eq!(web.asked().len(), 1);
    // What no rule permits is asked for nowhere.
    cell.shell("getent hosts other.own.test").exited(2);
    assert!(names.try_iter().all(|name| name == "web.own.test"));
    run(["run", "--rm", "--dns", "192.0.2.1", IMAGE, "true"]).exited(125).complains_of(&["--dns"]);
    let wrong = ["run", "--rm", "--dns", "dns.test", "--allow-net", "a.test:1", IMAGE, "true"];
    run(wrong).exited(125).complains_of(&["--dns", "dns.test"]);
}
