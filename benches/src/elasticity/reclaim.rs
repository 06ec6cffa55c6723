//! How fast memory that programs give up goes back: whole regions, where page
//! frames are neighbours, and every other page of one, where none are.

use std::path::Path;

use exocell_cell::pager::Mode;
use serde::Deserialize;

use super::loads::elastic;
use super::{PROGRAM, exec, start, subject};
use crate::exocell::{Cell, Exocell};
use crate::options::ReclaimArgs;
use crate::row::Unit;
use crate::{BenchError, Row};

const MODES: [Mode; 3] = [Mode::Eager, Mode::Credit, Mode::Off];

const PAGE_BYTES: f64 = 4096.0;
/// A page that is left alone between two that are given up is a mapping of its own,
/// of which the host allows a process some 65,000 (vm.max_map_count).
const SCATTERED_MIB_MAX: u64 = 256;

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
    let held = |stats: &Stats| stats.counters.memory_allocated_bytes as f64;
    let before = stats(exocell, &cell)?;
    let whole = Phase::run(exocell, &cell, "reclaim", args.region_mib, args.options.rounds)?;
    let left = held(&stats(exocell, &cell)?) - held(&before);
    let scattered_mib = args.region_mib.min(SCATTERED_MIB_MAX);
    let other = Phase::run(exocell, &cell, "scattered", scattered_mib, args.options.rounds)?;
    let params = [
        ("region", format!("{} MiB", args.region_mib)),
        ("scattered", format!("{scattered_mib} MiB")),
        ("left", format!("{left:.0} bytes")),
    ];
    let row = |name: &str, unit, values: &[f64]| {
        Row::of(format!("reclaim/{name}"), subject::name(mode), unit, values, &params)
    };
    // Bytes a nanosecond are GB a second; without the Pager nothing is reclaimed.
    let rate: Vec<f64> = whole.column(1).iter().map(|ns| PAGE_BYTES / ns).collect();
    let given_back = if mode == Mode::Off { &[][..] } else { &rate };
    let rows = [
        row("reclaim_gb_s", Unit::GbPerSecond, given_back),
        row("fault_ns", Unit::Ns, &whole.column(0)),
        row("munmap_ns", Unit::Ns, &whole.column(1)),
        row("dontneed_other_ns", Unit::Ns, &other.column(0)),
        row("bind_ns", Unit::Ns, &whole.bind_ns),
        row("unbind_coalesced_ns", Unit::Ns, &whole.unbind_ns),
        row("unbind_isolated_ns", Unit::Ns, &other.unbind_ns),
    ];
    Ok(rows.into_iter().flatten().collect())
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
