//! Many idle cells at once: what each costs the host, and whether each answers.

use std::fs;
use std::time::{Duration, Instant};

use exocell_cell::processes;
use serde::Deserialize;

use crate::exocell::{Cell, Exocell, WAITER};
use crate::options::DensityArgs;
use crate::row::Unit;
use crate::warm::Pool;
use crate::{BenchError, Row, Subject};

/// A started cell comes to rest within this.
const SETTLE: Duration = Duration::from_secs(3);
/// The guest memory file's name in proc_pid_smaps(5): its pages are counted
/// once, by what the host has allocated for it.
const GUEST_MEMORY: &str = "memfd:exocell-guest";

/// Measures as many cells as `args` asks for, at rest.
pub fn measure(args: &DensityArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    match args.warm {
        true => warm(args.cells, exocell),
        false => running(args.cells, exocell),
    }
}

/// Cells that wait in a pool.
fn warm(count: u32, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let mut pool = Pool::start(exocell, count)?;
    let ids = (0..count).map(|_| pool.await_warm()).collect::<Result<Vec<_>, _>>()?;
    std::thread::sleep(SETTLE);
    let used = ids.iter().map(|id| of_cell(exocell, id)).collect::<Result<Vec<_>, _>>()?;
    Ok(rows(&used, "none: warm"))
}

/// Starts `count` cells, measures them, then asks each to run `true`.
fn running(count: u32, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let mut cells = Vec::new();
    for index in 0..count {
        let name = format!("bench-density-{}-{index}", std::process::id());
        cells.push(Cell::start(exocell, name, &[])?);
    }
    std::thread::sleep(SETTLE);
    let used = cells.iter().map(|cell| of_cell(exocell, &cell.name));
    let used = used.collect::<Result<Vec<_>, _>>()?;
    let exec_us =
        cells.iter().map(|cell| answer_us(exocell, cell)).collect::<Result<Vec<_>, _>>()?;
    let mut rows = rows(&used, WAITER);
    rows.extend(row("density/exec", Unit::Us, &exec_us, WAITER));
    Ok(rows)
}

fn row(bench: &str, unit: Unit, samples: &[f64], program: &str) -> Option<Row> {
    let params = [("cells", samples.len().to_string()), ("program", program.to_owned())];
    Row::of(bench, Subject::ParaAspace(None), unit, samples, &params)
}

fn rows(used: &[Memory], program: &str) -> Vec<Row> {
    let bytes = |bench, of: fn(&Memory) -> u64| {
        let samples: Vec<f64> = used.iter().map(|memory| of(memory) as f64).collect();
        row(bench, Unit::Bytes, &samples, program)
    };
    let total = used.iter().map(Memory::sum).sum::<u64>() as f64;
    let rows = [
        bytes("density/guest-memory", |memory| memory.guest_bytes),
        bytes("density/private", |memory| memory.private_bytes),
        bytes("density/page-tables", |memory| memory.page_tables_bytes),
        bytes("density/sum", Memory::sum),
        bytes("density/pss", |memory| memory.proportional_bytes),
        row("density/all-cells", Unit::Bytes, &[total], program),
    ];
    rows.into_iter().flatten().collect()
}

/// Memory of one cell.
#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    /// What the host has allocated for the guest memory file.
    guest_bytes: u64,
    /// Pages that only one process maps, without the guest memory file's.
    private_bytes: u64,
    /// The host's page tables of the cell's processes.
    page_tables_bytes: u64,
    /// Pss of all the processes, the guest memory file included.
    proportional_bytes: u64,
}

impl Memory {
    /// What the host gets back when the cell ends.
    fn sum(&self) -> u64 {
        self.guest_bytes + self.private_bytes + self.page_tables_bytes
    }

    /// Adds one process, by its smaps and status files.
    fn add(&mut self, smaps: &str, status: &str) {
        let mut guest = false;
        for line in smaps.lines() {
            let mut words = line.split_ascii_whitespace();
            let kib = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok());
            match words.next() {
                Some("Private_Clean:" | "Private_Dirty:") if !guest => {
                    self.private_bytes += kib(words.next()).unwrap_or(0) << 10;
                }
                Some("Pss:") => self.proportional_bytes += kib(words.next()).unwrap_or(0) << 10,
                // A mapping's first line starts with its addresses.
                Some(word) if !word.ends_with(':') => guest = line.contains(GUEST_MEMORY),
                _ => {}
            }
        }
        let tables = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
        let kib = tables.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok());
        self.page_tables_bytes += kib.unwrap_or(0) << 10;
    }
}

#[derive(Deserialize)]
struct Inspected {
    supervisor_pid: Option<i32>,
}

#[derive(Deserialize)]
struct Stats {
    counters: Counters,
}

#[derive(Deserialize)]
struct Counters {
    memory_allocated_bytes: u64,
}

fn of_cell(exocell: &Exocell, cell: &str) -> Result<Memory, BenchError> {
    let stats: Stats = exocell.ask("stats", &["stats", "--json", cell])?;
    let [inspected]: [Inspected; 1] = exocell.ask("inspect", &["inspect", "--json", cell])?;
    let mut memory =
        Memory { guest_bytes: stats.counters.memory_allocated_bytes, ..Memory::default() };
    for process in processes::of_cell(inspected.supervisor_pid.unwrap_or(0)) {
        let read = |file: &str| {
            let path = format!("/proc/{}/{file}", process.pid);
            fs::read_to_string(&path).map_err(BenchError::host(path))
        };
        memory.add(&read("smaps")?, &read("status")?);
    }
    Ok(memory)
}

fn answer_us(exocell: &Exocell, cell: &Cell<'_>) -> Result<f64, BenchError> {
    let start = Instant::now();
    exocell.call(&["exec", &cell.name, "true"])?;
    Ok(start.elapsed().as_micros() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_memory_file_is_not_counted_as_private() {
        let smaps = "\
10000-20000 rw-s 00000000 00:01 7 /memfd:exocell-guest (deleted)
Pss:                  64 kB
Private_Clean:         0 kB
Private_Dirty:        64 kB
30000-40000 rw-p 00000000 00:00 0 [heap]
Pss:                   8 kB
Private_Clean:         4 kB
Private_Dirty:         4 kB
";
        let mut memory = Memory::default();
        memory.add(smaps, "Name:\tlinux\nVmPTE:\t      12 kB\n");
        assert_eq!(memory.private_bytes, 8 << 10);
        assert_eq!(memory.proportional_bytes, 72 << 10);
        assert_eq!(memory.page_tables_bytes, 12 << 10);
        assert_eq!(memory.sum(), 20 << 10);
    }
}
