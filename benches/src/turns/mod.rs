//! Subjects that take turns: each runs one program that answers requests, and a
//! round asks each subject for each measurement, so that a slow moment of the
//! machine hits all of them alike.

mod session;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::BenchError;
use crate::exocell::Exocell;
use crate::network::Lan;
use crate::row::{Row, Unit};
use crate::subject::{Start, Subject};
pub use session::{Refusal, Session};

/// What the program can measure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measurement {
    pub name: String,
    pub unit: Unit,
    /// The processors it needs.
    pub cpus: u32,
}

/// What `list`, a program that lists, says it can measure: `NAME UNIT CPUS` lines.
pub fn listed(mut list: Command) -> Result<Vec<Measurement>, BenchError> {
    let output = list.output().map_err(BenchError::host(list.get_program().display()))?;
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
pub fn choose(all: Vec<Measurement>, only: &[String]) -> Result<Vec<Measurement>, BenchError> {
    if let Some(name) = only.iter().find(|name| all.iter().all(|one| one.name != **name)) {
        let known: Vec<_> = all.iter().map(|one| one.name.as_str()).collect();
        return Err(BenchError::NoMeasurement { name: name.clone(), known: known.join(" ") });
    }
    Ok(all.into_iter().filter(|one| only.is_empty() || only.contains(&one.name)).collect())
}

/// How subjects are run.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    pub cpus: u32,
    pub realtime: bool,
    /// Of a cell.
    pub memory: &'a str,
    /// Values that a subject gives in one turn.
    pub samples: u32,
    /// The program and the host folder it is in.
    pub program: &'a str,
    pub folder: &'a Path,
    /// The files of the image, for subjects that run no image.
    pub root: Option<&'a Path>,
    /// The program's arguments.
    pub arguments: &'a [&'a str],
    /// More options of a cell.
    pub cell: &'a [&'a str],
    /// The network that subjects are on.
    pub lan: Option<&'a Lan>,
    pub exocell: &'a Exocell,
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
pub struct Run<'a> {
    measurements: Vec<Measurement>,
    turns: Vec<Turn<'a>>,
    setting: Setting<'a>,
}

impl<'a> Run<'a> {
    pub fn new(
        subjects: &'a [Subject],
        measurements: Vec<Measurement>,
        setting: Setting<'a>,
    ) -> Self {
        let values = vec![Some(Vec::new()); measurements.len()];
        let turn = |subject| Turn { subject, session: None, values: values.clone(), starts: 0 };
        Self { turns: subjects.iter().map(turn).collect(), measurements, setting }
    }

    /// Each measurement on each subject; each round begins with another subject.
    pub fn round(&mut self, round: usize) {
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
        match session.ask(&wanted.name, self.setting.samples) {
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

    pub fn rows(&self) -> Vec<Row> {
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
    if *starts >= STARTS_MAX {
        return None;
    }
    *starts += 1;
    let cpus = setting.cpus.to_string();
    let name = format!("bench-{}-{}", std::process::id(), new_number());
    let cell = ["-i", "--name", &name, "--memory", setting.memory, "--cpus", &cpus];
    let cell = [&cell, setting.cell].concat();
    let start = Start {
        folder: Some(setting.folder),
        root: setting.root,
        program: setting.program,
        arguments: setting.arguments,
        cell: &cell,
        lan: setting.lan,
    };
    let mut command = subject.command(setting.exocell, &start);
    if setting.realtime {
        command = in_realtime(&command);
    }
    command.stderr(Stdio::inherit());
    let cleanup = subject.is_cell().then(|| setting.exocell.with(&["rm", "--force", &name]));
    match Session::start(command, setting.cpus == 1, cleanup) {
        Ok(session) => Some(session),
        Err(why) => {
            eprintln!("{subject} does not start: {why}");
            None
        }
    }
}

/// It takes root, or a limit that an administrator has raised.
pub fn may_be_realtime() -> bool {
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
