//! `exocell exec`: one more program in a running cell.

use std::os::unix::net::UnixStream;

use exocell_cell::agent::{Exec, FrameWriter, Kind, Request, client};
use exocell_cell::control::Client;
use exocell_cell::{CellError, CellSpec, Layout, Record, Strength, plan};

use super::run::{environment, must_run};
use crate::args::ExecArgs;
use crate::session::{self, Outcome, SendSignal};
use crate::terminal;

pub fn exec(layout: &Layout, args: ExecArgs) -> Result<u8, CellError> {
    let (stream, spec) = guest(layout, &args.cell)?;
    let size = terminal::size();
    let request = Request::Exec(Exec {
        env: plan::environment(&spec.env, &environment(&args.process)?, args.tty),
        cwd: args.process.workdir.unwrap_or_else(|| "/".to_owned()),
        user: args.process.user.unwrap_or_default(),
        tty: args.tty.then(|| size.unwrap_or(plan::TTY_SIZE_DEFAULT)),
        stdin: args.interactive,
        args: args.command,
    });
    FrameWriter::new(&stream)
        .write_json(Kind::Request, &request)
        .map_err(|error| CellError::Guest(error.to_string()))?;
    if args.detach {
        // A stream that closes earlier takes its program with it.
        session::await_start(&stream)?;
        return Ok(0);
    }
    let send_signal = to_program(layout.clone(), args.cell.clone());
    match session::follow(&stream, args.interactive, args.tty, send_signal)? {
        Outcome::Exited(code) => Ok(code),
        Outcome::Lost => Err(CellError::Guest("the cell ended".to_owned())),
    }
}

/// A way for signals that input cannot hold up: a stream of their own.
fn to_program(layout: Layout, cell: String) -> Box<SendSignal> {
    Box::new(move |guest_pid, signal| {
        guest_pid != 0
            && guest_stream(&layout, &cell)
                .is_ok_and(|stream| client::signal(&stream, &stream, guest_pid, signal).is_ok())
    })
}

/// A stream to the agent of the running `vm` cell named `key`.
pub fn guest_stream(layout: &Layout, key: &str) -> Result<UnixStream, CellError> {
    Ok(guest(layout, key)?.0)
}

fn guest(layout: &Layout, key: &str) -> Result<(UnixStream, CellSpec), CellError> {
    let (record, spec, status) = Record::find(layout, key)?;
    must_run(&record, status.state)?;
    if spec.strength == Strength::Isolate {
        return Err(CellError::Usage(format!(
            "{key} is an isolate: it has one program and no guest to reach into"
        )));
    }
    Ok((Client::connect(&record)?.guest_stream()?, spec))
}
