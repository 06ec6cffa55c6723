//! `exocell swebench`: evaluations of SWE-bench.

use std::path::Path;
use std::time::Duration;

use exocell_cell::granted::Links;
use exocell_cell::xgate::parse_duration;
use exocell_cell::{CellError, Layout};
use exocell_swebench::{Exocell, Finished, Options, Report, TextFile, run};

use crate::args::{SwebenchCommand, SwebenchRunArgs};
use crate::show::{self, say};

/// A cell lives at most this much longer than its tests may take, whatever
/// becomes of the command.
const BESIDE_TESTS: Duration = Duration::from_secs(600);

/// The largest dataset, in bytes: all instances there are take less.
const DATASET_BYTES_MAX: u64 = 1 << 30;

pub fn swebench(layout: &Layout, command: &SwebenchCommand) -> Result<u8, CellError> {
    let SwebenchCommand::Run(args) = command;
    // From the innermost to the outermost.
    let made = |path: &Path| path.ancestors().map(Path::to_owned).collect::<Vec<_>>();
    let mut missing = [made(&args.logs), made(&args.report_dir)].concat();
    missing.retain(|path| !path.as_os_str().is_empty() && !path.exists());
    let done = options(layout, args).and_then(|options| {
        run(&options, &progress).map_err(|error| CellError::Usage(error.to_string()))
    });
    let (report, path) = done.inspect_err(|_| {
        // Of a directory that was made for nothing, nothing is left; one with files stays.
        missing.iter().for_each(|path| drop(std::fs::remove_dir(path)));
    })?;
    summarize(&report);
    say!("report: {}", path.display());
    Ok(0)
}

fn options(layout: &Layout, args: &SwebenchRunArgs) -> Result<Options, CellError> {
    let timeout = parse_duration(&args.timeout)
        .map_err(|error| CellError::Usage(format!("--timeout: {error}")))?;
    let jobs = args.jobs.unwrap_or_else(|| {
        std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
    });
    let root = std::path::absolute(layout.root()).map_err(CellError::host("cannot find --root"))?;
    let read = |path: &Path| {
        let text = Links::outside(layout).text(path, DATASET_BYTES_MAX);
        let (text, _) = text.map_err(CellError::host(format!("cannot read {}", path.display())))?;
        Ok::<_, CellError>(TextFile { path: path.to_owned(), text })
    };
    let own = |path: &Path| {
        let failed = CellError::host(format!("cannot write into {}", path.display()));
        Links::outside(layout).own(path).map_err(failed)
    };
    let predictions = Some(&args.predictions).filter(|path| path.as_os_str() != "gold");
    Ok(Options {
        // The link of this process, whatever becomes of the file's name.
        exocell: Exocell { executable: "/proc/self/exe".into(), root },
        dataset: read(&args.dataset)?,
        predictions: predictions.map(|path| read(path)).transpose()?,
        only: args.instances.clone(),
        run_id: args.run_id.clone(),
        logs: own(&args.logs)?,
        report_dir: own(&args.report_dir)?,
        jobs,
        timeout,
        flags: flags(args, timeout),
    })
}

/// For `exocell run`.
fn flags(args: &SwebenchRunArgs, timeout: Duration) -> Vec<String> {
    let life = timeout.saturating_add(BESIDE_TESTS).as_secs();
    let mut flags: Vec<String> = [
        ("--memory", args.memory.clone()),
        ("--disk", args.disk.clone()),
        ("--cpus", args.cpus.to_string()),
        ("--pids-limit", args.pids_limit.to_string()),
        ("--pager", args.pager.to_string()),
        ("--timeout", format!("{life}s")),
    ]
    .into_iter()
    .flat_map(|(flag, value)| [flag.to_owned(), value])
    .collect();
    flags.extend(args.allow_net.iter().flat_map(|rule| ["--allow-net".to_owned(), rule.clone()]));
    flags
}

fn progress(finished: &Finished<'_>) {
    let Finished { instance_id, resolved, took, usage, done, of } = finished;
    let verdict = match resolved {
        Ok(true) => "resolved".to_owned(),
        Ok(false) => "not resolved".to_owned(),
        Err(reason) => format!("error: {}", reason.lines().next().unwrap_or_default()),
    };
    let used = usage.map_or_else(String::new, |usage| {
        format!(
            ", {:.1} s CPU, {} at most",
            usage.cpu_ms as f64 / 1e3,
            show::bytes(usage.host_bytes_max)
        )
    });
    crate::show::tell!(
        "[{done}/{of}] {instance_id}: {verdict} ({:.1} s{used})",
        took.as_secs_f64()
    );
}

fn summarize(report: &Report) {
    for (what, count) in [
        ("total", report.total_instances),
        ("submitted", report.submitted_instances),
        ("completed", report.completed_instances),
        ("resolved", report.resolved_instances),
        ("unresolved", report.unresolved_instances),
        ("without a patch", report.empty_patch_instances),
        ("with an error", report.error_instances),
    ] {
        say!("instances {what}: {count}");
    }
}
