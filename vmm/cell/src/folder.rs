//! A folder of a `vm` cell: a process of its own serves it to the guest.
//!
//! ```text
//! plan: opened -> launch: process in its root, "ready" -> supervisor: its socket -> served
//!                                         end of access, end of the cell <──┘
//! ```
//! The process is started before the cell's record is made, from the operator's process, since it
//! has other ids than the cell: a root operator's has all of the host's, with the few capabilities
//! that giving files to others takes; any other has the operator's. What it is told comes by a
//! socket whose other end the supervisor holds, and it ends with that.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use exocell_agent::FolderMount;
use exocell_folders::{Descriptors, Folder as Served, Limits, Owners, Server, What};
use exocell_images::walk::Found;
use exocell_vmm::devices::fs::END;
use exocell_vmm::devices::{DeviceLoop, FsConfig};
use exocell_vmm::jail::{self, Capability, FolderRoot, IdentityMap, PathAccess, ThreadClass};
use exocell_vmm::platform::PlatformKind;
use exocell_xgate::{CapabilitySet, Folder, Rights};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::descriptors::{receive_descriptor, send_descriptor};
use crate::{CellError, CellSpec, Layout, Record, apart, granted};

/// How long a process may take to confirm the end of access.
const END_MAX: Duration = Duration::from_secs(5);
/// How long its process may take to hear that access ended, or that its cell did, before it is
/// ended in the middle of what it does.
const HEARD_MAX: Duration = Duration::from_secs(2);
/// Descriptors that a root operator's process may have, if the host has that many.
const DESCRIPTORS_MAX: u64 = 1 << 20;

/// A folder or a file of the host, opened.
pub struct Share {
    held: File,
    granted: Folder,
    is_file: bool,
    tag: String,
    /// The other end of its process's socket, once there is one.
    control: Option<UnixStream>,
    /// What the cell may take of the host's disk by it, if that is less than by others.
    grown_bytes_max: Option<u64>,
    /// Whether what the host mounts there later comes to it.
    grows: bool,
}

/// The tag of a cell's depot.
pub(crate) const DEPOT: &str = "depot";

impl Share {
    /// Opens every folder of the grant of a `vm` cell, as they were found.
    pub fn open_all(
        layout: &Layout,
        caps: &CapabilitySet,
        found: Vec<(Found, Folder)>,
    ) -> Result<Vec<Self>, CellError> {
        let open = |(number, (found, granted)): (u32, (Found, Folder))| {
            // One that nobody named: the image may have asked for it, and nobody granted it.
            let name = granted.host.file_name().unwrap_or_default().to_string_lossy();
            let real = |path: &Path| path.canonicalize().ok();
            let is_nameless = CellSpec::is_id(&name)
                && real(&granted.host) == real(&layout.volumes().join(&*name));
            let share = Self::open(&found, granted, format!("folder{number}"))?;
            let grown_bytes_max = caps.disk_bytes().filter(|_| is_nameless);
            Ok(Self { grown_bytes_max, ..share })
        };
        (0..).zip(found).map(open).collect::<Result<_, CellError>>()
    }

    fn open(found: &Found, granted: Folder, tag: String) -> Result<Self, CellError> {
        let at = granted.host.display();
        let kind = found.metadata().file_type();
        if !kind.is_dir() && !kind.is_file() {
            return Err(CellError::Usage(format!(
                "{at} is no folder, regular file or socket; give one of these (--volume)"
            )));
        }
        // Who may not read it here may not have it read there.
        let held = found
            .open(granted.rights.contains(Rights::WRITE))
            .map_err(granted::unopened(&granted))?;
        Ok(Self {
            held,
            granted,
            is_file: kind.is_file(),
            tag,
            control: None,
            grown_bytes_max: None,
            grows: false,
        })
    }

    /// Opens a directory that holds the roots and mounts of a cell's containers.
    ///
    /// # Errors
    /// There is none, or a link is on the way.
    pub(crate) fn open_depot(path: &Path) -> Result<Self, CellError> {
        let failed = CellError::host(format!("cannot open the depot {}", path.display()));
        let found = Found::real(path).map_err(failed)?;
        let rights = Rights::READ | Rights::WRITE;
        let granted = Folder { host: path.to_owned(), guest: "/".into(), rights };
        Ok(Self { grows: true, ..Self::open(&found, granted, DEPOT.to_owned())? })
    }

    /// How the guest mounts them. Some get what the image has there, some are copies, as `spec` says.
    pub fn mounts<'a>(shares: impl Iterator<Item = &'a Self>, spec: &CellSpec) -> Vec<FolderMount> {
        shares
            .map(|share| FolderMount {
                tag: share.tag.clone(),
                guest_path: share.granted.guest.display().to_string(),
                read_only: !share.is_writable(),
                is_file: share.is_file,
                fill: share.is_writable()
                    && !share.is_file
                    && spec.fills.contains(&share.granted.guest),
                copied: spec.copies.get(&share.granted.guest).copied(),
                socket: None,
            })
            .collect()
    }

    pub fn tag(&self) -> &str {
        &self.tag
    }

    pub fn is_writable(&self) -> bool {
        self.granted.rights.contains(Rights::WRITE)
    }

    /// Starts the process that serves it to a guest of `platform` whose memory is `memory`, and
    /// waits until that is in its root. The caller must have one thread.
    ///
    /// # Errors
    /// Says what the host did not allow.
    pub fn start(
        &mut self,
        platform: PlatformKind,
        memory: &File,
        weight: u32,
    ) -> Result<(), CellError> {
        let limits = raise_descriptors();
        let what = format!("the folder {}", self.granted.host.display());
        let guest = (platform, memory);
        let serve = |control: &UnixStream, identity| self.serve(guest, control, identity, weight);
        let started = apart::start(&what, serve);
        if let Some((soft, hard)) = limits {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, soft, hard);
        }
        self.control = Some(started?);
        Ok(())
    }

    /// The body of the process.
    fn serve(
        &self,
        guest @ (_, memory): (PlatformKind, &File),
        control: &UnixStream,
        identity: IdentityMap,
        weight: u32,
    ) -> Result<(), CellError> {
        let host = |what: &str| {
            let what = what.to_owned();
            move |error: nix::errno::Errno| CellError::host(what)(error.into())
        };
        apart::leave_operator()?;
        let kept = [self.held.as_raw_fd(), memory.as_raw_fd(), control.as_raw_fd()];
        jail::close_all_but(&kept).map_err(CellError::host("cannot close descriptors"))?;
        nix::sys::prctl::set_name(c"folder").map_err(host("cannot be named"))?;
        apart::set_priority(weight);
        nix::sys::stat::umask(nix::sys::stat::Mode::empty());
        let root =
            FolderRoot::enter(&self.granted.host, &self.held, self.is_writable(), self.grows)?;
        let access = if self.is_writable() { PathAccess::Write } else { PathAccess::Read };
        jail::forgo_capabilities();
        let needed: &[Capability] = match identity {
            IdentityMap::Everyone => &[
                Capability::Chown,
                Capability::DacOverride,
                Capability::Fowner,
                Capability::Fsetid,
            ],
            _ => &[Capability::DacOverride, Capability::Fowner],
        };
        jail::keep_capabilities(needed).map_err(CellError::host("cannot drop capabilities"))?;
        jail::restrict_paths(&root.grants(access))?;
        let mut server = self.server(root, identity)?;
        apart::say_ready(control)?;
        // Nobody is there to be served if the supervisor did not come up.
        let Ok(listener) = receive_descriptor(control) else { return Ok(()) };
        if self.is_writable() {
            let Ok(tally) = receive_descriptor(control) else { return Ok(()) };
            let failed = CellError::host("cannot read what the cell took of the disk");
            server.go_on(tally).map_err(|errno| failed(errno.into()))?;
        }
        let _ = serve(server, guest, listener, control, &self.tag);
        Ok(())
    }

    fn limits(&self, descriptors: usize) -> Limits {
        let limits = Limits::within(descriptors);
        let grown_bytes_max = self.grown_bytes_max.unwrap_or(limits.grown_bytes_max);
        Limits { grown_bytes_max, ..limits }
    }

    fn server(&self, root: FolderRoot, identity: IdentityMap) -> Result<Server, CellError> {
        let FolderRoot { root, file, descriptors } = root;
        let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
        let rights = exocell_folders::Rights {
            read: self.granted.rights.contains(Rights::READ),
            write: self.is_writable(),
        };
        let served = Served {
            what: match file {
                Some(file) => What::File { file, empty: root },
                None => What::Directory(root),
            },
            rights,
            owners: match identity {
                IdentityMap::Everyone => Owners::Host,
                _ => Owners::Squashed,
            },
            limits: self.limits(usize::try_from(soft).unwrap_or(usize::MAX)),
            descriptors: Descriptors::of_jail(descriptors),
            metrics: Arc::default(),
        };
        Server::new(served).map_err(|error| CellError::Usage(error.to_string()))
    }

    /// Hands the device's socket over, behind which the folder is served from now on. What the guest
    /// takes of the disk is written down in the working directory, the cell's record.
    ///
    /// # Errors
    /// The host's.
    pub(crate) fn hand_over(self, listener: &UnixListener) -> Result<Access, CellError> {
        let gone =
            || CellError::Guest(format!("nobody serves {} any more", self.granted.host.display()));
        let control = self.control.as_ref().ok_or_else(gone)?;
        send_descriptor(control, listener)
            .map_err(CellError::host("cannot hand a folder's socket over"))?;
        if self.is_writable() {
            let mut options = exocell_images::private::options();
            let options = options.read(true).write(true).create(true).truncate(false);
            options
                .open(format!("{}.{}", self.tag, Record::TAKEN))
                .and_then(|tally| send_descriptor(control, &tally))
                .map_err(CellError::host("cannot write down what the cell takes of the disk"))?;
        }
        let writable = self.is_writable();
        let control = self.control.ok_or_else(|| CellError::Guest("no folder".to_owned()))?;
        Ok(Access { control, name: self.granted.name(), guest: self.granted.guest, writable })
    }
}

/// Serves until the cell ends; returns only where the host does not allow it.
fn serve(
    server: Server,
    (platform, memory): (PlatformKind, &File),
    listener: OwnedFd,
    control: &UnixStream,
    tag: &str,
) -> Result<(), CellError> {
    let failed = |error: exocell_vmm::devices::DeviceError| CellError::Guest(error.to_string());
    let control = control.try_clone().map_err(CellError::host("dup"))?;
    let mut device_loop = DeviceLoop::for_guest_of(platform, memory).map_err(failed)?;
    let told = control.try_clone().map_err(CellError::host("dup"))?;
    let gone = Box::new(|| end_now());
    let config = FsConfig { server, tag: tag.to_owned(), control, gone };
    device_loop.add_fs(UnixListener::from(listener), config).map_err(failed)?;
    std::thread::Builder::new()
        .name("folder-end".to_owned())
        .spawn(move || {
            if jail::restrict_calls(ThreadClass::Folder).is_ok() {
                await_unheard(&told, HEARD_MAX);
            }
            end_now();
        })
        .map_err(CellError::host("cannot start a thread"))?;
    jail::restrict_calls(ThreadClass::Folder)?;
    device_loop.run().map_err(failed)
}

/// Returns when what was said by `control` has waited for `max` and nobody has taken it. The thread
/// that serves takes it between two requests; one request may last, and what it does is not
/// permitted any more.
fn await_unheard(control: &UnixStream, max: Duration) {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let is_said = |wait: PollTimeout| {
        let mut watched = [PollFd::new(control.as_fd(), PollFlags::POLLIN)];
        !matches!(poll(&mut watched, wait), Ok(0) | Err(nix::errno::Errno::EINTR))
    };
    let max = PollTimeout::try_from(max).unwrap_or(PollTimeout::MAX);
    loop {
        if !is_said(PollTimeout::NONE) {
            continue;
        }
        let _ = poll(&mut [], max);
        if is_said(PollTimeout::ZERO) {
            return;
        }
    }
}

/// Ends this process, whatever its threads do: a thread in the middle of a copy, too.
fn end_now() -> ! {
    // SAFETY: the call takes a number and does not return. Needed because exit(3) would first run
    // handlers, which may wait for the thread that is to be stopped.
    unsafe { libc::_exit(0) }
}

/// Lets what is started next have as many descriptors as it may; the limits before that.
fn raise_descriptors() -> Option<(u64, u64)> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let all = std::fs::read_to_string("/proc/sys/fs/nr_open").ok();
    let all = all.and_then(|text| text.trim().parse().ok()).unwrap_or(hard);
    let wanted = DESCRIPTORS_MAX.min(all).max(hard);
    // Only root may have more than it has.
    let raised = setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted)
        .or_else(|_| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    raised.ok().map(|()| (soft, hard))
}

/// Whether the other end of a socket is closed.
fn is_end(kind: std::io::ErrorKind) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// A folder that is served, as the supervisor holds it.
pub(crate) struct Access {
    control: UnixStream,
    pub name: String,
    pub guest: std::path::PathBuf,
    pub writable: bool,
}

impl Access {
    /// Ends all access: no request is carried out any more when this returns.
    ///
    /// # Errors
    /// Its process neither confirms that nor ends: it waits for a disk that does not answer, and
    /// ends when that does.
    pub fn end(&self) -> Result<(), String> {
        let mut control = &self.control;
        let _ = self.control.set_read_timeout(Some(END_MAX));
        let confirmed = control.write_all(&[END]).and_then(|()| control.read_exact(&mut [0]));
        match confirmed {
            Ok(()) => Ok(()),
            // It has ended as a whole.
            Err(error) if is_end(error.kind()) => Ok(()),
            Err(_) => {
                self.close();
                Err(format!(
                    "access to the folder {} ends when the disk that it is on answers: its process \
                     is in the middle of a request",
                    self.guest.display()
                ))
            }
        }
    }

    /// Has the process end, which is the same for the guest.
    fn close(&self) {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
    }

    /// The same, and waits until what was under way is done.
    pub fn finish(&self) {
        let _ = self.control.shutdown(std::net::Shutdown::Write);
        let _ = self.control.set_read_timeout(Some(END_MAX));
        let _ = (&self.control).read(&mut [0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_nobody_hears_is_noticed() {
        let (mut ours, control) = UnixStream::pair().unwrap();
        let device = control.try_clone().unwrap();
        let (said, noticed) = std::sync::mpsc::channel();
        let watch = std::thread::spawn(move || {
            await_unheard(&control, Duration::from_millis(1));
            said.send(()).unwrap();
        });
        assert!(noticed.try_recv().is_err());
        ours.write_all(&[END]).unwrap();
        // Nobody reads it.
        watch.join().unwrap();
        noticed.recv().unwrap();
        drop(device);
        // Nor that the cell is gone.
        let (ours, control) = UnixStream::pair().unwrap();
        drop(ours);
        await_unheard(&control, Duration::from_millis(1));
    }

    #[test]
    fn an_end_of_access_is_what_its_process_says_or_its_own_end() {
        let access = |control| Access {
            control,
            name: "folder:/f".to_owned(),
            guest: "/f".into(),
            writable: true,
        };
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&[END]).unwrap();
        assert_eq!(access(ours).end(), Ok(()));
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert_eq!(access(ours).end(), Ok(()));
    }
}
