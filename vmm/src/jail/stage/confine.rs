//! How a stage shuts its jail: each lock in the order in which it can be made.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::{set_name, set_pdeathsig};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid, setsid};

use super::Stage;
use super::order::Shown;
use super::warden::Settings;
use crate::jail::{
    IdentityMap, JailRoot, PathAccess, PathGrant, ThreadClass, forgo_capabilities,
    keep_capabilities, restrict_calls, restrict_paths, restrict_to_sockets,
};

/// Where the empty root is mounted while it is made: it is there on every host.
const MOUNT_POINT: &str = "/proc";
/// The cell's id of [`IdentityMap::CallerAndCell`].
const OTHER_ID: u32 = 1;
/// Between 0 and 1,000, the first to go (proc_pid_oom_score_adj(5)).
const OOM_SCORE: &str = "500";
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
    if stage.class != ThreadClass::Front {
        // A host without memory takes it before what serves others too. One that refuses may not.
        let _ = fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    }
    let mapped_bytes = mapped_bytes().map_err(|error| format!("cannot read /proc: {error}"))?;
    build_root(&settings.shown)?;
    forgo_capabilities();
    if map == IdentityMap::CallerAndCell && !settings.keeps_id {
        step("cannot become nobody", become_other())?;
    }
    step("cannot drop capabilities", keep_capabilities(&[]))?;
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

fn build_root(shown: &[Shown]) -> Result<(), String> {
    let root = JailRoot::new(Path::new(MOUNT_POINT)).map_err(|error| error.to_string())?;
    for one in shown {
        root.show(one).map_err(|error| error.to_string())?;
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

fn limit(settings: &Settings, mapped_bytes: u64) -> io::Result<()> {
    let memory = settings.memory_bytes.saturating_add(mapped_bytes);
    let mut limits = vec![
        (Resource::RLIMIT_DATA, memory),
        (Resource::RLIMIT_FSIZE, settings.file_bytes),
        (Resource::RLIMIT_NOFILE, settings.open_files),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_MEMLOCK, 0),
        (Resource::RLIMIT_MSGQUEUE, 0),
    ];
    limits.extend((!settings.reserves).then_some((Resource::RLIMIT_AS, memory)));
    limits.extend(settings.processes.map(|most| (Resource::RLIMIT_NPROC, most)));
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
    let open = |shown: &Shown| {
        let path = &shown.path;
        // Only to name it: what may be done with it is the user id's to say.
        let opened = File::options().read(true).custom_flags(libc::O_PATH).open(path);
        let opened = opened.map_err(|error| format!("cannot open {}: {error}", path.display()))?;
        let access = if shown.writable { PathAccess::Write } else { PathAccess::Read };
        Ok((opened, access))
    };
    let shown = settings.shown.iter().map(open).collect::<Result<Vec<_>, String>>()?;
    let shown = shown.iter().map(|(file, access)| PathGrant { at: file.as_fd(), access: *access });
    let below = given.iter().zip(&settings.below);
    let below = below.filter_map(|(at, access)| Some(PathGrant { at: *at, access: (*access)? }));
    let grants: Vec<_> = shown.chain(below).collect();
    let restricted = match settings.keeps_network {
        true => restrict_to_sockets(&grants),
        false => restrict_paths(&grants),
    };
    restricted.map_err(|error| error.to_string())
}
