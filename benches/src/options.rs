//! The command line of `exocell bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use crate::audit::AuditArgs;
use crate::isolates::{ColorguardArgs, IsolatesArgs, ParallelArgs, PreemptArgs};
use crate::service::ServiceArgs;
use crate::subject::{GuestKernel, Peer};

/// What `exocell bench` does.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    #[command(flatten)]
    Measure(Benchmark),
    /// Whether all that a running cell's processes have mapped is in its page tables; needs root.
    #[command(after_help = "Example: exocell bench audit my-cell --seconds 60")]
    Audit(AuditArgs),
}

/// One benchmark.
#[derive(Debug, Subcommand)]
pub enum Benchmark {
    /// System calls, faults, processes and bandwidths, by one static program everywhere.
    #[command(after_help = "Examples:
  exocell bench micro
  exocell bench micro --only null_syscall,fork_exit --peers native --json
  exocell bench micro --peers none --kernel old=/boot/a/linux --kernel new=/boot/b/linux")]
    Micro(MicroArgs),
    /// sqlite, git, Python, gcc and tar, all in memory, with the image's files everywhere.
    Apps(AppsArgs),
    /// From the command to the end of `true`, and the stages of a cell's start.
    Start(Options),
    /// TCP between a program and the host: bytes each way, connections, round trips.
    #[command(after_help = "Examples:
  exocell bench network
  exocell bench network --only tcp_out_1,tcp_in_1 --rounds 20 --json")]
    Network(NetworkArgs),
    /// Many idle cells at once: the memory of each, and whether each answers.
    Density(DensityArgs),
    /// Test runs side by side: memory, CPU and wall time of each, and how many fit.
    #[command(after_help = "Example:
  exocell bench runs --image sweb/flask:1 --tree flask/ --script eval.sh --expect passed --rounds 3")]
    Runs(RunsArgs),
    /// What the host holds for a cell against what its programs use, over time.
    #[command(after_help = "Examples:
  exocell bench elasticity --only bursty,agent
  exocell bench elasticity --only traces --traces traces/ --speed 20 --csv out/")]
    Elasticity(ElasticityArgs),
    /// How fast memory that programs give up goes back to the host.
    Reclaim(ReclaimArgs),
    /// Cells whose limits add up to several times what they have together.
    #[command(after_help = "Examples:
  exocell bench oversubscription --traces traces/
  exocell bench oversubscription --cells 16 --budget-mib 4096 --seconds 60")]
    Oversubscription(OversubscriptionArgs),
    /// Fresh Wasm isolates, many tenants: CPU time of a call, and what of it is not its work.
    Isolates(IsolatesArgs),
    /// Long Wasm calls that are preempted, and how fair shares are.
    Preempt(PreemptArgs),
    /// Loops of C modules over threads, and how they compare with native code.
    Parallel(ParallelArgs),
    /// How isolates' memories lie: address space, how many fit, calls and loops.
    Colorguard(ColorguardArgs),
    /// Calls a second of `exocell serve --http`, many tenants, beside another build of it.
    #[command(after_help = "Examples:
  exocell bench service --connections 16,64 --rounds 7
  exocell bench service --before old/exocell --json")]
    Service(ServiceArgs),
}

/// What every benchmark can be told.
#[derive(Debug, Args)]
pub struct Options {
    /// Who is measured beside us; `none` for us alone [default: all].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub peers: Vec<Peer>,
    /// Times that each subject gets its turn.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: u32,
    /// The image that cells run.
    #[arg(long, default_value = "exocell/base:latest")]
    pub image: String,
    /// A guest kernel to measure instead of ours; repeated, each is a subject.
    #[arg(long, value_name = "[LABEL=]FILE")]
    pub kernel: Vec<GuestKernel>,
    /// One JSON object a row.
    #[arg(long)]
    pub json: bool,
    /// Draw the medians as bars into this SVG file.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// `exocell bench micro`.
#[derive(Debug, Args)]
pub struct MicroArgs {
    /// Only these measurements.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Processors of a cell. With one, everything is held on one CPU of the host.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub cpus: u32,
    /// Run the subjects at the ordinary priority. Where it is allowed they have a real-time
    /// one: on a busy machine their many short waits are otherwise openings for other work.
    #[arg(long)]
    pub fair: bool,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench apps`.
#[derive(Debug, Args)]
pub struct AppsArgs {
    /// Only these measurements.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Run the subjects at the ordinary priority (see micro).
    #[arg(long)]
    pub fair: bool,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench network`; needs root, for a network of its own.
#[derive(Debug, Args)]
pub struct NetworkArgs {
    /// Only these measurements.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Processors of a cell.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=16))]
    pub cpus: u32,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench density`.
#[derive(Debug, Args)]
pub struct DensityArgs {
    /// Cells alive at once.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub cells: u32,
    /// Warm cells of `exocell pool`, which have no program yet.
    #[arg(long)]
    pub warm: bool,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench runs`; bubblewrap's overlay needs root.
#[derive(Debug, Args)]
pub struct RunsArgs {
    /// The image's root folder, for those that run it without us.
    #[arg(long, value_name = "DIR")]
    pub tree: PathBuf,
    /// What bash runs: an instance's eval.sh.
    #[arg(long, value_name = "FILE")]
    pub script: PathBuf,
    /// A run that does not print this has failed.
    #[arg(long, value_name = "TEXT", default_value = "Test Output")]
    pub expect: String,
    /// Runs at once.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub jobs: u32,
    /// Memory of a cell, in MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub memory_mib: u64,
    #[command(flatten)]
    pub options: Options,
}

/// What makes a cell's memory come and go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Workload {
    /// Regions of 8 to 160 MiB, each for some tenths of a second.
    Bursty,
    /// Recorded memory of containers, followed by a program in the cell.
    Traces,
    /// What an agent does to a real project: unpack, build, test, edit, test again.
    Agent,
}

impl Workload {
    pub fn name(self) -> &'static str {
        match self {
            Self::Bursty => "bursty",
            Self::Traces => "traces",
            Self::Agent => "agent",
        }
    }
}

/// `exocell bench elasticity`.
#[derive(Debug, Args)]
pub struct ElasticityArgs {
    /// Only these loads.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Workload::Bursty])]
    pub only: Vec<Workload>,
    /// Memory of the cell, in MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(256..=1 << 20))]
    pub memory_mib: u64,
    /// Time between two samples of the guest.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub period_ms: u32,
    /// How long the bursts go on.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// CSV files with the columns t_s and mem_mb, to be replayed.
    #[arg(long, value_name = "DIR")]
    pub traces: Option<PathBuf>,
    /// How many of them.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub traces_max: usize,
    /// How many times as fast as they were recorded.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub speed: u32,
    /// Seconds that the agent waits after each step, as one does for its model.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=600))]
    pub pause: u32,
    /// Write each run's samples into this folder, and charts of them.
    #[arg(long, value_name = "DIR")]
    pub csv: Option<PathBuf>,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench reclaim`.
#[derive(Debug, Args)]
pub struct ReclaimArgs {
    /// Size of the region that is given up, in MiB.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub region_mib: u64,
    /// Write the figures of each round into this folder, and a chart of them.
    #[arg(long, value_name = "DIR")]
    pub csv: Option<PathBuf>,
    #[command(flatten)]
    pub options: Options,
}

/// `exocell bench oversubscription`: every other cell stays within its guarantee.
#[derive(Debug, Args)]
pub struct OversubscriptionArgs {
    /// Cells alive at once.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=1000))]
    pub cells: u64,
    /// Memory of a cell, in MiB.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(128..=1 << 20))]
    pub memory_mib: u64,
    /// What a cell has whatever others do, in MiB.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub guarantee_mib: u64,
    /// What all cells have together, in MiB.
    #[arg(long, default_value_t = 1536, value_parser = clap::value_parser!(u64).range(128..=1 << 20))]
    pub budget_mib: u64,
    /// How long bursts go on.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// CSV files with the columns t_s and mem_mb, to be replayed by the cells that take more
    /// than their guarantee [default: bursts].
    #[arg(long, value_name = "DIR")]
    pub traces: Option<PathBuf>,
    /// How many times as fast as they were recorded.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub speed: u32,
    /// Write what is held over time into this folder, and a chart of it.
    #[arg(long, value_name = "DIR")]
    pub csv: Option<PathBuf>,
    #[command(flatten)]
    pub options: Options,
}

impl Benchmark {
    pub fn options(&self) -> &Options {
        match self {
            Self::Micro(args) => &args.options,
            Self::Apps(args) => &args.options,
            Self::Start(options) => options,
            Self::Network(args) => &args.options,
            Self::Density(args) => &args.options,
            Self::Runs(args) => &args.options,
            Self::Elasticity(args) => &args.options,
            Self::Reclaim(args) => &args.options,
            Self::Oversubscription(args) => &args.options,
            Self::Isolates(args) => &args.options,
            Self::Preempt(args) => &args.options,
            Self::Parallel(args) => &args.options,
            Self::Colorguard(args) => &args.options,
            Self::Service(args) => &args.options,
        }
    }
}
