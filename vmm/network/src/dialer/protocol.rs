//! What stack and dialer say to each other: one message a packet of a
//! `SOCK_SEQPACKET` pair. Numbers are little-endian.
//!
//! ```text
//! stack  -> dialer  Connect, Datagram, Close, Resolve, Policy, Answer
//! dialer -> stack   Connected (with the socket of a stream), Failed, Datagram, Resolved, Called
//! ```
//! The dialer takes what comes from the stack for an allegation: the stack is
//! the part that reads what a hostile guest sends.

use std::net::{IpAddr, SocketAddr};

use exocell_xgate::Protocol;

use crate::policy::{Peer, Target};

/// Bytes of the longest message: the longest datagram and what goes before it.
pub const MESSAGE_BYTES_MAX: usize = 65_535 + 32;

/// Number of a flow, chosen by the stack.
pub type Id = u32;

/// What the stack asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    Connect {
        id: Id,
        protocol: Protocol,
        target: Target,
        port: u16,
        /// Whether it is one of few, and its socket may hold as much as the host lets it.
        few: bool,
    },
    /// For a flow of datagrams or echoes that is connected.
    Datagram {
        id: Id,
        data: Vec<u8>,
    },
    /// The flow is over, or no longer wanted.
    Close {
        id: Id,
    },
    Resolve {
        id: Id,
        name: String,
    },
    /// The rules from now on, as [`crate::Policy::to_text`] writes them.
    Policy {
        rules: String,
    },
    /// A datagram for a caller of a published port, the one of number `door`.
    Answer {
        door: u32,
        to: SocketAddr,
        data: Vec<u8>,
    },
}

/// Why a flow was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// By the policy.
    Denied,
    /// The peer refuses.
    Refused,
    /// No such name, no way there, no answer.
    Unreachable,
    /// Too many at once.
    Busy,
    /// The host does not offer it, as with echoes where ping sockets are not allowed.
    NotOffered,
}

/// What the dialer answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Where it leads, and whether that is the host's own; the socket of a stream comes along.
    Connected {
        id: Id,
        peer: Peer,
    },
    Failed {
        id: Id,
        why: Failure,
        text: String,
    },
    Datagram {
        id: Id,
        data: Vec<u8>,
    },
    /// An empty list where there is no such name.
    Resolved {
        id: Id,
        addresses: Vec<IpAddr>,
    },
    /// A datagram of a caller of a published port.
    Called {
        door: u32,
        from: SocketAddr,
        data: Vec<u8>,
    },
}

const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Icmp];
const FAILURES: [Failure; 5] =
    [Failure::Denied, Failure::Refused, Failure::Unreachable, Failure::Busy, Failure::NotOffered];

fn place<T: PartialEq>(list: &[T], item: &T) -> u8 {
    list.iter().position(|other| other == item).unwrap_or(0) as u8
}

/// Takes fields off the front of a message.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_at_checked(N)?;
        self.0 = rest;
        front.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(std::mem::take(&mut self.0).to_vec()).ok()
    }

    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }

    fn address(&mut self) -> Option<IpAddr> {
        let bytes: [u8; 16] = self.array()?;
        Some(IpAddr::from(bytes).to_canonical())
    }

    fn socket(&mut self) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.address()?, self.u16()?))
    }
}

fn address_bytes(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

fn socket_bytes(at: SocketAddr) -> Vec<u8> {
    [&address_bytes(at.ip())[..], &at.port().to_le_bytes()].concat()
}

fn message(kind: u8, id: Id, parts: &[&[u8]]) -> Vec<u8> {
    [&[kind][..], &id.to_le_bytes(), &parts.concat()].concat()
}

impl Request {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Connect { id, protocol, target, port, few } => {
                let (kind, host) = match target {
                    Target::Name(name) => (0, name.as_bytes().to_vec()),
                    Target::Address(address) => (1, address_bytes(*address).to_vec()),
                };
                let fixed = [place(&PROTOCOLS, protocol), u8::from(*few), kind];
                message(0, *id, &[&fixed, &port.to_le_bytes(), &host])
            }
            Self::Datagram { id, data } => message(1, *id, &[data]),
            Self::Close { id } => message(2, *id, &[]),
            Self::Resolve { id, name } => message(3, *id, &[name.as_bytes()]),
            Self::Policy { rules } => message(4, 0, &[rules.as_bytes()]),
            Self::Answer { door, to, data } => message(5, *door, &[&socket_bytes(*to), data]),
        }
    }

    /// `None` for a message that no stack of ours sends.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let (kind, id) = (fields.u8()?, fields.u32()?);
        Some(match kind {
            0 => {
                let protocol = *PROTOCOLS.get(usize::from(fields.u8()?))?;
                let few = fields.u8()? != 0;
                let (kind, port) = (fields.u8()?, fields.u16()?);
                let target = match kind {
                    0 => Target::Name(fields.text()?),
                    _ => Target::Address(fields.address()?),
                };
                Self::Connect { id, protocol, target, port, few }
            }
            1 => Self::Datagram { id, data: fields.rest() },
            2 => Self::Close { id },
            3 => Self::Resolve { id, name: fields.text()? },
            4 => Self::Policy { rules: fields.text()? },
            5 => Self::Answer { door: id, to: fields.socket()?, data: fields.rest() },
            _ => return None,
        })
    }
}

impl Reply {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Connected { id, peer: Peer { at, is_own } } => {
                message(0, *id, &[&socket_bytes(*at), &[u8::from(*is_own)]])
            }
            Self::Failed { id, why, text } => {
                message(1, *id, &[&[place(&FAILURES, why)], text.as_bytes()])
            }
            Self::Datagram { id, data } => message(2, *id, &[data]),
            Self::Resolved { id, addresses } => {
                let list: Vec<u8> = addresses.iter().copied().flat_map(address_bytes).collect();
                message(3, *id, &[&list])
            }
            Self::Called { door, from, data } => message(4, *door, &[&socket_bytes(*from), data]),
        }
    }

    /// `None` for a message that no dialer of ours sends.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let (kind, id) = (fields.u8()?, fields.u32()?);
        Some(match kind {
            0 => {
                let at = fields.socket()?;
                Self::Connected { id, peer: Peer { at, is_own: fields.u8()? != 0 } }
            }
            1 => {
                let why = *FAILURES.get(usize::from(fields.u8()?))?;
                Self::Failed { id, why, text: fields.text()? }
            }
            2 => Self::Datagram { id, data: fields.rest() },
            3 => {
                let mut addresses = Vec::new();
                while let Some(address) = fields.address() {
                    addresses.push(address);
                }
                Self::Resolved { id, addresses }
            }
            4 => Self::Called { door: id, from: fields.socket()?, data: fields.rest() },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_come_back_as_they_went() {
        let requests = [
            Request::Connect {
                id: 7,
                protocol: Protocol::Udp,
                target: Target::Name("example.org".into()),
                port: 53,
                few: true,
            },
            Request::Connect {
                id: u32::MAX,
                protocol: Protocol::Icmp,
                target: Target::Address("2001:db8::1".parse().unwrap()),
                port: 0,
                few: false,
            },
            Request::Datagram { id: 1, data: vec![1, 2, 3] },
            Request::Close { id: 2 },
            Request::Resolve { id: 3, name: "a.test".into() },
            Request::Policy { rules: "connect a:1\n".into() },
            Request::Answer { door: 2, to: "192.0.2.1:53".parse().unwrap(), data: vec![4] },
        ];
        for request in requests {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        let replies = [
            Reply::Connected {
                id: 1,
                peer: Peer { at: "192.0.2.1:80".parse().unwrap(), is_own: false },
            },
            Reply::Connected {
                id: 1,
                peer: Peer { at: "[2001:db8::1]:80".parse().unwrap(), is_own: true },
            },
            Reply::Failed { id: 2, why: Failure::Busy, text: "too many".into() },
            Reply::Datagram { id: 3, data: vec![] },
            Reply::Resolved { id: 4, addresses: vec!["::1".parse().unwrap()] },
            Reply::Called { door: 0, from: "[::1]:53".parse().unwrap(), data: vec![5, 6] },
        ];
        for reply in replies {
            assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        }
    }

    proptest! {
        #[test]
        fn no_message_panics(bytes: Vec<u8>) {
            let _ = (Request::decode(&bytes), Reply::decode(&bytes));
        }
    }
}
