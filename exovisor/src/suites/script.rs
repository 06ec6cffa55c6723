//! One script of the specification's test suite.
//!
//! Its modules take the path of a tenant's: size limits and structure, the start section as an
//! export, our engine and its configuration, a store with limits, calls on fibers that signals
//! preempt. Two things are not as in production: the modules of a script share a store, because
//! they import from each other, and their imports are only what the script and `spectest` have.

use super::expected::Failures;
use super::values::{argument, matches};
use crate::ModuleLimits;
use crate::admission::bulk_memory;
use crate::admission::{inline_recursion, internal_exports, scan};
use crate::engine::Host;
use crate::exec::call;
use crate::hostcalls::state::State;
use crate::policy::{Metering, Policy};
use crate::preempt::cancel::CancelHandle;
use crate::preempt::{self, Allowance, CodeMap, TimeSlice, now_ns};
use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use wasmtime::{
    Extern, Func, Global, GlobalType, Instance, Linker, Memory, MemoryType, Module, ModuleExport,
    Mutability, Ref, RefType, Result, Store, Table, TableType, Trap, Val, ValType, bail,
    format_err,
};
use wast::lexer::Lexer;
use wast::parser::{self, ParseBuffer};
use wast::token::Id;
use wast::{QuoteWat, Wast, WastArg, WastDirective, WastExecute, WastInvoke, WastRet, Wat};

/// All memories and tables of a script together, in bytes.
const BYTES_MAX: u64 = 1 << 30;
/// What fuel-metered scripts may use.
const FUEL: u64 = u64::MAX / 2;
/// Shorter than in production, so that scripts have operations of several.
const PIECE_BYTES: u32 = 3;
/// The first time slice of a call, in nanoseconds. Each is twice the one before.
const FIRST_SLICE_NS: u64 = 1_000;

/// A module that was compiled, with what production keeps of it.
#[derive(Clone)]
struct Admitted {
    module: Module,
    start: Option<ModuleExport>,
    code: Arc<CodeMap>,
}

/// An instance that a script can name.
#[derive(Clone)]
struct Live {
    instance: Instance,
    code: Arc<CodeMap>,
}

struct Script<'a> {
    host: &'a Host,
    limits: ModuleLimits,
    store: Store<State>,
    linker: Linker<State>,
    definitions: HashMap<String, Admitted>,
    definition: Option<Admitted>,
    instances: HashMap<String, Live>,
    current: Option<Live>,
    /// Whether code of one module may call another's. Then a signal may find it there, which
    /// production does not have, so no signals are sent.
    linked: bool,
}

/// Runs a script: the lines of what did not pass. Each of its calls is interrupted by signals.
pub(super) fn run(host: &Host, policy: &Policy, text: &str) -> Failures {
    let directives = |text| -> std::result::Result<Failures, wast::Error> {
        let mut lexer = Lexer::new(text);
        // The scripts hold such names on purpose.
        lexer.allow_confusing_unicode(true);
        let buffer = ParseBuffer::new_with_lexer(lexer)?;
        let wast = parser::parse::<Wast<'_>>(&buffer)?;
        let mut script = Script::new(host, policy).expect("an empty script can be set up");
        let mut failures = Failures::new();
        for directive in wast.directives {
            let (line, _) = directive.span().linecol_in(text);
            if let Err(error) = script.directive(directive) {
                failures.insert(line as u32 + 1, format!("{error:#}"));
            }
        }
        Ok(failures)
    };
    directives(text).unwrap_or_else(|error| Failures::from([(0, error.to_string())]))
}

impl<'a> Script<'a> {
    fn new(host: &'a Host, policy: &Policy) -> Result<Self> {
        let nothing = Module::new(&host.engine, "(module)")?;
        let code = Arc::new(CodeMap::new(&nothing, host.hook.entry()));
        let state = State::new(None, cancel(host, &code), BYTES_MAX, None);
        let mut store = call::store(host, state, FUEL)?;
        let mut linker = host.linker.clone();
        linker.allow_shadowing(true);
        spectest(&mut linker, &mut store)?;
        Ok(Self {
            host,
            limits: policy.modules.clone(),
            store,
            linker,
            definitions: HashMap::new(),
            definition: None,
            instances: HashMap::new(),
            current: None,
            linked: false,
        })
    }

    fn directive(&mut self, directive: WastDirective<'_>) -> Result<()> {
        match directive {
            WastDirective::Module(mut module) => {
                self.current = None;
                let name = module.name();
                let admitted = self.admit(&mut module)?;
                let live = self.instantiate(&admitted)?;
                self.name(name, live);
                Ok(())
            }
            WastDirective::ModuleDefinition(mut module) => {
                let name = module.name();
                let admitted = self.admit(&mut module)?;
                if let Some(name) = name {
                    self.definitions.insert(name.name().to_owned(), admitted.clone());
                }
                self.definition = Some(admitted);
                Ok(())
            }
            WastDirective::ModuleInstance { instance, module, .. } => {
                let definition = match module {
                    Some(name) => self.definitions.get(name.name()),
                    None => self.definition.as_ref(),
                };
                let definition = definition.cloned().ok_or_else(|| format_err!("no definition"))?;
                let live = self.instantiate(&definition)?;
                self.name(instance, live);
                Ok(())
            }
            WastDirective::Register { name, module, .. } => {
                let live = self.live(module)?;
                self.linked = true;
                self.linker.instance(&mut self.store, name, live.instance)?;
                Ok(())
            }
            WastDirective::Invoke(invoke) => self.invoke(&invoke).map(drop),
            WastDirective::AssertReturn { exec, results, .. } => {
                let values = self.execute(exec)?;
                is_expected(&values, &results)
            }
            WastDirective::AssertTrap { exec, message, .. } => traps(self.execute(exec), message),
            WastDirective::AssertExhaustion { call, message, .. } => {
                traps(self.invoke(&call), message)
            }
            WastDirective::AssertMalformed { mut module, .. }
            | WastDirective::AssertMalformedCustom { mut module, .. }
            | WastDirective::AssertInvalid { mut module, .. }
            | WastDirective::AssertInvalidCustom { mut module, .. } => {
                self.admit(&mut module).map_or(Ok(()), |_| bail!("the module is taken"))
            }
            WastDirective::AssertUnlinkable { module, .. } => self.is_unlinkable(module),
            _ => bail!("not a directive that is run here"),
        }
    }

    /// What admission does with the bytes of a module, but for its imports.
    fn admit(&self, module: &mut QuoteWat<'_>) -> Result<Admitted> {
        let binary = module.encode()?;
        scan::scan(&binary, &self.limits)?;
        let binary = internal_exports::exported(&binary, &[])?.unwrap_or(binary);
        let binary = bulk_memory::in_pieces(&binary, PIECE_BYTES)?.unwrap_or(binary);
        let binary = inline_recursion::inlined(&binary)?.unwrap_or(binary);
        let module = Module::from_binary(&self.host.engine, &binary)?;
        let code = Arc::new(CodeMap::new(&module, self.host.hook.entry()));
        Ok(Admitted { start: internal_exports::start(&module)?, module, code })
    }

    fn instantiate(&mut self, admitted: &Admitted) -> Result<Live> {
        let Admitted { module, start, code } = admitted;
        let future = self.linker.instantiate_async(&mut self.store, module);
        let Poll::Ready(instance) = pin!(future).poll(&mut Context::from_waker(Waker::noop()))
        else {
            bail!("instantiation waits");
        };
        let instance = instance?;
        let live = Live { instance, code: Arc::clone(code) };
        if let Some(start) = start {
            let function = instance.get_module_export(&mut self.store, start);
            let function = function.and_then(Extern::into_func);
            let function = function.ok_or_else(|| format_err!("no start function"))?;
            self.call(&live, function, &[])?;
        }
        Ok(live)
    }

    fn name(&mut self, name: Option<Id<'_>>, live: Live) {
        if let Some(name) = name {
            self.instances.insert(name.name().to_owned(), live.clone());
        }
        self.current = Some(live);
    }

    fn live(&self, name: Option<Id<'_>>) -> Result<Live> {
        let live = match name {
            Some(name) => self.instances.get(name.name()),
            None => self.current.as_ref(),
        };
        live.cloned().ok_or_else(|| format_err!("there is no such instance"))
    }

    fn execute(&mut self, exec: WastExecute<'_>) -> Result<Vec<Val>> {
        match exec {
            WastExecute::Invoke(invoke) => self.invoke(&invoke),
            WastExecute::Wat(module) => {
                let admitted = self.admit(&mut QuoteWat::Wat(module))?;
                self.instantiate(&admitted).map(|_| Vec::new())
            }
            WastExecute::Get { module, global, .. } => {
                let live = self.live(module)?;
                let global = live.instance.get_global(&mut self.store, global);
                let global = global.ok_or_else(|| format_err!("no such global"))?;
                Ok(vec![global.get(&mut self.store)])
            }
        }
    }

    fn invoke(&mut self, invoke: &WastInvoke<'_>) -> Result<Vec<Val>> {
        let live = self.live(invoke.module)?;
        let value = |given: &WastArg<'_>| match given {
            WastArg::Core(given) => argument(given),
            _ => None,
        };
        let arguments = invoke.args.iter().map(value).collect::<Option<Vec<Val>>>();
        let arguments = arguments.ok_or_else(|| format_err!("an argument cannot be passed"))?;
        let function = live.instance.get_func(&mut self.store, invoke.name);
        let function = function.ok_or_else(|| format_err!("no function {}", invoke.name))?;
        self.call(&live, function, &arguments)
    }

    /// Calls as a worker does, with time slices that are over as soon as they begin.
    fn call(&mut self, live: &Live, function: Func, arguments: &[Val]) -> Result<Vec<Val>> {
        let cancel = cancel(self.host, &live.code);
        self.store.data_mut().cancel = cancel.clone();
        let results = function.ty(&self.store).results().count();
        let mut results = vec![Val::I32(0); results];
        call::enter(&function, &mut self.store);
        let future = function.call_async(&mut self.store, arguments, &mut results);
        let result = poll(pin!(future), (!self.linked).then_some(&cancel));
        call::exit(&self.store);
        result.map(|()| results)
    }

    fn is_unlinkable(&mut self, module: Wat<'_>) -> Result<()> {
        let admitted = self.admit(&mut QuoteWat::Wat(module))?;
        match self.instantiate(&admitted) {
            Err(error) if error.downcast_ref::<Trap>().is_none() => Ok(()),
            Err(error) => Err(error.context("it links")),
            Ok(_) => bail!("it links"),
        }
    }
}

fn cancel(host: &Host, code: &Arc<CodeMap>) -> CancelHandle {
    let epochs = (host.metering == Metering::Epoch).then(|| host.engine.clone());
    CancelHandle::new(Some(Arc::clone(code)), epochs)
}

fn poll(
    mut future: std::pin::Pin<&mut impl Future<Output = Result<()>>>,
    cancel: Option<&CancelHandle>,
) -> Result<()> {
    let wasm = cancel.and_then(CancelHandle::wasm);
    let mut slice_ns = FIRST_SLICE_NS;
    loop {
        let time_slice = wasm.map(|wasm| {
            wasm.prepare();
            let now = now_ns();
            let due_ns = now + slice_ns;
            TimeSlice::begin(wasm, now, Allowance { due_ns, hard_ns: due_ns, period_ns: slice_ns })
        });
        let poll = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        drop(time_slice);
        match poll {
            Poll::Ready(result) => return result,
            Poll::Pending if preempt::left() => slice_ns *= 2,
            Poll::Pending => bail!("the call waits"),
        }
    }
}

fn is_expected(values: &[Val], expected: &[WastRet<'_>]) -> Result<()> {
    let is = |(value, expected): (&Val, &WastRet<'_>)| match expected {
        WastRet::Core(expected) => matches(value, expected),
        _ => false,
    };
    if values.len() == expected.len() && values.iter().zip(expected).all(is) {
        return Ok(());
    }
    bail!("{values:?} instead of {expected:?}")
}

/// Whether it ended in the trap that the specification's words are for.
fn traps(result: Result<Vec<Val>>, message: &str) -> Result<()> {
    let error = match result {
        Ok(values) => bail!("{values:?} instead of a trap"),
        Err(error) => error,
    };
    let Some(trap) = error.downcast_ref::<Trap>() else { return Err(error) };
    let words: &[&str] = match trap {
        Trap::UnreachableCodeReached => &["unreachable"],
        Trap::IndirectCallToNull => &["uninitialized element", "undefined element"],
        Trap::TableOutOfBounds => &["out of bounds table access", "undefined element"],
        Trap::NullReference => &["null function reference", "null reference"],
        Trap::AtomicWaitNonSharedMemory => &["expected shared memory"],
        _ => &[],
    };
    let text = trap.to_string();
    let text = text.trim_start_matches("wasm trap: ");
    let fits = |word: &str| message.starts_with(word) || word.starts_with(message);
    if words.iter().any(|word| fits(word)) || fits(text) {
        return Ok(());
    }
    bail!("the trap is {text:?}, not {message:?}")
}

/// The module that the suite's scripts import from.
fn spectest(linker: &mut Linker<State>, store: &mut Store<State>) -> Result<()> {
    const NAME: &str = "spectest";
    linker.func_wrap(NAME, "print", || {})?;
    linker.func_wrap(NAME, "print_i32", |_: i32| {})?;
    linker.func_wrap(NAME, "print_i64", |_: i64| {})?;
    linker.func_wrap(NAME, "print_f32", |_: f32| {})?;
    linker.func_wrap(NAME, "print_f64", |_: f64| {})?;
    linker.func_wrap(NAME, "print_i32_f32", |_: i32, _: f32| {})?;
    linker.func_wrap(NAME, "print_f64_f64", |_: f64, _: f64| {})?;
    let globals = [
        ("global_i32", ValType::I32, Val::I32(666)),
        ("global_i64", ValType::I64, Val::I64(666)),
        ("global_f32", ValType::F32, Val::F32(666.6_f32.to_bits())),
        ("global_f64", ValType::F64, Val::F64(666.6_f64.to_bits())),
    ];
    for (name, ty, value) in globals {
        let global = Global::new(&mut *store, GlobalType::new(ty, Mutability::Const), value)?;
        linker.define(&mut *store, NAME, name, global)?;
    }
    for (name, ty) in [
        ("table", TableType::new(RefType::FUNCREF, 10, Some(20))),
        ("table64", TableType::new64(RefType::FUNCREF, 10, Some(20))),
    ] {
        let Poll::Ready(table) = pin!(Table::new_async(&mut *store, ty, Ref::Func(None)))
            .poll(&mut Context::from_waker(Waker::noop()))
        else {
            bail!("a table waits");
        };
        linker.define(&mut *store, NAME, name, table?)?;
    }
    let Poll::Ready(memory) = pin!(Memory::new_async(&mut *store, MemoryType::new(1, Some(2))))
        .poll(&mut Context::from_waker(Waker::noop()))
    else {
        bail!("a memory waits");
    };
    linker.define(&mut *store, NAME, "memory", memory?)?;
    Ok(())
}
