//! Instances that served a call and serve the module's next one.
//!
//! To make a store and an instance and to take them down again is most of what a short call
//! costs. Where all is known that calls of a module can change ([`changes`]), an instance is made
//! as new when its call has returned, and kept. Modules have one owner, so it never serves
//! another tenant.
//!
//! ```text
//!  Made::new ──call──> returned ──as new──> kept ──Made::kept──> call ──> ...
//!                         │ trapped, ended, grown,              │ the pool has no room,
//!                         │ much was written to                 │ or its module goes
//!                         v                                     v
//!                      dropped                               dropped
//! ```

mod changes;
mod globals;
mod pages;
#[cfg(test)]
mod tests;

pub(crate) use changes::{Changes, changes};
pub(crate) use globals::Globals;

use crate::admission::{AdmittedModule, Link};
use crate::call;
use crate::isolate::State;
use crate::limits::Limits;
use crate::policy::Policy;
use crate::sched::unlinked;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use wasmtime::{Instance, Memory, PoolConcurrencyLimitError, Store};

/// Kept of one module.
const KEPT_MAX: usize = 4;
/// Longer first contents are not kept a copy of, in bytes.
const IMAGE_BYTES_MAX: u64 = 4 << 20;

/// What is kept of one module.
pub(crate) struct Reuse {
    image_bytes: usize,
    /// What the memory begins with.
    image: OnceLock<Box<[u8]>>,
    shelf: Mutex<Shelf>,
}

#[derive(Default)]
struct Shelf {
    kept: Vec<Made>,
    /// Whether the keeper knows of the module.
    is_listed: bool,
}

impl Reuse {
    /// For a module with these changes; `None` if its instances are not kept.
    pub fn new(keeper: &Keeper, changes: &Changes) -> Option<Self> {
        let image_bytes = changes.image_bytes.filter(|bytes| *bytes <= IMAGE_BYTES_MAX)?;
        let image_bytes = image_bytes as usize;
        let (image, shelf) = (OnceLock::new(), Mutex::default());
        (keeper.max > 0).then_some(Self { image_bytes, image, shelf })
    }

    fn image(&self) -> &[u8] {
        self.image.get().map_or(&[], |image| image)
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is kept of all modules of one engine.
pub(crate) struct Keeper {
    max: usize,
    /// Bytes of a memory that are written over at most.
    bytes_max: usize,
    /// Instances that are kept, and those that were and serve a call.
    count: Arc<AtomicUsize>,
    /// Modules of which some may be kept, the longest known first.
    modules: Mutex<VecDeque<Weak<AdmittedModule>>>,
}

impl Keeper {
    /// Keeps no more than half of a pool, and nothing where stores have rooms of their own, where
    /// first contents are copied, or where the host does not say what was written to.
    pub fn new(policy: &Policy) -> Self {
        let pool = policy.pool.as_ref();
        let pool = pool.filter(|_| policy.copy_on_write && pages::can_be_found());
        Self {
            max: pool.map_or(0, |pool| pool.kept_max() as usize),
            bytes_max: pool.map_or(0, |pool| pool.keep_resident_bytes),
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
        let module = first.upgrade();
        if let Some(reuse) = module.as_ref().and_then(|module| module.reuse.as_ref()) {
            let mut shelf = reuse.shelf();
            shelf.is_listed = false;
            let kept = std::mem::take(&mut shelf.kept);
            drop(shelf);
            drop(kept);
        }
        true
    }

    /// Drops all that is kept.
    fn release(&self) {
        while self.release_first() {}
    }

    fn modules(&self) -> MutexGuard<'_, VecDeque<Weak<AdmittedModule>>> {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// How it is made as new, if it may be kept.
    resets: Option<Resets>,
}

/// What an instance began with.
struct Resets {
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
    /// One that was kept, or a new one.
    ///
    /// # Errors
    /// [`Unmade`] when the pool has no room, or the state may not hold so much memory.
    pub fn of(module: &AdmittedModule, state: State, fuel: u64) -> Result<Self, Unmade> {
        match Self::kept(module, state.limits.bytes_max()) {
            Some(mut made) => match made.begin(module, state, fuel) {
                Ok(()) => Ok(made),
                Err(error) => Err(Unmade { store: Some(made.store), error }),
            },
            None => Self::new(module, state, fuel),
        }
    }

    /// One that was kept and holds no more than `bytes_max`.
    fn kept(module: &AdmittedModule, bytes_max: u64) -> Option<Self> {
        let made = module.reuse.as_ref()?.shelf().kept.pop()?;
        let fits = made.resets.as_ref().is_some_and(|resets| resets.held_bytes <= bytes_max);
        fits.then_some(made)
    }

    /// Gives it to another call.
    fn begin(
        &mut self,
        module: &AdmittedModule,
        mut state: State,
        fuel: u64,
    ) -> wasmtime::Result<()> {
        let held_bytes = self.resets.as_ref().map_or(0, |resets| resets.held_bytes);
        state.limits = Limits::holding(held_bytes, state.limits.bytes_max());
        *self.store.data_mut() = state;
        call::meter(&module.host, &mut self.store, fuel)
    }

    fn new(module: &AdmittedModule, state: State, fuel: u64) -> Result<Self, Unmade> {
        let unmade = |store, error| Unmade { store, error };
        let bytes_max = state.limits.bytes_max();
        let mut store =
            call::store(&module.host, state, fuel).map_err(|error| unmade(None, error))?;
        let Link::Alone(instance) = &module.link else {
            return Err(unmade(Some(store), unlinked()));
        };
        let mut made = call::instantiate(instance, &mut store);
        if made.as_ref().is_err_and(|error| error.is::<PoolConcurrencyLimitError>()) {
            // What is kept is in the way.
            module.host.keeper.release();
            store.data_mut().limits = Limits::new(bytes_max);
            made = call::instantiate(instance, &mut store);
        }
        match made {
            Ok(instance) => {
                let resets = Resets::read(module, &instance, &mut store);
                Ok(Self { store, instance, resets })
            }
            Err(error) => Err(unmade(Some(store), error)),
        }
    }

    /// Keeps it for the module's next call, as new; or answers with it, if that is not worth it.
    pub fn keep(mut self, module: &Arc<AdmittedModule>) -> Result<(), Self> {
        let Some(reuse) = &module.reuse else { return Err(self) };
        let keeper = &module.host.keeper;
        if !self.reset(reuse, keeper.bytes_max) {
            return Err(self);
        }
        let Some(resets) = &mut self.resets else { return Err(self) };
        if resets.place.is_none() {
            resets.place = keeper.place();
        }
        if resets.place.is_none() {
            return Err(self);
        }
        self.store.data_mut().forget();
        let mut shelf = reuse.shelf();
        if shelf.kept.len() >= KEPT_MAX {
            drop(shelf);
            return Err(self);
        }
        shelf.kept.push(self);
        let is_new = !std::mem::replace(&mut shelf.is_listed, true);
        drop(shelf);
        if is_new {
            let mut modules = keeper.modules();
            modules.retain(|module| module.strong_count() > 0);
            modules.push_back(Arc::downgrade(module));
        }
        Ok(())
    }

    /// Makes the instance as new, if that is possible and not much work.
    fn reset(&mut self, reuse: &Reuse, bytes_max: usize) -> bool {
        let Self { store, resets: Some(resets), .. } = self else { return false };
        if let Some((memory, bytes)) = resets.memory {
            let memory = memory.data_mut(&mut *store);
            if memory.len() != bytes || !pages::reset(memory, reuse.image(), bytes_max) {
                return false;
            }
        }
        resets.globals.reset(store).is_ok()
    }
}

impl Resets {
    /// Of an instance in which nothing has run yet; `None` if it is not to be kept.
    fn read(
        module: &AdmittedModule,
        instance: &Instance,
        store: &mut Store<State>,
    ) -> Option<Self> {
        let reuse = module.reuse.as_ref()?;
        let memory = match module.memories.first() {
            Some(export) => {
                let memory = instance.get_module_export(&mut *store, export)?.into_memory()?;
                let bytes = memory.data(&*store);
                let image = bytes.get(..reuse.image_bytes)?;
                reuse.image.get_or_init(|| image.into());
                Some((memory, bytes.len()))
            }
            None => None,
        };
        let globals = Globals::read(&module.globals, instance, store);
        let held_bytes = store.data().limits.bytes();
        Some(Self { memory, globals, held_bytes, place: None })
    }
}
