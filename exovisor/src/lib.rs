//! The isolate host: one Wasm module, run under a capability table.
//!
//! The main path, each step a type of its own:
//!
//! ```text
//! in a jail:             bytes --Checked::new, compile--> Compiled (a file)
//! with host's authority:         Isolate::open --> Opened
//! in another jail:               Admission::load --> Admitted --Opened::ready--> Ready --run--> Outcome
//! ```
//! Bytes are parsed and compiled by a process that has nothing; folders, streams and models are
//! opened by one that has looked at none of them; code is loaded, and models are read, by one that
//! can open nothing more.
//!
//! Imports are resolved in one table ([`Import`]): a module that asks for a name which is
//! unknown or not granted is refused before anything is instantiated. While it runs, every
//! call on a descriptor first tests the [`Live`](exocell_xgate::Live) token of the capability
//! the descriptor came from, so revoking a folder acts on files that are already open.
//!
//! Threads: up to [`Ready::run`] the caller's alone. `run` starts one more, which sleeps until
//! the isolate is ended and then interrupts it ([`preempt`]). A system call filter for `run`
//! needs, beside memory, threads and signals (tgkill, sigaltstack, rt_sigreturn: traps are caught
//! as SIGSEGV): epoll_wait, epoll_ctl, poll, read, write, getrandom, and for folders the calls
//! that open (openat2 or openat), read, change and list files. Code is made executable at
//! admission only.

#![deny(unsafe_code)]

mod admission;
mod arena;
mod builtins;
mod cache;
mod call;
mod clear;
mod compiled;
mod complexity;
mod component;
mod dormant;
mod drops;
mod ending;
mod engine;
mod gate;
mod guest;
mod hostcalls;
mod imports;
mod isolate;
mod limits;
mod nn;
mod overlay;
mod pages;
mod pieces;
mod policy;
mod preempt;
mod reserved;
mod reuse;
mod rewrite;
mod rooms;
mod scan;
mod sched;
mod sealed;
mod sleep;
mod sockets;
mod stdio;
#[cfg(test)]
mod suites;
mod teardown;
mod threads;
mod unroll;

pub use admission::{Admission, AdmissionError, Admitted, Requirement};
pub use cache::{Cache, CacheError, Name};
pub use call::{ArgumentError, CallLimits, Function, Value};
pub use compiled::{CODE_BYTES_MAX, Checked, Compiled, Form, Jailed, Use};
pub use complexity::ComplexityLimits;
pub use ending::{Cause, Stopper};
pub use exocell_models::MODEL_BYTES_MAX;
pub use imports::{Effect, Import, Item, Tier};
pub use isolate::{Attached, Isolate, Opened, Outcome, PrepareError, Ready, Spec};
pub use nn::Models;
pub use overlay::Layers;
pub use policy::{Metering, Policy, Pool, Slots};
pub use scan::ModuleLimits;
pub use sched::{
    Call, Priority, Report, Scheduler, SchedulerConfig, SchedulerError, Stats, SubmitError,
    Submitter, Take, Tenant,
};
pub use sealed::{Sealed, TooLong};
pub use sockets::{Arrived, Connection, Done, Network, NetworkError};
