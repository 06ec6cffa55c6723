//! From PID 1 to a cell that answers.

use std::convert::Infallible;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, sleep};
use std::time::Duration;

use exocell_agent::{
    AGENT_PORT, BootTimes, CONTROL_PORT, FrameReader, FrameWriter, Kind, Reply, Request,
};
use nix::sys::stat::{Mode, umask};

use crate::error::{Context, InitError};
use crate::session::{Agent, STACK_BYTES};
use crate::stats::boottime_ns;
use crate::{dev, fill, log, root, shutdown, spawn, sys, vsock};

/// How often the host is told that the cell is still being set up.
const GOES_ON_PAUSE: Duration = Duration::from_secs(1);
/// How long the host may take to read why the boot failed.
const FAILED_LIMIT_MS: u16 = 1000;

/// The init of a cell, or what it executes to start a program. Does not return: it powers the
/// guest off instead.
pub fn run() {
    if std::process::id() != 1 {
        spawn::run_helper(&std::env::args().collect::<Vec<_>>());
        eprintln!("exocell-init is the init of a vm cell; `exocell run` starts it there");
        std::process::exit(1);
    }
    let booted = catch_unwind(|| -> Result<Infallible, InitError> {
        let (agent, listener) = boot()?;
        serve(&agent, &listener)
    });
    match booted {
        Ok(Err(error)) => log::warn(format_args!("boot failed: {error}")),
        _ => log::warn("boot panicked"),
    }
    shutdown::power_off()
}

fn boot() -> Result<(Arc<Agent>, OwnedFd), InitError> {
    let init_started_ns = boottime_ns();
    // Programs may be many, and busy; the agent is to answer all the same.
    sys::set_nice(-20);
    umask(Mode::from_bits_truncate(0o022));
    sys::ignore_sigpipe();
    dev::mount_early().context(|| "mounting devtmpfs")?;
    open_standard_streams();
    log::open();
    let control = vsock::connect_host(CONTROL_PORT).context(|| "connecting to the host")?;
    let control = File::from(control);
    let set_up = FrameReader::of_operator(&control)
        .expect(Kind::Request)
        .map_err(InitError::from)
        .and_then(|request| while_told(&control, &request, || set_up(&request)));
    let reply = match &set_up {
        Ok(_) => Reply::Ready(BootTimes { init_started_ns, ready_ns: boottime_ns() }),
        Err(InitError::Failed { kind, message }) => {
            Reply::Failed { kind: *kind, message: message.clone() }
        }
        Err(InitError::Stream(error)) => return Err(InitError::guest(error.to_string())),
    };
    FrameWriter::new(&control).write_json(Kind::Reply, &reply)?;
    if set_up.is_err() {
        shutdown::await_close(&control, FAILED_LIMIT_MS);
    }
    set_up
}

/// Opens descriptors 0 to 2 for good if the kernel had no console for them, so
/// that no other descriptor of this process gets one of those numbers.
fn open_standard_streams() {
    while let Ok(null) = OpenOptions::new().read(true).write(true).open("/dev/null") {
        if null.as_raw_fd() > 2 {
            return;
        }
        let _ = null.into_raw_fd();
    }
}

/// Does `work`, and tells the host all the while that volumes are being filled, as long as they
/// are.
fn while_told<T>(
    control: &File,
    request: &Request,
    work: impl FnOnce() -> Result<T, InitError>,
) -> Result<T, InitError> {
    let Request::Boot(boot) = request else { return work() };
    if !boot.folders.iter().any(|folder| folder.fill) {
        return work();
    }
    let (done, over) = channel::<()>();
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("boot".into()).stack_size(STACK_BYTES);
        let tell = move || {
            let mut told = 0;
            while over.recv_timeout(GOES_ON_PAUSE) == Err(RecvTimeoutError::Timeout) {
                let steps = fill::steps();
                if steps > told {
                    told = steps;
                    // A host that is gone ends the guest.
                    let _ = FrameWriter::new(control).write_json(Kind::Reply, &Reply::GoesOn);
                }
            }
        };
        builder.spawn_scoped(scope, tell).context(|| "a thread for the boot")?;
        let worked = work();
        drop(done);
        worked
    })
}

/// The agent listens before the host is told that the cell is ready.
fn set_up(request: &Request) -> Result<(Arc<Agent>, OwnedFd), InitError> {
    let Request::Boot(boot) = request else {
        return Err(InitError::invalid("the first request on the control port must be boot"));
    };
    let cell = root::set_up(boot)?;
    let listener = vsock::listen_on(AGENT_PORT).context(|| "listening for the host")?;
    let agent = Agent::of_cell(cell).context(|| "starting the reaper")?;
    Ok((agent, listener))
}

/// Accepts streams for ever; nothing that fails here ends the cell.
fn serve(agent: &Arc<Agent>, listener: &OwnedFd) -> ! {
    loop {
        let served = catch_unwind(AssertUnwindSafe(|| -> std::io::Result<()> {
            agent.serve(vsock::accept_host(listener)?)
        }));
        match served {
            // A program of the cell that plays the host: there may be many.
            Ok(Err(error)) if error.raw_os_error() == Some(libc::EPERM) => {}
            Ok(Err(error)) => {
                log::warn(format_args!("a stream was refused: {error}"));
                sleep(Duration::from_millis(10));
            }
            _ => {}
        }
    }
}
