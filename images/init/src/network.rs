//! The guest's end of its link.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use exocell_agent::{
    AUTHORITY_BUNDLE, AUTHORITY_CERTIFICATE, AUTHORITY_FOLDER, JoinedAddress, NetworkSetup,
};
use nix::mount::{MsFlags, mount};

use crate::error::{Context, InitError};
use crate::{log, own_proc, paths, root, sys};

/// How often an interface that is not there yet is looked for, a millisecond apart.
const TRIES: u32 = 1000;
/// Where distributions keep the certificates that they trust, all in one file.
const TRUSTED: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Of what an image trusts, in bytes; more does not fit.
const TRUSTED_BYTES_MAX: u64 = 4 << 20;

/// Sets the interface up as `setup` says.
pub fn set_up(setup: &NetworkSetup) -> Result<(), InitError> {
    let name = &setup.interface;
    let mut tries = 0;
    while !Path::new("/sys/class/net").join(name).exists() && tries < TRIES {
        sleep(Duration::from_millis(1));
        tries += 1;
    }
    sys::interface_up(name).context(|| format!("bringing the interface {name} up"))?;
    if let Some(mtu) = setup.mtu {
        sys::set_mtu(name, mtu).context(|| format!("the largest packet of {name}"))?;
    }
    sys::set_address_v4(name, setup.address_v4).context(|| format!("the address of {name}"))?;
    if setup.to_loopback {
        let path = format!("sys/net/ipv4/conf/{name}/route_localnet");
        own_proc::try_write(&path, "1").context(|| format!("the loopback by {name}"))?;
    }
    // A kernel may be without IPv6; IPv4 leads to the same peers.
    if !setup.address_v6.is_unspecified()
        && let Err(error) = sys::set_address_v6(name, setup.address_v6)
    {
        log::warn(format_args!("{name} has no IPv6 address: {error}"));
    }
    (0..).zip(&setup.joined).try_for_each(|(place, address)| set_joined(place, Some(*address)))
}

/// Puts what programs have to know of it into the files of this root.
pub fn show(setup: &NetworkSetup, read_only: bool) -> Result<(), InitError> {
    root::put_file("resolv.conf", &resolv_conf(setup), read_only);
    setup.authority.as_deref().map_or(Ok(()), trust)
}

/// Gives the interface the address that it has at the network at `place`, or takes that away.
/// Each is under a name of its own beside the interface's (netdevice(7), "aliases").
pub fn set_joined(place: u32, joined: Option<JoinedAddress>) -> Result<(), InitError> {
    let name = format!("eth0:{place}");
    match joined {
        None => sys::interface_down(&name).context(|| format!("taking {name} away")),
        Some(JoinedAddress { address, prefix }) => sys::set_subnet_v4(&name, address, prefix)
            .context(|| format!("the address {address}/{prefix} of {name}")),
    }
}

/// What programs read of who is asked for names.
pub fn resolv_conf(setup: &NetworkSetup) -> String {
    let mut text = format!("nameserver {}\n", setup.name_server);
    for (word, values) in [("search", &setup.search), ("options", &setup.dns_options)] {
        if !values.is_empty() {
            text.push_str(&format!("{word} {}\n", values.join(" ")));
        }
    }
    text
}

/// Puts `certificate` beside those that the image trusts. On a file system of its
/// own, so that no template takes it over.
fn trust(certificate: &str) -> Result<(), InitError> {
    fs::create_dir_all(AUTHORITY_FOLDER).context(|| AUTHORITY_FOLDER)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("tmpfs"), AUTHORITY_FOLDER, Some("tmpfs"), flags, Some("mode=755,size=8m"))
        .context(|| format!("mounting tmpfs on {AUTHORITY_FOLDER}"))?;
    // An image may trust nobody.
    let mut bundle = TRUSTED
        .iter()
        .find_map(|path| paths::read(path, TRUSTED_BYTES_MAX).ok())
        .unwrap_or_default();
    if !bundle.is_empty() && !bundle.ends_with(b"\n") {
        bundle.push(b'\n');
    }
    bundle.extend_from_slice(certificate.as_bytes());
    fs::write(AUTHORITY_CERTIFICATE, certificate).context(|| AUTHORITY_CERTIFICATE)?;
    fs::write(AUTHORITY_BUNDLE, bundle).context(|| AUTHORITY_BUNDLE)
}
