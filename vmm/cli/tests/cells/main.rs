//! Cells as a user has them: `run` and the verbs that follow it.

#[path = "../common/mod.rs"]
mod common;

mod build;
mod commit;
mod ended;
mod errors;
mod everyday;
mod first_hour;
mod folders;
mod followers;
mod health;
mod image_pages;
mod inside;
mod kernel_features;
mod kvm;
mod lifecycle;
mod operator;
mod ordinary_user;
mod pool;
mod printable;
mod programs;
mod push;
mod restart;
mod run;
mod secrets;
mod sidecars;
mod sockets;
mod states;
mod vcpus;
