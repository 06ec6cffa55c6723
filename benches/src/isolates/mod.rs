//! Isolates against wasmtime as a program embeds it plainly and against wazero, in one run.
//!
//! Rows: `sfib_fresh` (a fresh isolate each call, N tenants), `sfib_process` (the same as a
//! process each, for scale), `call_empty`, `call_touch` (what a call costs beside its work),
//! `isolate_bytes_*`, `preempt_*` (long calls while another wants the CPU),
//! `shares_error`; `call_p99_*` (beside attackers); `parallel_*` (loops over threads),
//! `speedup_*` (the same as ratios of one round), `thread_spawn`; `colorguard_*` (how memories lie). All but those of threads count CPU time,
//! because the machine is shared.

mod attack;
mod clock;
mod guests;
mod live;
mod ours;
mod parallel;
mod plain;
mod process;
mod slots;
mod wazero;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use exocell_exovisor::{Metering, Priority};

use crate::exocell::Exocell;
use crate::options::Options;
use crate::row::{Row, Unit};
use crate::{BenchError, Peer};
use ours::Ours;
pub use parallel::measure as measure_parallel;
use plain::{Allocator, Plain};
pub use slots::measure as measure_slots;
use wazero::{Instances, Wazero};

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
    /// Whose isolates these are.
    #[arg(long, value_enum, hide = true, default_value_t = live::Subject::Ours)]
    pub live_subject: live::Subject,
    /// Only these measurements: isolate_bytes, sfib_fresh, sfib_process, call_empty, call_touch.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub only: Vec<String>,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench preempt`.
#[derive(Debug, Args)]
pub struct PreemptArgs {
    /// Only these measurements: kernels, shares, call_p99.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Microseconds of a slice.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..))]
    pub slice_us: u64,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench colorguard`.
#[derive(Debug, Args)]
pub struct ColorguardArgs {
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
/// The same without unrolling recursion, which others do not do.
const AS_WRITTEN: &str = "exocell-as-written";
const POOLING: &str = "wasmtime-pooling";
const DEFAULT: &str = "wasmtime-default";

fn with_peers(options: &Options) -> bool {
    options.peers != [Peer::None]
}

/// Fresh isolates: throughput, and what a call costs beside its work.
pub fn measure(args: &IsolatesArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let known = ["isolate_bytes", "sfib_process"].into_iter().chain(FRESH.map(|(bench, ..)| bench));
    let wanted = chosen(&args.only, known)?;
    if let Some(memory) = args.live_memory {
        return live::measure_here(memory, args.live_subject, args.live);
    }
    let wazero = if with_peers(&args.options) { wazero_program(exocell) } else { None };
    let mut rows = Vec::new();
    if wanted("isolate_bytes") && args.live > 0 {
        rows.extend(live::measure(args.live, with_peers(&args.options), wazero.as_deref())?);
    }
    for (bench, text, argument, times) in FRESH.into_iter().filter(|(bench, ..)| wanted(bench)) {
        let load = Load { bench, text, argument, calls: args.calls.saturating_mul(times) };
        for tenants in &args.tenants {
            rows.extend(load.measure(*tenants, args, wazero.as_deref())?);
        }
    }
    if wanted("sfib_process") && with_peers(&args.options) {
        rows.extend(process::measure(&args.options, exocell)?);
    }
    Ok(rows)
}

/// Tells which measurements were asked for; without `only` it is all of the `known`.
fn chosen(
    only: &[String],
    known: impl IntoIterator<Item = &'static str>,
) -> Result<impl Fn(&str) -> bool, BenchError> {
    let known: Vec<&str> = known.into_iter().collect();
    if let Some(name) = only.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(BenchError::NoMeasurement { name: name.clone(), known: known.join(" ") });
    }
    let only = only.to_vec();
    Ok(move |bench: &str| only.is_empty() || only.iter().any(|name| name == bench))
}

/// wazero's side, where it can be built.
fn wazero_program(exocell: &Exocell) -> Option<PathBuf> {
    let program = wazero::program(&exocell.cache());
    program.inspect_err(|error| eprintln!("wazero is left out: {error}")).ok()
}

/// Names, modules, arguments, and how many times as many calls of them make a turn.
const FRESH: [(&str, &str, i32, u64); 3] = [
    ("sfib_fresh", guests::SFIB, 20, 1),
    ("call_empty", guests::EMPTY, 1, 10),
    ("call_touch", guests::TOUCH, 1, 10),
];

/// Many calls of one function.
struct Load {
    bench: &'static str,
    text: &'static str,
    argument: i32,
    /// Of a turn.
    calls: u64,
}

impl Load {
    /// CPU nanoseconds a call, subjects in turn.
    fn measure(
        &self,
        tenants: u32,
        args: &IsolatesArgs,
        wazero: Option<&Path>,
    ) -> Result<Vec<Row>, BenchError> {
        let workers = args.workers as usize;
        let mut subjects = self.subjects(tenants, args, wazero)?;
        let mut samples = vec![Vec::new(); subjects.len()];
        for _ in 0..args.options.rounds {
            for ((_, turn), samples) in subjects.iter_mut().zip(&mut samples) {
                samples.push(turn()? / self.calls as f64);
            }
        }
        let params = [("tenants", tenants.to_string()), ("workers", workers.to_string())];
        let rows = subjects.iter().zip(&samples);
        let row = |(subject, samples): (&(&str, Turn), &Vec<f64>)| {
            Row::of(self.bench, subject.0, Unit::Ns, samples, &params)
        };
        Ok(rows.filter_map(row).collect())
    }

    fn subjects(
        &self,
        tenants: u32,
        args: &IsolatesArgs,
        wazero: Option<&Path>,
    ) -> Result<Vec<(&'static str, Turn)>, BenchError> {
        let Self { text, argument, calls, .. } = *self;
        let workers = args.workers as usize;
        let ours = Ours::new(text, Metering::Time, tenants as usize, workers, SLICE)?;
        let mut subjects: Vec<(&str, Turn)> = Vec::new();
        subjects.push((OURS, Box::new(move || used_ns(|| ours.serve(calls, argument)))));
        if text == guests::SFIB {
            let ours = Ours::as_written(text, Metering::Time, tenants as usize, workers, SLICE)?;
            subjects.push((AS_WRITTEN, Box::new(move || used_ns(|| ours.serve(calls, argument)))));
        }
        if with_peers(&args.options) {
            let pooling = Allocator::Pooling { isolates: args.workers + 64 };
            for (name, allocator) in [(POOLING, pooling), (DEFAULT, Allocator::OnDemand)] {
                let plain = Plain::new(text, allocator)?;
                let turn = move || used_ns(|| plain.serve(workers, calls, argument));
                subjects.push((name, Box::new(turn)));
            }
        }
        for (name, instances) in
            [("wazero", Instances::Fresh), ("wazero-reused", Instances::Reused)]
        {
            let Some(program) = wazero else { break };
            let mut wazero = Wazero::start(program, text, workers, instances)?;
            subjects.push((name, Box::new(move || wazero.serve(calls, argument))));
        }
        Ok(subjects)
    }
}

/// One turn of a subject; answers with its CPU nanoseconds.
type Turn = Box<dyn FnMut() -> Result<f64, BenchError>>;

const SLICE: Duration = Duration::from_millis(1);

/// CPU time of this process while it serves.
fn used_ns(serve: impl FnOnce() -> Result<(), BenchError>) -> Result<f64, BenchError> {
    let before = clock::process_cpu_ns();
    serve()?;
    Ok(clock::process_cpu_ns().saturating_sub(before) as f64)
}

/// Long calls: alone, beside a rival that always wants the CPU, and with instrumentation, each
/// against the same code run plainly; and how near shares come to their weights.
pub fn measure_preemption(args: &PreemptArgs) -> Result<Vec<Row>, BenchError> {
    let kernels = [
        ("preempt_fib", guests::SFIB, 32),
        ("preempt_dot", guests::DOT, 4096),
        ("preempt_matmul", guests::MATMUL, 512),
    ];
    let wanted = chosen(&args.only, ["kernels", "shares", "call_p99"])?;
    let slice = Duration::from_micros(args.slice_us);
    let mut rows = Vec::new();
    for (bench, text, argument) in kernels.into_iter().filter(|_| wanted("kernels")) {
        rows.extend(kernel(bench, text, argument, slice, args)?);
    }
    if wanted("shares") {
        rows.extend(shares(slice, &args.options)?);
    }
    if wanted("call_p99") {
        rows.extend(attack::measure(&args.options)?);
    }
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
    let new = |metering| Ours::as_written(text, metering, 2, 1, slice);
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
