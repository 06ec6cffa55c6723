//! The capability table: one model of authority for cells of both strengths.
//!
//! A person writes a grant as a file or as flags; [`CapabilitySet`] is that grant, read and
//! checked. [`CapabilitySet::install`] puts it into a [`Table`], where each capability gets a
//! [`Handle`]. Whoever enforces asks [`Table::check`], or keeps the capability's [`Live`] token
//! and tests it before each operation; [`Table::revoke`] ends a capability and all that was
//! derived from it, and every token of theirs with it. What a `vm` cell hands on to the isolates
//! in it is a grant too ([`CapabilitySet::handed_on`]), and theirs lie within it.
//!
//! The main path: [`CapabilitySet::parse`] or [`CapabilitySet::from_flags`] -> `install` ->
//! [`Table::derive`] / [`Table::check`] -> [`Table::revoke`].

#![forbid(unsafe_code)]

mod amount;
mod capability;
mod derived;
mod error;
mod explain;
mod file;
mod flags;
mod live;
mod network;
mod set;
mod table;

pub use amount::{format_bytes, format_duration, parse_bytes, parse_duration};
pub use capability::{Capability, FolderScope, NetworkScope, Quota, Request, Scope};
pub use error::{CapsError, Denial, TableError};
pub use exocell_xgate_abi::{Handle, Kind, Rights, Status};
pub use explain::{Explained, explain_json, explain_table};
pub use flags::Flags;
pub use live::Live;
pub use network::{Endpoint, NamePattern, NetworkName, PortRange, Protocol};
pub use set::{CapabilitySet, Cpu, Folder, Model, Network};
pub use table::{Derivation, Revoked, Table};
