//! The one table of what a module may import, and what each name needs.
//!
//! Names and signatures are those of WASI preview 1 (`wasi_snapshot_preview1.witx`).

use exocell_xgate::{CapabilitySet, Kind};

/// The only module name that imports may have.
pub(crate) const MODULE: &str = "wasi_snapshot_preview1";

/// How far a call reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// It acts on the isolate itself; no capability is needed.
    Own,
    /// It acts on something that a capability stands for.
    Granted,
}

/// What a call does to the world outside the isolate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing is learned and nothing changes.
    Pure,
    /// Something outside is learned.
    Read,
    /// Something outside changes.
    Write,
    /// A peer outside is reached.
    Crossing,
}

/// One importable name.
#[derive(Debug)]
pub struct Import {
    /// The function's name.
    pub name: &'static str,
    /// How far it reaches.
    pub tier: Tier,
    /// What it does outside.
    pub effect: Effect,
    /// The kinds of which at least one must be granted; none are needed if this is empty.
    pub needs: &'static [Kind],
    /// Which arguments are descriptors.
    pub(crate) descriptors: &'static [usize],
}

impl Import {
    /// Every importable name.
    #[must_use]
    pub fn all() -> &'static [Import] {
        IMPORTS
    }

    /// Finds a name.
    #[must_use]
    pub fn find(module: &str, name: &str) -> Option<&'static Import> {
        IMPORTS.iter().find(|import| module == MODULE && import.name == name)
    }

    /// Whether `caps` grants what it needs.
    #[must_use]
    pub fn is_granted(&self, caps: &CapabilitySet) -> bool {
        self.needs.is_empty() || self.needs.iter().any(|kind| caps.grants(*kind))
    }

    /// The kinds it needs, in words.
    #[must_use]
    pub fn needs_text(&self) -> String {
        let names: Vec<&str> = self.needs.iter().map(|kind| kind.name()).collect();
        names.join(" or ")
    }
}

const FILES: &[Kind] = &[Kind::Folder];
const STREAMS: &[Kind] = &[Kind::Stdio, Kind::Folder];
const CLOCK: &[Kind] = &[Kind::Clock];
const RANDOM: &[Kind] = &[Kind::Random];
const SOCKETS: &[Kind] = &[Kind::Network];

const fn own(name: &'static str, descriptors: &'static [usize]) -> Import {
    Import { name, tier: Tier::Own, effect: Effect::Pure, needs: &[], descriptors }
}

const fn granted(
    name: &'static str,
    effect: Effect,
    needs: &'static [Kind],
    descriptors: &'static [usize],
) -> Import {
    Import { name, tier: Tier::Granted, effect, needs, descriptors }
}

use Effect::{Crossing, Pure, Read, Write};

static IMPORTS: &[Import] = &[
    own("args_get", &[]),
    own("args_sizes_get", &[]),
    own("environ_get", &[]),
    own("environ_sizes_get", &[]),
    own("proc_exit", &[]),
    own("proc_raise", &[]),
    own("sched_yield", &[]),
    // Closing and describing what is held gives nothing that was not there.
    own("fd_close", &[]),
    own("fd_fdstat_get", &[]),
    own("fd_fdstat_set_flags", &[]),
    own("fd_fdstat_set_rights", &[]),
    own("fd_prestat_get", &[]),
    own("fd_prestat_dir_name", &[]),
    own("fd_renumber", &[]),
    own("fd_tell", &[]),
    granted("clock_res_get", Read, CLOCK, &[]),
    granted("clock_time_get", Read, CLOCK, &[]),
    granted("poll_oneoff", Read, CLOCK, &[]),
    granted("random_get", Read, RANDOM, &[]),
    granted("fd_read", Read, STREAMS, &[0]),
    granted("fd_write", Write, STREAMS, &[0]),
    granted("fd_seek", Pure, STREAMS, &[0]),
    granted("fd_filestat_get", Read, STREAMS, &[0]),
    granted("fd_advise", Pure, FILES, &[0]),
    granted("fd_allocate", Write, FILES, &[0]),
    granted("fd_datasync", Write, FILES, &[0]),
    granted("fd_filestat_set_size", Write, FILES, &[0]),
    granted("fd_filestat_set_times", Write, FILES, &[0]),
    granted("fd_pread", Read, FILES, &[0]),
    granted("fd_pwrite", Write, FILES, &[0]),
    granted("fd_readdir", Read, FILES, &[0]),
    granted("fd_sync", Write, FILES, &[0]),
    granted("path_create_directory", Write, FILES, &[0]),
    granted("path_filestat_get", Read, FILES, &[0]),
    granted("path_filestat_set_times", Write, FILES, &[0]),
    granted("path_link", Write, FILES, &[0, 4]),
    granted("path_open", Write, FILES, &[0]),
    granted("path_readlink", Read, FILES, &[0]),
    granted("path_remove_directory", Write, FILES, &[0]),
    granted("path_rename", Write, FILES, &[0, 3]),
    granted("path_symlink", Write, FILES, &[2]),
    granted("path_unlink_file", Write, FILES, &[0]),
    granted("sock_accept", Crossing, SOCKETS, &[0]),
    granted("sock_recv", Crossing, SOCKETS, &[0]),
    granted("sock_send", Crossing, SOCKETS, &[0]),
    granted("sock_shutdown", Crossing, SOCKETS, &[0]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_tiers_agree_with_needs() {
        let names: BTreeSet<_> = IMPORTS.iter().map(|import| import.name).collect();
        assert_eq!(names.len(), 46);
        for import in IMPORTS {
            assert_eq!(import.tier == Tier::Own, import.needs.is_empty(), "{}", import.name);
        }
    }

    #[test]
    fn nothing_granted_leaves_only_the_isolates_own() {
        for import in IMPORTS {
            let own = import.tier == Tier::Own;
            assert_eq!(import.is_granted(&CapabilitySet::nothing()), own, "{}", import.name);
        }
    }

    #[test]
    fn other_modules_have_no_names() {
        assert!(Import::find(MODULE, "fd_write").is_some());
        assert!(Import::find("env", "fd_write").is_none());
        assert!(Import::find(MODULE, "fd_writ").is_none());
    }
}
