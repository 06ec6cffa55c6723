//! What a cell reaches, and who reaches it.

#[path = "../common/mod.rs"]
mod common;

mod egress;
mod network;
mod networks;
