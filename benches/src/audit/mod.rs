//! Whether what host processes have mapped is what the guest kernel's page tables say, for
//! each address that user code can name.
//!
//! The guest kernel is made to stand; then its page tables and its records of host processes
//! are read from its memory, and the mappings from the host. A change under way differs for a
//! moment, so what is found is looked for again, and counts if it stays.

mod compare;
mod host;
mod layout;
mod memory;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use exocell_cell::intra::Intra;
use exocell_cell::{Layout, Record};
use serde::Serialize;

use crate::BenchError;
use compare::{Finding, Look};
use host::Cell;
use memory::{Memory, Run};

/// Times to wait before something is looked for again. A change of a busy guest takes longer on
/// a busy host.
const AGAIN_MS: [u64; 4] = [10, 50, 250, 1500];
/// A process that never has done what it was told within this was not looked at.
const UNSETTLED: Duration = Duration::from_secs(20);

/// `exocell bench audit`.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// The cell's name or id.
    pub cell: String,
    /// Go on for so long; 0 for one look.
    #[arg(long, default_value_t = 0)]
    pub seconds: u64,
    /// From one look to the next.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub every_ms: u64,
}

/// What was looked at, and what was found.
#[derive(Debug, Default, Serialize)]
struct Report {
    look_count: u64,
    process_count: u64,
    page_count: u64,
    unsettled_count: u64,
    findings: Vec<String>,
}

/// Looks at a cell until it ends, the time is over, or something is found.
///
/// # Errors
/// There is no such cell, it can't be looked at, or something is mapped that must not be.
pub fn run(root: &Path, args: &AuditArgs) -> Result<(), BenchError> {
    let (_, spec, status) = Record::find(&Layout::new(root), &args.cell)
        .map_err(|error| BenchError::Audit(error.to_string()))?;
    let cell = Cell::new(status.supervisor_pid, status.guest_kernel_inner_pid)?;
    let mut audit = Audit::of(cell, spec.intra == Intra::Mpk)?;
    let until = Instant::now() + Duration::from_secs(args.seconds);
    loop {
        let found = audit.look_again()?;
        if !found.is_empty() || Instant::now() >= until {
            break;
        }
        std::thread::sleep(Duration::from_millis(args.every_ms));
    }
    println!("{}", serde_json::to_string(&audit.report)?);
    match audit.report.findings.first() {
        None => Ok(()),
        Some(first) => Err(BenchError::Audit(first.clone())),
    }
}

struct Audit {
    cell: Cell,
    memory: Memory,
    has_keys: bool,
    report: Report,
    /// Since when processes have not done what they were told
    unsettled: HashMap<i32, Instant>,
}

impl Audit {
    fn of(cell: Cell, has_keys: bool) -> Result<Self, BenchError> {
        let memory = Memory::of(cell.kernel)?;
        let (report, unsettled) = (Report::default(), HashMap::new());
        Ok(Self { cell, memory, has_keys, report, unsettled })
    }

    /// What is there each time that it is looked for.
    fn look_again(&mut self) -> Result<BTreeSet<Finding>, BenchError> {
        let mut found = self.look()?;
        for wait_ms in AGAIN_MS {
            if found.is_empty() {
                return Ok(found);
            }
            std::thread::sleep(Duration::from_millis(wait_ms));
            let now = self.look()?;
            found.retain(|finding| now.contains(finding));
        }
        self.report.findings = found.iter().map(ToString::to_string).collect();
        Ok(found)
    }

    fn look(&mut self) -> Result<BTreeSet<Finding>, BenchError> {
        let stopped = self.cell.stop(self.memory.is_fused)?;
        let findings = self.look_at_standing().map_err(BenchError::host("the guest's memory"))?;
        drop(stopped);
        self.report.look_count += 1;
        Ok(findings)
    }

    fn look_at_standing(&mut self) -> std::io::Result<BTreeSet<Finding>> {
        let layout = self.memory.layout;
        let kernel = host::mappings(self.cell.kernel).unwrap_or_default();
        let Some(file) = kernel.iter().find(|mapping| mapping.run.start >= self.memory.task_size)
        else {
            return Ok(BTreeSet::new());
        };
        let gates = layout.gates_start..layout.gates_end;
        let (reserved, shared, own) = if self.memory.is_fused {
            let reserved = layout.gates_start..self.memory.reserved;
            // With keys a part of the image is each process's own.
            let shared = if self.has_keys { gates } else { reserved.clone() };
            let own = compare::of_file(&kernel, &file.file, &shared);
            (reserved, shared, own)
        } else {
            (gates.clone(), gates, self.memory.gate_rooms()?)
        };
        let copies = self.memory.copies()?;
        let mut look = Look {
            memory: &self.memory,
            file: &file.file,
            copies: &copies,
            reserved: &reserved,
            shared: &shared,
            own: &own,
            findings: Vec::new(),
            page_count: 0,
        };
        let pids: HashMap<i32, i32> =
            self.cell.children().into_iter().map(|child| (child.inner_pid, child.pid)).collect();
        for process in self.memory.processes()? {
            let Some(mappings) = pids.get(&process.inner_pid).and_then(|pid| host::mappings(*pid))
            else {
                continue;
            };
            let mappings = self.memory.place_image(mappings, &kernel, &file.file);
            if !process.has_settled {
                self.report.unsettled_count += 1;
                let since = self.unsettled.entry(process.inner_pid).or_insert_with(Instant::now);
                if since.elapsed() > UNSETTLED {
                    let whole = Run { start: 0, end: 0, offset: 0, access: Default::default() };
                    look.find(&process, "has not done what it was told", whole);
                }
                continue;
            }
            self.unsettled.remove(&process.inner_pid);
            look.at(&process, &mappings)?;
            self.report.process_count += 1;
        }
        self.report.page_count += look.page_count;
        Ok(look.findings.into_iter().collect())
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { inner_pid, what, address, offset, access } = self;
        let letter = |is: bool, letter| if is { letter } else { '-' };
        let access =
            [letter(access.read, 'r'), letter(access.write, 'w'), letter(access.execute, 'x')];
        let access: String = access.iter().collect();
        write!(f, "process {inner_pid}: {address:#x} {access} (page {offset:#x}) {what}")
    }
}
