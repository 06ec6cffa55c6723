//! Instances that served a call and serve the module's next one.
//!
//! To make a store and an instance and to take them down again is most of what a short call
//! costs. Where all is known that calls of a module can change ([`changes`]), an instance is made
//! as new when its call has returned, and kept. Modules have one owner, so it never serves
//! another tenant.
//!
//! ```text
//!  Made::new ──call──> returned ──as new──> kept ──Made::again─> call ──> ...
//!                         │ trapped, ended, grown,              │ the pool has no room,
//!                         │ much was written to                 │ or its module goes
//!                         v                                     v
//!                      dropped                               dropped
//! ```

mod changes;
mod globals;
mod shelves;
#[cfg(test)]
mod tests;

pub(crate) use changes::{Changes, changes};
use globals::Globals;
use shelves::Shelves;
pub(crate) use shelves::set_worker;

use crate::admission::{AdmittedModule, Link};
use crate::call::{self, Entries};
use crate::isolate::State;
use crate::limits::Limits;
use crate::pages;
use crate::policy::Policy;
use crate::sched::unlinked;
use crate::teardown;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use wasmtime::{Instance, InstancePre, Memory, PoolConcurrencyLimitError, Store};

/// Longer first contents are not kept a copy of, in bytes.
const IMAGE_BYTES_MAX: u64 = 4 << 20;

/// What is kept of one module without threads; of others it is kept with their memories
/// ([`crate::threads::Template`]).
pub(crate) struct Reuse {
    image_bytes: usize,
    /// What the memory begins with.
    image: OnceLock<Box<[u8]>>,
    kept: Shelves,
}

impl Reuse {
    /// For a module with these changes; `None` if its instances are not kept.
    pub fn new(keeper: &Keeper, changes: &Changes) -> Option<Self> {
        let image_bytes = changes.image_bytes.filter(|bytes| *bytes <= IMAGE_BYTES_MAX)?;
        let image_bytes = image_bytes as usize;
        let (image, kept) = (OnceLock::new(), Shelves::new(keeper.workers));
        (keeper.max > 0).then_some(Self { image_bytes, image, kept })
    }

    fn image(&self) -> &[u8] {
        self.image.get().map_or(&[], |image| image)
    }
}

/// What is kept of all modules of one engine.
pub(crate) struct Keeper {
    max: usize,
    /// Workers that a scheduler has unless it is told otherwise.
    workers: usize,
    /// Bytes of a memory that are written over at most; 0 where nothing is kept.
    pub bytes_max: usize,
    /// Instances that are kept, and those that were and serve a call.
    count: Arc<AtomicUsize>,
    /// Modules of which some may be kept, the longest known first.
    modules: Mutex<VecDeque<Weak<AdmittedModule>>>,
}

impl Keeper {
    /// Keeps no more than half of a pool, and nothing where stores have rooms of their own or first
    /// contents are copied. Where the host does not say what was written to, as in a jail, only what
    /// has a small memory is made as new ([`crate::pages`]).
    pub fn new(policy: &Policy) -> Self {
        let pool = policy.pool.as_ref().filter(|_| policy.copy_on_write);
        // What is asked is opened here, before anything runs that could be in the way.
        pages::can_be_found();
        let max = pool.map_or(0, |pool| pool.kept_max() as usize);
        Self {
            max,
            workers: std::thread::available_parallelism().map_or(1, Into::into),
            bytes_max: pool.filter(|_| max > 0).map_or(0, |pool| pool.keep_resident_bytes),
            count: Arc::default(),
            modules: Mutex::default(),
        }
    }

    /// A place for one more, if need be another module's.
    fn place(&self) -> Option<Place> {
        let one_more = |count| (count < self.max).then_some(count + 1);
        let take = || {
            let taken = self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
            taken.ok().map(|_| Place(Arc::clone(&self.count)))
        };
        take().or_else(|| {
            self.release_first();
            take()
        })
    }

    /// Drops what is kept of the module that is the longest known; false if there is none.
    fn release_first(&self) -> bool {
        let Some(first) = self.modules().pop_front() else { return false };
        if let Some(module) = first.upgrade() {
            module.is_kept.store(false, Ordering::Release);
            module.release();
        }
        true
    }

    /// Notes that something is kept of a module, so that it can be dropped for others' sake.
    pub fn list(&self, module: &Arc<AdmittedModule>) {
        // Most often it is known, which a look tells without taking the cache line from others.
        if !module.is_kept.load(Ordering::Acquire) && !module.is_kept.swap(true, Ordering::AcqRel) {
            let mut modules = self.modules();
            modules.retain(|module| module.strong_count() > 0);
            modules.push_back(Arc::downgrade(module));
        }
    }

    /// Drops all that is kept.
    fn release(&self) {
        while self.release_first() {}
    }

    fn modules(&self) -> MutexGuard<'_, VecDeque<Weak<AdmittedModule>>> {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AdmittedModule {
    /// Drops the instances that are kept of it.
    fn release(&self) {
        let kept = match (&self.link, &self.reuse) {
            (Link::Team(template), _) => template.release(),
            (Link::Alone(_), Some(reuse)) => reuse.kept.release(),
            (Link::Alone(_), None) => Vec::new(),
        };
        // Without a lock.
        drop(kept);
    }
}

/// One of those that are kept, for as long as it lives.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A store and an instance, for a call.
pub(crate) struct Made {
    pub store: Store<State>,
    pub instance: Instance,
    /// What is known of it, if it may be kept; on the heap, since most of those that live at once
    /// may not.
    pub known: Option<Box<Known>>,
}

/// What is known of an instance that can be made as new: what it began with, and its functions.
pub(crate) struct Known {
    pub entries: Entries,
    /// The memory and its length in bytes.
    memory: Option<(Memory, usize)>,
    globals: Globals,
    /// What all memories and tables hold, in bytes.
    held_bytes: u64,
    place: Option<Place>,
}

/// A call that could not be made, and what there is of it.
pub(crate) struct Unmade {
    pub store: Option<Store<State>>,
    pub error: wasmtime::Error,
}

impl Made {
    /// One that was kept, or a new one, of a module without threads.
    ///
    /// # Errors
    /// [`Unmade`] when the pool has no room, or the state may not hold so much memory.
    pub fn of(module: &AdmittedModule, state: State, fuel: u64) -> Result<Self, Unmade> {
        let kept = module.reuse.as_ref().and_then(|reuse| reuse.kept.take());
        let fitting = kept.filter(|made| made.fits(&state));
        match (fitting, &module.link) {
            (Some(made), _) => made.again(module, state, fuel),
            (None, Link::Alone(instance)) => Self::new(module, instance, state, fuel),
            (None, Link::Team(_)) => Err(Unmade { store: None, error: unlinked() }),
        }
    }

    /// Whether a call may hold as much as it does.
    pub fn fits(&self, state: &State) -> bool {
        self.known.as_ref().is_some_and(|known| known.held_bytes <= state.limits.bytes_max())
    }

    /// One that was made as new, for another call.
    ///
    /// # Errors
    /// [`Unmade`] when fuel cannot be given.
    pub fn again(
        mut self,
        module: &AdmittedModule,
        mut state: State,
        fuel: u64,
    ) -> Result<Self, Unmade> {
        let held_bytes = self.known.as_ref().map_or(0, |known| known.held_bytes);
        state.limits = Limits::holding(held_bytes, state.limits.bytes_max());
        *self.store.data_mut() = state;
        match call::meter(&module.host, &mut self.store, fuel) {
            Ok(()) => Ok(self),
            Err(error) => Err(Unmade { store: Some(self.store), error }),
        }
    }

    /// A new one of what is linked already.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn new(
        module: &AdmittedModule,
        linked: &InstancePre<State>,
        state: State,
        fuel: u64,
    ) -> Result<Self, Unmade> {
        let unmade = |store, error| Unmade { store, error };
        let bytes_max = state.limits.bytes_max();
        let mut store =
            call::store(&module.host, state, fuel).map_err(|error| unmade(None, error))?;
        let mut made = call::instantiate_metered(&module.host, linked, &mut store);
        if made.as_ref().is_err_and(|error| error.is::<PoolConcurrencyLimitError>()) {
            // What is kept is in the way.
            module.host.keeper.release();
            store.data_mut().limits = Limits::new(bytes_max);
            made = call::instantiate_metered(&module.host, linked, &mut store);
        }
        match made {
            Ok(instance) => {
                let known = Known::read(module, &instance, &mut store).map(Box::new);
                Ok(Self { store, instance, known })
            }
            Err(error) => Err(unmade(Some(store), error)),
        }
    }

    /// Keeps it, which was made as new, for the module's next call; or answers with it, if there
    /// are enough.
    pub fn keep(mut self, module: &Arc<AdmittedModule>) -> Option<Self> {
        let Some(reuse) = &module.reuse else { return Some(self) };
        if !self.take_place(&module.host.keeper) {
            return Some(self);
        }
        let left = reuse.kept.keep(self);
        if left.is_none() {
            module.host.keeper.list(module);
        }
        left
    }

    /// Makes it as new and nobody's, if that is possible and not much work.
    pub async fn reset(&mut self, module: &AdmittedModule) -> bool {
        let Self { store, known: Some(known), .. } = self else { return false };
        if let Some((memory, bytes)) = known.memory {
            let image = module.reuse.as_ref().map_or(&[][..], Reuse::image);
            let bytes_max = module.host.keeper.bytes_max;
            if memory.data_size(&*store) != bytes
                || !teardown::reset(memory, store, image, bytes_max).await
            {
                return false;
            }
        }
        store.data_mut().forget();
        known.globals.reset(store).is_ok()
    }

    /// Counts it as one that outlives its call; false if there may be no more of these.
    pub fn take_place(&mut self, keeper: &Keeper) -> bool {
        let Some(known) = &mut self.known else { return false };
        known.place = known.place.take().or_else(|| keeper.place());
        known.place.is_some()
    }
}

impl Known {
    /// Of an instance in which nothing has run yet; `None` if it cannot be made as new.
    fn read(
        module: &AdmittedModule,
        instance: &Instance,
        store: &mut Store<State>,
    ) -> Option<Self> {
        let memory = match (module.memories.first(), &module.reuse) {
            (Some(export), Some(reuse)) => {
                let memory = instance.get_module_export(&mut *store, export)?.into_memory()?;
                let bytes = memory.data(&*store);
                let image = bytes.get(..reuse.image_bytes)?;
                reuse.image.get_or_init(|| image.into());
                Some((memory, bytes.len()))
            }
            // It may be kept, or serve a call's next thread.
            (None, Some(_)) if module.reusable => None,
            (None, None) if module.reusable && matches!(module.link, Link::Team(_)) => None,
            _ => return None,
        };
        let globals = Globals::read(&module.globals, instance, store);
        let held_bytes = store.data().limits.bytes();
        Some(Self { entries: Entries::default(), memory, globals, held_bytes, place: None })
    }
}
