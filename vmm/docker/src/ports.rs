//! Published ports: read from a request, given numbers at the start, shown.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use exocell_cell::network::Publish;
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
/// 400 for what is no port, 501 for other protocols than TCP.
pub fn published(host: &HostConfig, exposed: &Names) -> ApiResult<Vec<Publish>> {
    let mut found = Vec::new();
    for (port, bindings) in &host.port_bindings {
        let guest_port = guest_port(port)?;
        let left_open = [PortBinding::default()];
        let bindings = bindings.as_deref().filter(|bindings| !bindings.is_empty());
        for binding in bindings.unwrap_or(&left_open) {
            found.push(Publish::new(address(binding)?, guest_port));
        }
    }
    if host.publish_all_ports {
        for port in exposed.keys().filter(|port| !host.port_bindings.contains_key(*port)) {
            let guest_port = guest_port(port)?;
            found.push(Publish::new((Ipv4Addr::LOCALHOST, 0).into(), guest_port));
        }
    }
    if found.len() > PORTS_MAX {
        return Err(ApiError::bad_request(format!("more than {PORTS_MAX} published ports")));
    }
    Ok(found)
}

/// `80/tcp`
fn guest_port(text: &str) -> ApiResult<u16> {
    let (number, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    if protocol != "tcp" {
        return Err(ApiError::unsupported(
            format!("publishing {text}"),
            "only TCP ports are led into a cell",
        ));
    }
    match number.parse() {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(ApiError::bad_request(format!("invalid port specification: \"{text}\""))),
    }
}

fn address(binding: &PortBinding) -> ApiResult<SocketAddr> {
    let invalid = |what: &str| ApiError::bad_request(format!("invalid host port: \"{what}\""));
    let ip: IpAddr = match binding.host_ip.as_str() {
        "" => Ipv4Addr::LOCALHOST.into(),
        text => text.parse().map_err(|_| invalid(text))?,
    };
    let port = match binding.host_port.as_str() {
        "" => 0,
        text => text.parse().map_err(|_| invalid(text))?,
    };
    Ok((ip, port).into())
}

/// `NetworkSettings.Ports` of `inspect`.
pub fn settings(publish: &[Publish]) -> Value {
    let mut shown: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for Publish { host, guest_port, .. } in publish {
        let binding = json!({ "HostIp": host.ip(), "HostPort": host.port().to_string() });
        shown.entry(format!("{guest_port}/tcp")).or_default().push(binding);
    }
    json!(shown)
}

/// `Ports` of a row of the list.
pub fn row(publish: &[Publish]) -> Value {
    let shown = publish.iter().map(|Publish { host, guest_port, .. }| {
        json!({ "IP": host.ip(), "PrivatePort": guest_port, "PublicPort": host.port(),
            "Type": "tcp" })
    });
    shown.collect()
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
    }

    #[test]
    fn what_is_no_port_is_refused() {
        for (port, binding, status) in [
            ("80/udp", json!([]), 501),
            ("0/tcp", json!([]), 400),
            ("x", json!([]), 400),
            ("80-90/tcp", json!([]), 400),
            ("80/tcp", json!([{"HostPort": "70000"}]), 400),
            ("80/tcp", json!([{"HostPort": "80-90"}]), 400),
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
        assert_eq!(settings(&publish)["80/tcp"][1]["HostPort"], ports[1].to_string());
        assert_eq!(row(&publish)[0]["PublicPort"], ports[0]);
    }
}
