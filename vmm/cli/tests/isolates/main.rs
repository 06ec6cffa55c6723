//! Wasm isolates by the command, and the HTTP service.

#[path = "../common/mod.rs"]
mod common;

mod components;
mod hostile_modules;
mod isolate;
mod isolate_network;
mod service;
mod service_jails;
