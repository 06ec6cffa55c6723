//! For scale: the same work as a process of its own each time, in other sandboxes.

use std::process::{Command, Stdio};
use std::time::Instant;

use exocell_exovisor::Metering;

use super::ours::Ours;
use super::{OURS, SLICE, guests};
use crate::BenchError;
use crate::exocell::Exocell;
use crate::options::Options;
use crate::program::{Compiler, Program};
use crate::row::{Row, Unit};
use crate::subject::{Peer, Start, Subject, subjects};

const PROGRAM: Program = Program {
    name: "sfib",
    compiler: Compiler::Gcc,
    sources: &[("sfib.c", include_str!("../../guests/sfib.c"))],
};

/// sfib(20), as in `sfib_fresh`.
const ARGUMENT: i32 = 20;
const CLI: &str = "wasmtime-cli";

fn failed(subject: &str, why: impl ToString) -> BenchError {
    BenchError::Subject { subject: subject.to_owned(), why: why.to_string() }
}

/// Wall clock from the start of each process to its end, and of a call of ours.
pub fn measure(options: &Options, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let ours = Ours::new(guests::SFIB, Metering::Time, 1, 1, SLICE)?;
    let mut subjects = commands(options, exocell)?;
    let module = tempfile::NamedTempFile::with_suffix(".wat");
    let module = module.map_err(|error| failed(CLI, error))?;
    std::fs::write(module.path(), guests::SFIB).map_err(|error| failed(CLI, error))?;
    let mut cli = Command::new("wasmtime");
    cli.args(["run", "--invoke", "run"]).arg(module.path()).arg(ARGUMENT.to_string());
    match cli.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status() {
        Ok(status) if status.success() => subjects.push((CLI.to_owned(), cli)),
        _ => eprintln!("{CLI} is left out: no wasmtime in PATH runs the module"),
    }
    let mut samples = vec![Vec::new(); 1 + subjects.len()];
    for _ in 0..options.rounds {
        let begun = Instant::now();
        ours.call(ARGUMENT)?;
        samples[0].push(begun.elapsed().as_nanos() as f64);
        for ((name, command), samples) in subjects.iter_mut().zip(&mut samples[1..]) {
            let begun = Instant::now();
            let status = command.status();
            samples.push(begun.elapsed().as_nanos() as f64);
            match status {
                Ok(status) if status.success() => {}
                Ok(status) => return Err(failed(name, status)),
                Err(error) => return Err(failed(name, error)),
            }
        }
    }
    let names = [OURS.to_owned()].into_iter().chain(subjects.into_iter().map(|(name, _)| name));
    let rows = names.zip(&samples);
    Ok(rows.filter_map(|(name, all)| Row::of("sfib_process", name, Unit::Ns, all, &[])).collect())
}

/// The native program as each peer runs it.
fn commands(options: &Options, exocell: &Exocell) -> Result<Vec<(String, Command)>, BenchError> {
    let folder = PROGRAM.prepare(&exocell.cache())?;
    let argument = ARGUMENT.to_string();
    let words = [argument.as_str()];
    let start = Start {
        folder: Some(&folder),
        program: PROGRAM.name,
        arguments: &words,
        ..Start::default()
    };
    let wanted = [Peer::Native, Peer::Bwrap, Peer::Gvisor];
    let wanted: Vec<Peer> = wanted
        .into_iter()
        .filter(|peer| options.peers.is_empty() || options.peers.contains(peer))
        .collect();
    let all = if wanted.is_empty() { Vec::new() } else { subjects(&wanted, &[], exocell) };
    let isolated = all.into_iter().filter(|subject| !subject.is_cell());
    let command = |subject: Subject| {
        let mut command = subject.command(exocell, &start);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        (subject.to_string(), command)
    };
    Ok(isolated.map(command).collect())
}
