//! Which sandbox, and which port of it, a request is for: by its headers, or by its host.

use hyper::HeaderMap;
use hyper::header::HOST;

/// Ids are so long: 128 bits in hexadecimal.
const ID_BYTES: usize = 32;

/// What a request is for.
#[derive(Debug, PartialEq, Eq)]
pub struct Address {
    pub id: String,
    pub port: u16,
}

/// `E2b-Sandbox-Id` and `E2b-Sandbox-Port`, or a host `PORT-ID.DOMAIN`, where the domain is the
/// server's own or ends with `localhost`. `None` for the server itself.
pub fn of(headers: &HeaderMap, host: Option<&str>, domain: Option<&str>) -> Option<Address> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(id) = text("e2b-sandbox-id") {
        let port = text("e2b-sandbox-port")
            .map_or(Some(crate::envd::PORT), |text| text.parse().ok().filter(|port| *port != 0));
        // One that makes no sense is nobody's.
        return Some(Address { id: id.to_owned(), port: port.unwrap_or(0) });
    }
    let host = host.or_else(|| headers.get(HOST).and_then(|value| value.to_str().ok()))?;
    let host = host.rsplit_once(':').map_or(host, |(name, port)| {
        if port.bytes().all(|byte| byte.is_ascii_digit()) { name } else { host }
    });
    let (label, rest) = host.split_once('.')?;
    let rest = rest.trim_end_matches('.').to_ascii_lowercase();
    let own = domain.map(|domain| domain.split(':').next().unwrap_or(domain).to_ascii_lowercase());
    let is_local = rest == "localhost" || rest.ends_with(".localhost");
    if !is_local && own.as_ref() != Some(&rest) {
        return None;
    }
    let (port, id) = label.split_once('-')?;
    let id = id.to_ascii_lowercase();
    let is_id = id.len() == ID_BYTES && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let port = port.parse().ok().filter(|port| *port != 0)?;
    is_id.then_some(Address { id, port })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    fn by_host(host: &str, domain: Option<&str>) -> Option<(String, u16)> {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().unwrap());
        of(&headers, None, domain).map(|address| (address.id, address.port))
    }

    #[test]
    fn a_sandbox_is_named_by_host() {
        let own = Some((ID.to_owned(), 49983));
        for host in [
            format!("49983-{ID}.localhost"),
            format!("49983-{ID}.localhost:3000"),
            format!("49983-{}.e2b.localhost.", ID.to_uppercase()),
        ] {
            assert_eq!(by_host(&host, None), own, "{host}");
        }
        let host = format!("49983-{ID}.sandbox.example.org:443");
        assert_eq!(by_host(&host, Some("Sandbox.example.org:443")), own);
        assert_eq!(by_host(&host, None), None);
        assert_eq!(by_host(&host, Some("example.org")), None);
        for host in ["localhost:3000", "api.localhost", "x-y.localhost", "1-2.localhost"] {
            assert_eq!(by_host(host, None), None, "{host}");
        }
        assert_eq!(by_host(&format!("0-{ID}.localhost"), None), None);
        assert_eq!(by_host(&format!("70000-{ID}.localhost"), None), None);
    }

    #[test]
    fn a_sandbox_is_named_by_headers() {
        let mut headers = HeaderMap::new();
        headers.insert("e2b-sandbox-id", "any".parse().unwrap());
        let of = |headers: &HeaderMap| of(headers, None, None).unwrap().port;
        assert_eq!(of(&headers), 49983);
        headers.insert("e2b-sandbox-port", "3000".parse().unwrap());
        assert_eq!(of(&headers), 3000);
        for wrong in ["0", "x", "99999", "-1"] {
            headers.insert("e2b-sandbox-port", wrong.parse().unwrap());
            assert_eq!(of(&headers), 0, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn no_host_panics(host in "[ -~]{0,100}") {
            let _ = of(&HeaderMap::new(), Some(&host), Some(&host));
        }
    }
}
