//! The words of `exocell containerd`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Subcommand)]
pub enum ContainerdCommand {
    Install(ContainerdInstallArgs),
    Uninstall(ContainerdUninstallArgs),
    Status(ContainerdStatusArgs),
}

/// Where containerd's things are.
#[derive(Args, Clone)]
pub struct ContainerdPlaces {
    /// containerd's configuration.
    #[arg(long, value_name = "FILE", default_value = "/etc/containerd/config.toml")]
    pub config: PathBuf,
    /// Where containerd finds its shims.
    #[arg(long, value_name = "DIR", default_value = "/usr/local/bin")]
    pub bin_dir: PathBuf,
    /// What a RuntimeClass of Kubernetes calls the runtime.
    #[arg(long, value_name = "NAME", default_value = "exocell")]
    pub handler: String,
}

/// Have containerd run containers in cells.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell containerd install --dry-run
  exocell containerd install && systemctl restart containerd
  ctr run --rm --runtime io.containerd.exocell.v1 docker.io/library/busybox:latest c echo hello

It makes a link to this program, by which containerd finds its shim, and adds the runtime to
containerd's configuration: in a file of its own where that imports conf.d/*.toml, else between two
marks at its end. Nothing else of it changes; uninstall takes both away.")]
pub struct ContainerdInstallArgs {
    #[command(flatten)]
    pub places: ContainerdPlaces,
    /// Say what would change, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// Take away what install has made.
#[derive(Args)]
#[command(after_help = "Example: exocell containerd uninstall && systemctl restart containerd")]
pub struct ContainerdUninstallArgs {
    #[command(flatten)]
    pub places: ContainerdPlaces,
    /// Say what would change, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// Say what containerd needs to run containers in cells, and what of it is missing.
#[derive(Args)]
#[command(after_help = "Example: exocell containerd status

Exit code 1 when something is missing.")]
pub struct ContainerdStatusArgs {
    #[command(flatten)]
    pub places: ContainerdPlaces,
    /// One JSON object a line.
    #[arg(long)]
    pub json: bool,
}
