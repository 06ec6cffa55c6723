use super::*;

const GLOBAL: &str = "global";
const PRIVATE: &str = "private";

/// The registries' rows as they print them (column "Address Block"), what each
/// is here, and the addresses beside it where those are ordinary ones.
const ROWS: &[(&str, &str, &[&str])] = &[
    // https://www.iana.org/assignments/iana-ipv4-special-registry
    ("0.0.0.0/8", "loopback", &["1.0.0.0"]),
    ("0.0.0.0/32", "loopback", &[]),
    ("10.0.0.0/8", PRIVATE, &["9.255.255.255", "11.0.0.0"]),
    ("100.64.0.0/10", PRIVATE, &["100.63.255.255", "100.128.0.0"]),
    ("127.0.0.0/8", "loopback", &["126.255.255.255", "128.0.0.0"]),
    ("169.254.0.0/16", "link-local", &["169.253.255.255", "169.255.0.0"]),
    ("172.16.0.0/12", PRIVATE, &["172.15.255.255", "172.32.0.0"]),
    ("192.0.0.0/24", "reserved", &["191.255.255.255", "192.0.1.0"]),
    ("192.0.0.0/29", "reserved", &[]),
    ("192.0.0.8/32", "reserved", &[]),
    ("192.0.0.9/32", GLOBAL, &[]),
    ("192.0.0.10/32", GLOBAL, &[]),
    ("192.0.0.170/32", "reserved", &[]),
    ("192.0.0.171/32", "reserved", &[]),
    ("192.0.2.0/24", "for documentation or benchmarks", &["192.0.1.255", "192.0.3.0"]),
    ("192.31.196.0/24", GLOBAL, &[]),
    ("192.52.193.0/24", GLOBAL, &[]),
    ("192.88.99.0/24", "reserved", &["192.88.98.255", "192.88.100.0"]),
    ("192.168.0.0/16", PRIVATE, &["192.167.255.255", "192.169.0.0"]),
    ("192.175.48.0/24", GLOBAL, &[]),
    ("198.18.0.0/15", "for documentation or benchmarks", &["198.17.255.255", "198.20.0.0"]),
    ("198.51.100.0/24", "for documentation or benchmarks", &["198.51.99.255", "198.51.101.0"]),
    ("203.0.113.0/24", "for documentation or benchmarks", &["203.0.112.255", "203.0.114.0"]),
    ("240.0.0.0/4", "reserved", &[]),
    ("255.255.255.255/32", "reserved", &[]),
    // https://www.iana.org/assignments/multicast-addresses
    ("224.0.0.0/4", "multicast", &["223.255.255.255"]),
    // https://www.iana.org/assignments/iana-ipv6-special-registry
    ("::1/128", "loopback", &[]),
    ("::/128", "loopback", &[]),
    ("::ffff:0:0/96", "translated", &["::fffe:ffff:ffff", "::1:0:0:0"]),
    ("64:ff9b::/96", "translated", &["64:ff9a:ffff::", "64:ff9b::1:0:0"]),
    ("64:ff9b:1::/48", "translated", &["64:ff9b:0:ffff::", "64:ff9b:2::"]),
    ("100::/64", "reserved", &["ff:ffff::"]),
    ("100:0:0:1::/64", "reserved", &["100:0:0:2::"]),
    ("2001::/23", "reserved", &["2000:ffff::", "2001:200::"]),
    ("2001::/32", "translated", &[]),
    ("2001:1::1/128", GLOBAL, &[]),
    ("2001:1::2/128", GLOBAL, &[]),
    ("2001:1::3/128", GLOBAL, &[]),
    ("2001:2::/48", "for documentation or benchmarks", &[]),
    ("2001:3::/32", GLOBAL, &[]),
    ("2001:4:112::/48", GLOBAL, &[]),
    ("2001:10::/28", "reserved", &[]),
    ("2001:20::/28", GLOBAL, &[]),
    ("2001:30::/28", GLOBAL, &[]),
    ("2001:db8::/32", "for documentation or benchmarks", &["2001:db7:ffff::", "2001:db9::"]),
    ("2002::/16", "translated", &["2001:ffff::", "2003::"]),
    ("2620:4f:8000::/48", GLOBAL, &[]),
    ("3fff::/20", "for documentation or benchmarks", &["3ffe:ffff::", "3fff:1000::"]),
    ("5f00::/16", "reserved", &["5eff:ffff::", "5f01::"]),
    ("fc00::/7", PRIVATE, &["fbff:ffff::", "fe00::"]),
    ("fe80::/10", "link-local", &["fe7f:ffff::"]),
    // RFC 4291, 2.5.5.1, 2.5.7 and 2.7.
    ("::/96", "translated", &["::1:0:0"]),
    ("fec0::/10", "link-local", &[]),
    ("ff00::/8", "multicast", &[]),
];

/// What an address is, without taking an IPv4 address out of its IPv6 clothes.
fn said(address: IpAddr) -> &'static str {
    match class(address) {
        Some(class) => class.name(),
        None if is_private(address) => PRIVATE,
        None => GLOBAL,
    }
}

/// The block's first and last address; an address that its rows contain.
fn ends(block: &NamePattern) -> [IpAddr; 2] {
    let NamePattern::Net { base, prefix } = block else { panic!("{block} is not a network") };
    let last = match base {
        IpAddr::V4(v4) => {
            let hosts = u32::MAX.checked_shr((*prefix).into()).unwrap_or(0);
            Ipv4Addr::from_bits(v4.to_bits() | hosts).into()
        }
        IpAddr::V6(v6) => {
            let hosts = u128::MAX.checked_shr((*prefix).into()).unwrap_or(0);
            Ipv6Addr::from_bits(v6.to_bits() | hosts).into()
        }
    };
    [*base, last]
}

#[test]
fn every_row_of_the_registries_is_known() {
    // Addresses at the ends of a row that a narrower one says something else of.
    let narrower = ["0.0.0.0", "192.0.0.0", "255.255.255.255", "2001::", "::", "::1"];
    for (text, expected, beside) in ROWS {
        let block: NamePattern = text.parse().unwrap();
        for address in ends(&block) {
            if narrower.contains(&address.to_string().as_str())
                && !text.ends_with("32")
                && !text.ends_with("128")
            {
                assert!(class(address).is_some(), "{text}: {address}");
            } else {
                assert_eq!(said(address), *expected, "{text}: {address}");
            }
        }
        for address in *beside {
            assert_eq!(said(address.parse().unwrap()), GLOBAL, "beside {text}: {address}");
        }
    }
    for (block, _) in &BLOCKS {
        let listed = ROWS.iter().any(|(text, ..)| text.parse() == Ok(block.clone()));
        assert!(listed, "{block} has no row in this test");
    }
}

#[test]
fn special_addresses_are_known_in_every_disguise() {
    let of = |text: &str| class(plain(text.parse().unwrap()));
    for (text, expected) in [
        ("::ffff:127.0.0.1", Class::Loopback),
        ("::ffff:169.254.169.254", Class::Metadata),
        ("169.254.169.254", Class::Metadata),
        ("169.254.170.2", Class::Metadata),
        ("169.254.170.23", Class::Metadata),
        ("fd00:ec2::254", Class::Metadata),
        ("fd00:ec2::23", Class::Metadata),
        ("fd00:ec2::253", Class::Metadata),
        ("fd00:ec2::", Class::Metadata),
        ("fd00:ec2:ffff:ffff:ffff:ffff:ffff:ffff", Class::Metadata),
        ("fd20:ce::254", Class::Metadata),
        ("fd00:c1::a9fe:a9fe", Class::Metadata),
        ("fd00:42::42", Class::Metadata),
        ("fd00:a9fe:a9fe::1", Class::Metadata),
        ("fd00:100::100:200", Class::Metadata),
        ("100.100.100.200", Class::Metadata),
        ("192.0.0.192", Class::Metadata),
        ("168.63.129.16", Class::Metadata),
        ("64:ff9b::7f00:1", Class::Translated),
        ("64:ff9b:1::7f00:1", Class::Translated),
        ("2002:7f00:1::", Class::Translated),
        ("2001:0:7f00:1::", Class::Translated),
        ("::7f00:1", Class::Translated),
    ] {
        assert_eq!(of(text), Some(expected), "{text}");
    }
    for text in
        ["10.0.0.1", "fd00:ec1::253", "fd00:ec3::", "fd20:ce::255", "1.1.1.1", "2606:4700::1111"]
    {
        assert_eq!(of(text), None, "{text}");
    }
    // An address with a scope is no address of a name at all.
    assert!("fe80::1%eth0".parse::<IpAddr>().is_err());
}

#[test]
fn what_a_translator_leads_to_is_what_is_judged() {
    let class_of = |text: &str| class(reached(text.parse().unwrap()));
    assert_eq!(class_of("64:ff9b::7f00:1"), Some(Class::Loopback));
    assert_eq!(class_of("64:ff9b::a9fe:a9fe"), Some(Class::Metadata));
    assert_eq!(class_of("64:ff9b::101:101"), None);
    assert!(is_private(reached("64:ff9b::a00:1".parse().unwrap())));
    // Where these lead depends on the network.
    assert_eq!(class_of("64:ff9b:1::101:101"), Some(Class::Translated));
    assert_eq!(class_of("2002:101:101::1"), Some(Class::Translated));
}

#[test]
fn only_a_rule_within_the_special_range_names_its_addresses() {
    let named = |rule: &str, address: &str| names(&rule.parse().unwrap(), address.parse().unwrap());
    for (rule, address) in [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.0/8", "127.0.0.1"),
        ("169.254.169.254", "169.254.169.254"),
        ("fd00:ec2::254", "fd00:ec2::254"),
        ("fd20:ce::254", "fd20:ce::254"),
        ("10.0.0.1", "10.0.0.1"),
        ("203.0.113.0/25", "203.0.113.80"),
        ("2001::/23", "2001::1"),
    ] {
        assert!(named(rule, address), "{rule} {address}");
    }
    for (rule, address) in [
        ("0.0.0.0/0", "127.0.0.1"),
        ("0.0.0.0/1", "127.0.0.1"),
        ("169.254.0.0/16", "169.254.169.254"),
        ("::/0", "::1"),
        ("::/0", "fd20:ce::254"),
        ("fd00::/8", "fd00:ec2::23"),
        ("fd00:ec2::/32", "fd00:ec2::23"),
        ("*", "127.0.0.1"),
        ("10.0.0.0/8", "10.0.0.1"),
        ("2001::/16", "2001:db8::1"),
    ] {
        assert!(!named(rule, address), "{rule} {address}");
    }
}
