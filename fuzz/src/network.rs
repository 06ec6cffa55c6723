//! The network of a `vm` cell: packets of a hostile guest kernel, and messages
//! about names from the guest and from the host's servers.

use exocell_network::Secrets;
use exocell_network::guard::Guard;
use exocell_network::names::Names;
use exocell_network::stack::{Changes, Parts, Stack};
use exocell_network::switch::{Addresses, Port, Ports};
use exocell_network::{Policy, dialer, dns, link};
use exocell_vmm::devices::Link;

use crate::Input;

/// Packets of one input.
const PACKETS_MAX: usize = 64;
const RULES: &str =
    "connect *.test:1-65535\nconnect 0.0.0.0/0:80\nconnect [::/0]/icmp\nresolve *\n";

fn policy() -> Policy {
    Policy::from_text(RULES).expect("well-formed rules")
}

/// A length and a packet of it, over and over; of every second packet the
/// fields that decide whether it is looked at at all are put right.
pub fn packets(bytes: &[u8]) {
    let (channel, _dialer) = dialer::sys::channel().expect("a channel");
    // A network with others, whose switch does not answer.
    let (socket, _switch) = dialer::sys::channel().expect("a channel");
    let subnet = "198.18.0.0/28".parse().expect("a subnet");
    let addresses = Addresses::new(subnet, None, None).expect("addresses");
    let port = Port::new(socket, "net", addresses, link::GUEST_V4);
    let parts = Parts {
        policy: policy(),
        channel,
        published: Vec::new(),
        doors: Vec::new(),
        audit: Box::new(drop),
        changes: Changes::pair().expect("an event").1,
        secrets: exocell_network::Secrets::default(),
        authority: None,
        ports: Ports::new(vec![port]),
    };
    let mut stack = Stack::new(parts).expect("a stack");
    let mut input = Input::new(bytes);
    for count in 0..PACKETS_MAX {
        if input.is_empty() {
            break;
        }
        let length = usize::from(input.u16() % 2048);
        let mut packet = input.take(length).to_vec();
        if count % 2 == 0 {
            put_right(&mut packet);
        }
        stack.packet(&packet);
        stack.outbox().clear();
    }
}

/// Version, lengths and the guest's own address.
fn put_right(packet: &mut [u8]) {
    let length = packet.len() as u16;
    if let Some(header) = packet.get_mut(..20) {
        header[0] = 0x45;
        header[2..4].copy_from_slice(&length.to_be_bytes());
        header[6..8].fill(0);
        header[12..16].copy_from_slice(&[198, 18, 0, 2]);
    }
}

/// A question for a name, a SYN, an echo, and nonsense.
pub fn packet_seeds() -> Vec<Vec<u8>> {
    let packet = |protocol: u8, to: [u8; 4], payload: &[u8]| {
        let mut bytes = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0, 198, 18, 0, 2];
        bytes.extend(to);
        bytes.extend(payload);
        let length = bytes.len() as u16;
        bytes[2..4].copy_from_slice(&length.to_be_bytes());
        [&length.to_le_bytes()[..], &bytes].concat()
    };
    let question = dns::query(1, "a.test", false).expect("a question");
    let length = (question.len() as u16 + 8).to_be_bytes();
    let udp = [&[0x40, 0, 0, 53][..], &length, &[0, 0], &question].concat();
    let syn = [0x40, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0];
    let seeds = [
        packet(17, [198, 18, 0, 1], &udp),
        packet(6, [192, 0, 2, 1], &syn),
        packet(1, [192, 0, 2, 1], &[8, 0, 0, 0, 0, 1, 0, 1, 7, 7]),
        packet(47, [192, 0, 2, 1], &[0; 8]),
    ];
    vec![seeds.concat(), seeds[0].clone(), [&seeds[1][..], &seeds[1]].concat()]
}

/// What a guest says on a stream to a name, and what its server answers to the first half of
/// it: whatever the pieces are that it comes in, the same of it goes on.
pub fn guard(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (piece, answer) = (1 + usize::from(input.u8()), usize::from(input.u16()));
    let answer = input.take(answer % 512).to_vec();
    let said = input.take(bytes.len()).to_vec();
    let said = said.get(..said.len().min(32 << 10)).unwrap_or_default();
    let (first, second) = said.split_at(said.len() / 2);
    let through = |piece: usize| {
        let mut guard = Guard::of("a.test", 80, Secrets::default(), None);
        let mut through = Vec::new();
        let mut feed = |guard: &mut Guard, half: &[u8]| {
            half.chunks(piece).all(|part| {
                let judged = guard.hold(part).is_ok();
                through.extend(guard.passed());
                judged
            })
        };
        let went =
            feed(&mut guard, first) && guard.answered(&answer).is_ok() && feed(&mut guard, second);
        (through, went)
    };
    let whole = through(said.len().max(1));
    assert_eq!(through(piece), whole, "pieces of {piece} bytes make a difference");
}

/// A request with a body, a wish for websockets with its answer, and two hellos of TLS.
pub fn guard_seeds() -> Vec<Vec<u8>> {
    let seed = |answer: &[u8], said: &[u8]| {
        [&[6][..], &(answer.len() as u16).to_le_bytes(), answer, said].concat()
    };
    let chunked = b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n\
                    5\r\nhello\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: a.test:80\r\n\r\n";
    let body = b"PUT /x?y=%20 HTTP/1.1\r\nhost:a.test\r\nExpect: 100-continue\r\n\
                 Content-Length: 5\r\n\r\nhelloOPTIONS * HTTP/1.1\r\nHost: a.test\r\n\r\n";
    let wish =
        b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    let frames = vec![0x81; wish.len()];
    let hello = hello();
    let twice = [&hello[..], &hello].concat();
    vec![
        seed(b"", chunked),
        seed(b"", body),
        seed(b"HTTP/1.1 101 Switching Protocols\r\n\r\n", &[&wish[..], &frames].concat()),
        seed(b"\x16\x03\x03\x00\x04\x02\x00\x00\x00", &twice),
    ]
}

/// A client's hello that asks for `a.test`.
fn hello() -> Vec<u8> {
    let name = b"\0\0\0\x0b\0\x09\0\0\x06a.test";
    let body = [&[3, 3][..], &[7; 32], &[0, 0, 2, 19, 1, 1, 0, 0, 15], name].concat();
    let message = [&[1, 0, 0, body.len() as u8][..], &body].concat();
    [&[22, 3, 1, 0, message.len() as u8][..], &message].concat()
}

/// One message, taken for a question and for an answer.
pub fn names(bytes: &[u8]) {
    drop(dns::react(bytes, &policy(), &mut Names::default()));
    drop(dns::found(bytes, 1, "a.test", false));
}

/// A question and its answer.
pub fn name_seeds() -> Vec<Vec<u8>> {
    let question = dns::query(1, "a.test", false).expect("a question");
    let answer = match dns::react(&question, &policy(), &mut Names::default()) {
        dns::Reaction::Answer { bytes, .. } => bytes,
        dns::Reaction::Ignore | dns::Reaction::Resolve(_) => Vec::new(),
    };
    vec![question, answer]
}
