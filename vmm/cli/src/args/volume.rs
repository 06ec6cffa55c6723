//! The words of `exocell volume`.

use clap::{Args, Subcommand};

#[derive(Subcommand)]
pub enum VolumeCommand {
    Create(VolumeCreateArgs),
    Ls(VolumeLsArgs),
    Inspect(VolumeInspectArgs),
    Rm(VolumeRmArgs),
    Prune(VolumePruneArgs),
}

/// Make a volume: a folder of this host that outlives cells.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell volume create cache
  exocell run --rm -v cache:/cache exocell/base ls /cache

A run makes a volume that is not there yet, and fills a new one with what its image has at that
place. The Docker server (exocell serve --docker) has the same volumes.")]
pub struct VolumeCreateArgs {
    /// Note NAME=VALUE of it.
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub label: Vec<String>,
    /// What kind it is: local.
    #[arg(short, long, value_name = "DRIVER", default_value = "local", hide = true)]
    pub driver: String,
    // What docker's driver has.
    #[arg(short, long, value_name = "NAME=VALUE", hide = true)]
    pub opt: Vec<String>,
    /// The name [default: an id].
    pub volume: Option<String>,
}

/// List volumes.
#[derive(Args)]
#[command(visible_alias = "list", after_help = "Example: exocell volume ls -f dangling=true")]
pub struct VolumeLsArgs {
    /// Print only names.
    #[arg(short, long)]
    pub quiet: bool,
    /// Show those that pass: name=TEXT, label=NAME[=VALUE], dangling=true|false, driver=local.
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub filter: Vec<String>,
    /// Print as JSON, one object a line.
    #[arg(long, conflicts_with = "quiet")]
    pub json: bool,
    /// Print each with a template, like '{{.Name}} {{.Mountpoint}}'.
    #[arg(long, value_name = "TEMPLATE", conflicts_with_all = ["quiet", "json"])]
    pub format: Option<String>,
}

/// Print all that is known of volumes, and which cells have them, as JSON.
#[derive(Args)]
#[command(after_help = "Example: exocell volume inspect cache")]
pub struct VolumeInspectArgs {
    #[arg(required = true)]
    pub volumes: Vec<String>,
    /// Print with a template, like '{{.Mountpoint}}'.
    #[arg(short, long, value_name = "TEMPLATE")]
    pub format: Option<String>,
}

/// Remove volumes that no cell has, and their files.
#[derive(Args)]
#[command(visible_alias = "remove", after_help = "Example: exocell volume rm cache")]
pub struct VolumeRmArgs {
    /// Volumes that are not there are no error.
    #[arg(short, long)]
    pub force: bool,
    #[arg(required = true)]
    pub volumes: Vec<String>,
}

/// Remove volumes that no cell has and that were made without a name.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell volume prune -f
  exocell volume prune -f --all --filter label=ci")]
pub struct VolumePruneArgs {
    /// Those with names too.
    #[arg(short, long)]
    pub all: bool,
    /// Only those that pass: label=NAME[=VALUE], label!=NAME[=VALUE].
    #[arg(long, value_name = "NAME=VALUE")]
    pub filter: Vec<String>,
    /// Do not ask.
    #[arg(short, long)]
    pub force: bool,
}
