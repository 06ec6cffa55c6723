//! The JSON messages that ride in `Request`, `Reply` and `Resize` frames.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::entry::{FileEntry, FileRequest};
use crate::oci::{Process, Resources, Spec};

/// What the host asks for; the first frame of a stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    Boot(Box<Boot>),
    /// The request that follows on the stream is for this container; the first of a stream,
    /// at most once. The cell's own is 0.
    Within {
        container: u32,
    },
    /// Have room for one more container, whose program comes with a `Start` within it.
    Contain(Box<Contain>),
    /// End all of a container's programs, and take away what it has.
    Discard {
        container: u32,
    },
    /// Remove what containers of this name have kept.
    Forget {
        name: String,
    },
    /// Run the cell's program.
    Start(Box<Start>),
    /// Run one more, beside it.
    Exec(Exec),
    /// Unpack the tar stream that follows into the directory `path`.
    Upload {
        path: String,
    },
    /// Send `path` (a file or a directory) as a tar stream whose entries are
    /// named from the last component of `path`.
    Download {
        path: String,
        /// As an image's layer: other file systems that are mounted below are
        /// empty directories, and files with several names are one file.
        #[serde(default)]
        layer: bool,
        /// Of that only what the cell has changed of its image; `path` is `/` then. What it
        /// removed is told by marks (OCI image-spec, layer.md, "Whiteouts").
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        changes: bool,
        /// Of those, what is left out: where something was mounted.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        left_out: Vec<String>,
    },
    /// Send the names of what the cell has changed of its image: an `A` (added), `C` (changed) or
    /// `D` (removed), a path and a zero byte each.
    Changes,
    /// Limit the container's programs otherwise; what is not named stays.
    Limit(Resources),
    Stats,
    /// What a container's programs use, and which they are.
    Usage,
    /// Stop all of a container's programs where they are, or let them go on.
    Freeze {
        frozen: bool,
    },
    /// Send every program of a container a signal.
    SignalAll {
        number: u8,
    },
    /// Use no more memory than this from now on.
    Memory {
        limit_bytes: u64,
    },
    /// Give back so much of the credit, as far as no program uses it.
    GiveBack {
        bytes: u64,
    },
    /// Drop a share of what files left in memory, the least recently used first, unless
    /// programs wait for memory.
    DropCold,
    /// Set the interface up, whose link was plugged into a network.
    Plug(Box<NetworkSetup>),
    /// Have this address at the network at `place`, or none.
    Address {
        place: u32,
        #[serde(default)]
        address: Option<JoinedAddress>,
    },
    /// Detach the mount at `path` (a revoked folder).
    Unmount {
        path: String,
    },
    /// Wait until a program connects to this socket of the cell's, and say so. Then the host says
    /// [`crate::SOCKET_OPEN`], and from there on the stream is the connection; a host that hangs up
    /// instead has it closed.
    Socket {
        number: u32,
    },
    /// Let no program connect to this socket any more.
    CloseSocket {
        number: u32,
    },
    /// Send the program that was started as `guest_pid` a signal.
    Signal {
        guest_pid: u32,
        number: u8,
        /// Whether all of its process group gets it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        group: bool,
    },
    /// Do something with one file.
    File(FileRequest),
    /// Have a user `name`: one who is missing is made, with a group and a home.
    Account {
        name: String,
    },
    /// Connect to a TCP port of the guest's own. After `Done` the stream is that connection.
    Dial {
        port: u16,
    },
    /// Hear the program `guest_pid`, whose host has gone, from now on.
    Follow {
        guest_pid: u32,
    },
    /// Terminate every process (SIGTERM, then SIGKILL after `grace_ms`), sync,
    /// power off.
    Shutdown {
        grace_ms: u64,
    },
}

/// The cell's program, in namespaces of its own: it is their first process.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    pub spec: Spec,
    /// Whether `Stdin` frames follow; otherwise standard input is /dev/null.
    pub stdin: bool,
    /// What decides on the system calls of all programs of the container (seccomp(2)): the
    /// instructions of a filter, each the 8 bytes of `struct sock_filter`. No filter where there are
    /// none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filter: Vec<u64>,
}

/// How the guest init sets up the cell before any program runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boot {
    /// Empty leaves the files of /etc that name it as they are.
    pub hostname: String,
    /// Block device with the image's erofs file system. Empty where there is a depot.
    pub root_device: String,
    /// The device of a host directory that holds the roots and mounts of its containers, by its
    /// tag. The cell has no program of its own then, and an empty root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depot: Option<String>,
    /// Block device with the ext4 file system of the private overlay; `None`
    /// makes the root file system read-only.
    pub overlay_device: Option<String>,
    /// Processes and threads that may exist in the cell at once.
    pub process_count_max: u64,
    pub folders: Vec<FolderMount>,
    /// More lines of /etc/hosts: a name and its address.
    #[serde(default)]
    pub hosts: Vec<(String, std::net::IpAddr)>,
    /// The part of its name after the host name.
    #[serde(default)]
    pub domain_name: String,
    /// `None` where there is no network device.
    #[serde(default)]
    pub network: Option<NetworkSetup>,
    /// `None` where the cell starts no isolates.
    #[serde(default)]
    pub isolates: Option<IsolatesSetup>,
}

/// What a cell has that may start isolates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IsolatesSetup {
    /// Block device with an erofs file system that holds the command `exocell`.
    pub device: String,
    /// One with those of [`crate::ISOLATES_MODELS`]; `None` where the grant has none.
    #[serde(default)]
    pub models_device: Option<String>,
    /// The most that each of them may have, as JSON, for [`crate::ISOLATES_TABLE`].
    pub table: String,
    /// How many may run at once: the files in [`crate::ISOLATES_PLACES`].
    pub count_max: u32,
}

/// The guest's end of its link. Everything is reached through the interface;
/// nobody else is on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSetup {
    pub interface: String,
    pub address_v4: std::net::Ipv4Addr,
    /// Unspecified where it has none.
    pub address_v6: std::net::Ipv6Addr,
    /// Bytes of the largest packet; the device's where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// At its networks with others, in the order of their places.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub joined: Vec<JoinedAddress>,
    /// For resolv.conf.
    pub name_server: std::net::Ipv4Addr,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dns_options: Vec<String>,
    /// The certificate of the cell's own authority, in the form PEM, for
    /// [`crate::AUTHORITY_FOLDER`].
    #[serde(default)]
    pub authority: Option<String>,
    /// Whether what comes from the link for 127.0.0.1 is for programs, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub to_loopback: bool,
}

/// An address among neighbours, who share its first `prefix` bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinedAddress {
    pub address: std::net::Ipv4Addr,
    pub prefix: u8,
}

/// A container beside the cell's own program: its own root, on the network of the cell.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contain {
    /// None that there was in this guest before.
    pub container: u32,
    /// Its directory on the private disk, which no other has: letters and digits.
    pub name: String,
    /// Where the erofs file system of its image begins on the disk of the cell's own image, and
    /// how long that is.
    #[serde(default)]
    pub offset_bytes: u64,
    #[serde(default)]
    pub length_bytes: u64,
    /// Instead of an image: a directory of the depot, with its root in `root`. What its
    /// specification binds lies beside that, by the name that it gives as the source. No file of
    /// the root is written for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depot: Option<String>,
    /// The name of another container, whose program runs: it has the IPC and the host name of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares_with: Option<String>,
    /// Whether its programs and those of that one see each other, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares_pids: bool,
    pub hostname: String,
    #[serde(default)]
    pub domain_name: String,
    /// Whether its root cannot be written.
    pub read_only: bool,
    /// Whether what it changed of its image stays after its end, for the next of its name.
    #[serde(default)]
    pub keeps_files: bool,
}

/// A host folder, mounted by virtio-fs, or what else of the host lies at a path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FolderMount {
    /// The device's.
    pub tag: String,
    pub guest_path: String,
    pub read_only: bool,
    /// One file, which is all that the device holds, under [`crate::FOLDER_FILE`].
    #[serde(default)]
    pub is_file: bool,
    /// One file that the guest gets as a copy in memory, with an owner and a mode of its own.
    #[serde(default)]
    pub copied: Option<FileCopy>,
    /// A volume: while it is empty it gets what the image has at `guest_path`.
    #[serde(default)]
    pub fill: bool,
    /// A unix socket, which no device holds: init listens on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<SocketFile>,
}

/// A socket that leads to one of the host: who may connect to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SocketFile {
    /// No other's of this cell.
    pub number: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// Whose a copy of a file is, and who may do what with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileCopy {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// A program to run as a session leader, in the namespaces of the cell's own and with its limits.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    /// Program and arguments; a name without `/` is looked up in `env`'s PATH.
    pub args: Vec<String>,
    /// `NAME=value`, the whole environment (HOME is added when absent).
    pub env: Vec<String>,
    /// Working directory, which has to be there; empty is that of the container's own program.
    pub cwd: String,
    /// `name|uid[:group|gid]`, resolved against the cell's /etc/passwd; empty
    /// is root.
    pub user: String,
    /// Whether it has every capability, whatever the cell's program has.
    #[serde(default)]
    pub privileged: bool,
    /// Who it is and what it is held to, instead of what the container's program is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<Box<Process>>,
    /// A terminal of this size instead of pipes.
    pub tty: Option<TtySize>,
    /// Whether `Stdin` frames follow; otherwise standard input is /dev/null.
    pub stdin: bool,
    /// Whether its input stays open when its host goes: another may come (`Request::Follow`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lasting: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TtySize {
    pub rows: u16,
    pub cols: u16,
}

/// What the guest answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Ready(BootTimes),
    /// No answer yet: the cell is still being set up, and something of that was done since it was
    /// last said.
    GoesOn,
    Started {
        guest_pid: u32,
    },
    /// `code` is the exit status, or 128 + the signal that killed the program.
    Exited {
        code: u8,
        /// Whether the guest's kernel ended a process of the cell for lack of memory.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        out_of_memory: bool,
    },
    Stats(Box<GuestStats>),
    Entry(Box<FileEntry>),
    Usage(Box<ContainerUsage>),
    Done,
    Failed {
        kind: FailureKind,
        message: String,
    },
}

impl Reply {
    /// The end of a program, not for lack of memory.
    pub fn exited(code: u8) -> Self {
        Self::Exited { code, out_of_memory: false }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The program or path does not exist (exit code 127 for a program).
    NotFound,
    /// The program exists but cannot be executed (exit code 126).
    NotExecutable,
    /// Anything else the caller asked for wrongly: no such user, a bad path.
    Invalid,
    /// What is to be made is there already.
    Exists,
    /// There is no room for it: disk, quota, watches.
    Full,
    /// The guest could not do it: out of memory, disk full.
    Guest,
}

/// Nanoseconds since the guest kernel started (CLOCK_BOOTTIME).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootTimes {
    pub init_started_ns: u64,
    pub ready_ns: u64,
}

/// The guest's own view; the host treats every number as a claim.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestStats {
    pub memory_total_bytes: u64,
    pub memory_free_bytes: u64,
    pub memory_available_bytes: u64,
    pub page_cache_bytes: u64,
    pub process_count: u64,
    pub uptime_ns: u64,
    pub pressure: Pressure,
    /// `None` where the guest kernel runs without the Pager.
    #[serde(default)]
    pub pager: Option<PagerStats>,
    /// `None` where system calls are no jumps (`--intra aspace`).
    #[serde(default)]
    pub gates: Option<GateStats>,
}

/// What the programs of a container use, as the guest's kernel counts it: claims, too.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerUsage {
    /// As the programs know themselves; the first [`crate::PIDS_MAX`].
    pub pids: Vec<u32>,
    /// Processes and threads, and how many there may be; 0 is no limit.
    pub task_count: u64,
    pub task_count_max: u64,
    pub memory_bytes: u64,
    pub memory_peak_bytes: u64,
    /// 0 is no limit.
    pub memory_limit_bytes: u64,
    /// The lines of `cpu.stat`, `memory.stat` and `memory.events` (kernel:
    /// Documentation/admin-guide/cgroup-v2.rst).
    pub cpu: BTreeMap<String, u64>,
    pub memory: BTreeMap<String, u64>,
    pub memory_events: BTreeMap<String, u64>,
}

/// System calls of programs that share an address space with the guest kernel, since
/// the boot (/proc/gates).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateStats {
    /// Calls that were jumps, and calls that trapped.
    pub gated_count: u64,
    pub trapped_count: u64,
    /// System call instructions that became jumps, and those that could not.
    pub site_count: u64,
    pub refused_count: u64,
    /// Memory of the pages that hold the former.
    pub copied_bytes: u64,
}

/// What the guest kernel's Pager has done since the boot (/proc/pager).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerStats {
    /// Taken from the host now, and at most so far.
    pub bound_bytes: u64,
    pub peak_bytes: u64,
    /// Of `bound_bytes`, what waits on the CPUs' lists for its next user.
    pub idle_bytes: u64,
    /// What may still be taken without asking the host.
    #[serde(default)]
    pub credit_bytes: u64,
    /// Kept out of use, so that the limit holds.
    pub withheld_bytes: u64,
    /// What `withheld_bytes` is to become.
    pub withheld_target_bytes: u64,
    /// Totals of what was taken and given back, in how many calls of the
    /// host, and how long those took.
    pub bind_bytes: u64,
    pub bind_count: u64,
    pub bind_ns: u64,
    pub unbind_bytes: u64,
    pub unbind_count: u64,
    pub unbind_ns: u64,
    /// Calls that the host refused for lack of memory.
    pub refused_count: u64,
    /// What was handed out as zero without being cleared.
    pub known_zero_bytes: u64,
}

/// PSI `some avg10`, in percent (kernel: Documentation/accounting/psi.rst).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Pressure {
    pub cpu: f64,
    pub memory: f64,
    pub io: f64,
}
