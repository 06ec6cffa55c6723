//! The shim of containerd, by its own clients.

#[path = "../common/mod.rs"]
mod common;

mod containerd;
mod cri;
