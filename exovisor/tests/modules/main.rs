//! Modules: what is refused, what runs, what it reaches.

#[path = "../common/mod.rs"]
mod common;

mod admission;
mod folders;
mod hostile;
mod inlet;
mod nn;
mod overlay;
mod running;
mod sockets;
mod threads;
