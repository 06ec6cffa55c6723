//! The guest's end of its link.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use exocell_agent::NetworkSetup;

use crate::error::{Context, InitError};
use crate::{log, root, sys};

/// How often an interface that is not there yet is looked for, a millisecond apart.
const TRIES: u32 = 1000;

/// Sets the interface up as `setup` says, and names the server for names.
pub fn set_up(setup: &NetworkSetup, read_only: bool) -> Result<(), InitError> {
    let name = &setup.interface;
    let mut tries = 0;
    while !Path::new("/sys/class/net").join(name).exists() && tries < TRIES {
        sleep(Duration::from_millis(1));
        tries += 1;
    }
    sys::interface_up(name).context(|| format!("bringing the interface {name} up"))?;
    sys::set_address_v4(name, setup.address_v4).context(|| format!("the address of {name}"))?;
    // A kernel may be without IPv6; IPv4 leads to the same peers.
    if let Err(error) = sys::set_address_v6(name, setup.address_v6) {
        log::warn(format_args!("{name} has no IPv6 address: {error}"));
    }
    root::put_file("resolv.conf", &format!("nameserver {}\n", setup.name_server), read_only);
    Ok(())
}
