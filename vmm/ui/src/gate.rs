//! Who may call: a browser that shows this page, and has the key.
//!
//! Any page of the operator's browser can send requests here, and a name of its own can be made to
//! lead here (DNS rebinding). So the host by which a request comes has to be one of this server's,
//! a request of another page is refused by its `Origin` and `Sec-Fetch-Site` (Fetch Standard; Fetch
//! Metadata), and all but the page itself needs the key, which no browser sends by itself.

use std::net::IpAddr;

use exocell_cell::key::Key;
use hyper::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, ORIGIN};
use hyper::http::uri::Authority;
use hyper::{StatusCode, Uri};

use crate::error::{Refusal, Result};

const SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

pub struct Gate {
    pub key: Key,
    /// Names by which browsers come, beside addresses and `localhost`.
    pub hosts: Vec<String>,
}

impl Gate {
    /// Whether a request may have the page.
    ///
    /// # Errors
    /// 403: it comes by another host, or from another page.
    pub fn admit(&self, uri: &Uri, headers: &HeaderMap) -> Result<()> {
        let forbidden = |why: String| Refusal::new(StatusCode::FORBIDDEN, why);
        let own = host(headers)?;
        let named = uri.authority().into_iter().chain([&own]);
        for authority in named {
            if !self.is_own(authority.host()) {
                return Err(forbidden(format!(
                    "{} is no name of this server; open it by its address, or say --ui-host",
                    authority.host()
                )));
            }
        }
        for origin in headers.get_all(ORIGIN) {
            let of = origin.to_str().unwrap_or_default();
            let of = of.strip_prefix("http://").or_else(|| of.strip_prefix("https://"));
            if !of.is_some_and(|of| of.eq_ignore_ascii_case(own.as_str())) {
                return Err(forbidden("a page of another origin may not call".to_owned()));
            }
        }
        Ok(())
    }

    /// Whether it may do what the page does.
    ///
    /// # Errors
    /// 401: it has no key. 403: another page sent it.
    pub fn permit(&self, headers: &HeaderMap) -> Result<()> {
        let site = headers.get_all(SITE).iter().map(|site| site.as_bytes());
        if site.into_iter().any(|site| site != b"same-origin") {
            return Err(Refusal::new(StatusCode::FORBIDDEN, "another page may not call"));
        }
        let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.strip_prefix("Bearer "));
        match given.is_some_and(|given| self.key.is(given.trim())) {
            true => Ok(()),
            false => Err(Refusal::new(
                StatusCode::UNAUTHORIZED,
                "the key is missing or is another one: open the address that the server has told",
            )),
        }
    }

    /// An address is no name that somebody could have made lead here.
    fn is_own(&self, host: &str) -> bool {
        let address = host.trim_start_matches('[').trim_end_matches(']');
        address.parse::<IpAddr>().is_ok()
            || host.eq_ignore_ascii_case("localhost")
            || self.hosts.iter().any(|own| own.eq_ignore_ascii_case(host))
    }
}

fn host(headers: &HeaderMap) -> Result<Authority> {
    let missing = || Refusal::new(StatusCode::BAD_REQUEST, "say one Host");
    let mut all = headers.get_all(HOST).iter();
    let (Some(host), None) = (all.next(), all.next()) else { return Err(missing()) };
    let host = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
    // Who writes a user into it means to confuse somebody.
    host.filter(|host| !host.as_str().contains('@')).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(headers: &[(&'static str, &str)]) -> (u16, u16) {
        let gate = Gate { key: Key::of("the key"), hosts: vec!["cells.example".to_owned()] };
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        let status = |result: Result<()>| result.map_or_else(|it| it.status.as_u16(), |()| 200);
        (status(gate.admit(&Uri::from_static("/"), &map)), status(gate.permit(&map)))
    }

    #[test]
    fn the_page_is_for_its_own_names() {
        for host in ["localhost:7070", "127.0.0.1:7070", "[::1]:7070", "10.0.0.7", "Cells.Example"]
        {
            assert_eq!(asked(&[("host", host)]).0, 200, "{host}");
        }
        for host in ["attacker.example", "localhost.attacker.example:7070", "127.0.0.1.nip.example"]
        {
            assert_eq!(asked(&[("host", host)]).0, 403, "{host}");
        }
        for host in ["", "a b", "x@127.0.0.1"] {
            assert_eq!(asked(&[("host", host)]).0, 400, "{host}");
        }
        assert_eq!(asked(&[]).0, 400);
        assert_eq!(asked(&[("host", "localhost"), ("host", "attacker.example")]).0, 400);
    }

    #[test]
    fn other_origins_are_refused_those_of_other_ports_too() {
        let from = |origin: &str| asked(&[("host", "127.0.0.1:7070"), ("origin", origin)]).0;
        assert_eq!(from("http://127.0.0.1:7070"), 200);
        for origin in ["null", "http://127.0.0.1:8080", "http://attacker.example", "ftp://x", ""] {
            assert_eq!(from(origin), 403, "{origin}");
        }
    }

    #[test]
    fn the_key_is_needed_and_nothing_but_it_does() {
        let with = |value: &str| asked(&[("authorization", value)]).1;
        assert_eq!(with("Bearer the key"), 200);
        for value in ["the key", "Bearer", "Bearer ", "Bearer the keys", "Basic the key"] {
            assert_eq!(with(value), 401, "{value}");
        }
        assert_eq!(asked(&[]).1, 401);
        let own = ("authorization", "Bearer the key");
        assert_eq!(asked(&[own, ("sec-fetch-site", "same-origin")]).1, 200);
        for site in ["same-site", "cross-site", "none"] {
            assert_eq!(asked(&[own, ("sec-fetch-site", site)]).1, 403, "{site}");
        }
    }
}
