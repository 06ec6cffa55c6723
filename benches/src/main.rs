//! The program behind `make bench`; see [`exocell_benches`].
#![forbid(unsafe_code)]

use clap::Parser;
use exocell_benches::{Options, report, run};

fn main() -> std::process::ExitCode {
    let options = Options::parse();
    match run(&options).and_then(|rows| report(&options, &rows)) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("exocell-benches: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
