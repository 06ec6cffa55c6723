//! Cells whose limits add up to several times what they have together, under load
//! at once. Every other one stays within its guarantee; the rest take what they get.
//!
//! The same loads run with a budget, with the Pager but no budget, and without the
//! Pager: what a host needs for each of these.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use exocell_cell::pager::Mode;

use super::loads::{Load, elastic, replays};
use super::{FOLDER, PROGRAM, chart, exec, memory_file, subject, write};
use crate::exocell::{Cell, Exocell};
use crate::options::OversubscriptionArgs;
use crate::row::Unit;
use crate::scratch::Scratch;
use crate::{BenchError, Row};

/// Who is compared, the one with the budget first.
const MODES: [Mode; 3] = [Mode::Credit, Mode::Eager, Mode::Off];
/// Between two looks at what all cells hold.
const PERIOD: Duration = Duration::from_millis(20);
/// What a guest needs of its guarantee beside a program's memory: its kernel, the
/// program's file and what it keeps free, and a 32nd of all memory to account for it.
const OWN_MIB: u64 = 48;

/// `exocell bench oversubscription`.
pub fn measure_together(
    args: &OversubscriptionArgs,
    exocell: &Exocell,
) -> Result<Vec<Row>, BenchError> {
    let cache = exocell.cache();
    let folder = PROGRAM.prepare(&cache)?;
    let (mut rows, mut runs) = (Vec::new(), Vec::new());
    for mode in MODES {
        // A budget is its state root's, and the operator has one of his own.
        let root = Scratch::new(&cache)?;
        let apart = exocell.apart(root.path())?;
        let (looks, ended) = run(mode, args, &folder, &apart)?;
        rows.extend(self::rows(mode, args, &looks, &ended));
        runs.push((name(mode), looks));
    }
    keep(args, &runs)?;
    rows.sort_by(|a, b| a.bench.cmp(&b.bench));
    Ok(rows)
}

/// Writes what was held, and a chart of it, where `--csv` says.
fn keep(args: &OversubscriptionArgs, runs: &[(&str, Vec<Look>)]) -> Result<(), BenchError> {
    let Some(folder) = &args.csv else { return Ok(()) };
    let mut lines: Vec<(&str, chart::Points)> = Vec::new();
    for (subject, looks) in runs {
        write(folder, &format!("oversubscription-{subject}.csv"), csv(looks))?;
        let point = |look: &Look| (look.at_s, look.sum() / chart::MIB);
        lines.push((subject, looks.iter().map(point).collect()));
    }
    let title = "MiB held for all cells, over seconds";
    write(folder, "oversubscription.svg", chart::lines_of(title, &lines))
}

/// A line for each look: what is held for all, and for each cell.
fn csv(looks: &[Look]) -> String {
    let cells = looks.first().map_or(0, |look| look.held.len());
    let mut text = "t_s,held_bytes".to_owned();
    (0..cells).for_each(|cell| text += &format!(",cell_{cell}_bytes"));
    for look in looks {
        text += &format!("\n{:.3},{:.0}", look.at_s, look.sum());
        look.held.iter().for_each(|bytes| text += &format!(",{bytes:.0}"));
    }
    text + "\n"
}

/// What the host held at one moment for each cell, in bytes.
struct Look {
    at_s: f64,
    held: Vec<f64>,
}

impl Look {
    fn sum(&self) -> f64 {
        self.held.iter().sum()
    }
}

/// The load of a cell, and whether its guarantee is enough for it.
struct Part {
    load: Load,
    within: bool,
}

fn parts(args: &OversubscriptionArgs) -> Result<Vec<Part>, BenchError> {
    let own_mib = OWN_MIB + args.memory_mib / 32;
    let bursts = |seed: u64, most_mib: u64| Load {
        name: format!("bursts-{seed}"),
        words: elastic(&[
            "bursty",
            &args.seconds.to_string(),
            &seed.to_string(),
            &most_mib.to_string(),
        ]),
        input: None,
    };
    let mut traces = match &args.traces {
        Some(folder) => replays(folder, args.speed, args.memory_mib)?,
        None => Vec::new(),
    }
    .into_iter();
    let part = |at: u64| {
        let within = at.is_multiple_of(2);
        let load = match within {
            true => bursts(at, args.guarantee_mib.saturating_sub(own_mib)),
            false => traces.next().unwrap_or_else(|| bursts(at, args.memory_mib / 2)),
        };
        Part { load, within }
    };
    Ok((0..args.cells).map(part).collect())
}

/// How the program of a part ended.
struct Ended {
    within: bool,
    well: bool,
    /// Whether the cell still answers.
    lives: bool,
    took_us: f64,
}

/// All parts under one mode, at once.
fn run(
    mode: Mode,
    args: &OversubscriptionArgs,
    folder: &Path,
    exocell: &Exocell,
) -> Result<(Vec<Look>, Vec<Ended>), BenchError> {
    if mode == Mode::Credit {
        exocell.call(&["budget", &format!("{}m", args.budget_mib)])?;
    }
    let parts = parts(args)?;
    let cells = parts.iter().enumerate().map(|(at, part)| {
        let name = format!("bench-together-{}-{mode}-{at}", std::process::id());
        start(mode, args, folder, exocell, name, &part.load)
    });
    let cells: Vec<Cell> = cells.collect::<Result<_, _>>()?;
    let files: Vec<PathBuf> =
        cells.iter().map(|cell| memory_file(exocell, cell)).collect::<Result<_, _>>()?;
    let over = AtomicBool::new(false);
    let (held, ended) = thread::scope(|scope| {
        let held = scope.spawn(|| held_until(&over, &files));
        let at_once: Vec<_> = parts
            .iter()
            .zip(&cells)
            .map(|(part, cell)| scope.spawn(|| end_of(exocell, cell, part)))
            .collect();
        let ended: Vec<_> = at_once.into_iter().map(|part| part.join()).collect();
        over.store(true, Ordering::Relaxed);
        (held.join(), ended)
    });
    let gone = |_| BenchError::Subject {
        subject: mode.to_string(),
        why: "a thread of the benchmark panicked".to_owned(),
    };
    let ended: Vec<Ended> = ended.into_iter().collect::<Result<_, _>>().map_err(gone)?;
    Ok((held.map_err(gone)?, ended))
}

fn start<'a>(
    mode: Mode,
    args: &OversubscriptionArgs,
    folder: &Path,
    exocell: &'a Exocell,
    name: String,
    load: &Load,
) -> Result<Cell<'a>, BenchError> {
    let memory = format!("{}m", args.memory_mib);
    let guarantee = format!("{}m", args.guarantee_mib);
    let program = format!("{}:{FOLDER}:ro", folder.display());
    let input = load.volume();
    let mut options = vec!["--pager", mode.name(), "--memory", &memory];
    if mode == Mode::Credit {
        options.extend(["--memory-guarantee", &guarantee]);
    }
    options.extend(["--volume", &program]);
    options.extend(input.iter().flat_map(|volume| ["--volume", volume.as_str()]));
    Cell::start(exocell, name, &options)
}

/// Looks at what the host holds, until it is over.
fn held_until(over: &AtomicBool, files: &[PathBuf]) -> Vec<Look> {
    let since = Instant::now();
    let mut looks = Vec::new();
    while !over.load(Ordering::Relaxed) {
        // A cell that has ended holds nothing.
        let held =
            |file: &PathBuf| file.metadata().map_or(0.0, |file| file.blocks() as f64 * 512.0);
        let at_s = since.elapsed().as_secs_f64();
        looks.push(Look { at_s, held: files.iter().map(held).collect() });
        thread::sleep(PERIOD);
    }
    looks
}

fn end_of(exocell: &Exocell, cell: &Cell, part: &Part) -> Ended {
    let words: Vec<&str> = part.load.words.iter().map(String::as_str).collect();
    let since = Instant::now();
    let ended = exec(exocell, cell, &words);
    let took_us = since.elapsed().as_micros() as f64;
    if let Err(error) = &ended {
        eprintln!("{}: {error}", part.load.name);
    }
    let lives = exec(exocell, cell, &["true"]).is_ok();
    Ended { within: part.within, well: ended.is_ok(), lives, took_us }
}

/// Its name here, where credit is lent of a budget.
fn name(mode: Mode) -> &'static str {
    match mode {
        Mode::Credit => "budget",
        mode => subject::name(mode),
    }
}

fn rows(mode: Mode, args: &OversubscriptionArgs, looks: &[Look], ended: &[Ended]) -> Vec<Row> {
    let held: Vec<f64> = looks.iter().map(Look::sum).collect();
    let params = [
        ("cells", args.cells.to_string()),
        ("memory", format!("{} MiB", args.memory_mib)),
        ("guarantee", format!("{} MiB", args.guarantee_mib)),
        ("budget", format!("{} MiB", args.budget_mib)),
    ];
    let row = |name: &str, unit, values: &[f64]| {
        Row::of(format!("oversubscription/{name}"), self::name(mode), unit, values, &params)
    };
    let count = |of: &dyn Fn(&Ended) -> bool| [ended.iter().filter(|end| of(end)).count() as f64];
    let took = |within| -> Vec<f64> {
        let of = ended.iter().filter(|end| end.within == within && end.well);
        of.map(|end| end.took_us).collect()
    };
    let most = held.iter().copied().fold(0.0, f64::max);
    let rows = [
        row("held_max", Unit::Bytes, &[most]),
        row("held", Unit::Bytes, &held),
        row("within_ended_well", Unit::Count, &count(&|end| end.within && end.well)),
        row("beyond_ended_well", Unit::Count, &count(&|end| !end.within && end.well)),
        row("cells_alive", Unit::Count, &count(&|end| end.lives)),
        row("within_time", Unit::Us, &took(true)),
        row("beyond_time", Unit::Us, &took(false)),
    ];
    rows.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_other_cell_stays_within_its_guarantee() {
        use clap::Parser;
        #[derive(Parser)]
        struct Words {
            #[command(flatten)]
            args: OversubscriptionArgs,
        }
        let parts = parts(&Words::parse_from(["", "--cells", "3", "--seconds", "9"]).args);
        let words: Vec<_> = parts.unwrap().into_iter().map(|part| part.load.words).collect();
        let bursts = |seed: &str, most: &str| elastic(&["bursty", "9", seed, most]);
        assert_eq!(words, [bursts("0", "48"), bursts("1", "512"), bursts("2", "48")]);
    }
}
