//! Sockets of components, over a network that this test stands for.

mod common;

use common::components::ready;
use common::network::Here;
use common::{caps_with, table};
use exocell_exovisor::{Outcome, Spec};
use exocell_xgate::CapabilitySet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

/// Looks `here.test` up, connects to its first address at PORT, says `ping` and ends with 0 if
/// `pong` comes back, with 99 if nothing does; else with 10 and the code of the error.
const CLIENT: &str = include_str!("common/client.wat");

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

fn client(port: u16) -> Vec<u8> {
    let codes: String = CODES.iter().map(|code| format!("\"{code}\" ")).collect();
    CLIENT.replace("CODES", &codes).replace("PORT", &port.to_string()).into_bytes()
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
