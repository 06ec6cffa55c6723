//! A switch on a thread, and members over real sockets.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
};

use super::*;

struct Bench {
    place: tempfile::TempDir,
    addresses: Addresses,
    switch: JoinHandle<io::Result<()>>,
}

fn open(path: &Path) -> OwnedFd {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
    nix::sys::socket::connect(socket.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
    socket
}

impl Bench {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        let path = UnixAddr::new(&place.path().join("s")).unwrap();
        bind(listener.as_raw_fd(), &path).unwrap();
        listen(&listener, Backlog::new(16).unwrap()).unwrap();
        let subnet: Subnet = "10.1.0.0/24".parse().unwrap();
        let addresses = Addresses::new(subnet, None, None).unwrap();
        let switch = Switch::new(Settings { addresses }, listener.into());
        Self { place, addresses, switch: std::thread::spawn(|| switch.run()) }
    }

    fn path(&self) -> PathBuf {
        self.place.path().join("s")
    }

    fn try_join(&self, cell: &str, names: &[&str], address: Option<Ipv4Addr>) -> io::Result<Port> {
        let names = names.iter().map(ToString::to_string).collect();
        let wanted = Join { cell: cell.to_owned(), names, address };
        join(open(&self.path()), "net", self.addresses, wanted)
    }

    fn join(&self, cell: &str, names: &[&str]) -> Port {
        self.try_join(cell, names, None).unwrap()
    }
}

fn packet(from: Ipv4Addr, to: Ipv4Addr, data: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45; 20];
    packet[12..16].copy_from_slice(&from.octets());
    packet[16..20].copy_from_slice(&to.octets());
    packet.extend_from_slice(data);
    packet
}

/// What comes next, news aside.
fn next(port: &mut Port) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 65536];
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until && !port.is_over() {
        match port.receive(&mut buffer) {
            Came::Packet(packet) => return Some(packet),
            Came::News => {}
            Came::Nothing => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    None
}

/// Takes what has come, until `name` is known, or is not.
fn hear(ports: &mut Ports, name: &str, known: bool) -> Option<Vec<std::net::IpAddr>> {
    let mut buffer = vec![0; 65536];
    for _ in 0..5000 {
        let found = ports.find(name);
        if found.is_some() == known {
            return found;
        }
        for place in ports.places() {
            while !matches!(ports.get(place).unwrap().receive(&mut buffer), Came::Nothing) {}
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{name} is still {}known", if known { "un" } else { "" });
}

#[test]
fn members_reach_each_other_by_address_and_know_each_others_names() {
    let bench = Bench::new();
    let mut one = bench.join("a", &["one", "db"]);
    let mut two = bench.join("b", &["two", "db"]);
    assert_eq!(one.address(), Ipv4Addr::new(10, 1, 0, 2));
    assert_eq!(two.address(), Ipv4Addr::new(10, 1, 0, 3));
    let sent = packet(one.address(), two.address(), &[7; 60000]);
    one.send(&sent);
    assert_eq!(next(&mut two), Some(sent));
    let answer = packet(two.address(), one.address(), b"x");
    two.send(&answer);
    assert_eq!(next(&mut one), Some(answer));

    let (first, second) = (one.address().into(), two.address().into());
    let mut ports = Ports::new(vec![one]);
    assert_eq!(hear(&mut ports, "two", true), Some(vec![second]));
    assert_eq!(ports.find("one"), Some(vec![first]), "its own name");
    assert_eq!(ports.find("two.net"), Some(vec![second]));
    assert_eq!(ports.find("two.other"), None);
    // Each of several comes first in its turn.
    let firsts = [ports.find("db").unwrap()[0], ports.find("db").unwrap()[0]];
    assert!(firsts.contains(&first) && firsts.contains(&second), "{firsts:?}");
    drop(two);
    hear(&mut ports, "two", false);
    assert_eq!(ports.find("db"), Some(vec![first]));
}

#[test]
fn a_packet_with_anothers_source_goes_nowhere() {
    let bench = Bench::new();
    let (mut one, mut two) = (bench.join("a", &[]), bench.join("b", &[]));
    let mut third = bench.join("c", &[]);
    one.send(&packet(two.address(), third.address(), b"forged"));
    one.send(&packet(Ipv4Addr::new(10, 1, 0, 1), third.address(), b"the gateway's"));
    one.send(&packet(one.address(), Ipv4Addr::new(10, 1, 0, 77), b"to nobody"));
    one.send(&packet(one.address(), Ipv4Addr::new(10, 1, 0, 255), b"to all"));
    one.send(&[0x60; 40]);
    one.send(&[0x45; 3]);
    let honest = packet(one.address(), third.address(), b"honest");
    one.send(&honest);
    assert_eq!(next(&mut third), Some(honest), "and nothing before it");
    let to_two = packet(third.address(), two.address(), b"x");
    third.send(&to_two);
    assert_eq!(next(&mut two), Some(to_two));
}

#[test]
fn a_member_says_no_news() {
    let bench = Bench::new();
    let (mut one, two) = (bench.join("a", &[]), bench.join("b", &["two"]));
    let lie = Member { cell: "z".into(), address: one.address(), names: vec!["bank".into()] };
    one.send(&message(&Answer::Member(lie)));
    one.send(&message(&Answer::Gone { address: two.address() }));
    let mut ports = Ports::new(vec![bench.join("c", &[])]);
    hear(&mut ports, "two", true);
    assert_eq!(ports.find("bank"), None);
}

#[test]
fn who_asks_for_what_is_not_to_be_had_hears_why() {
    let bench = Bench::new();
    let one = bench.try_join("a", &["one"], Some(Ipv4Addr::new(10, 1, 0, 9))).unwrap();
    assert_eq!(one.address(), Ipv4Addr::new(10, 1, 0, 9));
    let refused = |names: &[&str], address: Option<Ipv4Addr>| {
        bench.try_join("b", names, address).unwrap_err().to_string()
    };
    assert!(refused(&[], Some(one.address())).contains("another cell's"));
    assert!(refused(&[], Some(Ipv4Addr::new(10, 2, 0, 9))).contains("not an address"));
    assert!(refused(&["a b"], None).contains("is no name"));
    let many: Vec<String> = (0..65).map(|n| format!("n{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(refused(&many, None).contains("at most 64"));
    // One that breaks the protocol is hung up on, and the others stay.
    let odd = open(&bench.path());
    port::send(&odd, b"\0{}").unwrap();
    let mut byte = [0; 8];
    assert_eq!(nix::sys::socket::recv(odd.as_raw_fd(), &mut byte, MsgFlags::empty()), Ok(0));
    let listed = list(&open(&bench.path())).unwrap();
    let cells: Vec<&str> = listed.iter().map(|member| member.cell.as_str()).collect();
    assert_eq!(cells, ["a"]);
}

#[test]
fn who_does_not_read_costs_others_nothing() {
    let bench = Bench::new();
    let (mut one, mut two) = (bench.join("a", &[]), bench.join("b", &[]));
    let deaf = bench.join("c", &[]);
    let flood = packet(one.address(), deaf.address(), &[0; 60000]);
    for _ in 0..400 {
        one.send(&flood);
        one.flush();
    }
    let honest = packet(two.address(), one.address(), b"honest");
    two.send(&honest);
    assert_eq!(next(&mut one), Some(honest));
    let still = packet(one.address(), two.address(), b"still");
    for _ in 0..1000 {
        one.flush();
        std::thread::sleep(Duration::from_millis(1));
        one.send(&still);
        if let Came::Packet(came) = two.receive(&mut [0; 256]) {
            assert_eq!(came, still);
            return;
        }
    }
    panic!("what was sent after the flood did not come");
}

#[test]
fn who_is_flooded_stays_a_member_and_hears_the_news() {
    let bench = Bench::new();
    let mut one = bench.join("a", &[]);
    let busy = bench.join("b", &["busy"]);
    for size in [8, 60000] {
        let flood = packet(one.address(), busy.address(), &vec![0; size]);
        for _ in 0..100_000 / (size + 100) * 100 {
            one.send(&flood);
        }
        drop(bench.join("c", &["passing"]));
    }
    let late = bench.join("d", &["late"]);
    let listed = list(&open(&bench.path())).unwrap();
    assert!(listed.iter().any(|member| member.cell == "b"), "{listed:?}");
    let mut ports = Ports::new(vec![busy]);
    assert_eq!(hear(&mut ports, "late", true), Some(vec![late.address().into()]));
}

#[test]
fn it_ends_when_nobody_is_left_and_members_see_that() {
    let bench = Bench::new();
    drop(bench.join("a", &["one"]));
    assert!(bench.switch.join().unwrap().is_ok());
    let ways = Ports::default().way(&packet([10, 1, 0, 2].into(), [10, 1, 0, 3].into(), b""));
    assert_eq!(ways, Way::Elsewhere);
}

#[test]
fn a_guests_packets_go_by_the_network_that_they_are_for() {
    let bench = Bench::new();
    let port = bench.join("a", &[]);
    let own = port.address();
    let ports = Ports::new(vec![port]);
    let way = |from: [u8; 4], to: [u8; 4]| ports.way(&packet(from.into(), to.into(), b""));
    assert_eq!(way(own.octets(), [10, 1, 0, 77]), Way::Port(0));
    assert_eq!(way(own.octets(), [10, 1, 0, 1]), Way::Gateway);
    assert_eq!(way([10, 1, 0, 99], [10, 1, 0, 77]), Way::Foreign);
    assert_eq!(way(own.octets(), [8, 8, 8, 8]), Way::Elsewhere);
    assert_eq!(ports.way(&[0x45; 12]), Way::Elsewhere);
}
