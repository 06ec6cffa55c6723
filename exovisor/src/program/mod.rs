//! From checked bytes to a program that may run: compiled, kept on disk, loaded.

pub(crate) mod cache;
pub(crate) mod compiled;
pub(crate) mod sealed;

use crate::admission::{self, AdmissionError, Requirement, internal_exports};
use crate::component::AdmittedComponent;
use crate::engine::Host;
use crate::exec::call::Function;
use crate::exec::module::{AdmittedModule, Link};
use crate::exec::reuse::Reuse;
use crate::policy::{Metering, ModuleLimits, Policy};
use crate::preempt::CodeMap;
use compiled::{Checked, Compiled, Facts, Form, Jailed, Use};
use exocell_xgate::CapabilitySet;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use wasmtime::Module;

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
        admission::requirements(bytes, limits)
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
        code: Arc::new(CodeMap::new(module, host.hook.entry())),
        owner: owner.to_owned(),
        start: internal_exports::start(module)?,
        memories: internal_exports::memories(module),
        globals: internal_exports::globals(module),
        uses_host: facts.uses_host,
        reusable: changes.is_some_and(|changes| changes.memories == 0),
        reuse: changes.and_then(|changes| Reuse::new(&host.instance_cache, changes)),
        is_kept: AtomicBool::new(false),
        usual_fingerprint: OnceLock::new(),
    })
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

impl Admitted {
    /// The tenant that brought it; empty for a command, which nobody else can name.
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
        self.module()
            .and_then(|module| Function::of(module, name))
            .ok_or_else(|| AdmissionError::NoFunction { name: name.to_owned() })
    }
}
