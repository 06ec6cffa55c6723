//! Start times: subjects take turns, so that a slow moment of the machine
//! hits all of them.

use std::process::{Command, Stdio};
use std::time::Instant;

use serde::Deserialize;

use crate::exocell::{Cell, Exocell};
use crate::row::Unit;
use crate::subject::{self, Start, Subject};
use crate::{BenchError, Options, Row, warm};

/// From the command's start to its end.
const TOTAL: &str = "start/total";
/// The stages of a cell's start, in order.
const STAGES: [&str; 4] =
    ["start/jailed", "start/kernel-to-init", "start/init-to-ready", "start/ready-to-exec"];

/// A subject and what was measured of it.
struct Turn {
    subject: Subject,
    samples_us: Vec<f64>,
}

pub fn measure(options: &Options, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let subjects = subject::subjects(&options.peers, &options.kernel, exocell);
    let mut turns: Vec<Turn> =
        subjects.into_iter().map(|subject| Turn { subject, samples_us: Vec::new() }).collect();
    let mut stages: [Vec<f64>; STAGES.len()] = Default::default();
    for round in 0..options.rounds {
        take_turns(&mut turns, round as usize, exocell);
        for (samples, us) in stages.iter_mut().zip(stages_us(exocell, round)?) {
            samples.push(us as f64);
        }
    }
    let mut rows = rows(&turns, &stages, exocell);
    rows.extend(warm::measure(options.rounds, exocell)?);
    Ok(rows)
}

fn command(subject: &Subject, exocell: &Exocell) -> Command {
    let start = Start { program: "true", ..Start::default() };
    let mut command = subject.command(exocell, &start);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// One round; each round begins with another subject.
fn take_turns(turns: &mut [Turn], round: usize, exocell: &Exocell) {
    let count = turns.len().max(1);
    for index in 0..turns.len() {
        let Some(turn) = turns.get_mut((index + round) % count) else { continue };
        match time(command(&turn.subject, exocell)) {
            Ok(us) => turn.samples_us.push(us),
            Err(why) => eprintln!("round {round}: {}: {why}", turn.subject),
        }
    }
}

/// Microseconds from the start of the command to its end.
fn time(mut command: Command) -> Result<f64, String> {
    let start = Instant::now();
    let status = command.status().map_err(|error| error.to_string())?;
    let elapsed_us = start.elapsed().as_micros() as f64;
    if status.success() { Ok(elapsed_us) } else { Err(status.to_string()) }
}

/// The part of `exocell inspect` that tells how a start went, in microseconds
/// since the request.
#[derive(Deserialize)]
struct Inspected {
    times: Times,
}

#[derive(Deserialize)]
struct Times {
    jailed_us: u64,
    kernel_started_us: u64,
    guest_ready_us: u64,
    program_started_us: u64,
    guest_init_us: u64,
}

impl Times {
    fn stages(&self) -> [u64; STAGES.len()] {
        let init_us = self.kernel_started_us + self.guest_init_us;
        [
            self.jailed_us,
            self.guest_init_us,
            self.guest_ready_us.saturating_sub(init_us),
            self.program_started_us.saturating_sub(self.guest_ready_us),
        ]
    }
}

fn stages_us(exocell: &Exocell, round: u32) -> Result<[u64; STAGES.len()], BenchError> {
    let name = format!("bench-start-{}-{round}", std::process::id());
    let cell = Cell::start(exocell, name, &[])?;
    let [inspected]: [Inspected; 1] = exocell.ask("inspect", &["inspect", "--json", &cell.name])?;
    Ok(inspected.times.stages())
}

fn rows(turns: &[Turn], stages: &[Vec<f64>; STAGES.len()], exocell: &Exocell) -> Vec<Row> {
    let totals = turns.iter().filter_map(|turn| {
        let params = [("command", subject::shown(&command(&turn.subject, exocell)))];
        Row::of(TOTAL, &turn.subject, Unit::Us, &turn.samples_us, &params)
    });
    let ours = Subject::ParaAspace(None);
    let params = [("image", exocell.image.clone())];
    let parts = STAGES
        .into_iter()
        .zip(stages)
        .filter_map(|(name, us)| Row::of(name, &ours, Unit::Us, us, &params));
    totals.chain(parts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_to_the_whole() {
        let times = Times {
            jailed_us: 5,
            kernel_started_us: 10,
            guest_ready_us: 90,
            program_started_us: 100,
            guest_init_us: 60,
        };
        assert_eq!(times.stages(), [5, 60, 20, 10]);
    }
}
