//! The executable of the `exocell` command.
#![forbid(unsafe_code)]

/// Calls of isolates lie in pages of their own.
#[global_allocator]
static ALLOCATOR: exocell_cell::exovisor::Allocator = exocell_cell::exovisor::Allocator;

fn main() -> std::process::ExitCode {
    exocell_cli::main(cfg!(target_feature = "crt-static"))
}
