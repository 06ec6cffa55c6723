//! Exocell against its peers, in one run: subjects take turns, and figures are
//! minima and medians of what this machine did just now, never stored numbers.
//!
//! The main path: [`BenchCommand`] (the command line of `exocell bench`) -> [`run`]
//! -> one module a benchmark (`micro`, `apps`, `start`, `density`, `runs`, `elasticity`, `network`,
//! `isolates`, `service`)
//! -> [`Row`]s
//! -> [`report`]:
//! a table, JSON lines, a plot.
#![forbid(unsafe_code)]

mod apps;
mod audit;
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
mod service;
mod start;
mod subject;
mod turns;
mod warm;

use std::path::Path;

pub use error::BenchError;
pub use options::{BenchCommand, Benchmark, Options};
pub use plot::svg;
pub use row::{Row, Unit, table};
pub use subject::{Peer, Subject};

use exocell::Exocell;

/// Does what `command` says on the state root `root`.
pub fn run(root: &Path, command: &BenchCommand) -> Result<(), BenchError> {
    match command {
        BenchCommand::Measure(benchmark) => measure(root, benchmark),
        BenchCommand::Audit(args) => audit::run(root, args),
    }
}

/// Runs one benchmark and reports it; compiled programs are kept below `root`,
/// the state root. What a subject lacks is said on standard error, and the run
/// goes on without it.
fn measure(root: &Path, benchmark: &Benchmark) -> Result<(), BenchError> {
    let options = benchmark.options();
    let exocell = Exocell::new(root, &options.image)?;
    let rows = match benchmark {
        Benchmark::Micro(args) => micro::measure(args, &exocell)?,
        Benchmark::Apps(args) => apps::measure(args, &exocell)?,
        Benchmark::Start(options) => start::measure(options, &exocell)?,
        Benchmark::Network(args) => network::measure(args, &exocell)?,
        Benchmark::Density(args) => density::measure(args, &exocell)?,
        Benchmark::Runs(args) => runs::measure(args, &exocell)?,
        Benchmark::Elasticity(args) => elasticity::measure(args, &exocell)?,
        Benchmark::Reclaim(args) => elasticity::measure_reclaim(args, &exocell)?,
        Benchmark::Oversubscription(args) => elasticity::measure_together(args, &exocell)?,
        Benchmark::Isolates(args) => isolates::measure(args, &exocell)?,
        Benchmark::Preempt(args) => isolates::measure_preemption(args)?,
        Benchmark::Parallel(args) => isolates::measure_parallel(args)?,
        Benchmark::Colorguard(args) => isolates::measure_slots(args)?,
        Benchmark::Service(args) => service::measure(args, &exocell)?,
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
