//! The doors of agents: SDKs, harnesses, MCP, evaluations and real projects' suites.

#[path = "../common/mod.rs"]
mod common;

mod agents;
mod e2b;
mod e2b_begin;
mod e2b_pool;
mod e2b_server;
mod e2b_wire;
mod harnesses;
mod mcp;
mod projects;
mod python;
mod swebench;
mod ui;
