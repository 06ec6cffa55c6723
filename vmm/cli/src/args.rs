//! The command line: docker's verbs and flags where docker has them.

mod containerd;
mod network;
mod volume;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand, ValueEnum};
use exocell_cell::logging::{FORMAT_VARIABLE, LEVEL_VARIABLE, LevelFilter, Style};

/// Run untrusted work in cells: a Linux kernel of its own, or a Wasm isolate.
#[derive(Parser)]
#[command(name = "exocell", version, max_term_width = 100)]
#[command(args_override_self = true, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes of run and exec: the program's own; 128+N if signal N killed it; \
125 exocell failed; 126 the program cannot be executed; 127 it was not found."
)]
pub struct Cli {
    /// Where images, kernels and cells are kept.
    #[arg(long, global = true, env = "EXOCELL_ROOT", value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// What is said on standard error of the work itself: off, error, warn, info, debug or trace.
    #[arg(long, global = true, env = LEVEL_VARIABLE, value_name = "LEVEL", default_value = "warn",
        help_heading = "Logging")]
    pub log_level: LevelFilter,
    /// How: text or json (one object a line).
    #[arg(long, global = true, env = FORMAT_VARIABLE, value_name = "FORMAT", default_value = "text",
        help_heading = "Logging")]
    pub log_format: Style,
    #[command(subcommand)]
    pub command: Command,
}

/// At least one of these flags.
fn one_of(name: &'static str, flags: &[&'static str]) -> ArgGroup {
    ArgGroup::new(name).args(flags.to_vec()).required(true).multiple(true)
}

#[derive(Subcommand)]
pub enum Command {
    Run(Box<RunArgs>),
    Exec(ExecArgs),
    Start(StartArgs),
    Restart(RestartArgs),
    Attach(AttachArgs),
    Ps(PsArgs),
    Top(TopArgs),
    Rename(RenameArgs),
    Port(PortArgs),
    Pool(Box<PoolArgs>),
    Build(Box<BuildArgs>),
    Commit(CommitArgs),
    Logs(LogsArgs),
    Cp(CpArgs),
    Inspect(InspectArgs),
    Stats(StatsArgs),
    /// Print figures of all running cells for Prometheus, under cAdvisor's names.
    #[command(
        after_help = "Example: exocell metrics > /var/lib/prometheus/node-exporter/exocell.prom"
    )]
    Metrics,
    Wait(WaitArgs),
    Stop(StopArgs),
    Kill(KillArgs),
    /// Stop all of running cells where they are.
    Pause(PauseArgs),
    /// Let paused cells go on.
    Unpause(PauseArgs),
    Rm(RmArgs),
    Update(UpdateArgs),
    Budget(BudgetArgs),
    Events(EventsArgs),
    /// Import, pull, push, list, name, save and remove images.
    #[command(
        subcommand,
        after_help = "docker's images, pull, push, rmi, tag, save, load and history are understood, too."
    )]
    Image(ImageCommand),
    // docker's words for them.
    #[command(hide = true)]
    Pull(PullArgs),
    #[command(hide = true)]
    Push(PushArgs),
    #[command(hide = true)]
    Rmi(ImageRmArgs),
    #[command(hide = true)]
    Tag(TagArgs),
    #[command(hide = true)]
    Save(SaveArgs),
    #[command(hide = true)]
    Load(LoadArgs),
    #[command(hide = true)]
    History(HistoryArgs),
    #[command(hide = true)]
    Images(ImageLsArgs),
    /// Networks in which cells reach each other.
    #[command(subcommand)]
    Network(NetworkCommand),
    /// What has the switch of a network.
    #[command(name = exocell_cell::networks::VERB, hide = true)]
    SwitchNetwork {
        name: String,
    },
    #[command(name = exocell_cell::networks::SPAWN_VERB, hide = true)]
    SwitchNetworkApart {
        name: String,
    },
    /// Folders that outlive cells.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Check and explain capability tables.
    #[command(subcommand)]
    Caps(CapsCommand),
    /// Build the guest kernel.
    #[command(subcommand)]
    Kernel(KernelCommand),
    Serve(ServeArgs),
    Mcp(McpArgs),
    /// Run the containers of a containerd in cells.
    #[command(subcommand)]
    Containerd(ContainerdCommand),
    /// Evaluate patches of SWE-bench in cells.
    #[command(subcommand)]
    Swebench(SwebenchCommand),
    /// What a server runs for each container that it starts.
    #[command(name = exocell_docker::launcher::VERB, hide = true)]
    LaunchContainer {
        id: String,
    },
    /// What starts a cell again that has a restart policy.
    #[command(name = exocell_cell::restart::VERB, hide = true)]
    RestartCell {
        id: String,
    },
    #[command(name = exocell_cell::restart::SPAWN_VERB, hide = true)]
    RestartCellApart {
        id: String,
    },
    /// Add, list and remove Wasm modules that `exocell serve --http` serves.
    #[command(subcommand)]
    Module(ModuleCommand),
    Doctor(DoctorArgs),
    Bench(BenchArgs),
    /// What the images, cells and disks take, and what can be removed.
    #[command(subcommand)]
    System(SystemCommand),
    /// Print the versions of this command and its guest kernel.
    Version,
    /// Print a shell completion script.
    #[command(after_help = "Example: exocell completion bash > /etc/bash_completion.d/exocell")]
    Completion {
        shell: clap_complete::Shell,
    },
    Man(ManArgs),
}

pub use containerd::*;
pub use network::*;
pub use volume::*;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StrengthArg {
    Vm,
    Isolate,
}

/// Docker's words for where a log is kept.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogDriver {
    JsonFile,
    #[value(hide = true)]
    Local,
    None,
}

/// When an image is pulled.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Pull {
    Always,
    Missing,
    Never,
}

/// Run a program in a new cell.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell run --rm -it exocell/base bash
  exocell run --rm -v ./src:/src:ro -w /src exocell/base make test
  exocell run -d --name job --memory 512m --cpus 2 --timeout 10m exocell/base ./job
  exocell run --rm --caps table.toml module.wasm
  exocell run --rm --cap spawn=4 -v ./m:/m:ro exocell/base exocell run --rm /m/module.wasm")]
pub struct RunArgs {
    /// `vm`: a Linux kernel of its own; `isolate`: a Wasm module [default: by IMAGE].
    #[arg(long, value_enum)]
    pub strength: Option<StrengthArg>,
    /// Capability table (TOML or JSON); flags may then only narrow it. In a vm cell all of it
    /// lies within the cell's own.
    #[arg(long, value_name = "FILE")]
    pub caps: Option<PathBuf>,
    /// One more capability, as NAME=VALUE (see: exocell caps explain).
    #[arg(long = "cap", value_name = "NAME=VALUE")]
    pub cap: Vec<String>,
    /// Settings of Anthropic's sandbox runtime: the domains and paths that its file allows, and the
    /// current directory, at their own paths.
    #[arg(long, value_name = "FILE")]
    pub srt: Option<PathBuf>,
    /// Keep standard input open.
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the program a terminal.
    #[arg(short, long)]
    pub tty: bool,
    /// Run in the background and print the cell's id.
    #[arg(short, long)]
    pub detach: bool,
    /// Remove the cell's record when it ends.
    #[arg(long)]
    pub rm: bool,
    #[arg(long)]
    pub name: Option<String>,
    /// Note something of the cell, for ps --filter label=NAME and inspect.
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub label: Vec<String>,
    /// A file of NAME=VALUE lines, which are labels.
    #[arg(long, value_name = "FILE")]
    pub label_file: Vec<PathBuf>,
    /// Write the cell's id into a new file.
    #[arg(long, value_name = "FILE")]
    pub cidfile: Option<PathBuf>,
    #[arg(long)]
    pub hostname: Option<String>,
    #[command(flatten)]
    pub process: ProcessArgs,
    #[command(flatten)]
    pub settings: SettingsArgs,
    #[command(flatten)]
    pub health: HealthArgs,
    /// Share a host folder: HOST:GUEST[:ro]; isolates also :overlay, for changes of their own. A
    /// word that is no folder here is the name of a volume, which is made if there is none. A path
    /// of the cell alone is a new volume without a name, as the image's VOLUMEs are.
    #[arg(short, long = "volume", value_name = "[HOST|NAME:]GUEST[:ro]")]
    pub volume: Vec<String>,
    /// The same in docker's words: type=bind,source=HOST,target=GUEST[,readonly], type=volume with
    /// a name as its source or none, which gets what the image has there while it is empty
    /// (volume-nocopy: not), or type=tmpfs,target=GUEST[,tmpfs-size=BYTES].
    #[arg(long, value_name = "NAME=VALUE,...")]
    pub mount: Vec<String>,
    /// Let the cell talk to HOST[:PORTS][/udp|/raw], HOST/icmp or NETWORK:PORTS. To a host's name
    /// it must be HTTP/1 or TLS for that name; /raw lets any protocol through (ssh, postgres).
    /// exocell logs --network says what was refused, and why.
    #[arg(long, value_name = "RULE")]
    pub allow_net: Vec<String>,
    /// Put a secret into the cell's requests to HOST: NAME=VALUE@HOST[:PORT] over plain HTTP,
    /// NAME=VALUE@https://HOST[:PORT] over TLS, which is then opened for this host; without
    /// =VALUE the value of this environment's NAME, which no other user of the host can read while
    /// the command starts. The cell has a placeholder in NAME and never sees the value, which is put
    /// into fields for credentials (Authorization, X-Api-Key, Cookie, ...).
    #[arg(long, value_name = "NAME[=VALUE]@[https://]HOST[:PORT]")]
    pub secret: Vec<String>,
    /// Lead a port of this host into the cell [default address: loopback; default port: any that is
    /// free, which exocell port tells]. Of a range for one port of the cell, like 8000-8010:80, it
    /// is the first that is free.
    #[arg(short, long, value_name = "[[ADDRESS:]PORT:]PORT[/udp]")]
    pub publish: Vec<String>,
    /// No private overlay: the root file system cannot be written.
    #[arg(long)]
    pub read_only: bool,
    /// How a vm cell's memory goes back to the host: credit (page for page as it is freed,
    /// within a credit of this host's), eager (the same without a credit), cold (the same as
    /// eager, and files' pages that nobody reads), off (at the cell's end), or report0 and report9
    /// (free page reporting, to compare with) [default: credit; off on kvm, which has no other].
    #[arg(long, value_name = "MODE")]
    pub pager: Option<exocell_cell::pager::Mode>,
    /// Memory that the cell can have whatever others do, with --pager credit and a budget
    /// (exocell budget) [default: what its kernel needs].
    #[arg(long, value_name = "BYTES", value_parser = exocell_cell::xgate::parse_bytes)]
    pub memory_guarantee: Option<u64>,
    /// What stands between a vm cell's programs and its kernel: aspace (address spaces of
    /// their own), mpk (memory protection keys; where the host has them), or none (faster;
    /// programs can do what the cell's kernel can).
    /// Default: $EXOCELL_INTRA, else aspace.
    #[arg(long, value_name = "MODE")]
    pub intra: Option<exocell_cell::intra::Intra>,
    /// Memory limit, like 512m [default: the table's, or 256m].
    #[arg(short, long, value_name = "BYTES")]
    pub memory: Option<String>,
    /// Processors, or a part of one, like 0.5 [default: the table's, or 1].
    #[arg(long, value_name = "N")]
    pub cpus: Option<String>,
    /// Size of the private overlay, like 2g [default: the table's, or 1g].
    #[arg(long, value_name = "BYTES")]
    pub disk: Option<String>,
    /// Processes and threads that may exist at once [default: the table's, or 512].
    #[arg(long, value_name = "N")]
    pub pids_limit: Option<String>,
    /// Replace the image's entrypoint; '' takes it away.
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<String>,
    /// End the cell after this long, like 30s (exit code 137).
    #[arg(long, value_name = "DURATION")]
    pub timeout: Option<String>,
    /// The signal that exocell stop begins with [default: the image's, or TERM].
    #[arg(long, value_name = "SIGNAL")]
    pub stop_signal: Option<String>,
    /// Seconds that exocell stop gives the program [default: 10].
    #[arg(long, value_name = "SECONDS")]
    pub stop_timeout: Option<u64>,
    /// Whether the image is pulled first: always, if it is missing, or never.
    #[arg(long, value_enum, default_value_t = Pull::Never)]
    pub pull: Pull,
    /// Where what the program writes is kept, for exocell logs: json-file (with the cell), or none.
    #[arg(long, value_enum, value_name = "DRIVER", default_value = "json-file")]
    pub log_driver: LogDriver,
    /// Keys that leave a cell with a terminal (-it) and let it go on; exocell attach comes back.
    #[arg(long, value_name = "KEYS", default_value = exocell_docker::keys::DEFAULT)]
    pub detach_keys: exocell_docker::keys::Keys,
    /// Whether signals to this command go to the program.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set,
        num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub sig_proxy: bool,
    /// Whether the cell starts again when its program has ended: no, on-failure[:N], always, or
    /// unless-stopped. One that is stopped or killed by hand stays ended.
    #[arg(long, value_name = "POLICY", default_value_t)]
    pub restart: exocell_cell::policy::Policy,
    /// A network between cells to be in (exocell network), or name=NAME,alias=NAME,ip=ADDRESS; or
    /// container:CELL, to be a container in that cell's guest, on its network. None is the default.
    #[arg(long, alias = "net", value_name = "NETWORK")]
    pub network: Vec<String>,
    /// Another name for the cell in its network.
    #[arg(long, visible_alias = "net-alias", value_name = "NAME")]
    pub network_alias: Vec<String>,
    /// The cell's address in its network.
    #[arg(long, value_name = "ADDRESS")]
    pub ip: Option<std::net::Ipv4Addr>,
    /// What runs a vm cell's guest: para (a process; on every host), kvm (a virtual machine of the
    /// host's KVM, where that has a processor for it; see exocell kernel build --platform kvm), or
    /// auto (kvm where it can be, else para) [default: para].
    #[arg(long, value_name = "PLATFORM")]
    pub platform: Option<String>,
    // For a server that has cells: neither the command nor the cell outlives it.
    #[arg(long, hide = true)]
    pub tied: bool,
    /// Print how the cell ended as JSON on standard error.
    #[arg(long)]
    pub json: bool,
    /// An image, or the path of a Wasm module (.wasm, .wat).
    pub image: String,
    /// Program and arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
}

/// Keep cells that are booted and wait, so that `run` has one at once.
#[derive(Args)]
#[command(after_help = "Example: exocell pool --size 4 -m 512m exocell/base

A run takes a warm cell where it wants just such a one: the same image, memory, processors, disk,
processes and other capabilities but the deadline; no folder, no network, no secret. Another takes
its place; the ids of all are printed as they start. The pool lasts as long as this command; however that ends, its cells end with it, but
for those that were taken.")]
pub struct PoolArgs {
    /// How many cells wait at once.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub size: u32,
    /// A cell as `run` would start it, without a program.
    #[command(flatten)]
    pub run: RunArgs,
}

/// Build an image from a Dockerfile; each of its commands runs in a cell of its own.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell build -t me/app .
  exocell build -t me/app --allow-net '*.debian.org:80' --build-arg VERSION=2 .
  exocell build --secret id=token,src=token.txt --target test --no-cache .
  tar c app | exocell build -q -f app/Dockerfile -

Standard output is the image's id, standard error all else. The exit code is 1 if a command of the
Dockerfile fails. Commands have no network but what --allow-net grants.")]
pub struct BuildArgs {
    /// The directory of the build's files; - takes an archive of them, or a Dockerfile, from
    /// standard input.
    pub path: PathBuf,
    /// A name for the image.
    #[arg(short, long, value_name = "NAME[:TAG]")]
    pub tag: Vec<String>,
    /// The Dockerfile, or - for standard input [default: PATH/Dockerfile].
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// A value for an ARG: NAME=VALUE, or NAME to take it from this environment.
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub build_arg: Vec<String>,
    /// The stage to build [default: the last].
    #[arg(long, value_name = "STAGE")]
    pub target: Option<String>,
    /// Do each step anew.
    #[arg(long)]
    pub no_cache: bool,
    /// Fetch the images that the build begins with, though they are there.
    #[arg(long)]
    pub pull: bool,
    /// A label of the image.
    #[arg(long, value_name = "NAME=VALUE")]
    pub label: Vec<String>,
    /// A file that RUN --mount=type=secret shows a command, and that is in no image:
    /// id=NAME,src=FILE.
    #[arg(long, value_name = "id=NAME,src=FILE")]
    pub secret: Vec<String>,
    /// Let commands talk to HOST[:PORTS][/udp|/raw], HOST/icmp or NETWORK:PORTS.
    #[arg(long, value_name = "RULE")]
    pub allow_net: Vec<String>,
    /// A network between cells (exocell network) that commands are in; none takes away what
    /// --allow-net grants.
    #[arg(long, value_name = "default|none|NETWORK")]
    pub network: Option<String>,
    /// A name that commands find in /etc/hosts.
    #[arg(long, value_name = "NAME:ADDRESS")]
    pub add_host: Vec<String>,
    /// Memory of each command's cell [default: 2g, at most half the host's].
    #[arg(short, long, value_name = "BYTES")]
    pub memory: Option<String>,
    /// Processors of each command's cell [default: the host's].
    #[arg(long, value_name = "N")]
    pub cpus: Option<u32>,
    /// What each command may write to its image.
    #[arg(long, value_name = "BYTES", default_value = "10g")]
    pub disk: String,
    /// Processes and threads of each command's cell.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub pids_limit: u32,
    /// Size of /dev/shm.
    #[arg(long, value_name = "BYTES", value_parser = exocell_cell::xgate::parse_bytes)]
    pub shm_size: Option<u64>,
    /// linux/amd64, which is what cells run.
    #[arg(long, value_name = "PLATFORM")]
    pub platform: Option<String>,
    /// Write the image's id to FILE.
    #[arg(long, value_name = "FILE")]
    pub iidfile: Option<PathBuf>,
    /// How progress is shown: in lines, whatever is said.
    #[arg(long, value_name = "HOW", default_value = "plain")]
    pub progress: BuildProgress,
    /// Print the image's id alone.
    #[arg(short, long)]
    pub quiet: bool,
}

/// How a build is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BuildProgress {
    Plain,
    Auto,
}

/// Make an image of what a cell's root file system holds, whether the cell runs or has ended.
#[derive(Args)]
#[command(after_help = "Example: exocell commit job me/ready:1 && exocell run --rm me/ready:1 ./go

The image is started as the cell's own is, but for --change. Shared folders and other mounts are left out. The cell's
programs go on meanwhile.")]
pub struct CommitArgs {
    /// Who made it.
    #[arg(short, long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub author: String,
    /// What it is, for exocell history.
    #[arg(short, long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub message: String,
    // docker's words for what a commit here never does.
    #[arg(short, long, hide = true)]
    pub pause: bool,
    #[arg(long, hide = true)]
    pub no_pause: bool,
    /// An instruction of a Dockerfile that changes how the image is started, like CMD or ENV.
    #[arg(short, long, value_name = "INSTRUCTION")]
    pub change: Vec<String>,
    pub cell: String,
    /// The image's name; without one it is called by its id.
    pub tag: Option<String>,
}

/// How a program is started; common to run and exec.
#[derive(Args)]
pub struct ProcessArgs {
    /// NAME=VALUE, or NAME to take it from this environment.
    #[arg(short, long = "env", value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// A file of NAME=VALUE lines.
    #[arg(long, value_name = "FILE")]
    pub env_file: Vec<PathBuf>,
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// NAME or UID, with :GROUP or :GID.
    #[arg(short, long)]
    pub user: Option<String>,
}

/// What the program has and is held to inside its guest, in docker's words and with its defaults.
#[derive(Args)]
#[command(next_help_heading = "Inside the guest")]
pub struct SettingsArgs {
    /// Root of its own kernel: every capability, nothing masked or read-only.
    #[arg(long)]
    pub privileged: bool,
    /// One more capability of capabilities(7), or ALL.
    #[arg(long, value_name = "NAME")]
    pub cap_add: Vec<String>,
    /// One capability less, or ALL.
    #[arg(long, value_name = "NAME")]
    pub cap_drop: Vec<String>,
    /// no-new-privileges, or systempaths=unconfined.
    #[arg(long, value_name = "OPTION")]
    pub security_opt: Vec<String>,
    /// One more group of the program's user.
    #[arg(long, value_name = "GROUP")]
    pub group_add: Vec<String>,
    /// A limit of setrlimit(2), like nofile=1024:2048.
    #[arg(long, value_name = "NAME=SOFT[:HARD]")]
    pub ulimit: Vec<String>,
    /// Files in memory, like /t:size=1m.
    #[arg(long, value_name = "PATH[:OPTIONS]")]
    pub tmpfs: Vec<String>,
    /// Size of /dev/shm [default: 64m].
    #[arg(long, value_name = "BYTES", value_parser = exocell_cell::xgate::parse_bytes)]
    pub shm_size: Option<u64>,
    /// A setting of the guest's kernel.
    #[arg(long, value_name = "NAME=VALUE")]
    pub sysctl: Vec<String>,
    #[arg(long, value_name = "NAME")]
    pub domainname: Option<String>,
    /// A line of /etc/hosts. The address host-gateway is this host's, which --allow-net
    /// host.docker.internal:PORT lets the cell reach.
    #[arg(long, value_name = "NAME:ADDRESS")]
    pub add_host: Vec<String>,
    /// Who is asked for the names that the cell looks up, instead of this host's servers; the cell
    /// itself reaches none of them.
    #[arg(long, value_name = "ADDRESS")]
    pub dns: Vec<String>,
    /// A domain in which short names are looked up.
    #[arg(long, value_name = "DOMAIN")]
    pub dns_search: Vec<String>,
    /// An option of resolv.conf(5), like ndots:2.
    #[arg(long, visible_alias = "dns-opt", value_name = "OPTION")]
    pub dns_option: Vec<String>,
    /// A node of a device of the guest's kernel, like /dev/loop0 or /dev/fuse; the host's are not
    /// in reach.
    #[arg(long, value_name = "DEVICE[:PATH]")]
    pub device: Vec<String>,
    /// Let it use the nodes of devices of the guest's kernel that it makes, like 'c 10:200 rwm'.
    #[arg(long, value_name = "RULE")]
    pub device_cgroup_rule: Vec<String>,
    /// How likely the guest's kernel ends it for lack of memory, -1000 to 1000.
    #[arg(long, value_name = "N", allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(-1000..=1000))]
    pub oom_score_adj: Option<i32>,
    /// Give it a first process as its parent, which reaps orphans and passes signals on.
    #[arg(long)]
    pub init: bool,
    /// Its share of the guest's processors; 1024 is one.
    #[arg(long, value_name = "N")]
    pub cpu_shares: Option<u64>,
    /// Those of the guest's processors that it may use, like 0-1.
    #[arg(long, value_name = "LIST")]
    pub cpuset_cpus: Option<String>,
    /// Memory that the guest's kernel takes from it last.
    #[arg(long, value_name = "BYTES", value_parser = exocell_cell::xgate::parse_bytes)]
    pub memory_reservation: Option<u64>,
}

/// How the program is looked after; what is not said is as the image has it.
#[derive(Args)]
#[command(next_help_heading = "Health checks")]
pub struct HealthArgs {
    /// A line for the shell of the cell that ends with 0 when the program is well.
    #[arg(long, value_name = "LINE")]
    pub health_cmd: Option<String>,
    /// Time from one check to the next [default: the image's, or 30s].
    #[arg(long, value_name = "DURATION", value_parser = exocell_cell::health::read_time)]
    pub health_interval: Option<i64>,
    /// How long one check may take before it is killed [default: the image's, or 30s].
    #[arg(long, value_name = "DURATION", value_parser = exocell_cell::health::read_time)]
    pub health_timeout: Option<i64>,
    /// Failures in a row that are unhealthy [default: the image's, or 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub health_retries: Option<u32>,
    /// For so long after the start failures do not count [default: the image's, or 0s].
    #[arg(long, value_name = "DURATION", value_parser = exocell_cell::health::read_time)]
    pub health_start_period: Option<i64>,
    /// Time from one check to the next in the start period [default: the image's, or 5s].
    #[arg(long, value_name = "DURATION", value_parser = exocell_cell::health::read_time)]
    pub health_start_interval: Option<i64>,
    /// No checks, whatever the image says.
    #[arg(long, conflicts_with_all = ["health_cmd", "health_interval", "health_timeout",
        "health_retries", "health_start_period", "health_start_interval"])]
    pub no_healthcheck: bool,
}

impl HealthArgs {
    /// Whether anything is said.
    pub fn is_said(&self) -> bool {
        let times = [
            self.health_interval,
            self.health_timeout,
            self.health_start_period,
            self.health_start_interval,
        ];
        self.health_cmd.is_some()
            || self.no_healthcheck
            || self.health_retries.is_some()
            || times.iter().any(Option::is_some)
    }
}

/// Run one more program in a running cell.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell exec -it job bash
  exocell exec --timeout 5m job make test")]
pub struct ExecArgs {
    #[arg(short, long)]
    pub interactive: bool,
    #[arg(short, long)]
    pub tty: bool,
    /// Do not wait for it.
    #[arg(short, long)]
    pub detach: bool,
    /// With every capability, whatever the cell's own program has.
    #[arg(long)]
    pub privileged: bool,
    /// Kill the program after this long, like 30s (exit code 137); not what it has started, and
    /// not once it is left (--detach-keys).
    #[arg(long, value_name = "DURATION", value_parser = exocell_cell::xgate::parse_duration,
        conflicts_with = "detach")]
    pub timeout: Option<std::time::Duration>,
    /// Keys that leave a program with a terminal (-it) and let it go on.
    #[arg(long, value_name = "KEYS", default_value = exocell_docker::keys::DEFAULT)]
    pub detach_keys: exocell_docker::keys::Keys,
    #[command(flatten)]
    pub process: ProcessArgs,
    pub cell: String,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
}

/// Start cells that have ended, with their disks as they left them.
#[derive(Args)]
#[command(after_help = "Cells that were run with --rm or a secret do not start again.")]
pub struct StartArgs {
    /// Show what the program writes, and wait for its end.
    #[arg(short, long)]
    pub attach: bool,
    /// The same, with standard input, of a cell that was run with -i.
    #[arg(short, long)]
    pub interactive: bool,
    #[arg(required = true)]
    pub cells: Vec<String>,
}

/// End cells and start them again, with their disks as they left them.
#[derive(Args)]
pub struct RestartArgs {
    /// Seconds between the signal and the end [default: 10, or --stop-timeout's].
    #[arg(short, long, visible_alias = "timeout", value_name = "SECONDS")]
    pub time: Option<u64>,
    /// The signal to begin with [default: the image's, or TERM].
    #[arg(short, long)]
    pub signal: Option<String>,
    #[arg(required = true)]
    pub cells: Vec<String>,
}

/// Follow a running cell's program, with its input and signals, until it ends.
#[derive(Args)]
#[command(after_help = "Ctrl-P Ctrl-Q leaves a cell that has a terminal, and lets it go on.")]
pub struct AttachArgs {
    /// Keys that leave it.
    #[arg(long, value_name = "KEYS", default_value = exocell_docker::keys::DEFAULT)]
    pub detach_keys: exocell_docker::keys::Keys,
    /// Only what it writes.
    #[arg(long)]
    pub no_stdin: bool,
    /// Whether signals to this command go to the program.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set,
        num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub sig_proxy: bool,
    pub cell: String,
}

/// List cells.
#[derive(Args)]
pub struct PsArgs {
    /// Ended cells too.
    #[arg(short, long)]
    pub all: bool,
    /// Only ids.
    #[arg(short, long)]
    pub quiet: bool,
    /// Whole ids and commands.
    #[arg(long)]
    pub no_trunc: bool,
    /// Only cells with status=, name=, id=, label=, ancestor= (the image), exited= (a code),
    /// health= or strength= of this value.
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub filter: Vec<String>,
    /// A line for each: words and {{.ID}}, {{.Names}}, {{.Image}}, {{.Status}}, {{json .}}.
    #[arg(long, value_name = "TEMPLATE", conflicts_with = "quiet")]
    pub format: Option<String>,
    /// Only the last N that were made, ended ones too.
    #[arg(short = 'n', long, value_name = "N")]
    pub last: Option<usize>,
    /// Only the last one that was made.
    #[arg(short, long, conflicts_with = "last")]
    pub latest: bool,
    /// One object a line.
    #[arg(long, conflicts_with_all = ["quiet", "format"])]
    pub json: bool,
}

/// List the processes of a running cell, by the ps of its image.
#[derive(Args)]
#[command(after_help = "Example: exocell top job -eo pid,args")]
pub struct TopArgs {
    pub cell: String,
    /// What ps is given.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<String>,
}

/// Give a cell another name.
#[derive(Args)]
pub struct RenameArgs {
    pub cell: String,
    pub name: String,
}

/// Print which ports of this host lead into a cell.
#[derive(Args)]
#[command(after_help = "Example: exocell port web 80")]
pub struct PortArgs {
    pub cell: String,
    /// Only that of this port of the cell.
    #[arg(value_name = "PORT[/udp]")]
    pub port: Option<String>,
}

/// Print what a cell's program wrote.
#[derive(Args)]
#[command(after_help = "Example: exocell logs -f --tail 20 -t job")]
pub struct LogsArgs {
    /// Follow a running cell.
    #[arg(short, long, conflicts_with_all = ["console", "network", "supervisor"])]
    pub follow: bool,
    /// Only so many lines at the end, or all.
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true,
        conflicts_with_all = ["console", "network", "supervisor"])]
    pub tail: Option<String>,
    /// Only lines from this time on: 10m for ten minutes ago, or 2025-01-31T12:00:00Z.
    #[arg(long, value_name = "TIME", conflicts_with_all = ["console", "network", "supervisor"])]
    pub since: Option<String>,
    /// Only lines until this time.
    #[arg(long, value_name = "TIME", conflicts_with_all = ["console", "network", "supervisor"])]
    pub until: Option<String>,
    /// Each line behind its time.
    #[arg(short, long, conflicts_with_all = ["console", "network", "supervisor"])]
    pub timestamps: bool,
    /// The guest kernel's console instead.
    #[arg(long)]
    pub console: bool,
    /// The network's decisions instead, one JSON object a line.
    #[arg(long, conflicts_with = "console")]
    pub network: bool,
    /// What the cell's supervisor noted of its start and its end instead.
    #[arg(long, conflicts_with_all = ["console", "network"])]
    pub supervisor: bool,
    pub cell: String,
}

/// Tell what becomes of cells, as it happens.
///
/// Events are create, start, oom, pause, unpause, exit and remove. Those of the past are kept for a
/// while, of cells that are gone, too.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell events
  exocell events --since 1h --until 0s --filter event=exit --json
  exocell events --filter cell=job --format '{{.action}} {{.exit_code}}'")]
pub struct EventsArgs {
    /// Events from this time on, too: 10m for ten minutes ago, or 2025-01-31T12:00:00Z.
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Stop at this time.
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// Only events of some kind: event=ACTION, cell=NAME|ID, image=REFERENCE.
    #[arg(short, long, value_name = "FILTER")]
    pub filter: Vec<String>,
    /// One JSON object for each.
    #[arg(long)]
    pub json: bool,
    /// A template for each, or json.
    #[arg(long, value_name = "TEMPLATE", conflicts_with = "json")]
    pub format: Option<String>,
}

/// Copy files between a running cell and the host.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell cp job:/var/log ./log
  exocell cp ./patch.diff job:/tmp
  tar c src | exocell cp - job:/work")]
pub struct CpArgs {
    /// PATH, CELL:PATH, or - for a tar stream.
    pub from: String,
    pub to: String,
}

/// Print all that is known of cells.
#[derive(Args)]
#[command(after_help = "Example: exocell inspect -f '{{.state}} {{.exit_code}}' job")]
pub struct InspectArgs {
    /// For scripts: the output is JSON either way.
    #[arg(long)]
    pub json: bool,
    /// A line for each, as Go's templates have it: words and {{.state}}, {{json .capabilities}},
    /// {{range .Mounts}}{{.Source}} {{end}}; docker's names are known beside exocell's own.
    #[arg(short, long, value_name = "TEMPLATE", conflicts_with = "json")]
    pub format: Option<String>,
    #[arg(required = true)]
    pub cells: Vec<String>,
}

/// Print what running cells use.
#[derive(Args)]
pub struct StatsArgs {
    #[arg(long)]
    pub json: bool,
    /// As docker has it: they are printed once anyway.
    #[arg(long, hide = true)]
    pub no_stream: bool,
    pub cells: Vec<String>,
}

/// Wait until cells end and print their exit codes.
#[derive(Args)]
pub struct WaitArgs {
    #[arg(required = true)]
    pub cells: Vec<String>,
}

/// End cells: SIGTERM, then the end.
#[derive(Args)]
pub struct StopArgs {
    /// Seconds between the two [default: 10, or --stop-timeout's].
    #[arg(short, long, visible_alias = "timeout", value_name = "SECONDS")]
    pub time: Option<u64>,
    /// The signal to begin with [default: the image's, or TERM].
    #[arg(short, long)]
    pub signal: Option<String>,
    #[arg(required = true)]
    pub cells: Vec<String>,
}

/// Send a signal to cells' programs; KILL ends the cells.
#[derive(Args)]
pub struct KillArgs {
    #[arg(short, long, default_value = "KILL")]
    pub signal: String,
    #[arg(required = true)]
    pub cells: Vec<String>,
}

#[derive(Args)]
pub struct PauseArgs {
    #[arg(required = true)]
    pub cells: Vec<String>,
}

/// Remove ended cells.
#[derive(Args)]
pub struct RmArgs {
    /// Kill running ones first.
    #[arg(short, long)]
    pub force: bool,
    /// Remove the volumes without names that were made for them, too.
    #[arg(short, long)]
    pub volumes: bool,
    #[arg(required = true)]
    pub cells: Vec<String>,
}

/// Change the grants of a running cell.
#[derive(Args)]
#[command(group = one_of("change", &["revoke", "allow_net", "deny_net", "memory", "cpus", "pids_limit", "restart"]))]
#[command(after_help = "Examples:
  exocell update --revoke folder:/src job
  exocell update --allow-net pypi.org:443 --deny-net example.org job
  exocell update --cpus 0.5 --pids-limit 100 job")]
pub struct UpdateArgs {
    /// End a capability (exocell inspect names them) and what derives from it.
    #[arg(long, value_name = "CAPABILITY")]
    pub revoke: Vec<String>,
    /// Add a rule to the network, as run takes it.
    #[arg(long, value_name = "RULE")]
    pub allow_net: Vec<String>,
    /// Remove the network's rules that lie within this one; open connections are cut.
    #[arg(long, value_name = "RULE")]
    pub deny_net: Vec<String>,
    /// Memory that the guest may use from now on, up to what it was granted (not of a cell
    /// that was run with --pager off).
    #[arg(short, long, value_name = "SIZE", value_parser = exocell_cell::xgate::parse_bytes)]
    pub memory: Option<u64>,
    /// Processors that its programs may use from now on, as run takes them, up to those that it was
    /// started with; of a cell that has ended, at its next start.
    #[arg(long, value_name = "NUMBER")]
    pub cpus: Option<String>,
    /// Processes and threads that it may have, up to those that it was started with; of a cell that
    /// has ended, at its next start.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub pids_limit: Option<u32>,
    /// Start again from now on as run --restart has it; of a cell that has ended, too.
    #[arg(long, value_name = "POLICY")]
    pub restart: Option<exocell_cell::policy::Policy>,
    pub cell: String,
}

/// Show or set the memory that all vm cells may have together: those with --pager credit
/// share it, any other has all of its --memory set aside.
#[derive(Args)]
#[command(after_help = "Example: exocell budget 4g")]
pub struct BudgetArgs {
    /// The new budget, like 4g, for cells that run and those to come; off: none.
    pub size: Option<String>,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Subcommand)]
pub enum ImageCommand {
    Import(ImportArgs),
    Pull(PullArgs),
    Push(PushArgs),
    #[command(visible_alias = "list")]
    Ls(ImageLsArgs),
    #[command(visible_alias = "remove")]
    Rm(ImageRmArgs),
    Tag(TagArgs),
    Save(SaveArgs),
    Load(LoadArgs),
    Inspect(ImageInspectArgs),
    History(HistoryArgs),
    Prune(ImagePruneArgs),
}

/// Import an OCI layout, an OCI or docker archive, or a directory.
#[derive(Args)]
#[command(after_help = "Example: exocell image import rootfs/ --tag exocell/base:latest")]
pub struct ImportArgs {
    pub path: PathBuf,
    /// Name of the image [default: those in a docker archive, of each image in it].
    #[arg(short, long)]
    pub tag: Option<String>,
}

/// Pull an image from a registry.
#[derive(Args)]
pub struct PullArgs {
    pub reference: String,
    /// Speak plain HTTP (always so for loopback addresses).
    #[arg(long)]
    pub plain_http: bool,
}

/// Push an image to a registry.
///
/// Layers that it has are not sent again. EXOCELL_REGISTRY_AUTH=NAME:PASSWORD logs in, as for pull.
#[derive(Args)]
#[command(after_help = "Example: exocell image tag exocell/base registry.example/team/base:1
         exocell image push registry.example/team/base:1")]
pub struct PushArgs {
    pub reference: String,
    /// Speak plain HTTP (always so for loopback addresses).
    #[arg(long)]
    pub plain_http: bool,
}

/// List images.
#[derive(Args)]
pub struct ImageLsArgs {
    /// Only images of this name; a star stands for anything but /.
    pub name: Option<String>,
    /// Only ids.
    #[arg(short, long)]
    pub quiet: bool,
    /// One object a line.
    #[arg(long, conflicts_with_all = ["quiet", "format"])]
    pub json: bool,
    /// Whole ids.
    #[arg(long)]
    pub no_trunc: bool,
    /// dangling=true, label=NAME[=VALUE] or reference=PATTERN.
    #[arg(short, long, value_name = "NAME=VALUE")]
    pub filter: Vec<String>,
    /// A line for each: words and {{.Repository}}, {{.Tag}}, {{.ID}}, {{.Size}}, {{json .}}.
    #[arg(long, value_name = "TEMPLATE", conflicts_with = "quiet")]
    pub format: Option<String>,
    /// As docker has it: all are shown anyway.
    #[arg(short, long, hide = true)]
    pub all: bool,
}

/// Remove names of images, and images with their last name.
#[derive(Args)]
pub struct ImageRmArgs {
    /// An image that has several names, by its id, and one that is not there, too.
    #[arg(short, long)]
    pub force: bool,
    #[arg(required = true)]
    pub images: Vec<String>,
}

/// Give an image one more name.
#[derive(Args)]
#[command(after_help = "Example: exocell image tag exocell/base me/base:1")]
pub struct TagArgs {
    pub image: String,
    pub name: String,
}

/// Write images into an archive, as docker save does.
#[derive(Args)]
#[command(after_help = "Example: exocell image save -o app.tar me/app:1")]
pub struct SaveArgs {
    /// The archive [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[arg(required = true)]
    pub images: Vec<String>,
}

/// Import the images of an archive, under the names that it has for them.
#[derive(Args)]
pub struct LoadArgs {
    /// The archive [default: standard input].
    #[arg(short, long, value_name = "FILE")]
    pub input: Option<PathBuf>,
}

/// Print all that is known of images, as a JSON array.
#[derive(Args)]
pub struct ImageInspectArgs {
    /// A line for each: words and {{.config.Cmd}}, {{json .config}}.
    #[arg(short, long, value_name = "TEMPLATE")]
    pub format: Option<String>,
    #[arg(required = true)]
    pub images: Vec<String>,
}

/// Print the steps that made an image, as it tells them, the last one first.
#[derive(Args)]
pub struct HistoryArgs {
    /// Whole commands.
    #[arg(long)]
    pub no_trunc: bool,
    /// One object a line.
    #[arg(long)]
    pub json: bool,
    pub image: String,
}

/// Remove images without a name.
#[derive(Args)]
pub struct ImagePruneArgs {
    /// All images that no cell uses, also those with a name.
    #[arg(short, long)]
    pub all: bool,
    /// Do not ask.
    #[arg(short, long)]
    pub force: bool,
}

#[derive(Subcommand)]
pub enum CapsCommand {
    /// Check a table; exit code 1 if it is wrong.
    Check { file: PathBuf },
    /// Say what a table lets a vm cell and an isolate do, or what a Wasm module needs.
    #[command(after_help = "Examples:
  exocell caps explain table.toml
  exocell caps explain --caps table.toml module.wasm")]
    Explain {
        /// A table [default: what a cell gets without one; in a vm cell, what isolates in it may
        /// have at most], or a Wasm module (.wasm, .wat).
        file: Option<PathBuf>,
        /// The table that a module is held against [default: as above].
        #[arg(long, value_name = "FILE")]
        caps: Option<PathBuf>,
        #[arg(long)]
        json: bool,
    },
}

#[derive(Subcommand)]
pub enum KernelCommand {
    /// Fetch, patch and build the guest kernel, unless it is there.
    Build {
        /// The one that measurements compare with: without our patches for speed.
        #[arg(long, conflicts_with = "platform")]
        stock: bool,
        /// What it is to run on: para, or kvm.
        #[arg(long, value_name = "PLATFORM", default_value = "para")]
        platform: exocell_cell::platform::PlatformKind,
    },
    /// Say whether the guest kernel is there; exit code 1 if not.
    Status {
        #[arg(long, conflicts_with = "platform")]
        stock: bool,
        /// What it is to run on: para, or kvm.
        #[arg(long, value_name = "PLATFORM", default_value = "para")]
        platform: exocell_cell::platform::PlatformKind,
        #[arg(long)]
        json: bool,
    },
}

/// Serve the Docker Engine API, whose containers are cells, E2B's protocol, whose sandboxes are,
/// Wasm modules over HTTP, or a page that shows the cells, or all of them.
#[derive(Args)]
#[command(after_help = "Examples:
  exocell serve --http 127.0.0.1:8080 &
  curl -H 'Authorization: Bearer KEY' --data-binary @in 'http://127.0.0.1:8080/v1/run/MODULE?arg=-v'
  curl -H 'Authorization: Bearer KEY' -d '[20]' http://127.0.0.1:8080/v1/call/MODULE/FUNCTION
  exocell serve --docker /run/exocell.sock &
  DOCKER_HOST=unix:///run/exocell.sock docker run --rm exocell/base echo hello
  exocell serve --e2b 127.0.0.1:3000 --template base=exocell/base --allow-net pypi.org:443 &
  export E2B_API_URL=http://127.0.0.1:3000 E2B_SANDBOX_URL=http://127.0.0.1:3000
  E2B_API_KEY=$(cat ROOT/e2b/key) python3 -c 'from e2b import Sandbox; print(Sandbox.create().commands.run(\"id\"))'
  exocell serve --ui 127.0.0.1:7070

A port that docker run publishes (-p) is on the loopback unless the client names an address.")]
#[command(group = one_of("listener", &["docker", "http", "e2b", "ui"]))]
pub struct ServeArgs {
    /// Where the Docker Engine API listens; only this user may connect. fd:// is a socket that
    /// systemd hands over, which its unit says who may use.
    #[arg(long, value_name = "SOCKET")]
    pub docker: Option<PathBuf>,
    /// Where the modules of `exocell module` can be called: ADDRESS:PORT or a path.
    #[arg(long, value_name = "ADDR|SOCKET")]
    pub http: Option<String>,
    /// Where E2B's protocol is spoken, in plain HTTP: ADDRESS:PORT. Who has a key may have
    /// sandboxes.
    #[arg(long, value_name = "ADDR")]
    pub e2b: Option<String>,
    /// A name of a template for E2B's clients, and its image. Without a rule `base` is exocell/base.
    /// The names of the store's images are templates, too.
    #[arg(long, value_name = "NAME=IMAGE", requires = "e2b")]
    pub template: Vec<String>,
    /// Sandboxes that have booted before an E2B client asks for them: so many of a template, or of
    /// each one that --template names and of `base`. They count among --e2b-sandboxes.
    #[arg(long, value_name = "[TEMPLATE=]N", requires = "e2b")]
    pub pool: Vec<String>,
    /// The keys of E2B's clients, and what each may have: tables [[tenant]] of TOML with name,
    /// key_sha256, sandboxes, templates, allow_net and pool. Without it there is one key, in ROOT/e2b/key.
    #[arg(long, value_name = "FILE", requires = "e2b")]
    pub e2b_keys: Option<PathBuf>,
    /// Where E2B's clients find a sandbox by its name, PORT-ID.DOMAIN, beside PORT-ID.localhost.
    #[arg(long, value_name = "DOMAIN", requires = "e2b")]
    pub e2b_domain: Option<String>,
    /// Sandboxes of E2B's clients at once, paused ones among them.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub e2b_sandboxes: u32,
    /// The longest time that an E2B client may give a sandbox.
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    pub e2b_timeout_max: u64,
    /// Where a browser shows all cells of this state root, what they use and reach, their logs and
    /// terminals, and ends them: ADDRESS:PORT. The address with its key is printed.
    #[arg(long, value_name = "ADDR")]
    pub ui: Option<String>,
    /// The file of the page's key, which is made if there is none. With it --ui may listen where
    /// others can reach it.
    #[arg(long, value_name = "FILE", requires = "ui")]
    pub ui_key: Option<PathBuf>,
    /// A name by which browsers come to the page, beside addresses and `localhost`.
    #[arg(long, value_name = "NAME", requires = "ui")]
    pub ui_host: Vec<String>,
    /// Where the operator reads what all tenants used, as Prometheus does: ADDRESS:PORT or a path.
    #[arg(long, value_name = "ADDR|SOCKET", requires = "http")]
    pub metrics: Option<String>,
    /// Calls of modules that may have begun and not ended, in each worker.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=100_000))]
    pub isolates: u32,
    /// Whose modules a worker process runs: `tenant` keeps each tenant's to workers of its own,
    /// `shared` has one for all, whose end is the end of all calls.
    #[arg(long, value_enum, default_value_t = Workers::Tenant)]
    pub workers: Workers,
    /// Workers at once; for one more, the one that has been idle for longest ends.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub workers_max: u32,
    /// After how long without a call a worker ends, unless it holds changes of a private folder.
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    pub worker_idle: u64,
    /// Memory of a sandbox, and of a container whose client names no limit [default: 2g, at most
    /// half the host's].
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<String>,
    /// Private disk of a container or a sandbox.
    #[arg(long, value_name = "BYTES", default_value = "10g")]
    pub disk: String,
    /// Processes and threads of a sandbox, and of a container whose client names no limit.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub pids_limit: u32,
    /// Let containers and sandboxes talk to HOST[:PORTS][/udp|/raw], HOST/icmp or NETWORK:PORTS. Without a rule they
    /// have no network but their published ports, and with --network none not even a rule.
    #[arg(long, value_name = "RULE")]
    pub allow_net: Vec<String>,
}

/// Whose modules one worker of `exocell serve --http` runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Workers {
    /// One tenant's.
    Tenant,
    /// All tenants'.
    Shared,
}

#[derive(Subcommand)]
pub enum ModuleCommand {
    /// Check a module and keep it; prints the tenant's key if it is new.
    #[command(
        after_help = "Example: exocell module add --tenant alice --caps table.toml sums sums.wasm"
    )]
    Add {
        /// Whose it is; whoever has this tenant's key may call it.
        #[arg(long, value_name = "NAME")]
        tenant: String,
        /// What its calls may do [default: 64 MiB of memory, 10 seconds, streams, clock, random].
        #[arg(long, value_name = "FILE")]
        caps: Option<PathBuf>,
        /// What it is called under.
        name: String,
        /// The module, binary or text.
        file: PathBuf,
    },
    /// Print the modules and whose they are.
    Ls {
        #[arg(long)]
        json: bool,
    },
    /// Print a new key for a tenant; the one that it had is good for nothing then.
    Key {
        /// Whose.
        #[arg(long, value_name = "NAME")]
        tenant: String,
    },
    /// Remove modules; a running service lets calls that have begun go on.
    Rm {
        #[arg(required = true)]
        names: Vec<String>,
    },
}

/// Serve the Model Context Protocol: agents make sandboxes, run commands in them, read and write
/// their files and reach their ports.
///
/// By default one client speaks through standard input and output, and its sandboxes end with it.
/// What a sandbox may do is said here, by flags of `exocell run` after `--`; no client can change
/// it. Without flags it has no network and no folder of this host, and lives for an hour.
#[derive(Args)]
#[command(after_help = "Examples:
  claude mcp add sandbox -- exocell mcp
  exocell mcp --image python:3.12 --sandboxes 4 -- --memory 1g --allow-net pypi.org:443
  exocell mcp -- --caps agent.toml --volume /home/me/project:/project:ro
  exocell mcp --http 127.0.0.1:3001 &
  curl -H \"Authorization: Bearer $(cat ROOT/mcp/key)\" http://127.0.0.1:3001/mcp ...")]
pub struct McpArgs {
    /// An image that sandboxes may be made of (may be repeated); the first where a client names
    /// none. It needs /bin/sh and cat.
    #[arg(long, value_name = "IMAGE", default_value = "exocell/base")]
    pub image: Vec<String>,
    /// Sandboxes at once.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub sandboxes: u32,
    /// Listen at ADDRESS:PORT for clients that have a key, by streamable HTTP at /mcp, instead of
    /// standard input.
    #[arg(long, value_name = "ADDR")]
    pub http: Option<String>,
    /// The file of the key, which is made if there is none [default: ROOT/mcp/key].
    #[arg(long, value_name = "FILE", requires = "http")]
    pub key_file: Option<PathBuf>,
    /// Flags of exocell run, for every sandbox.
    #[arg(last = true, value_name = "FLAGS")]
    pub flags: Vec<String>,
}

#[derive(Subcommand)]
pub enum SwebenchCommand {
    Run(SwebenchRunArgs),
}

/// Apply each prediction's patch and run its instance's tests, in a cell of its own.
#[derive(Args)]
#[command(after_help = "Example:
  exocell swebench run --dataset instances.jsonl --predictions gold --jobs 4

Files have the forms of the official harness: rows with image, eval_script and log_parser come
in; LOGS/RUN_ID/MODEL/INSTANCE_ID/report.json and MODEL.RUN_ID.json go out. An instance that has
its report.json is not run again. Images must be there (exocell image pull, exocell image ls).")]
pub struct SwebenchRunArgs {
    /// Instances: a .json list, or .jsonl with one a line.
    #[arg(long, value_name = "FILE")]
    pub dataset: PathBuf,
    /// Patches, .json or .jsonl; `gold` takes the dataset's own.
    #[arg(long, value_name = "FILE|gold")]
    pub predictions: PathBuf,
    /// Instances at once [default: the number of processors].
    #[arg(long, value_name = "N")]
    pub jobs: Option<usize>,
    /// The run's name: its folder, and what goes on where it was ended.
    #[arg(long, value_name = "ID", default_value = "run")]
    pub run_id: String,
    /// Only this instance (may be repeated).
    #[arg(short, long = "instance", value_name = "INSTANCE_ID")]
    pub instances: Vec<String>,
    /// For the tests of one instance.
    #[arg(long, value_name = "DURATION", default_value = "30m")]
    pub timeout: String,
    #[arg(long, value_name = "DIR", default_value = "logs/run_evaluation")]
    pub logs: PathBuf,
    /// Where the final report goes.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub report_dir: PathBuf,
    /// Memory of each cell.
    #[arg(short, long, value_name = "BYTES", default_value = "4g")]
    pub memory: String,
    /// Private disk of each cell.
    #[arg(long, value_name = "BYTES", default_value = "10g")]
    pub disk: String,
    /// How each cell's memory goes back to the host (exocell run --pager).
    #[arg(long, value_name = "MODE", default_value_t)]
    pub pager: exocell_cell::pager::Mode,
    /// Number of vCPUs of each cell.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// Processes and threads of each cell.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub pids_limit: u32,
    /// Let cells talk to HOST[:PORTS][/raw]; by default they have no network.
    #[arg(long, value_name = "RULE")]
    pub allow_net: Vec<String>,
}

#[derive(Subcommand)]
pub enum SystemCommand {
    /// Print what images and cells take on this host's disk.
    Df {
        #[arg(long)]
        json: bool,
    },
    /// Remove cells that have ended, what builds keep for the next, and images without a name.
    Prune {
        /// Images that no cell uses, too.
        #[arg(short, long)]
        all: bool,
        /// Volumes without a name that no cell has, too.
        #[arg(long)]
        volumes: bool,
        /// Do not ask.
        #[arg(short, long)]
        force: bool,
    },
}

/// Say what this host offers and what each lack costs.
#[derive(Args)]
pub struct DoctorArgs {
    /// One object a feature.
    #[arg(long)]
    pub json: bool,
}

/// Measure cells and their peers on this machine, in one run.
///
/// `exocell bench --help` lists the benchmarks. They are a program of their own, exocell-bench,
/// which `make build` puts beside this one.
#[derive(Args)]
#[command(disable_help_flag = true)]
#[command(after_help = "Example: exocell bench micro --only null_syscall,fork_exit --json")]
pub struct BenchArgs {
    /// A benchmark and its flags.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "BENCHMARK")]
    pub words: Vec<OsString>,
}

/// Write man pages of all commands into a folder, or print the book's command reference.
#[derive(Args)]
#[command(group = one_of("form", &["dir", "markdown"]))]
#[command(after_help = "Example: exocell man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// Where the pages go: exocell.1, exocell-run.1 and so on.
    pub dir: Option<PathBuf>,
    /// Print the reference as a chapter of the book.
    #[arg(long)]
    pub markdown: bool,
}

/// The command line, or the exit code after its help or error was printed.
/// docker's exit code for a wrong command line of run and exec is 125.
pub fn parse() -> Result<Cli, u8> {
    let words = crate::words::prepared(std::env::args_os(), Cli::command());
    Cli::try_parse_from(&words).map_err(|error| {
        // Else the usage line shows what the environment gave as if it had to be there.
        let plain = Cli::command().mut_args(|arg| arg.env(None::<&str>));
        let error = plain.try_get_matches_from(&words).err().unwrap_or(error);
        if let Some(hint) = crate::hints::of(&error) {
            crate::show::tell!("exocell: {hint}");
            return 125;
        }
        if let Some(hint) = crate::hints::meant(&error, &words, &Cli::command()) {
            crate::show::tell!("exocell: {hint}");
            return 125;
        }
        // Nothing is left to tell when the terminal is gone.
        let _ = error.print();
        if error.exit_code() == 0 { 0 } else { 125 }
    })
}

/// The parser itself without what is not shown, for completion scripts and the command reference.
pub fn command() -> clap::Command {
    let all = Cli::command();
    let shown = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let bare = clap::Command::new("exocell").args(all.get_arguments().cloned());
    bare.subcommands(shown.collect::<Vec<_>>())
}
