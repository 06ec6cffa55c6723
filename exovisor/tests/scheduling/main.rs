//! Many isolates on few threads and in few slots.

#[path = "../common/mod.rs"]
mod common;

mod hibernation;
mod hosted;
mod scheduler;
mod slots;
