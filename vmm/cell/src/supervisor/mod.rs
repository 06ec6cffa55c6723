//! The supervisor: the first process of a cell's namespaces, from its birth
//! to the last line of its record.
//!
//! ```text
//! main -> jail -> workload started -> ready -> [Event loop] -> workload ended -> record settled
//!                         └── clients are served from here on ──┘
//! ```
//! The main thread decides; the others turn what happens into [`Event`]s:
//! `guest` (a `vm` cell's processes and session), `boot` (a guest that comes up),
//! `clients` (the control socket), the isolate's own thread.

mod boot;
pub(crate) mod clients;
mod console;
pub(crate) mod contained;
mod credit;
mod devices;
pub(crate) mod ending;
pub(crate) mod fault;
mod guest;
mod health;
mod input;
mod memory;
mod pressure;
mod program;
mod sidecar;
mod sockets;
mod warmth;

use std::fs::File;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use exocell_agent::{BootTimes, FailureKind, Reply};
use exocell_vmm::jail::{self, PathAccess, PathGrant};
use tracing::info;

use crate::control::Order;
use crate::launch::{Inheritance, Workload};
use crate::output::Output;
use crate::record::{Record, StartTimes, State, Status};
use crate::{CellError, logging, now_ms};

use clients::Pending;
pub(crate) use input::{Input, Signal, Sink};
use warmth::Warmth;

/// What the main thread waits for.
pub(crate) enum Event {
    /// The program runs, so long after the request.
    Started { program_started_us: u64 },
    /// The program ended, or could not be started.
    Program(Reply),
    /// The guest kernel process ended, with what wait(2) said of it.
    GuestKernel(String),
    /// The guest is still at work on becoming ready.
    Booting,
    /// The guest is ready for programs, or said why it is not.
    Booted(Result<BootTimes, boot::Unready>),
    /// The cell in whose guest this one is has ended; its name.
    CellEnded(String),
    /// A thread of the supervisor panicked, with what it said.
    Panicked(String),
    /// A signal to the program, and after `grace` the end.
    Stop { signal: u8, grace: Duration },
    /// A warm cell has its program.
    Taken(Box<Order>),
    /// The pool of a warm cell is gone.
    Abandoned,
}

/// What the supervisor's threads share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub output: Output,
    pub input: Input,
    pub events: Sender<Event>,
    /// The cell's own record.
    pub record: Record,
    /// What was asked for, and whether it is still to come.
    pub warmth: Warmth,
    /// Its health checks.
    pub health: health::Watch,
    /// Who has a container in its guest.
    pub contained: contained::Lines,
}

/// The body of the supervisor process; the result is its exit status.
pub fn main(mut inheritance: Inheritance, workload: Workload, host_pid: i32) -> i32 {
    let done = catch_unwind(AssertUnwindSafe(|| run(&mut inheritance, workload, host_pid)));
    match done.unwrap_or_else(|_| Err(panicked("its main thread"))) {
        Ok(()) => 0,
        Err(error) => {
            ending::fail(&inheritance, &error);
            125
        }
    }
}

fn panicked(what: &str) -> CellError {
    CellError::Guest(format!(
        "its supervisor failed, which is a fault of Exocell's: {what} panicked"
    ))
}

/// Has a panic of any thread end the cell: one that lost a thread of its supervisor
/// would hang, or say nothing true of itself. Not where isolates run: their workers
/// panic by design of the engine.
fn end_at_a_panic(events: Sender<Event>) {
    std::panic::set_hook(Box::new(move |panic| {
        let _ = events.send(Event::Panicked(panic.to_string()));
    }));
}

/// Gives the host back what the command and the set-up used, which would stay with
/// the supervisor for as long as the cell lives.
fn trim_heap() {
    // SAFETY: malloc_trim(3) takes an integer and touches only memory that nobody
    // has. Needed because Rust's allocator interface has no word for it.
    unsafe { libc::malloc_trim(0) };
}

/// Blocks from so many bytes on, as the buffers of connections are, come from the host and
/// go back to it singly. It is where malloc(3) begins; but it learns from the first of them
/// that is freed to keep the next ones, and clears them itself each time (mallopt(3)).
const SINGLE_BYTES_MIN: i32 = 128 << 10;

fn keep_no_large_blocks() {
    // SAFETY: mallopt(3) takes two integers, under malloc's own lock. Needed as above.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, SINGLE_BYTES_MIN) };
}

fn run(inheritance: &mut Inheritance, workload: Workload, host_pid: i32) -> Result<(), CellError> {
    for descriptor in &inheritance.foreign {
        // What the operator's shell left open is none of the cell's business.
        let _ = nix::unistd::close(*descriptor);
    }
    detach(&inheritance.record_dir)?;
    if let Err(error) = logging::move_to_file() {
        return Err(CellError::host(format!("cannot make the cell's {}", logging::FILE))(error));
    }
    let spec = &inheritance.spec;
    info!(id = spec.id, name = spec.name, image = spec.image, pid = host_pid, "began");
    let (events, inbox) = channel();
    let operator = inheritance.operator.try_clone().map_err(CellError::host("dup"))?;
    let output = Output::new(operator, !spec.keeps_no_log);
    let output = output.map_err(CellError::host("cannot make the cell's log"))?;
    let record = inheritance.record.from_within();
    let warmth = Warmth::of(&inheritance.spec);
    let shared = Shared {
        output,
        input: Input::default(),
        events,
        record: record.clone(),
        warmth,
        health: health::Watch::default(),
        contained: contained::Lines::default(),
    };
    let host_oom_kills = crate::record::host_oom_kills();
    let mut status = Status { supervisor_pid: host_pid, host_oom_kills, ..Status::default() };
    // Whoever wants to end this cell may want to before it runs.
    record.write_status(&status)?;
    let mut deadline = inheritance.caps.deadline().map(|limit| inheritance.requested + limit);
    let services = Pending::default();
    let mut check = None;
    let mut workload = match workload {
        Workload::Vm(mut plan) => {
            check = plan.health.take();
            keep_no_large_blocks();
            end_at_a_panic(shared.events.clone());
            fault::note()?;
            let guest = guest::start(inheritance, *plan, &shared, &mut status, deadline);
            Running::Vm(guest.map_err(|error| or_deadline(error, deadline))?)
        }
        Workload::Sidecar(mut plan) => {
            check = plan.health.take();
            end_at_a_panic(shared.events.clone());
            Running::Sidecar(sidecar::start(inheritance, *plan, &shared, &mut status)?)
        }
        Workload::Isolate(plan) => {
            let isolate = crate::isolate::start(inheritance, *plan, &shared, &mut status, deadline);
            Running::Isolate(Box::new(isolate?))
        }
    };
    // Whoever looks sees the guest kernel while that comes up.
    record.write_status(&status)?;
    clients::serve(inheritance, &shared, services.clone())?;
    if let Running::Vm(guest) = &workload {
        match boot::await_ready(&inbox, &shared.warmth, guest, deadline) {
            Ok(times) => {
                status.times.guest_ready_us = inheritance.requested.elapsed().as_micros() as u64;
                status.times.guest_init_us = times.init_started_ns / 1000;
                let (at_us, init_us) = (status.times.guest_ready_us, status.times.guest_init_us);
                info!(at_us, init_us, "guest ready");
            }
            Err(end) => {
                ending::finish(inheritance, &record, &shared, workload, status, *end);
                return Ok(());
            }
        }
    }
    if let Running::Vm(guest) = &workload {
        guest.open_sockets()?;
    }
    let _ = services.set(workload.services());
    trim_heap();
    if let Running::Vm(guest) = &mut workload
        && shared.warmth.is_warm()
    {
        guest.warm_up();
        // The pool's readers take it for ready from here on.
        status.times.guest_ready_us = inheritance.requested.elapsed().as_micros() as u64;
        record.write_status(&status)?;
        match warmth::wait(&inbox, &shared.warmth) {
            Ok(order) => {
                (inheritance.spec, deadline) = (order.spec, order.deadline_ms.map(from_now));
                check = order.health;
                guest.take(order.start, inheritance.spec.keeps_disk);
                status.times = StartTimes::default();
            }
            Err(end) => {
                ending::finish(inheritance, &record, &shared, workload, status, *end);
                return Ok(());
            }
        }
    }
    if let Some(check) = check {
        health::begin(check, workload.services(), &shared)?;
    }
    status.state = State::Running;
    status.started_ms = now_ms();
    record.write_status(&status)?;
    match inheritance.spec.idle {
        // Nobody's program, but the operator waits for the same word.
        true => shared.output.started(0),
        false => workload.run_program(&shared)?,
    }
    // What ends the guest kills its programs first.
    let killed_with = match inheritance.spec.within {
        Some(_) => GUEST_END_MAX,
        None => Duration::ZERO,
    };
    let end = decide(&inbox, &shared, deadline, killed_with, |program_started_us| {
        status.times.program_started_us = program_started_us;
        info!(at_us = program_started_us, "program started");
        // Only a figure; the state is on disk already.
        let _ = record.write_status(&status);
    });
    ending::finish(inheritance, &record, &shared, workload, status, end);
    Ok(())
}

fn from_now(milliseconds: u64) -> Instant {
    Instant::now() + Duration::from_millis(milliseconds)
}

/// What a start that failed is to be told as.
fn or_deadline(error: CellError, deadline: Option<Instant>) -> CellError {
    if deadline.is_some_and(|at| at <= Instant::now()) { CellError::Deadline } else { error }
}

/// A workload that was started.
pub(crate) enum Running {
    Vm(guest::Guest),
    Isolate(Box<crate::isolate::Running>),
    Sidecar(sidecar::Sidecar),
}

impl Running {
    fn services(&self) -> Arc<dyn clients::Services> {
        match self {
            Self::Vm(guest) => guest.services(),
            Self::Isolate(isolate) => isolate.services(),
            Self::Sidecar(sidecar) => sidecar.services(),
        }
    }

    fn run_program(&self, shared: &Shared) -> Result<(), CellError> {
        match self {
            Self::Vm(guest) => guest.run_program(shared),
            Self::Isolate(isolate) => isolate.run_program(shared),
            Self::Sidecar(sidecar) => sidecar.run_program(shared),
        }
    }
}

/// Why a program ended that its guest's kernel ended to have memory again.
const OUT_OF_MEMORY: &str =
    "the cell ran out of memory and its kernel ended the program; give it more (--memory)";

/// How a cell ended.
pub(crate) struct End {
    pub exit_code: u8,
    /// Set when it was not the program's own end.
    pub reason: Option<String>,
    /// Whether the guest's kernel ended a process for lack of memory.
    pub out_of_memory: bool,
    /// Whether the cell had its time.
    pub deadline_passed: bool,
    /// What followers are told.
    pub reply: Reply,
}

impl End {
    fn killed(reason: String) -> Self {
        let exit_code = 128 + libc::SIGKILL as u8;
        Self {
            exit_code,
            reason: Some(reason),
            out_of_memory: false,
            deadline_passed: false,
            reply: Reply::exited(exit_code),
        }
    }

    fn deadline() -> Self {
        Self { deadline_passed: true, ..Self::killed(CellError::Deadline.to_string()) }
    }

    /// Of a cell that was in the guest of `other`.
    fn with_other(other: &str) -> Self {
        Self::killed(format!("the cell {other}, in whose guest it was, has ended"))
    }

    /// `how` is what wait(2) said of the guest kernel.
    fn guest_died(how: &str) -> Self {
        // Nothing but the guest itself ends it in this way: the host's ends are signals.
        let by = if how.ends_with("status 0") { ": the cell powered itself off" } else { "" };
        Self::killed(format!("the guest kernel {how}{by}; see exocell logs --console"))
    }

    /// Of a cell that did not come up.
    fn failed(error: &CellError) -> Self {
        let message = error.to_string();
        match error {
            CellError::Deadline => Self::deadline(),
            _ => Self {
                exit_code: error.exit_code(),
                reason: Some(message.clone()),
                out_of_memory: false,
                deadline_passed: false,
                reply: Reply::Failed { kind: FailureKind::Guest, message },
            },
        }
    }

    fn panicked(what: &str) -> Self {
        Self::failed(&panicked(what))
    }

    fn from_reply(reply: Reply) -> Self {
        let mut out_of_memory = false;
        let (exit_code, reason) = match &reply {
            Reply::Exited { code, out_of_memory: told } => {
                out_of_memory = *told;
                let killed = *told && *code == 128 + libc::SIGKILL as u8;
                (*code, killed.then(|| OUT_OF_MEMORY.to_owned()))
            }
            Reply::Failed { kind, message } => {
                let code = match kind {
                    FailureKind::NotFound => 127,
                    FailureKind::NotExecutable => 126,
                    _ => 125,
                };
                (code, Some(message.clone()))
            }
            _ => (125, Some("the guest broke the protocol".to_owned())),
        };
        Self { exit_code, reason, out_of_memory, deadline_passed: false, reply }
    }
}

/// What a program ends with that SIGKILL ended.
const SIGKILL_CODE: u8 = 128 + libc::SIGKILL as u8;
/// How long after the end by SIGKILL of a program that is in another cell's guest the news may come
/// that this cell has ended.
const GUEST_END_MAX: Duration = Duration::from_millis(500);

/// Waits for the first thing that ends the cell. A stop gives the program its
/// grace; the deadline does not. For `killed_with` it is heard why a program was killed.
fn decide(
    inbox: &Receiver<Event>,
    shared: &Shared,
    deadline: Option<Instant>,
    killed_with: Duration,
    mut on_start: impl FnMut(u64),
) -> End {
    let mut stop_at: Option<Instant> = None;
    loop {
        let next = [deadline, stop_at].into_iter().flatten().min();
        let event = match next {
            Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match event {
            Ok(Event::Started { program_started_us }) => on_start(program_started_us),
            // The pool has nothing to say about a cell that was taken.
            Ok(Event::Taken(_) | Event::Abandoned | Event::Booting | Event::Booted(_)) => {}
            Ok(Event::Panicked(what)) => return End::panicked(&what),
            Ok(Event::Program(reply @ Reply::Failed { kind: FailureKind::Guest, .. })) => {
                // The first sign of a dying guest is its silence.
                return match inbox.recv_timeout(Duration::from_millis(500)) {
                    Ok(Event::GuestKernel(how)) => End::guest_died(&how),
                    Ok(Event::CellEnded(other)) => End::with_other(&other),
                    _ => End::from_reply(reply),
                };
            }
            Ok(Event::Program(reply)) => {
                // One whose guest ends is killed there.
                let was_killed = matches!(reply, Reply::Exited { code: SIGKILL_CODE, .. });
                let patience = if was_killed { killed_with } else { Duration::ZERO };
                return match inbox.recv_timeout(patience) {
                    Ok(Event::CellEnded(other)) => End::with_other(&other),
                    _ => End::from_reply(reply),
                };
            }
            Ok(Event::CellEnded(other)) => return End::with_other(&other),
            Ok(Event::GuestKernel(how)) => {
                // Its last words may have come just before.
                return match inbox.recv_timeout(Duration::from_millis(50)) {
                    Ok(Event::Program(reply @ Reply::Exited { .. })) => End::from_reply(reply),
                    _ => End::guest_died(&how),
                };
            }
            Ok(Event::Stop { signal, grace }) => {
                info!(signal, grace_ms = grace.as_millis() as u64, "stop asked for");
                if !grace.is_zero() {
                    // On a thread: a guest that does not answer must not hold the end up.
                    let input = shared.input.clone();
                    let _ = thread("signal", move || {
                        input.signal(signal);
                    });
                }
                let at = Instant::now() + grace;
                stop_at = Some(stop_at.map_or(at, |earlier| earlier.min(at)));
            }
            Err(RecvTimeoutError::Timeout) if deadline.is_some_and(|at| at <= Instant::now()) => {
                return End::deadline();
            }
            Err(RecvTimeoutError::Timeout) => return End::killed("stopped".to_owned()),
            Err(RecvTimeoutError::Disconnected) => {
                return End::killed("the supervisor lost its threads".to_owned());
            }
        }
    }
}

/// Leaves the operator's terminal and directory.
fn detach(record_dir: &File) -> Result<(), CellError> {
    let failed =
        |errno: nix::errno::Errno| CellError::host("cannot detach the supervisor")(errno.into());
    nix::unistd::setsid().map_err(failed)?;
    let null = File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .map_err(CellError::host("cannot open /dev/null"))?;
    nix::unistd::dup2_stdin(&null).map_err(failed)?;
    nix::unistd::dup2_stdout(&null).map_err(failed)?;
    nix::unistd::dup2_stderr(&null).map_err(failed)?;
    nix::unistd::fchdir(record_dir).map_err(failed)?;
    nix::sys::prctl::set_name(c"exocell").map_err(failed)
}

/// Leaves reachable by path: the cell's own record, `folders` and, below `/`
/// of the jail, the guest kernel's files.
pub(crate) fn restrict_paths(
    inheritance: &Inheritance,
    folders: &[crate::plan::PlannedFolder],
) -> Result<(), CellError> {
    let root = File::open("/").map_err(CellError::host("cannot open the jail's root"))?;
    let mut grants = vec![
        PathGrant { at: inheritance.record_dir.as_fd(), access: PathAccess::Write },
        PathGrant { at: inheritance.cells_dir.as_fd(), access: PathAccess::RemoveDirectories },
        PathGrant { at: root.as_fd(), access: PathAccess::Execute },
    ];
    if let Some(group) = &inheritance.group {
        grants.push(PathGrant { at: group.parent(), access: PathAccess::RemoveDirectories });
    }
    for folder in folders {
        let write = folder.granted.rights.contains(exocell_xgate::Rights::WRITE);
        let access = if write { PathAccess::Write } else { PathAccess::Read };
        grants.push(PathGrant { at: folder.dir.as_fd(), access });
    }
    Ok(jail::restrict_paths(&grants)?)
}

/// Starts a named thread of the supervisor.
pub(crate) fn thread(
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, CellError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(256 << 10)
        .spawn(body)
        .map_err(CellError::host(format!("cannot start the {name} thread")))
}

/// Deletes the record from within the jail.
pub(crate) fn clear_record(inheritance: &Inheritance, record: &Record) -> Result<(), CellError> {
    record.clear()?;
    let flag = nix::unistd::UnlinkatFlags::RemoveDir;
    nix::unistd::unlinkat(&inheritance.cells_dir, record.id.as_str(), flag).map_err(|errno| {
        CellError::host(format!("cannot remove the record of {}", record.id))(errno.into())
    })
}
