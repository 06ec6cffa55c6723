//! Where programs live: a pid namespace of their own, below this process's.
//!
//! ```text
//! pid namespace of the guest kernel      pid namespace of programs
//!   1 init: agent, reaper ── forks ────────> 7 program
//!   9 ────────────────────────────────────── 1 first: takes in orphans
//! ```
//! No program, not even the cell's root, can name init: not stop, trace or kill it, nor read its
//! memory. The first process of their namespace is one that only waits: orphans become its children,
//! and are reaped by the kernel, because it ignores SIGCHLD (wait(2)). The root can end that one, by
//! reboot(2) for one (pid_namespaces(7)), and all programs with it.
//!
//! Programs see a /proc of their namespace. Init has its own, which lies nowhere in the file system
//! ([`crate::own_proc`]).

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::pipe2;

use crate::error::{Context, InitError};
use crate::{dev, own_proc, sys};

/// The namespace of programs.
pub struct Programs {
    own: File,
    theirs: File,
    /// The first process in it, as init knows it.
    pub first: i32,
    /// What that says of its /proc, until somebody asks. It gets there while the host is
    /// told that the cell is ready.
    told: Mutex<Option<File>>,
}

impl Programs {
    /// Makes the namespace, and the /proc that shows it. To be called while this process has one
    /// thread, and after all that needs the /proc of before.
    pub fn begin() -> Result<Self, InitError> {
        own_proc::take()?;
        let own = own_proc::open("self/ns/pid").context(|| "this process's pid namespace")?;
        let (told, tell) =
            pipe2(nix::fcntl::OFlag::O_CLOEXEC).context(|| "a pipe to the first process")?;
        unshare(CloneFlags::CLONE_NEWPID).context(|| "making a pid namespace for programs")?;
        let first = match sys::fork_alone().context(|| "starting the first process")? {
            Some(pid) => pid,
            None => be_first(tell.into()),
        };
        drop(tell);
        let theirs =
            own_proc::open(&format!("{first}/ns/pid")).context(|| "the programs' pid namespace")?;
        setns(&own, CloneFlags::CLONE_NEWPID).context(|| "leaving the programs' namespace")?;
        // Not for lack of memory either.
        own_proc::write(&format!("{first}/oom_score_adj"), "-1000");
        Ok(Self { own, theirs, first, told: Mutex::new(Some(told.into())) })
    }

    /// Whether the first process is at its end: it then ends all others.
    pub fn are_ending(&self) -> bool {
        is_ending(&own_proc::read(&format!("{}/status", self.first)))
    }

    /// Waits until programs can run in it.
    pub fn await_proc(&self) -> Result<(), InitError> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let mut problem = String::new();
        if let Some(mut told) = told.take() {
            let _ = told.read_to_string(&mut problem);
        }
        match problem.is_empty() {
            true => Ok(()),
            false => Err(InitError::guest(format!("the programs' own /proc: {problem}"))),
        }
    }

    /// Runs `fork` so that its child is in the namespace.
    pub fn within<T>(&self, fork: impl FnOnce() -> nix::Result<T>) -> nix::Result<T> {
        setns(self.theirs.as_fd(), CloneFlags::CLONE_NEWPID)?;
        let forked = fork();
        // Without this the thread could start no other one.
        setns(self.own.as_fd(), CloneFlags::CLONE_NEWPID)?;
        forked
    }
}

/// Whether the process whose proc_pid_status(5) this is has no memory left, or SIGKILL to take.
fn is_ending(status: &str) -> bool {
    const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);
    let pending = |name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    let has_memory = status.lines().any(|line| line.starts_with("VmSize:"));
    !has_memory || (pending("SigPnd:") | pending("ShdPnd:")) & SIGKILL != 0
}

/// The first process of the namespace: mounts its /proc, says what went wrong, and waits.
fn be_first(mut tell: File) -> ! {
    if let Err(error) = dev::mount_proc() {
        let _ = tell.write_all(error.to_string().as_bytes());
    }
    drop(tell);
    sys::wait_for_ever()
}

#[cfg(test)]
mod tests {
    use super::is_ending;

    #[test]
    fn a_process_ends_with_its_memory_or_by_a_signal_that_is_on_its_way() {
        let alive =
            "Name:\tinit\nVmSize:\t 100 kB\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n";
        assert!(!is_ending(alive));
        assert!(is_ending(&alive.replace("VmSize:", "x")));
        assert!(is_ending(
            &alive.replace("SigPnd:\t0000000000000000", "SigPnd:\t0000000000000100")
        ));
        assert!(is_ending(""));
    }
}
