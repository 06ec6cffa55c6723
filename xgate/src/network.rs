//! Who may be talked to: name patterns, address ranges, protocols, port ranges.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Inclusive range of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// Lowest port.
    pub first: u16,
    /// Highest port.
    pub last: u16,
}

impl PortRange {
    /// Every port.
    pub const ALL: Self = Self { first: 1, last: u16::MAX };

    /// Whether every port of `other` is in this range.
    #[must_use]
    pub fn contains(&self, other: &Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    /// Whether `port` is in this range.
    #[must_use]
    pub fn permits(&self, port: u16) -> bool {
        self.first <= port && port <= self.last
    }
}

impl FromStr for PortRange {
    type Err = String;

    /// Reads `443` or `8000-8010`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("`{text}` is not a port or a range of ports, like \"443\" or \"8000-8010\"");
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let port = |digits: &str| match digits.bytes().all(|b| b.is_ascii_digit()) {
            true => digits.parse::<u16>().map_err(|_| wrong()),
            false => Err(wrong()),
        };
        let range = Self { first: port(first)?, last: port(last)? };
        if range.first == 0 || range.first > range.last { Err(wrong()) } else { Ok(range) }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

/// The name of a network between cells, as its operator made it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NetworkName(String);

impl NetworkName {
    /// The longest name, in bytes: it is a directory's.
    pub const BYTES_MAX: usize = 128;

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for NetworkName {
    type Err = String;

    /// Reads letters, digits and `_.-`, a letter or a digit first; blanks may be between them.
    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.- ".contains(c);
        let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        match begins
            && !text.ends_with(' ')
            && text.len() <= Self::BYTES_MAX
            && text.chars().all(plain)
        {
            true => Ok(Self(text.to_owned())),
            false => Err(format!(
                "`{text}` is not the name of a network; use letters, digits, _ . - and blanks \
                 between them, start with a letter or digit, and use at most {} characters",
                Self::BYTES_MAX
            )),
        }
    }
}

impl fmt::Display for NetworkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A host: a name, all names below a domain, any name, or a range of addresses.
///
/// A name never covers an address, nor the other way round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamePattern {
    /// `*`: any name.
    Any,
    /// `*.example.org`: every name below it, not itself. Kept in lower case.
    Below(String),
    /// Exactly this name. Kept in lower case.
    Name(String),
    /// Addresses that share the first `prefix` bits with `base`.
    Net {
        /// An address of the network, its host bits zero.
        base: IpAddr,
        /// Number of leading bits that count.
        prefix: u8,
    },
}

impl NamePattern {
    /// Whether everything `other` covers is covered by this pattern.
    #[must_use]
    pub fn contains(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Any, Self::Any | Self::Below(_) | Self::Name(_)) => true,
            (Self::Below(own), Self::Below(other)) => own == other || is_below(other, own),
            (Self::Below(own), Self::Name(name)) => is_below(name, own),
            (Self::Name(own), Self::Name(name)) => own == name,
            (Self::Net { base, prefix }, Self::Net { base: other, prefix: longer }) => {
                longer >= prefix && in_net(*base, *prefix, *other)
            }
            _ => false,
        }
    }

    /// Whether this host, a name or an address as text, is covered.
    #[must_use]
    pub fn permits(&self, host: &str) -> bool {
        exact(host).is_ok_and(|host| self.contains(&host))
    }
}

impl FromStr for NamePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self::Any);
        }
        if let Some(domain) = text.strip_prefix("*.") {
            return Ok(Self::Below(name(domain)?));
        }
        match text.split_once('/') {
            Some((base, prefix)) => net(text, base, prefix),
            None => exact(text),
        }
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Below(domain) => write!(f, "*.{domain}"),
            Self::Name(name) => f.write_str(name),
            Self::Net { base, prefix } if *prefix == width(*base) => write!(f, "{base}"),
            Self::Net { base, prefix } => write!(f, "{base}/{prefix}"),
        }
    }
}

/// Reads one host without wildcards.
fn exact(text: &str) -> Result<NamePattern, String> {
    match text.parse::<IpAddr>() {
        Ok(base) => Ok(NamePattern::Net { base, prefix: width(base) }),
        Err(_) => name(text).map(NamePattern::Name),
    }
}

/// Checks a DNS name (RFC 1123: labels of letters, digits and hyphens, 253 octets).
fn name(text: &str) -> Result<String, String> {
    let text = text.strip_suffix('.').unwrap_or(text);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    // A name whose last label is all digits could pass for an address (WHATWG URL, 3.5).
    let like_address =
        text.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
    if text.len() > 253 || like_address || !text.split('.').all(label) {
        return Err(format!(
            "`{text}` is not a host name, an address, or a network like \"10.0.0.0/8\""
        ));
    }
    Ok(text.to_ascii_lowercase())
}

fn net(text: &str, base: &str, prefix: &str) -> Result<NamePattern, String> {
    let wrong =
        || format!("`{text}` is not a network; write an address and a prefix, like \"10.0.0.0/8\"");
    let base: IpAddr = base.parse().map_err(|_| wrong())?;
    let prefix: u8 = prefix.parse().map_err(|_| wrong())?;
    if prefix > width(base) {
        return Err(wrong());
    }
    if bits(base) & !mask(prefix, width(base)) != 0 {
        return Err(format!(
            "`{text}` has bits set after its prefix; clear them or lengthen the prefix"
        ));
    }
    Ok(NamePattern::Net { base, prefix })
}

fn is_below(name: &str, domain: &str) -> bool {
    name.strip_suffix(domain).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
}

fn in_net(base: IpAddr, prefix: u8, other: IpAddr) -> bool {
    let mask = mask(prefix, width(base));
    width(base) == width(other) && bits(base) & mask == bits(other) & mask
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn mask(prefix: u8, width: u8) -> u128 {
    let all = u128::MAX >> (128 - u32::from(width));
    all & !all.checked_shr(u32::from(prefix)).unwrap_or(0)
}

/// How a peer is talked to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// Streams; what is meant where nothing is said.
    #[default]
    Tcp,
    /// Datagrams, QUIC among them.
    Udp,
    /// Echo requests and their answers; it has no ports.
    Icmp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Icmp => "icmp",
        })
    }
}

/// A host, a protocol and the ports: `HOST:PORTS`, `HOST:PORTS/raw`, `HOST:PORTS/udp` or
/// `HOST/icmp`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Which hosts.
    pub host: NamePattern,
    /// Which ports of them; all for [`Protocol::Icmp`], which has none.
    pub ports: PortRange,
    /// By which protocol.
    pub protocol: Protocol,
    /// Whether a stream to a name may say anything. Otherwise it must be HTTP/1 or TLS that
    /// asks for that name. Addresses, datagrams and echoes have no name that could be checked.
    pub is_raw: bool,
}

impl Endpoint {
    /// Whether everything `other` covers is covered by this endpoint. A raw rule covers the
    /// same rule that is not raw.
    #[must_use]
    pub fn contains(&self, other: &Self) -> bool {
        self.covers_peers_of(other) && (self.is_raw || !other.is_raw)
    }

    /// Whether `other` goes when this endpoint is denied: it lies within it. `HOST:PORTS` takes
    /// raw rules away too, `HOST:PORTS/raw` takes only those.
    #[must_use]
    pub fn takes_away(&self, other: &Self) -> bool {
        self.covers_peers_of(other) && (other.is_raw || !self.is_raw)
    }

    fn covers_peers_of(&self, other: &Self) -> bool {
        self.protocol == other.protocol
            && self.host.contains(&other.host)
            && self.ports.contains(&other.ports)
    }

    /// The endpoint, unless it says `/raw` of addresses, where nothing is ever checked.
    fn checked(self) -> Result<Self, String> {
        match (&self.host, self.is_raw) {
            (NamePattern::Net { .. }, true) => Err(format!(
                "`{self}` is an address, to which any protocol may be spoken; leave `/raw` out"
            )),
            _ => Ok(self),
        }
    }
}

impl FromStr for Endpoint {
    type Err = String;

    /// Reads `example.org:443`, `10.0.0.0/8:80-90`, `[::1]:80`, `example.org:22/raw`,
    /// `example.org:53/udp` or `example.org/icmp`.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(host) = text.strip_suffix("/icmp") {
            let host =
                host.strip_prefix('[').map_or(host.to_owned(), |rest| rest.replacen(']', "", 1));
            return Ok(Self {
                host: host.parse()?,
                ports: PortRange::ALL,
                protocol: Protocol::Icmp,
                is_raw: false,
            });
        }
        let (peer, protocol, is_raw) = match text.rsplit_once('/') {
            Some((peer, "udp")) => (peer, Protocol::Udp, false),
            Some((peer, "raw")) => (peer, Protocol::Tcp, true),
            Some((peer, "tcp")) => (peer, Protocol::Tcp, false),
            _ => (text, Protocol::Tcp, false),
        };
        let wrong =
            || format!("`{text}` names no ports; write HOST:PORTS, like \"example.org:443\"");
        let (host, ports) = peer.rsplit_once(':').ok_or_else(wrong)?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.replacen(']', "", 1),
            None if host.contains(':') => return Err(wrong()),
            None => host.to_owned(),
        };
        Self { host: host.parse()?, ports: ports.parse()?, protocol, is_raw }.checked()
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            NamePattern::Net { base, .. } if base.is_ipv6() => write!(f, "[{}]", self.host)?,
            host => write!(f, "{host}")?,
        }
        match self.protocol {
            Protocol::Tcp if self.is_raw => write!(f, ":{}/raw", self.ports),
            Protocol::Tcp => write!(f, ":{}", self.ports),
            Protocol::Udp => write!(f, ":{}/udp", self.ports),
            Protocol::Icmp => f.write_str("/icmp"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_of_networks_are_those_of_directories() {
        for text in ["a", "web_default", "0.x-y", "a b"] {
            assert_eq!(text.parse::<NetworkName>().unwrap().to_string(), text);
        }
        let long = "a".repeat(NetworkName::BYTES_MAX + 1);
        for text in ["", ".", "..", "-a", "a/b", " a", "a ", "\u{e9}", long.as_str()] {
            assert!(text.parse::<NetworkName>().is_err(), "{text}");
        }
    }

    fn pattern(text: &str) -> NamePattern {
        text.parse().expect(text)
    }

    #[test]
    fn patterns_cover_what_they_say() {
        for (own, host) in [
            ("*", "example.org"),
            ("*.example.org", "a.b.Example.org"),
            ("Example.org", "example.ORG."),
            ("10.0.0.0/8", "10.1.2.3"),
            ("0.0.0.0/0", "192.0.2.1"),
            ("::1", "::1"),
            ("2001:db8::/32", "2001:db8::5"),
        ] {
            assert!(pattern(own).permits(host), "{own} {host}");
        }
    }

    #[test]
    fn patterns_cover_nothing_else() {
        for (own, host) in [
            ("*", "10.1.2.3"),
            ("*.example.org", "example.org"),
            ("*.example.org", "badexample.org"),
            ("example.org", "a.example.org"),
            ("10.0.0.0/8", "11.0.0.1"),
            ("0.0.0.0/0", "::1"),
            ("0.0.0.0/0", "example.org"),
            ("*", "*"),
            ("*", ""),
        ] {
            assert!(!pattern(own).permits(host), "{own} {host}");
        }
    }

    #[test]
    fn malformed_patterns_are_refused() {
        for text in [
            "",
            "*.",
            "*a.org",
            "a..b",
            "-a.org",
            "10.0.0.0/33",
            "10.0.0.1/8",
            "1.2.3",
            "a b",
            "x/8",
        ] {
            assert!(text.parse::<NamePattern>().is_err(), "{text}");
        }
    }

    #[test]
    fn endpoints_are_read_and_written() {
        for text in [
            "example.org:443",
            "10.0.0.0/8:80-90",
            "[::1]:80",
            "*:443",
            "*.a.org:1-65535",
            "[2001:db8::/32]:1",
            "example.org:22/raw",
            "*.example.org:1-9/raw",
            "*:22/raw",
            "example.org:53/udp",
            "10.0.0.0/8:80-90/udp",
            "example.org/icmp",
            "10.0.0.0/8/icmp",
            "[::1]/icmp",
        ] {
            assert_eq!(text.parse::<Endpoint>().expect(text).to_string(), text);
        }
        for text in ["example.org", "example.org:", "a:0", "a:9-8", "::1:80", "a:65536", "a:+1"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
        for text in [
            "a:1/icmp",
            "a/udp",
            "a/raw",
            "a:1/sctp",
            "a:1/raw/udp",
            "a:1/udp/raw",
            "a:1/RAW",
            "/icmp",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
        for text in ["10.0.0.1:22/raw", "10.0.0.0/8:22/raw", "[::1]:22/raw"] {
            let refused = text.parse::<Endpoint>().expect_err(text);
            assert!(refused.contains("leave `/raw` out"), "{refused}");
        }
    }

    #[test]
    fn raw_covers_what_is_not_and_goes_with_it() {
        let endpoint = |text: &str| text.parse::<Endpoint>().expect(text);
        let (raw, plain) = (endpoint("a:22/raw"), endpoint("a:22"));
        assert!(raw.contains(&plain) && raw.contains(&raw));
        assert!(!plain.contains(&raw), "what is granted with a guard is not given on without");
        assert!(endpoint("a:1-99").takes_away(&raw) && endpoint("a:1-99").takes_away(&plain));
        assert!(endpoint("a:1-99/raw").takes_away(&raw));
        assert!(!endpoint("a:1-99/raw").takes_away(&plain));
        assert!(!endpoint("b:22").takes_away(&raw) && !endpoint("a:22/udp").takes_away(&raw));
    }

    #[test]
    fn a_protocol_covers_no_other() {
        let endpoint = |text: &str| text.parse::<Endpoint>().expect(text);
        assert_eq!(endpoint("a:1/tcp"), endpoint("a:1"));
        for (own, other) in [("a:1", "a:1/udp"), ("a:1/udp", "a:1"), ("a/icmp", "a:1")] {
            assert!(!endpoint(own).contains(&endpoint(other)), "{own} {other}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = text.parse::<Endpoint>();
            let _ = pattern("*").permits(&text);
        }

        #[test]
        fn a_longer_prefix_is_contained(bits: u32, short in 0u8..=32, long in 0u8..=32) {
            let cut = |prefix: u8| mask(prefix, 32) as u32 & bits;
            let net = |prefix| NamePattern::Net { base: IpAddr::V4(cut(prefix).into()), prefix };
            prop_assert_eq!(net(short).contains(&net(long)), long >= short);
        }
    }
}
