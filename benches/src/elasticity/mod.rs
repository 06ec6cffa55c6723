//! Memory that a cell holds, against what its programs use, over time; and how
//! fast memory goes back.
//!
//! A run: cell -> samplers in the cell and on the host -> workload -> rows, CSV.

mod samples;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use exocell_cell::pager::Mode;
use serde::Deserialize;

use crate::exocell::{Cell, Exocell};
use crate::options::{ElasticityArgs, ReclaimArgs, Workload};
use crate::program::{Compiler, Program};
use crate::row::Unit;
use crate::{BenchError, Row};
use samples::Sample;
use watch::Watch;

/// The source in `benches/elasticity`.
const PROGRAM: Program = Program {
    name: "elastic",
    compiler: Compiler::Gcc,
    sources: &[("elastic.c", include_str!("../../elasticity/elastic.c"))],
};
const FOLDER: &str = "/bench";
const TRACES: &str = "/traces";
/// A cell that has started rests for this long before its load begins.
const REST: Duration = Duration::from_secs(1);
/// With eager binding first: it says how much of the file is never held.
const MODES: [Mode; 2] = [Mode::Eager, Mode::Off];

fn subject(mode: Mode) -> &'static str {
    match mode {
        Mode::Eager => "pager",
        Mode::Off => "no-return",
    }
}

/// What one subject is asked to do: a name, and the program's arguments.
struct Load {
    name: String,
    arguments: Vec<String>,
}

/// `exocell bench elasticity`.
pub fn measure(args: &ElasticityArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let folder = PROGRAM.prepare(&exocell.cache())?;
    let mut rows = Vec::new();
    for workload in &args.only {
        let group = workload.name();
        let loads = loads(*workload, args)?;
        let mut never_held = None;
        for mode in MODES {
            let mut runs = Vec::new();
            for load in &loads {
                let stage = Stage { folder: &folder, mode, args, exocell };
                runs.push(stage.run(load, &mut never_held)?);
            }
            rows.extend(overhead_rows(group, mode, &runs, args));
        }
    }
    rows.sort_by(|a, b| a.bench.cmp(&b.bench));
    Ok(rows)
}

fn loads(workload: Workload, args: &ElasticityArgs) -> Result<Vec<Load>, BenchError> {
    match workload {
        Workload::Bursty => {
            let arguments = vec!["bursty".to_owned(), args.seconds.to_string()];
            Ok(vec![Load { name: "bursty".to_owned(), arguments }])
        }
        Workload::Traces => traces(args),
    }
}

/// The traces of the folder, by name; the first so many.
fn traces(args: &ElasticityArgs) -> Result<Vec<Load>, BenchError> {
    let folder = args.traces.as_deref().ok_or(BenchError::NoTraces)?;
    let failed = || BenchError::host(folder.display());
    let entries = fs::read_dir(folder).map_err(failed())?;
    let mut names = entries
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed())?;
    names.retain(|name| name.ends_with(".csv"));
    names.sort_unstable();
    names.truncate(args.traces_max);
    // What the guest itself needs stays free.
    let most_mib = (args.memory_mib * 3 / 4).to_string();
    let load = |name: String| {
        let words = [format!("{TRACES}/{name}"), args.speed.to_string(), most_mib.clone()];
        let arguments = std::iter::once("replay".to_owned()).chain(words).collect();
        Load { name, arguments }
    };
    Ok(names.into_iter().map(load).collect())
}

/// A cell of one subject, ready to be loaded.
struct Stage<'a> {
    folder: &'a Path,
    mode: Mode,
    args: &'a ElasticityArgs,
    exocell: &'a Exocell,
}

impl Stage<'_> {
    fn run(&self, load: &Load, never_held: &mut Option<f64>) -> Result<Vec<Sample>, BenchError> {
        let memory = format!("{}m", self.args.memory_mib);
        let traces = self.args.traces.as_ref().map(|at| format!("{}:{TRACES}:ro", at.display()));
        let mut options = vec!["--memory", &memory];
        options.extend(traces.iter().flat_map(|volume| ["--volume", volume.as_str()]));
        let cell = start(self.exocell, self.folder, self.mode, &options)?;
        let watch = Watch::start(self.exocell, &cell, self.folder, self.args.period_ms)?;
        std::thread::sleep(REST);
        let rest = watch.so_far();
        let words: Vec<&str> = load.arguments.iter().map(String::as_str).collect();
        exec(self.exocell, &cell, &words)?;
        let all = watch.end();
        let file_bytes = self.args.memory_mib << 20;
        let known = never_held.or_else(|| rest.never_held_bytes(file_bytes));
        let known = known.ok_or_else(|| silent(&load.name))?;
        *never_held = Some(known);
        let samples = all.join(file_bytes, known);
        if samples.is_empty() {
            return Err(silent(&load.name));
        }
        self.keep(load, &samples)?;
        Ok(samples)
    }

    /// Writes the samples where `--csv` says.
    fn keep(&self, load: &Load, samples: &[Sample]) -> Result<(), BenchError> {
        let Some(folder) = &self.args.csv else { return Ok(()) };
        let file = folder.join(format!("{}-{}.csv", load.name, subject(self.mode)));
        let mut text = "stamp,held_bytes,used_bytes\n".to_owned();
        for sample in samples {
            text += &format!("{},{:.0},{:.0}\n", sample.stamp, sample.held, sample.used);
        }
        fs::write(&file, text).map_err(BenchError::host(file.display()))
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
    let fixed = ["--detach", "--pager", mode.name(), "--volume", &volume];
    Cell::run(exocell, name, &[&fixed[..], options].concat(), &["sleep", "infinity"])
}

/// Runs the program in the cell; what it printed.
fn exec(exocell: &Exocell, cell: &Cell, words: &[&str]) -> Result<String, BenchError> {
    let program = format!("{FOLDER}/{}", PROGRAM.name);
    let output = exocell.call(&[&["exec", &cell.name, &program], words].concat())?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Mean, highest and 99th percentile of the overhead; mean of what is held.
fn overhead_rows(group: &str, mode: Mode, runs: &[Vec<Sample>], args: &ElasticityArgs) -> Vec<Row> {
    let params = [
        ("memory", format!("{} MiB", args.memory_mib)),
        ("period", format!("{} ms", args.period_ms)),
        ("samples", runs.iter().map(Vec::len).sum::<usize>().to_string()),
    ];
    let each = |of: &dyn Fn(&[Sample]) -> f64| runs.iter().map(|run| of(run)).collect::<Vec<_>>();
    let row = |name: &str, unit, values: &[f64]| {
        Row::of(format!("{group}/{name}"), subject(mode), unit, values, &params)
    };
    let rows = [
        row(
            "overhead_mean_percent",
            Unit::Percent,
            &each(&|run| mean(run, Sample::overhead_percent)),
        ),
        row("overhead_p99_percent", Unit::Percent, &each(&|run| quantile(run, 0.99))),
        row("overhead_max_percent", Unit::Percent, &each(&|run| quantile(run, 1.0))),
        row("held_mean", Unit::Bytes, &each(&|run| mean(run, |sample| sample.held))),
        row("used_mean", Unit::Bytes, &each(&|run| mean(run, |sample| sample.used))),
    ];
    rows.into_iter().flatten().collect()
}

fn mean(run: &[Sample], of: impl Fn(&Sample) -> f64) -> f64 {
    run.iter().map(of).sum::<f64>() / run.len().max(1) as f64
}

/// The overhead that `share` of the samples do not exceed.
fn quantile(run: &[Sample], share: f64) -> f64 {
    let mut overheads: Vec<f64> = run.iter().map(Sample::overhead_percent).collect();
    overheads.sort_unstable_by(f64::total_cmp);
    let index = (overheads.len() as f64 * share) as usize;
    overheads.get(index.min(overheads.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

/// The part of `exocell stats --json` that is read here.
#[derive(Deserialize)]
struct Stats {
    counters: Counters,
    guest_claims: Claims,
}

#[derive(Deserialize)]
struct Counters {
    memory_allocated_bytes: u64,
}

#[derive(Deserialize)]
struct Claims {
    pager: Option<PagerClaims>,
}

#[derive(Deserialize)]
struct PagerClaims {
    bind_bytes: u64,
    bind_ns: u64,
    unbind_bytes: u64,
    unbind_ns: u64,
}

fn stats(exocell: &Exocell, cell: &Cell) -> Result<Stats, BenchError> {
    exocell.ask("stats", &["stats", "--json", &cell.name])
}

/// `exocell bench reclaim`: a region is taken and given up, round after round.
pub fn measure_reclaim(args: &ReclaimArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let folder = PROGRAM.prepare(&exocell.cache())?;
    let mut rows = Vec::new();
    for mode in MODES {
        rows.extend(reclaim_of(mode, args, &folder, exocell)?);
    }
    rows.sort_by(|a, b| a.bench.cmp(&b.bench));
    Ok(rows)
}

fn reclaim_of(
    mode: Mode,
    args: &ReclaimArgs,
    folder: &Path,
    exocell: &Exocell,
) -> Result<Vec<Row>, BenchError> {
    let memory = format!("{}m", args.region_mib + 256);
    let cell = start(exocell, folder, mode, &["--memory", &memory])?;
    let region = args.region_mib.to_string();
    let before = stats(exocell, &cell)?;
    let mut times: [Vec<f64>; 3] = Default::default();
    for _ in 0..args.options.rounds {
        let printed = exec(exocell, &cell, &["reclaim", &region])?;
        let values = printed.split_whitespace().map(str::parse::<f64>);
        for (samples, value) in times.iter_mut().zip(values) {
            samples.extend(value.ok());
        }
    }
    let after = stats(exocell, &cell)?;
    let left = after.counters.memory_allocated_bytes as f64
        - before.counters.memory_allocated_bytes as f64;
    let params = [("region", format!("{region} MiB")), ("left", format!("{left:.0} bytes"))];
    let row = |name: &str, unit, values: &[f64]| {
        Row::of(format!("reclaim/{name}"), subject(mode), unit, values, &params)
    };
    let [fault, whole, other] = times;
    // Bytes a nanosecond are GB a second; without the Pager nothing is reclaimed.
    let rate: Vec<f64> = whole.iter().map(|ns| 4096.0 / ns).collect();
    let given_back = if mode == Mode::Off { &[][..] } else { &rate };
    let mut rows = vec![
        row("reclaim_gb_s", Unit::GbPerSecond, given_back),
        row("fault_ns", Unit::Ns, &fault),
        row("munmap_ns", Unit::Ns, &whole),
        row("dontneed_other_ns", Unit::Ns, &other),
    ];
    if let (Some(before), Some(after)) = (before.guest_claims.pager, after.guest_claims.pager) {
        let per_page = |ns: u64, bytes: u64| vec![ns as f64 / (bytes as f64 / 4096.0).max(1.0)];
        let unbind =
            per_page(after.unbind_ns - before.unbind_ns, after.unbind_bytes - before.unbind_bytes);
        let bind = per_page(after.bind_ns - before.bind_ns, after.bind_bytes - before.bind_bytes);
        rows.push(row("unbind_ns", Unit::Ns, &unbind));
        rows.push(row("bind_ns", Unit::Ns, &bind));
    }
    Ok(rows.into_iter().flatten().collect())
}

/// Where the sampler on the host finds the cell's memory file.
fn memory_file(exocell: &Exocell, cell: &Cell) -> Result<PathBuf, BenchError> {
    #[derive(Deserialize)]
    struct Inspected {
        supervisor_pid: i32,
    }
    let inspected: Inspected = exocell.ask("inspect", &["inspect", "--json", &cell.name])?;
    let folder = PathBuf::from(format!("/proc/{}/fd", inspected.supervisor_pid));
    let entries = fs::read_dir(&folder).map_err(BenchError::host(folder.display()))?;
    let guest = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("memfd:exocell-guest"))
    };
    entries.flatten().map(|entry| entry.path()).find(guest).ok_or_else(|| silent(&cell.name))
}
