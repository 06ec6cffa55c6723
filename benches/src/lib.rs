//! Exocell against its peers, in one run: subjects take turns, and figures are
//! minima and medians of what this machine did just now, never stored numbers.
//!
//! The main path: [`BenchCommand`] (the command line of `exocell bench`) -> [`run`]
//! -> one module a benchmark (`micro`, `apps`, `start`, `density`, `runs`, `elasticity`, `network`)
//! -> [`Row`]s
//! -> [`report`]:
//! a table, JSON lines, a plot.
#![forbid(unsafe_code)]

mod apps;
mod density;
mod elasticity;
mod error;
mod exocell;
mod isolates;
mod micro;
mod network;
mod options;
mod plot;
mod program;
mod row;
mod runs;
mod scratch;
mod start;
mod subject;
mod turns;
mod warm;

use std::path::Path;

pub use error::BenchError;
pub use options::{BenchCommand, Options};
pub use plot::svg;
pub use row::{Row, Unit, table};
pub use subject::{Peer, Subject};

use exocell::Exocell;

/// Runs one benchmark and reports it; compiled programs are kept below `root`,
/// the state root. What a subject lacks is said on standard error, and the run
/// goes on without it.
pub fn run(root: &Path, command: &BenchCommand) -> Result<(), BenchError> {
    let options = command.options();
    let exocell = Exocell::new(root, &options.image)?;
    let rows = match command {
        BenchCommand::Micro(args) => micro::measure(args, &exocell)?,
        BenchCommand::Apps(args) => apps::measure(args, &exocell)?,
        BenchCommand::Start(options) => start::measure(options, &exocell)?,
        BenchCommand::Network(args) => network::measure(args, &exocell)?,
        BenchCommand::Density(args) => density::measure(args, &exocell)?,
        BenchCommand::Runs(args) => runs::measure(args, &exocell)?,
        BenchCommand::Elasticity(args) => elasticity::measure(args, &exocell)?,
        BenchCommand::Reclaim(args) => elasticity::measure_reclaim(args, &exocell)?,
        BenchCommand::Oversubscription(args) => elasticity::measure_together(args, &exocell)?,
        BenchCommand::Isolates(args) => isolates::measure(args, &exocell)?,
        BenchCommand::Preempt(args) => isolates::measure_preemption(args)?,
        BenchCommand::Parallel(args) => isolates::measure_parallel(args)?,
        BenchCommand::Colorguard(args) => isolates::measure_slots(args)?,
    };
    report(options, &rows)
}

/// Prints `rows` as `options` say, and draws them.
pub fn report(options: &Options, rows: &[Row]) -> Result<(), BenchError> {
    if options.json {
        for row in rows {
            println!("{}", serde_json::to_string(row)?);
        }
    } else {
        print!("{}", table(rows));
    }
    if let Some(path) = &options.plot {
        std::fs::write(path, svg(rows)).map_err(BenchError::host(path.display()))?;
    }
    Ok(())
}
