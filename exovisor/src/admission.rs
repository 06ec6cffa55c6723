//! From bytes to a module that may run: everything that is checked once.

use crate::call::Function;
use crate::compiled::{Checked, Compiled, Facts, Form, Jailed, Use};
use crate::component::{self, AdmittedComponent};
use crate::engine::Host;
use crate::imports::Import;
use crate::isolate::State;
use crate::policy::{Metering, Policy};
use crate::preempt::CodeMap;
use crate::reserved;
use crate::reuse::Reuse;
use crate::rewrite::ATOMICS;
use crate::rooms::Trace;
use crate::scan::{self, Asked, Imported, ModuleLimits, Shape};
use crate::threads::{Template, Unbound};
use exocell_xgate::CapabilitySet;
use std::borrow::Cow;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use wasmparser::Parser;
use wasmtime::{Caller, Engine, InstancePre, Linker, Module, ModuleExport, Val};

/// Why a module is refused. Nothing of it has run.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The bytes are neither a Wasm binary nor Wasm text.
    #[error("this is not a Wasm module: it starts neither with \\0asm nor with Wasm text")]
    NotWasm,
    /// A component, where a module with functions to call is wanted.
    #[error(
        "this is a Wasm component, which is run as a command; functions are called in core \
         modules (wasm32-wasip1)"
    )]
    Component,
    /// It was granted what components are not given.
    #[error(
        "the capability `{capability}` grants {what}, which components are not given; leave it \
         out, or build the program as a core module (wasm32-wasip1)"
    )]
    NotForComponents {
        /// Name of the capability.
        capability: String,
        /// What it grants.
        what: &'static str,
    },
    /// It has the right opening and is broken further on.
    #[error("this Wasm module is malformed: {message}")]
    Malformed {
        /// Where and how.
        message: String,
    },
    /// It is larger or more complex than allowed.
    #[error("this Wasm module is too large: {what} {found}, the limit is {max}")]
    TooLarge {
        /// What was counted.
        what: &'static str,
        /// The count.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// It does not validate or cannot be compiled.
    #[error("this Wasm module does not compile: {message}")]
    Compile {
        /// What the compiler says.
        message: String,
    },
    /// It imports something other than a function under a name that nothing has.
    #[error("import `{module}.{name}` is not known: the host has no such {what}")]
    UnknownImport {
        /// Module part of the name.
        module: String,
        /// Field part of the name.
        name: String,
        /// What it should be: a memory, a table, ...
        what: &'static str,
    },
    /// It imports a name whose capability is not granted.
    #[error("import `{name}` needs the capability `{needs}`, which is not granted")]
    NotGranted {
        /// The import.
        name: &'static str,
        /// The capabilities of which one is needed.
        needs: String,
    },
    /// An import has another type than the host function.
    #[error("an import has the wrong type: {message}")]
    ImportType {
        /// Which, and how.
        message: String,
    },
    /// There is nothing to call.
    #[error("this Wasm module exports no function `_start`; only commands can be run")]
    NoStart,
    /// There is nothing to call in a component.
    #[error("this Wasm component exports no `wasi:cli/run@0.2`; only commands can be run")]
    NoRun,
    /// It exports no such function, or one with types that no caller can pass.
    #[error("this Wasm module exports no function `{name}` over numbers")]
    NoFunction {
        /// The name that was asked for.
        name: String,
    },
    /// It belongs to somebody else.
    #[error("this Wasm module belongs to another tenant than {tenant}")]
    NotOwner {
        /// Who asked.
        tenant: String,
    },
    /// The engine could not be set up: the host's fault.
    #[error("cannot set up the Wasm engine: {message}")]
    Engine {
        /// What it says.
        message: String,
    },
}

impl From<wasmparser::BinaryReaderError> for AdmissionError {
    fn from(error: wasmparser::BinaryReaderError) -> Self {
        Self::Malformed { message: error.to_string() }
    }
}

/// One import of a module or component and what it needs, for explaining.
#[derive(Clone, Debug)]
pub struct Requirement {
    /// Module part of the import; of a component's its package.
    pub module: String,
    /// Field part of the import; of a component's all of its name.
    pub name: String,
    /// The entry of the import table; `None` if the name is unknown.
    pub import: Option<&'static Import>,
}

/// Admits modules: one for a process.
pub struct Admission {
    policy: Policy,
    hosts: [OnceLock<Arc<Host>>; Metering::ALL.len()],
}

impl Admission {
    /// Sets up admission under `policy`. Engines are made when the first module needs them.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self { policy, hosts: Default::default() }
    }

    /// Makes the engine for `metering` now, so that [`Admission::load`] need not.
    ///
    /// # Errors
    /// [`AdmissionError::Engine`].
    pub fn warm(&self, metering: Metering) -> Result<(), AdmissionError> {
        self.host(metering).map(drop)
    }

    /// What a module imports and what that needs, without compiling it.
    ///
    /// # Errors
    /// Those of a module that is not one, or too large.
    pub fn requirements(
        bytes: &[u8],
        limits: &ModuleLimits,
    ) -> Result<Vec<Requirement>, AdmissionError> {
        let binary = scan::binary(bytes, limits)?;
        if Parser::is_component(&binary) {
            return component::scan(&binary, limits);
        }
        let imports = scan::scan(&binary, limits)?.imports;
        let resolve = |imported: Imported| {
            let import = known(&imported);
            Requirement { module: imported.module, name: imported.name, import }
        };
        Ok(imports.into_iter().map(resolve).collect())
    }

    /// Checks, compiles and loads a command in this process: for bytes that are the caller's own,
    /// or a process that may be lost to them. It is metered by fuel if that is granted, else by
    /// time.
    ///
    /// # Errors
    /// [`AdmissionError`] names the first thing that is wrong.
    pub fn admit(&self, bytes: &[u8], caps: &CapabilitySet) -> Result<Admitted, AdmissionError> {
        self.admit_as(&Use::Command, "", bytes, caps, Metering::of(caps))
    }

    /// The same for a module of `owner`, a command or not, with a metering mode of choice.
    ///
    /// # Errors
    /// [`AdmissionError`] names the first thing that is wrong.
    pub fn admit_for(
        &self,
        owner: &str,
        bytes: &[u8],
        caps: &CapabilitySet,
        metering: Metering,
    ) -> Result<Admitted, AdmissionError> {
        self.admit_as(&Use::Functions, owner, bytes, caps, metering)
    }

    fn admit_as(
        &self,
        wanted: &Use,
        owner: &str,
        bytes: &[u8],
        caps: &CapabilitySet,
        metering: Metering,
    ) -> Result<Admitted, AdmissionError> {
        let checked = Checked::new(&self.policy, wanted, bytes, caps)?;
        let engine = &self.host(metering)?.engine;
        let compiled = checked.compile_with(engine, &self.policy, metering)?;
        self.load(owner, &compiled, &Jailed::for_own(&compiled))
    }

    /// Loads and links what was compiled for `owner` under the same policy, which only a process
    /// in a jail may. Nothing of it runs.
    ///
    /// # Errors
    /// [`AdmissionError::ImportType`], [`AdmissionError::NoRun`]; [`AdmissionError::Compile`] for
    /// what was compiled for another policy, processor or version.
    pub fn load(
        &self,
        owner: &str,
        compiled: &Compiled,
        jailed: &Jailed,
    ) -> Result<Admitted, AdmissionError> {
        let host = self.host(compiled.facts.metering)?;
        let failed =
            |error: wasmtime::Error| AdmissionError::Compile { message: format!("{error:#}") };
        match compiled.form() {
            Form::Module => {
                let module = compiled.module(&host.engine, jailed).map_err(failed)?;
                let module = link(owner, host, &module, &compiled.facts)?;
                Ok(Admitted(Program::Module(Arc::new(module))))
            }
            Form::Component => {
                let component = compiled.component(&host.engine, jailed).map_err(failed)?;
                let linked = AdmittedComponent::link(host, &component)?;
                Ok(Admitted(Program::Component(Arc::new(linked))))
            }
        }
    }

    fn host(&self, metering: Metering) -> Result<&Arc<Host>, AdmissionError> {
        let cell = &self.hosts[metering as usize];
        if let Some(host) = cell.get() {
            return Ok(host);
        }
        let host = Arc::new(Host::new(&self.policy, metering)?);
        Ok(cell.get_or_init(|| host))
    }
}

fn link(
    owner: &str,
    host: &Arc<Host>,
    module: &Module,
    facts: &Facts,
) -> Result<AdmittedModule, AdmissionError> {
    let wrong =
        |error: wasmtime::Error| AdmissionError::ImportType { message: format!("{error:#}") };
    let link = Link::new(&host.linker, module, facts.is_threaded).map_err(wrong)?;
    let changes = facts.changes.as_ref();
    Ok(AdmittedModule {
        link,
        module: module.clone(),
        host: Arc::clone(host),
        code: Arc::new(CodeMap::new(module, &host.hook)),
        owner: owner.to_owned(),
        start: reserved::start(module)?,
        memories: reserved::memories(module),
        globals: reserved::globals(module),
        uses_host: facts.uses_host,
        reusable: changes.is_some_and(|changes| changes.memories == 0),
        reuse: changes.and_then(|changes| Reuse::new(&host.keeper, changes)),
        is_kept: AtomicBool::new(false),
        usual_trace: OnceLock::new(),
    })
}

/// How instances of a module come to be.
pub(crate) enum Link {
    /// Everything but the store is there.
    Alone(InstancePre<State>),
    /// Its memory is made for each isolate.
    Team(Box<Template>),
}

impl Link {
    /// Functions that nothing is known of become functions that trap.
    pub fn new(
        linker: &Linker<State>,
        module: &Module,
        is_threaded: bool,
    ) -> wasmtime::Result<Self> {
        let mut linker = Cow::Borrowed(linker);
        for import in module.imports() {
            let (module, name) = (import.module(), import.name());
            let is_known = module == ATOMICS || Import::find(module, name).is_some();
            if let Some(ty) = import.ty().func().filter(|_| !is_known) {
                // It is said to whoever looks at the end of an isolate.
                let (shown_module, shown_name) = (module.escape_debug(), name.escape_debug());
                let message = format!("import `{shown_module}.{shown_name}` is not known");
                let stub = move |_: Caller<'_, State>, _: &[Val], _: &mut [Val]| {
                    Err(wasmtime::format_err!("{message}"))
                };
                let linker = linker.to_mut();
                linker.allow_shadowing(true).func_new(module, name, ty.clone(), stub)?;
            }
        }
        if !is_threaded {
            return Ok(Self::Alone(linker.instantiate_pre(module)?));
        }
        let template = Template::new(&linker, module)?;
        match template.bind(u64::MAX) {
            // The memory was made to see whether all fits, and goes again.
            Ok(_) | Err(Unbound::TooLarge) => Ok(Self::Team(Box::new(template))),
            Err(Unbound::Failed(error)) => Err(error),
        }
    }
}

/// A module or component that passed admission, linked and not yet instantiated. Clones are the
/// same one.
#[derive(Clone)]
pub struct Admitted(pub(crate) Program);

#[derive(Clone)]
pub(crate) enum Program {
    Module(Arc<AdmittedModule>),
    Component(Arc<AdmittedComponent>),
}

pub(crate) struct AdmittedModule {
    pub link: Link,
    pub module: Module,
    pub host: Arc<Host>,
    pub code: Arc<CodeMap>,
    pub owner: String,
    /// What the module's start section named.
    pub start: Option<ModuleExport>,
    /// Its own memories.
    pub memories: Vec<ModuleExport>,
    /// Its mutable globals, if an instance can be made as new.
    pub globals: Vec<ModuleExport>,
    /// Whether it imports functions that act on streams, folders or clocks.
    pub uses_host: bool,
    /// Whether all that calls change in an instance are numbers, so that it can serve one thread
    /// after the other.
    pub reusable: bool,
    /// What is kept for its next calls, if that is done.
    pub reuse: Option<Reuse>,
    /// Whether the keeper knows that something is kept of it.
    pub is_kept: AtomicBool,
    /// What a call allocates in its room ([`crate::rooms`]), once that was tried.
    pub usual_trace: OnceLock<Option<Trace>>,
}

impl AdmittedModule {
    /// The engine whose epoch the code looks at, if it does.
    pub fn epochs(&self) -> Option<Engine> {
        (self.host.metering == Metering::Epoch).then(|| self.host.engine.clone())
    }
}

impl Admitted {
    /// Who brought it; empty for a command that nobody else can name.
    #[must_use]
    pub fn owner(&self) -> &str {
        match &self.0 {
            Program::Module(module) => &module.owner,
            Program::Component(_) => "",
        }
    }

    /// Which of the two it is.
    #[must_use]
    pub fn form(&self) -> Form {
        match &self.0 {
            Program::Module(_) => Form::Module,
            Program::Component(_) => Form::Component,
        }
    }

    /// The module; `None` for a component.
    pub(crate) fn module(&self) -> Option<&Arc<AdmittedModule>> {
        match &self.0 {
            Program::Module(module) => Some(module),
            Program::Component(_) => None,
        }
    }

    /// An exported function that `tenant` may call.
    ///
    /// # Errors
    /// [`AdmissionError::NotOwner`], [`AdmissionError::NoFunction`]; a component has none.
    pub fn function(&self, tenant: &str, name: &str) -> Result<Function, AdmissionError> {
        if tenant != self.owner() {
            return Err(AdmissionError::NotOwner { tenant: tenant.to_owned() });
        }
        Function::find(self, name)
            .ok_or_else(|| AdmissionError::NoFunction { name: name.to_owned() })
    }
}

/// The entry of the import table, if that is what the module asks for.
fn known(imported: &Imported) -> Option<&'static Import> {
    Import::find(&imported.module, &imported.name).filter(|import| import.is(imported.asked))
}

pub(crate) fn check(shape: &Shape, caps: &CapabilitySet) -> Result<(), AdmissionError> {
    for imported in &shape.imports {
        let what = match imported.asked {
            // It gets a function that traps.
            Asked::Function if known(imported).is_none() => continue,
            // Whatever its name, it is the memory that the isolate's threads share.
            Asked::SharedMemory => continue,
            Asked::Function => "function",
            Asked::Memory(_) => "memory",
            Asked::Table(_) => "table",
            Asked::Global(_) => "global",
            Asked::Other => "item",
        };
        let import = known(imported).ok_or_else(|| AdmissionError::UnknownImport {
            module: imported.module.clone(),
            name: imported.name.clone(),
            what,
        })?;
        if !import.is_granted(caps) {
            let needs = import.needs_text();
            return Err(AdmissionError::NotGranted { name: import.name, needs });
        }
    }
    Ok(())
}
