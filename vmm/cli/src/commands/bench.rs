//! `exocell bench`: the program beside this one that measures.

use std::os::unix::process::CommandExt;
use std::process::Command;

use exocell_cell::{CellError, Layout};

use crate::args::BenchArgs;

/// The program, beside the running one.
const PROGRAM: &str = "exocell-bench";

/// Becomes that program.
///
/// # Errors
/// It is not there, or cannot be executed.
pub fn bench(layout: &Layout, args: &BenchArgs) -> Result<u8, CellError> {
    let own = std::env::current_exe().map_err(CellError::host("cannot find this program"))?;
    let program = own.with_file_name(PROGRAM);
    if !program.exists() {
        return Err(CellError::Usage(format!(
            "the program that measures, {}, is missing: no package has it, a build of the source does \
             (make build)",
            program.display()
        )));
    }
    let error = Command::new(&program).env("EXOCELL_ROOT", layout.root()).args(&args.words).exec();
    Err(CellError::host(format!("cannot run {}", program.display()))(error))
}
