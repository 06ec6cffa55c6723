//! A cell's life: spec (wire) -> plan (checked) -> running -> settled.
//!
//! The main path: [`CellSpec`] and a capability set -> [`plan::VmPlan`] (its program as [`oci`]
//! has it) or
//! [`isolate::IsolatePlan`] -> [`launch::launch`] -> [`supervisor`] in the jail
//! -> [`record`]. Operators' later commands reach a running cell through
//! [`control`].

mod apart;
pub mod archive;
pub mod changes;
pub mod clock;
mod command;
pub mod commit;
pub mod compile;
pub mod compose;
pub mod control;
mod descriptors;
mod device_rule;
mod disk;
pub mod end;
pub mod engine;
mod error;
pub mod events;
mod folder;
mod follower;
pub mod granted;
pub mod health;
pub mod initramfs;
pub mod inside;
pub mod isolate;
mod jailed;
pub mod key;
pub mod launch;
mod layout;
pub mod limits;
pub mod lines;
pub mod logging;
mod models;
pub mod network;
pub mod networks;
pub mod oci;
pub mod output;
pub mod parent;
pub mod plan;
pub mod policy;
pub mod processes;
pub mod record;
pub mod registry;
pub mod relayed;
pub mod restart;
mod served;
pub mod settings;
pub mod signal;
mod socket;
mod spec;
pub mod supervisor;
pub mod switches;
mod territory;
pub mod unpack;
pub mod warm;

pub use error::CellError;
pub use exocell_agent as agent;
pub use exocell_exovisor as exovisor;
pub use exocell_images as images;
pub use exocell_kernel as kernel;
pub use exocell_network::secrets;
pub use exocell_network::switch;
pub use exocell_pager as pager;
pub use exocell_vmm as vmm;
pub use exocell_vmm::intra;
pub use exocell_vmm::platform;
pub use exocell_xgate as xgate;
pub use layout::Layout;
pub use record::{Names, Record, State, Status};
pub use spec::{CellSpec, Strength, Within};

/// What an executable that uses this crate does in jailed processes (`vmm::jail::stage::entered`).
pub const STAGES: &[vmm::jail::stage::Stage] = &[
    compile::STAGE,
    relayed::DIALER,
    unpack::UNPACK,
    registry::FETCH,
    archive::ARCHIVE,
    archive::EXTRACT,
    compose::COMPOSE,
    switches::SWITCH,
];

/// Milliseconds since the epoch.
pub fn now_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_millis() as u64)
}
