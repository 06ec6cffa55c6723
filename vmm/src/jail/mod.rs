//! The jail: what stands between a cell and its host.
//!
//! A cell's supervisor is the first process of fresh user, pid, mount,
//! network, ipc and uts namespaces ([`namespaces`]), sees an empty read-only
//! root with nothing but the files it was given ([`root`]), and cannot gain
//! privileges, open paths ([`restrict_paths`]) or make system calls outside
//! its thread's list ([`filter`]). The guest kernel process and everything it
//! forks inherit all of that and have a list of their own. Killing the
//! supervisor kills the pid namespace, so nothing survives it.
//!
//! What reads bytes that are somebody else's on an operator's behalf does so in a process of its
//! own ([`stage`]).

pub mod filter;
mod folder;
pub mod group;
mod mounts;
pub mod namespaces;
mod paths;
mod privileges;
pub mod root;
pub mod stage;

pub use filter::{ThreadClass, restrict_calls};
pub use folder::{FolderRoot, close_all_but};
pub use group::Group;
pub use mounts::Tree;
pub use namespaces::{
    HostNetwork, IdentityMap, Spawned, fork_into, leave_network, make_tun, spawn,
};
pub use paths::{PathAccess, PathGrant, landlock_abi, restrict_paths, restrict_to_sockets};
pub use privileges::{Capability, forgo_capabilities, keep_capabilities};
pub use root::JailRoot;

use std::io;

/// Why a jail could not be made. Each message names the missing part and what
/// the operator can do about it.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error(
        "cannot make namespaces for the cell: {0}; allow user namespaces \
         (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone), leave the chroot if \
         this is one, or run as root"
    )]
    Namespaces(io::Error),
    #[error("cannot leave the host's network: {0}")]
    Network(io::Error),
    #[error("cannot write the cell's {file}: {source}; map at least the caller's own id")]
    IdentityMap { file: &'static str, source: io::Error },
    #[error("cannot build the cell's root file system ({step}): {source}")]
    Root { step: String, source: io::Error },
    #[error(
        "cannot leave the host's root: it is an initramfs, in which the host's kernel keeps \
         processes; move to another root first (switch_root)"
    )]
    Initramfs,
    #[error("cannot restrict file access with Landlock: {0}")]
    Landlock(#[from] landlock::RulesetError),
    #[error("cannot install the system call filter of the {class} threads: {reason}")]
    Filter { class: &'static str, reason: String },
}
