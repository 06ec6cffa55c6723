//! Rules of the network: what is allowed, less what is denied.
//!
//! A rule of a cell has no exceptions. Ports that are denied are taken out of a rule; a host that is
//! denied within one, or to which one may lead, is refused by its name.

use std::net::IpAddr;

use exocell_cell::xgate::{Endpoint, NamePattern, PortRange};

/// The rules of `--allow-net` for what these lists of `srt` say.
///
/// # Errors
/// An entry is no domain and no address, or a rule cannot be made that keeps to `denied`.
pub fn rules(allowed: &[String], denied: &[String]) -> Result<Vec<String>, String> {
    let read = |field: &str, texts: &[String]| {
        let one = |text: &String| endpoint(text).map_err(|why| format!("{field}: {why}"));
        texts.iter().map(one).collect::<Result<Vec<_>, _>>()
    };
    let allowed = read("network.allowedDomains", allowed)?;
    let denied = read("network.deniedDomains", denied)?;
    let mut rules = Vec::new();
    for rule in allowed {
        let (whole, parts): (Vec<_>, Vec<_>) =
            denied.iter().partition(|denied| is_within(&rule.host, &denied.host));
        let ports = whole.iter().fold(vec![rule.ports], |left, denied| {
            left.into_iter().flat_map(|ports| less(ports, denied.ports)).collect()
        });
        for denied in parts {
            if ports.iter().any(|own| overlap(*own, denied.ports)) {
                check(&rule, denied)?;
            }
        }
        let left = ports.into_iter().map(|ports| Endpoint { ports, ..rule.clone() }.to_string());
        rules.extend(left);
    }
    Ok(rules)
}

/// Reads a domain; one without a port is one of every port.
fn endpoint(domain: &str) -> Result<Endpoint, String> {
    let port = domain.rsplit_once(':').map(|(_, port)| port);
    let text = match port.is_some_and(|port| port.parse::<u16>().is_ok()) {
        true => domain.to_owned(),
        false => format!("{domain}:1-65535"),
    };
    let read: Endpoint = text.parse()?;
    match read.host {
        NamePattern::Net { base, .. } if base.to_canonical() != base => {
            Err(format!("{domain}: write the address as one of IPv4, {}", base.to_canonical()))
        }
        _ => Ok(read),
    }
}

/// Whether `denied` covers all of `host`; for `srt` a denied `*` covers addresses too.
fn is_within(host: &NamePattern, denied: &NamePattern) -> bool {
    *denied == NamePattern::Any || denied.contains(host)
}

/// Refuses what is denied on a port of `rule`, and is within it or behind it.
fn check(rule: &Endpoint, denied: &Endpoint) -> Result<(), String> {
    if rule.host.contains(&denied.host) {
        return Err(format!(
            "network.deniedDomains: {denied} is a part of {rule}, and a rule of a cell has no \
             exceptions; allow less than {rule}"
        ));
    }
    let is_name = !matches!(rule.host, NamePattern::Net { .. });
    match denied.host {
        NamePattern::Net { base, .. } if is_name && !is_never_led_to(base) => Err(format!(
            "network.deniedDomains: {denied} is an address, to which a name of {rule} could lead, \
             and a cell denies by name; leave it out, or allow addresses"
        )),
        _ => Ok(()),
    }
}

/// Whether a cell reaches `address` by no name, unless a rule says the address itself.
fn is_never_led_to(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    is_link_local || address.is_loopback() || address.is_unspecified()
}

fn overlap(one: PortRange, other: PortRange) -> bool {
    one.first <= other.last && other.first <= one.last
}

/// The ports of `ports` that are not `denied`.
fn less(ports: PortRange, denied: PortRange) -> Vec<PortRange> {
    let below = PortRange { last: ports.last.min(denied.first - 1), ..ports };
    let above =
        denied.last.checked_add(1).map(|next| PortRange { first: ports.first.max(next), ..ports });
    let left = [Some(below), above].into_iter().flatten();
    left.filter(|range| range.first <= range.last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(allowed: &[&str], denied: &[&str]) -> Result<Vec<String>, String> {
        let list = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        rules(&list(allowed), &list(denied))
    }

    #[test]
    fn what_is_denied_is_taken_out_of_a_rule() {
        for (allowed, denied, left) in [
            ("pypi.org", "other.org", &["pypi.org:1-65535"][..]),
            ("pypi.org", "PyPI.org.", &[]),
            ("pypi.org", "*", &[]),
            ("10.0.0.1", "*", &[]),
            ("api.a.org:443", "*.a.org", &[]),
            ("*.a.org", "a.org", &["*.a.org:1-65535"]),
            ("*.a.org:443", "b.a.org:80", &["*.a.org:443"]),
            ("a.org", "a.org:22", &["a.org:1-21", "a.org:23-65535"]),
            ("a.org", "*.org:1", &["a.org:2-65535"]),
            ("10.0.0.1", "*:65535", &["10.0.0.1:1-65534"]),
            ("10.0.0.0/8:443", "10.0.0.0/8:443", &[]),
            ("a.org", "169.254.169.254", &["a.org:1-65535"]),
            ("a.org:443", "10.0.0.1:80", &["a.org:443"]),
        ] {
            assert_eq!(made(&[allowed], &[denied]).unwrap(), left, "{allowed} less {denied}");
        }
        let both = made(&["a.org"], &["a.org:5-9", "a.org:8-20", "a.org:65000-65535"]).unwrap_err();
        assert!(both.contains("deniedDomains"), "a domain has one port: {both}");
        let left = made(&["a.org"], &["a.org:5", "*.org:6", "a.org:65535"]).unwrap();
        assert_eq!(left, ["a.org:1-4", "a.org:7-65534"]);
    }

    #[test]
    fn a_part_of_a_rule_cannot_be_denied() {
        for (allowed, denied) in [
            ("*.example.com:443", "api.example.com"),
            ("*.example.com", "api.example.com:443"),
            ("*.example.com", "*.api.example.com"),
            ("*.example.com:443", "api.example.com:443"),
            ("10.0.0.0/8", "10.1.0.0/16"),
            ("10.0.0.0/8:80", "10.1.0.1"),
            ("a.org", "10.1.0.1"),
            ("*.a.org:443", "[2001:db8::1]"),
            ("a.org", "[::ffff:10.0.0.1]"),
        ] {
            let error = made(&["other.net:1", allowed], &[denied]).unwrap_err();
            assert!(error.contains("network.deniedDomains"), "{allowed} less {denied}: {error}");
        }
    }
}
