//! `exocell serve --docker` and BuildKit's protocol.

#[path = "../common/mod.rs"]
mod common;

mod build;
mod buildkit;
mod client;
mod ended;
mod engine;
mod everyday;
mod first_week;
mod hostile;
mod network;
mod networks;
mod pool;
mod socket;
