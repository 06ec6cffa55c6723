//! Commands that are components.

#[path = "../common/mod.rs"]
mod common;

mod commands;
mod hostile;
mod imports;
mod sockets;
