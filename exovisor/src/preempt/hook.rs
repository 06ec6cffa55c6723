//! The host function that preempted code calls without having imported it.

#![allow(unsafe_code)]

use crate::arena::Stacks;
use crate::call;
use crate::dormant;
use crate::ending::{Ended, Stopper};
use crate::isolate::State;
use crate::preempt::signal;
use std::ffi::c_void;
use std::ops::Range;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::{Context, Poll};
use wasmtime::{
    AsContextMut, Caller, Engine, Func, InstancePre, Linker, Module, Result, Store, format_err,
};

/// wasmtime's function reference (`VMFuncRef` of wasmtime-environ 48, `vmtypes.rs`), which
/// [`Func::to_raw`] points to.
#[repr(C)]
struct FuncRef {
    array_call: *const c_void,
    wasm_call: *const c_void,
    type_index: u32,
    context: *mut u8,
}

/// What a context of an instance begins with (`VMCONTEXT_MAGIC`).
const INSTANCE: u32 = u32::from_le_bytes(*b"core");
/// What a context of a host function begins with (`VM_ARRAY_CALL_HOST_FUNC_MAGIC`).
const HOST_FUNCTION: u32 = u32::from_le_bytes(*b"ACHF");

/// Imports the function and exports it again, so that its reference has the entry for Wasm code;
/// and has one of its own.
const HELPER: &str = r#"(module (import "exocell" "yield" (func)) (export "yield" (func 0))
    (func (export "own")))"#;

/// The yield function of one engine, as compiled code calls it.
pub(crate) struct Hook {
    /// Compiled code's entry to the function.
    pub(super) wasm_call: usize,
    /// The function's own context.
    pub(super) callee: usize,
    /// Where the engine's stacks are, if they are in compact slots.
    stacks: Option<Arc<Stacks>>,
    /// Makes the helper, as long as which the function and the code of its entry live.
    helper: InstancePre<State>,
}

impl Hook {
    /// Defines the function in `engine`.
    ///
    /// # Errors
    /// When wasmtime's function references do not have the form that is expected here.
    pub fn new(engine: &Engine, stacks: Option<Arc<Stacks>>) -> Result<Self> {
        let mut linker = Linker::new(engine);
        linker.func_wrap_async("exocell", "yield", |caller, (): ()| leave(&caller))?;
        let helper = Module::new(engine, HELPER)?;
        let mut store = Store::new(engine, State::detached(engine));
        let helper = linker.instantiate_pre(&helper)?;
        let instance = call::instantiate(&helper, &mut store)?;
        let function = instance.get_func(&mut store, "yield");
        let function = function.ok_or_else(|| format_err!("the helper lost its export"))?;
        let reference = reference(&function, &mut store);
        let known = magic(reference.context) == Some(HOST_FUNCTION);
        if !known || reference.wasm_call.is_null() {
            return Err(format_err!("function references have another form than in wasmtime 48"));
        }
        Ok(Self {
            wasm_call: reference.wasm_call.addr(),
            callee: reference.context.addr(),
            stacks,
            helper,
        })
    }

    /// A function of an instance in `store` that belongs to nobody. The yield function asks its
    /// caller's instance for the store and nothing else, so where several instances of a store
    /// run, this one stands for all of them.
    pub fn anchor(&self, store: &mut Store<State>) -> Result<Func> {
        let instance = call::instantiate(&self.helper, store)?;
        let own = instance.get_func(store, "own");
        own.ok_or_else(|| format_err!("the helper lost its export"))
    }
}

/// The context of the instance that defines `function`; `None` if a host function does.
pub(super) fn instance_of(function: &Func, store: impl AsContextMut) -> Option<NonNull<u8>> {
    let context = reference(function, store).context;
    if magic(context) == Some(INSTANCE) { NonNull::new(context) } else { None }
}

fn reference(function: &Func, store: impl AsContextMut) -> FuncRef {
    let raw = function.to_raw(store).cast::<FuncRef>();
    // SAFETY: `to_raw` answers with a pointer to a live function reference, whose form is copied
    // above; there is no safe accessor for its fields.
    unsafe { raw.read() }
}

/// The word by which wasmtime tells the kinds of contexts apart.
fn magic(context: *mut u8) -> Option<u32> {
    let word = NonNull::new(context.cast::<u32>())?;
    // SAFETY: every kind of context begins with this word (`VMOpaqueContext`), and the store or
    // the linker keeps it alive; reading it is the only check that the form is the expected one.
    Some(unsafe { word.read() })
}

fn leave<'a>(caller: &Caller<'a, State>) -> Box<dyn Future<Output = Result<()>> + Send + 'a> {
    signal::arrived();
    let state = caller.data();
    let memory = state.memory.map_or(0..0, |memory| {
        let start = memory.data_ptr(caller).addr();
        start..start + memory.data_size(caller)
    });
    Box::new(Leave { stopper: state.stopper.clone(), memory, left: false })
}

/// Waits exactly once, unless the isolate was ended.
struct Leave {
    stopper: Stopper,
    /// Where the instance's memory is.
    memory: Range<usize>,
    left: bool,
}

impl Future for Leave {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        if self.stopper.is_over() {
            return Poll::Ready(Err(wasmtime::Error::new(Ended)));
        }
        if self.left {
            return Poll::Ready(Ok(()));
        }
        self.left = true;
        signal::leave();
        if let Some(guest) = self.stopper.guest()
            && let Some(stacks) = &guest.code.hook.stacks
        {
            dormant::leaves(|address| stacks.stack_at(address), self.memory.clone());
        }
        Poll::Pending
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        dormant::returns();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn function_references_have_the_expected_form() {
        let engine = Engine::default();
        let hook = Hook::new(&engine, None).unwrap();
        assert_ne!((hook.wasm_call, hook.callee), (0, 0));
        let text = r#"(module (func (export "own")) (memory (export "memory") 1))"#;
        let module = Module::new(&engine, text).unwrap();
        let mut store = Store::new(&engine, ());
        let instance = wasmtime::Instance::new(&mut store, &module, &[]).unwrap();
        let own = instance.get_func(&mut store, "own").unwrap();
        let host = Func::wrap(&mut store, || ());
        assert!(instance_of(&own, &mut store).is_some());
        assert!(instance_of(&host, &mut store).is_none());
    }
}
