//! `exocell exec`: one more program in a running cell.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use exocell_cell::agent::client::{self, ClientError};
use exocell_cell::agent::{Exec, FrameError, Patient};
use exocell_cell::control::Client;
use exocell_cell::{CellError, CellSpec, Layout, Record, Strength, plan};
use nix::sys::signal::Signal;

use super::copy::is_directory;
use super::run::{environment, must_run};
use crate::args::ExecArgs;
use crate::session::{self, Manner, Outcome, SendSignal, Signalled};
use crate::terminal;

/// How soon a cell is asked again to end a program.
const AGAIN: Duration = Duration::from_secs(1);
/// The exit code of a program that SIGKILL has ended.
const KILLED: u8 = 128 + Signal::SIGKILL as u8;

pub fn exec(layout: &Layout, args: ExecArgs) -> Result<u8, CellError> {
    if args.tty && args.interactive && !std::io::stdin().is_terminal() {
        return Err(CellError::Usage("standard input is no terminal; leave out -t".to_owned()));
    }
    let (stream, spec) = guest(layout, &args.cell)?;
    if let Some(directory) = &args.process.workdir
        && !is_directory(&guest_stream(layout, &args.cell)?, directory)?
    {
        return Err(CellError::Program {
            exit_code: 126,
            message: format!(
                "the cell has no directory {directory} (--workdir); make it first, or name another"
            ),
        });
    }
    let own = environment(layout, &args.process)?;
    let size = terminal::size();
    let request = Exec {
        env: plan::environment_beside(layout, &spec, &own, args.tty),
        // Those of the cell's program, where none are named.
        cwd: args.process.workdir.unwrap_or_default(),
        user: args.process.user.unwrap_or_default(),
        privileged: args.privileged,
        rules: None,
        tty: args.tty.then(|| size.unwrap_or(plan::TTY_SIZE_DEFAULT)),
        stdin: args.interactive,
        lasting: false,
        args: args.command,
    };
    let started = client::exec(&stream, &stream, &request).map_err(not_started)?;
    if args.detach {
        return Ok(0);
    }
    let guest_pid = started.guest_pid;
    drop(started);
    let stream = stream.into_endless().map_err(CellError::host("cannot follow the cell"))?;
    let send_signal = to_program(layout.clone(), args.cell.clone());
    let is_late = Arc::new(AtomicBool::new(false));
    if let Some(time) = args.timeout {
        let (kill, is_late) = (to_program(layout.clone(), args.cell.clone()), is_late.clone());
        std::thread::spawn(move || {
            std::thread::sleep(time);
            is_late.store(true, Ordering::Relaxed);
            // A cell that does not take it now is asked again, until this command ends.
            while !matches!(kill(guest_pid, Signal::SIGKILL as u8), Signalled::Sent) {
                std::thread::sleep(AGAIN);
            }
        });
    }
    let manner = Manner {
        interactive: args.interactive,
        tty: args.tty,
        ends_input: true,
        proxies_signals: true,
        detach_keys: args.detach_keys,
    };
    match session::follow(&stream, &manner, guest_pid, send_signal)? {
        Outcome::Exited { code: KILLED, .. } if is_late.load(Ordering::Relaxed) => {
            Err(CellError::Program {
                exit_code: KILLED,
                message: "the program was killed when its time was over (--timeout)".to_owned(),
            })
        }
        Outcome::Exited { code, .. } => Ok(code),
        Outcome::Detached => {
            crate::show::tell!("exocell: left the program, which goes on");
            Ok(0)
        }
        Outcome::Lost => Err(CellError::Guest(
            "the stream ended before the program did: the cell has ended, or its agent".to_owned(),
        )),
    }
}

fn not_started(error: ClientError) -> CellError {
    match error {
        ClientError::Failed { ref message, .. } => {
            CellError::Program { exit_code: error.exit_code(), message: message.clone() }
        }
        error => CellError::Guest(error.to_string()),
    }
}

/// A way for signals that input cannot hold up: a stream of their own.
fn to_program(layout: Layout, cell: String) -> Box<SendSignal> {
    Box::new(move |guest_pid, signal| {
        let Ok(stream) = guest_stream(&layout, &cell) else { return Signalled::NoWay };
        match client::signal(&stream, &stream, guest_pid, signal) {
            Ok(()) => Signalled::Sent,
            Err(ClientError::Frame(FrameError::NoAnswer(_))) => Signalled::NoAnswer,
            // The program is gone, or nearly.
            Err(_) => Signalled::NoWay,
        }
    })
}

/// A stream to the agent of the running `vm` cell named `key`.
fn guest_stream(layout: &Layout, key: &str) -> Result<Patient, CellError> {
    Ok(guest(layout, key)?.0)
}

fn guest(layout: &Layout, key: &str) -> Result<(Patient, CellSpec), CellError> {
    let (record, spec, status) = Record::find(layout, key)?;
    must_run(&record, status.state)?;
    if spec.strength == Strength::Isolate {
        return Err(CellError::Usage(format!(
            "{key} is an isolate: it has one program and no guest to reach into"
        )));
    }
    Ok((Client::connect(&record)?.guest_stream()?, spec))
}
