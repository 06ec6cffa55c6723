//! What a worker is given once and for all: folders, models, places for logs.
//!
//! A jail cannot be opened later, so a worker whose modules want something else is replaced.

use exocell_cell::Layout;
use exocell_cell::images::walk::Found;
use exocell_cell::vmm::jail::stage::Shown;
use exocell_cell::xgate::{CapabilitySet, Rights};
use std::collections::BTreeMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Files and folders of the host by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outfit {
    seen: BTreeMap<PathBuf, Seen>,
    /// Whether there is a folder whose changes a tenant sees privately.
    pub has_layers: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    writable: bool,
    /// Another file of the same name is another file.
    identity: Identity,
}

/// Device, number and, of a file, its length and times.
type Identity = (u64, u64, u64, i64, i64);

impl Outfit {
    /// Takes what a module of this name is granted. What is not there now is missing when the
    /// module is called, which says so.
    pub fn add(&mut self, layout: &Layout, name: &str, caps: &CapabilitySet) {
        for folder in caps.folders() {
            self.see(&folder.host, folder.rights.contains(Rights::WRITE));
            self.has_layers |= folder.rights.contains(Rights::OVERLAY);
        }
        for model in caps.models() {
            self.see(&model.file, false);
        }
        if has_network(caps) {
            self.see(&log_of(layout, name), true);
        }
    }

    /// A path without links, as tables are kept: one that is there now was made by a module.
    fn see(&mut self, path: &Path, writable: bool) {
        let Some(found) = Found::real(path).ok().filter(|found| !found.metadata().is_symlink())
        else {
            return;
        };
        let identity = identity(found.metadata());
        let seen = self.seen.entry(path.to_owned()).or_insert(Seen { writable, identity });
        seen.writable |= writable;
    }

    /// Whether a worker that has this has all of `wanted` too.
    pub fn covers(&self, wanted: &Self) -> bool {
        let covers = |(path, wanted): (&PathBuf, &Seen)| {
            self.seen.get(path).is_some_and(|own| {
                own.identity == wanted.identity && (own.writable || !wanted.writable)
            })
        };
        wanted.seen.iter().all(covers)
    }

    /// Parents before what is below them.
    pub fn shown(&self) -> Vec<Shown> {
        let shown = |(path, seen): (&PathBuf, &Seen)| Shown {
            path: path.clone(),
            writable: seen.writable,
            follows: false,
        };
        self.seen.iter().map(shown).collect()
    }
}

fn identity(metadata: &Metadata) -> Identity {
    let (dev, ino) = (metadata.dev(), metadata.ino());
    match metadata.is_file() {
        true => (dev, ino, metadata.len(), metadata.mtime(), metadata.mtime_nsec()),
        false => (dev, ino, 0, 0, 0),
    }
}

/// Whether anything of the network is granted.
pub fn has_network(caps: &CapabilitySet) -> bool {
    caps.network().is_some_and(|scope| scope.grants_anything())
}

/// Where it is written down whom a module of this name talked to.
pub fn log_of(layout: &Layout, name: &str) -> PathBuf {
    layout.networks().join(name)
}
