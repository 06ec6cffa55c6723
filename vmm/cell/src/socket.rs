//! A unix socket of the host that a `vm` cell has: a process of its own connects to it.
//!
//! ```text
//! plan: found -> launch: the door's process in its root, "ready" -> supervisor: Door
//!   a program of the guest connects -> supervisor asks the door -> a connection, handed over
//! ```
//! The process (a door) has one directory, of which its list of calls lets it read nothing, and no
//! byte of the guest's: it is asked by a single one of the supervisor's, connects to the name it was
//! given, and passes the connection on. What the guest says on it goes from the vsock device straight
//! into the socket ([`crate::supervisor`]). The name is looked up anew each time, so that a server
//! may end and come again. Of the Docker server of the same state root it is another socket, where the
//! server is told whose connection it is ([`crate::engine`]).

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use exocell_agent::{FolderMount, SOCKETS_MAX, SocketFile};
use exocell_images::walk::Found;
use exocell_vmm::jail::{self, Capability, FolderRoot, IdentityMap, ThreadClass};
use exocell_xgate::{Folder, Rights};
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, bind, connect, setsockopt, socket, sockopt,
};
use nix::sys::stat::Mode;
use nix::sys::time::TimeVal;

use crate::descriptors::{receive_answer, send_descriptor};
use crate::{CellError, Layout, apart, engine};

/// How long a server may let a connection wait that it has no room for, in seconds.
const ROOM_MAX_SECONDS: i64 = 10;

/// A socket of the host, found.
pub struct Socket {
    /// The directory that it is in, only held, and where that is.
    directory: File,
    path: PathBuf,
    name: OsString,
    granted: Folder,
    file: SocketFile,
    /// The other end of its process's socket, once there is one.
    control: Option<UnixStream>,
    /// Whether it is the Docker server's, which is told whose connection it is.
    is_engine: bool,
}

impl Socket {
    /// Every socket of the grant of a `vm` cell, as they were found.
    ///
    /// # Errors
    /// One is not of streams, or may not be connected to; there are too many.
    pub fn open_all(layout: &Layout, found: Vec<(Found, Folder)>) -> Result<Vec<Self>, CellError> {
        if found.len() > SOCKETS_MAX {
            return Err(CellError::Usage(format!(
                "{} sockets of the host are more than the {SOCKETS_MAX} that a cell may have \
                 (--volume)",
                found.len()
            )));
        }
        let open = |(number, (found, granted)): (u32, (Found, Folder))| {
            check(&found, &granted)?;
            let at = granted.host.display();
            Self::open(layout, &found, granted.clone(), number)
                .map_err(CellError::host(format!("cannot find the socket {at} (--volume)")))
        };
        (0..).zip(found).map(open).collect()
    }

    fn open(layout: &Layout, found: &Found, granted: Folder, number: u32) -> io::Result<Self> {
        let is_engine = engine::is_socket_of(layout, found);
        let real = match is_engine {
            true => engine::folder(layout).canonicalize()?.join(engine::CELLS_SOCKET),
            false => found.path()?,
        };
        let (Some(path), Some(name)) = (real.parent(), real.file_name()) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let directory = File::from(Found::real(path)?.as_fd().try_clone_to_owned()?);
        // Others' ids say nothing where the operator has only its own.
        let (uid, gid) = match IdentityMap::for_folder() {
            IdentityMap::Everyone => (found.metadata().uid(), found.metadata().gid()),
            _ => (0, 0),
        };
        let file = SocketFile { number, mode: found.metadata().mode() & 0o777, uid, gid };
        let (path, name) = (path.to_owned(), name.to_owned());
        Ok(Self { directory, path, name, granted, file, control: None, is_engine })
    }

    /// How the guest has it.
    pub fn mount(&self) -> FolderMount {
        FolderMount {
            tag: String::new(),
            guest_path: self.granted.guest.display().to_string(),
            read_only: !self.granted.rights.contains(Rights::WRITE),
            is_file: false,
            copied: None,
            fill: false,
            socket: Some(self.file),
        }
    }

    /// Starts its process for cell `cell`, and waits until that is in its root. The caller must have
    /// one thread.
    ///
    /// # Errors
    /// Says what the host did not allow.
    pub fn start(&mut self, weight: u32, cell: &str) -> Result<(), CellError> {
        let what = format!("the socket {}", self.granted.host.display());
        self.control = Some(apart::start(&what, |control, _| self.keep(control, weight, cell))?);
        Ok(())
    }

    /// The body of the process.
    fn keep(&self, control: &UnixStream, weight: u32, cell: &str) -> Result<(), CellError> {
        apart::leave_operator()?;
        let close = |kept: &[i32]| {
            jail::close_all_but(kept).map_err(CellError::host("cannot close descriptors"))
        };
        close(&[self.directory.as_raw_fd(), control.as_raw_fd()])?;
        let name = std::ffi::CString::new(engine::DOOR).unwrap_or_default();
        nix::sys::prctl::set_name(&name)
            .map_err(|errno| CellError::host("cannot be named")(errno.into()))?;
        apart::set_priority(weight);
        let FolderRoot { root, file, descriptors } = FolderRoot::hold(&self.path, &self.directory)?;
        drop((root, descriptors));
        let Some(directory) = file else {
            return Err(CellError::host("cannot hold the directory")(io::ErrorKind::Other.into()));
        };
        // The host's is above the one that it held before.
        close(&[directory.as_raw_fd(), control.as_raw_fd()])?;
        jail::forgo_capabilities();
        // An operator who is root connects to everyone's.
        jail::keep_capabilities(&[Capability::DacOverride])
            .map_err(CellError::host("cannot drop capabilities"))?;
        jail::restrict_paths(&[])?;
        jail::restrict_calls(ThreadClass::Door)?;
        apart::say_ready(control)?;
        let greeting = self.is_engine.then(|| format!("{cell}\n"));
        let mut number: u64 = 0;
        // Its end is the supervisor's.
        while matches!(nix::unistd::read(control, &mut [0]), Ok(1)) {
            number += 1;
            // In its network namespace there is nobody else who could have the name.
            let mark = format!("{}{number}", engine::MARK);
            let answered = match self.connect(&directory, greeting.as_deref(), &mark) {
                Ok(stream) => send_descriptor(control, &stream),
                Err(errno) => {
                    let word = u8::try_from(errno as i32).unwrap_or(u8::MAX);
                    nix::unistd::write(control, &[word]).map(drop).map_err(io::Error::from)
                }
            };
            if answered.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// A connection to who listens now, from an end that is called `mark`. The working directory
    /// holds this process's descriptors ([`FolderRoot`]).
    fn connect(
        &self,
        directory: &OwnedFd,
        greeting: Option<&str>,
        mark: &str,
    ) -> nix::Result<OwnedFd> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let found = openat(directory, self.name.as_os_str(), flags, Mode::empty())?;
        let stream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&stream, sockopt::SendTimeout, &TimeVal::new(ROOM_MAX_SECONDS, 0))?;
        // Before anybody can take it for the operator's.
        bind(stream.as_raw_fd(), &UnixAddr::new_abstract(mark.as_bytes())?)?;
        let name = found.as_raw_fd().to_string();
        connect(stream.as_raw_fd(), &UnixAddr::new(name.as_str())?)?;
        if let Some(greeting) = greeting {
            // So little always fits.
            nix::unistd::write(&stream, greeting.as_bytes())?;
        }
        Ok(stream)
    }

    /// What the supervisor has of it.
    pub(crate) fn hand_over(self) -> Result<Door, CellError> {
        let at = self.granted.host.display();
        let gone = || CellError::Guest(format!("nobody connects to {at} any more"));
        let control = self.control.ok_or_else(gone)?;
        let (name, number) = (self.granted.name(), self.file.number);
        Ok(Door { control, name, number })
    }
}

/// Whether it is a socket of streams, to which the operator may connect. Its server, if there is
/// one, hears nothing of it: a datagram's sender does not connect.
fn check(found: &Found, granted: &Folder) -> Result<(), CellError> {
    let at = granted.host.display();
    let probe = || -> nix::Result<()> {
        let end = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        let name = format!("/proc/self/fd/{}", found.as_fd().as_raw_fd());
        connect(end.as_raw_fd(), &UnixAddr::new(name.as_str())?)
    };
    match probe() {
        Ok(()) => Err(CellError::Usage(format!(
            "{at} is a socket of datagrams; a cell can have a socket of streams only (--volume)"
        ))),
        // Of another kind, or without a server now.
        Err(Errno::EPROTOTYPE | Errno::ECONNREFUSED) => Ok(()),
        Err(errno) => {
            let what = format!("cannot connect to the socket {at} (--volume)");
            Err(CellError::host(what)(errno.into()))
        }
    }
}

/// A socket to which connections can be had, as the supervisor holds it.
pub(crate) struct Door {
    control: UnixStream,
    /// The capability's.
    pub name: String,
    pub number: u32,
}

impl Door {
    #[cfg(test)]
    pub fn of(control: UnixStream, name: &str, number: u32) -> Self {
        Self { control, name: name.to_owned(), number }
    }

    /// One more connection.
    ///
    /// # Errors
    /// As of connect(2); `UnexpectedEof` when the process is gone.
    pub fn connect(&self) -> io::Result<UnixStream> {
        io::Write::write_all(&mut &self.control, &[0])?;
        match receive_answer(&self.control)? {
            Some(Ok(stream)) => Ok(stream.into()),
            Some(Err(word)) => Err(io::Error::from_raw_os_error(word.into())),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Has the process end. Nobody is connected any more.
    pub fn close(&self) {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
    }
}
