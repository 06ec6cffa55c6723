//! Unix sockets that lead to sockets of the host.
//!
//! ```text
//! a program ── connects ──> a socket in a file system of its own <── listens ── init
//!                                                                     │ Done
//!     host: Socket ── a stream ─────────────────────────────────────> │ <── SOCKET_OPEN
//!     host's socket <── its bytes ──────── relay ──────── its bytes ──> the program
//! ```
//! The kernel finds a bound socket by its file, whatever that is called: a mount of the file leads
//! to it, in each namespace that has the mount. The file system lies nowhere else, so that nothing
//! but the file is reached.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use exocell_agent::{FrameWriter, Kind, Reply, SOCKET_OPEN, SocketFile};
use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, bind, listen, shutdown, socket,
};
use nix::unistd::{chdir, fchdir};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid, chmodat, chownat, openat};

use crate::error::{Context, InitError};
use crate::{mounting, relay, sys};

/// What it is called where it lies.
const NAME: &str = "socket";
/// Connections that wait until the host has room for them, at most: what nix allows.
const BACKLOG: i32 = 511;

/// What programs connect to, each by its number.
#[derive(Default)]
pub struct Sockets(Mutex<BTreeMap<u32, Arc<OwnedFd>>>);

impl Sockets {
    /// Listens on a new socket; a mount of it, which lies nowhere yet. This process has one thread.
    pub fn make(&self, wanted: SocketFile, read_only: bool) -> io::Result<File> {
        let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let memory = mounting::make("tmpfs", "tmpfs", flags, "size=4k,nr_inodes=4,mode=0700")?;
        let kind = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket(AddressFamily::Unix, SockType::Stream, kind, None)?;
        // A path is all that the call takes, and none leads there.
        fchdir(&memory)?;
        let bound = bind(listener.as_raw_fd(), &UnixAddr::new(NAME)?);
        chdir("/")?;
        bound?;
        let SocketFile { number, mode, uid, gid } = wanted;
        chmodat(&memory, NAME, Mode::from_raw_mode(mode & 0o777), AtFlags::empty())?;
        let (owner, group) = (Uid::from_raw(uid), Gid::from_raw(gid));
        chownat(&memory, NAME, Some(owner), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
        listen(&listener, Backlog::new(BACKLOG)?)?;
        let found = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let shown = mounting::copy(openat(&memory, NAME, found, Mode::empty())?, false)?;
        flags.set(MsFlags::MS_RDONLY, read_only);
        mounting::change(&shown, flags)?;
        self.lock().insert(number, Arc::new(listener));
        Ok(shown)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Arc<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a program that connects to the socket `number`, and carries what it and the host
    /// say until both have ended; or until the host hangs up.
    pub fn carry(&self, number: u32, stream: &File) -> Result<(), InitError> {
        let found = self.lock().get(&number).cloned();
        let none = || InitError::invalid(format!("no socket {number} is listened on"));
        let listener = found.ok_or_else(none)?;
        let program = accept(&listener, stream).context(|| "waiting for a program")?;
        // Whoever waits for none does not keep it open.
        drop(listener);
        let Some(program) = program else { return Ok(()) };
        FrameWriter::new(stream).write_json(Kind::Reply, &Reply::Done)?;
        let (mut word, mut host) = ([0], stream);
        if matches!(host.read(&mut word), Ok(1)) && word == [SOCKET_OPEN] {
            relay::run(stream.as_fd(), program.as_fd());
        }
        Ok(())
    }

    /// Has the next program that connects to the socket `number` refused, and those that wait.
    pub fn close(&self, number: u32) {
        let Some(listener) = self.lock().remove(&number) else { return };
        // A thread that waits has it open a moment longer.
        let _ = shutdown(listener.as_raw_fd(), Shutdown::Both);
    }
}

/// The next program that connects; `None` if the host hangs up before.
fn accept(listener: &OwnedFd, stream: &File) -> io::Result<Option<OwnedFd>> {
    loop {
        let mut waits = [
            PollFd::new(listener.as_fd(), PollFlags::POLLIN),
            PollFd::new(stream.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut waits, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            waited => drop(waited?),
        }
        let [is_wanted, is_over] = waits.map(|wait| wait.any() == Some(true));
        // It says nothing before it was told of a program.
        if is_over {
            return Ok(None);
        }
        match is_wanted.then(|| sys::accept(listener)) {
            // Another stream has that one.
            None | Some(Err(Errno::EAGAIN | Errno::ECONNABORTED | Errno::EINTR)) => {}
            // It is closed.
            Some(Err(Errno::EINVAL)) => return Ok(None),
            Some(accepted) => return Ok(Some(accepted?)),
        }
    }
}
