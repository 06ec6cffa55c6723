//! Addresses that no general rule covers: they mean the host, its link, its
//! cloud's metadata, or nobody in particular.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use exocell_xgate::NamePattern;

/// Why an address is out of reach unless a rule names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// 127.0.0.0/8, ::1, and 0.0.0.0/8, by which Linux means the same.
    Loopback,
    /// 169.254.0.0/16, fe80::/10.
    LinkLocal,
    /// Where clouds answer questions about the machine.
    Metadata,
    /// 224.0.0.0/4, ff00::/8, 240.0.0.0/4 with the broadcast address.
    Multicast,
    /// Carries an IPv4 address for a translator: 64:ff9b::/96, 2002::/16, 2001::/32, ::/96.
    Translated,
}

impl Class {
    /// What a denial calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::LinkLocal => "link-local",
            Self::Metadata => "metadata",
            Self::Multicast => "multicast or reserved",
            Self::Translated => "translated",
        }
    }
}

/// Metadata services: Amazon's and everyone's, Amazon's by IPv6, Alibaba's,
/// Oracle's, Azure's.
const METADATA: [IpAddr; 5] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
];

const fn v4(a: u8, b: u8, prefix: u8) -> NamePattern {
    NamePattern::Net { base: IpAddr::V4(Ipv4Addr::new(a, b, 0, 0)), prefix }
}

const fn v6(a: u16, b: u16, last: u16, prefix: u8) -> NamePattern {
    NamePattern::Net { base: IpAddr::V6(Ipv6Addr::new(a, b, 0, 0, 0, 0, 0, last)), prefix }
}

/// The special blocks; the first that holds an address says what it is.
const BLOCKS: [(NamePattern, Class); 13] = [
    (v4(0, 0, 8), Class::Loopback),
    (v4(127, 0, 8), Class::Loopback),
    (v4(169, 254, 16), Class::LinkLocal),
    (v4(224, 0, 4), Class::Multicast),
    (v4(240, 0, 4), Class::Multicast),
    (v6(0, 0, 0, 128), Class::Loopback),
    (v6(0, 0, 1, 128), Class::Loopback),
    (v6(0, 0, 0, 96), Class::Translated),
    (v6(0x64, 0xff9b, 0, 96), Class::Translated),
    (v6(0x2001, 0, 0, 32), Class::Translated),
    (v6(0x2002, 0, 0, 16), Class::Translated),
    (v6(0xfe80, 0, 0, 10), Class::LinkLocal),
    (v6(0xff00, 0, 0, 8), Class::Multicast),
];

/// The one form of an address: an IPv4 address in IPv6 clothes is IPv4.
pub fn plain(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// The rule that covers `address` and nothing else.
pub fn exactly(address: IpAddr) -> NamePattern {
    NamePattern::Net { base: address, prefix: if address.is_ipv4() { 32 } else { 128 } }
}

/// What is special about `address`, which must be [`plain`].
pub fn class(address: IpAddr) -> Option<Class> {
    if METADATA.contains(&address) {
        return Some(Class::Metadata);
    }
    let one = exactly(address);
    BLOCKS.iter().find(|(block, _)| block.contains(&one)).map(|(_, class)| *class)
}

/// Whether `address` belongs to somebody's own network: RFC 1918, 100.64.0.0/10,
/// fc00::/7.
pub fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            address.is_private() || matches!(address.octets(), [100, 64..=127, ..])
        }
        IpAddr::V6(address) => address.segments()[0] & 0xfe00 == 0xfc00,
    }
}

/// Whether `rule` names the special `address` itself: it covers it and nothing
/// outside of what is special, so that 0.0.0.0/0 names nothing. What is one
/// address must be named as one.
pub fn names(rule: &NamePattern, address: IpAddr) -> bool {
    let one = exactly(address);
    match class(address) {
        Some(Class::Metadata) | None => *rule == one,
        Some(_) => rule.contains(&one) && BLOCKS.iter().any(|(block, _)| block.contains(rule)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<Class> {
        class(plain(text.parse().unwrap()))
    }

    #[test]
    fn special_addresses_are_known_in_every_disguise() {
        for (text, expected) in [
            ("127.0.0.1", Class::Loopback),
            ("127.255.0.9", Class::Loopback),
            ("0.0.0.0", Class::Loopback),
            ("::", Class::Loopback),
            ("::1", Class::Loopback),
            ("::ffff:127.0.0.1", Class::Loopback),
            ("169.254.169.254", Class::Metadata),
            ("::ffff:169.254.169.254", Class::Metadata),
            ("fd00:ec2::254", Class::Metadata),
            ("100.100.100.200", Class::Metadata),
            ("169.254.0.1", Class::LinkLocal),
            ("fe80::1", Class::LinkLocal),
            ("febf::1", Class::LinkLocal),
            ("224.0.0.251", Class::Multicast),
            ("255.255.255.255", Class::Multicast),
            ("ff02::1", Class::Multicast),
            ("64:ff9b::7f00:1", Class::Translated),
            ("2002:7f00:1::", Class::Translated),
            ("::7f00:1", Class::Translated),
        ] {
            assert_eq!(of(text), Some(expected), "{text}");
        }
        for text in ["10.0.0.1", "192.0.2.1", "2001:db8::1", "fd00:ec2::253", "1.1.1.1"] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn only_a_rule_within_the_special_range_names_its_addresses() {
        let named =
            |rule: &str, address: &str| names(&rule.parse().unwrap(), address.parse().unwrap());
        assert!(named("127.0.0.1", "127.0.0.1"));
        assert!(named("127.0.0.0/8", "127.0.0.1"));
        assert!(named("169.254.169.254", "169.254.169.254"));
        assert!(named("10.0.0.1", "10.0.0.1"));
        for (rule, address) in [
            ("0.0.0.0/0", "127.0.0.1"),
            ("0.0.0.0/1", "127.0.0.1"),
            ("169.254.0.0/16", "169.254.169.254"),
            ("::/0", "::1"),
            ("*", "127.0.0.1"),
            ("10.0.0.0/8", "10.0.0.1"),
        ] {
            assert!(!named(rule, address), "{rule} {address}");
        }
    }
}
