//! Addresses that no general rule covers: they mean the host, its link, its
//! cloud's metadata, or nobody in particular. The table is that of the two IANA
//! registries of special-purpose addresses (RFC 6890; as of 2025-10), with the
//! groups of RFC 5771 and RFC 4291 and what older standards set aside.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use exocell_xgate::NamePattern;

/// Why an address is out of reach unless a rule names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Loopback,
    LinkLocal,
    /// Where clouds answer questions about the machine.
    Metadata,
    Multicast,
    /// Carries an IPv4 address for a translator or a tunnel.
    Translated,
    /// For examples and measurements; nobody's.
    Example,
    /// Set aside for protocols and for the future.
    Reserved,
}

impl Class {
    /// What a denial calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::LinkLocal => "link-local",
            Self::Metadata => "metadata",
            Self::Multicast => "multicast",
            Self::Translated => "translated",
            Self::Example => "for documentation or benchmarks",
            Self::Reserved => "reserved",
        }
    }
}

/// What a row of the table says of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Special(Class),
    /// Somebody's own network: an exact name may lead there, `*` may not.
    Private,
    /// Reached like any other address.
    Global,
}

/// Where clouds answer their machines: who they are, and with whose rights they act.
static METADATA: [NamePattern; 12] = [
    v4([169, 254, 169, 254], 32), // Amazon's, and nearly everyone's
    v4([100, 100, 100, 200], 32), // Alibaba's
    v4([192, 0, 0, 192], 32),     // Oracle's
    v4([168, 63, 129, 16], 32),   // Azure's
    // Amazon's by IPv6: of machines, of pods (::23), for names and the time.
    v6([0xfd00, 0xec2, 0, 0], 0, 32),
    v6([0xfd20, 0xce, 0, 0], 0x254, 128),      // Google's
    v6_tail([0xfd00, 0xc1], [0xa9fe, 0xa9fe]), // Oracle's
    v6([0xfd00, 0x42, 0, 0], 0x42, 128),       // Scaleway's
    v6([0xfd00, 0xa9fe, 0xa9fe, 0], 1, 128),   // Akamai's
    v6_tail([0xfd00, 0x100], [0x100, 0x200]),  // Alibaba's
    // Amazon's for containers and for pods.
    v4([169, 254, 170, 2], 32),
    v4([169, 254, 170, 23], 32),
];

const fn v4(bytes: [u8; 4], prefix: u8) -> NamePattern {
    let [a, b, c, d] = bytes;
    NamePattern::Net { base: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix }
}

/// The first four groups and the last one; those between are zero.
const fn v6(front: [u16; 4], last: u16, prefix: u8) -> NamePattern {
    let [a, b, c, d] = front;
    NamePattern::Net { base: IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, last)), prefix }
}

/// One address: its first two groups and its last two; those between are zero.
const fn v6_tail([a, b]: [u16; 2], [g, h]: [u16; 2]) -> NamePattern {
    NamePattern::Net { base: IpAddr::V6(Ipv6Addr::new(a, b, 0, 0, 0, 0, g, h)), prefix: 128 }
}

const LOOPBACK: Use = Use::Special(Class::Loopback);
const LINK_LOCAL: Use = Use::Special(Class::LinkLocal);
const MULTICAST: Use = Use::Special(Class::Multicast);
const TRANSLATED: Use = Use::Special(Class::Translated);
const EXAMPLE: Use = Use::Special(Class::Example);
const RESERVED: Use = Use::Special(Class::Reserved);

/// NAT64's well-known prefix (RFC 6052): the last four bytes are an IPv4 address.
const NAT64: NamePattern = v6([0x64, 0xff9b, 0, 0], 0, 96);

/// The rows; the first that holds an address says what it is.
static BLOCKS: [(NamePattern, Use); 53] = [
    // IANA IPv4 Special-Purpose Address Registry.
    (v4([0, 0, 0, 0], 8), LOOPBACK), // "this network"; Linux takes 0.0.0.0 for itself
    (v4([10, 0, 0, 0], 8), Use::Private),
    (v4([100, 64, 0, 0], 10), Use::Private),
    (v4([127, 0, 0, 0], 8), LOOPBACK),
    (v4([169, 254, 0, 0], 16), LINK_LOCAL),
    (v4([172, 16, 0, 0], 12), Use::Private),
    (v4([192, 0, 0, 0], 29), RESERVED),
    (v4([192, 0, 0, 8], 32), RESERVED),
    (v4([192, 0, 0, 9], 32), Use::Global),
    (v4([192, 0, 0, 10], 32), Use::Global),
    (v4([192, 0, 0, 170], 32), RESERVED),
    (v4([192, 0, 0, 171], 32), RESERVED),
    (v4([192, 0, 0, 0], 24), RESERVED),
    (v4([192, 0, 2, 0], 24), EXAMPLE),
    (v4([192, 31, 196, 0], 24), Use::Global),
    (v4([192, 52, 193, 0], 24), Use::Global),
    (v4([192, 88, 99, 0], 24), RESERVED),
    (v4([192, 168, 0, 0], 16), Use::Private),
    (v4([192, 175, 48, 0], 24), Use::Global),
    (v4([198, 18, 0, 0], 15), EXAMPLE),
    (v4([198, 51, 100, 0], 24), EXAMPLE),
    (v4([203, 0, 113, 0], 24), EXAMPLE),
    (v4([255, 255, 255, 255], 32), RESERVED),
    (v4([240, 0, 0, 0], 4), RESERVED),
    // IPv4 Multicast Address Space Registry.
    (v4([224, 0, 0, 0], 4), MULTICAST),
    // IANA IPv6 Special-Purpose Address Registry.
    (v6([0; 4], 1, 128), LOOPBACK),
    (v6([0; 4], 0, 128), LOOPBACK), // unspecified; Linux takes it for itself
    (MAPPED, TRANSLATED),
    (NAT64, TRANSLATED),
    (v6([0x64, 0xff9b, 1, 0], 0, 48), TRANSLATED),
    (v6([0x100, 0, 0, 0], 0, 64), RESERVED),
    (v6([0x100, 0, 0, 1], 0, 64), RESERVED),
    (v6([0x2001, 1, 0, 0], 1, 128), Use::Global),
    (v6([0x2001, 1, 0, 0], 2, 128), Use::Global),
    (v6([0x2001, 1, 0, 0], 3, 128), Use::Global),
    (v6([0x2001, 0, 0, 0], 0, 32), TRANSLATED), // Teredo
    (v6([0x2001, 2, 0, 0], 0, 48), EXAMPLE),
    (v6([0x2001, 3, 0, 0], 0, 32), Use::Global),
    (v6([0x2001, 4, 0x112, 0], 0, 48), Use::Global),
    (v6([0x2001, 0x10, 0, 0], 0, 28), RESERVED),
    (v6([0x2001, 0x20, 0, 0], 0, 28), Use::Global),
    (v6([0x2001, 0x30, 0, 0], 0, 28), Use::Global),
    (v6([0x2001, 0, 0, 0], 0, 23), RESERVED),
    (v6([0x2001, 0xdb8, 0, 0], 0, 32), EXAMPLE),
    (v6([0x2002, 0, 0, 0], 0, 16), TRANSLATED), // 6to4
    (v6([0x2620, 0x4f, 0x8000, 0], 0, 48), Use::Global),
    (v6([0x3fff, 0, 0, 0], 0, 20), EXAMPLE),
    (v6([0x5f00, 0, 0, 0], 0, 16), RESERVED), // identifiers of segments
    (v6([0xfc00, 0, 0, 0], 0, 7), Use::Private),
    (v6([0xfe80, 0, 0, 0], 0, 10), LINK_LOCAL),
    // RFC 4291: addresses compatible with IPv4, of a site, of groups.
    (v6([0; 4], 0, 96), TRANSLATED),
    (v6([0xfec0, 0, 0, 0], 0, 10), LINK_LOCAL),
    (v6([0xff00, 0, 0, 0], 0, 8), MULTICAST),
];

const MAPPED: NamePattern =
    NamePattern::Net { base: IpAddr::V6(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0)), prefix: 96 };

/// The one form of an address: an IPv4 address in IPv6 clothes is IPv4.
pub fn plain(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// Where an address that a name has really leads, which is what is judged: of
/// NAT64's well-known prefix, by which hosts without IPv4 reach such servers,
/// the IPv4 address in it.
pub fn reached(address: IpAddr) -> IpAddr {
    match plain(address) {
        IpAddr::V6(v6) if NAT64.contains(&exactly(v6.into())) => {
            Ipv4Addr::from_bits(v6.to_bits() as u32).into()
        }
        plain => plain,
    }
}

/// The rule that covers `address` and nothing else.
pub fn exactly(address: IpAddr) -> NamePattern {
    NamePattern::Net { base: address, prefix: if address.is_ipv4() { 32 } else { 128 } }
}

fn use_of(address: IpAddr) -> Use {
    let one = exactly(address);
    if METADATA.iter().any(|block| block.contains(&one)) {
        return Use::Special(Class::Metadata);
    }
    let row = BLOCKS.iter().find(|(block, _)| block.contains(&one));
    row.map_or(Use::Global, |(_, used)| *used)
}

/// What is special about `address`, which must be [`plain`].
pub fn class(address: IpAddr) -> Option<Class> {
    match use_of(address) {
        Use::Special(class) => Some(class),
        Use::Private | Use::Global => None,
    }
}

/// Whether `address` belongs to somebody's own network: RFC 1918, 100.64.0.0/10,
/// fc00::/7.
pub fn is_private(address: IpAddr) -> bool {
    use_of(address) == Use::Private
}

/// Whether `rule` names the special `address` itself: it covers it and nothing
/// outside of what is special, so that 0.0.0.0/0 names nothing. What is one
/// address must be named as one.
pub fn names(rule: &NamePattern, address: IpAddr) -> bool {
    let one = exactly(address);
    match class(address) {
        Some(Class::Metadata) | None => *rule == one,
        Some(_) => {
            let special = |(block, used): &(NamePattern, Use)| {
                matches!(used, Use::Special(_)) && block.contains(rule)
            };
            rule.contains(&one) && BLOCKS.iter().any(special)
        }
    }
}

#[cfg(test)]
mod tests;
