//! From the command to the first byte that its program writes: of cells that
//! boot, and of warm ones that a pool keeps.

use std::io::{BufRead, BufReader, Lines, Read};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::exocell::Exocell;
use crate::row::Unit;
use crate::{BenchError, Row, Subject};

const BENCH: &str = "start/first-output";
/// What the cells of the pool have that no other cell is likely to want.
const KIND: [&str; 2] = ["--pids-limit", "1021"];
/// A warm cell is ready within this.
const READY_MAX: Duration = Duration::from_secs(60);
/// The host settles for so long before a cell is measured.
const REST: Duration = Duration::from_millis(50);

/// Both kinds take turns.
pub fn measure(rounds: u32, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let mut pool = Pool::start(exocell, 1)?;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        pool.await_warm()?;
        std::thread::sleep(REST);
        cold.push(first_output_us(exocell, &["--pids-limit", "1022"])?);
        std::thread::sleep(REST);
        warm.push(first_output_us(exocell, &KIND)?);
    }
    let row = |samples: &[f64], from: &str| {
        let params = [("from", from.to_owned()), ("command", "echo".to_owned())];
        let subject = match from {
            "pool" => format!("{}+pool", Subject::ParaAspace(None)),
            _ => Subject::ParaAspace(None).to_string(),
        };
        Row::of(BENCH, subject, Unit::Us, samples, &params)
    };
    Ok([row(&cold, "boot"), row(&warm, "pool")].into_iter().flatten().collect())
}

fn failed(why: impl ToString) -> BenchError {
    BenchError::Subject { subject: BENCH.into(), why: why.to_string() }
}

/// Microseconds from the command's start to its program's first byte.
fn first_output_us(exocell: &Exocell, kind: &[&str]) -> Result<f64, BenchError> {
    let mut command = exocell.with(&["run", "--rm"]);
    command.args(kind).args([&exocell.image, "echo", "hello"]);
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(BenchError::host("exocell run"))?;
    let mut first = [0];
    let read = child.stdout.as_mut().map(|stdout| stdout.read_exact(&mut first));
    let elapsed_us = start.elapsed().as_micros() as f64;
    let status = child.wait().map_err(BenchError::host("exocell run"))?;
    match read {
        Some(Ok(())) if status.success() => Ok(elapsed_us),
        _ => Err(failed(format!("exocell run: {status}"))),
    }
}

/// `exocell pool`; ended with its owner.
pub struct Pool<'a> {
    exocell: &'a Exocell,
    child: Child,
    ids: Lines<BufReader<ChildStdout>>,
}

#[derive(Deserialize)]
struct Inspected {
    times: Times,
}

#[derive(Deserialize)]
struct Times {
    guest_ready_us: u64,
}

impl<'a> Pool<'a> {
    /// A pool that keeps `size` cells.
    pub fn start(exocell: &'a Exocell, size: u32) -> Result<Self, BenchError> {
        let mut command = exocell.with(&["pool", "--size", &size.to_string()]);
        command.args(KIND).arg(&exocell.image).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(BenchError::host("exocell pool"))?;
        let output = child.stdout.take().ok_or_else(|| failed("the pool has no output"))?;
        Ok(Self { exocell, child, ids: BufReader::new(output).lines() })
    }

    /// Waits until the next cell of the pool can be taken; its id.
    pub fn await_warm(&mut self) -> Result<String, BenchError> {
        let id = match self.ids.next() {
            Some(line) => line.map_err(BenchError::host("exocell pool"))?,
            None => return Err(failed("the pool has ended")),
        };
        let until = Instant::now() + READY_MAX;
        while Instant::now() < until {
            let [inspected]: [Inspected; 1] =
                self.exocell.ask("inspect", &["inspect", "--json", &id])?;
            if inspected.times.guest_ready_us > 0 {
                return Ok(id);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(failed(format!("the pool's cell {id} is not ready after {READY_MAX:?}")))
    }
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        // Fails only if it is gone already; its cells end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
