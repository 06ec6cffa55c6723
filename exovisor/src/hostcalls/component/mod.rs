//! The host functions of components: WASI 0.2 by wasmtime-wasi, each call behind a token of the
//! capability that its handle came from.

mod files;
mod linker;
mod names;
mod network;
mod streams;
mod tcp;
mod udp;
mod values;
mod wasi;
mod wire;

pub(crate) use linker::linker;
pub(crate) use wasi::Wasi;
