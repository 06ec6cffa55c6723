//! Who a URL leads to, and who may be told a password.

use std::fmt;
use std::net::IpAddr;

use ureq::http::Uri;

/// Scheme, host and port: what another of is somebody else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    scheme: String,
    host: String,
    port: u16,
}

impl Place {
    /// `None` where there is no host, and where a URL brings a user of its own.
    pub fn of(uri: &Uri) -> Option<Self> {
        let authority = uri.authority()?;
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let port = match (authority.port_u16(), &*scheme) {
            (Some(port), "http" | "https") => port,
            (None, "http") => 80,
            (None, "https") => 443,
            _ => return None,
        };
        let host = authority.host().trim_end_matches('.').to_ascii_lowercase();
        (!host.is_empty() && !authority.as_str().contains('@')).then_some(Self {
            scheme,
            host,
            port,
        })
    }

    pub fn is_encrypted(&self) -> bool {
        self.scheme == "https"
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    /// Whether a login server here may have a password for `registry`.
    pub fn logs_in_for(&self, registry: &Self, others: &[String]) -> bool {
        self.host == registry.host
            || is_below(&self.host, &registry.host)
            || domain(&registry.host)
                .is_some_and(|domain| self.host == domain || is_below(&self.host, domain))
            || others.iter().any(|other| other.eq_ignore_ascii_case(&self.host))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}:{}", self.scheme, self.host, self.port)
    }
}

/// The domain that `host` is in, if that is somebody's: it has two labels at least, and an address
/// is in none. It may be one that many share; but it is the registry that names its login server,
/// and it has the password for the asking.
fn domain(host: &str) -> Option<&str> {
    let (_, domain) = host.split_once('.').filter(|_| !is_address(host))?;
    domain.contains('.').then_some(domain)
}

fn is_below(host: &str, domain: &str) -> bool {
    !is_address(domain)
        && host.strip_suffix(domain).is_some_and(|label| label.len() > 1 && label.ends_with('.'))
}

fn address(host: &str) -> Option<IpAddr> {
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

fn is_address(host: &str) -> bool {
    address(host).is_some()
}

/// Whether `HOST` or `HOST:PORT` is this machine.
pub(super) fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.parse::<u16>().is_ok() => name,
        _ => host,
    };
    name == "localhost" || address(name).is_some_and(|address| address.is_loopback())
}

/// What a `Location` that came from `base` means (RFC 3986 section 5.2; dots in a path are left
/// to the server).
pub(super) fn resolve(base: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next()?;
    let (scheme, authority) = (base.scheme_str()?, base.authority()?);
    if location.split(['/', '?']).next()?.contains(':') {
        return location.parse().ok();
    }
    if location.starts_with("//") {
        return format!("{scheme}:{location}").parse().ok();
    }
    if location.starts_with('/') {
        return format!("{scheme}://{authority}{location}").parse().ok();
    }
    if location.starts_with('?') {
        return format!("{scheme}://{authority}{}{location}", base.path()).parse().ok();
    }
    let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    format!("{scheme}://{authority}{folder}/{location}").parse().ok()
}

/// `text` with more in its query.
pub(super) fn with_query<'a>(
    text: &str,
    parts: impl Iterator<Item = (&'a str, &'a str)>,
) -> Option<Uri> {
    let mut whole = text.split('#').next()?.to_owned();
    for (name, value) in parts {
        whole.push(if whole.contains('?') { '&' } else { '?' });
        whole.push_str(name);
        whole.push('=');
        for byte in value.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    whole.push(char::from(byte));
                }
                _ => whole.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    whole.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> Option<Place> {
        Place::of(&text.parse().ok()?)
    }

    #[test]
    fn only_loopback_is_plain() {
        for host in ["localhost", "localhost:5000", "127.0.0.1:1", "[::1]:5000"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example.com", "127.0.0.1.example.com", "10.0.0.1:5000"] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn a_place_is_scheme_host_and_port() {
        assert_eq!(place("https://A.example/x"), place("https://a.example.:443/y"));
        assert_ne!(place("https://a.example/"), place("http://a.example:443/"));
        for text in ["https://u@a.example/", "https://u:p@a.example/", "ftp://a/", "/x", "a:1"] {
            assert_eq!(place(text), None, "{text}");
        }
    }

    #[test]
    fn passwords_go_to_the_registry_and_its_own_login_server() {
        let may = |server: &str, registry: &str| {
            let others = ["Login.other.example".to_owned()];
            let server = place(&format!("https://{server}/token")).unwrap();
            server.logs_in_for(&place(&format!("https://{registry}")).unwrap(), &others)
        };
        for (server, registry) in [
            ("ghcr.io", "ghcr.io"),
            ("auth.docker.io", "registry-1.docker.io"),
            ("gitlab.com", "registry.gitlab.com"),
            ("gitlab.corp.example:8443", "registry.corp.example"),
            ("auth.quay.io", "quay.io"),
            ("127.0.0.1:5001", "127.0.0.1:5000"),
            ("login.other.example", "ghcr.io"),
        ] {
            assert!(may(server, registry), "{server} for {registry}");
        }
        for (server, registry) in [
            ("evil.example", "ghcr.io"),
            ("evil.io", "ghcr.io"),
            ("evilghcr.io", "ghcr.io"),
            ("ghcr.io.evil.example", "ghcr.io"),
            ("127.0.0.2:5102", "127.0.0.1:5101"),
            ("10.0.0.1", "20.0.0.1"),
            ("x.localhost", "y"),
        ] {
            assert!(!may(server, registry), "{server} for {registry}");
        }
    }

    #[test]
    fn locations_are_relative_or_whole() {
        let base = "https://a.example/v2/x/blobs/1?q".parse().unwrap();
        for (location, whole) in [
            ("https://b.example/y#z", "https://b.example/y"),
            ("//b.example/y", "https://b.example/y"),
            ("/y?u=c:d", "https://a.example/y?u=c:d"),
            ("?y", "https://a.example/v2/x/blobs/1?y"),
            ("y", "https://a.example/v2/x/blobs/y"),
        ] {
            assert_eq!(resolve(&base, location).unwrap().to_string(), whole);
        }
        let query = [("scope", "repository:a/b:pull"), ("service", "s&t=u")];
        let with = with_query("https://a.example/t?x=1", query.into_iter()).unwrap();
        let whole = "https://a.example/t?x=1&scope=repository%3Aa%2Fb%3Apull&service=s%26t%3Du";
        assert_eq!(with.to_string(), whole);
    }
}
