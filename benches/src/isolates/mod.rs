//! Isolates against wasmtime as a program embeds it plainly, in one process and one run.
//!
//! Rows: `sfib_fresh` (a fresh isolate each call, N tenants), `call_empty`, `call_touch` (what a
//! call costs beside its work), `isolate_bytes_*`, `preempt_*` (long calls while another wants the CPU),
//! `shares_error`; `call_p99` (beside attackers); `parallel_*` (loops over threads), `thread_spawn`. All but these count CPU time, because the machine is shared.

mod attack;
mod clock;
mod guests;
mod live;
mod ours;
mod parallel;
mod plain;

use std::time::Duration;

use clap::Args;
use exocell_exovisor::{Metering, Priority};

use crate::options::Options;
use crate::row::{Row, Unit};
use crate::{BenchError, Peer};
use ours::Ours;
pub use parallel::measure as measure_parallel;
use plain::{Allocator, Plain};

/// `exocell bench isolates`.
#[derive(Debug, Args)]
pub struct IsolatesArgs {
    /// Tenants that call at once; repeated, one row each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 256, 1024])]
    pub tenants: Vec<u32>,
    /// Calls of a turn.
    #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u64).range(1..))]
    pub calls: u64,
    /// Threads that serve them.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub workers: u32,
    /// Isolates alive at once whose memory is counted; 0 for none.
    #[arg(long, default_value_t = 10_000)]
    pub live: u32,
    /// Count the memory of isolates of this kind only, in this process.
    #[arg(long, value_enum, hide = true)]
    pub live_memory: Option<live::Memory>,
    /// Only these measurements: sfib_fresh, call_empty, call_touch.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub only: Vec<String>,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench preempt`.
#[derive(Debug, Args)]
pub struct PreemptArgs {
    /// Microseconds of a slice.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..))]
    pub slice_us: u64,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench parallel`.
#[derive(Debug, Args)]
pub struct ParallelArgs {
    #[command(flatten)]
    pub options: Options,
}

const OURS: &str = "exocell";
const POOLING: &str = "wasmtime-pooling";
const DEFAULT: &str = "wasmtime-default";

fn with_peers(options: &Options) -> bool {
    options.peers != [Peer::None]
}

/// Fresh isolates: throughput, and what a call costs beside its work.
pub fn measure(args: &IsolatesArgs) -> Result<Vec<Row>, BenchError> {
    let known = FRESH.map(|(bench, ..)| bench);
    if let Some(name) = args.only.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(BenchError::NoMeasurement { name: name.clone(), known: known.join(" ") });
    }
    if let Some(memory) = args.live_memory {
        return live::measure_here(memory, args.live);
    }
    let mut rows = if args.live > 0 { live::measure(args.live)? } else { Vec::new() };
    for (bench, text, argument, times) in FRESH {
        if !args.only.is_empty() && !args.only.iter().any(|name| name == bench) {
            continue;
        }
        let calls = args.calls.saturating_mul(times);
        for tenants in &args.tenants {
            rows.extend(fresh(bench, text, argument, *tenants, calls, args)?);
        }
    }
    Ok(rows)
}

/// Names, modules, arguments, and how many times as many calls of them make a turn.
const FRESH: [(&str, &str, i32, u64); 3] = [
    ("sfib_fresh", guests::SFIB, 20, 1),
    ("call_empty", guests::EMPTY, 1, 10),
    ("call_touch", guests::TOUCH, 1, 10),
];

/// CPU nanoseconds a call, subjects in turn.
fn fresh(
    bench: &str,
    text: &str,
    argument: i32,
    tenants: u32,
    calls: u64,
    args: &IsolatesArgs,
) -> Result<Vec<Row>, BenchError> {
    let workers = args.workers as usize;
    let ours = Ours::new(text, Metering::Time, tenants as usize, workers, SLICE)?;
    let peers = if with_peers(&args.options) {
        vec![
            (POOLING, Plain::new(text, Allocator::Pooling { isolates: args.workers + 64 })?),
            (DEFAULT, Plain::new(text, Allocator::OnDemand)?),
        ]
    } else {
        Vec::new()
    };
    let mut samples = vec![Vec::new(); 1 + peers.len()];
    for _ in 0..args.options.rounds {
        let mut subjects = samples.iter_mut();
        record(subjects.next(), calls, || ours.serve(calls, argument))?;
        for (_, peer) in &peers {
            record(subjects.next(), calls, || peer.serve(workers, calls, argument))?;
        }
    }
    let names = [OURS].into_iter().chain(peers.iter().map(|(name, _)| *name));
    let params = [("tenants", tenants.to_string()), ("workers", workers.to_string())];
    Ok(names
        .zip(&samples)
        .filter_map(|(name, samples)| Row::of(bench, name, Unit::Ns, samples, &params))
        .collect())
}

const SLICE: Duration = Duration::from_millis(1);

fn record(
    samples: Option<&mut Vec<f64>>,
    calls: u64,
    serve: impl FnOnce() -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let before = clock::process_cpu_ns();
    serve()?;
    let used = clock::process_cpu_ns().saturating_sub(before);
    if let Some(samples) = samples {
        samples.push(used as f64 / calls as f64);
    }
    Ok(())
}

/// Long calls: alone, beside a rival that always wants the CPU, and with instrumentation, each
/// against the same code run plainly; and how near shares come to their weights.
pub fn measure_preemption(args: &PreemptArgs) -> Result<Vec<Row>, BenchError> {
    let kernels = [
        ("preempt_fib", guests::SFIB, 32),
        ("preempt_dot", guests::DOT, 4096),
        ("preempt_matmul", guests::MATMUL, 512),
    ];
    let slice = Duration::from_micros(args.slice_us);
    let mut rows = Vec::new();
    for (bench, text, argument) in kernels {
        rows.extend(kernel(bench, text, argument, slice, args)?);
    }
    rows.extend(shares(slice, &args.options)?);
    rows.extend(attack::measure(&args.options)?);
    Ok(rows)
}

fn kernel(
    bench: &str,
    text: &str,
    argument: i32,
    slice: Duration,
    args: &PreemptArgs,
) -> Result<Vec<Row>, BenchError> {
    let plain = Plain::new(text, Allocator::OnDemand)?;
    let new = |metering| Ours::new(text, metering, 2, 1, slice);
    let subjects = [
        ("exocell-time", new(Metering::Time)?, true),
        ("exocell-time-alone", new(Metering::Time)?, false),
        ("exocell-epoch", new(Metering::Epoch)?, true),
        ("exocell-fuel", new(Metering::Fuel)?, true),
    ];
    let mut samples = vec![Vec::new(); 1 + subjects.len()];
    let mut taken = vec![0; subjects.len()];
    for _ in 0..args.options.rounds {
        let before = clock::thread_cpu_ns();
        plain.call(argument)?;
        samples[0].push(clock::thread_cpu_ns().saturating_sub(before) as f64);
        for (index, (_, ours, contended)) in subjects.iter().enumerate() {
            let rival = contended.then(|| ours.rival()).transpose()?;
            let report = ours.call(argument)?;
            drop(rival);
            samples[index + 1].push(report.cpu.as_nanos() as f64);
            taken[index] = report.preemptions;
        }
    }
    let mut rows = Vec::new();
    rows.extend(Row::of(bench, DEFAULT, Unit::Ns, &samples[0], &[]));
    for ((name, _, _), (samples, taken)) in subjects.iter().zip(samples[1..].iter().zip(&taken)) {
        let params = [("preemptions", taken.to_string()), ("slice", format!("{slice:?}"))];
        rows.extend(Row::of(bench, name, Unit::Ns, samples, &params));
    }
    Ok(rows)
}

/// The largest relative error of the CPU time of three tenants with weights 4, 2 and 1.
fn shares(slice: Duration, options: &Options) -> Result<Vec<Row>, BenchError> {
    let weights = [4, 2, 1];
    let mut samples = Vec::new();
    for _ in 0..options.rounds {
        let ours = Ours::new(guests::EMPTY, Metering::Time, 0, 1, slice)?;
        let reports = ours.spin_for(&weights, Priority::Normal, Duration::from_secs(1))?;
        let used: Vec<f64> = reports.iter().map(|report| report.cpu.as_secs_f64()).collect();
        let one = used.iter().sum::<f64>() / f64::from(weights.iter().sum::<u32>());
        let error = |(used, weight): (&f64, &u32)| (used / (one * f64::from(*weight)) - 1.0).abs();
        samples.push(used.iter().zip(&weights).map(error).fold(0.0, f64::max) * 100.0);
    }
    let params = [("weights", "4:2:1".to_owned()), ("workers", "1".to_owned())];
    Ok(Row::of("shares_error", OURS, Unit::Percent, &samples, &params).into_iter().collect())
}
