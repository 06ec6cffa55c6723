//! The process's engines: one a metering mode, made when the first module asks for it.

use crate::admission::AdmissionError;
use crate::hostcalls;
use crate::isolate::State;
use crate::policy::{Metering, Policy, Pool, Slots};
use crate::preempt::Hook;
use std::sync::Arc;
use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, Linker, PoolingAllocationConfig,
};

/// A loop of the host that calls the program back takes another stack.
const STACKS_PER_CALL: u32 = 2;

/// One compiler configuration with its pool, and all host functions defined.
pub(crate) struct Host {
    pub engine: Engine,
    pub linker: Linker<State>,
    pub metering: Metering,
    /// How the scheduler takes the CPU from code of this engine.
    pub hook: Arc<Hook>,
}

impl Host {
    pub fn new(policy: &Policy, metering: Metering) -> Result<Self, AdmissionError> {
        let failed =
            |error: wasmtime::Error| AdmissionError::Engine { message: format!("{error:#}") };
        let engine = Engine::new(&config(policy, metering)).map_err(failed)?;
        let mut linker = Linker::new(&engine);
        hostcalls::link(&mut linker).map_err(failed)?;
        let hook = Arc::new(Hook::new(&engine).map_err(failed)?);
        Ok(Self { engine, linker, metering, hook })
    }
}

fn config(policy: &Policy, metering: Metering) -> Config {
    let mut config = Config::new();
    config
        .epoch_interruption(metering == Metering::Epoch)
        .consume_fuel(metering == Metering::Fuel)
        .max_wasm_stack(policy.wasm_stack_bytes)
        .async_stack_size(policy.wasm_stack_bytes + policy.host_stack_bytes)
        .parallel_compilation(false)
        .memory_init_cow(policy.copy_on_write)
        // Walking the stack is not for frames that a signal has cut in two.
        .wasm_backtrace_max_frames(None)
        // Admission takes memories that are imported as shared only.
        .shared_memory(true);
    if let Some(pool) = &policy.pool {
        slots(&mut config, pool);
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pooling(pool)));
    }
    config
}

fn slots(config: &mut Config, pool: &Pool) {
    if pool.slots == Slots::Compact {
        config
            .memory_reservation(pool.memory_bytes as u64)
            .memory_guard_size(0)
            .guard_before_linear_memory(false);
    }
}

fn pooling(pool: &Pool) -> PoolingAllocationConfig {
    let mut pooling = PoolingAllocationConfig::new();
    pooling
        .total_core_instances(pool.isolates)
        .total_memories(pool.isolates)
        .total_tables(pool.isolates)
        .total_stacks(pool.stacks.saturating_mul(STACKS_PER_CALL))
        .max_memory_size(pool.memory_bytes)
        .table_elements(pool.table_elements)
        .max_unused_warm_slots(pool.isolates)
        .linear_memory_keep_resident(pool.keep_resident_bytes)
        .table_keep_resident(pool.keep_resident_bytes)
        .memory_protection_keys(match pool.slots {
            Slots::Guarded => Enabled::Auto,
            Slots::Compact => Enabled::No,
        });
    pooling
}
