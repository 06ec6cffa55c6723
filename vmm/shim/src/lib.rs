//! `containerd-shim-exocell-v1`: a shim of containerd's runtime v2 whose containers are cells.
//!
//! ```text
//! containerd ── exec: start ──> args, start ── exec: serve ──> serve: one process a pod
//!     │                                                         │ ttrpc: containerd.task.v2, v3
//!     ├── Create ──> service ─> shim ─> bundle (what is asked), depot (files), cell (launch)
//!     ├── Start, Exec ────────> process ─> a session in the guest, its streams by `stdio`
//!     ├── Wait, State, Kill, Stats, Update, Delete
//!     <── events: TaskCreate, TaskStart, TaskExit, TaskDelete ── events
//!     └── exec: delete ──> delete: what a shim left that was killed
//! ```
//! Begin reading at [`run`], then `serve`, `service`, `shim`.
//!
//! - **One cell a pod.** The cell is idle and has a depot: a directory of the host with each
//!   container's root and mounts, served by one device. Each container is one of its guest's, with
//!   processes, root and limits of its own, and begins and ends by itself.
//! - **Nothing outlives the shim.** The depot is in a mount namespace of the shim's, the cell ends
//!   when the shim's end of its session is closed, and removes itself. Whatever is killed, the host
//!   has no mount of it.
//! - **The executable** is `exocell` under another name (a link): a supervisor is cloned from a
//!   process with one thread, so the shim has to start the same program anew for each cell
//!   ([`launch`]), and two programs that hold the whole product would take twice the disk and share
//!   no memory.
//! - The protocol's messages are of the crate `containerd-shim-protos`. Its companion
//!   `containerd-shim`, which wants to be the program's `main`, speaks version 3 of the task service
//!   alone; Debian's containerd asks for version 2.
#![forbid(unsafe_code)]

mod args;
mod bundle;
mod cell;
mod cgroups;
mod config;
mod delete;
mod depot;
mod error;
mod events;
mod group;
mod hooks;
mod launch;
mod metrics;
mod mounts;
mod netns;
mod process;
mod refusal;
mod resources;
mod seccomp;
mod serve;
mod service;
mod shim;
mod spec;
mod start;
mod stdio;

use std::ffi::OsStr;
use std::path::Path;

use args::{Action, Args};

/// The name of the executable for the runtime `io.containerd.exocell.v1`.
pub const NAME: &str = "containerd-shim-exocell-v1";
/// The name of the runtime.
pub const RUNTIME: &str = "io.containerd.exocell.v1";

/// Whether this process was executed as the shim.
pub fn is_called() -> bool {
    let name = std::env::args_os().next();
    name.is_some_and(|name| Path::new(&name).file_name() == Some(OsStr::new(NAME)))
}

/// Does what containerd, or the shim itself, executes the shim for; the exit code. The caller has
/// one thread.
pub fn run() -> u8 {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = Args::read(&words).and_then(|args| match args.action {
        Action::Version => {
            println!("{NAME}:\n  Version:  {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        Action::Info => start::tell_info(),
        Action::Start => start::start(&args),
        Action::Serve => serve::serve(&args),
        Action::Launch => launch::launch_here(),
        Action::Delete => delete::delete(&args),
    });
    match done {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{NAME}: {error}");
            1
        }
    }
}
