//! Wasm modules of many tenants behind HTTP.
//!
//! ```text
//!          the process that listens                   a worker, one a tenant (or one for all)
//! client ──POST /v1/run/MODULE?arg=A, tenant's key─┐
//!        ──POST /v1/call/MODULE/FUNCTION, its key──┤
//!                http.rs, server.rs: Gateway       │
//!                lines.rs <── frames, wire.rs ─────┴────> worker.rs ──> engine.rs ──> scheduler
//! ```
//!
//! A module belongs to a tenant; whoever has the tenant's key may run it as a command, with the
//! request's body as its standard input, or call its functions over numbers, under the
//! capabilities that the module was added with. What all tenants used has a listener of its own,
//! for the operator. Clients are hostile: heads, bodies, connections and the time for each are
//! bounded ([`http`](crate::Limits)). So are workers, whose modules may have taken them over: they
//! are heard with bounds, and answer for their own requests only ([`Lines`]).
//!
//! Who starts these processes, and what their jails are, is not known here
//! (`vmm/cli/src/commands/serve`). [`Service`] does all in one process, for tests.

#![forbid(unsafe_code)]

mod call;
mod engine;
mod error;
mod guests;
mod http;
mod keys;
mod lines;
mod listener;
mod loaded;
mod metrics;
mod places;
mod runner;
mod server;
mod store;
mod streams;
mod wire;
mod worker;

pub use call::deadline;
pub use error::ServiceError;
pub use exocell_exovisor::{Pool, Slots};
pub use http::Limits;
pub use lines::{Ask, Lines, Told, WorkerRules};
pub use listener::{Bound, Listener};
pub use loaded::{ListedModule, ListedTenant, Listing};
pub use server::{Front, Gateway, Networks, Reception, Service};
pub use store::{Added, Kept, ModuleEntry, ModuleStore, StoreError};
pub use worker::{ModuleOrder, Worker, WorkerConfig};
