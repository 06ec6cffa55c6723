//! Fresh namespaces and the process that starts in them.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::unistd::{ForkResult, Pid};

use super::{Group, JailError};

/// The user id of guest kernels when the operator is root: this base plus the
/// supervisor's pid, so that no two live cells share an id.
const CELL_ID_BASE: u32 = 1_000_000_000;

/// Which ids exist inside the cell's user namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdentityMap {
    /// 0 is the caller, 1 an otherwise unused id for the guest kernel.
    CallerAndCell,
    /// Only 0, the caller: all that an ordinary user may map.
    CallerOnly,
    /// All of the caller's, each as itself: of a root operator's folders.
    Everyone,
}

impl IdentityMap {
    /// What this process may do.
    pub fn for_caller() -> Self {
        if nix::unistd::geteuid().is_root() { Self::CallerAndCell } else { Self::CallerOnly }
    }

    /// That of a process that serves a folder of this process's operator.
    pub fn for_folder() -> Self {
        if nix::unistd::geteuid().is_root() { Self::Everyone } else { Self::CallerOnly }
    }

    fn write(self, pid: libc::pid_t) -> Result<(), JailError> {
        let cell_id = CELL_ID_BASE + pid as u32;
        let lines = |own: u32, file: &str| match self {
            Self::CallerAndCell => format!("0 {own} 1\n1 {cell_id} 1\n"),
            Self::CallerOnly => format!("0 {own} 1\n"),
            Self::Everyone => {
                everyone(&fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default())
            }
        };
        let put = |file: &'static str, text: &str| {
            fs::write(format!("/proc/{pid}/{file}"), text)
                .map_err(|source| JailError::IdentityMap { file, source })
        };
        if self == Self::CallerOnly {
            put("setgroups", "deny")?;
        }
        put("uid_map", &lines(nix::unistd::geteuid().as_raw(), "uid_map"))?;
        put("gid_map", &lines(nix::unistd::getegid().as_raw(), "gid_map"))
    }
}

/// The map by which all ids of a namespace with the map `own` are the same in one below it.
fn everyone(own: &str) -> String {
    let ranges = own.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace();
        let (first, _, count) = (numbers.next()?, numbers.next()?, numbers.next()?);
        Some(format!("{first} {first} {count}\n"))
    });
    ranges.collect()
}

/// Whether a new process starts in the host's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostNetwork {
    /// It is in an empty network from its first instruction on.
    Never,
    /// It starts there, leaves a dialer behind and leaves ([`leave_network`]).
    AtFirst,
    /// It stays there: a stage that asks others for something ([`super::stage`]).
    Kept,
}

/// Moves the caller, and what it starts later, into an empty network.
///
/// # Errors
/// [`JailError::Network`] where the host does not allow it (unshare(2)).
pub fn leave_network() -> Result<(), JailError> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
        .map_err(|errno| JailError::Network(errno.into()))
}

/// The process made by [`spawn`], as its parent sees it.
#[derive(Debug)]
pub struct Spawned {
    pub pid: libc::pid_t,
    /// Becomes readable when the process ends, whoever reaps it.
    pub pidfd: OwnedFd,
}

/// Forks the caller, which must have one thread. The child is in `group` once it has joined it
/// ([`Group::join`]), and where it can, from the start.
///
/// # Errors
/// The host's (clone3(2)).
pub fn fork_into(group: Option<&Group>) -> io::Result<ForkResult> {
    /// linux/sched.h; what libc has does not fit its type.
    const CLONE_INTO_CGROUP: u64 = 1 << 33;
    // SAFETY: clone_args is plain data; zero is valid for every field.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(birthplace) = group.and_then(Group::birthplace) {
        args.flags = CLONE_INTO_CGROUP;
        args.cgroup = birthplace.as_raw_fd() as u64;
    }
    // SAFETY: as in `spawn`: `args` has its true size, and the child has its own copy of
    // everything. The caller has one thread, so the child may do what any process may.
    match unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(ForkResult::Child),
        pid => Ok(ForkResult::Parent { child: Pid::from_raw(pid as libc::pid_t) }),
    }
}

/// Runs `body` as the first process of new namespaces with its pid as the host
/// sees it; its result is the exit status. Returns in the parent once the identity map is in place.
///
/// The caller must have one thread: the child is a plain copy of it.
///
/// # Errors
/// [`JailError::Namespaces`] where the host allows none (clone3(2)).
pub fn spawn(
    map: IdentityMap,
    network: HostNetwork,
    body: impl FnOnce(libc::pid_t) -> i32,
) -> Result<Spawned, JailError> {
    let (mut ours, mut theirs) = UnixStream::pair().map_err(JailError::Namespaces)?;
    let mut pidfd: libc::c_int = -1;
    // SAFETY: clone_args is plain data; zero is valid for every field.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = (libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_PIDFD) as u64;
    if network == HostNetwork::Never {
        args.flags |= libc::CLONE_NEWNET as u64;
    }
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    // SAFETY: `args` outlives the call and has its true size; without CLONE_VM
    // the child has its own copy of everything, as after fork(2). Needed
    // because neither libc nor nix wraps clone3.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
    match pid {
        -1 => Err(JailError::Namespaces(io::Error::last_os_error())),
        0 => {
            drop(ours);
            let mut own_pid = [0; size_of::<libc::pid_t>()];
            let mapped = theirs.read_exact(&mut own_pid).is_ok();
            drop(theirs);
            let status = if mapped { body(libc::pid_t::from_ne_bytes(own_pid)) } else { 125 };
            // SAFETY: _exit ends the process without running the parent's
            // destructors and exit handlers, which are not the child's to run.
            unsafe { libc::_exit(status) }
        }
        pid => {
            drop(theirs);
            let pid = pid as libc::pid_t;
            // SAFETY: clone3 succeeded with CLONE_PIDFD, so `pidfd` is a new
            // descriptor that nothing else owns.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            map.write(pid)?;
            // A failed write means that the child is gone; its end is seen
            // through the pidfd.
            let _ = ours.write_all(&pid.to_ne_bytes());
            Ok(Spawned { pid, pidfd })
        }
    }
}

/// Makes a tun device called `name` in the caller's network namespace, for packets of IP without a
/// header; it goes with the descriptor, which does not block.
///
/// # Errors
/// The host has no such devices, or one of that name (Documentation/networking/tuntap.rst).
pub fn make_tun(name: &str) -> io::Result<OwnedFd> {
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    // SAFETY: ifreq is plain data, for which zeroes are a valid value. Needed because it has no
    // constructor.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the descriptor is open and the structure, which the call reads and writes, outlives
    // it. Needed because nix has no such ioctl.
    let made = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    Errno::result(made)?;
    Ok(device.into())
}
