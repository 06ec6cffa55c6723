//! The host function that preempted code calls without having imported it.

#![allow(unsafe_code)]

use crate::memory::compact_pool::Stacks;
use crate::memory::hibernation;
use crate::preempt::cancel::{CancelHandle, Cancelled};
use crate::preempt::signal;
use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use wasmtime::{
    AsContextMut, Caller, Engine, Func, Instance, InstancePre, Linker, Memory, Module, Result,
    Store, format_err,
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

/// What a store must tell of the call in it, so that the call can be preempted.
pub(crate) trait Preemptible: Send + 'static {
    /// What ends the call.
    fn cancel_handle(&self) -> &CancelHandle;

    /// The memory that is packed while the call is hibernated, once there is one.
    fn memory(&self) -> Option<Memory>;
}

/// Compiled code's way to the yield function of one engine.
pub(crate) struct YieldEntry {
    /// Compiled code's entry to the function.
    pub(super) wasm_call: usize,
    /// The function's own context.
    pub(super) callee: usize,
    /// Where the engine's stacks are, if they are in compact slots.
    stacks: Option<Arc<Stacks>>,
    /// The helper. As long as it lives, the function and the code of its entry do.
    _helper: Box<dyn Any + Send + Sync>,
}

/// The yield function of one engine, for stores with data of type `T`.
pub(crate) struct Hook<T: 'static> {
    entry: Arc<YieldEntry>,
    helper: InstancePre<T>,
}

impl<T: Preemptible> Hook<T> {
    /// Defines the function in `engine`. `data` is for a store that no tenant sees.
    ///
    /// # Errors
    /// When wasmtime's function references do not have the form that is expected here.
    pub fn new(engine: &Engine, stacks: Option<Arc<Stacks>>, data: T) -> Result<Self> {
        let mut linker = Linker::new(engine);
        linker.func_wrap_async("exocell", "yield", |caller, (): ()| leave::<T>(&caller))?;
        let helper = Module::new(engine, HELPER)?;
        let mut store = Store::new(engine, data);
        let helper = linker.instantiate_pre(&helper)?;
        let instance = instantiate(&helper, &mut store)?;
        let function = instance.get_func(&mut store, "yield");
        let function = function.ok_or_else(|| format_err!("the helper lost its export"))?;
        let reference = reference(&function, &mut store);
        let known = magic(reference.context) == Some(HOST_FUNCTION);
        if !known || reference.wasm_call.is_null() {
            return Err(format_err!("function references have another form than in wasmtime 48"));
        }
        let entry = YieldEntry {
            wasm_call: reference.wasm_call.addr(),
            callee: reference.context.addr(),
            stacks,
            _helper: Box::new(helper.clone()),
        };
        Ok(Self { entry: Arc::new(entry), helper })
    }

    /// How compiled code reaches the function.
    pub fn entry(&self) -> &Arc<YieldEntry> {
        &self.entry
    }

    /// A function of an instance in `store` that belongs to nobody. The yield function asks its
    /// caller's instance for the store and nothing else, so where several instances of a store
    /// run, this one stands for all of them.
    pub fn anchor(&self, store: &mut Store<T>) -> Result<Func> {
        let instance = instantiate(&self.helper, store)?;
        let own = instance.get_func(store, "own");
        own.ok_or_else(|| format_err!("the helper lost its export"))
    }
}

/// An instance of which nothing of the module's own code has run, so that nothing has to be
/// preempted. This waits for nothing: the limits are known at once, and start functions come later.
pub(crate) fn instantiate<T: Send>(
    instance: &InstancePre<T>,
    store: &mut Store<T>,
) -> Result<Instance> {
    match pin!(instance.instantiate_async(store)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(instance) => instance,
        Poll::Pending => Err(format_err!("an instance waits while it is made")),
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

fn leave<'a, T: Preemptible>(
    caller: &Caller<'a, T>,
) -> Box<dyn Future<Output = Result<()>> + Send + 'a> {
    signal::arrived();
    let call = caller.data();
    let memory = call.memory().map_or(0..0, |memory| {
        let start = memory.data_ptr(caller).addr();
        start..start + memory.data_size(caller)
    });
    Box::new(Leave { cancel: call.cancel_handle().clone(), memory, left: false })
}

/// Waits exactly once, unless the isolate was ended.
struct Leave {
    cancel: CancelHandle,
    /// Where the instance's memory is.
    memory: Range<usize>,
    left: bool,
}

impl Future for Leave {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        if self.cancel.is_over() {
            return Poll::Ready(Err(wasmtime::Error::new(Cancelled)));
        }
        if self.left {
            return Poll::Ready(Ok(()));
        }
        self.left = true;
        signal::leave();
        if let Some(wasm) = self.cancel.wasm()
            && let Some(stacks) = &wasm.code.entry.stacks
        {
            hibernation::leaves(|address| stacks.stack_at(address), self.memory.clone());
        }
        Poll::Pending
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        hibernation::returns();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// What ends a call is all that these tests' stores keep.
    impl Preemptible for CancelHandle {
        fn cancel_handle(&self) -> &CancelHandle {
            self
        }

        fn memory(&self) -> Option<Memory> {
            None
        }
    }

    /// The yield function of an engine, for tests that only look for it.
    pub fn entry(engine: &Engine) -> Arc<YieldEntry> {
        let hook = Hook::new(engine, None, CancelHandle::new(None, None)).unwrap();
        Arc::clone(hook.entry())
    }

    #[test]
    fn function_references_have_the_expected_form() {
        let engine = Engine::default();
        let entry = entry(&engine);
        assert_ne!((entry.wasm_call, entry.callee), (0, 0));
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
