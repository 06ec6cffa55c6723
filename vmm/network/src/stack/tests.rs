//! A stack between a guest, which is packets made by hand here, and a dialer that answers when
//! and what a test wants.

use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use event_manager::{EventManager, MutEventSubscriber, SubscriberId, SubscriberOps};
use exocell_xgate::NetworkScope;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber,
};

use super::*;
use crate::dialer::protocol::{Failure, MESSAGE_BYTES_MAX, Reply};
use crate::policy::Peer;

const OTHER: Ipv4Addr = Ipv4Addr::new(192, 31, 196, 80);

/// What the stack's descriptors are watched by; the tests say themselves when what comes.
struct Nobody;

impl MutEventSubscriber for Nobody {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {}
    fn init(&mut self, _: &mut EventOps<'_>) {}
}

struct Bench {
    stack: Stack,
    dialer: OwnedFd,
    changer: Changer,
    log: Arc<Mutex<Vec<Entry>>>,
    watch: EventManager<Nobody>,
    subscriber: SubscriberId,
}

fn policy(connect: &[&str]) -> Policy {
    let connect = connect.iter().map(|rule| rule.parse().unwrap()).collect();
    Policy::new(NetworkScope { connect, ..NetworkScope::default() })
}

impl Bench {
    fn new(policy: Policy, published: Vec<Published>) -> Self {
        let (channel, dialer) = sys::channel().unwrap();
        let (changer, changes) = Changes::pair().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let kept = log.clone();
        let stack = Stack::new(Parts {
            policy,
            channel,
            published,
            doors: vec![53],
            audit: Box::new(move |entry| kept.lock().unwrap().push(entry)),
            changes,
            ports: Ports::default(),
            secrets: Secrets::default(),
            authority: None,
        });
        let mut watch = EventManager::new().unwrap();
        let subscriber = watch.add_subscriber(Nobody);
        Self { stack: stack.unwrap(), dialer, changer, log, watch, subscriber }
    }

    /// What the stack asks next; `None` where it asks nothing.
    fn asked(&self) -> Option<Request> {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let bytes = sys::receive(self.dialer.as_fd(), &mut buffer).ok()?;
        Request::decode(&buffer[..bytes])
    }

    /// The number of the flow that the stack asks for.
    fn asked_to_connect(&self) -> Id {
        match self.asked() {
            Some(Request::Connect { id, .. }) => id,
            other => panic!("{other:?}"),
        }
    }

    /// The dialer connects: to the peer's end of a pair, which is returned, or to nothing.
    fn connected(&self, id: Id, is_own: bool, is_stream: bool) -> Option<UnixStream> {
        let peer = Peer { at: SocketAddr::new(OTHER.into(), 80), is_own };
        let (host, peers) = UnixStream::pair().unwrap();
        host.set_nonblocking(true).unwrap();
        let passed = is_stream.then(|| host.into());
        let reply = Reply::Connected { id, peer }.encode();
        sys::send_with(self.dialer.as_fd(), &reply, passed.as_ref()).unwrap();
        is_stream.then_some(peers)
    }

    /// The stack takes what the dialer has answered.
    fn replies(&mut self) {
        let mut ops = self.watch.event_ops(self.subscriber).unwrap();
        self.stack.replies(&mut ops);
    }

    fn turn(&mut self) {
        let mut ops = self.watch.event_ops(self.subscriber).unwrap();
        self.stack.turn(&mut ops);
    }

    fn change(&mut self, policy: Policy) {
        self.changer.change(policy);
        let mut ops = self.watch.event_ops(self.subscriber).unwrap();
        self.stack.change(&mut ops);
        assert!(matches!(self.asked(), Some(Request::Policy { .. })));
    }

    /// A stream of the guest from `port`, connected; the peer's end.
    fn stream(&mut self, port: u16) -> UnixStream {
        self.stack.packet(&segment(port, TcpControl::Syn, None));
        let peers = self.connected(self.asked_to_connect(), false, true);
        self.replies();
        self.turn();
        let first = self.segments()[0].1 + 1;
        self.stack.packet(&segment(port, TcpControl::None, Some(first)));
        self.turn();
        peers.unwrap()
    }

    /// Takes what was said to the guest by TCP: what each segment is, and where it begins.
    fn segments(&mut self) -> Vec<(bool, TcpSeqNumber)> {
        let packets = std::mem::take(&mut self.stack.outbox.queue);
        let read = |packet: &Vec<u8>| {
            let ip = Ipv4Packet::new_checked(&packet[..]).unwrap();
            let tcp = (ip.next_header() == IpProtocol::Tcp).then(|| ip.payload())?;
            let tcp = TcpPacket::new_checked(tcp).unwrap();
            Some((tcp.rst(), tcp.seq_number()))
        };
        packets.iter().filter_map(read).collect()
    }

    fn decisions(&self) -> Vec<(Decision, String)> {
        let log = self.log.lock().unwrap();
        log.iter().map(|entry| (entry.decision, entry.reason.clone())).collect()
    }
}

/// A segment of the guest, the first or one that says `ack`.
fn segment(port: u16, control: TcpControl, ack: Option<TcpSeqNumber>) -> Vec<u8> {
    let tcp = TcpRepr {
        src_port: port,
        dst_port: 80,
        control,
        seq_number: TcpSeqNumber(i32::from(control != TcpControl::Syn)),
        ack_number: ack,
        window_len: 1000,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let ip = Ipv4Repr {
        src_addr: link::GUEST_V4,
        dst_addr: OTHER,
        next_header: IpProtocol::Tcp,
        payload_len: tcp.buffer_len(),
        hop_limit: 64,
    };
    let mut bytes = vec![0; ip.buffer_len() + tcp.buffer_len()];
    let checksums = ChecksumCapabilities::ignored();
    ip.emit(&mut Ipv4Packet::new_unchecked(&mut bytes), &checksums);
    let rest = bytes.get_mut(ip.buffer_len()..).unwrap();
    let (from, to) = (link::GUEST_V4.into(), OTHER.into());
    tcp.emit(&mut TcpPacket::new_unchecked(rest), &from, &to, &checksums);
    bytes
}

fn udp(port: u16, data: &[u8]) -> Vec<u8> {
    let from = SocketAddr::new(link::GUEST_V4.into(), port);
    packet::datagram(from, SocketAddr::new(OTHER.into(), 80), data).unwrap()
}

#[test]
fn what_was_connected_under_the_rules_before_is_judged_by_those_of_now() {
    let mut bench = Bench::new(policy(&["192.31.196.80:80", "192.31.196.80:80/udp"]), Vec::new());
    bench.stack.packet(&segment(1000, TcpControl::Syn, None));
    let stream = bench.asked_to_connect();
    bench.stack.packet(&udp(1000, b"early"));
    let datagrams = bench.asked_to_connect();
    // The answers are on their way when the rules change.
    let mut peers = bench.connected(stream, false, true).unwrap();
    bench.connected(datagrams, false, false);
    bench.change(policy(&[]));
    bench.replies();
    assert_eq!(bench.asked(), Some(Request::Close { id: stream }));
    assert_eq!(bench.asked(), Some(Request::Close { id: datagrams }));
    assert_eq!(bench.asked(), None, "no datagram goes out");
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut peers, &mut rest).unwrap();
    assert_eq!((rest, bench.stack.flows.len()), (vec![], 0));
    let denied = (Decision::Denied, "no rule covers it".to_owned());
    assert_eq!(bench.decisions(), [denied.clone(), denied]);
}

#[test]
fn the_hosts_own_needs_a_rule_that_names_it_when_the_rules_change_too() {
    let both = policy(&["192.31.196.80:80", "192.31.196.0/24:80"]);
    for (is_own, left) in [(true, 0), (false, 1)] {
        let mut bench = Bench::new(both.clone(), Vec::new());
        bench.stack.packet(&segment(1000, TcpControl::Syn, None));
        let _peers = bench.connected(bench.asked_to_connect(), is_own, true);
        bench.replies();
        assert_eq!(bench.stack.flows.len(), 1);
        bench.change(policy(&["192.31.196.0/24:80"]));
        assert_eq!(bench.stack.flows.len(), left, "{is_own}");
    }
}

#[test]
fn each_of_many_streams_that_are_cut_is_reset() {
    let mut bench = Bench::new(policy(&["192.31.196.80:80"]), Vec::new());
    let _peers: Vec<UnixStream> = (0..100).map(|index| bench.stream(1000 + index)).collect();
    bench.change(policy(&[]));
    let resets = bench.segments().into_iter().filter(|(is_reset, _)| *is_reset).count();
    assert_eq!((resets, bench.stack.flows.len()), (100, 0));
}

/// Bytes of the guest that the stack holds for flows that are being opened.
fn held(stack: &mut Stack) -> usize {
    let mut bytes = 0;
    for slot in stack.flows.all() {
        if let Stage::Asking { first, early } = &stack.flows.get(slot).unwrap().stage {
            bytes += first.capacity() + early.iter().map(Vec::capacity).sum::<usize>();
        }
    }
    bytes
}

#[test]
fn what_waits_for_flows_to_be_opened_is_bounded_in_all() {
    let rules = ["192.31.196.80:80", "192.31.196.80:80/udp"];
    let mut bench = Bench::new(policy(&rules), Vec::new());
    let large = vec![7; 60_000];
    for port in 1000..1100 {
        (0..4).for_each(|_| bench.stack.packet(&udp(port, &large)));
    }
    // And what may be quoted of each flow.
    let most = (1 << 20) + 256 * 512;
    assert!((900_000..most).contains(&held(&mut bench.stack)), "{}", held(&mut bench.stack));
    // A first segment with much in it waits no more than that; other flows are opened as ever.
    let mut first = segment(1000, TcpControl::Syn, None);
    let all = first.len() + large.len();
    first.extend(&large);
    Ipv4Packet::new_unchecked(&mut first[..]).set_total_len(all as u16);
    Ipv4Packet::new_unchecked(&mut first[..]).fill_checksum();
    (0..20).for_each(|_| bench.stack.packet(&first));
    assert_eq!((held(&mut bench.stack) < most, bench.stack.flows.len()), (true, 100));
    bench.stack.packet(&segment(1000, TcpControl::Syn, None));
    assert_eq!(bench.stack.flows.len(), 101);
    // What was kept goes out when the answers come, and a refusal quotes what it should.
    let (kept, refused) = (bench.asked_to_connect(), bench.asked_to_connect());
    while bench.asked().is_some() {}
    bench.connected(kept, false, false);
    bench.replies();
    assert!(
        matches!(bench.asked(), Some(Request::Datagram { id, data }) if id == kept && data == large)
    );
    let failed = Reply::Failed { id: refused, why: Failure::Denied, text: String::new() };
    sys::send(bench.dialer.as_fd(), &failed.encode()).unwrap();
    bench.replies();
    let refusal = packet::refuse(&udp(1001, &large), Refusal::Prohibited);
    assert_eq!(bench.stack.outbox.queue.pop_back(), refusal);
}

#[test]
fn large_datagrams_that_the_guest_does_not_take_are_bounded() {
    let mut outbox = Outbox::default();
    for _ in 0..1000 {
        outbox.push(Some(vec![7; 65_000]));
        outbox.push(Some(vec![7; 1_500]));
    }
    let bytes: usize = outbox.queue.iter().map(Vec::len).sum();
    assert!(bytes < 2 << 20 && outbox.queue.len() > 200, "{bytes} in {}", outbox.queue.len());
}

#[test]
fn callers_of_published_ports_leave_room_for_the_cells_own_connections() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let at = listener.local_addr().unwrap();
    let scope = NetworkScope {
        listen: vec!["80".parse().unwrap()],
        connections_max: Some(32),
        ..policy(&["192.31.196.80:80"]).scope().clone()
    };
    let published = vec![Published { listener, guest_port: 80 }];
    let mut bench = Bench::new(Policy::new(scope), published);
    let mut callers = Vec::new();
    for _ in 0..300 {
        callers.push(std::net::TcpStream::connect(at).unwrap());
        let mut ops = bench.watch.event_ops(bench.subscriber).unwrap();
        bench.stack.accept(0, &mut ops);
    }
    assert_eq!((bench.stack.flows.len(), bench.stack.flows.callers()), (CALLERS_MAX, CALLERS_MAX));
    let called = bench.log.lock().unwrap()[0].peer;
    assert_eq!(called, callers[0].local_addr().ok());
    bench.turn();
    bench.stack.outbox.queue.clear();
    let _peers: Vec<UnixStream> = (0..32).map(|index| bench.stream(1000 + index)).collect();
    // The grant's own bound holds for those.
    bench.stack.packet(&segment(2000, TcpControl::Syn, None));
    assert_eq!(bench.asked(), None);
    let reason = "32 flows are open, which is the limit, 192 more by callers of published ports";
    assert_eq!(bench.decisions().pop(), Some((Decision::Denied, reason.to_owned())));
}

/// Their sources may be lies: they cost neither callers by connections nor each other the port.
#[test]
fn callers_by_datagrams_hold_nothing_up() {
    let scope = NetworkScope { listen: vec!["53".parse().unwrap()], ..NetworkScope::default() };
    let mut bench = Bench::new(Policy::new(scope), Vec::new());
    let from = |number: usize| SocketAddr::from(([192, 0, 2, 7], 5000 + number as u16));
    (0..2 * DATAGRAM_CALLERS_MAX).for_each(|number| bench.stack.called(0, from(number), b"x"));
    let flows = &bench.stack.flows;
    assert_eq!(
        (flows.len(), flows.datagram_callers()),
        (DATAGRAM_CALLERS_MAX, DATAGRAM_CALLERS_MAX)
    );
    assert_eq!((flows.connections(), flows.callers()), (0, 0));
    let known = |number| flows.find_call(0, from(number)).is_some();
    assert!(!known(0) && known(DATAGRAM_CALLERS_MAX) && known(2 * DATAGRAM_CALLERS_MAX - 1));
}

#[test]
fn callers_by_datagrams_are_led_to_the_guest_and_answered() {
    let listen = vec!["53".parse().unwrap()];
    let scope = NetworkScope { listen, ..NetworkScope::default() };
    let mut bench = Bench::new(Policy::new(scope), Vec::new());
    let from = "192.0.2.7:5000".parse().unwrap();
    bench.stack.called(0, from, b"question");
    let sent = bench.stack.outbox.queue.pop_front().unwrap();
    let packet = packet::parse(&sent).unwrap();
    assert_eq!(packet.carried, Carried::Udp(b"question"));
    assert_eq!(packet.destination, SocketAddr::new(link::GUEST_V4.into(), 53));
    let answer = packet::datagram(packet.destination, packet.source, b"answer").unwrap();
    bench.stack.packet(&answer);
    let asked = Request::Answer { door: 0, to: from, data: b"answer".to_vec() };
    assert_eq!(bench.asked(), Some(asked));
    // One flow a caller, and none where nobody is to be led to.
    bench.stack.called(0, from, b"again");
    bench.stack.called(1, from, b"no such door");
    assert_eq!(bench.stack.flows.len(), 1);
    bench.change(policy(&[]));
    bench.stack.outbox.queue.clear();
    bench.stack.called(0, from, b"late");
    assert!(bench.stack.outbox.queue.is_empty() && bench.stack.flows.len() == 0);
}

#[test]
fn nobody_listens_at_a_port_that_is_no_longer_published() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let at = listener.local_addr().unwrap();
    let listen = vec!["80".parse().unwrap()];
    let scope = NetworkScope { listen, ..NetworkScope::default() };
    let published = vec![Published { listener, guest_port: 80 }];
    let mut bench = Bench::new(Policy::new(scope), published);
    drop(std::net::TcpStream::connect(at).unwrap());
    bench.change(policy(&[]));
    let refused = std::net::TcpStream::connect(at).map_err(|error| error.kind());
    assert_eq!(refused.err(), Some(std::io::ErrorKind::ConnectionRefused));
}
