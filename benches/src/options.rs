//! The command line of `exocell bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::isolates::{IsolatesArgs, ParallelArgs, PreemptArgs};
use crate::subject::{GuestKernel, Peer};

/// One benchmark.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
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
    /// Many idle cells at once: the memory of each, and whether each answers.
    Density(DensityArgs),
    /// Fresh Wasm isolates, many tenants: CPU time of a call, and what of it is not its work.
    Isolates(IsolatesArgs),
    /// Long Wasm calls that are preempted, and how fair shares are.
    Preempt(PreemptArgs),
    /// Loops of C modules over threads, and how they compare with native code.
    Parallel(ParallelArgs),
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

/// `exocell bench density`.
#[derive(Debug, Args)]
pub struct DensityArgs {
    /// Cells alive at once.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub cells: u32,
    #[command(flatten)]
    pub options: Options,
}

impl BenchCommand {
    pub fn options(&self) -> &Options {
        match self {
            Self::Micro(args) => &args.options,
            Self::Apps(args) => &args.options,
            Self::Start(options) => options,
            Self::Density(args) => &args.options,
            Self::Isolates(args) => &args.options,
            Self::Preempt(args) => &args.options,
            Self::Parallel(args) => &args.options,
        }
    }
}
