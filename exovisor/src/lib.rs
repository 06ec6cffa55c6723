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
//!
//! Where things live. A module imports only those above it (`benches/tests/layers.rs`):
//!
//! | module | holds |
//! |---|---|
//! | `imports` | the table of what modules and components may import |
//! | `policy` | what an operator decides: pools, stacks, bounds of modules |
//! | `memory` | slots of memories and stacks, pages that were written to, hibernation |
//! | `preempt` | taking the CPU from running code, ending a call from outside |
//! | `admission` | checks of a module's bytes, and the passes that rewrite them |
//! | `hostcalls` | the state of an isolate, and the host functions that act on it |
//! | `engine` | engines with their pools, one a metering mode |
//! | `exec` | instances, calls, threads, and the memory that they leave |
//! | `sched` | many calls on few workers |
//! | `component` | an admitted component, and one run of it |
//! | `program` | compiled code, its cache on disk, loading it |
//! | `isolate` | one run of an admitted program |

#![deny(unsafe_code)]

mod admission;
mod component;
mod engine;
mod exec;
mod hostcalls;
mod imports;
mod isolate;
mod memory;
mod policy;
mod preempt;
mod program;
mod sched;
#[cfg(test)]
mod suites;

pub use admission::{AdmissionError, Requirement};
pub use exec::call::{ArgumentError, CallLimits, Function, Value};
pub use exec::outcome::Outcome;
pub use exocell_models::MODEL_BYTES_MAX;
pub use hostcalls::context::{Attached, PrepareError, Spec};
pub use hostcalls::nn::Models;
pub use hostcalls::overlay::Layers;
pub use hostcalls::sockets::{Arrived, Connection, Done, Network, NetworkError};
pub use imports::{Effect, Import, Item, Tier};
pub use isolate::{Isolate, Opened, Ready};
pub use memory::call_arena::Allocator;
pub use policy::{ComplexityLimits, Metering, ModuleLimits, Policy, Pool, Slots};
pub use preempt::cancel::{CancelHandle, CancelReason};
pub use program::cache::{Cache, CacheError, Name};
pub use program::compiled::{CODE_BYTES_MAX, Checked, Compiled, Form, Jailed, Use};
pub use program::sealed::{Sealed, TooLong};
pub use program::{Admission, Admitted};
pub use sched::{
    Call, Priority, Report, Scheduler, SchedulerConfig, SchedulerError, Stats, SubmitError,
    Submitter, Take, Tenant,
};
