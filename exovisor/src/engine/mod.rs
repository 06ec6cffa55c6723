//! The process's engines: one a metering mode, made when the first module asks for it.

pub(crate) mod instance_cache;

use crate::admission::AdmissionError;
use crate::hostcalls;
use crate::hostcalls::state::State;
use crate::memory::compact_pool::{Memories, Stacks};
use crate::policy::{Metering, Policy, Pool, Slots};
use crate::preempt::Hook;
use instance_cache::InstanceCache;
use std::io;
use std::sync::Arc;
use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, Linker, PoolingAllocationConfig,
    StackCreator,
};

/// A loop of the host that calls the program back takes another stack.
const STACKS_PER_CALL: u32 = 2;
/// Where functions begin, as a power of two: with a line of the processor's cache. A loop is up to
/// a tenth slower at some places of a line than at others; so it does not depend on the functions
/// before its own.
const FUNCTION_ALIGNMENT_LOG2: &str = "6";

/// One compiler configuration with its pool, and all host functions defined.
pub(crate) struct Host {
    pub engine: Engine,
    pub linker: Linker<State>,
    pub metering: Metering,
    /// Bytes of each memory that stay resident when its isolate goes.
    pub kept_bytes: usize,
    /// Whether calls can be hibernated: all memories are in compact slots.
    pub compact: bool,
    /// What is kept for next calls.
    pub instance_cache: InstanceCache,
    /// How the scheduler takes the CPU from code of this engine.
    pub hook: Hook<State>,
}

impl Host {
    pub fn new(policy: &Policy, metering: Metering) -> Result<Self, AdmissionError> {
        let failed =
            |error: wasmtime::Error| AdmissionError::Engine { message: format!("{error:#}") };
        let mut config = config(policy, metering);
        let stacks = allocate(&mut config, policy).map_err(|error| failed(error.into()))?;
        let engine = Engine::new(&config).map_err(failed)?;
        let mut linker = Linker::new(&engine);
        hostcalls::link(&mut linker).map_err(failed)?;
        let compact = stacks.is_some();
        let hook = Hook::new(&engine, stacks, State::detached(&engine)).map_err(failed)?;
        let kept_bytes = policy.pool.as_ref().map_or(0, |pool| pool.keep_resident_bytes);
        let instance_cache = InstanceCache::new(policy);
        Ok(Self { engine, linker, metering, kept_bytes, compact, instance_cache, hook })
    }
}

/// An engine that compiles what a [`Host`] of the same policy loads, and has no place to run it.
///
/// # Errors
/// [`AdmissionError::Engine`].
pub(crate) fn compiler(policy: &Policy, metering: Metering) -> Result<Engine, AdmissionError> {
    Engine::new(&config(policy, metering))
        .map_err(|error| AdmissionError::Engine { message: format!("{error:#}") })
}

/// All that decides what compiled code is like.
fn config(policy: &Policy, metering: Metering) -> Config {
    let mut config = Config::new();
    config
        .epoch_interruption(metering == Metering::Epoch)
        .consume_fuel(metering == Metering::Fuel)
        .max_wasm_stack(policy.wasm_stack_bytes)
        .async_stack_size(policy.stack_bytes())
        .parallel_compilation(false)
        .memory_init_cow(policy.copy_on_write)
        // Walking the stack is not for frames that a signal has cut in two.
        .wasm_backtrace_max_frames(None)
        // There is no garbage collector, and without one the engine takes subtypes of functions
        // but ends the process when a call asks for one.
        .wasm_gc(false)
        // Admission takes memories that are imported as shared only.
        .shared_memory(true);
    align(&mut config);
    if policy.pool.as_ref().is_some_and(|pool| pool.slots == Slots::Compact) {
        config
            // First contents that are mapped would be mappings of their own.
            .memory_init_cow(false)
            .memory_may_move(false)
            // What is beyond a memory's length in its slot is not guarded, so each access is
            // checked against the length. Of a reservation the compiler takes for granted that it
            // is guarded, and checks against its end.
            .memory_reservation(0)
            .memory_guard_size(0)
            .guard_before_linear_memory(false);
    }
    config
}

/// Says where isolates lie; where their stacks are, if they are in compact slots.
fn allocate(config: &mut Config, policy: &Policy) -> io::Result<Option<Arc<Stacks>>> {
    Ok(match &policy.pool {
        Some(pool) if pool.slots == Slots::Compact => Some(compact(config, policy, pool)?),
        Some(pool) => {
            config.allocation_strategy(InstanceAllocationStrategy::Pooling(pooling(pool)));
            None
        }
        None => None,
    })
}

#[allow(unsafe_code)]
fn align(config: &mut Config) {
    // SAFETY: of the compiler's settings this one only says where code lies. There is no other
    // way to say it.
    unsafe { config.cranelift_flag_set("log2_min_function_alignment", FUNCTION_ALIGNMENT_LOG2) };
}

/// All stacks in one mapping and all memories in another.
fn compact(config: &mut Config, policy: &Policy, pool: &Pool) -> io::Result<Arc<Stacks>> {
    let count = pool.stacks.saturating_mul(STACKS_PER_CALL) as usize;
    let stacks = Arc::new(Stacks::new(count, policy.stack_bytes())?);
    let memories =
        Memories::new(pool.isolates as usize, pool.memory_bytes, pool.keep_resident_bytes)?;
    config
        .with_host_stack(Arc::clone(&stacks) as Arc<dyn StackCreator>)
        .with_host_memory(Arc::new(memories));
    Ok(stacks)
}

fn pooling(pool: &Pool) -> PoolingAllocationConfig {
    let mut pooling = PoolingAllocationConfig::new();
    pooling
        .total_core_instances(pool.isolates)
        .total_component_instances(pool.isolates)
        .total_memories(pool.isolates)
        .total_tables(pool.isolates)
        // An instance that is kept keeps its stack.
        .total_stacks(pool.stacks.saturating_mul(STACKS_PER_CALL).saturating_add(pool.kept_max()))
        .max_memory_size(pool.memory_bytes)
        .table_elements(pool.table_elements)
        .max_unused_warm_slots(pool.isolates)
        .linear_memory_keep_resident(pool.keep_resident_bytes)
        .table_keep_resident(pool.keep_resident_bytes)
        .memory_protection_keys(Enabled::Auto)
        // Where the host may say which pages were written to, the engine leaves those alone that
        // are not present: one that is swapped out, or on its way to another place, would come
        // back to the next tenant (`exec/reuse` looks for these, too).
        .pagemap_scan(Enabled::No);
    pooling
}
