//! What C and C++ programs leave for their host: memory, strings, mathematics, the C++ runtime.
//!
//! All of it acts on the isolate's own memory only, whose every address is checked.

mod heap;
mod loops;
mod math;
mod runtime;

pub(crate) use heap::Heap;

use crate::hostcalls::state::State;
use wasmtime::{AsContextMut, Caller, Extern, Linker, Result, SharedMemory, bail};
use wiggle::GuestMemory;

/// Defines them all.
pub(crate) fn link(linker: &mut Linker<State>) -> Result<()> {
    runtime::link(linker)?;
    math::link(linker)?;
    loops::link(linker)
}

/// The isolate's memory if its threads share it.
pub(crate) fn shared(caller: &Caller<'_, State>) -> Option<SharedMemory> {
    caller.data().threads.as_ref().map(|threads| threads.shared().memory.clone())
}

/// The isolate's memory, wherever it is.
pub(crate) fn memory<'a>(
    caller: &'a mut Caller<'_, State>,
    shared: Option<&'a SharedMemory>,
) -> Result<GuestMemory<'a>> {
    if let Some(shared) = shared {
        return Ok(GuestMemory::Shared(shared.data()));
    }
    match caller.get_export("memory") {
        Some(Extern::Memory(memory)) => {
            Ok(GuestMemory::Unshared(memory.data_mut(caller.as_context_mut())))
        }
        _ => bail!("the module exports no memory named `memory`"),
    }
}
