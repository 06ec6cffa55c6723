//! Exocell against its peers, in one run: subjects take turns, and figures are
//! minima and medians of what this machine did just now, never stored numbers.
//!
//! The main path: [`Options`] -> [`run`] -> one module a benchmark
//! (`start`, `density`) -> [`Row`]s -> a table, JSON lines, a plot.
#![forbid(unsafe_code)]

mod density;
mod error;
mod exocell;
mod plot;
mod row;
mod start;
mod subject;

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

pub use error::BenchError;
pub use plot::svg;
pub use row::{Row, Unit, table};
pub use subject::Subject;

use exocell::Exocell;

/// Measure cells and their peers on this machine, in one run.
#[derive(Debug, Parser)]
#[command(name = "exocell-benches")]
pub struct Options {
    /// Only these benchmarks.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub only: Vec<Bench>,
    /// Only these subjects.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub subjects: Vec<Subject>,
    /// Times that each subject gets its turn.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: u32,
    /// Cells alive at once.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub cells: u32,
    /// The image that cells run.
    #[arg(long, default_value = "exocell/base:latest")]
    pub image: String,
    /// The program to measure [default: the one beside this one].
    #[arg(long, env = "EXOCELL_TEST_BIN")]
    pub exocell: Option<PathBuf>,
    /// One JSON object a row.
    #[arg(long)]
    pub json: bool,
    /// Draw the medians as bars into this SVG file.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// A benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Bench {
    /// From the command to the end of `true`, and the stages of a cell's start.
    Start,
    /// Many idle cells at once: memory of each, and whether each answers.
    Density,
}

impl Options {
    fn wants(&self, bench: Bench) -> bool {
        self.only.is_empty() || self.only.contains(&bench)
    }

    fn includes(&self, subject: Subject) -> bool {
        self.subjects.is_empty() || self.subjects.contains(&subject)
    }
}

/// Measures what `options` ask for. What a subject lacks is said on standard
/// error, and the run goes on without it.
pub fn run(options: &Options) -> Result<Vec<Row>, BenchError> {
    let exocell = Exocell::new(options.exocell.clone(), &options.image)?;
    let mut rows = Vec::new();
    if options.wants(Bench::Start) {
        rows.extend(start::measure(options, &exocell)?);
    }
    if options.wants(Bench::Density) && options.includes(Subject::ParaAspace) {
        rows.extend(density::measure(options.cells, &exocell)?);
    }
    Ok(rows)
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
