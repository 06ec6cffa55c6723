//! Threads of an isolate (wasi-threads: `wasi:thread-spawn`, `wasi_thread_start`).
//!
//! ```text
//!  thread-spawn ──> Team::spawn ──> task in the scheduler's queue ──> worker: Team::enter
//!                   counted, or      one pool of workers for all       instance from the slots,
//!                   refused          tenants, shares by weight         or a new one
//! ```
//!
//! Each thread is a fiber with a store and an instance of its own; all import one memory. They
//! ride on the scheduler's workers like calls do: preempted when their turn is over, suspended
//! while they wait ([`Waits`]), so threads are as many as the isolate may have, and workers as
//! many as the machine has cores. The first error of a thread ends the whole isolate and is its
//! outcome. The end of the call ends all threads, and is reported once they are gone.

pub(crate) mod entry;
mod host;
mod spares;
mod template;
mod waits;

pub(crate) use host::link;
pub(crate) use template::{Bound, Template, Unbound};
pub(crate) use waits::Waits;

use crate::admission::{AdmittedModule, Link};
use crate::builtins::Heap;
use crate::call;
use crate::ending::{Cause, Stopper};
use crate::isolate::{Attached, Outcome, State};
use crate::reuse::{Made, Unmade};
use crate::sched::{Home, ThreadTask, unlinked};
use crate::teardown;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;
use wasmtime::{InstancePre, SharedMemory};

/// Thread ids are positive and have 29 bits (wasi-threads, "Design choice: thread IDs").
const ID_MAX: i32 = 0x1fff_ffff;

/// The threads of one isolate and what they share.
pub(crate) struct Team {
    module: Arc<AdmittedModule>,
    memory: SharedMemory,
    linked: InstancePre<State>,
    /// Whether the memory is as it began, and no code of the module runs any more.
    is_zero: AtomicBool,
    pub waits: Waits,
    pub heap: Mutex<Heap>,
    terms: Terms,
    home: Home,
    /// Ends the call itself.
    main: Stopper,
    crew: Mutex<Crew>,
    /// The last thread has gone.
    gone: Notify,
}

/// What each thread is made with.
pub(crate) struct Terms {
    pub attached: Option<Attached>,
    pub memory_bytes: u64,
    pub deadline: Option<Instant>,
    pub fuel: u64,
    /// Threads alive at once, beside the one that the call began with.
    pub threads_max: u32,
}

#[derive(Default)]
struct Crew {
    running: HashMap<i32, Stopper>,
    /// Instances that a thread has used and the next can, as new.
    idle: Vec<Made>,
    last_id: i32,
    failure: Option<Outcome>,
    closed: bool,
}

impl Team {
    pub fn new(
        module: &Arc<AdmittedModule>,
        bound: Bound,
        terms: Terms,
        home: Home,
        main: Stopper,
    ) -> Arc<Self> {
        let Bound { memory, linked, idle } = bound;
        Arc::new(Self {
            module: Arc::clone(module),
            memory,
            linked,
            is_zero: AtomicBool::new(false),
            waits: Waits::default(),
            heap: Mutex::default(),
            terms,
            home,
            main,
            crew: Mutex::new(Crew { idle, ..Crew::default() }),
            gone: Notify::new(),
        })
    }

    /// What its threads share.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Whether memory has grown as far as it may and the module wanted it larger.
    pub fn is_full(&self) -> bool {
        let limit = self.memory().ty().maximum();
        limit.is_some_and(|limit| self.memory().size() >= limit)
    }

    /// How many threads are worth having at this moment: this one and one for each worker that
    /// others do not use, as far as more may be had.
    pub fn threads_now(&self) -> i32 {
        let own = self.crew().running.len();
        let (idle, all) = self.home.workers();
        // Workers that still see one of its threads to its end are as good as idle.
        let more = (idle + own).min(all.saturating_sub(1)).min(self.terms.threads_max as usize);
        1 + more.min(i32::MAX as usize - 1) as i32
    }

    /// Starts a thread with the guest's word for it and answers with its id; `None` if the
    /// isolate may have no more.
    pub fn spawn(self: &Arc<Self>, start: i32) -> Option<i32> {
        let stopper = Stopper::new(Some(Arc::clone(&self.module.code)), self.module.epochs());
        let mut crew = self.crew();
        if crew.closed || crew.running.len() >= self.terms.threads_max as usize {
            return None;
        }
        let id = crew.next_id();
        crew.running.insert(id, stopper.clone());
        drop(crew);
        let member =
            Member { team: Arc::clone(self), id, start, stopper: stopper.clone(), failure: None };
        self.home.start(ThreadTask { stopper, member }).then_some(id)
    }

    /// Ends all threads and waits until they are gone; the failure that counts, if there was one.
    pub async fn close(&self) -> Option<Outcome> {
        self.shut();
        while !self.crew().running.is_empty() {
            // A notification that comes before the wait is kept.
            self.gone.notified().await;
        }
        self.crew().failure.take()
    }

    /// Makes a part of the memory zero for a thread with this stopper; false if it is not all
    /// inside.
    pub async fn zero(&self, range: Range<usize>, stopper: &Stopper) -> bool {
        teardown::zero(self.memory(), range, self.module.host.keeper.bytes_max, stopper).await
    }

    /// Makes the memory as it began. No thread may use it any more.
    pub async fn give_back(&self) {
        let is_zero = self.zero(0..self.memory().data_size(), &self.main).await;
        self.is_zero.store(is_zero, Ordering::Release);
    }

    /// No new threads from here on, and those that run are ended.
    fn shut(&self) {
        let mut crew = self.crew();
        crew.closed = true;
        let running: Vec<Stopper> = crew.running.values().cloned().collect();
        drop(crew);
        running.iter().for_each(|thread| thread.stop(Cause::Stopped));
    }

    /// Shuts the team when the call goes, however it goes.
    pub fn closing(self: &Arc<Self>) -> Closing {
        Closing(Arc::clone(self))
    }

    fn leave(&self, id: i32, failure: Option<Outcome>) {
        let mut crew = self.crew();
        crew.running.remove(&id);
        let last = crew.running.is_empty();
        let failed = failure.is_some() && !crew.closed;
        if failed && crew.failure.is_none() {
            crew.failure = failure;
        }
        drop(crew);
        if failed {
            // The call notices, and shuts the team.
            self.main.stop(Cause::Stopped);
        }
        if last {
            self.gone.notify_one();
        }
    }

    fn crew(&self) -> MutexGuard<'_, Crew> {
        self.crew.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An instance for the call itself, which begins with this state. Its start function is yet
    /// to run, as in those of all threads.
    ///
    /// # Errors
    /// [`Unmade`] when the pool has no room, or the isolate may not hold more.
    pub fn instance(self: &Arc<Self>, mut state: State) -> Result<Made, Unmade> {
        state.team = Some(Arc::clone(self));
        let idle = self.crew().idle.pop();
        match idle.filter(|made| made.fits(&state)) {
            Some(made) => made.again(&self.module, state, self.terms.fuel),
            None => Made::new(&self.module, &self.linked, state, self.terms.fuel),
        }
    }

    /// An instance for a thread.
    fn next(self: &Arc<Self>, stopper: Stopper) -> Result<Made, Unmade> {
        let Terms { attached, memory_bytes, deadline, .. } = &self.terms;
        self.instance(State::new(attached.clone(), stopper, *memory_bytes, *deadline))
    }

    /// Keeps an instance in which a thread has returned, as new, if that can be done.
    pub async fn keep(&self, mut made: Made) {
        if !made.reset(&self.module).await {
            return;
        }
        let mut crew = self.crew();
        // More than run at once are not needed, and each holds an instance of the pool.
        if crew.idle.len() < self.home.workers().1 {
            crew.idle.push(made);
        }
    }
}

impl Drop for Team {
    /// The last of its stores goes, so that no code can reach the memory any more.
    fn drop(&mut self) {
        let Link::Team(template) = &self.module.link else { return };
        let keeper = &self.module.host.keeper;
        let crew = self.crew.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut idle = std::mem::take(&mut crew.idle);
        idle.retain_mut(|made| made.take_place(keeper));
        let has_instances = !idle.is_empty();
        let (memory, linked) = (self.memory.clone(), self.linked.clone());
        let is_zero = *self.is_zero.get_mut();
        if template.give_back(Bound { memory, linked, idle }, is_zero) && has_instances {
            keeper.list(&self.module);
        }
    }
}

fn host_failed() -> Outcome {
    Outcome::Trap("a host function failed".to_owned())
}

impl Crew {
    fn next_id(&mut self) -> i32 {
        loop {
            self.last_id = if self.last_id >= ID_MAX { 1 } else { self.last_id + 1 };
            if !self.running.contains_key(&self.last_id) {
                return self.last_id;
            }
        }
    }
}

/// One thread's place in the team; it leaves when this is dropped.
pub(crate) struct Member {
    team: Arc<Team>,
    id: i32,
    /// The guest's word for what it is to do.
    start: i32,
    stopper: Stopper,
    /// Why the isolate is over with it; while it runs, what holds if nothing more is heard.
    failure: Option<Outcome>,
}

impl Member {
    /// Until it ends.
    pub async fn run(mut self) -> (Outcome, Vec<call::Value>) {
        self.failure = Some(host_failed());
        self.failure = self.enter().await.err();
        (self.failure.clone().unwrap_or(Outcome::Exited(0)), Vec::new())
    }

    async fn enter(&self) -> Result<(), Outcome> {
        if let Some(cause) = self.stopper.cause() {
            return Err(Outcome::Ended(cause));
        }
        let mut made = self.team.next(self.stopper.clone()).map_err(Unmade::outcome)?;
        let result = self.start(&mut made).await;
        call::exit(&made.store);
        result.map_err(|error| call::outcome(made.store.data(), &error))?;
        self.team.keep(made).await;
        Ok(())
    }

    async fn start(&self, made: &mut Made) -> wasmtime::Result<()> {
        let Made { store, instance, known } = made;
        let module = &self.team.module;
        let Link::Team(template) = &module.link else { return Err(unlinked()) };
        let entry = template.entry.as_ref().ok_or_else(entry::missing)?;
        if !entry.has_start {
            let entries = known.as_mut().map(|known| &mut known.entries);
            call::begin(module, instance, store, entries).await?;
        }
        let entries = known.as_mut().map(|known| &mut known.entries);
        call::thread(&entry.function, instance, store, entries, (self.id, self.start)).await
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.team.leave(self.id, self.failure.take());
    }
}

/// Shuts the team when it is dropped.
pub(crate) struct Closing(Arc<Team>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.shut();
    }
}
