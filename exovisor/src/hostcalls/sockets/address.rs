//! How addresses lie in a module's memory (WasmEdge's sockets, versions 1 and 2).
//!
//! ```text
//! address:  where u32, bytes u32 -> 4 or 16 octets, or from 18 bytes on: family u16, octets
//! addrinfo: flags u16, family u8, type u8, protocol u8, -, length u32, address u32 -> sockaddr,
//!           name u32, length u32, next u32
//! sockaddr: family u8, -, bytes u32, where u32 -> port (big-endian), address, as sockaddr(3type)
//! ```

use crate::hostcalls::guest::{bytes, copy_out, get, put};
use exocell_xgate::Protocol;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use wasmtime_wasi::p1::types::Errno;
use wiggle::GuestMemory;

pub(super) const V4: u8 = 1;
pub(super) const V6: u8 = 2;
const DATAGRAM: u8 = 1;
const STREAM: u8 = 2;
const TCP: u8 = 1;
const UDP: u8 = 2;
/// From so many bytes on an address says its family itself.
const TAGGED_BYTES_MIN: u32 = 18;

/// The protocol of a socket's type; any is a stream.
pub(super) fn protocol(kind: u8) -> Result<Protocol, Errno> {
    match kind {
        0 | STREAM => Ok(Protocol::Tcp),
        DATAGRAM => Ok(Protocol::Udp),
        _ => Err(Errno::Prototype),
    }
}

pub(super) fn kind(protocol: Protocol) -> u8 {
    if protocol == Protocol::Udp { DATAGRAM } else { STREAM }
}

/// Whether a family is that of IPv6; any is IPv4.
pub(super) fn is_v6(family: u8) -> Result<bool, Errno> {
    match family {
        0 | V4 => Ok(false),
        V6 => Ok(true),
        _ => Err(Errno::Afnosupport),
    }
}

pub(super) fn family(address: IpAddr) -> u8 {
    if address.is_ipv6() { V6 } else { V4 }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn place(at: u32, offset: u32) -> Result<u32, Errno> {
    at.checked_add(offset).ok_or(Errno::Fault)
}

/// Reads the address that is described at `at`.
pub(super) fn read(memory: &GuestMemory<'_>, at: u32) -> Result<IpAddr, Errno> {
    let (start, len): (u32, u32) = (get(memory, at)?, get(memory, place(at, 4)?)?);
    let all = bytes(memory, start, len.min(TAGGED_BYTES_MIN))?;
    let tagged = all.split_first_chunk::<2>().filter(|_| len >= TAGGED_BYTES_MIN);
    let (family, all) = match (tagged, len) {
        (Some((family, rest)), _) => (u16::from_le_bytes(*family), rest),
        (None, 4) => (V4.into(), &all[..]),
        (None, 16) => (V6.into(), &all[..]),
        _ => return Err(Errno::Inval),
    };
    match (u8::try_from(family), all.first_chunk::<4>(), all.first_chunk::<16>()) {
        (Ok(V4), Some(octets), _) => Ok(Ipv4Addr::from(*octets).into()),
        (Ok(V6), _, Some(octets)) => Ok(Ipv6Addr::from(*octets).into()),
        _ => Err(Errno::Afnosupport),
    }
}

/// Writes an address where one is described at `at`.
pub(super) fn write(memory: &mut GuestMemory<'_>, at: u32, address: IpAddr) -> Result<(), Errno> {
    let (start, len): (u32, u32) = (get(memory, at)?, get(memory, place(at, 4)?)?);
    let octets = octets(address);
    let all = match len {
        TAGGED_BYTES_MIN.. => [&[family(address), 0][..], &octets].concat(),
        _ if (len as usize) < octets.len() => return Err(Errno::Inval),
        _ => octets,
    };
    copy_out(memory, start, &all)
}

/// What a module wants to know of a name.
pub(super) struct Hint {
    /// `None`: of both families.
    pub is_v6: Option<bool>,
    pub protocol: Protocol,
}

impl Hint {
    pub fn read(memory: &GuestMemory<'_>, at: u32) -> Result<Self, Errno> {
        let [family, kind, protocol]: [u8; 3] =
            bytes(memory, place(at, 2)?, 3)?.try_into().map_err(|_| Errno::Fault)?;
        let protocol = match (kind, protocol) {
            (DATAGRAM, _) | (0, UDP) => Protocol::Udp,
            _ => Protocol::Tcp,
        };
        let is_v6 = if family == 0 { None } else { Some(is_v6(family)?) };
        Ok(Self { is_v6, protocol })
    }
}

/// Fills the list of results, whose first the number at `first` leads to; how many there are.
pub(super) fn write_list(
    memory: &mut GuestMemory<'_>,
    first: u32,
    found: &[SocketAddr],
    protocol: Protocol,
) -> Result<u32, Errno> {
    let mut at: u32 = get(memory, first)?;
    for address in found {
        let (family, number) =
            (family(address.ip()), if protocol == Protocol::Udp { UDP } else { TCP });
        let port = address.port().to_be_bytes();
        // As long as the rest of sockaddr_in(7) or sockaddr_in6(7) is.
        let (len, data) = match address.ip() {
            IpAddr::V4(ip) => (16u32, [&port[..], &ip.octets(), &[0; 8]].concat()),
            IpAddr::V6(ip) => (28, [&port[..], &[0; 4], &ip.octets(), &[0; 4]].concat()),
        };
        copy_out(memory, at, &[0, 0, family, kind(protocol), number])?;
        put(memory, place(at, 8)?.into(), len)?;
        let name: u32 = get(memory, place(at, 12)?)?;
        put(memory, place(at, 20)?.into(), 0u32)?;
        copy_out(memory, name, &[family])?;
        put(memory, place(name, 4)?.into(), data.len() as u32)?;
        let start: u32 = get(memory, place(name, 8)?)?;
        copy_out(memory, start, &data)?;
        at = get(memory, place(at, 24)?)?;
    }
    Ok(found.len() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Memory with an address described at 0, whose octets lie at 16.
    fn described(len: u32, octets: &[u8]) -> Vec<u8> {
        let mut memory = vec![0; 256];
        memory[..8].copy_from_slice(&[16u32.to_le_bytes(), len.to_le_bytes()].concat());
        memory[16..16 + octets.len()].copy_from_slice(octets);
        memory
    }

    fn read_at_0(memory: &mut [u8]) -> Result<IpAddr, Errno> {
        read(&GuestMemory::Unshared(memory), 0)
    }

    #[test]
    fn addresses_are_read_in_both_versions() {
        let v6: Ipv6Addr = "2001:db8::7".parse().unwrap();
        let tagged = |family: u8, octets: &[u8]| [&[family, 0][..], octets].concat();
        for (len, octets, wanted) in [
            (4, vec![192, 0, 2, 7], "192.0.2.7"),
            (16, v6.octets().to_vec(), "2001:db8::7"),
            (128, tagged(1, &[192, 0, 2, 7]), "192.0.2.7"),
            (128, tagged(2, &v6.octets()), "2001:db8::7"),
        ] {
            assert_eq!(read_at_0(&mut described(len, &octets)), Ok(wanted.parse().unwrap()));
        }
        for (len, octets) in [(0, vec![]), (5, vec![1; 5]), (128, tagged(3, &[1; 16]))] {
            assert!(read_at_0(&mut described(len, &octets)).is_err(), "{len}");
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        for text in ["192.0.2.7", "2001:db8::7"] {
            let address: IpAddr = text.parse().unwrap();
            for len in [16, 128] {
                if len == 16 && address.is_ipv4() {
                    // Of 16 octets only the first four are written, and nothing says so.
                    continue;
                }
                let mut memory = described(len, &[]);
                write(&mut GuestMemory::Unshared(&mut memory), 0, address).unwrap();
                assert_eq!(read_at_0(&mut memory), Ok(address));
            }
        }
        let v6 = "2001:db8::7".parse().unwrap();
        let mut small = described(4, &[]);
        assert_eq!(write(&mut GuestMemory::Unshared(&mut small), 0, v6), Err(Errno::Inval));
    }

    proptest! {
        #[test]
        fn no_memory_makes_it_panic(mut memory: Vec<u8>, at: u32, family in 0u8..4) {
            let found = ["192.0.2.7:80".parse().unwrap(), "[::1]:80".parse().unwrap()];
            for at in [at, at % 64] {
                let _ = read(&GuestMemory::Unshared(&mut memory), at);
                let _ = Hint::read(&GuestMemory::Unshared(&mut memory), at);
                let mut memory = GuestMemory::Unshared(&mut memory);
                let _ = write(&mut memory, at, Ipv4Addr::from([1, 2, 3, family]).into());
                let _ = write_list(&mut memory, at, &found, Protocol::Tcp);
            }
        }
    }
}
