//! What must not be possible: hostile programs, kernels and ends by force.

#[path = "../common/mod.rs"]
mod common;

mod attacks;
mod audit;
mod conformance;
mod crash;
mod false_kernel;
mod host_side;
mod intra;
mod keys;
mod shootdown;
mod special;
