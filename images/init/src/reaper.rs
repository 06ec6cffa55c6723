//! The one place that waits for children.
//!
//! Orphans of the whole cell end up here, so no session may call `waitpid`
//! itself. A child is started while the table is locked, and a dead child is
//! reaped while the table is locked: a process id in the table is therefore
//! never one that was used again.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{own_proc, sys};

/// How a child ended, and a descriptor that becomes readable when it has.
pub struct Exit {
    event: EventFd,
    code: AtomicU32,
    /// By which it ended although no signal that it sent itself could end it; 0 for none.
    by_reboot: AtomicU8,
}

const RUNNING: u32 = u32::MAX;

impl Exit {
    fn new() -> nix::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?;
        Ok(Self { event, code: AtomicU32::new(RUNNING), by_reboot: AtomicU8::new(0) })
    }

    /// The exit code, once there is one.
    pub fn code(&self) -> Option<u8> {
        u8::try_from(self.code.load(Ordering::Acquire)).ok()
    }

    /// Why all programs have ended, if their root has made them: reboot(2) in a pid namespace
    /// ends its first process by a signal that could not end it otherwise (pid_namespaces(7)).
    pub fn by_reboot(&self) -> Option<String> {
        let how = match i32::from(self.by_reboot.load(Ordering::Acquire)) {
            libc::SIGHUP => "to restart it",
            libc::SIGINT => "to power it off",
            _ => return None,
        };
        Some(format!("the cell's root ended all of its programs, by reboot(2), {how}"))
    }

    fn set(&self, code: u8) {
        self.code.store(u32::from(code), Ordering::Release);
        let _ = self.event.write(1);
    }
}

impl AsFd for Exit {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[derive(Default)]
struct Table {
    waiting: HashMap<i32, Arc<Exit>>,
    /// The pids by which programs know themselves, in which container, and ours for them.
    shown: HashMap<(u32, i32), i32>,
    /// The first processes of containers' pid namespaces.
    firsts: HashMap<i32, First>,
    /// Counts up at every start, so that the reaper notices new children.
    started: u64,
    childless: bool,
}

/// The first process of a pid namespace. The kernel lets no signal end it that it does not handle,
/// not even init's, but for SIGKILL; an operator's ends it like any other program.
#[derive(Default)]
struct First {
    /// The signal that SIGKILL stands for.
    ended_by: Option<u8>,
}

/// The table of children and their reaper.
#[derive(Default)]
pub struct Reaper {
    table: Mutex<Table>,
    changed: Condvar,
}

impl Reaper {
    /// Starts the thread that reaps.
    pub fn start() -> io::Result<Arc<Self>> {
        let reaper = Arc::new(Self::default());
        let worker = Arc::clone(&reaper);
        thread::Builder::new()
            .name("reaper".into())
            .stack_size(64 * 1024)
            .spawn(move || worker.work())?;
        Ok(reaper)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `start`, which makes a child, and watches the child.
    pub fn spawn<E: From<nix::Error>>(
        &self,
        start: impl FnOnce() -> Result<i32, E>,
    ) -> Result<(i32, Arc<Exit>), E> {
        let exit = Arc::new(Exit::new()?);
        let mut table = self.table();
        table.started += 1;
        table.childless = false;
        let started = start();
        if let Ok(pid) = started {
            table.waiting.insert(pid, Arc::clone(&exit));
        }
        self.changed.notify_all();
        Ok((started?, exit))
    }

    /// Runs `make`, which has the child `helper` make another child of this process, and reaps
    /// the helper; watches the other one in its stead.
    pub fn replace(
        &self,
        helper: i32,
        make: impl FnOnce() -> nix::Result<i32>,
    ) -> nix::Result<(i32, Arc<Exit>)> {
        let exit = Arc::new(Exit::new()?);
        let mut table = self.table();
        // One that is dead and reaped may have left its number to another.
        table.waiting.remove(&helper).ok_or(Errno::ECHILD)?;
        table.started += 1;
        table.childless = false;
        let made = make();
        if let Ok(pid) = made {
            table.waiting.insert(pid, Arc::clone(&exit));
        }
        self.changed.notify_all();
        Ok((made?, exit))
    }

    /// Signals a child that was spawned here and has not been reaped. A first process that would
    /// not notice is ended, as the signal would end any other.
    pub fn signal(&self, pid: i32, number: u8) -> nix::Result<()> {
        for look in 0..LOOKS {
            let mut table = self.table();
            if !table.waiting.contains_key(&pid) {
                return if look == 0 { Err(Errno::ESRCH) } else { Ok(()) };
            }
            let first = table.firsts.get_mut(&pid);
            let fate = first.as_ref().map_or(Fate::Noticed, |_| Fate::of(pid, number));
            match (fate, first) {
                (Fate::Dropped, Some(first)) => {
                    first.ended_by = Some(number);
                    return sys::kill(pid, libc::SIGKILL as u8);
                }
                (Fate::Open, _) if look > 0 => {}
                (_, _) if look > 0 => return Ok(()),
                (Fate::Open, _) => sys::kill(pid, number)?,
                (_, _) => return sys::kill(pid, number),
            }
            drop(table);
            thread::sleep(LOOK_PAUSE);
        }
        Ok(())
    }

    /// `pid` is the first process of a pid namespace.
    pub fn watch_first(&self, pid: i32) {
        let mut table = self.table();
        if table.waiting.contains_key(&pid) {
            table.firsts.insert(pid, First::default());
        }
    }

    /// `pid` knows itself as `shown` in its container.
    pub fn show(&self, pid: i32, shown: (u32, i32)) {
        let mut table = self.table();
        if table.waiting.contains_key(&pid) {
            table.shown.insert(shown, pid);
        }
    }

    /// As [`Self::signal`], by the pid that the child knows itself by.
    pub fn signal_shown(&self, shown: (u32, i32), number: u8) -> nix::Result<()> {
        let pid = self.table().shown.get(&shown).copied().ok_or(Errno::ESRCH)?;
        self.signal(pid, number)
    }

    /// Signals the process group of a child, by the pid that the child knows itself by. It leads
    /// the group for as long as it has not been reaped.
    pub fn signal_group_shown(&self, shown: (u32, i32), number: u8) -> nix::Result<()> {
        let table = self.table();
        let pid = *table.shown.get(&shown).ok_or(Errno::ESRCH)?;
        match table.waiting.contains_key(&pid) && pid > 1 {
            true => sys::kill(-pid, number),
            false => Err(Errno::ESRCH),
        }
    }

    /// Waits until the cell has no process but this one; whether it came so far.
    pub fn wait_childless(&self, limit: Duration) -> bool {
        let table = self.table();
        let waited = self.changed.wait_timeout_while(table, limit, |table| !table.childless);
        let (table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        table.childless
    }

    fn work(&self) {
        loop {
            let started = self.table().started;
            match sys::wait_any() {
                Ok(pid) => self.reap(pid),
                Err(Errno::ECHILD) => self.wait_for_a_start(started),
                Err(_) => {}
            }
        }
    }

    fn reap(&self, pid: i32) {
        let mut table = self.table();
        let Ok(status) = sys::reap(pid) else { return };
        let Some(exit) = table.waiting.remove(&pid) else { return };
        table.shown.retain(|_, own| *own != pid);
        let mut code = status.exit_code();
        if let Some(first) = table.firsts.remove(&pid) {
            match (status.signal().map(i32::from), first.ended_by) {
                (Some(libc::SIGKILL), Some(number)) => code = 128 + number,
                (Some(number @ (libc::SIGHUP | libc::SIGINT)), _) => {
                    exit.by_reboot.store(number as u8, Ordering::Release);
                }
                _ => {}
            }
        }
        exit.set(code);
    }

    /// Without a child there is no orphan to come either: only a start can
    /// change that. `started` was read before the children were found missing.
    fn wait_for_a_start(&self, started: u64) {
        let mut table = self.table();
        if table.started == started {
            table.childless = true;
            self.changed.notify_all();
        }
        let same = |table: &mut Table| table.started == started;
        drop(self.changed.wait_while(table, same).unwrap_or_else(PoisonError::into_inner));
    }
}

/// What becomes of a signal for a first process that would end another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// The process handles it, ignores it or waits for it, or it would end nobody.
    Noticed,
    /// It waits until the process takes it, or lets it come and be dropped.
    Open,
    /// The kernel drops it.
    Dropped,
}

/// How often it is looked what becomes of one that waits.
const LOOKS: u32 = 25;
const LOOK_PAUSE: Duration = Duration::from_millis(2);

impl Fate {
    fn of(pid: i32, number: u8) -> Self {
        let fate = Self::by(&own_proc::read(&format!("{pid}/status")), number);
        // While a thread waits for signals it does not block them (sigtimedwait(2)).
        if fate == Self::Dropped && waits_for_signals(pid) { Self::Noticed } else { fate }
    }

    /// By proc_pid_status(5).
    fn by(status: &str, number: u8) -> Self {
        const HARMLESS: [i32; 8] = [
            libc::SIGCHLD,
            libc::SIGCONT,
            libc::SIGURG,
            libc::SIGWINCH,
            libc::SIGSTOP,
            libc::SIGTSTP,
            libc::SIGTTIN,
            libc::SIGTTOU,
        ];
        let in_set = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let mask = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
            mask.map(|mask| number > 0 && mask >> (number - 1) & 1 == 1)
        };
        match (in_set("SigIgn:"), in_set("SigCgt:")) {
            _ if number == 0 || HARMLESS.contains(&i32::from(number)) => Self::Noticed,
            (Some(false), Some(false)) => {
                let waits = ["SigBlk:", "SigPnd:", "ShdPnd:"].map(in_set).contains(&Some(true));
                if waits { Self::Open } else { Self::Dropped }
            }
            (_, _) => Self::Noticed,
        }
    }
}

/// Whether a thread of `pid` is in rt_sigtimedwait(2) (proc_pid_syscall(5)).
fn waits_for_signals(pid: i32) -> bool {
    let call = format!("{} ", libc::SYS_rt_sigtimedwait);
    own_proc::names(&format!("{pid}/task"))
        .iter()
        .any(|thread| own_proc::read(&format!("{pid}/task/{thread}/syscall")).starts_with(&call))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_process_is_ended_by_what_would_end_another() {
        let status = |blocked: u64, caught: u64| {
            format!("SigPnd:\t0\nSigBlk:\t{blocked:x}\nSigIgn:\t0\nSigCgt:\t{caught:016x}\n")
        };
        assert_eq!([15, 64].map(|number| Fate::by(&status(0, 0), number)), [Fate::Dropped; 2]);
        assert_eq!(Fate::by(&status(0, 1 << 14), 15), Fate::Noticed);
        assert_eq!(Fate::by(&status(1 << 14, 0), 15), Fate::Open);
        assert_eq!([0, 17].map(|number| Fate::by(&status(0, 0), number)), [Fate::Noticed; 2]);
        assert_eq!(Fate::by("", 15), Fate::Noticed);
    }

    #[test]
    fn only_children_that_were_spawned_here_are_signalled() {
        let reaper = Reaper::default();
        let own = std::process::id() as i32;
        assert_eq!(reaper.signal(own, 9), Err(Errno::ESRCH));
        assert_eq!(reaper.signal(-1, 9), Err(Errno::ESRCH));
    }

    #[test]
    fn containers_have_pids_of_their_own() {
        let reaper = Reaper::default();
        let exit = || Arc::new(Exit::new().unwrap());
        let far = i32::MAX - 1;
        reaper.table().waiting.extend([(far, exit()), (far - 1, exit())]);
        reaper.show(far, (0, 1));
        reaper.show(far - 1, (3, 1));
        assert_eq!(reaper.table().shown.get(&(3, 1)), Some(&(far - 1)));
        assert_eq!(reaper.signal_shown((1, 1), 9), Err(Errno::ESRCH));
        // There are no such processes, but they are looked for.
        assert_eq!(reaper.signal_shown((3, 1), 9), Err(Errno::ESRCH));
        for pid in [far, far - 1] {
            reaper.watch_first(pid);
        }
        assert_eq!(reaper.table().firsts.len(), 2);
    }

    #[test]
    fn a_start_that_fails_is_not_waited_for() {
        let reaper = Reaper::default();
        let failed = reaper.spawn(|| Err::<i32, _>(Errno::EAGAIN));
        assert_eq!(failed.err(), Some(Errno::EAGAIN));
        assert!(reaper.table().waiting.is_empty());
        assert!(!reaper.wait_childless(Duration::from_millis(1)));
    }

    #[test]
    fn an_exit_is_seen_by_code_and_by_descriptor() {
        let exit = Exit::new().unwrap();
        assert_eq!(exit.code(), None);
        exit.set(255);
        assert_eq!(exit.code(), Some(255));
        assert_eq!(exit.event.read(), Ok(1));
    }
}
