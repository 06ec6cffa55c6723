//! Packets as a guest sends them, and as no guest should.

use super::*;
use proptest::prelude::*;

fn socket(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// A SYN from `from` to `to`.
fn syn(from: &str, to: &str) -> Vec<u8> {
    let (from, to) = (socket(from), socket(to));
    let repr = TcpRepr {
        src_port: from.port(),
        dst_port: to.port(),
        control: TcpControl::Syn,
        seq_number: TcpSeqNumber(1000),
        ack_number: None,
        window_len: 1000,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let ip = ip(from.ip(), to.ip(), IpProtocol::Tcp, repr.buffer_len()).unwrap();
    build(&ip, |payload| {
        let mut packet = TcpPacket::new_unchecked(payload);
        repr.emit(&mut packet, &from.ip().into(), &to.ip().into(), &checksums());
    })
}

const PAIRS: [(&str, &str); 2] =
    [("198.18.0.2:4000", "192.0.2.1:80"), ("[fd65::2]:4000", "[2001:db8::1]:80")];

#[test]
fn a_segment_is_taken_apart() {
    for (from, to) in PAIRS {
        let bytes = syn(from, to);
        let packet = parse(&bytes).unwrap();
        assert_eq!((packet.source, packet.destination), (socket(from), socket(to)));
        assert_eq!(packet.carried, Carried::Tcp { opens: true, resets: false });
    }
}

#[test]
fn a_reset_answers_the_segment_that_came() {
    for (from, to) in PAIRS {
        let bytes = reset(&syn(from, to)).unwrap();
        let packet = parse(&bytes).unwrap();
        assert_eq!((packet.source, packet.destination), (socket(to), socket(from)));
        assert_eq!(packet.carried, Carried::Tcp { opens: false, resets: true });
        let header = if packet.source.is_ipv4() { 20 } else { 40 };
        let segment = TcpPacket::new_checked(&bytes[header..]).unwrap();
        assert_eq!(segment.ack_number(), TcpSeqNumber(1001));
        assert_eq!(reset(&bytes), None, "a reset is not answered");
    }
}

#[test]
fn datagrams_and_echoes_are_built_as_they_are_read() {
    for (from, to) in PAIRS {
        let (from, to) = (socket(from), socket(to));
        let bytes = datagram(from, to, b"data").unwrap();
        let packet = parse(&bytes).unwrap();
        assert_eq!(packet.carried, Carried::Udp(b"data"));
        assert_eq!((packet.source, packet.destination), (from, to));
        let reply = echo_reply(from.ip(), to.ip(), 7, 9, b"data").unwrap();
        assert!(matches!(parse(&reply).unwrap().carried, Carried::Other(1 | 58)));
    }
    assert_eq!(datagram(socket("192.0.2.1:1"), socket("[::1]:1"), b""), None);
}

#[test]
fn refusals_quote_what_they_refuse() {
    for (from, to) in PAIRS {
        let refused = syn(from, to);
        for why in [Refusal::Prohibited, Refusal::Unreachable, Refusal::Port] {
            let bytes = refuse(&refused, why).unwrap();
            let packet = parse(&bytes).unwrap();
            assert_eq!(packet.source.ip(), socket(to).ip());
            assert_eq!(packet.destination.ip(), socket(from).ip());
            assert!(bytes.ends_with(&refused[refused.len() - 20..]));
        }
    }
}

#[test]
fn fragments_and_broken_packets_are_refused() {
    let whole = syn(PAIRS[0].0, PAIRS[0].1);
    let mut fragment = whole.clone();
    fragment[6] = 0x20;
    assert_eq!(parse(&fragment), None);
    let mut later = whole.clone();
    later[7] = 1;
    assert_eq!(parse(&later), None);
    for cut in 0..whole.len() {
        assert_eq!(parse(&whole[..cut]), None, "{cut}");
    }
    let mut port_zero = whole;
    port_zero[20..22].fill(0);
    assert_eq!(parse(&port_zero), None);
    assert_eq!(parse(&[]), None);
    assert_eq!(parse(&[0x50; 60]), None);
}

proptest! {
    #[test]
    fn no_packet_panics(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..120),
        version in prop::sample::select(vec![0x45u8, 0x60, 0x4f, 0x46]),
        protocol in prop::sample::select(vec![6u8, 17, 1, 58, 0, 44]),
        length in 0u8..130,
    ) {
        if bytes.len() > 9 {
            bytes[0] = version;
            bytes[2..4].copy_from_slice(&[0, length]);
            bytes[if version == 0x60 { 6 } else { 9 }] = protocol;
            if version != 0x60 {
                bytes[6..8].fill(0);
            } else {
                bytes[4..6].copy_from_slice(&[0, length]);
            }
        }
        if parse(&bytes).is_some() {
            let _ = (refuse(&bytes, Refusal::Port), reset(&bytes));
        }
    }
}
