//! The process between caller and stage: it makes the namespaces and ends the stage when the
//! caller is gone. It has one thread and reads nothing that is not the caller's.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_name;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::inside::{self, Fault};
use super::order::Shown;
use super::wire::{self, Kind};
use super::{Stage, VERB};
use crate::jail::{HostNetwork, IdentityMap, PathAccess, spawn};

/// The descriptor whose other end only the caller has.
const LEASH: RawFd = 1;
/// Exit code where there was no stage.
const NO_STAGE: u8 = 125;

/// What the caller says on the command line. Nothing in it is secret.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Settings {
    pub stage: String,
    /// Beyond what the program itself has mapped.
    pub memory_bytes: u64,
    pub file_bytes: u64,
    pub open_files: u64,
    pub processes: Option<u64>,
    pub reserves: bool,
    pub cpu_seconds: Option<u64>,
    pub keeps_network: bool,
    pub keeps_id: bool,
    pub shown: Vec<Shown>,
    /// For each descriptor what it may do below it, if that is a directory.
    pub below: Vec<Option<PathAccess>>,
}

/// Runs a stage if this process was started for one; its exit code then. To be called first in
/// `main`, while there is one thread.
#[must_use]
pub fn entered(stages: &[&[Stage]]) -> Option<u8> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != VERB {
        return None;
    }
    let settings =
        arguments.next().and_then(|text| serde_json::from_str::<Settings>(text.to_str()?).ok());
    let stage = settings.as_ref().and_then(|settings| {
        stages.iter().copied().flatten().find(|stage| stage.name == settings.stage)
    });
    let (Some(settings), Some(stage)) = (&settings, stage) else {
        eprintln!("exocell: {VERB} is started by exocell itself");
        return Some(NO_STAGE);
    };
    Some(watch(settings, stage).unwrap_or_else(|error| {
        tell(&error.to_string());
        NO_STAGE
    }))
}

fn control() -> io::Result<UnixStream> {
    io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from)
}

/// Tells the caller why there is no stage.
fn tell(why: &str) {
    if let Ok(control) = control() {
        // A caller that is gone needs no answer.
        let _ = wire::send(&control, Kind::Fault, &Fault::Jail(why.to_owned()).to_bytes());
    }
}

fn watch(settings: &Settings, stage: &Stage) -> io::Result<u8> {
    close_from(3)?;
    set_name(c"exocell")?;
    let (alive, ours) = nix::unistd::pipe()?;
    let map = IdentityMap::for_caller();
    let network = if settings.keeps_network { HostNetwork::Kept } else { HostNetwork::Never };
    let control = control()?;
    let ours_raw = ours.as_raw_fd();
    let spawned = spawn(map, network, |_| {
        // The stage must not hold the warden's own sign of life, its leash, or the socket twice.
        let closed = nix::unistd::close(ours_raw).and(nix::unistd::close(0));
        match closed {
            Ok(()) => inside::main(settings, stage, map, &control, &alive),
            Err(_) => i32::from(NO_STAGE),
        }
    });
    let spawned = match spawned {
        Ok(spawned) => spawned,
        Err(error) => {
            tell(&error.to_string());
            return Ok(NO_STAGE);
        }
    };
    // The caller sees the stage's end as the end of the stream.
    drop(control);
    nix::unistd::close(0)?;
    wait(spawned.pid, spawned.pidfd.as_fd())
}

/// Until the stage has ended, by itself or because the caller is gone; its status.
fn wait(pid: libc::pid_t, pidfd: BorrowedFd<'_>) -> io::Result<u8> {
    let pid = Pid::from_raw(pid);
    // SAFETY: nobody closes the leash, which is this process's standard output. Needed because
    // the standard library's handle of it would write to it at exit.
    let leash = unsafe { BorrowedFd::borrow_raw(LEASH) };
    loop {
        let mut ends = [leash, pidfd].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut ends, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let [leash, _] = ends.map(|end| end.any().unwrap_or(true));
        if leash {
            // It may have ended by itself meanwhile.
            let _ = kill(pid, Signal::SIGKILL);
        }
        match waitpid(pid, (!leash).then_some(nix::sys::wait::WaitPidFlag::WNOHANG))? {
            WaitStatus::Exited(_, code) => return Ok(code as u8),
            WaitStatus::Signaled(_, signal, _) => return Ok(128 + signal as u8),
            _ => {}
        }
    }
}

/// Closes every descriptor from `first` on.
fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: close_range(2) takes three integers. The caller has not opened anything from
    // `first` on that it uses later. Needed because nothing lists what was inherited.
    match unsafe { libc::close_range(first, u32::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
