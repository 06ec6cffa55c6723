//! How a stage shuts its jail: each lock in the order in which it can be made.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::{set_name, set_pdeathsig};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid, setsid};

use super::Stage;
use super::warden::Settings;
use crate::jail::{
    IdentityMap, JailRoot, PathAccess, PathGrant, restrict_calls, restrict_paths,
    restrict_to_sockets,
};

/// Where the empty root is mounted while it is made: it is there on every host.
const MOUNT_POINT: &str = "/proc";
/// The cell's id of [`IdentityMap::CallerAndCell`].
const OTHER_ID: u32 = 1;
/// Of one page.
const PAGE_BYTES: u64 = 4096;

/// Confines this process; the error says which lock failed, and why.
pub(super) fn confine(
    settings: &Settings,
    stage: &Stage,
    map: IdentityMap,
    given: &[BorrowedFd<'_>],
    warden: &OwnedFd,
) -> Result<(), String> {
    let step = |what: &str, done: io::Result<()>| done.map_err(|error| format!("{what}: {error}"));
    step("cannot be bound to its warden", die_with(warden))?;
    step("cannot leave the session", setsid().map(drop).map_err(io::Error::from))?;
    step("cannot be named", name(stage.name))?;
    let mapped_bytes = mapped_bytes().map_err(|error| format!("cannot read /proc: {error}"))?;
    build_root(&settings.shown)?;
    forgo_capabilities();
    if map == IdentityMap::CallerAndCell && !settings.keeps_id {
        step("cannot become nobody", become_other())?;
    }
    step("cannot drop capabilities", drop_capabilities())?;
    // A change of ids takes the signal away (prctl(2)).
    step("cannot be bound to its warden", die_with(warden))?;
    step("cannot limit resources", limit(settings, mapped_bytes))?;
    restrict(settings, given)?;
    restrict_calls(stage.class).map_err(|error| error.to_string())
}

fn name(name: &str) -> io::Result<()> {
    let name = std::ffi::CString::new(name)?;
    Ok(set_name(&name)?)
}

/// Has the host kill this process when its parent ends, and looks whether that was before.
fn die_with(warden: &OwnedFd) -> io::Result<()> {
    set_pdeathsig(Signal::SIGKILL)?;
    let mut ends = [PollFd::new(warden.as_fd(), PollFlags::POLLIN)];
    poll(&mut ends, PollTimeout::ZERO)?;
    match ends[0].any() {
        Some(false) => Ok(()),
        _ => Err(io::Error::other("it has ended")),
    }
}

/// All that this process has mapped: the program and its libraries.
fn mapped_bytes() -> io::Result<u64> {
    let statm = fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split(' ').next().and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.ok_or(io::ErrorKind::InvalidData)? * PAGE_BYTES)
}

fn build_root(shown: &[std::path::PathBuf]) -> Result<(), String> {
    let root = JailRoot::new(Path::new(MOUNT_POINT)).map_err(|error| error.to_string())?;
    for path in shown {
        root.show(path).map_err(|error| error.to_string())?;
    }
    root.seal().map_err(|error| error.to_string())
}

/// Takes the id that no other process of the host has.
fn become_other() -> io::Result<()> {
    setgroups(&[])?;
    let (gid, uid) = (Gid::from_raw(OTHER_ID), Uid::from_raw(OTHER_ID));
    setresgid(gid, gid, gid)?;
    Ok(setresuid(uid, uid, uid)?)
}

/// Empties the bounding set: no capability comes back (capabilities(7)).
fn forgo_capabilities() {
    // Up to the last one that this host has.
    for capability in 0..64 {
        // SAFETY: prctl(2) PR_CAPBSET_DROP takes an integer. Needed because nix has no word for it.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            break;
        }
    }
}

/// Gives up all capabilities that this process has.
fn drop_capabilities() -> io::Result<()> {
    /// `struct __user_cap_header_struct` of linux/capability.h.
    #[repr(C)]
    struct Header {
        version: u32,
        pid: libc::c_int,
    }
    /// _LINUX_CAPABILITY_VERSION_3: two words for each of three sets.
    const VERSION: u32 = 0x2008_0522;
    let header = Header { version: VERSION, pid: 0 };
    let none = [0_u32; 6];
    // SAFETY: header and sets have the sizes of their version and outlive the call, which changes
    // this thread's credentials only. Needed because nix has no word for it.
    let done = unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn limit(settings: &Settings, mapped_bytes: u64) -> io::Result<()> {
    let memory = settings.memory_bytes;
    let mut limits = vec![
        (Resource::RLIMIT_AS, memory.saturating_add(mapped_bytes)),
        (Resource::RLIMIT_DATA, memory.saturating_add(mapped_bytes)),
        (Resource::RLIMIT_FSIZE, settings.file_bytes),
        (Resource::RLIMIT_NOFILE, settings.open_files),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_MEMLOCK, 0),
        (Resource::RLIMIT_MSGQUEUE, 0),
    ];
    limits.extend(settings.cpu_seconds.map(|seconds| (Resource::RLIMIT_CPU, seconds)));
    for (resource, most) in limits {
        let (_, allowed) = nix::sys::resource::getrlimit(resource)?;
        // A limit that is lower already stays.
        let most = most.min(allowed);
        setrlimit(resource, most, most)?;
    }
    Ok(())
}

/// Landlock: what is shown, and below the directories that were given.
fn restrict(settings: &Settings, given: &[BorrowedFd<'_>]) -> Result<(), String> {
    let open = |path: &std::path::PathBuf| {
        File::open(path).map_err(|error| format!("cannot open {}: {error}", path.display()))
    };
    let shown = settings.shown.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let shown = shown.iter().map(|file| PathGrant { at: file.as_fd(), access: PathAccess::Read });
    let below = given.iter().zip(&settings.below);
    let below = below.filter_map(|(at, access)| Some(PathGrant { at: *at, access: (*access)? }));
    let grants: Vec<_> = shown.chain(below).collect();
    let restricted = match settings.keeps_network {
        true => restrict_to_sockets(&grants),
        false => restrict_paths(&grants),
    };
    restricted.map_err(|error| error.to_string())
}
