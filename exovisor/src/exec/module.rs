//! A module that passed admission, linked: what its calls are made from.

use crate::engine::Host;
use crate::exec::reuse::Reuse;
use crate::exec::threads::{Template, Unbound};
use crate::hostcalls::state::State;
use crate::imports::{ATOMICS, Import};
use crate::memory::call_arena::Fingerprint;
use crate::policy::Metering;
use crate::preempt::CodeMap;
use std::borrow::Cow;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use wasmtime::{Caller, Engine, InstancePre, Linker, Module, ModuleExport, Val};

/// The module, and what is kept for its calls.
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
    /// Whether the instance cache knows that instances of it are kept.
    pub is_kept: AtomicBool,
    /// What a call allocates in its arena ([`crate::memory::call_arena`]), once that was tried.
    pub usual_fingerprint: OnceLock<Option<Fingerprint>>,
}

impl AdmittedModule {
    /// The engine whose epoch the code looks at, if it does.
    pub fn epochs(&self) -> Option<Engine> {
        (self.host.metering == Metering::Epoch).then(|| self.host.engine.clone())
    }
}

/// How instances of a module come to be.
pub(crate) enum Link {
    /// Everything but the store is there.
    Single(InstancePre<State>),
    /// Its memory is made for each isolate.
    Threaded(Box<Template>),
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
                // The message is part of the isolate's outcome.
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
            return Ok(Self::Single(linker.instantiate_pre(module)?));
        }
        let template = Template::new(&linker, module)?;
        match template.bind(u64::MAX) {
            // The memory was made to see whether all fits, and goes again.
            Ok(_) | Err(Unbound::TooLarge) => Ok(Self::Threaded(Box::new(template))),
            Err(Unbound::Failed(error)) => Err(error),
        }
    }
}

/// A call finds its module linked in another way than its kind of call needs.
pub(crate) fn unlinked() -> wasmtime::Error {
    wasmtime::format_err!("the module is linked in another way")
}
