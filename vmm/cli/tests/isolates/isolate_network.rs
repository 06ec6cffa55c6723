//! Sockets of isolates under the rules of the table: the same as those of `vm` cells, at a
//! distance of the same two processes.

use std::net::{TcpListener, TcpStream};

use serde_json::Value;

use crate::common::cell::Cell;
use crate::common::lan::{Lan, OTHER, PEER};
use crate::common::servers::{Web, answered, echo};
use crate::common::socket_modules::{client, module};
use crate::common::{eventually, exocell, finish, run, text, unique};

const ACCES: i32 = 2;
const CONNRESET: i32 = 15;
const NOTCAPABLE: i32 = 76;

const HEAR: &str = "(call $hear-all)";

/// Asks `host` for a page.
fn fetch(flags: &[&str], host: &str, port: u16) -> crate::common::Finished {
    let words = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let (_dir, path) = client(host, port, &words, "(drop (call $hear))");
    run([&["run", "--rm"], flags, &[text(&path)]].concat())
}

/// A detached isolate.
fn start(flags: &[&str], path: &std::path::Path) -> Cell {
    let cell = Cell { name: unique("iso") };
    let run = ["run", "-d", "--name", &cell.name];
    finish(&mut exocell([&run[..], flags, &[text(path)]].concat()), b"").ok();
    cell
}

fn decisions(cell: &Cell) -> Vec<Value> {
    let log = cell.verb(&["logs", "--network"]).ok();
    log.text().lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

#[track_caller]
fn is_logged(cell: &Cell, decision: &str, target: &str) {
    let wanted = |entry: &Value| entry["decision"] == decision && entry["target"] == target;
    eventually(&format!("{decision} {target} is logged"), || decisions(cell).iter().any(wanted));
}

fn exit_code(cell: &Cell) -> i64 {
    eventually("it has ended", || cell.state() == "exited");
    cell.inspect()["exit_code"].as_i64().expect("an exit code")
}

#[test]
fn a_granted_name_is_reached_and_no_other() {
    let lan = Lan::new();
    let (granted, other) = lan.at_peer(|| {
        (Web::new(&format!("{PEER}:80"), "hello"), Web::new(&format!("{OTHER}:80"), "secret"))
    });
    let allowed = ["--allow-net", "peer.test:80"];
    assert!(fetch(&allowed, "peer.test", 80).ok().text().ends_with("hello"));
    fetch(&allowed, "other.test", 80).exited(ACCES);
    fetch(&allowed, OTHER, 80).exited(ACCES);
    fetch(&allowed, PEER, 80).exited(ACCES);
    fetch(&allowed, "peer.test", 81).exited(ACCES);
    fetch(&[], "peer.test", 80).exited(125).complains_of(&["sock_", "network"]);
    assert_eq!((granted.asked().len(), other.asked().len()), (1, 0));
}

#[test]
fn what_is_special_stays_out_of_reach() {
    let lan = Lan::new();
    let metadata = lan.at_peer(|| Web::new("169.254.169.254:80", "secret"));
    let own = TcpListener::bind("127.0.0.1:80").unwrap();
    own.set_nonblocking(true).unwrap();
    for host in ["169.254.169.254", "127.0.0.1", "192.31.196.1"] {
        fetch(&["--allow-net", "0.0.0.0/0:80", "--allow-net", "*:80"], host, 80).exited(ACCES);
    }
    assert_eq!(metadata.asked().len(), 0);
    assert!(own.accept().is_err(), "nobody came");
}

#[test]
fn another_host_behind_a_granted_name_is_not_asked() {
    let lan = Lan::new();
    let web = lan.at_peer(|| Web::new(&format!("{PEER}:80"), "hello"));
    let words = "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n";
    let (_dir, path) = client("peer.test", 80, words, HEAR);
    run(["run", "--rm", "--allow-net", "peer.test:80", text(&path)]).exited(CONNRESET);
    assert_eq!(web.asked().len(), 0);
}

#[test]
fn another_protocol_to_a_name_needs_a_raw_rule() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo(&format!("{PEER}:0")));
    let (_dir, path) = client("peer.test", port, "SSH-2.0-x\r\n", "(drop (call $hear))");
    let cell = start(&["--allow-net", &format!("peer.test:{port}")], &path);
    assert_eq!(exit_code(&cell), i64::from(CONNRESET));
    let told = decisions(&cell).iter().any(|entry| {
        entry["decision"] == "cut"
            && entry["reason"].as_str().unwrap_or_default().contains("HOST:PORT/raw")
    });
    assert!(told, "{:?}", decisions(&cell));
    let raw = format!("peer.test:{port}/raw");
    let heard = run(["run", "--rm", "--allow-net", &raw, text(&path)]).ok();
    assert_eq!(heard.text().trim_end(), "SSH-2.0-x");
}

#[test]
fn decisions_are_written_down() {
    let lan = Lan::new();
    let _web = lan.at_peer(|| Web::new(&format!("{PEER}:80"), "hello"));
    let words = "GET / HTTP/1.1\r\nHost: peer.test\r\n\r\n";
    let (_dir, path) = client("peer.test", 80, words, "(drop (call $hear))");
    let cell = start(&["--allow-net", "peer.test:80"], &path);
    assert_eq!(exit_code(&cell), 0);
    // All of it is there once the cell has ended.
    let decisions = decisions(&cell);
    let of = |event: &str, decision: &str| {
        decisions.iter().find(|entry| entry["event"] == event && entry["decision"] == decision)
    };
    assert!(of("name", "allowed").is_some(), "{decisions:?}");
    assert_eq!(of("connect", "allowed").unwrap()["peer"], format!("{PEER}:80"));
    assert_eq!(of("connect", "closed").unwrap()["bytes"][0], words.len(), "{decisions:?}");
}

#[test]
fn a_change_of_the_rules_cuts_what_is_open() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo(&format!("{PEER}:0")));
    let rule = format!("peer.test:{port}/raw");
    let (_dir, path) = client("peer.test", port, "one\n", HEAR);
    let cell = start(&["--allow-net", &rule], &path);
    eventually("it is connected", || cell.verb(&["logs"]).text().contains("one"));
    cell.verb(&["update", "--deny-net", &rule]).ok();
    assert_eq!(exit_code(&cell), i64::from(CONNRESET));
    is_logged(&cell, "cut", "peer.test");
}

#[test]
fn a_revoked_network_is_gone_at_once() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo(&format!("{PEER}:0")));
    // It would wait for ever, so it is the end of its connection that it hears of.
    let (_dir, path) = client("peer.test", port, "one\n", HEAR);
    let cell = start(&["--allow-net", &format!("peer.test:{port}/raw")], &path);
    eventually("it is connected", || cell.verb(&["logs"]).text().contains("one"));
    run(["update", "--revoke", "network", &cell.name]).ok();
    let code = exit_code(&cell);
    assert!([CONNRESET, NOTCAPABLE].map(i64::from).contains(&code), "{code}");
}

#[test]
fn a_published_port_leads_into_an_isolate() {
    let _lan = Lan::new();
    let body = r#"(func (export "_start")
        (call $socket)
        (call $must (call $bind (global.get $fd) (i32.const 0) (i32.const 80)))
        (call $must (call $listen (global.get $fd) (i32.const 8)))
        (call $must (call $accept (global.get $fd) (i32.const 0) (i32.const 48)))
        (global.set $fd (i32.load (i32.const 48)))
        (drop (call $hear)) (call $say (i32.const 7)))
        (data (i32.const 2048) "welcome")"#;
    let (_dir, path) = module(body);
    let cell = start(&["-p", "8080:80"], &path);
    assert_eq!(answered("127.0.0.1:8080"), "welcome");
    assert_eq!(exit_code(&cell), 0);
    assert_eq!(cell.verb(&["logs"]).text(), "hello");
    assert!(TcpStream::connect("127.0.0.1:8080").is_err(), "nobody listens any more");
}

#[test]
fn only_the_dialer_is_in_the_hosts_network() {
    let lan = Lan::new();
    let port = lan.at_peer(|| echo(&format!("{PEER}:0")));
    let (_dir, path) = client("peer.test", port, "one\n", HEAR);
    let cell = start(&["--allow-net", &format!("peer.test:{port}/raw")], &path);
    eventually("it is connected", || cell.verb(&["logs"]).text().contains("one"));
    let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
    let supervisor = cell.supervisor();
    assert_ne!(network(&supervisor.to_string()), network("thread-self"));
    let children = format!("/proc/{supervisor}/task/{supervisor}/children");
    let dialer = std::fs::read_to_string(children).unwrap().trim().to_owned();
    assert_eq!(network(&dialer), network("thread-self"));
    // With the supervisor all of it goes.
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(supervisor), nix::sys::signal::SIGKILL)
        .unwrap();
    eventually("the dialer is gone", || !std::path::Path::new(&format!("/proc/{dialer}")).exists());
    assert_eq!(cell.state(), "exited");
}

#[test]
fn secrets_are_not_for_isolates() {
    let (_dir, path) = client("peer.test", 80, "x", "");
    run(["run", "--rm", "--allow-net", "peer.test:80", "--secret", "A=1@peer.test", text(&path)])
        .exited(125)
        .complains_of(&["--secret", "vm cells"]);
}
