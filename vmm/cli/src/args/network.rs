//! The words of `exocell network`.

use std::net::Ipv4Addr;

use clap::{Args, Subcommand};
use exocell_cell::switch::Subnet;

#[derive(Subcommand)]
pub enum NetworkCommand {
    Create(NetworkCreateArgs),
    Ls(NetworkLsArgs),
    Inspect(NetworkInspectArgs),
    Rm(NetworkRmArgs),
    Prune(NetworkPruneArgs),
    Connect(NetworkConnectArgs),
    Disconnect(NetworkDisconnectArgs),
}

/// Make a network, in which cells reach each other by name.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell network create backend
  exocell run -d --name db --network backend my/postgres
  exocell run --rm --network backend exocell/base getent hosts db

A cell in a network reaches the others there, by any protocol of IP, and is reached by them. Nothing
else comes in: from elsewhere it takes -p, and to go elsewhere --allow-net.")]
pub struct NetworkCreateArgs {
    /// Its addresses, like 172.28.0.0/16; without it, some that no other network has.
    #[arg(long, value_name = "CIDR")]
    pub subnet: Option<Subnet>,
    /// The address that is nobody's in it [default: the first].
    #[arg(long, value_name = "ADDRESS")]
    pub gateway: Option<Ipv4Addr>,
    /// Where cells get their addresses that name none.
    #[arg(long, value_name = "CIDR")]
    pub ip_range: Option<Subnet>,
    /// Cells in it have no other way out, whatever --allow-net says.
    #[arg(long)]
    pub internal: bool,
    /// Note NAME=VALUE of it.
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub label: Vec<String>,
    /// Noted, and nothing more.
    #[arg(short, long, value_name = "NAME=VALUE", hide = true)]
    pub opt: Vec<String>,
    /// Any cell may be attached anyway.
    #[arg(long, hide = true)]
    pub attachable: bool,
    /// What kind it is: bridge.
    #[arg(short, long, value_name = "DRIVER", default_value = "bridge", hide = true)]
    pub driver: String,
    /// The name.
    pub network: String,
}

/// List networks.
#[derive(Args)]
#[command(visible_alias = "list", after_help = "Example: exocell network ls")]
pub struct NetworkLsArgs {
    /// Print only ids.
    #[arg(short, long)]
    pub quiet: bool,
    /// Print whole ids.
    #[arg(long)]
    pub no_trunc: bool,
    /// Show those that pass: name=TEXT, id=PREFIX, label=NAME[=VALUE], driver=bridge.
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub filter: Vec<String>,
    /// Print as JSON, one object a line.
    #[arg(long, conflicts_with = "quiet")]
    pub json: bool,
    /// Print each with a template, like '{{.Name}} {{.Subnet}}'.
    #[arg(long, value_name = "TEMPLATE", conflicts_with_all = ["quiet", "json"])]
    pub format: Option<String>,
}

/// Print all that is known of networks, and who is in them, as JSON.
#[derive(Args)]
#[command(after_help = "Example: exocell network inspect backend")]
pub struct NetworkInspectArgs {
    /// Names or ids.
    #[arg(required = true)]
    pub networks: Vec<String>,
    /// Print with a template, like '{{.Name}}'.
    #[arg(short, long, value_name = "TEMPLATE")]
    pub format: Option<String>,
}

/// Remove networks that no cell is in.
#[derive(Args)]
#[command(visible_alias = "remove", after_help = "Example: exocell network rm backend")]
pub struct NetworkRmArgs {
    /// Networks that are not there are no error.
    #[arg(short, long)]
    pub force: bool,
    /// Names or ids.
    #[arg(required = true)]
    pub networks: Vec<String>,
}

/// Remove all networks that no cell is in.
#[derive(Args)]
#[command(after_help = "Example: exocell network prune -f")]
pub struct NetworkPruneArgs {
    /// Do not ask.
    #[arg(short, long)]
    pub force: bool,
}

/// Put a running cell that has a network into one more.
#[derive(Args)]
#[command(after_help = "Example: exocell network connect --alias db backend job")]
pub struct NetworkConnectArgs {
    /// Another name for it there.
    #[arg(long, value_name = "NAME")]
    pub alias: Vec<String>,
    /// The address that it is to have.
    #[arg(long, value_name = "ADDRESS")]
    pub ip: Option<Ipv4Addr>,
    /// A name or an id.
    pub network: String,
    /// A name or an id.
    pub cell: String,
}

/// Take a cell out of a network.
#[derive(Args)]
#[command(after_help = "Example: exocell network disconnect backend job")]
pub struct NetworkDisconnectArgs {
    /// A cell that is not in it is no error.
    #[arg(short, long)]
    pub force: bool,
    /// A name or an id.
    pub network: String,
    /// A name or an id.
    pub cell: String,
}
