//! E2B's protocol: its SDKs run unmodified against cells.
//!
//! ```text
//! client ──> listen ─┬─> route ──> create, calls: sandboxes are made, told of and ended
//!                    └─> envd: commands and files of one sandbox; proxy: its other ports
//! ```
//! Read it in this order: [`listen`] (the address) -> `address` (which sandbox a request is for)
//! -> `route` (which call is which) -> `create`, `calls` -> [`envd`]. `state` holds what there is,
//! `note` what of that is on disk; `network` holds what a client asks for against what the operator
//! granted.
//!
//! The protocol is of the clients: PyPI `e2b` 2.63 and npm `e2b` 2.51 were read for it.
#![forbid(unsafe_code)]

mod address;
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
mod proxy;
mod route;
mod sandbox;
mod snapshots;
mod state;
mod template;

pub use error::ServeError;
pub use listen::serve;
pub use options::Options;
