//! One call: from a function and its arguments to an outcome, in an instance of its own.

use crate::engine::Host;
use crate::exec::module::AdmittedModule;
use crate::exec::outcome::Outcome;
use crate::exec::reclaim;
use crate::hostcalls::context::Attached;
use crate::hostcalls::state::State;
use crate::policy::Metering;
use crate::preempt;
use crate::preempt::cancel::CancelHandle;
use std::sync::Arc;
use std::time::Instant;
use wasmtime::{
    Func, FuncType, Instance, InstancePre, ModuleExport, Store, Trap, TypedFunc, UpdateDeadline,
    Val, ValType, WasmParams, WasmResults,
};
use wasmtime_wasi::I32Exit;

/// A number that is passed to a function or returned by it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A 32-bit integer.
    I32(i32),
    /// A 64-bit integer.
    I64(i64),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
}

/// An exported function of an admitted module. Clones are the same function.
#[derive(Clone)]
pub struct Function {
    pub(crate) module: Arc<AdmittedModule>,
    export: ModuleExport,
    /// Which of the module's exports it is.
    number: usize,
    shape: Shape,
}

/// How a function is called: the common types without boxing each value.
#[derive(Clone, Debug)]
enum Shape {
    Unit,
    I32ToI32,
    Other { parameters: Arc<[ValType]>, results: usize },
}

/// What a call is limited to.
#[derive(Clone, Debug)]
pub struct CallLimits {
    /// Bytes of all memories and tables together.
    pub memory_bytes: u64,
    /// When it is ended.
    pub deadline: Option<Instant>,
    /// CPU time it may use, in nanoseconds. Only a scheduler can tell.
    pub cpu_ns: Option<u64>,
    /// Threads alive at once beside the first, for modules that share their memory.
    pub threads: u32,
    /// Instructions of each thread; needed when the module is metered by fuel, ignored otherwise.
    pub fuel: u64,
}

/// The arguments do not fit the function.
#[derive(Debug, thiserror::Error)]
#[error("the function takes {wanted} arguments of other types than the {given} that were given")]
pub struct ArgumentError {
    /// How many it takes.
    pub wanted: usize,
    /// How many there were.
    pub given: usize,
}

impl Function {
    pub(crate) fn of(admitted: &Arc<AdmittedModule>, name: &str) -> Option<Self> {
        let module = &admitted.module;
        let ty = module.get_export(name)?.func()?.clone();
        let shape = Shape::of(&ty)?;
        let export = module.get_export_index(name)?;
        let number = module.exports().position(|export| export.name() == name)?;
        Some(Self { module: Arc::clone(admitted), export, number, shape })
    }

    /// The module it belongs to.
    #[must_use]
    pub fn owner(&self) -> &str {
        &self.module.owner
    }

    /// Arguments from text: numbers, in the types that the function takes.
    ///
    /// # Errors
    /// [`ArgumentError`] when there are more or fewer, or one is no such number.
    pub fn parse(&self, texts: &[String]) -> Result<Vec<Value>, ArgumentError> {
        let types = self.parameters();
        let values: Option<Vec<Value>> =
            texts.iter().zip(types).map(|(text, ty)| Value::parse(text, ty)).collect();
        let values = values.filter(|values| values.len() == texts.len());
        let values = values.filter(|values| values.len() == types.len());
        values.ok_or(ArgumentError { wanted: types.len(), given: texts.len() })
    }

    /// Whether its module imports host functions, so that a call of it needs capabilities
    /// ([`crate::Scheduler::attach`]).
    #[must_use]
    pub fn uses_host(&self) -> bool {
        self.module.uses_host
    }

    fn parameters(&self) -> &[ValType] {
        match &self.shape {
            Shape::Unit => &[],
            Shape::I32ToI32 => &[ValType::I32],
            Shape::Other { parameters, .. } => parameters,
        }
    }

    /// # Errors
    /// [`ArgumentError`] when number or types differ.
    pub(crate) fn check(&self, arguments: &[Value]) -> Result<(), ArgumentError> {
        let types = self.parameters();
        let fits = |(value, ty): (&Value, &ValType)| value.has_type(ty);
        if types.len() == arguments.len() && arguments.iter().zip(types).all(fits) {
            return Ok(());
        }
        Err(ArgumentError { wanted: types.len(), given: arguments.len() })
    }

    async fn call(
        &self,
        instance: &Instance,
        store: &mut Store<State>,
        entries: Option<&mut Entries>,
        arguments: &[Value],
    ) -> wasmtime::Result<Vec<Value>> {
        let mut own = None;
        let known = entries.map_or(&mut own, |entries| &mut entries.function);
        let entry = known.take().filter(|entry| entry.number == self.number);
        let Entry { func, typed, .. } = known.insert(match entry {
            Some(entry) => entry,
            None => self.find_in(instance, store)?,
        });
        enter(func, store);
        unless_missed().await;
        match (typed, arguments) {
            (Typed::Unit(func), _) => {
                func.call_async(store, ()).await?;
                Ok(Vec::new())
            }
            (Typed::I32ToI32(func), [Value::I32(argument)]) => {
                let (result,) = func.call_async(store, (*argument,)).await?;
                Ok(vec![Value::I32(result)])
            }
            (Typed::I32ToI32(_), _) => Err(no_export()),
            (Typed::Other { results }, arguments) => {
                let arguments: Vec<Val> = arguments.iter().copied().map(Value::to_val).collect();
                let mut out = vec![Val::I32(0); *results];
                func.call_async(store, &arguments, &mut out).await?;
                out.iter().map(Value::from_val).collect::<Option<_>>().ok_or_else(no_export)
            }
        }
    }

    fn find_in(&self, instance: &Instance, store: &mut Store<State>) -> wasmtime::Result<Entry> {
        let func = found(instance, store, &self.export)?;
        let typed = match &self.shape {
            Shape::Unit => Typed::Unit(typed(func, store)),
            Shape::I32ToI32 => Typed::I32ToI32(typed(func, store)),
            Shape::Other { results, .. } => Typed::Other { results: *results },
        };
        Ok(Entry { number: self.number, func, typed })
    }
}

/// The functions of one instance that were called last. They are kept with it, for to find one
/// counts the uses of its type, and all calls of an engine count in one place.
#[derive(Default)]
pub(crate) struct Entries {
    /// What the start section named.
    start: Option<TypedFunc<(), ()>>,
    /// What threads begin with.
    thread: Option<TypedFunc<(i32, i32), ()>>,
    function: Option<Entry>,
}

struct Entry {
    number: usize,
    func: Func,
    typed: Typed,
}

enum Typed {
    Unit(TypedFunc<(), ()>),
    I32ToI32(TypedFunc<(i32,), (i32,)>),
    Other { results: usize },
}

fn no_export() -> wasmtime::Error {
    wasmtime::format_err!("the instance differs from its module")
}

impl Shape {
    /// `None` for types other than numbers.
    fn of(ty: &FuncType) -> Option<Self> {
        let number =
            |ty: &ValType| matches!(ty, ValType::I32 | ValType::I64 | ValType::F32 | ValType::F64);
        let parameters: Vec<ValType> = ty.params().collect();
        let results: Vec<ValType> = ty.results().collect();
        if !parameters.iter().chain(&results).all(number) {
            return None;
        }
        Some(match (&parameters[..], &results[..]) {
            ([], []) => Self::Unit,
            ([ValType::I32], [ValType::I32]) => Self::I32ToI32,
            _ => Self::Other { parameters: parameters.into(), results: results.len() },
        })
    }
}

impl Value {
    fn parse(text: &str, ty: &ValType) -> Option<Self> {
        match ty {
            ValType::I32 => text.parse().ok().map(Self::I32),
            ValType::I64 => text.parse().ok().map(Self::I64),
            ValType::F32 => text.parse().ok().map(Self::F32),
            ValType::F64 => text.parse().ok().map(Self::F64),
            _ => None,
        }
    }

    fn has_type(&self, ty: &ValType) -> bool {
        matches!(
            (self, ty),
            (Self::I32(_), ValType::I32)
                | (Self::I64(_), ValType::I64)
                | (Self::F32(_), ValType::F32)
                | (Self::F64(_), ValType::F64)
        )
    }

    fn to_val(self) -> Val {
        match self {
            Self::I32(value) => Val::I32(value),
            Self::I64(value) => Val::I64(value),
            Self::F32(value) => Val::F32(value.to_bits()),
            Self::F64(value) => Val::F64(value.to_bits()),
        }
    }

    fn from_val(value: &Val) -> Option<Self> {
        match value {
            Val::I32(value) => Some(Self::I32(*value)),
            Val::I64(value) => Some(Self::I64(*value)),
            Val::F32(bits) => Some(Self::F32(f32::from_bits(*bits))),
            Val::F64(bits) => Some(Self::F64(f64::from_bits(*bits))),
            _ => None,
        }
    }
}

/// What a scheduled call starts from.
pub(crate) fn state(function: &Function, limits: &CallLimits, attached: Option<Attached>) -> State {
    let module = &function.module;
    let cancel = CancelHandle::new(Some(Arc::clone(&module.code)), module.epochs());
    State::new(attached, cancel, limits.memory_bytes, limits.deadline)
}

/// A store with its limits set.
pub(crate) fn store(host: &Host, state: State, fuel: u64) -> wasmtime::Result<Store<State>> {
    let mut store = Store::new(&host.engine, state);
    store.limiter(|state| &mut state.limits);
    if host.metering == Metering::Epoch {
        // The epoch is the engine's: others' ends and time slices advance it too.
        store.epoch_deadline_callback(|store| {
            Ok(if store.data().cancel.is_over() {
                UpdateDeadline::Interrupt
            } else {
                UpdateDeadline::Yield(1)
            })
        });
    }
    meter(host, &mut store, fuel)?;
    Ok(store)
}

/// Begins to count what a store's next user runs, where it is counted.
pub(crate) fn meter(host: &Host, store: &mut Store<State>, fuel: u64) -> wasmtime::Result<()> {
    match host.metering {
        Metering::Time => {}
        Metering::Fuel => store.set_fuel(fuel)?,
        Metering::Epoch => store.set_epoch_deadline(1),
    }
    Ok(())
}

/// A new instance, also in a store that looks at epochs. What the engine makes of first contents is
/// code that looks at them, too: it finds the next one far away.
pub(crate) fn instantiate_metered(
    host: &Host,
    instance: &InstancePre<State>,
    store: &mut Store<State>,
) -> wasmtime::Result<Instance> {
    const FAR: u64 = 1 << 40;
    if host.metering != Metering::Epoch {
        return preempt::instantiate(instance, store);
    }
    store.set_epoch_deadline(FAR);
    let made = preempt::instantiate(instance, store);
    store.set_epoch_deadline(1);
    made
}

/// Runs the start function and calls.
pub(crate) async fn run(
    function: &Function,
    instance: &Instance,
    store: &mut Store<State>,
    mut entries: Option<&mut Entries>,
    arguments: &[Value],
) -> wasmtime::Result<Vec<Value>> {
    note_memory(&function.module, instance, store);
    let began = begin(&function.module, instance, store, entries.as_deref_mut()).await;
    let result = match began {
        Ok(()) => function.call(instance, store, entries, arguments).await,
        Err(error) => Err(error),
    };
    exit(store);
    result
}

/// Says which memory is the instance's, where it matters to a hibernated call.
fn note_memory(module: &AdmittedModule, instance: &Instance, store: &mut Store<State>) {
    if let Some(export) = module.memories.first().filter(|_| module.host.compact) {
        let memory = instance.get_module_export(&mut *store, export);
        store.data_mut().memory = memory.and_then(wasmtime::Extern::into_memory);
    }
}

/// Runs the start function of a new instance, if its module has one.
pub(crate) async fn begin(
    module: &AdmittedModule,
    instance: &Instance,
    store: &mut Store<State>,
    entries: Option<&mut Entries>,
) -> wasmtime::Result<()> {
    let Some(export) = &module.start else { return Ok(()) };
    let mut own = None;
    let known = entries.map_or(&mut own, |entries| &mut entries.start);
    // Validation sees to it that a start function takes and returns nothing.
    entered(known, export, instance, store).await?.call_async(store, ()).await
}

/// Runs a thread's entry, which takes two words and returns nothing
/// ([`crate::admission::thread_entry::Entry::of`]).
pub(crate) async fn thread(
    export: &ModuleExport,
    instance: &Instance,
    store: &mut Store<State>,
    entries: Option<&mut Entries>,
    words: (i32, i32),
) -> wasmtime::Result<()> {
    let mut own = None;
    let known = entries.map_or(&mut own, |entries| &mut entries.thread);
    entered(known, export, instance, store).await?.call_async(store, words).await
}

/// An instance's function, found at most once, which can be preempted from here on.
async fn entered<'a, P: WasmParams, R: WasmResults>(
    known: &'a mut Option<TypedFunc<P, R>>,
    export: &ModuleExport,
    instance: &Instance,
    store: &mut Store<State>,
) -> wasmtime::Result<&'a TypedFunc<P, R>> {
    let func = match known.take() {
        Some(func) => func,
        None => typed(found(instance, store, export)?, store),
    };
    enter(func.func(), store);
    unless_missed().await;
    Ok(known.insert(func))
}

fn found(
    instance: &Instance,
    store: &mut Store<State>,
    export: &ModuleExport,
) -> wasmtime::Result<Func> {
    let func = instance.get_module_export(&mut *store, export);
    func.and_then(wasmtime::Extern::into_func).ok_or_else(no_export)
}

/// A function whose types are known from its module. The engine's own comparison locks what all
/// its stores share.
#[allow(unsafe_code)]
fn typed<P: WasmParams, R: WasmResults>(func: Func, store: &Store<State>) -> TypedFunc<P, R> {
    // SAFETY: an instance's function has the types that its module exports it with, and callers
    // have looked at those ([`Shape::of`], [`crate::admission::thread_entry::Entry::of`]). There is
    // no safe way not to look again.
    unsafe { TypedFunc::new_unchecked(store, func) }
}

/// Makes the instance of `func` preemptible.
pub(crate) fn enter(func: &wasmtime::Func, store: &mut Store<State>) {
    let cancel = store.data().cancel.clone();
    if let Some(wasm) = cancel.wasm() {
        wasm.enter(func, store);
    }
}

/// Goes on in the next time slice if a signal came for this one's end before there was an instance.
async fn unless_missed() {
    if preempt::missed() {
        preempt::leave();
        reclaim::next_slice().await;
    }
}

/// The instance is done, or done for now.
pub(crate) fn exit(store: &Store<State>) {
    if let Some(wasm) = store.data().cancel.wasm() {
        wasm.exit();
    }
}

/// What an error of a call means.
pub(crate) fn outcome(state: &State, error: &wasmtime::Error) -> Outcome {
    let State { cancel, limits, threads, .. } = state;
    let refused = limits.refused();
    let is_full = threads.as_ref().is_some_and(|threads| threads.shared().is_full());
    if let Some(exit) = error.downcast_ref::<I32Exit>() {
        return Outcome::Exited(exit.0);
    }
    if let Some(reason) = cancel.reason() {
        return Outcome::Ended(reason);
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::OutOfFuel) => Outcome::OutOfFuel,
        // A program that cannot grow aborts; libc does it with `unreachable`.
        Some(Trap::UnreachableCodeReached) if refused || is_full => {
            Outcome::OutOfMemory { limit: limits.bytes_max() }
        }
        None if refused => Outcome::OutOfMemory { limit: limits.bytes_max() },
        Some(trap) => Outcome::Trap(trap.to_string()),
        None => Outcome::Trap(format!("{:#}", error.root_cause())),
    }
}
