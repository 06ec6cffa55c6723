//! Who may be talked to: the one place where a rule meets a request.
//!
//! ```text
//! a name  --permits_name--> resolved on the host side --permits_address_of--> dialled
//! address --permits_address--> dialled
//! ```
//! The dialer asks before it dials. Who ends the flows, the stack or the relay, asks when a
//! flow is opened and when the rules change: a stream that was handed over is out of the
//! dialer's hands.

use std::net::{IpAddr, SocketAddr};

use exocell_xgate::{Endpoint, NamePattern, NetworkScope, Protocol};

use crate::address::{self, Class};
use crate::link;

/// Whom a flow is for: a name that was granted, or an address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// In lower case, without a final dot.
    Name(String),
    Address(IpAddr),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(address) => write!(f, "{address}"),
        }
    }
}

/// Where a flow leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub at: SocketAddr,
    /// Whether it is the host's own: only the dialer can find out.
    pub is_own: bool,
}

/// Why something is not permitted, for the log and the person who reads it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    #[error("no rule covers it")]
    NoRule,
    #[error("the address {0} is {name}; only a rule that names it covers it", name = .1.name())]
    Special(IpAddr, Class),
    #[error("the address {0} is private; `*` does not cover it")]
    Private(IpAddr),
    #[error("the address {0} is the host's own; only a rule that names it covers it")]
    Own(IpAddr),
}

/// The rules of one cell.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    scope: NetworkScope,
}

impl Policy {
    /// The policy of a grant; the empty grant permits nothing.
    pub fn new(scope: NetworkScope) -> Self {
        Self { scope }
    }

    /// What it was made of.
    pub fn scope(&self) -> &NetworkScope {
        &self.scope
    }

    /// The rules that a dialer needs, one a line: `connect RULE` or `resolve NAME`.
    pub fn to_text(&self) -> String {
        let connect = self.scope.connect.iter().map(|rule| format!("connect {rule}\n"));
        connect.chain(self.scope.resolve.iter().map(|rule| format!("resolve {rule}\n"))).collect()
    }

    /// Reads [`Policy::to_text`]; `None` where a line is not a rule.
    pub fn from_text(text: &str) -> Option<Self> {
        let mut scope = NetworkScope::default();
        for line in text.lines() {
            match line.split_once(' ')? {
                ("connect", rule) => scope.connect.push(rule.parse().ok()?),
                ("resolve", rule) => scope.resolve.push(rule.parse().ok()?),
                _ => return None,
            }
        }
        Some(Self { scope })
    }

    fn rules(&self, protocol: Protocol, port: u16) -> impl Iterator<Item = &Endpoint> {
        self.scope.connect.iter().filter(move |rule| {
            rule.protocol == protocol && (protocol == Protocol::Icmp || rule.ports.permits(port))
        })
    }

    /// Whether a rule of any protocol and port covers this name: it is answered
    /// with an address that stands for it.
    pub fn knows(&self, name: &str) -> bool {
        self.scope.connect.iter().any(|rule| covers_name(&rule.host, name))
    }

    /// Whether a rule is for the name, or for those of its domain: `*` alone is for none.
    pub fn claims(&self, name: &str) -> bool {
        let hosts = self.scope.connect.iter().map(|rule| &rule.host);
        let mut hosts = hosts.chain(&self.scope.resolve);
        hosts.any(|host| *host != NamePattern::Any && covers_name(host, name))
    }

    /// Whether the name may be turned into its real addresses.
    pub fn resolves(&self, name: &str) -> bool {
        self.scope.resolve.iter().any(|rule| covers_name(rule, name))
    }

    /// Whether `name` may be dialled, as far as the name goes.
    pub fn permits_name(&self, protocol: Protocol, name: &str, port: u16) -> Result<(), Denied> {
        match self.rules(protocol, port).any(|rule| covers_name(&rule.host, name)) {
            true => Ok(()),
            false => Err(Denied::NoRule),
        }
    }

    /// Whether a stream to `name` may say anything: a rule that covers it is raw.
    pub fn is_raw(&self, name: &str, port: u16) -> bool {
        let mut rules = self.rules(Protocol::Tcp, port);
        rules.any(|rule| rule.is_raw && covers_name(&rule.host, name))
    }

    /// Whether `address`, to which `name` resolved, may be dialled for it. What
    /// counts is where it leads ([`address::reached`]); `own` says whether that is
    /// the host's, and is asked only where it matters.
    pub fn permits_address_of(
        &self,
        protocol: Protocol,
        name: &str,
        address: IpAddr,
        port: u16,
        own: impl FnOnce(IpAddr) -> bool,
    ) -> Result<(), Denied> {
        self.permits_name(protocol, name, port)?;
        let (address, reached) = (address::plain(address), address::reached(address));
        if name == link::HOST_NAME && address.is_loopback() && self.names_host(protocol, port) {
            return Ok(());
        }
        let special = address::class(reached);
        if !self.names(protocol, address, port) && (special.is_some() || own(reached)) {
            return Err(
                special.map_or(Denied::Own(reached), |class| Denied::Special(reached, class))
            );
        }
        // A name that only `*` covers is anybody's, so it must lead outside.
        let mut covering = self.rules(protocol, port).filter(|rule| covers_name(&rule.host, name));
        let only_any = covering.all(|rule| rule.host == NamePattern::Any);
        match only_any && address::is_private(reached) && !self.covers(protocol, address, port) {
            true => Err(Denied::Private(reached)),
            false => Ok(()),
        }
    }

    /// Whether a rule grants the host, by its own name and no pattern.
    fn names_host(&self, protocol: Protocol, port: u16) -> bool {
        let is_host =
            |host: &NamePattern| matches!(host, NamePattern::Name(name) if name == link::HOST_NAME);
        self.rules(protocol, port).any(|rule| is_host(&rule.host))
    }

    /// Whether `address` itself may be dialled. `own` is as above.
    pub fn permits_address(
        &self,
        protocol: Protocol,
        address: IpAddr,
        port: u16,
        own: impl FnOnce(IpAddr) -> bool,
    ) -> Result<(), Denied> {
        let address = address::plain(address);
        if !self.covers(protocol, address, port) {
            return Err(Denied::NoRule);
        }
        match address::class(address) {
            _ if self.names(protocol, address, port) => Ok(()),
            Some(class) => Err(Denied::Special(address, class)),
            None if own(address) => Err(Denied::Own(address)),
            None => Ok(()),
        }
    }

    /// Whether a flow to `target`, which goes to `peer`, is still permitted.
    pub fn permits(
        &self,
        protocol: Protocol,
        target: &Target,
        peer: Peer,
        port: u16,
    ) -> Result<(), Denied> {
        let (at, own) = (peer.at.ip(), |_| peer.is_own);
        match target {
            Target::Name(name) => self.permits_address_of(protocol, name, at, port, own),
            Target::Address(address) => self.permits_address(protocol, *address, port, own),
        }
    }

    /// Whether a flow that is open, and `is_raw` or not, may say no more than the rules
    /// let it say now.
    pub fn guards_no_less(&self, is_raw: bool, target: &Target, port: u16) -> bool {
        match target {
            Target::Name(name) => !is_raw || self.is_raw(name, port),
            Target::Address(_) => true,
        }
    }

    fn covers(&self, protocol: Protocol, address: IpAddr, port: u16) -> bool {
        let one = address::exactly(address);
        self.rules(protocol, port).any(|rule| rule.host.contains(&one))
    }

    fn names(&self, protocol: Protocol, address: IpAddr, port: u16) -> bool {
        self.rules(protocol, port).any(|rule| address::names(&rule.host, address))
    }
}

fn covers_name(rule: &NamePattern, name: &str) -> bool {
    !matches!(rule, NamePattern::Net { .. }) && rule.permits(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Protocol::{Icmp, Tcp, Udp};

    fn policy(rules: &[&str]) -> Policy {
        let connect = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        Policy::new(NetworkScope { connect, ..NetworkScope::default() })
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// The answer of a host that is asked whether an address is its own.
    fn says(own: bool) -> impl FnOnce(IpAddr) -> bool {
        move |_| own
    }

    #[test]
    fn a_rule_claims_its_names_and_any_claims_none() {
        let own = policy(&["example.com:80", "*.example.org:443", "*:1", "10.0.0.0/8:1"]);
        for name in ["example.com", "a.example.org", "db.a.example.org"] {
            assert!(own.claims(name), "{name}");
        }
        for name in ["db", "db.backend", "example.org", "a.example.com", "10.0.0.1"] {
            assert!(!own.claims(name), "{name}");
        }
        let resolve = vec!["db".parse().unwrap()];
        assert!(Policy::new(NetworkScope { resolve, ..NetworkScope::default() }).claims("db"));
    }

    #[test]
    fn nothing_granted_permits_nothing() {
        let none = policy(&[]);
        assert_eq!(none.permits_name(Tcp, "example.org", 443), Err(Denied::NoRule));
        assert_eq!(
            none.permits_address(Tcp, ip("192.31.196.1"), 443, says(false)),
            Err(Denied::NoRule)
        );
        assert!(!none.knows("example.org") && !none.resolves("example.org"));
    }

    #[test]
    fn rules_come_back_as_they_went() {
        let text = "connect *.example.org:443\nconnect example.org:22/raw\nconnect 10.0.0.0/8:1-9/udp\nresolve *\n";
        assert_eq!(Policy::from_text(text).unwrap().to_text(), text);
        assert!(Policy::from_text("connect x").is_none());
        assert!(Policy::from_text("listen 80").is_none());
    }

    #[test]
    fn a_name_is_for_its_ports_and_protocol_only() {
        let one = policy(&["example.org:443", "time.example.org:123/udp", "example.org/icmp"]);
        assert!(one.permits_name(Tcp, "example.org", 443).is_ok());
        assert!(one.permits_name(Udp, "time.example.org", 123).is_ok());
        assert!(one.permits_name(Icmp, "example.org", 0).is_ok());
        for (protocol, name, port) in [
            (Tcp, "example.org", 80),
            (Udp, "example.org", 443),
            (Tcp, "time.example.org", 123),
            (Icmp, "time.example.org", 0),
            (Tcp, "a.example.org", 443),
            (Tcp, "192.31.196.1", 443),
        ] {
            assert!(one.permits_name(protocol, name, port).is_err(), "{protocol} {name} {port}");
        }
    }

    #[test]
    fn a_name_that_leads_inside_is_denied() {
        let one = policy(&["example.org:443"]);
        let check = |address: &str, own| {
            one.permits_address_of(Tcp, "example.org", ip(address), 443, says(own))
        };
        assert!(check("192.31.196.1", false).is_ok());
        assert!(check("10.0.0.1", false).is_ok(), "an exact name may be an inside one");
        assert_eq!(check("192.31.196.1", true), Err(Denied::Own(ip("192.31.196.1"))));
        for address in ["127.0.0.1", "169.254.169.254", "::ffff:127.0.0.1", "fe80::1", "::1"] {
            assert!(matches!(check(address, false), Err(Denied::Special(..))), "{address}");
        }
    }

    #[test]
    fn the_host_is_reached_by_its_own_name_only_where_a_rule_says_it() {
        let check = |rules: &[&str], name: &str, address: &str, port: u16| {
            policy(rules).permits_address_of(Tcp, name, ip(address), port, says(true)).is_ok()
        };
        let host = link::HOST_NAME;
        let rules = ["host.docker.internal:80", "other.test:80"];
        assert!(check(&rules, host, "127.0.0.1", 80) && check(&rules, host, "::1", 80));
        assert!(!check(&rules, host, "127.0.0.1", 81));
        assert!(!check(&rules, host, "192.31.196.1", 80), "it is the loopback, and nothing else");
        assert!(!check(&rules, "other.test", "127.0.0.1", 80));
        for rule in ["*:80", "*.docker.internal:80", "*.internal:80"] {
            assert!(!check(&[rule], host, "127.0.0.1", 80), "{rule}");
        }
    }

    #[test]
    fn a_translators_address_of_a_name_is_what_it_leads_to() {
        let rules = policy(&["example.org:443", "*:443", "[64:ff9b::7f00:9]:443"]);
        let check = |name: &str, address: &str, own| {
            rules.permits_address_of(Tcp, name, ip(address), 443, says(own))
        };
        assert!(check("example.org", "64:ff9b::c01f:c401", false).is_ok());
        assert!(check("example.org", "64:ff9b::a00:1", false).is_ok());
        assert_eq!(check("x.org", "64:ff9b::a00:1", false), Err(Denied::Private(ip("10.0.0.1"))));
        let own = check("example.org", "64:ff9b::c01f:c401", true);
        assert_eq!(own, Err(Denied::Own(ip("192.31.196.1"))));
        for address in ["64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::c01f:c401"] {
            assert!(matches!(check("example.org", address, false), Err(Denied::Special(..))));
        }
        assert!(check("example.org", "64:ff9b::7f00:9", false).is_ok(), "it is named itself");
        // As an address a translator's is not covered by a general rule.
        let wide = policy(&["[::/0]:443", "0.0.0.0/0:443"]);
        assert!(wide.permits_address(Tcp, ip("64:ff9b::c01f:c401"), 443, says(false)).is_err());
    }

    #[test]
    fn raw_is_what_a_rule_says_of_that_name_and_port() {
        let rules = policy(&["a.test:22/raw", "*.b.test:1-9/raw", "a.test:443", "a.test:80/udp"]);
        assert!(rules.is_raw("a.test", 22) && rules.is_raw("x.b.test", 9));
        for (name, port) in [("a.test", 443), ("a.test", 80), ("b.test", 9), ("x.b.test", 10)] {
            assert!(!rules.is_raw(name, port), "{name} {port}");
        }
        assert!(rules.permits_name(Tcp, "a.test", 22).is_ok());
    }

    #[test]
    fn any_name_leads_outside_only() {
        let any = policy(&["*:443"]);
        let check =
            |address: &str| any.permits_address_of(Tcp, "x.org", ip(address), 443, says(false));
        assert!(check("192.31.196.1").is_ok());
        assert_eq!(check("10.0.0.1"), Err(Denied::Private(ip("10.0.0.1"))));
        assert!(any.permits_address(Tcp, ip("192.31.196.1"), 443, says(false)).is_err());
    }

    #[test]
    fn an_address_must_be_named_where_it_is_special() {
        let all = policy(&["0.0.0.0/0:1-65535", "[::/0]:80", "127.0.0.1:8080"]);
        let check =
            |address: &str, port, own| all.permits_address(Tcp, ip(address), port, says(own));
        assert!(check("192.31.196.1", 80, false).is_ok());
        assert!(check("2620:4f:8000::1", 80, false).is_ok());
        assert!(check("127.0.0.1", 8080, true).is_ok());
        assert!(check("::ffff:127.0.0.1", 8080, true).is_ok());
        assert!(check("127.0.0.1", 80, true).is_err());
        assert!(check("127.0.0.2", 8080, true).is_err());
        assert!(check("169.254.169.254", 80, false).is_err());
        assert!(check("192.31.196.1", 80, true).is_err());
        assert!(check("2620:4f:8000::1", 81, false).is_err());
    }

    #[test]
    fn a_name_may_lead_to_an_address_that_is_named_too() {
        let both = policy(&["inside.test:80", "127.0.0.1:80"]);
        assert!(
            both.permits_address_of(Tcp, "inside.test", ip("127.0.0.1"), 80, says(true)).is_ok()
        );
        assert!(
            both.permits_address_of(Tcp, "inside.test", ip("127.0.0.2"), 80, says(true)).is_err()
        );
    }
}
