//! The `exocell` command. Start at [`main`], then `args` and `commands`.
//!
//! A library, so that it is compiled once for the executables that differ in how they are linked.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod format;
mod hide;
mod hints;
mod progress;
mod reference;
mod session;
mod show;
mod terminal;
mod words;

use std::sync::atomic::{AtomicBool, Ordering};

use exocell_cell::logging::{self, Settings};
use exocell_cell::vmm::jail::stage::{self, Stage};

/// What this executable does in jailed processes.
const STAGES: &[&[Stage]] = &[exocell_cell::STAGES, &[commands::EXPLAIN], commands::SERVE];

/// Whether the executable has all of its libraries in it.
static IS_STATIC: AtomicBool = AtomicBool::new(false);

fn is_static() -> bool {
    IS_STATIC.load(Ordering::Relaxed)
}

/// Runs the command that this process was called with, whose executable is `is_static` or not: how
/// it is linked is not known when this is compiled. It returns the process's exit code.
#[must_use]
pub fn main(is_static: bool) -> std::process::ExitCode {
    IS_STATIC.store(is_static, Ordering::Relaxed);
    if let Some(code) = stage::entered(STAGES) {
        return code.into();
    }
    if exocell_shim::is_called() {
        return exocell_shim::run().into();
    }
    let cli = match args::parse() {
        Ok(cli) => cli,
        Err(code) => return code.into(),
    };
    logging::begin(Settings { level: cli.log_level, style: cli.log_format });
    match hide::values(&cli.command).and_then(|()| commands::dispatch(cli)) {
        Ok(code) => code.into(),
        Err(error) => {
            show::complain(&error);
            error.exit_code().into()
        }
    }
}
