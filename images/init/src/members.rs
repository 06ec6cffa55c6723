//! The containers of a cell: its own program's, and those beside it.
//!
//! ```text
//! Contain ──> room: a number, a control group ──> Start ──> runs ──> ended
//!                  └──────────────────── Discard ───────────┴─────────┴──> nothing is left
//! ```
//! They share the network and the kernel; each has its own root, processes and limits. A request is
//! within one of them ([`exocell_agent::Request::Within`]).

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use exocell_agent::{CONTAINERS_MAX, Contain};

use crate::beside::{self, Beside};
use crate::cgroup::Group;
use crate::container::Container;
use crate::error::InitError;
use crate::root::Cell;

/// How long who comes before a container's own program waits for it.
const BEGIN_MAX: Duration = Duration::from_secs(5);
/// How long programs that are killed may take to be gone, and how often it is looked.
const KILL_MAX: Duration = Duration::from_secs(5);
const KILL_LOOK: Duration = Duration::from_millis(5);

/// One container.
#[derive(Default)]
pub struct Member {
    number: u32,
    /// `None` for the cell's own.
    beside: Option<Beside>,
    programs: Mutex<Programs>,
    changed: Condvar,
}

/// Where its programs are.
#[derive(Default)]
struct Programs {
    container: Option<Arc<Container>>,
    /// Whether there has been one.
    has_begun: bool,
    /// Whether its own program is being started, or runs.
    is_running: bool,
    /// Whether it was given up: nothing starts any more.
    is_over: bool,
}

/// A container's own program runs as long as this is held.
pub struct Running<'a>(&'a Member);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut programs = self.0.lock();
        programs.is_running = false;
        if self.0.beside.is_some() {
            // Its namespaces go with their last program.
            programs.container = None;
        }
        self.0.changed.notify_all();
    }
}

impl Member {
    fn lock(&self) -> MutexGuard<'_, Programs> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// What it is made of; `None` for the cell's own.
    pub fn beside(&self) -> Option<&Beside> {
        self.beside.as_ref()
    }

    /// The control group of its programs; `None` for the cell's own, whose group the cell has.
    pub fn group(&self) -> Option<&Group> {
        self.beside.as_ref().map(|beside| &beside.group)
    }

    /// Its own program is about to be started. The cell's may be so while another is; a container
    /// beside it has one.
    ///
    /// # Errors
    /// It runs, or it is over.
    pub fn begin(&self) -> Result<Running<'_>, InitError> {
        let mut programs = self.lock();
        if programs.is_over || (programs.is_running && self.beside.is_some()) {
            return Err(InitError::invalid("the container's program was started already"));
        }
        programs.is_running = true;
        Ok(Running(self))
    }

    /// What its programs run in.
    ///
    /// # Errors
    /// There is none yet, or none any more.
    pub fn container(&self) -> Result<Arc<Container>, InitError> {
        let waits = |programs: &mut Programs| !programs.has_begun && !programs.is_over;
        let waited = self.changed.wait_timeout_while(self.lock(), BEGIN_MAX, waits);
        let (programs, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let none = || InitError::guest("the cell's own program does not run");
        programs.container.clone().ok_or_else(none)
    }

    pub fn set_container(&self, container: Option<Container>) {
        let mut programs = self.lock();
        programs.has_begun |= container.is_some();
        programs.container = container.map(Arc::new);
        self.changed.notify_all();
    }

    /// Has this thread see files as its programs do, if there are any.
    ///
    /// # Errors
    /// A container beside the cell's own has none.
    pub fn enter(&self) -> Result<(), InitError> {
        let container = self.lock().container.clone();
        match (container, &self.beside) {
            (Some(container), _) => container.enter(),
            (None, None) => Ok(()),
            (None, Some(_)) => Err(InitError::guest("the container's program does not run")),
        }
    }

    /// Ends all of its programs; whether none is left.
    fn end(&self) -> bool {
        let Some(group) = self.group() else { return false };
        self.lock().is_over = true;
        let until = Instant::now() + KILL_MAX;
        loop {
            // One that is being started comes into the group yet.
            let _ = group.kill();
            let waited = self.changed.wait_timeout_while(self.lock(), KILL_LOOK, |p| p.is_running);
            let (programs, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if !programs.is_running && group.empties_within(KILL_LOOK) {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
        }
    }
}

/// All containers of a cell.
pub struct Members {
    own: Arc<Member>,
    others: Mutex<HashMap<u32, Arc<Member>>>,
    /// What an end before this boot has left is removed once.
    swept: Once,
}

impl Default for Members {
    fn default() -> Self {
        Self { own: Arc::default(), others: Mutex::default(), swept: Once::new() }
    }
}

impl Members {
    fn others(&self) -> MutexGuard<'_, HashMap<u32, Arc<Member>>> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cell's own.
    pub fn own(&self) -> Arc<Member> {
        Arc::clone(&self.own)
    }

    /// Container `number`.
    ///
    /// # Errors
    /// There is none, or none any more.
    pub fn find(&self, number: u32) -> Result<Arc<Member>, InitError> {
        if number == 0 {
            return Ok(self.own());
        }
        let none = || InitError::invalid(format!("the cell has no container {number}"));
        self.others().get(&number).cloned().ok_or_else(none)
    }

    /// Container `name`, which is there.
    ///
    /// # Errors
    /// There is none.
    pub fn named(&self, name: &str) -> Result<Arc<Member>, InitError> {
        let is_it = |other: &&Arc<Member>| other.beside().is_some_and(|own| own.name() == name);
        let none = || InitError::invalid("the container that it shares with has ended");
        self.others().values().find(is_it).cloned().ok_or_else(none)
    }

    /// Makes room for one more.
    ///
    /// # Errors
    /// There are as many as may be, or what it is to be made of cannot be.
    pub fn add(&self, cell: &Cell, wanted: Contain) -> Result<(), InitError> {
        let number = wanted.container;
        let mut others = self.others();
        let is_there = |other: &Arc<Member>| {
            other.number == number
                || other.beside.as_ref().is_some_and(|beside| beside.name() == wanted.name)
        };
        if number == 0 || others.values().any(is_there) {
            return Err(InitError::invalid(format!("container {number} is there already")));
        }
        if others.len() >= CONTAINERS_MAX {
            return Err(InitError::invalid(format!(
                "the cell has {CONTAINERS_MAX} more containers, which is as many as it may have"
            )));
        }
        self.swept.call_once(|| beside::sweep(cell));
        let beside = Beside::new(cell, wanted)?;
        let member = Member { number, beside: Some(beside), ..Member::default() };
        others.insert(number, Arc::new(member));
        Ok(())
    }

    /// Ends container `number`, and takes away what it has.
    ///
    /// # Errors
    /// There is none; or the guest's kernel cannot end a program of it, so that it stays.
    pub fn discard(&self, cell: &Cell, number: u32) -> Result<(), InitError> {
        let member = self.find(number)?;
        let Some(beside) = member.beside() else {
            return Err(InitError::invalid("the cell's own container ends with the cell"));
        };
        if !member.end() {
            return Err(InitError::guest("a program of the container does not end"));
        }
        self.others().remove(&number);
        beside.remove(cell);
        Ok(())
    }

    /// Removes what containers called `name` have kept; of one that is there, with its end.
    ///
    /// # Errors
    /// None can be called so.
    pub fn forget(&self, cell: &Cell, name: &str) -> Result<(), InitError> {
        beside::check_name(name)?;
        let others = self.others();
        let besides = || others.values().filter_map(|other| other.beside.as_ref());
        match besides().find(|beside| beside.name() == name) {
            Some(beside) => beside.keep_nothing(),
            None => beside::remove_kept(cell, name),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cells_own_container_is_always_there_and_others_are_not() {
        let members = Members::default();
        assert_eq!(members.find(0).unwrap().number(), 0);
        assert!(members.find(3).err().unwrap().to_string().contains("container 3"));
        let own = members.own();
        assert!(own.beside().is_none() && own.group().is_none());
        // A warm cell's first program may end while the next begins.
        let (first, second) = (own.begin().unwrap(), own.begin().unwrap());
        drop((first, second));
        assert!(!own.end(), "only its cell ends it");
        own.enter().unwrap();
    }

    #[test]
    fn nothing_starts_in_a_container_that_is_over() {
        let own = Member::default();
        own.lock().is_over = true;
        assert!(own.begin().is_err());
        // Nor is one waited for.
        assert!(own.container().is_err());
    }
}
