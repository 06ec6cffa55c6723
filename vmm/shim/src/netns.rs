//! The network of a pod: a network namespace of the host's, as CNI or docker's engine has set it up,
//! becomes the guest's.
//!
//! ```text
//! namespace: eth0, address A ── routes, filters, ARP ──> tun device ──> the guest's eth0, address A
//! ```
//! The namespace's kernel keeps A on its interface, so that it answers for A and asks as A. It only
//! loses the route by which packets to A would be its own: they go on to the guest, and what the
//! guest sends goes the ways that CNI has laid. So inbound and outbound, TCP, UDP and ICMP, and what
//! filters packets in the namespace or outside are as for any container.
//!
//! What a program in the namespace sends to 127.0.0.1 goes to the guest's loopback the same way:
//! that is how ports of a pod are forwarded.
//!
//! What is set up is asked of iproute2, and changed by it, in a thread that is in that namespace.

use std::fs::File;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use exocell_cell::agent::NetworkSetup;
use exocell_cell::vmm::jail::make_tun;
use nix::sched::{CloneFlags, setns};
use serde::Deserialize;

use crate::error::{Result, ShimError};

/// The tun device's name in the namespace, and the guest's of its own interface.
const TUN: &str = "exocell0";
const GUEST: &str = "eth0";
/// Whose packets for 127.0.0.1 come to the guest: the namespace's own, which has a program there
/// only when somebody forwards a port (CRI's PortForward). An address of the link (RFC 3927) that no
/// guest has.
const FORWARDER: &str = "169.254.77.1";

/// A network that a cell can be plugged into.
pub struct Found {
    pub setup: NetworkSetup,
    pub device: OwnedFd,
}

/// An interface, as `ip -json address` has it.
#[derive(Debug, Deserialize)]
struct Interface {
    ifname: String,
    #[serde(default)]
    mtu: u32,
    #[serde(default)]
    link_type: String,
    #[serde(default)]
    addr_info: Vec<Address>,
}

#[derive(Debug, Deserialize)]
struct Address {
    family: String,
    local: String,
    scope: String,
}

/// What the guest is to be in it.
#[derive(Debug, PartialEq)]
struct Chosen {
    interface: String,
    mtu: u32,
    v4: Vec<Ipv4Addr>,
    v6: Vec<Ipv6Addr>,
}

/// Makes the guest's end of the network of the namespace at `path`; `None` where there is nothing
/// but the loopback.
///
/// # Errors
/// It cannot be had, or is more than one interface.
pub fn find(path: &Path) -> Result<Option<Found>> {
    let namespace = File::open(path).map_err(ShimError::host(format!(
        "cannot open the network namespace {}",
        path.display()
    )))?;
    let path = path.to_owned();
    // A thread's namespace is its own, and ends with it.
    let found = std::thread::Builder::new().name("netns".to_owned()).spawn(move || {
        setns(&namespace, CloneFlags::CLONE_NEWNET)
            .map_err(ShimError::host(format!("cannot enter {}", path.display())))?;
        set_up()
    });
    let found = found.map_err(ShimError::host("cannot start a thread"))?;
    found.join().map_err(|_| ShimError::internal("the network's thread panicked"))?
}

/// Whether the network namespace at `path` is this process's: the host's.
///
/// # Errors
/// There is none.
pub fn is_own(path: &Path) -> Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let identity = |path: &Path| {
        let failed = format!("cannot open the network namespace {}", path.display());
        let found = std::fs::metadata(path).map_err(ShimError::host(failed))?;
        Ok::<_, ShimError>((found.dev(), found.ino()))
    };
    Ok(identity(path)? == identity(Path::new("/proc/self/ns/net"))?)
}

/// The namespace of process `pid` if there is more in it than a loopback.
pub fn of_process(pid: u32) -> Option<PathBuf> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap_or_default();
    let mut names = text.lines().skip(2).filter_map(|line| line.split_once(':'));
    let has_more = names.any(|(name, _)| name.trim() != "lo");
    has_more.then(|| format!("/proc/{pid}/ns/net").into())
}

fn set_up() -> Result<Option<Found>> {
    let said = ip(&["-json", "address", "show"])?;
    let interfaces: Vec<Interface> =
        serde_json::from_slice(&said).map_err(ShimError::host("cannot read what ip says"))?;
    let Some(chosen) = choose(interfaces)? else { return Ok(None) };
    let Chosen { interface, mtu, v4, v6 } = &chosen;
    let device =
        make_tun(TUN).map_err(ShimError::host("cannot make a tun device in the pod's network"))?;
    ip(&["link", "set", TUN, "mtu", &mtu.to_string(), "up"])?;
    let mut settings = vec![
        ("net/ipv4/ip_forward".to_owned(), "1"),
        (format!("net/ipv4/conf/{interface}/proxy_arp"), "1"),
        // The guest's packets come from an address that the interface has, too.
        (format!("net/ipv4/conf/{TUN}/accept_local"), "1"),
        // Both ways between the forwarder and the guest's own loopback.
        (format!("net/ipv4/conf/{TUN}/route_localnet"), "1"),
        // At once: nobody else answers.
        (format!("net/ipv4/neigh/{interface}/proxy_delay"), "0"),
    ];
    if !v6.is_empty() {
        settings.push(("net/ipv6/conf/all/forwarding".to_owned(), "1"));
        settings.push((format!("net/ipv6/conf/{interface}/proxy_ndp"), "1"));
    }
    for (name, value) in settings {
        std::fs::write(format!("/proc/sys/{name}"), value)
            .map_err(ShimError::host(format!("cannot set {name} in the pod's network")))?;
    }
    for address in v4 {
        let address = address.to_string();
        ip(&["route", "add", &address, "dev", TUN])?;
        ip(&["route", "delete", "local", &address, "table", "local"])?;
    }
    ip(&["address", "add", FORWARDER, "dev", TUN, "scope", "link"])?;
    // The namespace's own, where its loopback is up.
    let _ = ip(&["route", "delete", "local", "127.0.0.1", "table", "local"]);
    ip(&["route", "add", "127.0.0.1", "dev", TUN, "src", FORWARDER, "table", "local"])?;
    for address in v6 {
        let address = address.to_string();
        ip(&["-6", "route", "add", &address, "dev", TUN])?;
        ip(&["-6", "route", "delete", "local", &address, "table", "local"])?;
        ip(&["-6", "neighbour", "add", "proxy", &address, "dev", interface])?;
    }
    let setup = NetworkSetup {
        interface: GUEST.to_owned(),
        address_v4: v4.first().copied().unwrap_or(Ipv4Addr::UNSPECIFIED),
        address_v6: v6.first().copied().unwrap_or(Ipv6Addr::UNSPECIFIED),
        mtu: u16::try_from(*mtu).ok().filter(|mtu| *mtu > 0),
        joined: Vec::new(),
        // Whoever made the network says who is asked for names, in a file that is bound.
        name_server: Ipv4Addr::UNSPECIFIED,
        search: Vec::new(),
        dns_options: Vec::new(),
        authority: None,
        to_loopback: true,
    };
    Ok(Some(Found { setup, device }))
}

/// The one interface with addresses.
fn choose(interfaces: Vec<Interface>) -> Result<Option<Chosen>> {
    let mut chosen: Option<Chosen> = None;
    for own in interfaces.into_iter().filter(|own| own.link_type != "loopback") {
        let global = || own.addr_info.iter().filter(|address| address.scope == "global");
        let of = |family: &'static str| global().filter(move |address| address.family == family);
        let v4: Vec<Ipv4Addr> = of("inet").filter_map(|own| own.local.parse().ok()).collect();
        let v6: Vec<Ipv6Addr> = of("inet6").filter_map(|own| own.local.parse().ok()).collect();
        if v4.is_empty() && v6.is_empty() {
            continue;
        }
        if v4.is_empty() || v4.len() > 1 || v6.len() > 1 {
            return Err(ShimError::invalid(format!(
                "the pod's interface {} has {} IPv4 and {} IPv6 addresses; a cell has one of IPv4, \
                 and one or none of IPv6",
                own.ifname,
                v4.len(),
                v6.len()
            )));
        }
        if let Some(other) = &chosen {
            return Err(ShimError::invalid(format!(
                "the pod has the interfaces {} and {}; a cell has one",
                other.interface, own.ifname
            )));
        }
        chosen = Some(Chosen { interface: own.ifname, mtu: own.mtu, v4, v6 });
    }
    Ok(chosen)
}

/// Runs iproute2 in this thread's namespace; what it says.
fn ip(arguments: &[&str]) -> Result<Vec<u8>> {
    let search = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("ip")
        .args(arguments)
        .env("PATH", format!("{search}:/usr/sbin:/sbin"))
        .stdin(Stdio::null())
        .output()
        .map_err(ShimError::host("cannot run ip (the package iproute2)"))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(ShimError::internal(format!(
            "ip {} in the pod's network: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chosen(interfaces: serde_json::Value) -> Result<Option<Chosen>> {
        choose(serde_json::from_value(interfaces).unwrap())
    }

    #[test]
    fn the_one_interface_with_addresses_is_the_guests() {
        let lo = json!({ "ifname": "lo", "link_type": "loopback", "addr_info": [
            { "family": "inet", "local": "127.0.0.1", "scope": "host" },
        ]});
        let eth0 = json!({ "ifname": "eth0", "link_type": "ether", "mtu": 1450, "addr_info": [
            { "family": "inet", "local": "10.1.0.5", "scope": "global" },
            { "family": "inet6", "local": "fe80::1", "scope": "link" },
        ]});
        assert_eq!(chosen(json!([lo])).unwrap(), None);
        let found = chosen(json!([lo, eth0])).unwrap().unwrap();
        let address = Ipv4Addr::new(10, 1, 0, 5);
        assert_eq!((found.mtu, found.v4.as_slice(), found.v6.len()), (1450, &[address][..], 0));
        let mut second = eth0.clone();
        second["ifname"] = json!("net1");
        let error = chosen(json!([eth0, second])).unwrap_err().to_string();
        assert!(error.contains("eth0") && error.contains("net1"), "{error}");
    }
}
