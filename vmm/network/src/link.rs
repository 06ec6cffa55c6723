//! The addresses of the link between a guest and its stack. They exist nowhere
//! else: 198.18.0.0/15 is set aside for tests of networks (RFC 2544), and the
//! IPv6 prefix is a local one (RFC 4193) that spells the project's name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The guest's own addresses.
pub const GUEST_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
pub const GUEST_V6: Ipv6Addr = Ipv6Addr::new(0xfd65, 0x786f, 0x6365, 0x6c6c, 0, 0, 0, 2);
/// The stack's: it answers names there, and published ports are reached from there.
pub const STACK_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
pub const STACK_V6: Ipv6Addr = Ipv6Addr::new(0xfd65, 0x786f, 0x6365, 0x6c6c, 0, 0, 0, 1);
/// What the host itself is called, as docker calls it: its loopback, for whoever a rule grants just
/// this name.
pub const HOST_NAME: &str = "host.docker.internal";
/// The addresses that stand for it.
pub const HOST_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 254);
pub const HOST_V6: Ipv6Addr = Ipv6Addr::new(0xfd65, 0x786f, 0x6365, 0x6c6c, 0, 0, 0, 0xfe);
/// Bytes of the largest packet, headers of IP included: with the header of
/// Ethernet it fits 64 KiB.
pub const MTU: u16 = 65_520;

/// The first address that stands for a name, by family.
pub(crate) const NAMES_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 0);
pub(crate) const NAMES_V6: Ipv6Addr = Ipv6Addr::new(0xfd65, 0x786f, 0x6365, 0x6c6c, 0, 0, 1, 0);

/// Whether the address is the guest's.
pub fn is_guest(address: IpAddr) -> bool {
    address == IpAddr::V4(GUEST_V4) || address == IpAddr::V6(GUEST_V6)
}

/// Whether the address is the stack's own.
pub fn is_stack(address: IpAddr) -> bool {
    address == IpAddr::V4(STACK_V4) || address == IpAddr::V6(STACK_V6)
}
