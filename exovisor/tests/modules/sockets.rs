//! Sockets of isolates, over a network that this test stands for: it connects real sockets of
//! this machine, or refuses.

use exocell_exovisor::{CancelReason, Isolate, Outcome, Spec};
use exocell_xgate::CapabilitySet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use crate::common::network::{Here, connection};
use crate::common::{admit, caps_with, ready, run_with_streams, table};

const ACCES: i32 = 2;
const CONNREFUSED: i32 = 14;
const NOTCAPABLE: i32 = 76;

/// Memory: the address's description at 0, its octets at 16; a buffer of 64 bytes at 256, whose
/// description is at 32; `$fd` is in a global, results are at 48 and 52.
const SOCKETS: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_read" (func $fd_read (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_close" (func $fd_close (param i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_fdstat_set_flags" (func $set_flags (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (import "wasi_snapshot_preview1" "sock_open" (func $open (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_bind" (func $bind (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_listen" (func $listen (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_accept" (func $accept (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_connect" (func $connect (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_recv" (func $recv (param i32 i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_send" (func $send (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_shutdown" (func $shutdown (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_recv_from" (func $recv_from (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_send_to" (func $send_to (param i32 i32 i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_getaddrinfo" (func $getaddrinfo (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_getpeeraddr" (func $getpeeraddr (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_getsockopt" (func $getsockopt (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_setsockopt" (func $setsockopt (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "\10\00\00\00\04\00\00\00")
  (data (i32.const 16) "\7f\00\00\01")
  (data (i32.const 32) "\00\01\00\00\40\00\00\00")
  (global $fd (mut i32) (i32.const 0))
  ;; Ends with `code` unless `errno` is 0.
  (func $must (param $errno i32)
    (if (local.get $errno) (then (call $exit (local.get $errno)))))
  (func $socket (param $kind i32)
    (call $must (call $open (i32.const 1) (local.get $kind) (i32.const 48)))
    (global.set $fd (i32.load (i32.const 48))))
  ;; Prints the `count` bytes of the buffer.
  (func $print (param $count i32)
    (i32.store (i32.const 36) (local.get $count))
    (call $must (call $fd_write (i32.const 1) (i32.const 32) (i32.const 1) (i32.const 52)))
    (i32.store (i32.const 36) (i32.const 64)))
  ;; Sends `count` bytes of the buffer.
  (func $say (param $count i32)
    (i32.store (i32.const 36) (local.get $count))
    (call $must (call $send (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 0) (i32.const 52)))
    (i32.store (i32.const 36) (i32.const 64)))
  ;; Prints all that the peer says.
  (func $hear
    (loop $more
      (call $must (call $recv (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 0) (i32.const 48) (i32.const 52)))
      (if (i32.load (i32.const 48)) (then (call $print (i32.load (i32.const 48))) (br $more)))))
"#;

const STREAM: i32 = 2;
const DATAGRAM: i32 = 1;

fn module(body: &str) -> String {
    format!("{SOCKETS} (func (export \"_start\") {body}))")
}

/// Calls `socket` of a kind, then connects it to a port of this machine.
fn connect(kind: i32, port: u16) -> String {
    format!(
        "(call $socket (i32.const {kind}))
         (call $must (call $connect (global.get $fd) (i32.const 0) (i32.const {port})))"
    )
}

fn caps() -> CapabilitySet {
    caps_with("[clock]\n[network]\nconnect = [\"127.0.0.1:1-65535\"]")
}

fn spec(network: Here) -> Spec {
    Spec { network: Some(Arc::new(network)), ..Spec::default() }
}

fn run(body: &str) -> (Outcome, String) {
    run_with_streams(&module(body), &caps(), spec(Here::default()), b"")
}

fn server() -> (TcpListener, u16) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    (server, port)
}

/// Serves one caller on a thread.
fn serving(serve: impl FnOnce(TcpStream) + Send + 'static) -> (thread::JoinHandle<()>, u16) {
    let (server, port) = server();
    (thread::spawn(move || serve(server.accept().unwrap().0)), port)
}

#[test]
fn a_stream_is_read_and_written_to_its_end() {
    let (server, port) = serving(|mut caller| {
        let mut asked = String::new();
        caller.read_to_string(&mut asked).unwrap();
        assert_eq!(asked, "hello");
        caller.write_all(b"welcome, all of you").unwrap();
    });
    let body = format!(
        r#"{} (i64.store (i32.const 256) (i64.const 0x6f6c6c6568))
        (call $say (i32.const 5))
        (call $must (call $shutdown (global.get $fd) (i32.const 2)))
        (call $hear)
        (call $must (call $fd_close (global.get $fd)))
        (call $exit (call $fd_close (global.get $fd)))"#,
        connect(STREAM, port)
    );
    const BADF: i32 = 8;
    assert_eq!(run(&body), (Outcome::Exited(BADF), "welcome, all of you".to_owned()));
    server.join().unwrap();
}

#[test]
fn fd_read_and_fd_write_take_sockets() {
    let (server, port) = serving(|mut caller| {
        let mut asked = [0; 3];
        caller.read_exact(&mut asked).unwrap();
        caller.write_all(&asked).unwrap();
    });
    let body = format!(
        r#"{} (i32.store (i32.const 256) (i32.const 0x636261)) (i32.store (i32.const 36) (i32.const 3))
        (call $must (call $fd_write (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 52)))
        (i32.store (i32.const 256) (i32.const 0))
        (call $must (call $fd_read (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 52)))
        (call $print (i32.load (i32.const 52)))"#,
        connect(STREAM, port)
    );
    assert_eq!(run(&body), (Outcome::Exited(0), "abc".to_owned()));
    server.join().unwrap();
}

#[test]
fn what_the_network_refuses_is_an_errno() {
    let refusing = spec(Here { refuses: true, ..Here::default() });
    let body = connect(STREAM, 1);
    let (outcome, _) = run_with_streams(&module(&body), &caps(), refusing, b"");
    assert_eq!(outcome, Outcome::Exited(ACCES));
    const CONNREFUSED: i32 = 14;
    let (server, port) = server();
    drop(server);
    assert_eq!(run(&connect(STREAM, port)).0, Outcome::Exited(CONNREFUSED));
}

#[test]
fn without_a_network_nobody_is_reached() {
    const NETDOWN: i32 = 38;
    let (outcome, _) =
        run_with_streams(&module(&connect(STREAM, 1)), &caps(), Spec::default(), b"");
    assert_eq!(outcome, Outcome::Exited(NETDOWN));
}

#[test]
fn a_module_without_the_capability_is_not_admitted() {
    let error = admit(&module(""), &caps_with("")).err().expect("it is refused").to_string();
    assert!(error.contains("network"), "{error}");
}

#[test]
fn polling_tells_of_a_clock_and_of_a_socket() {
    let (go, told) = channel::<()>();
    let (server, port) = serving(move |mut caller| {
        told.recv().unwrap();
        caller.write_all(b"x").unwrap();
        // Stays open until the module closes its end.
        let _ = caller.read(&mut [0]);
    });
    // Subscriptions at 512: a clock of 20 ms, and reading; events at 768.
    let body = format!(
        r#"{}
        (i64.store (i32.const 512) (i64.const 7))
        (i32.store (i32.const 528) (i32.const 1))
        (i64.store (i32.const 536) (i64.const 20000000))
        (i64.store (i32.const 560) (i64.const 9))
        (i32.store8 (i32.const 568) (i32.const 1))
        (i32.store (i32.const 576) (global.get $fd))
        (call $must (call $poll (i32.const 512) (i32.const 768) (i32.const 2) (i32.const 48)))
        (if (i32.ne (i32.load (i32.const 48)) (i32.const 1)) (then (call $exit (i32.const 100))))
        (if (i64.ne (i64.load (i32.const 768)) (i64.const 7)) (then (call $exit (i32.const 101))))
        (i32.store8 (i32.const 256) (i32.const 0x67)) (call $print (i32.const 1))
        ;; Only reading now.
        (call $must (call $poll (i32.const 560) (i32.const 768) (i32.const 1) (i32.const 48)))
        (if (i64.ne (i64.load (i32.const 768)) (i64.const 9)) (then (call $exit (i32.const 102))))
        (if (i32.ne (i32.load16_u (i32.const 776)) (i32.const 0)) (then (call $exit (i32.const 103))))
        (call $must (call $recv (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 0) (i32.const 48) (i32.const 52)))
        (call $print (i32.load (i32.const 48)))"#,
        connect(STREAM, port)
    );
    let (caps, network) = (caps(), spec(Here::default()));
    let (mut drain, stdout) = std::io::pipe().unwrap();
    let network = Spec { stdout: Some(stdout.into()), ..network };
    let ready = ready(&module(&body), &caps, &table(&caps), network);
    let running = thread::spawn(move || ready.run());
    let mut first = [0];
    drain.read_exact(&mut first).unwrap();
    go.send(()).unwrap();
    assert_eq!(running.join().unwrap(), Outcome::Exited(0));
    let mut rest = Vec::new();
    drain.read_to_end(&mut rest).unwrap();
    assert_eq!((&first, &rest[..]), (b"g", &b"x"[..]));
    server.join().unwrap();
}

#[test]
fn connecting_and_reading_need_not_wait() {
    const AGAIN: i32 = 6;
    let (server, port) = serving(|mut caller| drop(caller.read(&mut [0])));
    let body = format!(
        r#"(call $socket (i32.const {STREAM}))
        (call $must (call $set_flags (global.get $fd) (i32.const 4)))
        ;; EINPROGRESS, unless it is there at once.
        (if (i32.eq (call $connect (global.get $fd) (i32.const 0) (i32.const {port})) (i32.const 26))
          (then
            (i64.store (i32.const 512) (i64.const 9))
            (i32.store8 (i32.const 520) (i32.const 2))
            (i32.store (i32.const 528) (global.get $fd))
            (call $must (call $poll (i32.const 512) (i32.const 768) (i32.const 1) (i32.const 48)))))
        (call $must (call $getsockopt (global.get $fd) (i32.const 0) (i32.const 2) (i32.const 60) (i32.const 64)))
        (call $must (i32.load (i32.const 60)))
        (call $exit (call $recv (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 0) (i32.const 48) (i32.const 52)))"#
    );
    assert_eq!(run(&body).0, Outcome::Exited(AGAIN));
    server.join().unwrap();
}

#[test]
fn a_wait_ends_when_its_time_is_over() {
    const AGAIN: i32 = 6;
    let (server, port) = serving(|mut caller| drop(caller.read(&mut [0])));
    // SO_RCVTIMEO of 10 ms.
    let body = format!(
        r#"{} (i64.store (i32.const 520) (i64.const 10000))
        (call $must (call $setsockopt (global.get $fd) (i32.const 0) (i32.const 11) (i32.const 512) (i32.const 16)))
        (call $exit (call $recv (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 0) (i32.const 48) (i32.const 52)))"#,
        connect(STREAM, port)
    );
    assert_eq!(run(&body).0, Outcome::Exited(AGAIN));
    server.join().unwrap();
}

#[test]
fn callers_are_accepted() {
    let network = Here::default();
    let callers = Arc::clone(&network.callers);
    let body = r#"(call $socket (i32.const 2))
        (call $must (call $bind (global.get $fd) (i32.const 0) (i32.const 80)))
        (call $must (call $listen (global.get $fd) (i32.const 1)))
        (call $must (call $accept (global.get $fd) (i32.const 0) (i32.const 48)))
        (global.set $fd (i32.load (i32.const 48)))
        (call $hear)"#;
    let calling = thread::spawn(move || {
        let (server, _) = server();
        let mut caller = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        let (accepted, peer) = server.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        caller.write_all(b"from outside").unwrap();
        drop(caller);
        // Until it listens.
        loop {
            if let Some((port, arrived)) = &*callers.lock().unwrap() {
                assert_eq!(*port, 80);
                return arrived(connection(accepted, peer));
            }
            thread::yield_now();
        }
    });
    let result = run_with_streams(&module(body), &caps(), spec(network), b"");
    assert_eq!(result, (Outcome::Exited(0), "from outside".to_owned()));
    calling.join().unwrap();
}

#[test]
fn datagrams_keep_their_bounds() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let answering = thread::spawn(move || {
        let mut buffer = [0; 16];
        let (bytes, from) = server.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..bytes], b"ab");
        server.send_to(b"one", from).unwrap();
        server.send_to(b"two!", from).unwrap();
    });
    // The sender's address goes to 1024, described at 96.
    let receive = r#"(call $must (call $recv_from (global.get $fd) (i32.const 32) (i32.const 1)
          (i32.const 96) (i32.const 0) (i32.const 56) (i32.const 48) (i32.const 52)))
        (call $print (i32.load (i32.const 48)))"#;
    let body = format!(
        r#"(call $socket (i32.const {DATAGRAM}))
        (i32.store (i32.const 96) (i32.const 1024)) (i32.store (i32.const 100) (i32.const 128))
        (i32.store (i32.const 256) (i32.const 0x6261)) (i32.store (i32.const 36) (i32.const 2))
        (call $must (call $send_to (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 0)
          (i32.const {port}) (i32.const 0) (i32.const 52)))
        (i32.store (i32.const 36) (i32.const 64))
        {receive} {receive}
        (if (i32.ne (i32.load (i32.const 56)) (i32.const {port})) (then (call $exit (i32.const 100))))
        ;; Its family, and 127.0.
        (if (i32.ne (i32.load (i32.const 1024)) (i32.const 0x007f0001)) (then (call $exit (i32.const 101))))"#
    );
    assert_eq!(run(&body), (Outcome::Exited(0), "onetwo!".to_owned()));
    answering.join().unwrap();
}

#[test]
fn what_was_refused_can_be_sent_again() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let answering = thread::spawn(move || {
        let (_, from) = server.recv_from(&mut [0; 16]).unwrap();
        server.send_to(b"yes", from).unwrap();
    });
    let send = format!(
        "(call $send_to (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 0)
          (i32.const {port}) (i32.const 0) (i32.const 52))"
    );
    let body = format!(
        r#"(call $socket (i32.const {DATAGRAM}))
        (if (i32.ne {send} (i32.const {CONNREFUSED})) (then (call $exit (i32.const 100))))
        (call $must {send})
        (call $must (call $recv (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 0)
          (i32.const 48) (i32.const 52)))
        (call $print (i32.load (i32.const 48)))"#
    );
    let network = Here { refused_flows: Arc::new(1.into()), ..Here::default() };
    let ended = run_with_streams(&module(&body), &caps(), spec(network), b"");
    assert_eq!(ended, (Outcome::Exited(0), "yes".to_owned()));
    answering.join().unwrap();
}

#[test]
fn names_are_looked_up() {
    // One result at 512, its address at 640, the octets at 704; the hint at 600 wants IPv4 streams.
    let ask = |name: &str| {
        format!(
            r#"(memory.init $name (i32.const 900) (i32.const 0) (i32.const {len}))
            (memory.init $port (i32.const 1000) (i32.const 0) (i32.const 3))
            (i32.store (i32.const 524) (i32.const 640))
            (i32.store (i32.const 648) (i32.const 704))
            (i32.store16 (i32.const 602) (i32.const 0x0201))
            (i32.store (i32.const 60) (i32.const 512))
            (call $must (call $getaddrinfo (i32.const 900) (i32.const {len}) (i32.const 1000) (i32.const 3)
              (i32.const 600) (i32.const 60) (i32.const 1) (i32.const 64)))
            (if (i32.ne (i32.load (i32.const 64)) (i32.const 1)) (then (call $exit (i32.const 100))))
            ;; Port 80, 127.0.0.1.
            (if (i64.ne (i64.load (i32.const 704)) (i64.const 0x0100007f5000)) (then (call $exit (i32.const 101))))
            (if (i32.ne (i32.load8_u (i32.const 514)) (i32.const 1)) (then (call $exit (i32.const 102))))) 
            (data $name "{name}") (data $port "80\00") (func"#,
            len = name.len()
        )
    };
    assert_eq!(run(&ask("here.test")).0, Outcome::Exited(0));
    assert_eq!(run(&ask("other.test")).0, Outcome::Exited(ACCES));
    assert_eq!(run(&ask("127.0.0.1")).0, Outcome::Exited(0));
}

#[test]
fn a_revoked_network_ends_what_is_open() {
    let (revoked, told): (Sender<()>, _) = channel();
    let (server, port) = serving(move |mut caller| {
        caller.write_all(b"1").unwrap();
        told.recv().unwrap();
        caller.write_all(b"2").unwrap();
    });
    let caps = caps();
    let body = format!("{} (call $hear)", connect(STREAM, port));
    let (mut drain, stdout) = std::io::pipe().unwrap();
    let with = Spec { stdout: Some(stdout.into()), ..spec(Here::default()) };
    let mut table = table(&caps);
    let ready = ready(&module(&body), &caps, &table, with);
    let running = thread::spawn(move || ready.run());
    let mut first = [0];
    drain.read_exact(&mut first).unwrap();
    let handle = table.find("isolate", "network").unwrap();
    table.revoke(handle).unwrap();
    revoked.send(()).unwrap();
    // The call that waited may still answer; the next one does not.
    assert_eq!(running.join().unwrap(), Outcome::Exited(NOTCAPABLE));
    server.join().unwrap();
}

#[test]
fn a_module_that_waits_for_a_peer_is_ended() {
    let (server, port) = serving(|mut caller| drop(caller.read(&mut [0])));
    let caps = caps_with(
        "[time]\ndeadline = \"50ms\"\n[clock]\n[network]\nconnect = [\"127.0.0.1:1-65535\"]",
    );
    let admitted =
        admit(&module(&format!("{} (call $hear)", connect(STREAM, port))), &caps).unwrap();
    let ready =
        Isolate::prepare(&admitted, &table(&caps), "isolate", spec(Here::default())).unwrap();
    assert_eq!(ready.run(), Outcome::Ended(CancelReason::Deadline));
    server.join().unwrap();
}
