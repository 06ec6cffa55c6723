//! Restart policies: whether a cell starts again by itself when its program has ended, and who
//! starts it.
//!
//! ```text
//! run, start ──> supervisor ── ends ──> record: exited
//!     └──> restarter (holds ROOT/cells/ID/restarter) ── sees the end, waits ──> the next supervisor
//!             └── policy says no, stopped by hand, removed: ends
//! ```
//! A supervisor is in a jail and cannot make another, so a cell with a policy has a restarter beside
//! it: a process of its operator's that waits. A cell is restarting as long as it has ended, its
//! policy wants it again and its restarter lives. Whoever stops a cell by hand ends the restarter
//! first.
//!
//! The rules are docker's.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use exocell_images::private;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use crate::launch::Request;
use crate::plan::sidecar;
use crate::policy::Policy;
use crate::record::{Record, State, Status};
use crate::{CellError, CellSpec, Layout, logging, now_ms};

/// The verb of the command whose process is a restarter.
pub const VERB: &str = "restart-cell";
/// That of the command that makes one and ends.
pub const SPAWN_VERB: &str = "restart-cell-apart";

/// The first wait before a new start; each one is twice as long as the one before.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A program that ran for so long begins with the first wait again.
const STEADY: Duration = Duration::from_secs(10);
/// How soon a restarter looks again whose cell somebody else holds.
const LOOK: Duration = Duration::from_millis(100);
/// How often, and how soon, a restarter tries to become that.
const TRIES: u32 = 10;
const TRY_PAUSE: Duration = Duration::from_millis(2);
/// The exit codes of cells and programs that could not be started, as docker has them.
const START_FAILED: RangeInclusive<u8> = 125..=127;
/// What a restarter says once it is there.
const READY: u8 = b'k';

/// How long to wait before the next start, after a program that ran so long.
fn pause(before: Duration, ran: Duration) -> Duration {
    match ran >= STEADY || before.is_zero() {
        true => PAUSE_MIN,
        false => (before * 2).min(PAUSE_MAX),
    }
}

/// Whether no policy wants the cell again. It had the time that its table gives it, or it could not
/// be started: it could not the next time. A supervisor that was killed before its program began
/// says nothing of that.
fn is_over(spec: &CellSpec, status: &Status) -> bool {
    let code = status.exit_code.unwrap_or(0);
    let failed = status.times.program_started_us == 0 && START_FAILED.contains(&code);
    // The guest that it was to be in may have ended in that moment.
    let could_not_start = failed && (spec.within.is_none() || code != *START_FAILED.start());
    status.deadline_passed || could_not_start
}

impl Record {
    /// Held by the process that starts the cell again; its pid is in it.
    const RESTARTER: &str = "restarter";
    /// There once the cell was stopped by hand.
    pub(crate) const STOPPED: &str = "stopped";

    /// Whether somebody is there to start the cell again.
    pub fn has_restarter(&self) -> bool {
        matches!(
            File::open(self.path(Self::RESTARTER)).map(|file| file.try_lock_shared()),
            Ok(Err(fs::TryLockError::WouldBlock))
        )
    }

    /// Whether the cell was stopped by hand, and not started again since.
    pub fn is_stopped(&self) -> bool {
        self.path(Self::STOPPED).exists()
    }

    /// Whether its policy has it started again.
    fn wants_again(&self, spec: &CellSpec, status: &Status) -> bool {
        let code = status.exit_code.unwrap_or(0);
        !is_over(spec, status) && !self.is_stopped() && spec.restart.wants(code, spec.restarts)
    }

    /// Whether the cell has ended and is about to start again.
    pub fn is_restarting(&self, spec: &CellSpec, status: &Status) -> bool {
        let ended = status.state == State::Exited && !spec.restart.is_no();
        ended && self.wants_again(spec, status) && self.has_restarter()
    }

    /// Whether its policy wants a cell that has ended after an end of its host.
    pub fn is_wanted_at_boot(&self, spec: &CellSpec, status: &Status) -> bool {
        let ended = status.state == State::Exited && !is_over(spec, status);
        ended && (spec.restart == Policy::Always || self.wants_again(spec, status))
    }

    /// Has nobody start the cell again but by hand.
    ///
    /// # Errors
    /// The host's.
    pub fn stay_ended(&self, spec: &CellSpec) -> Result<(), CellError> {
        if spec.restart.is_no() {
            return Ok(());
        }
        let mut options = private::options();
        match options.write(true).create(true).truncate(true).open(self.path(Self::STOPPED)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let what = format!("cannot note that {} was stopped", self.id);
                self.end_restarter()?;
                // Of a restarter that is gone nothing but the file is left; it becomes the note.
                fs::rename(self.path(Self::RESTARTER), self.path(Self::STOPPED))
                    .map_err(|_| CellError::host(what)(error))
            }
            _ => self.end_restarter(),
        }
    }

    /// Ends the process that would start the cell again, if there is one.
    ///
    /// # Errors
    /// The host's.
    pub fn end_restarter(&self) -> Result<(), CellError> {
        let failed = || CellError::host(format!("cannot end the restarter of {}", self.id));
        // One that has just begun has not said yet who it is.
        let until = Instant::now() + Duration::from_secs(5);
        while self.has_restarter() {
            let text = fs::read_to_string(self.path(Self::RESTARTER)).unwrap_or_default();
            let pid = text.trim().parse().ok().and_then(rustix::process::Pid::from_raw);
            let flags = rustix::process::PidfdFlags::empty();
            let pidfd = pid.and_then(|pid| rustix::process::pidfd_open(pid, flags).ok());
            // Asked with the descriptor in hand: the pid may be someone else's by now. The cell's
            // supervisor can write the file, and is not to have others ended.
            let is_own = |_: &_| self.has_restarter() && pid.is_some_and(|pid| self.is_of(pid));
            if let Some(pidfd) = pidfd.filter(is_own) {
                rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL)
                    .map_err(|error| failed()(error.into()))?;
                let mut ended =
                    [nix::poll::PollFd::new(pidfd.as_fd(), nix::poll::PollFlags::POLLIN)];
                let _ = nix::poll::poll(&mut ended, 1000_u16);
            }
            if Instant::now() > until {
                return Err(failed()(io::ErrorKind::TimedOut.into()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Whether process `pid` was begun as the restarter of this cell.
    fn is_of(&self, pid: rustix::process::Pid) -> bool {
        let words = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
        let words: Vec<&[u8]> = words.split(|byte| *byte == 0).collect();
        words.windows(2).any(|pair| pair == [VERB.as_bytes(), self.id.as_bytes()])
    }
}

/// Starts a restarter for cell `id`, unless it has one; returns once it is there. It is a child of
/// this process, which is to end soon, or to use [`keep_apart`].
///
/// # Errors
/// The host's.
pub fn keep(layout: &Layout, id: &str) -> Result<(), CellError> {
    let failed = || CellError::host("cannot start the process that keeps the cell running");
    let mut child = command(layout, VERB, id)?.stdout(Stdio::piped()).spawn().map_err(failed())?;
    let mut said = [0; 1];
    let heard = child.stdout.take().map(|mut stdout| stdout.read_exact(&mut said));
    match heard {
        Some(Ok(())) if said == [READY] => Ok(()),
        _ => Err(failed()(io::Error::other("it ended"))),
    }
}

/// The same from a process that lives on: the restarter is nobody's child.
///
/// # Errors
/// The host's.
pub fn keep_apart(layout: &Layout, id: &str) -> Result<(), CellError> {
    let failed = || CellError::host("cannot start the process that keeps the cell running");
    let status =
        command(layout, SPAWN_VERB, id)?.stdout(Stdio::null()).status().map_err(failed())?;
    match status.success() {
        true => Ok(()),
        false => Err(failed()(io::Error::other(status.to_string()))),
    }
}

/// Sees to it that a cell has a restarter as long as it runs with a policy, and none without one.
///
/// # Errors
/// The host's.
pub fn follow_policy(layout: &Layout, record: &Record) -> Result<(), CellError> {
    let Some((spec, status)) = record.look(layout)? else { return Ok(()) };
    match (spec.restart, status.state) {
        (Policy::No, _) => record.end_restarter(),
        (_, State::Exited) => Ok(()),
        (_, _) if record.has_restarter() => Ok(()),
        (_, _) => keep_apart(layout, &record.id),
    }
}

fn command(layout: &Layout, verb: &str, id: &str) -> Result<Command, CellError> {
    let shown = layout.root().display();
    let root = layout.root().canonicalize();
    let root = root.map_err(CellError::host(format!("cannot find {shown}")))?;
    let mut command = Command::new("/proc/self/exe");
    command.envs(logging::environment());
    command.arg("--root").arg(root).args([verb, id]);
    command.stdin(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

/// The body of a restarter: starts the cell `id` again by `start`, each time that its policy wants
/// it.
/// The caller must have one thread.
///
/// # Errors
/// The host's, at the beginning.
pub fn stay(
    layout: &Layout,
    id: &str,
    start: impl Fn(&Record, CellSpec) -> Result<(), CellError>,
) -> Result<(), CellError> {
    Request::begin().close_foreign();
    // The leader of a group, as a shell may make it, has a session already.
    let _ = nix::unistd::setsid();
    let failed = || CellError::host("cannot keep the cell running");
    std::env::set_current_dir("/").map_err(failed())?;
    let record = Record::at(layout, id);
    let mut file = private::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(record.path(Record::RESTARTER))
        .map_err(failed())?;
    let first = takes(&file).map_err(failed())?;
    if first {
        file.set_len(0).and_then(|()| write!(file, "{}", std::process::id())).map_err(failed())?;
    }
    io::stdout().write_all(&[READY]).and_then(|()| io::stdout().flush()).map_err(failed())?;
    let null = File::options().read(true).write(true).open("/dev/null").map_err(failed())?;
    nix::unistd::dup2_stdout(&null).map_err(|errno| failed()(errno.into()))?;
    if first {
        let _ = nix::sys::prctl::set_name(c"exocell-restart");
        follow(layout, &record, start);
    }
    Ok(())
}

/// Whether this process is the restarter now; whoever only looks has the lock for a moment.
fn takes(file: &File) -> io::Result<bool> {
    for _ in 0..TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(fs::TryLockError::WouldBlock) => std::thread::sleep(TRY_PAUSE),
            Err(fs::TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(false)
}

fn follow(
    layout: &Layout,
    record: &Record,
    start: impl Fn(&Record, CellSpec) -> Result<(), CellError>,
) {
    let mut wait = Duration::ZERO;
    // How often it could not be started since it ran: the cell in whose guest it is did not run.
    let mut failed = 0;
    loop {
        record.await_release();
        reap();
        // A record that is gone or broken is nobody's to start.
        let Ok(Some((spec, status))) = record.look(layout) else { return };
        if status.state != State::Exited {
            // Somebody else has begun it in between.
            std::thread::sleep(LOOK);
            continue;
        }
        let tried = |spec: &CellSpec| spec.restarts.saturating_add(failed);
        let wanted = CellSpec { restarts: tried(&spec), ..spec };
        if !record.wants_again(&wanted, &status) {
            return;
        }
        let ran = match failed {
            0 => status.finished_ms.saturating_sub(status.started_ms),
            _ => 0,
        };
        wait = pause(wait, Duration::from_millis(ran));
        std::thread::sleep(wait);
        // It may have been changed, stopped or begun meanwhile.
        let Ok(Some((spec, status))) = record.look(layout) else { return };
        if status.state != State::Exited {
            continue;
        }
        let wanted = CellSpec { restarts: tried(&spec), ..spec };
        if !record.wants_again(&wanted, &status) {
            return;
        }
        let next = CellSpec { restarts: wanted.restarts.saturating_add(1), ..wanted };
        let awaits = sidecar::awaits(layout, &next);
        match start(record, next) {
            Ok(()) => failed = 0,
            // Whoever holds the record for a moment lets it go.
            Err(CellError::WrongState { .. }) => std::thread::sleep(LOOK),
            Err(_) if awaits => failed = failed.saturating_add(1),
            Err(error) => {
                if !record.note_failed_start(&error) {
                    return;
                }
            }
        }
    }
}

/// Children that have ended are nobody else's to wait for.
fn reap() {
    while waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG))
        .is_ok_and(|status| status.pid().is_some())
    {}
}

impl Record {
    /// Writes down why the cell did not start again. Whether its restarter is to look once more: a
    /// cell that came as far as a supervisor of its own has said that itself.
    fn note_failed_start(&self, error: &CellError) -> bool {
        let Ok(Some(_lease)) = self.lease() else { return true };
        let status = Status {
            finished_ms: now_ms(),
            reason: Some(format!("it could not be started again: {error}")),
            ..Status::failed(error)
        };
        // What cannot be written down is not known: it stays ended as it was.
        let _ = self.write_status(&status);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_a_minute_and_begin_anew_after_a_steady_run() {
        let mut wait = Duration::ZERO;
        let waits: Vec<u128> = (0..12)
            .map(|_| {
                wait = pause(wait, Duration::from_secs(9));
                wait.as_millis()
            })
            .collect();
        assert_eq!(waits[..4], [100, 200, 400, 800]);
        assert_eq!(waits[9..], [51_200, 60_000, 60_000]);
        assert_eq!(pause(PAUSE_MAX, STEADY), PAUSE_MIN);
    }
}
