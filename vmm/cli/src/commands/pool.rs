//! `exocell pool`: keeps warm cells for `exocell run`.

use std::os::fd::AsFd;
use std::time::Duration;

use exocell_cell::launch::{self, Launched, Request, Workload};
use exocell_cell::plan::VmPlan;
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, CellSpec, Layout, warm};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use super::{mount, run};
use crate::args::PoolArgs;
use crate::session;
use crate::show::say;

/// What a warm cell runs once: then what starting a program takes is in memory.
const WARM_UP: &str = "true";

/// Who took a cell has the machine to itself for so long before the next boots.
const HEADWAY: Duration = Duration::from_millis(100);

pub fn pool(layout: &Layout, args: PoolArgs) -> Result<u8, CellError> {
    let PoolArgs { size, mut run } = args;
    refuse_programs(&run)?;
    run.entrypoint = Some(WARM_UP.to_owned());
    let folders = mount::folders(layout, &run, None)?;
    let caps = run::capabilities(layout, &run, &folders)?;
    let mut spec = run::spec(layout, run, &caps, &[], &CellSpec::new_id()?)?;
    spec.fills = folders.fills;
    spec.warm = Some(warm::key(layout, &spec, &caps)?);
    spec.remove = true;
    let mut waiting = Vec::new();
    loop {
        while waiting.len() < size as usize {
            let cell = start(layout, &spec, &caps)?;
            say!("{}", cell.record.id);
            waiting.push(cell);
        }
        let gone = await_change(&waiting)?;
        std::thread::sleep(HEADWAY);
        for cell in gone.into_iter().rev().map(|index| waiting.swap_remove(index)) {
            ended(&cell)?;
        }
        reap();
    }
}

/// What is the program's own is said by the run that brings it.
fn refuse_programs(run: &crate::args::RunArgs) -> Result<(), CellError> {
    let process = &run.process;
    let own = [
        (!run.command.is_empty() || run.entrypoint.is_some(), "a program"),
        (!process.env.is_empty() || !process.env_file.is_empty(), "an environment"),
        (process.workdir.is_some() || process.user.is_some(), "a user or a directory"),
        (run.interactive || run.tty || run.detach, "-i, -t and -d"),
        (run.name.is_some() || run.rm || run.json, "--name, --rm and --json"),
        (!run.secret.is_empty(), "a secret"),
        (run.health.is_said(), "a health check"),
    ];
    match own.iter().find(|(given, _)| *given) {
        Some((_, what)) => Err(CellError::Usage(format!(
            "a pool takes no program and what goes with it; give {what} to exocell run"
        ))),
        None => Ok(()),
    }
}

fn start(layout: &Layout, spec: &CellSpec, caps: &CapabilitySet) -> Result<Launched, CellError> {
    let request = Request::begin();
    let id = CellSpec::new_id()?;
    let name = format!("warm-{}", &id[..6]);
    let spec = CellSpec { id, name, created_ms: exocell_cell::now_ms(), ..spec.clone() };
    let plan = VmPlan::new(layout, &spec, caps, None, Vec::new())?;
    launch::launch(layout, spec, caps.clone(), Workload::Vm(Box::new(plan)), request)
}

/// Waits until cells are taken or end; their places, in order.
fn await_change(waiting: &[Launched]) -> Result<Vec<usize>, CellError> {
    let mut watched: Vec<PollFd<'_>> =
        waiting.iter().map(|cell| PollFd::new(cell.session.as_fd(), PollFlags::POLLIN)).collect();
    match poll(&mut watched, PollTimeout::NONE) {
        Err(errno) if errno != Errno::EINTR => Err(CellError::host("poll")(errno.into())),
        _ => Ok((0..watched.len()).filter(|at| watched[*at].any().unwrap_or(false)).collect()),
    }
}

/// A cell that was taken or stopped is replaced. One that failed says why: the
/// next would fail as well.
fn ended(cell: &Launched) -> Result<(), CellError> {
    match session::await_start(&cell.session) {
        Err(error @ CellError::Program { .. }) => Err(error),
        _ => Ok(()),
    }
}

/// Children that have ended are nobody else's to wait for.
fn reap() {
    while waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG))
        .is_ok_and(|status| status.pid().is_some())
    {}
}
