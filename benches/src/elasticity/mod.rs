//! Memory that a cell holds, against what its programs use, over time; and how
//! fast memory goes back.
//!
//! A run: cell -> samplers in the cell and on the host -> load -> rows, CSV, charts.

mod agent;
mod chart;
mod loads;
mod reclaim;
mod run;
mod samples;
mod subject;
mod together;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use exocell_cell::pager::Mode;
use serde::Deserialize;

use crate::exocell::{Cell, Exocell};
use crate::options::ElasticityArgs;
use crate::program::{Compiler, Program};
use crate::{BenchError, Row};
use loads::Load;
pub use reclaim::measure_reclaim;
use run::Run;
use subject::MODES;
pub use together::measure_together;
use watch::Watch;

/// The source in `benches/elasticity`.
const PROGRAM: Program = Program {
    name: "elastic",
    compiler: Compiler::Gcc,
    sources: &[("elastic.c", include_str!("../../elasticity/elastic.c"))],
};
const FOLDER: &str = "/bench";
/// A cell that has started rests for this long before its load begins.
const REST: Duration = Duration::from_secs(1);

/// `exocell bench elasticity`.
pub fn measure(args: &ElasticityArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let folder = PROGRAM.prepare(&exocell.cache())?;
    let mut rows = Vec::new();
    for workload in &args.only {
        let mut runs = Vec::new();
        let mut never_held = None;
        for load in loads::of(*workload, args, exocell)? {
            for mode in MODES {
                let stage = Stage { folder: &folder, mode, args, exocell };
                runs.extend(stage.run(&load, &mut never_held)?);
            }
        }
        keep(args, workload.name(), &runs)?;
        rows.extend(run::rows(workload.name(), &runs, args));
    }
    rows.sort_by(|a, b| a.bench.cmp(&b.bench));
    Ok(rows)
}

/// Writes the samples and charts of them where `--csv` says.
fn keep(args: &ElasticityArgs, group: &str, runs: &[Run]) -> Result<(), BenchError> {
    let Some(folder) = &args.csv else { return Ok(()) };
    for run in runs {
        write(folder, &format!("{}-{}.csv", run.load, run.subject), run.csv())?;
    }
    for of_load in runs.chunk_by(|a, b| a.load == b.load) {
        write(folder, &format!("{}.svg", of_load[0].load), chart::over_time(of_load))?;
    }
    write(folder, &format!("{group}-overhead.svg"), chart::distribution(runs))
}

fn write(folder: &Path, name: &str, text: String) -> Result<(), BenchError> {
    let file = folder.join(name);
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&file, text))
        .map_err(BenchError::host(file.display()))
}

/// A cell of one mode, ready to be loaded.
struct Stage<'a> {
    folder: &'a Path,
    mode: Mode,
    args: &'a ElasticityArgs,
    exocell: &'a Exocell,
}

impl Stage<'_> {
    /// With the Pager two runs: as it was, and as if memory had come and gone in blocks.
    fn run(&self, load: &Load, never_held: &mut Option<f64>) -> Result<Vec<Run>, BenchError> {
        let memory = format!("{}m", self.args.memory_mib);
        let volume = load.volume();
        let mut options = vec!["--memory", &memory];
        options.extend(volume.iter().flat_map(|volume| ["--volume", volume.as_str()]));
        let cell = start(self.exocell, self.folder, self.mode, &options)?;
        let watch = Watch::start(self.exocell, &cell, self.folder, self.args.period_ms)?;
        std::thread::sleep(REST);
        let rest = watch.so_far();
        let words: Vec<&str> = load.words.iter().map(String::as_str).collect();
        exec(self.exocell, &cell, &words)?;
        let all = watch.end();
        let file_bytes = self.args.memory_mib << 20;
        let known = never_held.or_else(|| rest.never_held_bytes(file_bytes));
        let known = known.ok_or_else(|| silent(&load.name))?;
        *never_held = Some(known);
        let run = |subject, samples| Run {
            load: load.name.clone(),
            subject,
            samples,
            ticks_per_second: all.ticks_per_second(),
        };
        let mut runs = vec![run(subject::name(self.mode), all.join(file_bytes, known))];
        if self.mode == Mode::Eager {
            runs.push(run(subject::IN_BLOCKS, all.join_in_blocks(file_bytes, known)));
        }
        match runs.iter().any(|run| run.samples.is_empty()) {
            true => Err(silent(&load.name)),
            false => Ok(runs),
        }
    }
}

fn silent(load: &str) -> BenchError {
    BenchError::Subject {
        subject: load.to_owned(),
        why: "no sample was taken in the cell while the host took some".to_owned(),
    }
}

fn start<'a>(
    exocell: &'a Exocell,
    folder: &Path,
    mode: Mode,
    options: &[&str],
) -> Result<Cell<'a>, BenchError> {
    let name = format!("bench-elastic-{}-{mode}", std::process::id());
    let volume = format!("{}:{FOLDER}:ro", folder.display());
    let fixed = ["--pager", mode.name(), "--volume", &volume];
    Cell::start(exocell, name, &[&fixed[..], options].concat())
}

/// Runs a program in the cell; what it printed.
fn exec(exocell: &Exocell, cell: &Cell, words: &[&str]) -> Result<String, BenchError> {
    let output = exocell.call(&[&["exec", &cell.name], words].concat())?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Where the sampler on the host finds the cell's memory file.
fn memory_file(exocell: &Exocell, cell: &Cell) -> Result<PathBuf, BenchError> {
    #[derive(Deserialize)]
    struct Inspected {
        supervisor_pid: i32,
    }
    let [inspected]: [Inspected; 1] = exocell.ask("inspect", &["inspect", "--json", &cell.name])?;
    let folder = PathBuf::from(format!("/proc/{}/fd", inspected.supervisor_pid));
    let entries = fs::read_dir(&folder).map_err(BenchError::host(folder.display()))?;
    let guest = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("memfd:exocell-guest"))
    };
    entries.flatten().map(|entry| entry.path()).find(guest).ok_or_else(|| silent(&cell.name))
}
