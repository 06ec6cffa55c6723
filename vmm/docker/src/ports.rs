//! Published ports: read from a request, given numbers at the start, shown.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use exocell_cell::network::{Publish, range};
use serde_json::{Value, json};

use crate::error::{ApiError, ApiResult};
use crate::wire::{HostConfig, Names, PortBinding};

/// Most ports that one container publishes.
const PORTS_MAX: usize = 256;

/// The ports that `host` publishes; `exposed` are those that the image and the
/// client name. A port that the client leaves to the server is 0, and an
/// address that it leaves out is the host's loopback.
///
/// # Errors
/// 400 for what is no port, 501 for other protocols than TCP and UDP.
pub fn published(host: &HostConfig, exposed: &Names) -> ApiResult<Vec<Publish>> {
    let mut found = Vec::new();
    for (port, bindings) in &host.port_bindings {
        let (guest_port, is_udp) = guest_port(port)?;
        let left_open = [PortBinding::default()];
        let bindings = bindings.as_deref().filter(|bindings| !bindings.is_empty());
        for binding in bindings.unwrap_or(&left_open) {
            let (ip, ports) = address(binding)?;
            let published = Publish::new((ip, 0).into(), guest_port).by_udp(is_udp);
            found.push(published.within(ports));
        }
    }
    if host.publish_all_ports {
        for port in exposed.keys().filter(|port| !host.port_bindings.contains_key(*port)) {
            let (guest_port, is_udp) = guest_port(port)?;
            let published = Publish::new((Ipv4Addr::LOCALHOST, 0).into(), guest_port);
            found.push(published.by_udp(is_udp));
        }
    }
    if found.len() > PORTS_MAX {
        return Err(ApiError::bad_request(format!("more than {PORTS_MAX} published ports")));
    }
    Ok(found)
}

/// `80/tcp`; whether it is of UDP.
fn guest_port(text: &str) -> ApiResult<(u16, bool)> {
    let (number, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let is_udp = match protocol.to_ascii_lowercase().as_str() {
        "tcp" => false,
        "udp" => true,
        _ => {
            return Err(ApiError::unsupported(
                format!("publishing {text}"),
                "ports of TCP and UDP are led into a container",
            ));
        }
    };
    match number.parse() {
        Ok(port) if port > 0 => Ok((port, is_udp)),
        _ => Err(ApiError::bad_request(format!("invalid port specification: \"{text}\""))),
    }
}

/// The host's address, and the first and the last port that it may be there.
fn address(binding: &PortBinding) -> ApiResult<(IpAddr, (u16, u16))> {
    let invalid = |what: &str| ApiError::bad_request(format!("invalid host port: \"{what}\""));
    let ip: IpAddr = match binding.host_ip.as_str() {
        "" => Ipv4Addr::LOCALHOST.into(),
        text => text.parse().map_err(|_| invalid(text))?,
    };
    let ports = range(&binding.host_port).ok_or_else(|| invalid(&binding.host_port))?;
    Ok((ip, ports))
}

/// Where clients on the host reach a container's published ports if they ask for its gateway, as
/// those in containers of their own do: the address of the first, else nothing.
pub fn gateway(publish: &[Publish]) -> String {
    let address = publish.first().map(|own| own.host.ip());
    let address =
        address.map(|ip| if ip.is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { ip });
    address.map_or_else(String::new, |ip| ip.to_string())
}

/// `NetworkSettings.Ports` of `inspect`: those that are only `exposed` lead nowhere.
pub fn settings(publish: &[Publish], exposed: &Names) -> Value {
    let mut shown: BTreeMap<String, Option<Vec<Value>>> =
        exposed.keys().map(|port| (whole(port), None)).collect();
    for own in publish {
        let Publish { host, guest_port, .. } = own;
        let binding = json!({ "HostIp": host.ip(), "HostPort": host.port().to_string() });
        let place = shown.entry(format!("{guest_port}/{}", own.protocol())).or_default();
        place.get_or_insert_default().push(binding);
    }
    json!(shown)
}

/// `Ports` of a row of the list.
pub fn row(publish: &[Publish], exposed: &Names) -> Value {
    let is_open = |port: &&str| !publish.iter().any(|own| port_of(own) == **port);
    let closed = exposed.keys().map(|port| whole(port));
    let closed = closed.filter(|port| is_open(&port.as_str())).filter_map(|port| {
        let (number, protocol) = port.split_once('/')?;
        Some(json!({ "PrivatePort": number.parse::<u16>().ok()?, "Type": protocol }))
    });
    let open = publish.iter().map(|own| {
        json!({ "IP": own.host.ip(), "PrivatePort": own.guest_port,
            "PublicPort": own.host.port(), "Type": own.protocol() })
    });
    closed.chain(open).collect()
}

fn port_of(own: &Publish) -> String {
    format!("{}/{}", own.guest_port, own.protocol())
}

/// With its protocol, which is TCP where none is said.
fn whole(port: &str) -> String {
    if port.contains('/') { port.to_owned() } else { format!("{port}/tcp") }
}

/// Whether `wanted`, a port or a range of them of a protocol, has one of `ports`.
///
/// # Errors
/// 400 for what is none.
pub fn has(wanted: &str, ports: &[String]) -> ApiResult<bool> {
    let invalid = || ApiError::bad_request(format!("invalid filter: `{wanted}` is no port"));
    let (numbers, protocol) = wanted.split_once('/').unwrap_or((wanted, "tcp"));
    let (first, last) = range(numbers).filter(|(first, _)| *first > 0).ok_or_else(invalid)?;
    let is_one = |port: &String| {
        let (number, own) = port.split_once('/').unwrap_or((port, "tcp"));
        own == protocol && number.parse().is_ok_and(|number| (first..=last).contains(&number))
    };
    Ok(ports.iter().any(is_one))
}

/// The ports that are published, as [`has`] takes them.
pub fn published_ones(publish: &[Publish]) -> Vec<String> {
    publish.iter().map(port_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(host: Value) -> ApiResult<Vec<Publish>> {
        let host: HostConfig = serde_json::from_value(host).expect("a HostConfig");
        published(&host, &Names::from([("90/tcp".to_owned(), json!({}))]))
    }

    #[test]
    fn ports_are_the_loopbacks_unless_said_otherwise() {
        let asked = json!({"PortBindings": {
            "80/tcp": [{"HostIp": "", "HostPort": "8080"}, {"HostIp": "::1", "HostPort": "1"}],
            "81": [{"HostPort": ""}], "82/tcp": null,
        }});
        let found: Vec<_> =
            read(asked).unwrap().iter().map(|p| (p.host.to_string(), p.guest_port)).collect();
        let expected =
            [("127.0.0.1:8080", 80), ("[::1]:1", 80), ("127.0.0.1:0", 81), ("127.0.0.1:0", 82)];
        assert_eq!(found, expected.map(|(host, port)| (host.to_owned(), port)));
        let all = read(json!({"PublishAllPorts": true})).unwrap();
        assert_eq!((all.len(), all[0].guest_port), (1, 90));
        assert_eq!(read(json!({})).unwrap(), []);
        let other = read(json!({"PortBindings": {"53/udp": [{"HostPort": "5300-5310"}]}})).unwrap();
        assert!(other[0].is_udp && other[0].within == Some((5300, 5310)));
        assert_eq!(settings(&other, &Names::new())["53/udp"][0]["HostPort"], "5300");
        assert_eq!(row(&other, &Names::new())[0]["Type"], "udp");
    }

    #[test]
    fn what_is_no_port_is_refused() {
        for (port, binding, status) in [
            ("80/sctp", json!([]), 501),
            ("0/tcp", json!([]), 400),
            ("x", json!([]), 400),
            ("80-90/tcp", json!([]), 400),
            ("80/tcp", json!([{"HostPort": "70000"}]), 400),
            ("80/tcp", json!([{"HostPort": "90-80"}]), 400),
            ("80/tcp", json!([{"HostIp": "here"}]), 400),
        ] {
            let error = read(json!({"PortBindings": { port: binding }})).unwrap_err();
            assert_eq!(error.status.as_u16(), status, "{port}: {error}");
        }
        let many: Vec<Value> = (0..=PORTS_MAX).map(|_| json!({})).collect();
        assert!(read(json!({"PortBindings": {"80/tcp": many}})).is_err());
    }

    #[test]
    fn open_ports_get_different_numbers() {
        let mut publish = read(json!({"PortBindings": {"80/tcp": [{}, {}]}})).unwrap();
        Publish::number_all(&mut publish).unwrap();
        let ports: Vec<u16> = publish.iter().map(|publish| publish.host.port()).collect();
        assert!(ports[0] != ports[1] && !ports.contains(&0), "{ports:?}");
        assert_eq!(
            settings(&publish, &Names::new())["80/tcp"][1]["HostPort"],
            ports[1].to_string()
        );
        let exposed = Names::from(["80/tcp", "81"].map(|port| (port.to_owned(), json!({}))));
        let shown = row(&publish, &exposed);
        assert_eq!(
            (&shown[0]["PrivatePort"], &shown[1]["PublicPort"]),
            (&json!(81), &json!(ports[0]))
        );
        assert!(settings(&publish, &exposed)["81/tcp"].is_null());
        let own = published_ones(&publish);
        assert!(has("80", &own).unwrap() && has("79-81/tcp", &own).unwrap());
        assert!(!has("80/udp", &own).unwrap() && !has("81", &own).unwrap());
        assert!(has("x", &own).is_err() && has("", &own).is_err());
    }
}
