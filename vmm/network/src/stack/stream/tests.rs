//! What a stream sends to a guest, which is packets made by hand here.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber,
};

use super::*;
use crate::link::{GUEST_V4, MTU};

const OTHER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 80);
const MSS: usize = MTU as usize - 40;

/// A segment of the guest that says `ack` and offers `window` bytes of room.
fn segment(control: TcpControl, sent: i32, ack: Option<TcpSeqNumber>, window: u16) -> Vec<u8> {
    let tcp = TcpRepr {
        src_port: 1000,
        dst_port: 80,
        control,
        seq_number: TcpSeqNumber(sent),
        ack_number: ack,
        window_len: window,
        window_scale: None,
        max_seg_size: (control == TcpControl::Syn).then_some(MSS as u16),
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let ip = Ipv4Repr {
        src_addr: GUEST_V4,
        dst_addr: OTHER,
        next_header: IpProtocol::Tcp,
        payload_len: tcp.buffer_len(),
        hop_limit: 64,
    };
    let mut bytes = vec![0; ip.buffer_len() + tcp.buffer_len()];
    let checksums = ChecksumCapabilities::ignored();
    ip.emit(&mut Ipv4Packet::new_unchecked(&mut bytes), &checksums);
    let rest = bytes.get_mut(ip.buffer_len()..).unwrap();
    tcp.emit(&mut TcpPacket::new_unchecked(rest), &GUEST_V4.into(), &OTHER.into(), &checksums);
    bytes
}

/// Takes what the stream has sent: where each segment begins, and its bytes.
fn sent(outbox: &mut Outbox) -> Vec<(TcpSeqNumber, usize)> {
    let packets = std::mem::take(&mut outbox.queue);
    let read = |packet: Vec<u8>| {
        let ip = Ipv4Packet::new_checked(&packet).unwrap();
        let tcp = TcpPacket::new_checked(ip.payload()).unwrap();
        (tcp.seq_number(), tcp.payload().len())
    };
    packets.into_iter().map(read).collect()
}

/// A stream whose guest has room for `window` bytes, and the host's end.
fn stream(window: u16, outbox: &mut Outbox) -> (Stream, UnixStream, TcpSeqNumber) {
    let (host, peer) = UnixStream::pair().unwrap();
    host.set_nonblocking(true).unwrap();
    let ends = Ends { host: host.into(), guard: Guard::open(), others: 0 };
    let syn = segment(TcpControl::Syn, 0, None, window);
    let at = SocketAddr::new(OTHER.into(), 80);
    let mut stream = Stream::accept(at, &syn, ends, Instant::ZERO, 1, outbox).unwrap();
    stream.turn(Instant::ZERO, outbox, &mut Rate::new(None, std::time::Instant::now()));
    let first = sent(outbox)[0].0 + 1;
    stream.receive(&segment(TcpControl::None, 1, Some(first), window), Instant::ZERO, outbox);
    (stream, peer, first)
}

/// Has the host's end write `bytes`, and the stream move them.
fn pass(stream: &mut Stream, peer: &mut UnixStream, bytes: usize, outbox: &mut Outbox) {
    let rate = &mut Rate::new(None, std::time::Instant::now());
    let mut left = bytes;
    while left > 0 {
        let count = left.min(64 << 10);
        peer.write_all(&vec![7; count]).unwrap();
        left -= count;
        stream.readable = true;
        stream.turn(Instant::ZERO, outbox, rate);
    }
}

#[test]
fn much_goes_in_whole_segments_where_the_window_ends_in_a_crumb() {
    let mut outbox = Outbox::default();
    let (mut stream, mut peer, first) = stream(1000, &mut outbox);
    // The window is full, all else waits.
    pass(&mut stream, &mut peer, 500_000, &mut outbox);
    assert_eq!(sent(&mut outbox), [(first, 1000)]);
    let rate = &mut Rate::new(None, std::time::Instant::now());
    let ack = first + 1000;
    stream.receive(&segment(TcpControl::None, 1, Some(ack), u16::MAX), Instant::ZERO, &mut outbox);
    stream.turn(Instant::ZERO, &mut outbox, rate);
    assert_eq!(sent(&mut outbox), [(ack, MSS)], "{} more would fit", u16::MAX as usize - MSS);
    // With nothing on its way, a part is better than nothing.
    let ack = ack + MSS;
    stream.receive(&segment(TcpControl::None, 1, Some(ack), 2000), Instant::ZERO, &mut outbox);
    stream.turn(Instant::ZERO, &mut outbox, rate);
    assert_eq!(sent(&mut outbox), [(ack, 2000)]);
}

#[test]
fn little_goes_at_once() {
    let mut outbox = Outbox::default();
    let (mut stream, mut peer, first) = stream(u16::MAX, &mut outbox);
    pass(&mut stream, &mut peer, 10, &mut outbox);
    pass(&mut stream, &mut peer, 20, &mut outbox);
    assert_eq!(sent(&mut outbox), [(first, 10), (first + 10, 20)]);
}
