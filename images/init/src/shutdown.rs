//! `Shutdown`: end every program, sync, power off.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::Duration;

use exocell_agent::{FrameWriter, Kind, Reply};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, sync};

use crate::reaper::Reaper;
use crate::root::Cell;
use crate::{log, own_proc};

/// How long killed programs may take to be gone.
const KILL_LIMIT: Duration = Duration::from_secs(5);
/// How long the host may take to close the stream after the reply.
const CLOSE_LIMIT_MS: u16 = 100;

/// Ends the cell; the last thing it says on `stream` is that it is done.
pub fn run(cell: &Cell, reaper: &Reaper, stream: &File, grace_ms: u64) -> ! {
    stop_programs(cell, reaper, Duration::from_millis(grace_ms));
    settle(cell);
    let _ = FrameWriter::new(stream).write_json(Kind::Reply, &Reply::Done);
    await_close(stream, CLOSE_LIMIT_MS);
    power_off()
}

/// SIGTERM, `grace`, SIGKILL, to every process but this one (kill(2), -1).
fn stop_programs(cell: &Cell, reaper: &Reaper, grace: Duration) {
    let everyone = Pid::from_raw(-1);
    if !grace.is_zero() {
        let _ = kill(everyone, Signal::SIGTERM);
        let _ = kill(everyone, Signal::SIGCONT);
    }
    cell.groups.empty_within(grace);
    let _ = kill(everyone, Signal::SIGKILL);
    if !reaper.wait_childless(KILL_LIMIT) {
        log::warn("programs survive SIGKILL; powering off without them");
    }
}

/// Leaves the private file system clean on its disk. It lies below the root,
/// out of reach of a path, so it is named by its descriptor.
fn settle(cell: &Cell) {
    sync();
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    let _ = mount(None::<&str>, "/", None::<&str>, read_only, None::<&str>);
    let Some(private) = &cell.private else { return };
    let _ = own_proc::enter();
    let path = format!("self/fd/{}", private.as_raw_fd());
    let options = read_only | MsFlags::MS_NOATIME;
    if let Err(errno) = mount(None::<&str>, path.as_str(), None::<&str>, options, None::<&str>) {
        log::warn(format_args!("the private file system stays writable: {errno}"));
    }
}

/// Waits until the host closes `stream`, so that it has what was sent.
pub fn await_close(mut stream: &File, limit_ms: u16) {
    let mut fds = [PollFd::new(std::os::fd::AsFd::as_fd(stream), PollFlags::POLLIN)];
    while matches!(poll(&mut fds, limit_ms), Ok(1)) {
        match stream.read(&mut [0; 256]) {
            Ok(n) if n > 0 => {}
            _ => return,
        }
    }
}

/// Powers the guest off.
pub fn power_off() -> ! {
    loop {
        sync();
        let Err(errno) = reboot(RebootMode::RB_POWER_OFF);
        log::warn(format_args!("powering off: {errno}"));
        if errno == Errno::EPERM {
            // This is no guest's init, but a program of a cell that is called like it.
            std::process::exit(1);
        }
        sleep(Duration::from_secs(1));
    }
}
