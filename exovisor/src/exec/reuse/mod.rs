//! Instances that served a call and serve the module's next one.
//!
//! To make a store and an instance and to take them down again is most of what a short call
//! costs. Where all is known that calls of a module can change ([`Changes`]), an instance is made
//! as new when its call has returned, and kept. Modules have one owner, so it never serves
//! another tenant.
//!
//! ```text
//!  PooledInstance::new ──call──> returned ──as new──> kept ──PooledInstance::again─> call ──> ...
//!                         │ trapped, ended, grown,              │ the pool has no room,
//!                         │ much was written to                 │ or its module goes
//!                         v                                     v
//!                      dropped                               dropped
//! ```

mod free_lists;
mod globals;
#[cfg(test)]
mod tests;

use free_lists::FreeLists;
pub(crate) use free_lists::set_worker;
use globals::Globals;

use crate::admission::changes::Changes;
use crate::engine::instance_cache::{CacheSlot, Evictable, InstanceCache};
use crate::exec::call::{self, Entries};
use crate::exec::module::{AdmittedModule, Link, unlinked};
use crate::exec::outcome::Outcome;
use crate::exec::reclaim;
use crate::hostcalls::limits::Limits;
use crate::hostcalls::state::State;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use wasmtime::{Instance, InstancePre, Memory, PoolConcurrencyLimitError, Store};

/// Longer first contents are not kept a copy of, in bytes.
const IMAGE_BYTES_MAX: u64 = 4 << 20;

/// What is kept of one module without threads; of others it is kept with their memories
/// ([`crate::exec::threads::Template`]).
pub(crate) struct Reuse {
    image_bytes: usize,
    /// What the memory begins with.
    image: OnceLock<Box<[u8]>>,
    kept: FreeLists,
}

impl Reuse {
    /// For a module with these changes; `None` if its instances are not kept.
    pub fn new(instance_cache: &InstanceCache, changes: &Changes) -> Option<Self> {
        let image_bytes = changes.image_bytes.filter(|bytes| *bytes <= IMAGE_BYTES_MAX)?;
        let image_bytes = image_bytes as usize;
        let (image, kept) = (OnceLock::new(), FreeLists::new(instance_cache.workers));
        (instance_cache.max > 0).then_some(Self { image_bytes, image, kept })
    }

    fn image(&self) -> &[u8] {
        self.image.get().map_or(&[], |image| image)
    }
}

impl Evictable for AdmittedModule {
    fn is_listed(&self) -> &AtomicBool {
        &self.is_kept
    }

    fn evict(&self) {
        let kept = match (&self.link, &self.reuse) {
            (Link::Threaded(template), _) => template.release(),
            (Link::Single(_), Some(reuse)) => reuse.kept.release(),
            (Link::Single(_), None) => Vec::new(),
        };
        // Without a lock.
        drop(kept);
    }
}

/// A store with an instance, for one call after the other.
pub(crate) struct PooledInstance {
    pub store: Store<State>,
    pub instance: Instance,
    /// How it is made as new, if it may be kept; on the heap, since most of those that live at once
    /// may not.
    pub reset_info: Option<Box<ResetInfo>>,
}

/// How an instance is made as new: what it began with, and its functions.
pub(crate) struct ResetInfo {
    pub entries: Entries,
    /// The memory and its length in bytes.
    memory: Option<(Memory, usize)>,
    globals: Globals,
    /// What all memories and tables hold, in bytes.
    held_bytes: u64,
    slot: Option<CacheSlot>,
}

/// An instance could not be made for a call. The store, if there is one, knows the limits.
pub(crate) struct InstantiateError {
    pub store: Option<Store<State>>,
    pub error: wasmtime::Error,
}

impl InstantiateError {
    /// What it means for the call.
    pub fn outcome(self) -> Outcome {
        match &self.store {
            Some(store) => call::outcome(store.data(), &self.error),
            None => Outcome::failed(&self.error),
        }
    }
}

impl PooledInstance {
    /// One that was kept, or a new one, of a module without threads.
    ///
    /// # Errors
    /// [`InstantiateError`] when the pool has no room, or the state may not hold so much memory.
    pub fn of(module: &AdmittedModule, state: State, fuel: u64) -> Result<Self, InstantiateError> {
        let kept = module.reuse.as_ref().and_then(|reuse| reuse.kept.take());
        let fitting = kept.filter(|made| made.fits(&state));
        match (fitting, &module.link) {
            (Some(made), _) => made.again(module, state, fuel),
            (None, Link::Single(instance)) => Self::new(module, instance, state, fuel),
            (None, Link::Threaded(_)) => Err(InstantiateError { store: None, error: unlinked() }),
        }
    }

    /// Whether a call may hold as much as it does.
    pub fn fits(&self, state: &State) -> bool {
        self.reset_info
            .as_ref()
            .is_some_and(|reset_info| reset_info.held_bytes <= state.limits.bytes_max())
    }

    /// One that was made as new, for another call.
    ///
    /// # Errors
    /// [`InstantiateError`] when fuel cannot be given.
    pub fn again(
        mut self,
        module: &AdmittedModule,
        mut state: State,
        fuel: u64,
    ) -> Result<Self, InstantiateError> {
        let held_bytes = self.reset_info.as_ref().map_or(0, |reset_info| reset_info.held_bytes);
        state.limits = Limits::holding(held_bytes, state.limits.bytes_max());
        *self.store.data_mut() = state;
        match call::meter(&module.host, &mut self.store, fuel) {
            Ok(()) => Ok(self),
            Err(error) => Err(InstantiateError { store: Some(self.store), error }),
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
    ) -> Result<Self, InstantiateError> {
        let failed = |store, error| InstantiateError { store, error };
        let bytes_max = state.limits.bytes_max();
        let mut store =
            call::store(&module.host, state, fuel).map_err(|error| failed(None, error))?;
        let mut made = call::instantiate_metered(&module.host, linked, &mut store);
        if made.as_ref().is_err_and(|error| error.is::<PoolConcurrencyLimitError>()) {
            // What is kept is in the way.
            module.host.instance_cache.evict_all();
            store.data_mut().limits = Limits::new(bytes_max);
            made = call::instantiate_metered(&module.host, linked, &mut store);
        }
        match made {
            Ok(instance) => {
                let reset_info = ResetInfo::read(module, &instance, &mut store).map(Box::new);
                Ok(Self { store, instance, reset_info })
            }
            Err(error) => Err(failed(Some(store), error)),
        }
    }

    /// Keeps it, which was made as new, for the module's next call; or answers with it, if there
    /// are enough.
    pub fn keep(mut self, module: &Arc<AdmittedModule>) -> Option<Self> {
        let Some(reuse) = &module.reuse else { return Some(self) };
        if !self.take_slot(&module.host.instance_cache) {
            return Some(self);
        }
        let left = reuse.kept.keep(self);
        if left.is_none() {
            module.host.instance_cache.list(module);
        }
        left
    }

    /// Makes it as new and nobody's, if that is possible and not much work.
    pub async fn reset(&mut self, module: &AdmittedModule) -> bool {
        let Self { store, reset_info: Some(reset_info), .. } = self else { return false };
        if let Some((memory, bytes)) = reset_info.memory {
            let image = module.reuse.as_ref().map_or(&[][..], Reuse::image);
            let bytes_max = module.host.instance_cache.bytes_max;
            if memory.data_size(&*store) != bytes
                || !reclaim::reset(memory, store, image, bytes_max).await
            {
                return false;
            }
        }
        store.data_mut().forget();
        reset_info.globals.reset(store).is_ok()
    }

    /// Counts it as one that outlives its call; false if there may be no more of these.
    pub fn take_slot(&mut self, instance_cache: &InstanceCache) -> bool {
        let Some(reset_info) = &mut self.reset_info else { return false };
        reset_info.slot = reset_info.slot.take().or_else(|| instance_cache.slot());
        reset_info.slot.is_some()
    }
}

impl ResetInfo {
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
            (None, None) if module.reusable && matches!(module.link, Link::Threaded(_)) => None,
            _ => return None,
        };
        let globals = Globals::read(&module.globals, instance, store);
        let held_bytes = store.data().limits.bytes();
        Some(Self { entries: Entries::default(), memory, globals, held_bytes, slot: None })
    }
}
