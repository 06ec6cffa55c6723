//! The executable of the `exocell` command.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    exocell_cli::main(cfg!(target_feature = "crt-static"))
}
