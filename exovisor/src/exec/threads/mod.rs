//! Threads of an isolate (wasi-threads: `wasi:thread-spawn`, `wasi_thread_start`).
//!
//! ```text
//!  thread-spawn ──> ThreadGroup::spawn ──> task in the scheduler's queue ──> worker: ThreadGroup::enter
//!                   counted, or      one pool of workers for all       instance from the slots,
//!                   refused          tenants, shares by weight         or a new one
//! ```
//!
//! Each thread is a fiber with a store and an instance of its own; all import one memory. They
//! ride on the scheduler's workers like calls do: preempted when their time slice is over,
//! suspended while they wait ([`crate::hostcalls::threads`]), so threads are as many as the isolate
//! may have, and workers as many as the machine has cores. The first error of a thread ends the
//! whole isolate and is its outcome. The end of the call ends all threads, and is reported once
//! they are gone.

mod memory_cache;
mod template;

pub(crate) use template::{Bound, Template, Unbound};

use crate::admission::thread_entry;
use crate::exec::call;
use crate::exec::module::{AdmittedModule, Link, unlinked};
use crate::exec::outcome::Outcome;
use crate::exec::reclaim;
use crate::exec::reuse::{InstantiateError, PooledInstance};
use crate::hostcalls::context::Attached;
use crate::hostcalls::state::State;
use crate::hostcalls::threads::{Shared, Threads, Zeroing};
use crate::preempt::cancel::{CancelHandle, CancelReason};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;
use wasmtime::InstancePre;

/// Thread ids are positive and have 29 bits (wasi-threads, "Design choice: thread IDs").
const ID_MAX: i32 = 0x1fff_ffff;

/// What threads run on.
pub(crate) trait Workers: Send + Sync {
    /// Queues a thread; false if there may be no more, or nothing begins any more.
    fn start(&self, thread: ThreadTask) -> bool;

    /// Workers that have nothing to do at this moment, and how many there are.
    fn count(&self) -> (usize, usize);
}

/// A thread of a call.
pub(crate) struct ThreadTask {
    pub cancel: CancelHandle,
    pub thread: GuestThread,
}

/// The threads of one isolate and what they share.
pub(crate) struct ThreadGroup {
    module: Arc<AdmittedModule>,
    shared: Shared,
    linked: InstancePre<State>,
    /// Whether the memory is as it began, and no code of the module runs any more.
    is_zero: AtomicBool,
    config: ThreadConfig,
    workers: Box<dyn Workers>,
    /// Ends the call itself.
    main: CancelHandle,
    state: Mutex<GroupState>,
    /// The last thread has gone.
    gone: Notify,
}

/// What each thread is made with.
pub(crate) struct ThreadConfig {
    pub attached: Option<Attached>,
    pub memory_bytes: u64,
    pub deadline: Option<Instant>,
    pub fuel: u64,
    /// Threads alive at once, beside the one that the call began with.
    pub threads_max: u32,
}

#[derive(Default)]
struct GroupState {
    running: HashMap<i32, CancelHandle>,
    /// Instances that a thread has used and the next can, as new.
    idle: Vec<PooledInstance>,
    last_id: i32,
    failure: Option<Outcome>,
    closed: bool,
}

impl ThreadGroup {
    pub fn new(
        module: &Arc<AdmittedModule>,
        bound: Bound,
        config: ThreadConfig,
        workers: Box<dyn Workers>,
        main: CancelHandle,
    ) -> Arc<Self> {
        let Bound { memory, linked, idle } = bound;
        Arc::new(Self {
            module: Arc::clone(module),
            shared: Shared::new(memory),
            linked,
            is_zero: AtomicBool::new(false),
            config,
            workers,
            main,
            state: Mutex::new(GroupState { idle, ..GroupState::default() }),
            gone: Notify::new(),
        })
    }

    /// Ends all threads and waits until they are gone; the failure that counts, if there was one.
    pub async fn close(&self) -> Option<Outcome> {
        self.shut();
        while !self.lock().running.is_empty() {
            // A notification that comes before the wait is kept.
            self.gone.notified().await;
        }
        self.lock().failure.take()
    }

    /// Makes the memory as it began. No thread may use it any more.
    pub async fn reset_memory(&self) {
        let all = 0..self.shared.memory.data_size();
        let is_zero = self.zero(all, &self.main).await;
        self.is_zero.store(is_zero, Ordering::Release);
    }

    /// No new threads from here on, and those that run are ended.
    fn shut(&self) {
        let mut group = self.lock();
        group.closed = true;
        let running: Vec<CancelHandle> = group.running.values().cloned().collect();
        drop(group);
        running.iter().for_each(|thread| thread.request(CancelReason::Stopped));
    }

    /// Shuts the group when the call goes, however it goes.
    pub fn closing(self: &Arc<Self>) -> Closing {
        Closing(Arc::clone(self))
    }

    fn leave(&self, id: i32, failure: Option<Outcome>) {
        let mut group = self.lock();
        group.running.remove(&id);
        let last = group.running.is_empty();
        let failed = failure.is_some() && !group.closed;
        if failed && group.failure.is_none() {
            group.failure = failure;
        }
        drop(group);
        if failed {
            // The call notices, and shuts the group.
            self.main.request(CancelReason::Stopped);
        }
        if last {
            self.gone.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An instance for the call itself, which begins with this state. Its start function is yet
    /// to run, as in those of all threads.
    ///
    /// # Errors
    /// [`InstantiateError`] when the pool has no room, or the isolate may not hold more.
    pub fn instance(
        self: &Arc<Self>,
        mut state: State,
    ) -> Result<PooledInstance, InstantiateError> {
        state.threads = Some(Arc::clone(self) as Arc<dyn Threads>);
        let idle = self.lock().idle.pop();
        match idle.filter(|made| made.fits(&state)) {
            Some(made) => made.again(&self.module, state, self.config.fuel),
            None => PooledInstance::new(&self.module, &self.linked, state, self.config.fuel),
        }
    }

    /// An instance for a thread.
    fn next(self: &Arc<Self>, cancel: CancelHandle) -> Result<PooledInstance, InstantiateError> {
        let ThreadConfig { attached, memory_bytes, deadline, .. } = &self.config;
        self.instance(State::new(attached.clone(), cancel, *memory_bytes, *deadline))
    }

    /// Keeps an instance in which a thread has returned, as new, if that can be done.
    pub async fn keep(&self, mut made: PooledInstance) {
        if !made.reset(&self.module).await {
            return;
        }
        let mut group = self.lock();
        // More than run at once are not needed, and each holds an instance of the pool.
        if group.idle.len() < self.workers.count().1 {
            group.idle.push(made);
        }
    }
}

impl Threads for ThreadGroup {
    fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Refused once the call is over, too.
    fn spawn(self: Arc<Self>, start: i32) -> Option<i32> {
        let cancel = CancelHandle::new(Some(Arc::clone(&self.module.code)), self.module.epochs());
        let mut group = self.lock();
        if group.closed || group.running.len() >= self.config.threads_max as usize {
            return None;
        }
        let id = group.next_id();
        group.running.insert(id, cancel.clone());
        drop(group);
        let group = Arc::clone(&self);
        let thread = GuestThread { group, id, start, cancel: cancel.clone(), failure: None };
        self.workers.start(ThreadTask { cancel, thread }).then_some(id)
    }

    /// This one and one for each worker that others do not use, as far as more may be had.
    fn threads_now(&self) -> i32 {
        let own = self.lock().running.len();
        let (idle, all) = self.workers.count();
        // Workers that still see one of its threads to its end are as good as idle.
        let more = (idle + own).min(all.saturating_sub(1)).min(self.config.threads_max as usize);
        1 + more.min(i32::MAX as usize - 1) as i32
    }

    fn zero<'a>(&'a self, range: Range<usize>, cancel: &'a CancelHandle) -> Zeroing<'a> {
        let bytes_max = self.module.host.instance_cache.bytes_max;
        Box::pin(reclaim::zero(&self.shared.memory, range, bytes_max, cancel))
    }
}

impl Drop for ThreadGroup {
    /// The last of its stores goes, so that no code can reach the memory any more.
    fn drop(&mut self) {
        let Link::Threaded(template) = &self.module.link else { return };
        let instance_cache = &self.module.host.instance_cache;
        let group = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut idle = std::mem::take(&mut group.idle);
        idle.retain_mut(|made| made.take_slot(instance_cache));
        let has_instances = !idle.is_empty();
        let (memory, linked) = (self.shared.memory.clone(), self.linked.clone());
        let is_zero = *self.is_zero.get_mut();
        if template.keep(Bound { memory, linked, idle }, is_zero) && has_instances {
            instance_cache.list(&self.module);
        }
    }
}

fn host_failed() -> Outcome {
    Outcome::Trap("a host function failed".to_owned())
}

impl GroupState {
    fn next_id(&mut self) -> i32 {
        loop {
            self.last_id = if self.last_id >= ID_MAX { 1 } else { self.last_id + 1 };
            if !self.running.contains_key(&self.last_id) {
                return self.last_id;
            }
        }
    }
}

/// One thread's place in the group; it leaves when this is dropped.
pub(crate) struct GuestThread {
    group: Arc<ThreadGroup>,
    id: i32,
    /// The guest's word for what it is to do.
    start: i32,
    cancel: CancelHandle,
    /// Why the isolate is over with it; while it runs, what holds if nothing more is heard.
    failure: Option<Outcome>,
}

impl GuestThread {
    /// Until it ends.
    pub async fn run(mut self) -> (Outcome, Vec<call::Value>) {
        self.failure = Some(host_failed());
        self.failure = self.enter().await.err();
        (self.failure.clone().unwrap_or(Outcome::Exited(0)), Vec::new())
    }

    async fn enter(&self) -> Result<(), Outcome> {
        if let Some(reason) = self.cancel.reason() {
            return Err(Outcome::Ended(reason));
        }
        let mut made = self.group.next(self.cancel.clone()).map_err(InstantiateError::outcome)?;
        let result = self.start(&mut made).await;
        call::exit(&made.store);
        result.map_err(|error| call::outcome(made.store.data(), &error))?;
        self.group.keep(made).await;
        Ok(())
    }

    async fn start(&self, made: &mut PooledInstance) -> wasmtime::Result<()> {
        let PooledInstance { store, instance, reset_info } = made;
        let module = &self.group.module;
        let Link::Threaded(template) = &module.link else { return Err(unlinked()) };
        let entry = template.entry.as_ref().ok_or_else(thread_entry::missing)?;
        if !entry.has_start {
            let entries = reset_info.as_mut().map(|reset_info| &mut reset_info.entries);
            call::begin(module, instance, store, entries).await?;
        }
        let entries = reset_info.as_mut().map(|reset_info| &mut reset_info.entries);
        call::thread(&entry.function, instance, store, entries, (self.id, self.start)).await
    }
}

impl Drop for GuestThread {
    fn drop(&mut self) {
        self.group.leave(self.id, self.failure.take());
    }
}

/// Shuts the group when it is dropped.
pub(crate) struct Closing(Arc<ThreadGroup>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.shut();
    }
}
