//! Ending cells and waiting for their end, for whoever operates them.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::control::{Client, ControlRequest};
use crate::signal::Signal;
use crate::{CellError, Layout, Record, State, Status};

/// How long a supervisor may take to end its cell before it is killed.
const END_MAX: Duration = Duration::from_secs(5);
/// How long an ended cell's supervisor may take to bid its followers farewell.
const FAREWELL_MAX: Duration = Duration::from_secs(2);
/// How long a supervisor may take to write down that it is there.
const BIRTH_MAX: Duration = Duration::from_secs(10);
/// How long the host may take to end a killed supervisor and all of its cell.
const DEATH_MAX: Duration = Duration::from_secs(20);

/// The exit code of a cell once it has ended; `None` when `limit` passed
/// first. A cell that removed itself left none: 0.
pub fn await_end(
    layout: &Layout,
    record: &Record,
    status: &Status,
    limit: Option<Duration>,
) -> Result<Option<u8>, CellError> {
    if let Some(code) = status.exit_code {
        return Ok(Some(code));
    }
    let pidfd = open_pidfd(supervisor(layout, record, status)?);
    if let Some(pidfd) = pidfd {
        let until = limit.map(|limit| Instant::now() + limit);
        if !poll_end(&pidfd, until)? {
            return Ok(None);
        }
    }
    let until = Instant::now() + DEATH_MAX;
    loop {
        match Record::find(layout, &record.id) {
            Ok((_, _, status)) if status.state == State::Exited => {
                return Ok(Some(status.exit_code.unwrap_or(0)));
            }
            // Another command that looks at the cell is about to write its end down.
            Ok(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Ok(_) => return Err(still_there("has ended, and its record is still held")),
            Err(CellError::NoSuchCell(_)) => return Ok(Some(0)),
            Err(error) => return Err(error),
        }
    }
}

/// Ends a running cell: SIGTERM to its program, after `grace` the end.
pub fn stop(layout: &Layout, record: &Record, grace: Duration) -> Result<(), CellError> {
    stop_by(layout, record, Signal::TERM, grace)
}

/// Has nobody start the cell again but by hand.
fn stay_ended(layout: &Layout, record: &Record) -> Result<(), CellError> {
    match record.look(layout)? {
        Some((spec, _)) => record.stay_ended(&spec),
        None => Ok(()),
    }
}

/// The same by another first signal.
pub fn stop_by(
    layout: &Layout,
    record: &Record,
    first: Signal,
    grace: Duration,
) -> Result<(), CellError> {
    stay_ended(layout, record)?;
    let signal = first.number();
    let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
    // A supervisor that does not answer is killed below.
    let _ = Client::connect(record)
        .and_then(|client| client.ask(&ControlRequest::Stop { signal, grace_ms }));
    // It may have got its pid, or its end, since.
    let status = match Record::find(layout, &record.id) {
        Ok((_, _, status)) => status,
        Err(_) => return Ok(()),
    };
    let status = &status;
    match await_end(layout, record, status, Some(grace.saturating_add(END_MAX)))? {
        Some(_) => Ok(()),
        None => {
            end_now(layout, record, status)?;
            // A record that was to go may have gone.
            let _ = record.explain_kill(&format!(
                "stopped by force: the supervisor had not ended the cell {} s after its grace",
                END_MAX.as_secs()
            ));
            Ok(())
        }
    }
}

/// Sends the program of a running cell a signal; SIGKILL ends the cell.
pub fn kill(layout: &Layout, record: &Record, signal: Signal) -> Result<(), CellError> {
    if signal == Signal::KILL {
        return stop(layout, record, Duration::ZERO);
    }
    let request = ControlRequest::Signal { signal: signal.number() };
    Client::connect(record)?.ask(&request).map(drop)
}

/// Pauses a running cell, or lets it go on.
pub fn pause(record: &Record, pause: bool) -> Result<(), CellError> {
    Client::connect(record)?.ask(&ControlRequest::Pause { pause }).map(drop)
}

/// Kills a supervisor and with it all of its cell.
pub fn end_now(layout: &Layout, record: &Record, status: &Status) -> Result<(), CellError> {
    if let Some(pidfd) = open_pidfd(supervisor(layout, record, status)?) {
        // Asked with the descriptor in hand: the pid may be someone else's by now.
        if record.is_held() {
            rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL)
                .map_err(|error| CellError::host("cannot kill the supervisor")(error.into()))?;
            if !poll_end(&pidfd, Some(Instant::now() + DEATH_MAX))? {
                return Err(still_there(&format!(
                    "was killed and has not ended within {} s",
                    DEATH_MAX.as_secs()
                )));
            }
        }
    }
    Ok(())
}

fn still_there(how: &str) -> CellError {
    CellError::Usage(format!(
        "the cell's supervisor {how}: the host holds it, or a thread of it waits for a disk; try again"
    ))
}

/// Removes the record of an ended cell; `force` ends a live one first.
pub fn remove(
    layout: &Layout,
    record: &Record,
    status: &Status,
    force: bool,
) -> Result<(), CellError> {
    let refused = |state| CellError::WrongState {
        id: record.id[..12].to_owned(),
        state,
        remedy: "stop it first, or use rm -f",
    };
    let Some((spec, now)) = record.look(layout)? else { return Ok(()) };
    match status.state {
        // That it was stopped needs no note where all goes.
        _ if force => record.stay_ended(&spec).or_else(|_| record.end_restarter())?,
        State::Exited if record.is_restarting(&spec, &now) => return Err(refused("restarting")),
        State::Exited => record.end_restarter()?,
        state => return Err(refused(state.name())),
    }
    // Its restarter may have started it until then.
    let now = record.look(layout)?.map_or_else(|| status.clone(), |(_, now)| now);
    let status = &now;
    if status.state != State::Exited {
        end_now(layout, record, status)?;
    }
    // An ended cell's supervisor may still write to its followers.
    let patience = Instant::now() + FAREWELL_MAX;
    while !record.retire()? {
        if Instant::now() > patience {
            end_now(layout, record, status)?;
        }
        if Instant::now() > patience + DEATH_MAX {
            return Err(still_there("does not let its record go"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if let Some(within) = &spec.within {
        forget(layout, &within.cell, &record.id);
    }
    Ok(())
}

/// Has what cell `id` kept in the guest of `other` removed. A guest that has ended has nothing, and
/// one that does not answer keeps what is its own.
fn forget(layout: &Layout, other: &str, id: &str) {
    let asked = || -> Result<(), CellError> {
        let (record, _, status) = Record::find(layout, other)?;
        if status.state == State::Running {
            Client::connect(&record)?.ask(&ControlRequest::Forget { id: id.to_owned() })?;
        }
        Ok(())
    };
    let _ = asked();
}

/// The supervisor's pid, waited for where it is so young that it has not
/// written it down; 0 when it is gone.
fn supervisor(layout: &Layout, record: &Record, status: &Status) -> Result<i32, CellError> {
    let mut pid = status.supervisor_pid;
    let until = Instant::now() + BIRTH_MAX;
    while pid == 0 {
        match Record::find(layout, &record.id) {
            Ok((_, _, now)) if now.state != State::Exited => pid = now.supervisor_pid,
            _ => return Ok(0),
        }
        if Instant::now() > until {
            return Err(still_there(&format!(
                "has not said within {} s that it is there",
                BIRTH_MAX.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(pid)
}

fn open_pidfd(pid: i32) -> Option<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(pid)?;
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
}

/// Whether the process of `pidfd` ended before `until`.
fn poll_end(pidfd: &OwnedFd, until: Option<Instant>) -> Result<bool, CellError> {
    loop {
        let timeout = match until {
            None => PollTimeout::NONE,
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut waited = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waited, timeout) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(CellError::host("cannot wait for the cell")(errno.into())),
        }
    }
}
