//! How fast memory that programs give up goes back: whole regions, where page
//! frames are neighbours, and every other page of one, where none are.

use std::path::Path;

use exocell_cell::pager::Mode;
use serde::Deserialize;

use super::loads::elastic;
use super::{PROGRAM, chart, exec, start, subject, write};
use crate::exocell::{Cell, Exocell};
use crate::options::ReclaimArgs;
use crate::row::Unit;
use crate::{BenchError, Row};

const MODES: [Mode; 3] = [Mode::Eager, Mode::Credit, Mode::Off];

const PAGE_BYTES: f64 = 4096.0;
/// A page that is left alone between two that are given up is a mapping of its own, and so
/// is each page of memory in pieces. The host allows a process some 65,000 of them
/// (vm.max_map_count).
const SCATTERED_MIB_MAX: u64 = 128;

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

/// `exocell bench reclaim`: regions are taken and given up, round after round.
pub fn measure_reclaim(args: &ReclaimArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let folder = PROGRAM.prepare(&exocell.cache())?;
    let measured =
        MODES.into_iter().map(|mode| Ok((mode, Measured::of(mode, args, &folder, exocell)?)));
    let measured: Vec<(Mode, Measured)> = measured.collect::<Result<_, BenchError>>()?;
    keep(args, &measured)?;
    let rows = measured.iter().flat_map(|(mode, measured)| measured.rows(*mode, args));
    let mut rows: Vec<Row> = rows.collect();
    rows.sort_by(|a, b| a.bench.cmp(&b.bench));
    Ok(rows)
}

/// Writes the rounds, and a chart of them, where `--csv` says.
fn keep(args: &ReclaimArgs, measured: &[(Mode, Measured)]) -> Result<(), BenchError> {
    let Some(folder) = &args.csv else { return Ok(()) };
    let name = format!("reclaim-{}", args.region_mib);
    let mut lines: Vec<(&str, chart::Points)> = Vec::new();
    for (mode, measured) in measured {
        let subject = subject::name(*mode);
        write(folder, &format!("{name}-{subject}.csv"), measured.csv())?;
        if *mode != Mode::Off {
            let rates = measured.rates().into_iter().enumerate();
            lines.push((subject, rates.map(|(at, rate)| ((at + 1) as f64, rate)).collect()));
        }
    }
    let title = format!("{} MiB given up: GB/s, round after round", args.region_mib);
    write(folder, &format!("{name}.svg"), chart::lines_of(&title, &lines))
}

/// Both phases of one mode.
struct Measured {
    whole: Phase,
    other: Phase,
    scattered_mib: u64,
    /// What the host held more after the first phase than before.
    left_bytes: f64,
}

impl Measured {
    fn of(
        mode: Mode,
        args: &ReclaimArgs,
        folder: &Path,
        exocell: &Exocell,
    ) -> Result<Self, BenchError> {
        let memory = format!("{}m", args.region_mib + 256);
        let cell = start(exocell, folder, mode, &["--memory", &memory])?;
        let held = |stats: &Stats| stats.counters.memory_allocated_bytes as f64;
        let before = stats(exocell, &cell)?;
        let whole = Phase::run(exocell, &cell, "reclaim", args.region_mib, args.options.rounds)?;
        let left_bytes = held(&stats(exocell, &cell)?) - held(&before);
        let scattered_mib = args.region_mib.min(SCATTERED_MIB_MAX);
        let other = Phase::run(exocell, &cell, "scattered", scattered_mib, args.options.rounds)?;
        Ok(Self { whole, other, scattered_mib, left_bytes })
    }

    /// What a region's munmap took, as GB/s: bytes a nanosecond.
    fn rates(&self) -> Vec<f64> {
        self.whole.column(1).iter().map(|ns| PAGE_BYTES / ns).collect()
    }

    /// The figures of a page; those of the Pager are missing without it.
    fn figures(&self) -> [(&'static str, Vec<f64>); 6] {
        let Self { whole, other, .. } = self;
        [
            ("fault_ns", whole.column(0)),
            ("munmap_ns", whole.column(1)),
            ("dontneed_other_ns", other.column(0)),
            ("bind_ns", whole.bind_ns.clone()),
            ("unbind_coalesced_ns", whole.unbind_ns.clone()),
            ("unbind_isolated_ns", other.unbind_ns.clone()),
        ]
    }

    /// A line for each round.
    fn csv(&self) -> String {
        let figures = self.figures();
        let mut text = "round".to_owned();
        figures.iter().for_each(|(name, _)| text += &format!(",{name}"));
        for round in 0..self.whole.printed.len() {
            text += &format!("\n{}", round + 1);
            for (_, values) in &figures {
                let value = values.get(round).map_or_else(String::new, |ns| format!("{ns:.1}"));
                text += &format!(",{value}");
            }
        }
        text + "\n"
    }

    fn rows(&self, mode: Mode, args: &ReclaimArgs) -> Vec<Row> {
        let params = [
            ("region", format!("{} MiB", args.region_mib)),
            ("scattered", format!("{} MiB", self.scattered_mib)),
            ("left", format!("{:.0} bytes", self.left_bytes)),
        ];
        let row = |name: &str, unit, values: &[f64]| {
            Row::of(format!("reclaim/{name}"), subject::name(mode), unit, values, &params)
        };
        // Without the Pager nothing is reclaimed.
        let given_back = if mode == Mode::Off { Vec::new() } else { self.rates() };
        let rate = row("reclaim_gb_s", Unit::GbPerSecond, &given_back);
        let figures = self.figures();
        rate.into_iter()
            .chain(figures.iter().filter_map(|(name, values)| row(name, Unit::Ns, values)))
            .collect()
    }
}

/// Rounds of one verb of the program: what it printed, and the Pager's own times
/// of a page in each round.
#[derive(Default)]
struct Phase {
    printed: Vec<Vec<f64>>,
    bind_ns: Vec<f64>,
    unbind_ns: Vec<f64>,
}

impl Phase {
    fn run(
        exocell: &Exocell,
        cell: &Cell,
        verb: &str,
        region_mib: u64,
        rounds: u32,
    ) -> Result<Self, BenchError> {
        let mut phase = Self::default();
        let words = elastic(&[verb, &region_mib.to_string()]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        for _ in 0..rounds {
            let before = stats(exocell, cell)?.guest_claims.pager;
            let printed = exec(exocell, cell, &words)?;
            let after = stats(exocell, cell)?.guest_claims.pager;
            phase.printed.push(printed.split_whitespace().flat_map(str::parse).collect());
            if let (Some(before), Some(after)) = (before, after) {
                phase.bind_ns.push(after.bind_ns_per_page_since(&before));
                phase.unbind_ns.push(after.unbind_ns_per_page_since(&before));
            }
        }
        Ok(phase)
    }

    /// One figure of each round.
    fn column(&self, index: usize) -> Vec<f64> {
        self.printed.iter().filter_map(|round| round.get(index).copied()).collect()
    }
}

fn per_page(ns: u64, bytes: u64) -> f64 {
    ns as f64 / (bytes as f64 / PAGE_BYTES).max(1.0)
}

impl PagerClaims {
    fn bind_ns_per_page_since(&self, before: &Self) -> f64 {
        per_page(self.bind_ns - before.bind_ns, self.bind_bytes - before.bind_bytes)
    }

    fn unbind_ns_per_page_since(&self, before: &Self) -> f64 {
        per_page(self.unbind_ns - before.unbind_ns, self.unbind_bytes - before.unbind_bytes)
    }
}
