//! `exocell serve --http` with many tenants, beside another build of it.
//!
//! Rows: `service_calls` (calls a second by so many clients, each on a connection of its own),
//! `service_cpu` (CPU time of the service's processes a call, least disturbed by other work on the
//! machine), `service_worker_pss` (what the service holds after a call of each tenant, by tenants),
//! `service_call_pss` (what a call that waits adds to that).

mod served;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use crate::exocell::Exocell;
use crate::options::Options;
use crate::row::Unit;
use crate::scratch::Scratch;
use crate::{BenchError, Row};
use served::Served;

/// `exocell bench service`.
#[derive(Debug, Args)]
pub struct ServiceArgs {
    /// Another build of the command, the first subject.
    #[arg(long, value_name = "FILE")]
    pub before: Option<PathBuf>,
    /// Tenants, each with a module.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tenants: u32,
    /// Clients at once; repeated, one row each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256],
          value_parser = clap::value_parser!(u32).range(1..=500))]
    pub connections: Vec<u32>,
    /// How long a turn takes.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: u64,
    /// Calls of a tenant that wait while their memory is counted; 0 for no row.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(0..=8))]
    pub waiting: u32,
    #[command(flatten)]
    pub options: Options,
}

/// Subjects take turns, for each number of connections.
pub fn measure(args: &ServiceArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let scratch = Scratch::new(&exocell.cache())?;
    let program = exocell.command().get_program().to_owned();
    let ours = PathBuf::from(program);
    let kinds: [(&str, &Path, &[&str]); 2] = [
        ("worker-a-tenant", &ours, &["--workers", "tenant"]),
        ("worker-shared", &ours, &["--workers", "shared"]),
    ];
    let before = args.before.iter().map(|program| ("before", program.as_path(), &[][..]));
    let mut subjects = Vec::new();
    for (name, program, flags) in before.chain(kinds) {
        subjects.push((name, Served::start(name, program, scratch.path(), args.tenants, flags)?));
    }
    eprintln!("exocell: {}", machine());
    let mut rows = Vec::new();
    for (name, served) in &subjects {
        rows.extend(memory(name, served, args)?);
    }
    for connections in &args.connections {
        rows.extend(throughput(&subjects, *connections, args)?);
    }
    Ok(rows)
}

/// Of one subject: calls a second, and CPU time a call in us.
type Found = (Vec<f64>, Vec<f64>);

fn memory(name: &str, served: &Served, args: &ServiceArgs) -> Result<Vec<Row>, BenchError> {
    served.call_each()?;
    let idle = served.pss_bytes()?;
    let params = [("tenants", args.tenants.to_string())];
    let worker = [idle / f64::from(args.tenants)];
    let mut rows = vec![Row::of("service_worker_pss", name, Unit::Bytes, &worker, &params)];
    if args.waiting > 0 {
        let held = served.with_waiting(args.waiting, Served::pss_bytes)?;
        let calls = args.tenants * args.waiting;
        let params = [("calls", calls.to_string())];
        let call = [(held - idle) / f64::from(calls)];
        rows.push(Row::of("service_call_pss", name, Unit::Bytes, &call, &params));
    }
    Ok(rows.into_iter().flatten().collect())
}

fn throughput(
    subjects: &[(&str, Served)],
    connections: u32,
    args: &ServiceArgs,
) -> Result<Vec<Row>, BenchError> {
    let time = Duration::from_secs(args.seconds);
    let mut found: Vec<Found> = subjects.iter().map(|_| Found::default()).collect();
    for _ in 0..args.options.rounds {
        for ((_, served), (rates, cpu_us)) in subjects.iter().zip(&mut found) {
            let before_ns = served.cpu_ns()?;
            let turn = served.calls(connections, time)?;
            let used_ns = served.cpu_ns()?.saturating_sub(before_ns);
            rates.push(turn.calls as f64 / turn.took.as_secs_f64());
            cpu_us.push(used_ns as f64 / 1e3 / turn.calls.max(1) as f64);
        }
    }
    let params = [("connections", connections.to_string()), ("tenants", args.tenants.to_string())];
    let row = |bench: &str, unit, pick: fn(&Found) -> &Vec<f64>| {
        let rows = subjects.iter().zip(&found);
        let row = |((name, _), found): (&(&str, Served), _)| {
            Row::of(bench, name, unit, pick(found), &params)
        };
        rows.filter_map(row).collect::<Vec<_>>()
    };
    let mut rows = row("service_calls", Unit::Count, |(rates, _)| rates);
    rows.extend(row("service_cpu", Unit::Us, |(_, cpu_us)| cpu_us));
    Ok(rows)
}

/// What it runs on, and how busy that is.
fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let processors = read("/proc/cpuinfo");
    let model =
        processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("a processor", |(_, model)| model.trim()).to_owned();
    let count = std::thread::available_parallelism().map_or(1, Into::into);
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or_default();
    format!("{model}, {count} processors, load {load}")
}
