//! System calls, faults, processes and bandwidths, by one static program.
//!
//! Each subject runs the program once and answers requests; a round asks each
//! subject in turn for each measurement, so that a slow moment of the machine
//! hits all of them alike.

mod session;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::BenchError;
use crate::exocell::Exocell;
use crate::options::MicroArgs;
use crate::program::Program;
use crate::row::{Row, Unit};
use crate::subject::{self, Start, Subject};
use session::{Refusal, Session};

/// The sources in `benches/micro`.
const PROGRAM: Program = Program {
    name: "micro",
    sources: &[
        ("micro.h", include_str!("../../micro/micro.h")),
        ("micro.c", include_str!("../../micro/micro.c")),
        ("calls.c", include_str!("../../micro/calls.c")),
        ("memory.c", include_str!("../../micro/memory.c")),
        ("processes.c", include_str!("../../micro/processes.c")),
        ("bandwidth.c", include_str!("../../micro/bandwidth.c")),
    ],
};
/// Values that a subject gives in one turn.
const SAMPLES_PER_TURN: u32 = 3;
/// Enough for what is measured, and the same for every cell.
const MEMORY: &str = "512m";

/// What the program can measure.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Measurement {
    name: String,
    unit: Unit,
    /// The processors it needs.
    cpus: u32,
}

/// Measures what `args` ask for; rows in the order of the program's list.
pub fn measure(args: &MicroArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let folder = PROGRAM.prepare(&exocell.cache())?;
    let wanted = choose(listed(&folder)?, &args.only)?;
    let subjects = subject::subjects(&args.options.peers, &args.options.kernel, exocell);
    let realtime = !args.fair && may_be_realtime();
    let mut rows = Vec::new();
    for needed in [1, 2] {
        let group: Vec<_> = wanted.iter().filter(|one| one.cpus == needed).cloned().collect();
        let setting = Setting { cpus: args.cpus.max(needed), realtime, folder: &folder, exocell };
        let mut run = Run::new(&subjects, group, setting);
        for round in 0..args.options.rounds as usize {
            run.round(round);
        }
        rows.extend(run.rows());
    }
    Ok(rows)
}

/// What the program says it can measure: `NAME UNIT CPUS` lines.
fn listed(folder: &Path) -> Result<Vec<Measurement>, BenchError> {
    let program = folder.join(PROGRAM.name);
    let output = Command::new(&program).arg("list").output();
    let output = output.map_err(BenchError::host(program.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(measurement).collect())
}

fn measurement(line: &str) -> Option<Measurement> {
    let mut words = line.split(' ');
    let name = words.next()?.to_owned();
    let unit = match words.next()? {
        "ns" => Unit::Ns,
        "MB/s" => Unit::MbPerSecond,
        "x" => Unit::Times,
        _ => return None,
    };
    Some(Measurement { name, unit, cpus: words.next()?.parse().ok()? })
}

/// The measurements that `only` names; all where it is empty.
fn choose(all: Vec<Measurement>, only: &[String]) -> Result<Vec<Measurement>, BenchError> {
    if let Some(name) = only.iter().find(|name| all.iter().all(|one| one.name != **name)) {
        let known: Vec<_> = all.iter().map(|one| one.name.as_str()).collect();
        return Err(BenchError::NoMeasurement { name: name.clone(), known: known.join(" ") });
    }
    Ok(all.into_iter().filter(|one| only.is_empty() || only.contains(&one.name)).collect())
}

/// How subjects are run.
#[derive(Clone, Copy)]
struct Setting<'a> {
    cpus: u32,
    realtime: bool,
    folder: &'a Path,
    exocell: &'a Exocell,
}

/// A subject in a run, with its values for each measurement.
struct Turn<'a> {
    subject: &'a Subject,
    session: Option<Session>,
    /// By measurement; `None` once one was refused.
    values: Vec<Option<Vec<f64>>>,
    starts: u32,
}

/// Measurements that need the same number of processors, on all subjects.
struct Run<'a> {
    measurements: Vec<Measurement>,
    turns: Vec<Turn<'a>>,
    setting: Setting<'a>,
}

impl<'a> Run<'a> {
    fn new(subjects: &'a [Subject], measurements: Vec<Measurement>, setting: Setting<'a>) -> Self {
        let values = vec![Some(Vec::new()); measurements.len()];
        let turn = |subject| Turn { subject, session: None, values: values.clone(), starts: 0 };
        Self { turns: subjects.iter().map(turn).collect(), measurements, setting }
    }

    /// Each measurement on each subject; each round begins with another subject.
    fn round(&mut self, round: usize) {
        for index in 0..self.measurements.len() {
            for offset in 0..self.turns.len() {
                self.take_turn((offset + round) % self.turns.len(), index);
            }
        }
    }

    fn take_turn(&mut self, subject: usize, index: usize) {
        let (Some(turn), Some(wanted)) =
            (self.turns.get_mut(subject), self.measurements.get(index))
        else {
            return;
        };
        let Some(Some(values)) = turn.values.get_mut(index) else { return };
        if turn.session.is_none() {
            turn.session = start(turn.subject, &mut turn.starts, self.setting);
        }
        let Some(session) = &mut turn.session else { return };
        match session.ask(&wanted.name, SAMPLES_PER_TURN) {
            Ok(found) => values.extend(found),
            Err(refusal) => {
                turn.values[index] = None;
                let why = match refusal {
                    Refusal::Reason(why) => why,
                    Refusal::Gone(why) => {
                        turn.session = None;
                        format!("the subject is gone: {why}")
                    }
                };
                eprintln!("{}: {}: {why}", turn.subject, wanted.name);
            }
        }
    }

    fn rows(&self) -> Vec<Row> {
        let params = [
            ("cpus", self.setting.cpus.to_string()),
            ("pinned", yes_or_no(self.setting.cpus == 1)),
            ("realtime", yes_or_no(self.setting.realtime)),
        ];
        let mut rows = Vec::new();
        for (index, one) in self.measurements.iter().enumerate() {
            for turn in &self.turns {
                let values = turn.values.get(index).and_then(Option::as_ref);
                let row = values
                    .and_then(|values| Row::of(&one.name, turn.subject, one.unit, values, &params));
                rows.extend(row);
            }
        }
        rows
    }
}

/// A subject that dies is started again this many times, then left out.
const STARTS_MAX: u32 = 3;

fn start(subject: &Subject, starts: &mut u32, setting: Setting<'_>) -> Option<Session> {
    let Setting { cpus, folder, exocell, .. } = setting;
    if *starts >= STARTS_MAX {
        return None;
    }
    *starts += 1;
    let cpu_count = cpus.to_string();
    let name = format!("bench-{}-{}", std::process::id(), new_number());
    let cell = ["-i", "--name", &name, "--memory", MEMORY, "--cpus", &cpu_count];
    let start =
        Start { folder: Some(folder), program: PROGRAM.name, arguments: &["serve"], cell: &cell };
    let mut command = subject.command(exocell, &start);
    if setting.realtime {
        command = in_realtime(&command);
    }
    command.stderr(Stdio::inherit());
    let cleanup = subject.is_cell().then(|| exocell.with(&["rm", "--force", &name]));
    match Session::start(command, cpus == 1, cleanup) {
        Ok(session) => Some(session),
        Err(why) => {
            eprintln!("{subject} does not start: {why}");
            None
        }
    }
}

/// It takes root, or a limit that an administrator has raised.
fn may_be_realtime() -> bool {
    let mut probe = in_realtime(&Command::new("true"));
    probe.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// `command` under chrt(1), the rest as it is.
fn in_realtime(command: &Command) -> Command {
    let mut urgent = Command::new("chrt");
    urgent.args(["--rr", "1"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            urgent.env(name, value);
        }
    }
    urgent
}

fn yes_or_no(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

fn new_number() -> u32 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_program_lists_is_understood_and_chosen_from() {
        let cache = tempfile::tempdir().unwrap();
        let all = listed(&PROGRAM.prepare(cache.path()).unwrap()).unwrap();
        assert!(all.len() > 20, "{all:?}");
        let only = ["fork_exit".to_owned(), "null_syscall".to_owned()];
        let names: Vec<_> =
            choose(all.clone(), &only).unwrap().into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["null_syscall", "fork_exit"]);
        let error = choose(all, &["fork_exot".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("fork_exot") && error.contains("fork_exec"), "{error}");
    }

    #[test]
    fn the_program_measures_natively() {
        let cache = tempfile::tempdir().unwrap();
        let folder = PROGRAM.prepare(cache.path()).unwrap();
        let mut command = Command::new(folder.join(PROGRAM.name));
        command.arg("serve");
        let mut session = Session::start(command, false, None).unwrap();
        for name in ["null_syscall", "fault_anon_rand", "fork_exit", "bw_file"] {
            let values = session.ask(name, 2).unwrap_or_else(|why| panic!("{name}: {why:?}"));
            assert!(
                values.len() == 2 && values.iter().all(|value| *value > 0.0),
                "{name}: {values:?}"
            );
        }
        let refused = Refusal::Reason("not a request".to_owned());
        assert_eq!(session.ask("nonsense", 1), Err(refused));
    }
}
