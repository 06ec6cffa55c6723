//! wasmtime as a peer embeds it plainly: a fixed pool of threads, a fresh store each call.

use crate::BenchError;
use std::sync::atomic::{AtomicU64, Ordering};
use wasmtime::{
    Config, Engine, InstanceAllocationStrategy, Linker, Module, PoolingAllocationConfig, Store,
};

/// One module of one engine.
pub struct Plain {
    engine: Engine,
    module: wasmtime::InstancePre<()>,
}

/// Which allocator the engine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocator {
    /// Memory is mapped for each instance.
    OnDemand,
    /// Slots are kept.
    Pooling {
        /// How many.
        isolates: u32,
    },
}

impl Plain {
    /// Compiles `text`, whose function `run` is called.
    pub fn new(text: &str, allocator: Allocator) -> Result<Self, BenchError> {
        Self::compiled(text, allocator).map_err(failed)
    }

    fn compiled(text: &str, allocator: Allocator) -> wasmtime::Result<Self> {
        let mut config = Config::new();
        if let Allocator::Pooling { isolates } = allocator {
            let mut pool = PoolingAllocationConfig::new();
            pool.total_core_instances(isolates).total_memories(isolates).total_tables(isolates);
            config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
        }
        let engine = Engine::new(&config)?;
        let module = Module::new(&engine, text)?;
        let module = Linker::new(&engine).instantiate_pre(&module)?;
        Ok(Self { engine, module })
    }

    /// A fresh store and instance, one call.
    pub fn call(&self, argument: i32) -> Result<i32, BenchError> {
        self.called(argument).map_err(failed)
    }

    /// The same, and the store is kept.
    pub fn kept(&self, argument: i32) -> Result<Store<()>, BenchError> {
        let mut store = Store::new(&self.engine, ());
        self.called_in(&mut store, argument).map_err(failed)?;
        Ok(store)
    }

    fn called(&self, argument: i32) -> wasmtime::Result<i32> {
        self.called_in(&mut Store::new(&self.engine, ()), argument)
    }

    fn called_in(&self, store: &mut Store<()>, argument: i32) -> wasmtime::Result<i32> {
        let instance = self.module.instantiate(&mut *store)?;
        instance.get_typed_func::<i32, i32>(&mut *store, "run")?.call(store, argument)
    }

    /// `calls` calls on `threads` threads.
    pub fn serve(&self, threads: usize, calls: u64, argument: i32) -> Result<(), BenchError> {
        let left = AtomicU64::new(calls);
        let take = || {
            let less = |left: u64| left.checked_sub(1);
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
        };
        let work = || {
            while take() {
                self.call(argument)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, Result<(), BenchError>>| {
                worker.join().unwrap_or_else(|_| Err(failed("a thread panicked")))
            };
            workers.into_iter().try_for_each(join)
        })
    }
}

fn failed(why: impl ToString) -> BenchError {
    BenchError::Subject { subject: "wasmtime".to_owned(), why: why.to_string() }
}
