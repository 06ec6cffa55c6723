//! The host's own view of names: /etc/hosts and /etc/resolv.conf, read when
//! the cell is planned, before the dialer leaves the host's file system.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::link;

/// resolver(5): more name servers than this are not asked.
const SERVERS_MAX: usize = 3;
const DNS_PORT: u16 = 53;
/// Where the host's own services are.
const HOST: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// Which names the host knows itself, and whom it asks for others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hosts {
    known: HashMap<String, Vec<IpAddr>>,
    pub servers: Vec<SocketAddr>,
}

impl Hosts {
    /// From the files; one that is absent says nothing.
    pub fn of_host() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self::parse(&read("/etc/hosts"), &read("/etc/resolv.conf"))
    }

    /// By the texts of these files.
    pub fn parse(hosts: &str, resolv_conf: &str) -> Self {
        let mut known: HashMap<String, Vec<IpAddr>> = HashMap::new();
        for line in hosts.lines() {
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let Some(Ok(address)) = words.next().map(str::parse::<IpAddr>) else { continue };
            for name in words {
                known.entry(name.to_ascii_lowercase()).or_default().push(address);
            }
        }
        let mut servers: Vec<SocketAddr> = Vec::new();
        for line in resolv_conf.lines() {
            let mut words = line.split_whitespace();
            if words.next() == Some("nameserver")
                && let Some(Ok(address)) = words.next().map(str::parse::<IpAddr>)
            {
                servers.push(SocketAddr::new(address, DNS_PORT));
            }
        }
        servers.truncate(SERVERS_MAX);
        if servers.is_empty() {
            servers.push(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), DNS_PORT));
        }
        Self { known, servers }
    }

    /// Asks `servers` instead, where there are any.
    #[must_use]
    pub fn with_servers(self, servers: &[IpAddr]) -> Self {
        let own: Vec<_> = servers.iter().map(|ip| SocketAddr::new(*ip, DNS_PORT)).collect();
        Self { servers: if own.is_empty() { self.servers } else { own }, ..self }
    }

    /// The addresses of a name in lower case that the host knows itself.
    pub fn known(&self, name: &str) -> Option<&[IpAddr]> {
        if name == link::HOST_NAME {
            return Some(&HOST);
        }
        self.known.get(name).map(Vec::as_slice)
    }
}

#[cfg(test)]
impl Hosts {
    /// Knows nothing itself and asks `servers`.
    pub fn asking(servers: &[SocketAddr]) -> Self {
        Self { known: HashMap::new(), servers: servers.to_vec() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_read_as_the_resolver_reads_them() {
        let hosts = "127.0.0.1 localhost\n# no\n192.0.2.1 Index.test other # yes\nbad line\n\
                     2001:db8::1\tindex.test\n";
        let conf = "search x\nnameserver 192.0.2.53\nnameserver bad\nnameserver ::1\n";
        let hosts = Hosts::parse(hosts, conf);
        let both: [IpAddr; 2] = ["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()];
        assert_eq!(hosts.known("index.test"), Some(&both[..]));
        assert_eq!(hosts.known("other"), Some(&both[..1]));
        assert_eq!(hosts.known("no"), None);
        assert_eq!(hosts.known("host.docker.internal"), Some(&HOST[..]));
        assert_eq!(hosts.servers, ["192.0.2.53:53".parse().unwrap(), "[::1]:53".parse().unwrap()]);
        assert_eq!(Hosts::parse("", "").servers, ["127.0.0.1:53".parse().unwrap()]);
        let other = Hosts::default().with_servers(&["192.0.2.7".parse().unwrap()]);
        assert_eq!(other.servers, ["192.0.2.7:53".parse().unwrap()]);
        assert_eq!(other.clone().with_servers(&[]), other);
    }
}
