//! The roots of containers in a depot: directories of the host, all of which one device holds.
//!
//! ```text
//! first root ── /depot ── NAME ┬─ root: becomes the container's root
//!                              └─ other names: what its specification binds, files and directories
//! ```
//! The directory `NAME` is the host's to fill: programs see what is mounted of it, and no path leads
//! them to the rest. What is bound is taken before the root is switched, after which the depot lies
//! nowhere.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};

use exocell_agent::oci::Spec;
use exocell_agent::{DEPOT_ROOT, NetworkSetup};
use nix::fcntl::OFlag;
use nix::mount::{MsFlags, mount};
use nix::unistd::syncfs;
use rustix::fs::{Mode, OFlags, openat};

use crate::error::{Context, InitError};
use crate::root::{Cell, DEPOT, switch_to};
use crate::{dev, mounting, network};

const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Mounts that lie nowhere, by the names that the specification has for them.
pub type Binds = BTreeMap<String, File>;

/// Whether something of a depot can be called so.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Makes `name` of the depot the root of this thread, which is in a mount namespace of its own and
/// in the first root; what `spec` binds.
pub fn enter(name: &str, spec: &Spec, network: Option<&NetworkSetup>) -> Result<Binds, InitError> {
    let home = format!("{}/{name}", DEPOT.trim_start_matches('/'));
    let mut binds = Binds::new();
    for wanted in spec.mounts.iter().filter(|mount| mount.is_bind()) {
        let source = wanted.source.as_str();
        if !is_name(source) || source == DEPOT_ROOT {
            return Err(InitError::invalid(format!("nothing of the depot is called {source:?}")));
        }
        let path = format!("{home}/{source}");
        let taken = open_path(&path).and_then(|found| mounting::copy(found, true));
        binds.insert(source.to_owned(), taken.context(|| format!("taking {path}"))?);
    }
    let root = format!("{home}/{DEPOT_ROOT}");
    let (none, bind) = (None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC);
    mount(Some(root.as_str()), root.as_str(), none, bind, none)
        .and_then(|()| switch_to(&root))
        .context(|| "switching to the container's root")?;
    dev::mount_in_depot()?;
    let is_given = spec.mounts.iter().any(|mount| mount.destination == RESOLV_CONF);
    if let (Some(setup), false) = (network, is_given) {
        cover(RESOLV_CONF, &network::resolv_conf(setup))?;
    }
    Ok(binds)
}

fn open_path(path: &str) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(rustix::fs::CWD, path, flags, Mode::empty())?.into())
}

/// Has a file in memory lie on `path`, so that the root's own stays as it is.
fn cover(path: &str, content: &str) -> Result<(), InitError> {
    const NAME: &str = "file";
    let points = crate::paths::MountPoints::new(None).context(|| "the root")?;
    let place = points.file(path)?;
    let show = || -> io::Result<()> {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let memory = mounting::make("tmpfs", "tmpfs", flags, "size=64k,mode=755")?;
        let made = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        let mut file = File::from(openat(&memory, NAME, made, mode)?);
        file.write_all(content.as_bytes())?;
        let found = openat(&memory, NAME, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        mounting::put(&mounting::copy(found, false)?, &place)
    };
    show().context(|| format!("covering {path}"))
}

/// Has the host get all that programs have written to the depot.
pub fn flush(cell: &Cell) {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let name = DEPOT.trim_start_matches('/');
    let opened = nix::fcntl::openat(&cell.bottom, name, flags, nix::sys::stat::Mode::empty());
    if let Err(error) = opened.and_then(syncfs) {
        crate::log::warn(format_args!("the depot is not flushed: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_a_depot_leads_nowhere_else() {
        for bad in ["", ".", "..", "a/b", "/etc", "m 1"] {
            assert!(!is_name(bad), "{bad:?}");
        }
        assert!(is_name("m1") && is_name(DEPOT_ROOT));
    }
}
