//! A real dialer on a thread, with a stack that asks for all sorts of things.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::thread::JoinHandle;

use super::*;

struct Stack {
    channel: OwnedFd,
    dialer: Option<JoinHandle<io::Result<()>>>,
}

impl Stack {
    fn new(rules: &str) -> Self {
        let (channel, theirs) = sys::channel().unwrap();
        let policy = Policy::from_text(rules).unwrap();
        let dialer = Dialer::new(theirs, policy, Hosts::of_host());
        Self { channel, dialer: Some(std::thread::spawn(move || dialer.run())) }
    }

    fn say(&self, request: &Request) {
        sys::send(self.channel.as_fd(), &request.encode()).unwrap();
    }

    fn hear(&self) -> (Reply, Option<OwnedFd>) {
        let mut watched = [PollFd::new(self.channel.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut watched, PollTimeout::from(10_000u16)), Ok(1), "no answer came");
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let (bytes, passed) = sys::receive_with(self.channel.as_fd(), &mut buffer).unwrap();
        (Reply::decode(&buffer[..bytes]).unwrap(), passed)
    }

    fn connect(&self, protocol: Protocol, target: Target, port: u16) -> (Reply, Option<OwnedFd>) {
        self.say(&Request::Connect { id: 1, protocol, target, port, few: false });
        self.hear()
    }

    fn denied(&self, protocol: Protocol, target: Target, port: u16) -> String {
        match self.connect(protocol, target.clone(), port) {
            (Reply::Failed { why: Failure::Denied, text, .. }, None) => text,
            other => panic!("{target} {port}: {other:?}"),
        }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let (ours, _) = sys::channel().unwrap();
        self.channel = ours;
        self.dialer.take().unwrap().join().unwrap().unwrap();
    }
}

fn address(text: &str) -> Target {
    Target::Address(text.parse().unwrap())
}

#[test]
fn a_permitted_peer_is_dialled_and_the_stream_handed_over() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let stack = Stack::new(&format!("connect 127.0.0.1:{port}\n"));
    let (reply, passed) = stack.connect(Protocol::Tcp, address("127.0.0.1"), port);
    let peer = Peer { at: server.local_addr().unwrap(), is_own: true };
    assert_eq!(reply, Reply::Connected { id: 1, peer });
    let mut stream = TcpStream::from(passed.unwrap());
    stream.set_nonblocking(false).unwrap();
    server.accept().unwrap().0.write_all(b"hello").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
}

#[test]
fn what_the_policy_does_not_permit_is_not_dialled() {
    let server = TcpListener::bind("0.0.0.0:0").unwrap();
    server.set_nonblocking(true).unwrap();
    let port = server.local_addr().unwrap().port();
    let stack =
        Stack::new(&format!("connect 0.0.0.0/0:{port}\nconnect *:{port}\nconnect [::/0]:{port}\n"));
    for host in ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::ffff:127.0.0.1", "::"] {
        assert!(stack.denied(Protocol::Tcp, address(host), port).contains("loopback"), "{host}");
    }
    for host in ["169.254.169.254", "fd00:ec2::254", "fd20:ce::254", "::ffff:169.254.169.254"] {
        assert!(stack.denied(Protocol::Tcp, address(host), port).contains("metadata"), "{host}");
    }
    let name = Target::Name("localhost".into());
    assert!(stack.denied(Protocol::Tcp, name, port).contains("loopback"));
    assert!(stack.denied(Protocol::Udp, address("192.0.2.1"), port).contains("no rule"));
    assert!(stack.denied(Protocol::Tcp, address("192.0.2.1"), port - 1).contains("no rule"));
    assert!(stack.denied(Protocol::Icmp, address("192.0.2.1"), 0).contains("no rule"));
    assert!(server.accept().is_err(), "nobody came");
}

#[test]
fn a_peer_that_refuses_and_a_name_that_is_none_are_told_apart() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let stack = Stack::new(&format!("connect 127.0.0.1:{port}\n"));
    match stack.connect(Protocol::Tcp, address("127.0.0.1"), port) {
        (Reply::Failed { why: Failure::Refused, .. }, None) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn datagrams_go_both_ways_until_the_rules_change() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    server.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let port = server.local_addr().unwrap().port();
    let stack = Stack::new(&format!("connect 127.0.0.1:{port}/udp\n"));
    let (reply, passed) = stack.connect(Protocol::Udp, address("127.0.0.1"), port);
    assert!(matches!(reply, Reply::Connected { .. }) && passed.is_none(), "{reply:?}");
    stack.say(&Request::Datagram { id: 1, data: b"ping".to_vec() });
    let mut buffer = [0; 16];
    let (bytes, from) = server.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..bytes], b"ping");
    server.send_to(b"pong", from).unwrap();
    assert_eq!(stack.hear().0, Reply::Datagram { id: 1, data: b"pong".to_vec() });

    stack.say(&Request::Policy { rules: String::new() });
    assert!(stack.denied(Protocol::Udp, address("127.0.0.1"), port).contains("no rule"));
    stack.say(&Request::Datagram { id: 1, data: b"late".to_vec() });
    server.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(server.recv_from(&mut buffer).is_err(), "a revoked flow carries nothing");
}

#[test]
fn a_stack_that_says_nonsense_is_not_answered_and_costs_nothing() {
    let stack = Stack::new("");
    for message in [&[9; 40][..], &[0], &[1, 0, 0, 0, 0, 1, 2], &[2, 9, 9, 9, 9]] {
        sys::send(stack.channel.as_fd(), message).unwrap();
    }
    assert!(stack.denied(Protocol::Tcp, address("192.0.2.1"), 1).contains("no rule"));
}

/// As root: a network of the thread's own, with a host that forwards.
fn forwarding_host() -> bool {
    use nix::sched::{CloneFlags, unshare};
    if !nix::unistd::geteuid().is_root() || unshare(CloneFlags::CLONE_NEWNET).is_err() {
        return false;
    }
    for line in [
        "link set lo up",
        "link add cable type veth peer name other",
        "link set cable up",
        "link set other up",
        "addr add 192.31.196.1/24 dev cable",
        "addr add 2620:4f:8000::1/64 dev cable nodad",
        "-6 route add local 2620:4f:8001::/64 dev lo",
    ] {
        let status = std::process::Command::new("ip").args(line.split(' ')).status();
        assert!(status.expect("ip is installed by scripts/setup").success(), "ip {line}");
    }
    std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").is_ok()
}

#[test]
fn every_address_at_which_the_host_answers_is_its_own() {
    if !std::thread::spawn(|| {
        let is_made = forwarding_host();
        let own = |text: &str| sys::is_own(text.parse().unwrap()).unwrap();
        for address in ["192.31.196.1", "2620:4f:8000::1", "2620:4f:8000::", "2620:4f:8001::7"] {
            assert!(!is_made || own(address), "{address}");
        }
        for address in ["192.31.196.80", "2620:4f:8000::80", "2620:4f:8002::"] {
            assert!(!is_made || !own(address), "{address}");
        }
        is_made
    })
    .join()
    .unwrap()
    {
        eprintln!("not tried: this needs root and networks of a thread's own");
    }
}

#[test]
fn connections_leave_the_host_a_half_of_its_ports() {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let version: Vec<u32> =
        release.split('.').take(2).map(|part| part.parse().unwrap_or(0)).collect();
    if range.split_whitespace().ne(["32768", "60999"]) || version < vec![6, 3] {
        eprintln!("not tried: this needs Linux 6.3 with the range of ports that it comes with");
        return;
    }
    for at in ["127.0.0.1:0", "[::1]:0"] {
        // To each peer they begin anywhere: of any 50 some would be beyond it.
        for _ in 0..50 {
            let server = TcpListener::bind(at).unwrap();
            let at = server.local_addr().unwrap();
            let (socket, _) = sys::start(Protocol::Tcp, at, false).unwrap();
            let from = TcpStream::from(socket).local_addr().unwrap().port();
            assert!((32_768..=sys::PORT_LAST).contains(&from), "{from}");
        }
    }
}

#[test]
fn what_a_peer_does_not_read_waits_in_the_guest_and_not_in_the_host() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let stack = Stack::new(&format!("connect 127.0.0.1:{port}\n"));
    let (_, passed) = stack.connect(Protocol::Tcp, address("127.0.0.1"), port);
    let socket = passed.unwrap();
    let held = |option: &dyn Fn() -> nix::Result<usize>| option().unwrap();
    let sent = held(&|| nix::sys::socket::getsockopt(&socket, nix::sys::socket::sockopt::SndBuf));
    let heard = held(&|| nix::sys::socket::getsockopt(&socket, nix::sys::socket::sockopt::RcvBuf));
    // 256 of them hold 64 MiB.
    assert_eq!((sent, heard), (128 << 10, 128 << 10));
}
