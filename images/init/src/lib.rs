//! PID 1 of a `vm` cell.
//!
//! The main path: [`run`] mounts what it needs to look around, connects to the
//! host ([`vsock`]), reads `Boot`, makes the root file system ([`root`]), binds
//! the agent port, answers `Ready` and then serves one thread per stream
//! ([`session`]) until a `Shutdown`.
//!
//! ```text
//!  started --Boot--> rooted --listen--> ready --Shutdown--> stopping --> powered off
//!     |                |                                                    ^
//!     +--no host-------+--Failed reply--------------------------------------+
//! ```
//!
//! Rules that hold everywhere:
//! - this process never exits: its death is a guest kernel panic. A panic in a
//!   session ends that session's thread only;
//! - no program can name it: they have namespaces of their own ([`container`]);
//! - it comes first where processors are short, but not for what it copies or passes
//!   on for programs;
//! - only [`reaper`] waits for children, so that no exit code goes astray;
//! - unsafe code is in [`sys`] and [`spawn`], for system calls that have no
//!   safe wrapper.
//!
//! The initramfs holds this binary as `/init` and nothing else that is needed.
#![deny(unsafe_code)]

mod account;
mod beside;
mod boot;
mod capabilities;
mod cgroup;
mod cold;
mod container;
mod depot;
mod dev;
mod device_filter;
mod dial;
mod error;
mod exec;
mod files;
mod fill;
mod folders;
mod followed;
mod io_loop;
mod isolates;
mod limits;
mod log;
mod members;
mod mounting;
mod mounts;
mod network;
mod nodes;
mod own_proc;
mod pager;
mod paths;
mod reaper;
mod relay;
mod removal;
mod root;
mod session;
mod shutdown;
mod sockets;
#[allow(unsafe_code)]
mod spawn;
mod stats;
#[allow(unsafe_code)]
mod sys;
mod transfer;
mod usage;
mod users;
mod vsock;

pub use boot::run;
pub use session::Agent;
