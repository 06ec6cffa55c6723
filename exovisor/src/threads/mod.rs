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
use crate::reuse::Globals;
use crate::sched::{Home, ThreadTask};
use crate::teardown;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;
use wasmtime::{InstancePre, SharedMemory, Store, TypedFunc};

/// Thread ids are positive and have 29 bits (wasi-threads, "Design choice: thread IDs").
const ID_MAX: i32 = 0x1fff_ffff;
/// What a thread begins with.
const ENTRY: &str = "wasi_thread_start";

/// The threads of one isolate and what they share.
pub(crate) struct Team {
    module: Arc<AdmittedModule>,
    bound: Bound,
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
    /// Instances that a thread has used and the next can.
    idle: Vec<Slot>,
    last_id: i32,
    failure: Option<Outcome>,
    closed: bool,
}

/// An instance for a thread.
struct Slot {
    store: Store<State>,
    start: TypedFunc<(i32, i32), ()>,
    globals: Globals,
}

impl Team {
    pub fn new(
        module: &Arc<AdmittedModule>,
        bound: Bound,
        terms: Terms,
        home: Home,
        main: Stopper,
    ) -> Arc<Self> {
        Arc::new(Self {
            module: Arc::clone(module),
            bound,
            waits: Waits::default(),
            heap: Mutex::default(),
            terms,
            home,
            main,
            crew: Mutex::default(),
            gone: Notify::new(),
        })
    }

    /// What instances of this isolate are made from.
    pub fn instance(&self) -> &InstancePre<State> {
        &self.bound.instance
    }

    /// What its threads share.
    pub fn memory(&self) -> &SharedMemory {
        &self.bound.memory
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

    /// Gives back a large memory, which no thread uses any more.
    pub async fn give_back(&self) {
        let bytes = self.memory().data_size();
        if bytes > teardown::WORTH_BYTES {
            teardown::zero(self.memory(), 0..bytes, &self.main).await;
        }
    }

    /// No new threads from here on, and those that run are ended.
    fn shut(&self) {
        let mut crew = self.crew();
        crew.closed = true;
        let idle = std::mem::take(&mut crew.idle);
        let running: Vec<Stopper> = crew.running.values().cloned().collect();
        drop(crew);
        drop(idle);
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

    fn state(self: &Arc<Self>, stopper: Stopper) -> State {
        let Terms { attached, memory_bytes, deadline, .. } = &self.terms;
        let mut state = State::new(attached.clone(), stopper, *memory_bytes, *deadline);
        state.team = Some(Arc::clone(self));
        state
    }

    async fn slot(self: &Arc<Self>, stopper: Stopper) -> Result<Slot, Outcome> {
        let broken = |error: wasmtime::Error| Outcome::Trap(format!("{:#}", error.root_cause()));
        let state = self.state(stopper);
        let mut store = call::store(&self.module.host, state, self.terms.fuel).map_err(broken)?;
        let instance = call::instantiate(self.instance(), &mut store).map_err(broken)?;
        let start = instance.get_typed_func(&mut store, ENTRY).map_err(broken)?;
        let globals = Globals::read(&self.module.globals, &instance, &mut store);
        let began = call::begin(&self.module, &instance, &mut store).await;
        call::exit(&store);
        began.map_err(|error| call::outcome(store.data(), &error))?;
        Ok(Slot { store, start, globals })
    }

    /// A used instance made as new, or else a new one.
    async fn checked_out(self: &Arc<Self>, stopper: Stopper) -> Result<Slot, Outcome> {
        let idle = self.crew().idle.pop();
        let Some(mut slot) = idle else { return self.slot(stopper).await };
        *slot.store.data_mut() = self.state(stopper);
        let reset = slot.globals.reset(&mut slot.store);
        let metered =
            reset.and_then(|()| call::meter(&self.module.host, &mut slot.store, self.terms.fuel));
        metered.map_err(|error| Outcome::Trap(format!("{error:#}")))?;
        Ok(slot)
    }

    fn keep(&self, slot: Slot) {
        let mut crew = self.crew();
        // More than run at once are not needed, and each holds an instance of the pool.
        if self.module.reusable && !crew.closed && crew.idle.len() < self.home.workers().1 {
            crew.idle.push(slot);
        }
    }
}

impl Drop for Team {
    /// The last of its stores goes, so that no code can reach the memory any more.
    fn drop(&mut self) {
        if let Link::Team(template) = &self.module.link {
            template.give_back(self.bound.clone());
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
        let mut slot = self.team.checked_out(self.stopper.clone()).await?;
        call::enter(slot.start.func(), &mut slot.store);
        let result = slot.start.call_async(&mut slot.store, (self.id, self.start)).await;
        call::exit(&slot.store);
        result.map_err(|error| call::outcome(slot.store.data(), &error))?;
        self.team.keep(slot);
        Ok(())
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
