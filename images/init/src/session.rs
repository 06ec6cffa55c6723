//! A stream from the host: one request, and what it calls for.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use exocell_agent::{FrameReader, FrameWriter, Kind, Reply, Request};
use nix::mount::{MntFlags, umount2};

use crate::cgroup::Group;
use crate::container::Container;
use crate::error::{Context, InitError};
use crate::reaper::Reaper;
use crate::root::Cell;
use crate::{cold, exec, log, network, pager, shutdown, stats, sys, transfer};

/// Stack of a session's thread, in bytes; only touched pages cost memory.
pub const STACK_BYTES: usize = 256 * 1024;

/// Serves the host's requests.
pub struct Agent {
    pub(crate) reaper: Arc<Reaper>,
    cell: Option<Cell>,
    programs: Mutex<Programs>,
    begun: Condvar,
}

/// Where the cell's programs are.
#[derive(Default)]
struct Programs {
    container: Option<Arc<Container>>,
    /// Whether there has been one.
    has_begun: bool,
}

/// How long who comes before the cell's own program waits for it.
const BEGIN_MAX: Duration = Duration::from_secs(5);

impl Agent {
    /// An agent for programs of this machine as it is: it runs programs and
    /// copies files, and refuses what would change the machine.
    ///
    /// It reaps every child of the calling process.
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self::with(None)?))
    }

    /// The agent of the whole machine.
    pub(crate) fn of_cell(cell: Cell) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self::with(Some(cell))?))
    }

    fn with(cell: Option<Cell>) -> io::Result<Self> {
        let (programs, begun) = Default::default();
        Ok(Self { reaper: Reaper::start()?, cell, programs, begun })
    }

    /// The control group of programs.
    pub(crate) fn group(&self) -> Option<&Group> {
        self.cell.as_ref().map(|cell| &cell.group)
    }

    /// What programs of a cell run in; `None` on a machine as it is.
    ///
    /// # Errors
    /// There is none yet, or none any more.
    pub(crate) fn container(&self) -> Result<Option<Arc<Container>>, InitError> {
        if self.cell.is_none() {
            return Ok(None);
        }
        let none = || InitError::guest("the cell's own program does not run");
        let waits = |programs: &mut Programs| !programs.has_begun;
        let programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let programs = self.begun.wait_timeout_while(programs, BEGIN_MAX, waits);
        let (programs, _) = programs.unwrap_or_else(PoisonError::into_inner);
        programs.container.clone().map(Some).ok_or_else(none)
    }

    pub(crate) fn set_container(&self, container: Option<Container>) {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        programs.has_begun |= container.is_some();
        programs.container = container.map(Arc::new);
        self.begun.notify_all();
    }

    /// Has this thread see files as programs do, if there are any.
    fn enter(&self) -> Result<(), InitError> {
        let programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let container = programs.container.clone();
        drop(programs);
        container.map_or(Ok(()), |container| container.enter())
    }

    pub(crate) fn cell(&self) -> Result<&Cell, InitError> {
        let refused = || InitError::invalid("this agent does not own its machine");
        self.cell.as_ref().ok_or_else(refused)
    }

    /// Serves `stream` in a thread of its own.
    pub fn serve(self: &Arc<Self>, stream: OwnedFd) -> io::Result<()> {
        let agent = Arc::clone(self);
        let stream = File::from(stream);
        thread::Builder::new()
            .name("session".into())
            .stack_size(STACK_BYTES)
            .spawn(move || agent.attend(&stream))?;
        Ok(())
    }

    fn attend(&self, stream: &File) {
        let Err(error) = self.answer(stream) else { return };
        match error.into_reply() {
            Ok(reply) => drop(FrameWriter::new(stream).write_json(Kind::Reply, &reply)),
            Err(error) => log::warn(format_args!("a session ended: {error}")),
        }
    }

    /// Only programs that a session started can be signalled.
    fn signal(&self, guest_pid: u32, number: u8, group: bool) -> Result<Reply, InitError> {
        let refused = || InitError::invalid(format!("no signal {number} for pid {guest_pid}"));
        let pid = i32::try_from(guest_pid).map_err(|_| refused())?;
        if !(1..=64).contains(&number) {
            return Err(refused());
        }
        let sent = match group {
            true => self.reaper.signal_group_shown(pid, number),
            false => self.reaper.signal_shown(pid, number),
        };
        sent.map(|()| Reply::Done).map_err(|_| refused())
    }

    fn answer(&self, stream: &File) -> Result<(), InitError> {
        let mut frames = FrameReader::of_operator(stream);
        let request = frames.expect(Kind::Request)?;
        let reply = match request {
            Request::Start(request) => return exec::start(self, stream, frames, &request),
            Request::Exec(request) => return exec::run(self, stream, frames, &request),
            Request::Download { changes: true, left_out, .. } => {
                sys::set_nice(0);
                return transfer::download_changes(stream, self.cell()?.private.as_ref(), left_out);
            }
            Request::Download { path, layer, changes: false, .. } => {
                sys::set_nice(0);
                self.enter()?;
                return transfer::download(stream, Path::new(&path), layer);
            }
            Request::Shutdown { grace_ms } => {
                shutdown::run(self.cell()?, &self.reaper, stream, grace_ms)
            }
            Request::Upload { path } => {
                sys::set_nice(0);
                self.enter()?;
                return transfer::upload(stream, frames, Path::new(&path));
            }
            Request::Stats => Reply::Stats(Box::new(stats::read(self.cell.as_ref()))),
            Request::Memory { limit_bytes } => {
                let cell = self.cell()?;
                pager::set_limit(limit_bytes)?;
                // What programs are told of it; the limit is the kernel's.
                let _ = cell.group.tell_memory(limit_bytes);
                Reply::Done
            }
            Request::GiveBack { bytes } => {
                self.cell()?;
                pager::give_back(bytes)?;
                Reply::Done
            }
            Request::DropCold => {
                cold::drop_some(&self.cell()?.group)?;
                Reply::Done
            }
            Request::Address { place, address } => {
                self.cell()?;
                network::set_joined(place, address)?;
                Reply::Done
            }
            Request::Unmount { path } => {
                self.cell()?;
                let detach = || umount2(path.as_str(), MntFlags::MNT_DETACH);
                let detached = detach();
                self.enter()?;
                detach().or(detached).context(|| format!("unmounting {path}"))?;
                Reply::Done
            }
            Request::Signal { guest_pid, number, group } => {
                self.signal(guest_pid, number, group)?
            }
            Request::Boot(_) => return Err(InitError::invalid("the cell has booted already")),
        };
        Ok(FrameWriter::new(stream).write_json(Kind::Reply, &reply)?)
    }
}
