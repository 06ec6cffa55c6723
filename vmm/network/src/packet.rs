//! IP packets: what the guest sends, taken apart and checked, and what the
//! stack says itself (refusals, datagrams, echoes). Streams are smoltcp's.

use std::net::{IpAddr, SocketAddr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    Icmpv4DstUnreachable, Icmpv4Packet, Icmpv4Repr, Icmpv6DstUnreachable, Icmpv6Packet, Icmpv6Repr,
    IpProtocol, IpRepr, Ipv4Packet, Ipv4Repr, Ipv6Packet, Ipv6Repr, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber, UdpPacket, UdpRepr,
};

/// Bytes of a refused packet that go back with the refusal (RFC 792, RFC 4443).
pub const QUOTED_BYTES_MAX: usize = 512;
const HOP_LIMIT: u8 = 64;

/// What a packet of the guest carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried<'a> {
    /// A TCP segment: is it the first of a connection, and is it a reset?
    Tcp {
        opens: bool,
        resets: bool,
    },
    Udp(&'a [u8]),
    Echo {
        ident: u16,
        sequence: u16,
        data: &'a [u8],
    },
    /// A protocol by its number, or a message of ICMP that asks nothing.
    Other(u8),
}

/// A packet of the guest, as far as it concerns the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Ports are 0 where the protocol has none.
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub carried: Carried<'a>,
}

/// Takes a packet apart. `None` where it is malformed, a fragment, or wears
/// extension headers.
pub fn parse(bytes: &[u8]) -> Option<Packet<'_>> {
    match bytes.first()? >> 4 {
        4 => {
            let packet = Ipv4Packet::new_checked(bytes).ok()?;
            if packet.more_frags() || packet.frag_offset() != 0 {
                return None;
            }
            let ends = (packet.src_addr().into(), packet.dst_addr().into());
            carried(ends, packet.next_header(), packet.payload_of(bytes)?)
        }
        6 => {
            let packet = Ipv6Packet::new_checked(bytes).ok()?;
            let ends = (packet.src_addr().into(), packet.dst_addr().into());
            let payload = bytes.get(40..packet.total_len())?;
            carried(ends, packet.next_header(), payload)
        }
        _ => None,
    }
}

/// Whether the packet goes to a group: 224.0.0.0/4, ff00::/8.
pub fn is_for_group(bytes: &[u8]) -> bool {
    match bytes.first().map(|first| first >> 4) {
        Some(4) => bytes.get(16).is_some_and(|first| first >> 4 == 14),
        Some(6) => bytes.get(24) == Some(&0xff),
        _ => false,
    }
}

/// Whether it is of a protocol by which hosts manage neighbours and groups:
/// ICMP, IGMP, ICMPv6, and the options before it (RFC 3810).
pub fn is_control(bytes: &[u8]) -> bool {
    let protocol = match bytes.first().map(|first| first >> 4) {
        Some(4) => bytes.get(9),
        _ => bytes.get(6),
    };
    matches!(protocol, Some(0 | 1 | 2 | 58))
}

/// smoltcp's `payload` borrows the packet; this one borrows the bytes.
trait PayloadOf {
    fn payload_of<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]>;
}

impl PayloadOf for Ipv4Packet<&[u8]> {
    fn payload_of<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        bytes.get(usize::from(self.header_len())..usize::from(self.total_len()))
    }
}

fn carried<'a>(
    (source, destination): (IpAddr, IpAddr),
    protocol: IpProtocol,
    payload: &'a [u8],
) -> Option<Packet<'a>> {
    let (ports, carried) = match protocol {
        IpProtocol::Tcp => {
            let segment = TcpPacket::new_checked(payload).ok()?;
            let carried =
                Carried::Tcp { opens: segment.syn() && !segment.ack(), resets: segment.rst() };
            ((segment.src_port(), segment.dst_port()), carried)
        }
        IpProtocol::Udp => {
            let datagram = UdpPacket::new_checked(payload).ok()?;
            let data = payload.get(8..usize::from(datagram.len()))?;
            ((datagram.src_port(), datagram.dst_port()), Carried::Udp(data))
        }
        IpProtocol::Icmp | IpProtocol::Icmpv6 => ((0, 0), echo(protocol, payload)),
        other => ((0, 0), Carried::Other(other.into())),
    };
    // Port 0 is nobody's, and smoltcp takes it for a mistake of ours.
    if matches!(carried, Carried::Tcp { .. } | Carried::Udp(_)) && (ports.0 == 0 || ports.1 == 0) {
        return None;
    }
    Some(Packet {
        source: SocketAddr::new(source, ports.0),
        destination: SocketAddr::new(destination, ports.1),
        carried,
    })
}

fn echo(protocol: IpProtocol, payload: &[u8]) -> Carried<'_> {
    let request = if protocol == IpProtocol::Icmp { 8 } else { 128 };
    match payload {
        [kind, 0, _, _, i1, i2, s1, s2, data @ ..] if *kind == request => Carried::Echo {
            ident: u16::from_be_bytes([*i1, *i2]),
            sequence: u16::from_be_bytes([*s1, *s2]),
            data,
        },
        _ => Carried::Other(protocol.into()),
    }
}

/// Fills in what the guest checks and leaves out what it was told not to.
fn checksums() -> ChecksumCapabilities {
    ChecksumCapabilities::default()
}

fn ip(from: IpAddr, to: IpAddr, protocol: IpProtocol, bytes: usize) -> Option<IpRepr> {
    Some(match (from, to) {
        (IpAddr::V4(src_addr), IpAddr::V4(dst_addr)) => IpRepr::Ipv4(Ipv4Repr {
            src_addr,
            dst_addr,
            next_header: protocol,
            payload_len: bytes,
            hop_limit: HOP_LIMIT,
        }),
        (IpAddr::V6(src_addr), IpAddr::V6(dst_addr)) => IpRepr::Ipv6(Ipv6Repr {
            src_addr,
            dst_addr,
            next_header: protocol,
            payload_len: bytes,
            hop_limit: HOP_LIMIT,
        }),
        _ => return None,
    })
}

/// A packet with `ip`'s header, whose payload `fill` writes.
fn build(ip: &IpRepr, fill: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = vec![0; ip.buffer_len()];
    let header = ip.header_len();
    ip.emit(&mut bytes[..], &checksums());
    fill(&mut bytes[header..]);
    bytes
}

/// A datagram for the guest.
pub fn datagram(from: SocketAddr, to: SocketAddr, data: &[u8]) -> Option<Vec<u8>> {
    let repr = UdpRepr { src_port: from.port(), dst_port: to.port() };
    let ip = ip(from.ip(), to.ip(), IpProtocol::Udp, repr.header_len() + data.len())?;
    let (source, destination) = (from.ip().into(), to.ip().into());
    Some(build(&ip, |payload| {
        let mut packet = UdpPacket::new_unchecked(payload);
        repr.emit(
            &mut packet,
            &source,
            &destination,
            data.len(),
            |to| to.copy_from_slice(data),
            &checksums(),
        );
    }))
}

/// The answer to an echo request of the guest.
pub fn echo_reply(
    from: IpAddr,
    to: IpAddr,
    ident: u16,
    sequence: u16,
    data: &[u8],
) -> Option<Vec<u8>> {
    match (from, to) {
        (IpAddr::V4(_), _) => {
            let repr = Icmpv4Repr::EchoReply { ident, seq_no: sequence, data };
            let ip = ip(from, to, IpProtocol::Icmp, repr.buffer_len())?;
            Some(build(&ip, |payload| {
                repr.emit(&mut Icmpv4Packet::new_unchecked(payload), &checksums());
            }))
        }
        (IpAddr::V6(from_v6), IpAddr::V6(to_v6)) => {
            let repr = Icmpv6Repr::EchoReply { ident, seq_no: sequence, data };
            let ip = ip(from, to, IpProtocol::Icmpv6, repr.buffer_len())?;
            Some(build(&ip, |payload| {
                let mut packet = Icmpv6Packet::new_unchecked(payload);
                repr.emit(&from_v6, &to_v6, &mut packet, &checksums());
            }))
        }
        _ => None,
    }
}

/// What a guest is told of a packet that goes nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The policy does not permit it.
    Prohibited,
    /// There is no way there, or no such name.
    Unreachable,
    /// Nobody listens there.
    Port,
}

/// What of `packet` its refusal has: [`refuse`] says the same of it.
pub fn quoted(packet: &[u8]) -> &[u8] {
    packet.get(..QUOTED_BYTES_MAX).unwrap_or(packet)
}

/// The message of ICMP that refuses `packet`.
pub fn refuse(packet: &[u8], why: Refusal) -> Option<Vec<u8>> {
    let quoted = quoted(packet);
    match packet.first()? >> 4 {
        4 => refuse_v4(quoted, why),
        _ => refuse_v6(quoted, why),
    }
}

fn refuse_v4(quoted: &[u8], why: Refusal) -> Option<Vec<u8>> {
    let refused = Ipv4Packet::new_unchecked(quoted);
    let header = Ipv4Repr {
        src_addr: refused.src_addr(),
        dst_addr: refused.dst_addr(),
        next_header: refused.next_header(),
        payload_len: usize::from(refused.total_len()).checked_sub(20)?,
        hop_limit: refused.hop_limit(),
    };
    let reason = match why {
        Refusal::Prohibited => Icmpv4DstUnreachable::CommProhibited,
        Refusal::Unreachable => Icmpv4DstUnreachable::HostUnreachable,
        Refusal::Port => Icmpv4DstUnreachable::PortUnreachable,
    };
    let data = quoted.get(usize::from(refused.header_len())..)?;
    let repr = Icmpv4Repr::DstUnreachable { reason, header, data };
    let (from, to) = (header.dst_addr.into(), header.src_addr.into());
    let ip = ip(from, to, IpProtocol::Icmp, repr.buffer_len())?;
    Some(build(&ip, |payload| {
        repr.emit(&mut Icmpv4Packet::new_unchecked(payload), &checksums());
    }))
}

fn refuse_v6(quoted: &[u8], why: Refusal) -> Option<Vec<u8>> {
    let refused = Ipv6Packet::new_unchecked(quoted);
    let header = Ipv6Repr {
        src_addr: refused.src_addr(),
        dst_addr: refused.dst_addr(),
        next_header: refused.next_header(),
        payload_len: usize::from(refused.payload_len()),
        hop_limit: refused.hop_limit(),
    };
    let reason = match why {
        Refusal::Prohibited => Icmpv6DstUnreachable::AdminProhibit,
        Refusal::Unreachable => Icmpv6DstUnreachable::AddrUnreachable,
        Refusal::Port => Icmpv6DstUnreachable::PortUnreachable,
    };
    let repr = Icmpv6Repr::DstUnreachable { reason, header, data: quoted.get(40..)? };
    let (from, to) = (header.dst_addr, header.src_addr);
    let ip = ip(from.into(), to.into(), IpProtocol::Icmpv6, repr.buffer_len())?;
    Some(build(&ip, |payload| {
        let mut packet = Icmpv6Packet::new_unchecked(payload);
        repr.emit(&from, &to, &mut packet, &checksums());
    }))
}

/// The reset that answers the segment in `packet`, as a host that does not
/// listen says it (RFC 9293, 3.10.7.1).
pub fn reset(packet: &[u8]) -> Option<Vec<u8>> {
    let parsed = parse(packet)?;
    let header = if parsed.source.is_ipv4() { (packet.first()? & 15) as usize * 4 } else { 40 };
    let segment = TcpPacket::new_checked(packet.get(header..)?).ok()?;
    if segment.rst() {
        return None;
    }
    let ack = segment.seq_number() + segment.segment_len();
    let seq_number = if segment.ack() { segment.ack_number() } else { TcpSeqNumber(0) };
    let repr = TcpRepr {
        src_port: parsed.destination.port(),
        dst_port: parsed.source.port(),
        control: TcpControl::Rst,
        seq_number,
        ack_number: (!segment.ack()).then_some(ack),
        window_len: 0,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let (from, to) = (parsed.destination.ip(), parsed.source.ip());
    let ip = ip(from, to, IpProtocol::Tcp, repr.buffer_len())?;
    Some(build(&ip, |payload| {
        let mut packet = TcpPacket::new_unchecked(payload);
        repr.emit(&mut packet, &from.into(), &to.into(), &checksums());
    }))
}

#[cfg(test)]
mod tests;
