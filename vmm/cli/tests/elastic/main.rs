//! Memory: the Pager, what cells hold, budgets and pressure.

#[path = "../common/mod.rs"]
mod common;

mod backing;
mod blocks;
mod budget;
mod density;
mod kernel_memory;
mod memory;
mod pressure;
