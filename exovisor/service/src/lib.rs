//! Wasm modules of many tenants behind HTTP.
//!
//! ```text
//! exocell module add ──> [ModuleStore] ──loaded.rs: admitted──> [Service]
//! client ──POST /v1/run/MODULE?arg=A, tenant's key───────> http.rs ──> call.rs ──> scheduler
//!        ──POST /v1/call/MODULE/FUNCTION, tenant's key──┘
//! ```
//!
//! A module belongs to a tenant; whoever has the tenant's key may run it as a command, with the
//! request's body as its standard input, or call its functions over numbers, under the
//! capabilities that the module was added with. What all tenants used has a listener of its own, for the
//! operator. Clients are hostile: heads, bodies, connections and the time
//! for each are bounded ([`http`](crate::Limits)).

#![forbid(unsafe_code)]

mod call;
mod http;
mod keys;
mod listener;
mod loaded;
mod metrics;
mod server;
mod store;
mod streams;

pub use exocell_exovisor::{Pool, Slots};
pub use http::Limits;
pub use listener::Listener;
pub use server::{Front, Networks, Service, ServiceError};
pub use store::{Added, ModuleEntry, ModuleStore, StoreError};
