//! The `exocell-bench` command, which `exocell bench` runs: a program of its own, so that the
//! product carries none of it.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use exocell_benches::BenchCommand;
use exocell_cell::Layout;
use exocell_cell::vmm::jail::stage;

/// Calls of isolates lie in pages of their own.
#[global_allocator]
static ALLOCATOR: exocell_cell::exovisor::Allocator = exocell_cell::exovisor::Allocator;

/// The exit code where a measurement could not be made, as of all that `exocell` itself fails at.
const FAILED: u8 = 125;

/// Measure cells and their peers on this machine, in one run.
#[derive(Parser)]
#[command(name = "exocell-bench", bin_name = "exocell bench", version, max_term_width = 100)]
struct Cli {
    /// Where images, kernels and cells are kept.
    #[arg(long, global = true, env = "EXOCELL_ROOT", value_name = "DIR")]
    root: Option<PathBuf>,
    #[command(subcommand)]
    command: BenchCommand,
}

fn main() -> ExitCode {
    // Modules are compiled in a jail, which is this executable again.
    if let Some(code) = stage::entered(&[exocell_cell::STAGES]) {
        return code.into();
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.exit_code() == 0 { ExitCode::SUCCESS } else { FAILED.into() };
        }
    };
    let root = cli.root.unwrap_or_else(Layout::default_root);
    let done = std::path::absolute(root)
        .map_err(exocell_benches::BenchError::host("cannot find the state root"))
        .and_then(|root| exocell_benches::run(&root, &cli.command));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("exocell: {}", exocell_cell::agent::printable(&error.to_string()));
            FAILED.into()
        }
    }
}
