//! Sockets of components, over a network that this test stands for.

use exocell_exovisor::{Outcome, Spec};
use exocell_xgate::CapabilitySet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::thread;

use crate::common::components::ready;
use crate::common::network::Here;
use crate::common::{caps_with, table};

/// Looks `here.test` up, connects to its first address at PORT, says `ping` and ends with 0 if
/// `pong` comes back, with 99 if nothing does; else with 10 and the code of the error.
const CLIENT: &str = include_str!("../common/client.wat");
/// The same by datagrams.
const DATAGRAMS: &str = include_str!("../common/datagrams.wat");

/// `error-code` of `wasi:sockets/network`.
const CODES: [&str; 21] = [
    "unknown",
    "access-denied",
    "not-supported",
    "invalid-argument",
    "out-of-memory",
    "timeout",
    "concurrency-conflict",
    "not-in-progress",
    "would-block",
    "invalid-state",
    "new-socket-limit",
    "address-not-bindable",
    "address-in-use",
    "remote-unreachable",
    "connection-refused",
    "connection-reset",
    "connection-aborted",
    "datagram-too-large",
    "name-unresolvable",
    "temporary-resolver-failure",
    "permanent-resolver-failure",
];

fn with(text: &str, port: u16) -> String {
    let codes: String = CODES.iter().map(|code| format!("\"{code}\" ")).collect();
    text.replace("CODES", &codes).replace("PORT", &port.to_string())
}

fn client(port: u16) -> Vec<u8> {
    with(CLIENT, port).into_bytes()
}

fn datagrams(port: u16, connected: bool, addressed: bool) -> Vec<u8> {
    retrying(port, connected, addressed, 0)
}

fn retrying(port: u16, connected: bool, addressed: bool, retries: u32) -> Vec<u8> {
    let flag = |is: bool| u8::from(is).to_string();
    with(DATAGRAMS, port)
        .replace("ADDRESS\"", "\\7f\\00\\00\\01\"")
        .replace("CONNECTED", &flag(connected))
        .replace("ADDRESSED", &flag(addressed))
        .replace("RETRIES", &retries.to_string())
        .into_bytes()
}

/// The exit code for an error.
fn told(code: &str) -> Outcome {
    let index = CODES.iter().position(|known| *known == code).expect("it is a code");
    Outcome::Exited(10 + index as i32)
}

fn caps() -> CapabilitySet {
    caps_with("[network]\nconnect = [\"127.0.0.1:1-65535\"]")
}

fn spec(network: Here) -> Spec {
    Spec { network: Some(Arc::new(network)), ..Spec::default() }
}

fn run(port: u16, caps: &CapabilitySet, network: Here) -> Outcome {
    ready(&client(port), caps, &table(caps), spec(network)).run()
}

/// Reads what a component says first.
fn hear(listener: &TcpListener) -> TcpStream {
    let (mut peer, _) = listener.accept().unwrap();
    let mut said = [0; 5];
    peer.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"ping\n");
    peer
}

#[test]
fn a_peer_is_reached_by_its_name() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let peer = thread::spawn(move || hear(&listener).write_all(b"pong").unwrap());
    assert_eq!(run(port, &caps(), Here::default()), Outcome::Exited(0));
    peer.join().unwrap();
}

#[test]
fn what_the_rules_or_the_peer_refuse_is_told() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let refuses = Here { refuses: true, ..Here::default() };
    assert_eq!(run(closed, &caps(), refuses), told("access-denied"));
    assert_eq!(run(closed, &caps(), Here::default()), told("connection-refused"));
    assert_eq!(run(closed, &caps_with(""), Here::default()), told("access-denied"));
    let nobody = ready(&client(closed), &caps(), &table(&caps()), Spec::default()).run();
    assert_eq!(nobody, told("access-denied"));
}

#[test]
fn revoking_the_network_acts_on_what_is_open() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let caps = caps();
    let mut table = table(&caps);
    let isolate = ready(&client(port), &caps, &table, spec(Here::default()));
    let running = thread::spawn(move || isolate.run());
    let mut peer = hear(&listener);
    let handle = table.find("isolate", "network").expect("it was installed");
    table.revoke(handle).unwrap();
    peer.write_all(b"pong").unwrap();
    assert_eq!(running.join().unwrap(), Outcome::Exited(99));
}

/// Answers one datagram that says `ping` with what `before` lets through.
fn answer(peer: UdpSocket, before: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut said = [0; 16];
        let (length, from) = peer.recv_from(&mut said).unwrap();
        assert_eq!(&said[..length], b"ping\n");
        before();
        peer.send_to(b"pong", from).unwrap();
    })
}

fn peer() -> (UdpSocket, u16) {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = peer.local_addr().unwrap().port();
    (peer, port)
}

#[test]
fn datagrams_go_to_a_peer_and_come_from_it() {
    for (connected, addressed) in [(true, false), (false, true), (true, true)] {
        let (peer, port) = peer();
        let answered = answer(peer, || {});
        let component = datagrams(port, connected, addressed);
        let ended = ready(&component, &caps(), &table(&caps()), spec(Here::default())).run();
        assert_eq!(ended, Outcome::Exited(0), "{connected} {addressed}");
        answered.join().unwrap();
    }
}

#[test]
fn datagrams_that_go_nowhere_are_told() {
    let run = |component: &[u8], caps: &CapabilitySet, network: Here| {
        ready(component, caps, &table(caps), spec(network)).run()
    };
    let (_peer, port) = peer();
    let nowhere = run(&datagrams(port, false, false), &caps(), Here::default());
    assert_eq!(nowhere, told("invalid-argument"));
    assert_eq!(run(&datagrams(0, false, true), &caps(), Here::default()), told("invalid-argument"));
    for connected in [true, false] {
        let refuses = Here { refuses: true, ..Here::default() };
        let component = datagrams(port, connected, true);
        assert_eq!(run(&component, &caps(), refuses), told("access-denied"), "{connected}");
        let refused = Here { refused_flows: Arc::new(1.into()), ..Here::default() };
        assert_eq!(run(&component, &caps(), refused), told("connection-refused"), "{connected}");
        let not_granted = run(&component, &caps_with(""), Here::default());
        assert_eq!(not_granted, told("access-denied"));
    }
}

#[test]
fn a_refusal_is_told_once_and_what_is_sent_next_arrives() {
    for connected in [true, false] {
        let (peer, port) = peer();
        let answered = answer(peer, || {});
        let network =
            Here { refused_flows: Arc::new(1.into()), refuses_late: true, ..Here::default() };
        let component = retrying(port, connected, true, 1);
        let ended = ready(&component, &caps(), &table(&caps()), spec(network)).run();
        assert_eq!(ended, Outcome::Exited(0), "{connected}");
        answered.join().unwrap();
    }
}

#[test]
fn revoking_the_network_stops_datagrams() {
    let (peer, port) = peer();
    let caps = caps();
    let mut table = table(&caps);
    let component = datagrams(port, false, true);
    let isolate = ready(&component, &caps, &table, spec(Here::default()));
    let running = thread::spawn(move || isolate.run());
    let handle = table.find("isolate", "network").expect("it was installed");
    let answered = answer(peer, move || drop(table.revoke(handle).unwrap()));
    assert_eq!(running.join().unwrap(), told("access-denied"));
    answered.join().unwrap();
}
