//! The one place that waits for children.
//!
//! Orphans of the whole cell end up here, so no session may call `waitpid`
//! itself. A child is started while the table is locked, and a dead child is
//! reaped while the table is locked: a process id in the table is therefore
//! never one that was used again.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::sys;

/// How a child ended, and a descriptor that becomes readable when it has.
pub struct Exit {
    event: EventFd,
    code: AtomicU32,
}

const RUNNING: u32 = u32::MAX;

impl Exit {
    fn new() -> nix::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?;
        Ok(Self { event, code: AtomicU32::new(RUNNING) })
    }

    /// The exit code, once there is one.
    pub fn code(&self) -> Option<u8> {
        u8::try_from(self.code.load(Ordering::Acquire)).ok()
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
    /// The pids by which programs know themselves, and ours for them.
    shown: HashMap<i32, i32>,
    /// Counts up at every start, so that the reaper notices new children.
    started: u64,
    childless: bool,
}

/// The table of children and their reaper.
#[derive(Default)]
pub struct Reaper {
    table: Mutex<Table>,
    changed: Condvar,
    /// The end of the first process of the programs' pid namespace, and so of all of them.
    first: Option<Arc<Exit>>,
}

impl Reaper {
    /// Starts the thread that reaps; `first` is the first process of the programs' namespace.
    pub fn start(first: Option<i32>) -> io::Result<Arc<Self>> {
        let mut reaper = Self::default();
        if let Some(pid) = first {
            let exit = Arc::new(Exit::new()?);
            reaper.table().waiting.insert(pid, Arc::clone(&exit));
            reaper.first = Some(exit);
        }
        let reaper = Arc::new(reaper);
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

    /// Signals a child that was spawned here and has not been reaped.
    pub fn signal(&self, pid: i32, number: u8) -> nix::Result<()> {
        let table = self.table();
        match table.waiting.contains_key(&pid) {
            true => sys::kill(pid, number),
            false => Err(Errno::ESRCH),
        }
    }

    /// `pid` knows itself as `shown`.
    pub fn show(&self, pid: i32, shown: i32) {
        let mut table = self.table();
        if table.waiting.contains_key(&pid) {
            table.shown.insert(shown, pid);
        }
    }

    /// As [`Self::signal`], by the pid that the child knows itself by.
    pub fn signal_shown(&self, shown: i32, number: u8) -> nix::Result<()> {
        let pid = self.table().shown.get(&shown).copied().ok_or(Errno::ESRCH)?;
        self.signal(pid, number)
    }

    /// Why all programs have ended, if they have within `limit`: their root can do that.
    pub fn end_of_all(&self, limit: Duration) -> Option<String> {
        let first = self.first.as_ref()?;
        let until = Instant::now() + limit;
        while first.code().is_none() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        let how = match first.code()? {
            // What reboot(2) makes of it in a pid namespace (pid_namespaces(7)).
            129 => "by reboot(2), to restart it".to_owned(),
            130 => "by reboot(2), to power it off".to_owned(),
            code => format!("by the end of their first process (code {code})"),
        };
        Some(format!("the cell's root ended all of its programs, {how}"))
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
        let Ok(code) = sys::reap(pid) else { return };
        if let Some(exit) = table.waiting.remove(&pid) {
            table.shown.retain(|_, own| *own != pid);
            exit.set(code);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_children_that_were_spawned_here_are_signalled() {
        let reaper = Reaper::default();
        let own = std::process::id() as i32;
        assert_eq!(reaper.signal(own, 9), Err(Errno::ESRCH));
        assert_eq!(reaper.signal(-1, 9), Err(Errno::ESRCH));
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
