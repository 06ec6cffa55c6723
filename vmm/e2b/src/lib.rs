//! E2B's protocol: its SDKs run unmodified against cells.
//!
//! ```text
//! client ──> listen ─┬─> route ──> create, calls: sandboxes are made, told of and ended
//!                    └─> envd: commands and files of one sandbox; proxy: its other ports
//! ```
//! Read it in this order: [`listen`] (the address) -> [`exocell_door`] (its connections) -> `address` (which
//! sandbox a request is for) -> `route` (which call is which) -> `create`, `calls` -> [`envd`].
//! `queue` says whose sandbox boots next, `pool` keeps some that have booted, `beginning` is what a
//! template runs in each. `state` holds what there is, `note` what of that is on disk; `bounds` says how much of all of it
//! one tenant may have; `network` holds what a client asks for against what the operator granted.
//!
//! The protocol is of the clients: PyPI `e2b` 2.63 and npm `e2b` 2.51 were read for it.
#![forbid(unsafe_code)]

mod address;
mod beginning;
mod blocking;
mod boot;
mod bounds;
mod builds;
mod calls;
mod create;
mod envd;
mod error;
mod http;
mod keys;
mod listen;
mod network;
mod note;
mod options;
mod pairs;
mod pool;
mod proxy;
mod queue;
mod route;
mod sandbox;
mod settled;
mod snapshots;
mod state;
mod template;
mod templates;
mod waiting;

pub use error::ServeError;
pub use listen::serve;
pub use options::Options;
