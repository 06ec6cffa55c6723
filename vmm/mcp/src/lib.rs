//! The Model Context Protocol (modelcontextprotocol.io): an agent makes sandboxes, runs commands
//! in them, reads and writes their files and reaches their ports. Each sandbox is a cell.
//!
//! ```text
//! client ──> stdio | http ──> tools, resources ──> sandboxes ──> a cell each
//!                                    └──> command, files, expose: what is done in one
//! ```
//! Read it in this order: [`serve`] -> `tools` (what a client may call) -> `sandbox` (a cell and
//! its life) -> `command`, `files`, `expose`. The protocol itself is the `rmcp` crate's.
//!
//! What a sandbox may do is the operator's to say, by flags of `exocell run`; a client cannot
//! change it. What a client and a guest send is bounded: see each module's constants.
#![forbid(unsafe_code)]

mod command;
mod error;
mod expose;
mod files;
mod http;
mod ports;
mod resources;
mod sandbox;
mod serve;
mod tools;

pub use error::ServeError;
pub use serve::{Door, Options, serve};
