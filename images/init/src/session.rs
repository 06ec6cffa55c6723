//! A stream from the host: one request, and what it calls for.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use exocell_agent::oci::Resources;
use exocell_agent::{FrameReader, FrameWriter, Kind, Reply, Request};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use crate::beside::Beside;
use crate::cgroup::Group;
use crate::container::Container;
use crate::error::{Context, InitError};
use crate::followed::Lines;
use crate::io_loop::Input;
use crate::members::{Member, Members};
use crate::reaper::Reaper;
use crate::root::Cell;
use crate::transfer::UPPER;
use crate::transfer::changes::{self, Layers};
use crate::{
    account, cold, dial, exec, files, folders, log, network, pager, shutdown, stats, sys, transfer,
    usage,
};

/// Stack of a session's thread, in bytes; only touched pages cost memory.
pub const STACK_BYTES: usize = 256 * 1024;

/// Serves the host's requests.
pub struct Agent {
    pub(crate) reaper: Arc<Reaper>,
    /// Programs that may be followed by another host than theirs.
    pub(crate) lines: Lines,
    cell: Option<Cell>,
    members: Members,
}

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
        let (reaper, lines, members) = (Reaper::start()?, Lines::default(), Members::default());
        Ok(Self { reaper, lines, cell, members })
    }

    /// The control group of a container's programs; `None` on a machine as it is.
    pub(crate) fn group_of<'a>(&'a self, member: &'a Member) -> Option<&'a Group> {
        member.group().or(self.cell.as_ref().map(|cell| &cell.group))
    }

    /// What the container has changed of its image, and that; `None` where its root cannot be
    /// written.
    fn layers_of(&self, member: &Member) -> Result<Option<Layers>, InitError> {
        let cell = self.cell()?;
        let Some(private) = cell.private.as_ref() else { return Ok(None) };
        let within = match member.beside() {
            None => UPPER.to_owned(),
            Some(beside) => match beside.upper() {
                Some(upper) => upper,
                None => return Ok(None),
            },
        };
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let upper = openat(private, within.as_str(), flags, Mode::empty());
        let upper = upper.map(File::from).context(|| "opening what the cell has changed")?;
        let image = match member.beside() {
            None => cell.image()?,
            Some(beside) => beside.image()?,
        };
        Ok(Some(Layers { upper, image }))
    }

    /// The container whose IPC and host name one beside the cell's own has, if it has another's.
    pub(crate) fn shared(&self, beside: &Beside) -> Result<Option<Arc<Container>>, InitError> {
        let named = beside.shares_with().map(|name| self.members.named(name)).transpose()?;
        named.map(|other| other.container()).transpose()
    }

    fn limit(&self, member: &Member, resources: &Resources) -> Result<(), InitError> {
        let most = self.cell()?.boot.process_count_max;
        let count = resources.pids.as_ref().and_then(|pids| u64::try_from(pids.limit).ok());
        if let Some(count) = count.filter(|count| *count > most) {
            return Err(InitError::invalid(format!(
                "{count} processes are more than the {most} that the cell was started with"
            )));
        }
        self.group(member)?.limit(resources)
    }

    /// The control group of a container's programs.
    fn group<'a>(&'a self, member: &'a Member) -> Result<&'a Group, InitError> {
        let nothing = || InitError::guest("the container's programs are in no control group");
        self.group_of(member).ok_or_else(nothing)
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
    fn signal(
        &self,
        member: &Member,
        guest_pid: u32,
        number: u8,
        group: bool,
    ) -> Result<Reply, InitError> {
        let refused = || InitError::invalid(format!("no signal {number} for pid {guest_pid}"));
        let pid = i32::try_from(guest_pid).map_err(|_| refused())?;
        if !(1..=64).contains(&number) {
            return Err(refused());
        }
        let shown = (member.number(), pid);
        let sent = match group {
            true => self.reaper.signal_group_shown(shown, number),
            false => self.reaper.signal_shown(shown, number),
        };
        sent.map(|()| Reply::Done).map_err(|_| refused())
    }

    /// Has the host hear a program that goes on, and passes on what it says to that.
    fn follow(
        &self,
        member: &Member,
        stream: &File,
        frames: FrameReader<&File>,
        guest_pid: u32,
    ) -> Result<(), InitError> {
        sys::set_nice(0);
        let pid = i32::try_from(guest_pid).unwrap_or(0);
        let line = self.lines.give((member.number(), pid), stream)?;
        let copied = line.tty.as_ref().map(File::try_clone).transpose();
        let (sink, tty) =
            line.sink().and_then(|sink| Ok((sink, copied?))).context(|| "a stream")?;
        Input::new(frames, sink, tty, &self.reaper, line.pid, Some(&line)).run(line.exit.as_fd());
        Ok(())
    }

    fn answer(&self, stream: &File) -> Result<(), InitError> {
        let mut frames = FrameReader::of_operator(stream);
        let (member, request) = match frames.expect(Kind::Request)? {
            Request::Within { container } => {
                (self.members.find(container)?, frames.expect(Kind::Request)?)
            }
            request => (self.members.own(), request),
        };
        let member = &*member;
        let reply = match request {
            Request::Start(request) => {
                return exec::start(self, member, stream, frames, &request);
            }
            Request::Exec(request) => return exec::run(self, member, stream, frames, &request),
            Request::Download { changes: true, left_out, .. } => {
                sys::set_nice(0);
                let nothing = "the cell's root is read-only: it has changed nothing";
                let layers = self.layers_of(member)?;
                let Layers { upper, .. } = layers.ok_or_else(|| InitError::invalid(nothing))?;
                if member.beside().is_some() {
                    member.enter()?;
                }
                return transfer::download_changes(stream, upper, left_out);
            }
            Request::Changes => {
                sys::set_nice(0);
                let layers = self.layers_of(member)?;
                if member.beside().is_some() {
                    member.enter()?;
                }
                return changes::tell(stream, layers);
            }
            Request::Download { path, layer, changes: false, .. } => {
                sys::set_nice(0);
                member.enter()?;
                return transfer::download(stream, Path::new(&path), layer);
            }
            Request::Shutdown { grace_ms } => {
                shutdown::run(self.cell()?, &self.reaper, stream, grace_ms)
            }
            Request::Upload { path } => {
                sys::set_nice(0);
                member.enter()?;
                return transfer::upload(stream, frames, Path::new(&path));
            }
            Request::Stats => {
                let group = self.group_of(member);
                Reply::Stats(Box::new(stats::read(group)))
            }
            Request::Usage => Reply::Usage(Box::new(usage::read(self.group(member)?))),
            Request::Freeze { frozen } => {
                usage::freeze(self.group(member)?, frozen)?;
                Reply::Done
            }
            Request::SignalAll { number } => {
                usage::signal_all(&self.reaper, self.group(member)?, number)?;
                Reply::Done
            }
            Request::Memory { limit_bytes } => {
                let cell = self.cell()?;
                pager::set_limit(limit_bytes)?;
                // What programs are told of it; the limit is the kernel's.
                let _ = cell.group.tell_memory(limit_bytes);
                Reply::Done
            }
            Request::Limit(resources) => {
                self.limit(member, &resources)?;
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
            Request::Plug(setup) => {
                self.cell()?;
                network::set_up(&setup)?;
                Reply::Done
            }
            Request::Address { place, address } => {
                self.cell()?;
                network::set_joined(place, address)?;
                Reply::Done
            }
            Request::Unmount { path } => {
                self.cell()?;
                let detached = folders::detach(&path);
                member.enter()?;
                let detached = folders::detach(&path).or(detached);
                detached.context(|| format!("unmounting {path}"))?;
                Reply::Done
            }
            Request::Socket { number } => {
                sys::set_nice(0);
                return self.cell()?.sockets.carry(number, stream);
            }
            Request::CloseSocket { number } => {
                self.cell()?.sockets.close(number);
                Reply::Done
            }
            Request::Signal { guest_pid, number, group } => {
                self.signal(member, guest_pid, number, group)?
            }
            Request::Contain(wanted) => {
                self.members.add(self.cell()?, *wanted)?;
                Reply::Done
            }
            Request::Discard { container } => {
                self.members.discard(self.cell()?, container)?;
                Reply::Done
            }
            Request::Forget { name } => {
                self.members.forget(self.cell()?, &name)?;
                Reply::Done
            }
            Request::File(request) => {
                sys::set_nice(0);
                member.enter()?;
                return files::serve(stream, frames, &request);
            }
            Request::Account { name } => {
                member.enter()?;
                account::ensure(&name)?;
                Reply::Done
            }
            Request::Dial { port } => {
                sys::set_nice(0);
                return dial::run(stream, port);
            }
            Request::Follow { guest_pid } => {
                return self.follow(member, stream, frames, guest_pid);
            }
            Request::Within { .. } => {
                return Err(InitError::invalid("a stream is within one container"));
            }
            Request::Boot(_) => return Err(InitError::invalid("the cell has booted already")),
        };
        Ok(FrameWriter::new(stream).write_json(Kind::Reply, &reply)?)
    }
}
