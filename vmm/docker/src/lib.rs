//! The Docker Engine API on a unix socket: containers are cells.
//!
//! Read it in this order: [`listen`] (the socket) -> [`route`] (which call is
//! which) -> `calls`, `exec`, `attach`, `logs`, `archive`, `images` (the calls)
//! -> `lifecycle` (start, follow, end) -> [`launcher`] (how a cell is started).
//! `admit` holds what a client asks for against what a cell can be;
//! `containers` is what is on disk.
#![forbid(unsafe_code)]
// The API's larger objects are written out in one piece.
#![recursion_limit = "256"]

mod admit;
mod archive;
mod attach;
mod bounds;
mod calls;
mod clock;
mod containers;
mod discard;
mod error;
mod events;
mod exec;
mod fields;
mod filters;
mod frames;
mod hijack;
mod http;
mod images;
mod input;
pub mod launcher;
mod lifecycle;
mod listen;
mod live;
mod logs;
mod place;
mod ports;
mod reach;
mod route;
mod save;
mod state;
mod stats;
mod system;
mod target;
mod views;
mod volumes;
mod wire;

pub use admit::Defaults;
pub use error::ServeError;
pub use listen::{Options, serve};
pub use system::host_memory;
