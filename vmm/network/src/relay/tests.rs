//! A real relay and a real dialer on threads, with host functions that ask for all sorts of
//! things.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use exocell_xgate::NetworkScope;

use super::*;
use crate::dialer::{Dialer, Hosts};
use crate::stack::CALLERS_MAX;

/// An answer that does not come is a failure.
const PATIENCE: Duration = Duration::from_secs(20);

struct Host {
    requests: Option<Requests>,
    threads: Vec<JoinHandle<io::Result<()>>>,
    log: Arc<Mutex<Vec<Entry>>>,
}

fn scope(connect: &[String]) -> NetworkScope {
    let connect = connect.iter().map(|rule| rule.parse().unwrap()).collect();
    NetworkScope { connect, ..NetworkScope::default() }
}

impl Host {
    fn new(scope: NetworkScope, published: Vec<Published>) -> Self {
        let (channel, theirs) = sys::channel().unwrap();
        let (requests, orders) = orders().unwrap();
        let policy = Policy::new(scope);
        let dialer = Dialer::new(theirs, policy.clone(), Hosts::of_host());
        let log = Arc::new(Mutex::new(Vec::new()));
        let kept = log.clone();
        let audit = Box::new(move |entry| kept.lock().unwrap().push(entry));
        let relay = Relay::new(Parts { policy, channel, published, audit, orders });
        let threads =
            vec![std::thread::spawn(move || relay.run()), std::thread::spawn(move || dialer.run())];
        Self { requests: Some(requests), threads, log }
    }

    fn of(connect: &[String]) -> Self {
        Self::new(scope(connect), Vec::new())
    }

    fn requests(&self) -> &Requests {
        self.requests.as_ref().unwrap()
    }

    fn connect(&self, protocol: Protocol, peer: SocketAddr) -> Result<Connection, Failure> {
        let (done, answer) = channel();
        let done = Box::new(move |result| drop(done.send(result)));
        self.requests().connect(protocol, peer, done);
        answer.recv_timeout(PATIENCE).unwrap()
    }

    fn stream(&self, peer: SocketAddr) -> UnixStream {
        let connection = self.connect(Protocol::Tcp, peer).unwrap();
        waiting(connection.socket)
    }

    fn look_up(&self, name: &str) -> Result<Vec<IpAddr>, Failure> {
        let (done, answer) = channel();
        let done = Box::new(move |result| drop(done.send(result)));
        self.requests().lookup(name.to_owned(), done);
        answer.recv_timeout(PATIENCE).unwrap()
    }

    fn listen(&self, port: u16) -> Result<Receiver<Connection>, Failure> {
        let ((arrived, callers), (done, answer)) = (channel(), channel());
        let arrived = Box::new(move |connection| drop(arrived.send(connection)));
        let done = Box::new(move |result| done.send(result).unwrap());
        self.requests().listen(port, arrived, done);
        answer.recv_timeout(PATIENCE).unwrap().map(|()| callers)
    }

    /// The log's entries once there is one that `wanted` is true of.
    fn logged(&self, wanted: impl Fn(&Entry) -> bool) {
        let found = |_| self.log.lock().unwrap().iter().any(&wanted);
        let mut tries = 0..2000;
        assert!(
            tries.any(|tried| found(tried) || {
                std::thread::sleep(Duration::from_millis(10));
                false
            }),
            "{:?}",
            self.log.lock().unwrap()
        );
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.requests = None;
        if !std::thread::panicking() {
            // Both end: the relay with its requests, the dialer with the relay.
            self.threads.drain(..).for_each(|thread| thread.join().unwrap().unwrap());
        }
    }
}

fn waiting(socket: OwnedFd) -> UnixStream {
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn server() -> (TcpListener, SocketAddr) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = server.local_addr().unwrap();
    (server, at)
}

fn accept(server: &TcpListener) -> TcpStream {
    let caller = server.accept().unwrap().0;
    caller.set_read_timeout(Some(PATIENCE)).unwrap();
    caller
}

fn rest_of(mut from: impl Read) -> Vec<u8> {
    let mut rest = Vec::new();
    from.read_to_end(&mut rest).unwrap();
    rest
}

#[test]
fn a_permitted_stream_carries_both_ways_and_its_ends() {
    let (server, at) = server();
    let host = Host::of(&[format!("{at}")]);
    let mut module = host.stream(at);
    let mut peer = accept(&server);
    module.write_all(b"ask").unwrap();
    module.shutdown(std::net::Shutdown::Write).unwrap();
    let mut asked = Vec::new();
    peer.read_to_end(&mut asked).unwrap();
    assert_eq!(asked, b"ask");
    peer.write_all(b"answer").unwrap();
    drop(peer);
    assert_eq!(rest_of(module), b"answer");
    host.logged(|entry| entry.decision == Decision::Closed && entry.bytes == Some((3, 6)));
}

#[test]
fn much_comes_through_whole() {
    let (server, at) = server();
    let host = Host::of(&[format!("{at}")]);
    let mut module = host.stream(at);
    let mut peer = accept(&server);
    let all: Vec<u8> = (0..3 << 20).map(|at: u32| (at % 251) as u8).collect();
    let said = all.clone();
    let mut out = module.try_clone().unwrap();
    let saying = std::thread::spawn(move || {
        out.write_all(&said).unwrap();
        out.shutdown(std::net::Shutdown::Write).unwrap();
    });
    // The peer says it all back.
    let echo = std::thread::spawn(move || {
        let all = rest_of(&peer);
        peer.write_all(&all).unwrap();
    });
    let mut back = Vec::new();
    module.read_to_end(&mut back).unwrap();
    saying.join().unwrap();
    echo.join().unwrap();
    assert!(back == all, "{} of {} bytes, or others", back.len(), all.len());
}

#[test]
fn what_no_rule_permits_is_not_dialled() {
    let (server, at) = server();
    server.set_nonblocking(true).unwrap();
    let host = Host::of(&["192.0.2.1:1".to_owned(), format!("{}:{}/udp", at.ip(), at.port())]);
    let refused = host.connect(Protocol::Tcp, at).err();
    assert_eq!(refused, Some(Failure::Denied));
    assert_eq!(host.look_up("example.org").err(), Some(Failure::Denied));
    assert!(server.accept().is_err(), "nobody came");
    host.logged(|entry| entry.event == "connect" && entry.decision == Decision::Denied);
    host.logged(|entry| entry.event == "name" && entry.decision == Decision::Denied);
}

#[test]
fn a_name_is_dialled_by_the_address_that_stands_for_it() {
    let (server, at) = server();
    let host = Host::of(&[format!("localhost:{}", at.port()), format!("{at}")]);
    let addresses = host.look_up("LocalHost.").unwrap();
    assert!(addresses.iter().all(|address| !address.is_loopback()), "{addresses:?}");
    let stands_for_it = SocketAddr::new(addresses[0], at.port());
    let mut module = host.stream(stands_for_it);
    let mut peer = accept(&server);
    module.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut first = [0; 4];
    peer.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"GET ");
    host.logged(|entry| entry.target == "localhost" && entry.peer == Some(at));
}

#[test]
fn a_stream_to_a_name_is_for_that_name_only() {
    let (server, at) = server();
    let host = Host::of(&[format!("localhost:{}", at.port()), format!("{at}")]);
    let address = host.look_up("localhost").unwrap()[0];
    let connection = host.connect(Protocol::Tcp, SocketAddr::new(address, at.port())).unwrap();
    let was_reset = connection.was_reset.clone();
    let mut module = waiting(connection.socket);
    let peer = accept(&server);
    module.write_all(b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n").unwrap();
    assert_eq!(rest_of(module), b"");
    assert!(was_reset.load(Ordering::Acquire));
    assert_eq!(rest_of(peer), b"", "nothing of it went out");
    host.logged(|entry| entry.decision == Decision::Cut && entry.reason.contains("other.test"));
}

#[test]
fn new_rules_cut_what_is_open() {
    let (server, at) = server();
    let host = Host::of(&[format!("{at}")]);
    let connection = host.connect(Protocol::Tcp, at).unwrap();
    let was_reset = connection.was_reset.clone();
    let peer = accept(&server);
    host.requests().change(Policy::default());
    assert_eq!(rest_of(waiting(connection.socket)), b"");
    assert_eq!(rest_of(peer), b"");
    assert!(was_reset.load(Ordering::Acquire));
    assert_eq!(host.connect(Protocol::Tcp, at).err(), Some(Failure::Denied));
}

#[test]
fn what_was_connected_under_the_rules_before_is_judged_by_those_of_now() {
    let (ours, dialer) = sys::channel().unwrap();
    let (requests, orders) = orders().unwrap();
    let policy = Policy::new(scope(&["192.0.2.1:80".to_owned()]));
    let audit = Box::new(|_| ());
    let published = Vec::new();
    let mut relay = Relay::new(Parts { policy, channel: ours, published, audit, orders });
    let (done, answer) = channel();
    let at = "192.0.2.1:80".parse().unwrap();
    relay.connect(Protocol::Tcp, at, Box::new(move |result| drop(done.send(result))));
    let (host, mut peers) = UnixStream::pair().unwrap();
    let (id, passed) = (relay.next_id, Some(host.into()));
    let reply = Reply::Connected { id, peer: Peer { at, is_own: false } }.encode();
    sys::send_with(dialer.as_fd(), &reply, passed.as_ref()).unwrap();
    drop(passed);
    // The answer is on its way when the rules change.
    relay.change(Policy::default());
    relay.replies();
    assert_eq!(answer.recv_timeout(PATIENCE).unwrap().err(), Some(Failure::Denied));
    assert_eq!(rest_of(&mut peers), b"");
    drop(requests);
}

#[test]
fn a_peer_that_resets_is_told_from_one_that_ends() {
    let (server, at) = server();
    let host = Host::of(&[format!("{at}")]);
    let connection = host.connect(Protocol::Tcp, at).unwrap();
    let peer = accept(&server);
    let mut module = waiting(connection.socket);
    module.write_all(b"unread").unwrap();
    // Something unread in a socket that is closed is a reset (RFC 2525, 2.17).
    let mut peeked = [0];
    peer.peek(&mut peeked).unwrap();
    drop(peer);
    assert_eq!(rest_of(module), b"");
    assert!(connection.was_reset.load(Ordering::Acquire));
}

#[test]
fn a_module_that_closes_its_socket_frees_the_flow() {
    let (server, at) = server();
    let limited = NetworkScope { connections_max: Some(1), ..scope(&[format!("{at}")]) };
    let host = Host::new(limited, Vec::new());
    let module = host.stream(at);
    let peer = accept(&server);
    assert_eq!(host.connect(Protocol::Tcp, at).err(), Some(Failure::Busy));
    drop(module);
    assert_eq!(rest_of(&peer), b"");
    host.logged(|entry| entry.decision == Decision::Closed);
    let _second = host.stream(at);
}

#[test]
fn what_was_said_before_the_end_goes_out() {
    let (server, at) = server();
    let host = Host::of(&[format!("{at}")]);
    let mut module = host.stream(at);
    let peer = accept(&server);
    module.write_all(&[7; 100 << 10]).unwrap();
    drop(module);
    drop(host);
    assert_eq!(rest_of(peer).len(), 100 << 10);
}

#[test]
fn datagrams_go_both_ways() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let at = server.local_addr().unwrap();
    let host = Host::of(&[format!("{at}/udp")]);
    // A pair of messages is read and written as a stream is, a message at a time.
    let mut module = waiting(host.connect(Protocol::Udp, at).unwrap().socket);
    module.write_all(b"ping").unwrap();
    let mut buffer = [0; 16];
    let (bytes, from) = server.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..bytes], b"ping");
    server.send_to(b"pong", from).unwrap();
    let bytes = module.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..bytes], b"pong");
}

#[test]
fn a_rate_is_kept() {
    let (server, at) = server();
    let rate_bytes = Some(1 << 20);
    let host = Host::new(NetworkScope { rate_bytes, ..scope(&[format!("{at}")]) }, Vec::new());
    let mut module = host.stream(at);
    let peer = accept(&server);
    let began = Instant::now();
    module.write_all(&vec![7; 1 << 20]).unwrap();
    module.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(rest_of(peer).len(), 1 << 20);
    // A fifth of a second's worth may go at once; the rest cannot be sooner than its time.
    assert!(began.elapsed() >= Duration::from_millis(700), "{:?}", began.elapsed());
}

#[test]
fn callers_of_a_published_port_reach_who_listens() {
    let (listener, at) = server();
    listener.set_nonblocking(true).unwrap();
    let listen = vec!["80".parse().unwrap()];
    let scope = NetworkScope { listen, ..NetworkScope::default() };
    let host = Host::new(scope, vec![Published { listener, guest_port: 80 }]);
    let mut early = TcpStream::connect(at).unwrap();
    early.set_read_timeout(Some(PATIENCE)).unwrap();
    // Nobody listens yet.
    assert!(matches!(early.read(&mut [0]), Ok(0) | Err(_)));
    assert_eq!(host.listen(81).err(), Some(Failure::Denied));
    let callers = host.listen(80).unwrap();
    assert_eq!(host.listen(80).err(), Some(Failure::Denied));
    let mut caller = TcpStream::connect(at).unwrap();
    caller.write_all(b"hello").unwrap();
    let mut module = waiting(callers.recv_timeout(PATIENCE).unwrap().socket);
    let mut heard = [0; 5];
    module.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello");
    module.write_all(b"welcome").unwrap();
    drop(module);
    assert_eq!(rest_of(caller), b"welcome");
    host.requests().change(Policy::default());
    host.logged(|entry| entry.event == "listen" && entry.decision == Decision::Denied);
}

#[test]
fn callers_leave_room_for_the_modules_own_connections() {
    let ((listener, at), (server, peer)) = (server(), server());
    listener.set_nonblocking(true).unwrap();
    let listen = vec!["80".parse().unwrap()];
    let scope = NetworkScope { listen, ..scope(&[format!("{peer}")]) };
    let host = Host::new(scope, vec![Published { listener, guest_port: 80 }]);
    let arrived = host.listen(80).unwrap();
    let mut callers = Vec::new();
    for _ in 0..CALLERS_MAX {
        callers.push((TcpStream::connect(at).unwrap(), arrived.recv_timeout(PATIENCE).unwrap()));
    }
    let mut more = TcpStream::connect(at).unwrap();
    more.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(matches!(more.read(&mut [0]), Ok(0) | Err(_)));
    host.logged(|entry| entry.event == "listen" && entry.reason.contains("192"));
    let _own: Vec<UnixStream> = (0..64).map(|_| host.stream(peer)).collect();
    assert_eq!(host.connect(Protocol::Tcp, peer).err(), Some(Failure::Busy));
    drop(server);
}

#[test]
fn without_a_dialer_everything_is_refused_at_once() {
    let (channel, theirs) = sys::channel().unwrap();
    drop(theirs);
    let (requests, orders) = orders().unwrap();
    let policy = Policy::new(scope(&["192.0.2.1:80".to_owned()]));
    let audit = Box::new(|_| ());
    let relay = Relay::new(Parts { policy, channel, published: Vec::new(), audit, orders });
    let thread = std::thread::spawn(move || relay.run());
    let host = Host { requests: Some(requests), threads: vec![thread], log: Arc::default() };
    let refused = host.connect(Protocol::Tcp, "192.0.2.1:80".parse().unwrap());
    assert_eq!(refused.err(), Some(Failure::Unreachable));
}
