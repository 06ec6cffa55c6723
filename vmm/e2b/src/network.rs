//! What a client says of a sandbox' network, held against what the operator granted: the result
//! is rules of a capability table, and never more than the grant.
//!
//! A grant is a list of what is allowed, and so is its result: a denied part of an allowed range
//! cannot be said, and is refused by name. So is what a client allows and the operator does not.

use exocell_cell::network::covers;
use exocell_cell::xgate::{Endpoint, NamePattern};
use hyper::header::HeaderValue;
use hyper::http::uri::Authority;
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Problem, Result};

/// Destinations that a client may name, and bytes of all that it says.
const DESTINATIONS_MAX: usize = 256;
const BYTES_MAX: usize = 64 << 10;
/// The longest name of a host, and a port.
const HOST_BYTES_MAX: usize = 260;
/// As many destinations are told of a grant.
const TOLD_MAX: usize = 20;

/// What stands for the port in `maskRequestHost`.
const PORT_WORD: &str = "${PORT}";

/// The host that a program at `port` is told where its sandbox says `mask`; `None` where that is no
/// host.
pub fn masked(mask: &str, port: u16) -> Option<HeaderValue> {
    let host = mask.replace(PORT_WORD, &port.to_string());
    let is_host = host.len() <= HOST_BYTES_MAX && !host.contains('@');
    host.parse::<Authority>().ok().filter(|_| is_host)?;
    HeaderValue::from_str(&host).ok()
}

/// The part of a request that is about the network.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Wanted {
    pub allow_out: Option<Vec<String>>,
    pub deny_out: Option<Vec<String>>,
    pub allow_public_traffic: Option<bool>,
    /// Only in a change of a running sandbox' network.
    #[serde(alias = "allow_internet_access")]
    pub allow_internet_access: Option<bool>,
    pub rules: Option<Value>,
    pub egress_proxy: Option<Value>,
    pub dns_servers: Option<Value>,
    /// What the programs of the sandbox are told as the name of their host; `${PORT}` in it is the
    /// port.
    pub mask_request_host: Option<String>,
    pub https_ports: Option<Value>,
}

impl Wanted {
    /// What `asked` says.
    ///
    /// # Errors
    /// 400: it is too long, or says nothing of the network.
    pub fn read(asked: &Value) -> Result<Self> {
        if asked.to_string().len() > BYTES_MAX {
            return Err(Problem::invalid(format!("network: it has more than {BYTES_MAX} bytes")));
        }
        Self::deserialize(asked).map_err(|error| Problem::invalid(format!("network: {error}")))
    }

    /// Refuses what is not there, by name.
    fn check(&self) -> Result<()> {
        let says = |value: &Option<Value>| match value {
            None | Some(Value::Null) => false,
            Some(Value::Array(several)) => !several.is_empty(),
            Some(Value::Object(several)) => !several.is_empty(),
            Some(_) => true,
        };
        for (name, value, remedy) in [
            ("rules", &self.rules, "add the headers in the sandbox"),
            ("egressProxy", &self.egress_proxy, "name what may be reached by allowOut"),
            ("dnsServers", &self.dns_servers, "names are looked up by the operator's host"),
            ("httpsPorts", &self.https_ports, "serve plain HTTP in the sandbox"),
        ] {
            if says(value) {
                return Err(Problem::unsupported(format!("network.{name}"), remedy));
            }
        }
        if let Some(mask) = &self.mask_request_host
            && masked(mask, 65_535).is_none()
        {
            return Err(Problem::invalid(format!(
                "network.maskRequestHost: {mask:?} is no name of a host; write NAME, or NAME:PORT \
                 with {PORT_WORD} for the port"
            )));
        }
        let count = |list: &Option<Vec<String>>| list.as_ref().map_or(0, Vec::len);
        match count(&self.allow_out) + count(&self.deny_out) > DESTINATIONS_MAX {
            true => Err(Problem::invalid(format!(
                "allowOut and denyOut name more than {DESTINATIONS_MAX} destinations"
            ))),
            false => Ok(()),
        }
    }
}

/// The rules of a sandbox that may have `grant` at most.
///
/// # Errors
/// What is named is no destination, is more than the grant, or cannot be kept to.
pub fn rules(grant: &[String], internet: Option<bool>, wanted: &Wanted) -> Result<Vec<String>> {
    wanted.check()?;
    let grant = grant.iter().filter_map(|rule| rule.parse::<Endpoint>().ok());
    let grant: Vec<Endpoint> = grant.collect();
    let named = |list: &Option<Vec<String>>| {
        list.iter().flatten().map(|text| destination(text)).collect::<Result<Vec<_>>>()
    };
    let (allowed, denied) = (named(&wanted.allow_out)?, named(&wanted.deny_out)?);
    let mut rules = match internet == Some(false) || denied.iter().any(is_all) {
        true => Vec::new(),
        false => without(&grant, &denied)?,
    };
    for wanted in &allowed {
        // All is all that there is.
        if !is_all(wanted) && !grant.iter().any(|own| covers(&own.host, wanted)) {
            return Err(beyond(wanted, &grant));
        }
        rules.extend(grant.iter().filter_map(|own| within(own, wanted)));
    }
    let mut texts: Vec<String> = rules.iter().map(Endpoint::to_string).collect();
    texts.sort_unstable();
    texts.dedup();
    Ok(texts)
}

fn beyond(wanted: &NamePattern, grant: &[Endpoint]) -> Problem {
    let mut told: Vec<String> = grant.iter().take(TOLD_MAX).map(Endpoint::to_string).collect();
    if grant.len() > TOLD_MAX {
        told.push(format!("{} more", grant.len() - TOLD_MAX));
    }
    let has = match told.is_empty() {
        true => "nothing".to_owned(),
        false => told.join(", "),
    };
    Problem::invalid(format!("allowOut: {wanted} is more than this key may have, which is {has}"))
}

/// A host, a network or a name, with all of its ports.
fn destination(text: &str) -> Result<NamePattern> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let read = match bare {
        // All traffic.
        "0.0.0.0/0" | "*" => "0.0.0.0/0".parse(),
        other => other.parse::<NamePattern>(),
    };
    read.map_err(|why| {
        Problem::invalid(format!("{text:?} is no address, network or name of a host: {why}"))
    })
}

fn is_all(host: &NamePattern) -> bool {
    host.to_string() == "0.0.0.0/0"
}

/// What is in both.
fn within(own: &Endpoint, wanted: &NamePattern) -> Option<Endpoint> {
    let host = match (covers(&own.host, wanted), wanted.contains(&own.host)) {
        (true, _) => wanted.clone(),
        // All traffic is names, too.
        (false, true) => own.host.clone(),
        (false, false) if is_all(wanted) => own.host.clone(),
        (false, false) => return None,
    };
    Some(Endpoint { host, ..own.clone() })
}

/// The grant without what is denied.
fn without(grant: &[Endpoint], denied: &[NamePattern]) -> Result<Vec<Endpoint>> {
    let mut left = Vec::new();
    for own in grant {
        let takes = |host: &&NamePattern| host.contains(&own.host);
        if denied.iter().find(takes).is_some() {
            continue;
        }
        let is_net = |host: &NamePattern| matches!(host, NamePattern::Net { .. });
        if !is_net(&own.host)
            && let Some(host) = denied.iter().find(|host| is_net(host))
        {
            return Err(Problem::invalid(format!(
                "denyOut {host} cannot be kept to: the server allows {own} by its name, which may \
                 have any address, and other addresses are not allowed anyway; leave it out, or \
                 deny the name"
            )));
        }
        let cuts = |host: &&NamePattern| own.host.contains(host);
        if let Some(host) = denied.iter().find(cuts) {
            return Err(Problem::invalid(format!(
                "denyOut {host} is a part of what the server allows ({own}), and a sandbox has a \
                 list of what is allowed: deny 0.0.0.0/0, and name what is allowed (allowOut)"
            )));
        }
        left.push(own.clone());
    }
    Ok(left)
}

/// What has to be added to `old` and taken from it so that it is `new`.
pub fn change(old: &[String], new: &[String]) -> (Vec<String>, Vec<String>) {
    let minus = |one: &[String], other: &[String]| {
        one.iter().filter(|rule| !other.contains(rule)).cloned().collect()
    };
    (minus(new, old), minus(old, new))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wanted(allow: &[&str], deny: &[&str]) -> Wanted {
        let list = |texts: &[&str]| Some(texts.iter().map(ToString::to_string).collect());
        Wanted { allow_out: list(allow), deny_out: list(deny), ..Wanted::default() }
    }

    fn of(grant: &[&str], internet: Option<bool>, wanted: &Wanted) -> Result<Vec<String>> {
        let grant: Vec<String> = grant.iter().map(ToString::to_string).collect();
        rules(&grant, internet, wanted)
    }

    #[test]
    fn what_nobody_says_is_the_grant_and_false_is_nothing() {
        let grant = ["example.org:443", "10.0.0.0/8:1-65535"];
        let none = Wanted::default();
        for internet in [None, Some(true)] {
            assert_eq!(of(&grant, internet, &none).unwrap().len(), 2);
        }
        assert!(of(&grant, Some(false), &none).unwrap().is_empty());
        assert!(of(&[], Some(true), &none).unwrap().is_empty());
    }

    #[test]
    fn what_is_allowed_is_within_the_grant() {
        let grant = ["*.example.org:443", "10.0.0.0/8:80"];
        let all = &["0.0.0.0/0"];
        let few = |allow: &[&str]| of(&grant, None, &wanted(allow, all)).unwrap();
        assert_eq!(few(&["a.example.org"]), ["a.example.org:443"]);
        assert_eq!(few(&["10.1.2.3"]), ["10.1.2.3:80"]);
        assert_eq!(few(&["0.0.0.0/0"]).len(), 2);
        assert_eq!(
            of(&grant, Some(false), &wanted(&["10.0.0.0/8"], &[])).unwrap(),
            ["10.0.0.0/8:80"]
        );
    }

    #[test]
    fn what_is_allowed_beyond_the_grant_is_refused_by_its_name() {
        let grant = ["*.example.org:443", "10.0.0.0/8:80"];
        for beyond in ["evil.org", "8.8.8.8", "10.0.0.0/7", "*.org"] {
            for deny in [&[][..], &["0.0.0.0/0"]] {
                let problem = of(&grant, None, &wanted(&["10.1.2.3", beyond], deny)).unwrap_err();
                assert!(problem.status == 400 && problem.message.contains(beyond), "{problem}");
                assert!(problem.message.contains("10.0.0.0/8:80"), "{problem}");
            }
        }
        let none = of(&[], None, &wanted(&["a.org"], &[])).unwrap_err();
        assert!(none.message.contains("which is nothing"), "{none}");
        assert!(of(&[], None, &wanted(&["0.0.0.0/0"], &[])).unwrap().is_empty());
    }

    #[test]
    fn the_host_is_no_part_of_a_grant_that_does_not_name_it() {
        let wide = ["*:443", "*.internal:443", "0.0.0.0/0:1-65535", "[::/0]:1-65535"];
        let hosts = ["host.docker.internal", "HOST.docker.internal.", "127.0.0.1", "127.0.0.0/8"];
        let others = ["0.0.0.0", "169.254.169.254", "169.254.0.0/16", "::1", "64:ff9b::7f00:1"];
        for host in hosts.into_iter().chain(others) {
            let problem = of(&wide, None, &wanted(&[host], &["0.0.0.0/0"])).unwrap_err();
            assert!(problem.message.contains("more than this key may have"), "{host}: {problem}");
        }
        for (grant, host) in [
            ("host.docker.internal:80", "host.docker.internal"),
            ("127.0.0.0/8:80", "127.0.0.1"),
            ("169.254.169.254:80", "169.254.169.254"),
            ("0.0.0.0/0:80", "192.31.196.1"),
            ("0.0.0.0/0:80", "10.0.0.0/8"),
            ("*:80", "example.org"),
        ] {
            let rules = of(&[grant], None, &wanted(&[host], &["0.0.0.0/0"])).unwrap();
            assert_eq!(rules, [format!("{host}:80")]);
        }
    }

    #[test]
    fn a_name_is_denied_by_its_name_alone() {
        let grant = ["a.org:443", "*.b.org:443", "10.0.0.0/8:443"];
        let left = |deny| of(&grant, None, &wanted(&[], &[deny]));
        assert_eq!(left("a.org").unwrap(), ["*.b.org:443", "10.0.0.0/8:443"]);
        assert_eq!(left("other.org").unwrap().len(), 3);
        assert!(left("x.b.org").unwrap_err().message.contains("a part of"));
        let problem = left("8.8.8.8").unwrap_err();
        assert!(problem.message.contains("8.8.8.8 cannot be kept to"), "{problem}");
    }

    #[test]
    fn a_part_of_a_range_cannot_be_denied() {
        assert!(of(&["10.0.0.0/8:80"], None, &wanted(&[], &["10.1.0.0/16"])).is_err());
        assert!(of(&["example.org:80"], None, &wanted(&[], &["10.1.0.0/16"])).is_err());
        assert!(of(&["10.1.2.0/24:80"], None, &wanted(&[], &["10.1.0.0/16"])).unwrap().is_empty());
        assert_eq!(of(&["10.1.2.0/24:80"], None, &wanted(&[], &["11.0.0.0/8"])).unwrap().len(), 1);
        assert!(of(&["a:1"], None, &wanted(&["not a host\n"], &[])).is_err());
    }

    #[test]
    fn what_is_not_there_is_refused_by_its_name() {
        for name in ["rules", "egressProxy", "dnsServers", "httpsPorts"] {
            let value = serde_json::json!({ name: { "x": 1 } });
            let wanted: Wanted = serde_json::from_value(value).unwrap();
            let problem = of(&[], None, &wanted).unwrap_err();
            assert!(problem.message.contains(name) && problem.status == 501, "{problem}");
        }
        serde_json::from_str::<Wanted>(r#"{"other": 1}"#).unwrap_err();
    }

    #[test]
    fn a_host_is_masked_by_a_host() {
        for (mask, host) in [("a.example", "a.example"), ("a:${PORT}", "a:80"), ("::1", "")] {
            let masked = masked(mask, 80).map(|host| host.to_str().unwrap().to_owned());
            assert_eq!(masked.unwrap_or_default(), host, "{mask}");
        }
    }

    #[test]
    fn a_change_is_what_differs() {
        let list = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        let (add, remove) = change(&list(&["a:1", "b:1"]), &list(&["b:1", "c:1"]));
        assert_eq!((add, remove), (list(&["c:1"]), list(&["a:1"])));
    }

    proptest! {
        #[test]
        fn never_more_than_the_grant(
            grant in proptest::collection::vec("(10\\.[0-3]\\.0\\.0/(8|16|24)|[ab]\\.org|\\*\\.org):(80|443|1-99)", 0..4),
            allow in proptest::collection::vec("(10\\.[0-3]\\.0\\.[0-3]|[abc]\\.org|\\*\\.org|0\\.0\\.0\\.0/0)", 0..4),
            deny in proptest::collection::vec("(10\\.[0-3]\\.0\\.0/16|0\\.0\\.0\\.0/0)", 0..2),
            internet: Option<bool>,
        ) {
            let wanted = Wanted { allow_out: Some(allow), deny_out: Some(deny), ..Wanted::default() };
            let owned: Vec<Endpoint> = grant.iter().filter_map(|rule| rule.parse().ok()).collect();
            for rule in rules(&grant, internet, &wanted).unwrap_or_default() {
                let rule: Endpoint = rule.parse().unwrap();
                prop_assert!(owned.iter().any(|own| own.contains(&rule)), "{} of {:?}", rule, grant);
            }
        }
    }
}
