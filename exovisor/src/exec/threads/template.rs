//! A module with a shared memory, which cannot be linked before the memory is there.

use crate::admission::thread_entry::Entry;
use crate::exec::reuse::PooledInstance;
use crate::exec::threads::memory_cache::MemoryCache;
use crate::hostcalls::state::State;
use wasmtime::{InstancePre, Linker, MemoryType, Module, Result, SharedMemory, Store, format_err};

const PAGE_BYTES: u64 = 64 << 10;

/// The module, its host functions, and what memory it wants.
pub(crate) struct Template {
    linker: Linker<State>,
    module: Module,
    memory: MemoryType,
    /// Both parts of the memory's name.
    name: (String, String),
    /// What threads begin with, if the module has that.
    pub entry: Option<Entry>,
    memories: MemoryCache,
}

/// An isolate's memory, and its module linked to it.
pub(crate) struct Bound {
    pub memory: SharedMemory,
    pub linked: InstancePre<State>,
    /// Instances of it that nobody uses, as new.
    pub idle: Vec<PooledInstance>,
}

/// Why there is no memory for an isolate.
pub(crate) enum Unbound {
    /// It begins with more than is granted.
    TooLarge,
    /// The host has none, or the module's imports do not fit.
    Failed(wasmtime::Error),
}

impl From<wasmtime::Error> for Unbound {
    fn from(error: wasmtime::Error) -> Self {
        Self::Failed(error)
    }
}

impl Template {
    /// Takes a module that imports a shared memory.
    ///
    /// # Errors
    /// When it does not.
    pub fn new(linker: &Linker<State>, module: &Module) -> Result<Self> {
        let memory = module.imports().find_map(|import| {
            let memory = import.ty().memory().filter(|memory| memory.is_shared()).cloned()?;
            Some((memory, (import.module().to_owned(), import.name().to_owned())))
        });
        let (memory, name) =
            memory.ok_or_else(|| format_err!("the module has no shared memory"))?;
        Ok(Self {
            linker: linker.clone(),
            module: module.clone(),
            memory,
            name,
            entry: Entry::of(module),
            memories: MemoryCache::default(),
        })
    }

    /// A memory of at most `bytes_max` bytes, all zero, with the module linked to it.
    ///
    /// # Errors
    /// [`Unbound`].
    pub fn bind(&self, bytes_max: u64) -> Result<Bound, Unbound> {
        let pages_max = u32::try_from(bytes_max / PAGE_BYTES).unwrap_or(u32::MAX);
        let pages = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let minimum = pages(self.memory.minimum());
        if minimum > pages_max {
            return Err(Unbound::TooLarge);
        }
        let maximum = pages(self.memory.maximum().unwrap_or(0)).min(pages_max);
        if let Some(spare) = self.memories.take(u64::from(maximum)) {
            return Ok(spare);
        }
        let engine = self.module.engine();
        let memory = SharedMemory::new(engine, MemoryType::shared(minimum, maximum))?;
        let mut linker = self.linker.clone();
        let store = Store::new(engine, State::detached(engine));
        linker.define(&store, &self.name.0, &self.name.1, memory.clone())?;
        Ok(Bound { memory, linked: linker.instantiate_pre(&self.module)?, idle: Vec::new() })
    }

    /// Takes back what no call uses any more; false if it is not kept.
    pub fn keep(&self, bound: Bound, is_zero: bool) -> bool {
        self.memories.keep(bound, is_zero)
    }

    /// All instances that are kept; their memories stay.
    pub fn release(&self) -> Vec<PooledInstance> {
        self.memories.release()
    }

    /// How many instances are kept.
    #[cfg(test)]
    pub fn kept(&self) -> usize {
        self.memories.instances()
    }
}
