//! Ports of the host that lead into a cell: read, given numbers, opened.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use exocell_xgate::NetworkScope;
use serde::{Deserialize, Serialize};

use crate::CellError;

/// Ports that one text names at most.
const RANGE_MAX: u16 = 1024;
/// How long a port may still be that of a cell which has ended: its processes are gone a moment
/// after its record is let go. And how soon it is tried again.
const ENDED_CELL_MAX: Duration = Duration::from_secs(1);
const ENDED_CELL_LOOK: Duration = Duration::from_millis(20);

/// A port of the host that leads to one of the cell: `[[ADDRESS:]PORTS:]PORT[/udp]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Publish {
    pub host: SocketAddr,
    pub guest_port: u16,
    /// Whether the host's port is any that was free: at another start another will do.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_any: bool,
    /// Whether it is of UDP; else it is of TCP.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_udp: bool,
    /// The first and the last of the host's ports that it may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<(u16, u16)>,
}

/// Ports `80` or `80-90`, the last included; 0, or nothing, is any. `None` for what is neither.
#[must_use]
pub fn range(text: &str) -> Option<(u16, u16)> {
    let number = |text: &str| text.parse::<u16>().ok();
    match text.split_once('-') {
        None if text.is_empty() => Some((0, 0)),
        None => number(text).map(|port| (port, port)),
        Some((first, last)) => match (number(first)?, number(last)?) {
            (first @ 1.., last) if first <= last => Some((first, last)),
            _ => None,
        },
    }
}

/// What a port of the host is listened at with.
pub(super) enum Listening {
    Streams(TcpListener),
    Datagrams(UdpSocket),
}

impl Publish {
    /// Port 0 of the host is any that is free.
    #[must_use]
    pub fn new(host: SocketAddr, guest_port: u16) -> Self {
        Self { host, guest_port, is_any: host.port() == 0, is_udp: false, within: None }
    }

    /// The same by UDP.
    #[must_use]
    pub fn by_udp(self, is_udp: bool) -> Self {
        Self { is_udp, ..self }
    }

    /// The same at the first free one of the host's ports `first` to `last`.
    #[must_use]
    pub fn within(self, (first, last): (u16, u16)) -> Self {
        let host = SocketAddr::new(self.host.ip(), first);
        match first == last {
            true => Self { host, is_any: first == 0, ..self },
            false => Self { host, is_any: true, within: Some((first, last)), ..self },
        }
    }

    /// Reads `8080:80`, `0.0.0.0:8080:80`, `[::1]:8080:80`, `80`, `53:53/udp`, `8000-8010:80` or
    /// `8000-8002:80-82`; without an address it is the host's loopback, and without a port of the
    /// host, or with 0, any that is free. Of a range for one port of the cell it is the first that
    /// is free.
    ///
    /// # Errors
    /// It is none of these.
    pub fn read(text: &str) -> Result<Vec<Self>, String> {
        let wrong = || {
            format!(
                "`{text}` is not [[ADDRESS:]HOST_PORTS:]CELL_PORTS[/tcp|/udp], like 8080:80 or \
                 8000-8010:80"
            )
        };
        let (bare, is_udp) = match text.rsplit_once('/') {
            None => (text, false),
            Some((bare, "tcp")) => (bare, false),
            Some((bare, "udp")) => (bare, true),
            Some(_) => return Err(wrong()),
        };
        let (front, guest) = bare.rsplit_once(':').unwrap_or(("", bare));
        let (address, ports) = match front.rsplit_once(':') {
            Some((address, ports)) => {
                let address = address.trim_start_matches('[').trim_end_matches(']');
                (address.parse::<IpAddr>().map_err(|_| wrong())?, ports)
            }
            None => (Ipv4Addr::LOCALHOST.into(), front),
        };
        let (guest_first, guest_last) = range(guest).ok_or_else(wrong)?;
        let (first, last) = range(ports).ok_or_else(wrong)?;
        let count = guest_last - guest_first;
        if guest_first == 0 || count >= RANGE_MAX || last - first >= RANGE_MAX {
            return Err(wrong());
        }
        let at = |port| SocketAddr::new(address, port);
        let one = |host, guest_port| Self::new(at(host), guest_port).by_udp(is_udp);
        match (count, last - first) {
            (0, _) => Ok(vec![one(first, guest_first).within((first, last))]),
            (_, _) if first == 0 => Ok((guest_first..=guest_last).map(|own| one(0, own)).collect()),
            (count, hosts) if count == hosts => {
                Ok((first..=last).zip(guest_first..).map(|(host, own)| one(host, own)).collect())
            }
            _ => Err(format!("`{text}`: the ranges are of different lengths")),
        }
    }

    /// `tcp` or `udp`.
    #[must_use]
    pub fn protocol(&self) -> &'static str {
        if self.is_udp { "udp" } else { "tcp" }
    }

    /// Gives each port that may be any a free one: the one that it had, where that is free. Another
    /// program may take it before the cell does; then the start fails and says so.
    ///
    /// # Errors
    /// [`CellError::Host`] where an address has no free port, or is not this host's.
    pub fn number_all(published: &mut [Self]) -> Result<(), CellError> {
        // Held until all have one: no two are the same.
        let mut held = Vec::new();
        for one in published.iter_mut().filter(|one| one.is_any || one.host.port() == 0) {
            one.is_any = true;
            let ip = one.host.ip();
            let (tried, shown) = match one.within {
                None => (0..=0, ip.to_string()),
                Some((first, last)) => (first..=last, format!("{ip}:{first}-{last}")),
            };
            let (mut free, mut error) = (one.bind(one.host), None);
            for port in tried {
                match free {
                    Ok(_) => break,
                    Err(before) => error.get_or_insert(before),
                };
                free = one.bind(SocketAddr::new(ip, port));
            }
            let failed = format!("cannot publish a port: none of {shown} is free");
            let (host, listening) = free.map_err(CellError::host(failed))?;
            one.host = host;
            held.push(listening);
        }
        Ok(())
    }

    fn bind(&self, at: SocketAddr) -> io::Result<(SocketAddr, Listening)> {
        Ok(match self.is_udp {
            true => {
                let socket = UdpSocket::bind(at)?;
                (socket.local_addr()?, Listening::Datagrams(socket))
            }
            false => {
                let listener = TcpListener::bind(at)?;
                (listener.local_addr()?, Listening::Streams(listener))
            }
        })
    }

    /// Opens it, if `scope` permits that.
    pub(super) fn listen(&self, scope: &NetworkScope) -> Result<Listening, CellError> {
        let guest_port = self.guest_port;
        if !scope.listen.iter().any(|ports| ports.permits(guest_port)) {
            return Err(CellError::Usage(format!(
                "port {guest_port} may not be published; add it to network.listen of the table"
            )));
        }
        let by = if self.is_udp { " by UDP" } else { "" };
        let failed = || CellError::host(format!("cannot listen on {}{by} (--publish)", self.host));
        let until = Instant::now() + ENDED_CELL_MAX;
        let (_, listening) = loop {
            match self.bind(self.host) {
                Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < until => {
                    std::thread::sleep(ENDED_CELL_LOOK);
                }
                bound => break bound.map_err(failed())?,
            }
        };
        match &listening {
            Listening::Streams(listener) => {
                listener.set_nonblocking(true).map_err(failed())?;
                // Its callers' sockets take that over.
                exocell_network::dialer::sys::bound(listener, false).map_err(failed())?;
            }
            Listening::Datagrams(socket) => socket.set_nonblocking(true).map_err(failed())?,
        }
        Ok(listening)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(texts: &[&str]) -> Vec<Publish> {
        texts.iter().flat_map(|text| Publish::read(text).unwrap()).collect()
    }

    #[test]
    fn a_port_of_a_cell_that_ends_is_waited_for() {
        let scope = NetworkScope { listen: vec!["80".parse().unwrap()], ..NetworkScope::default() };
        let ending = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = ending.local_addr().unwrap().port();
        let [publish] = &all(&[&format!("{port}:80")])[..] else { panic!("one") };
        std::thread::scope(|scope_of_threads| {
            scope_of_threads.spawn(move || {
                std::thread::sleep(ENDED_CELL_LOOK * 2);
                drop(ending);
            });
            publish.listen(&scope).unwrap();
        });
    }

    #[test]
    fn a_port_that_may_be_any_is_another_where_it_is_taken() {
        let mut published = all(&["80", "81"]);
        Publish::number_all(&mut published).unwrap();
        let [first, second] = [published[0].host, published[1].host];
        assert!(first.port() != 0 && second.port() != 0 && first != second);
        let _taken = TcpListener::bind(first).unwrap();
        Publish::number_all(&mut published).unwrap();
        assert!(published[0].host != first && published[1].host == second, "{published:?}");
        let mut named = all(&[&format!("{}:80", first.port())]);
        Publish::number_all(&mut named).unwrap();
        assert_eq!(named[0].host, first, "whoever names a port wants that one");
    }

    #[test]
    fn of_a_range_it_is_the_first_that_is_free() {
        // Whoever has it is gone, and so it is free.
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let first = free.min(65_000);
        let text = format!("{first}-{}:80", first + 400);
        let mut published = all(&[&text, &text, &format!("{text}/udp")]);
        Publish::number_all(&mut published).unwrap();
        let ports: Vec<u16> = published.iter().map(|own| own.host.port()).collect();
        assert!(ports.iter().all(|port| (first..=first + 400).contains(port)), "{ports:?}");
        assert!(ports[0] < ports[1] && ports[2] >= first, "{ports:?}");
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let only = Publish::new(taken.local_addr().unwrap(), 80);
        let mut only = [Publish { is_any: true, within: Some((port, port)), ..only }];
        let refused = Publish::number_all(&mut only).unwrap_err().to_string();
        assert!(refused.contains(&format!("none of 127.0.0.1:{port}-{port} is free")), "{refused}");
    }

    #[test]
    fn ports_are_published_on_the_loopback_unless_said_otherwise() {
        for (text, host, guest_port) in [
            ("8080:80", "127.0.0.1:8080", 80),
            ("0.0.0.0:8080:80", "0.0.0.0:8080", 80),
            ("[::1]:0:80/tcp", "[::1]:0", 80),
            ("127.0.0.1::80", "127.0.0.1:0", 80),
            ("80", "127.0.0.1:0", 80),
        ] {
            let host = host.parse().unwrap();
            assert_eq!(Publish::read(text), Ok(vec![Publish::new(host, guest_port)]), "{text}");
        }
        let udp = all(&["5353:53/udp"]);
        assert!(udp[0].is_udp && udp[0].guest_port == 53 && udp[0].protocol() == "udp");
        let pairs: Vec<_> = all(&["8000-8002:80-82", "90-91"])
            .iter()
            .map(|own| (own.host.port(), own.guest_port))
            .collect();
        assert_eq!(pairs, [(8000, 80), (8001, 81), (8002, 82), (0, 90), (0, 91)]);
        assert_eq!(all(&["8000-8010:80"])[0].within, Some((8000, 8010)));
        for text in [
            "x",
            "x:80",
            "80:0",
            "80:x",
            "host:80:80",
            "80:80/sctp",
            "",
            "90-80:80",
            "1-2:80-82",
            "0-9:80",
            "1-65535:80",
        ] {
            assert!(Publish::read(text).is_err(), "{text}");
        }
    }
}
