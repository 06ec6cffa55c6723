//! Test runs side by side, as an evaluation of SWE-bench has them: the memory,
//! the CPU time and the wall time of each, and how many fit this machine at once.
//!
//! Memory is what the host has less of while they run (MemAvailable of
//! proc_meminfo(5), which leaves page cache out): it counts what each subject
//! needs, whatever holds it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::exocell::Exocell;
use crate::options::RunsArgs;
use crate::row::Unit;
use crate::subject::{Peer, shown};
use crate::{BenchError, Row};

/// The host settles for so long before each turn.
const REST: Duration = Duration::from_secs(1);
/// Between two looks at the host's memory.
const PERIOD: Duration = Duration::from_millis(20);
/// proc_stat(5) counts in these, a hundred a second on every Linux.
const TICK_US: f64 = 10_000.0;
/// What a run begins with, the same everywhere.
const ENVIRONMENT: &str =
    "export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n";

/// Who carries a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carrier {
    /// Namespaces over an overlay of the tree, which is what a container is.
    Bwrap,
    Gvisor,
    Cell,
    /// A cell with `--pager eager`.
    CellWithPager,
}

impl Carrier {
    fn name(self) -> &'static str {
        match self {
            Self::Bwrap => "bwrap",
            Self::Gvisor => "gvisor",
            Self::Cell => "para-aspace",
            Self::CellWithPager => "para-aspace+pager",
        }
    }

    fn all(peers: &[Peer]) -> Vec<Self> {
        let wanted = |peer| peers.is_empty() || peers.contains(&peer);
        let peers = [(Peer::Bwrap, Self::Bwrap), (Peer::Gvisor, Self::Gvisor)];
        let found = peers.into_iter().filter(|(peer, _)| wanted(*peer)).map(|(_, own)| own);
        found.chain([Self::Cell, Self::CellWithPager]).collect()
    }
}

/// What one turn of a carrier took, each run's share of it.
#[derive(Debug, Default)]
struct Turns {
    memory_bytes: Vec<f64>,
    fit: Vec<f64>,
    cpu_us: Vec<f64>,
    wall_us: Vec<f64>,
}

/// Picks the samples of one row.
type Figure = fn(&Turns) -> &[f64];

/// `exocell bench runs`.
pub fn measure(args: &RunsArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let script = fs::read_to_string(&args.script);
    let script =
        ENVIRONMENT.to_owned() + &script.map_err(BenchError::host(args.script.display()))?;
    let carriers = Carrier::all(&args.options.peers);
    let mut turns: Vec<Turns> = carriers.iter().map(|_| Turns::default()).collect();
    for _ in 0..args.options.rounds {
        for (carrier, turns) in carriers.iter().zip(&mut turns) {
            turn(*carrier, args, &script, exocell, turns)?;
        }
    }
    let figures: [(&str, Unit, Figure); 4] = [
        ("runs/memory", Unit::Bytes, |turns| &turns.memory_bytes),
        ("runs/fit", Unit::Count, |turns| &turns.fit),
        ("runs/cpu", Unit::Us, |turns| &turns.cpu_us),
        ("runs/wall", Unit::Us, |turns| &turns.wall_us),
    ];
    let params = [
        ("jobs", args.jobs.to_string()),
        ("script", args.script.display().to_string()),
        ("memory", format!("{} MiB", args.memory_mib)),
    ];
    let rows = figures.into_iter().flat_map(|(bench, unit, of)| {
        let own = carriers.iter().zip(&turns);
        own.filter_map(|(carrier, turns)| Row::of(bench, carrier.name(), unit, of(turns), &params))
            .collect::<Vec<_>>()
    });
    Ok(rows.collect())
}

/// All runs of one carrier at once.
fn turn(
    carrier: Carrier,
    args: &RunsArgs,
    script: &str,
    exocell: &Exocell,
    turns: &mut Turns,
) -> Result<(), BenchError> {
    std::thread::sleep(REST);
    let jobs = f64::from(args.jobs);
    let (available, busy) = (available_bytes()?, busy_us()?);
    let mut runs = Vec::new();
    for number in 0..args.jobs {
        runs.push(Run::start(carrier, number, args, script, exocell)?);
    }
    let mut least = available;
    while runs.iter_mut().map(Run::goes_on).fold(false, |any, one| any | one) {
        least = least.min(available_bytes()?);
        std::thread::sleep(PERIOD);
    }
    for run in runs {
        turns.wall_us.push(run.finish(carrier, &args.expect)?);
    }
    // One page at least: what took nothing fits without end.
    let memory = ((available - least) / jobs).max(4096.0);
    turns.memory_bytes.push(memory);
    turns.fit.push((available / memory).floor());
    turns.cpu_us.push((busy_us()? - busy) / jobs);
    Ok(())
}

/// A run, and where its output goes.
struct Run {
    child: Child,
    command: String,
    begun: Instant,
    took: Option<Duration>,
    folder: tempfile::TempDir,
    overlay: Option<Overlay>,
}

impl Run {
    fn start(
        carrier: Carrier,
        number: u32,
        args: &RunsArgs,
        script: &str,
        exocell: &Exocell,
    ) -> Result<Self, BenchError> {
        let cache = exocell.cache();
        fs::create_dir_all(&cache).map_err(BenchError::host(cache.display()))?;
        let folder = tempfile::tempdir_in(&cache).map_err(BenchError::host(cache.display()))?;
        let overlay = match carrier {
            Carrier::Bwrap => Some(Overlay::mount(&args.tree, folder.path())?),
            _ => None,
        };
        let root = overlay.as_ref().map_or(args.tree.as_path(), |overlay| &overlay.merged);
        let mut command = command(carrier, args, root, exocell);
        let shown = format!("{} (run {number})", shown(&command));
        command.args(["bash", "-c", script]);
        let output = folder.path().join("output");
        let failed = || BenchError::host(output.display());
        let file = File::create(&output).map_err(failed())?;
        let both = file.try_clone().map_err(failed())?;
        let child = command.stdin(Stdio::null()).stdout(file).stderr(both).spawn();
        let child = child.map_err(BenchError::host(&shown))?;
        Ok(Self { child, command: shown, begun: Instant::now(), took: None, folder, overlay })
    }

    fn goes_on(&mut self) -> bool {
        if self.took.is_none() && !matches!(self.child.try_wait(), Ok(None)) {
            self.took = Some(self.begun.elapsed());
        }
        self.took.is_none()
    }

    /// Microseconds that it took, if it did what it was to do.
    fn finish(mut self, carrier: Carrier, expected: &str) -> Result<f64, BenchError> {
        let output = fs::read(self.folder.path().join("output")).unwrap_or_default();
        let output = String::from_utf8_lossy(&output);
        drop(self.overlay.take());
        match (output.contains(expected), self.took) {
            (true, Some(took)) => Ok(took.as_micros() as f64),
            _ => Err(BenchError::Subject {
                subject: carrier.name().to_owned(),
                why: format!("{} did not print {expected:?} but: {output}", self.command),
            }),
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Mostly it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(carrier: Carrier, args: &RunsArgs, root: &Path, exocell: &Exocell) -> Command {
    let words = |program: &str, words: &str| {
        let mut command = Command::new(program);
        command.args(words.split(' '));
        command
    };
    match carrier {
        Carrier::Bwrap => {
            let mut command = words("bwrap", "--unshare-all --die-with-parent --bind");
            command.arg(root).args(["/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]);
            command
        }
        Carrier::Gvisor => {
            let flags =
                "--rootless --network=none --ignore-cgroups --platform=systrap do -cwd / -root";
            let mut command = words("runsc", flags);
            command.arg(root);
            command
        }
        Carrier::Cell | Carrier::CellWithPager => {
            let mut command = exocell.with(&["run", "--rm", "--cpus", "1", "--memory"]);
            command.arg(format!("{}m", args.memory_mib));
            if carrier == Carrier::CellWithPager {
                command.args(["--pager", "eager"]);
            }
            command.arg(&exocell.image);
            command
        }
    }
}

/// A writable view of a tree; what is written goes with it.
struct Overlay {
    merged: PathBuf,
}

impl Overlay {
    fn mount(tree: &Path, folder: &Path) -> Result<Self, BenchError> {
        let at = |name: &str| folder.join(name);
        for name in ["upper", "work", "merged"] {
            fs::create_dir(at(name)).map_err(BenchError::host(folder.display()))?;
        }
        let [upper, work, merged] = ["upper", "work", "merged"].map(at);
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            tree.display(),
            upper.display(),
            work.display()
        );
        let mut mount = Command::new("mount");
        mount.args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged);
        let failed = || BenchError::host("mount (it takes root)");
        match mount.status().map_err(failed())?.success() {
            true => Ok(Self { merged }),
            false => Err(failed()(std::io::ErrorKind::PermissionDenied.into())),
        }
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        // A mount that is still used goes when it is not.
        let _ = Command::new("umount").arg("--lazy").arg(&self.merged).status();
    }
}

fn read(path: &str) -> Result<String, BenchError> {
    fs::read_to_string(path).map_err(BenchError::host(path))
}

const MEMINFO: &str = "/proc/meminfo";
const STAT: &str = "/proc/stat";

fn available_bytes() -> Result<f64, BenchError> {
    available_in(&read(MEMINFO)?)
}

fn available_in(meminfo: &str) -> Result<f64, BenchError> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<f64>().ok());
    let unlike = || BenchError::unlike(MEMINFO, "number after MemAvailable:");
    Ok(kib.ok_or_else(unlike)? * 1024.0)
}

fn busy_us() -> Result<f64, BenchError> {
    busy_in(&read(STAT)?)
}

/// CPU time of all processors that was neither idle nor taken by others.
fn busy_in(stat: &str) -> Result<f64, BenchError> {
    let unlike = || BenchError::unlike(STAT, "seven numbers after cpu");
    let words = stat.lines().next().unwrap_or_default().strip_prefix("cpu ");
    let ticks: Result<Vec<f64>, _> =
        words.unwrap_or_default().split_ascii_whitespace().take(7).map(str::parse).collect();
    match ticks.map_err(|_| unlike())?.as_slice() {
        [user, nice, system, _idle, _iowait, irq, softirq] => {
            Ok((user + nice + system + irq + softirq) * TICK_US)
        }
        _ => Err(unlike()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_files_are_read() {
        assert_eq!(available_in("MemTotal: 9 kB\nMemAvailable:   2 kB\n").unwrap(), 2048.0);
        assert_eq!(busy_in("cpu  1 2 3 100 50 4 5 9 0 0\ncpu0 1\n").unwrap(), 150_000.0);
    }

    #[test]
    fn files_that_say_something_else_are_named() {
        for text in ["", "MemTotal: 9 kB\n", "MemAvailable: much kB\n"] {
            let error = available_in(text).unwrap_err().to_string();
            assert!(error.contains("/proc/meminfo"), "{error}");
        }
        for text in ["", "cpu  1 2 3 100 50 4\n", "cpu  1 2 x 100 50 4 5\n", "intr 1 2 3 4 5 6 7\n"]
        {
            let error = busy_in(text).unwrap_err().to_string();
            assert!(error.contains("/proc/stat"), "{error}");
        }
    }

    #[test]
    fn peers_that_are_not_asked_for_are_left_out() {
        assert_eq!(Carrier::all(&[]).len(), 4);
        assert_eq!(Carrier::all(&[Peer::None]), [Carrier::Cell, Carrier::CellWithPager]);
        let some = Carrier::all(&[Peer::Gvisor]);
        assert_eq!(some[0].name(), "gvisor");
    }
}
