//! Components: commands that speak WASI 0.2 (preview 2), beside core modules.
//!
//! ```text
//! bytes --scan--> bounded --compile, load, link--> AdmittedComponent --Command::new--> --run--> end
//! ```
//!
//! A component is a tree of core modules with typed functions between them. It runs under what a
//! core module runs under: the limits count all its memories and tables together, the signal
//! interrupts any of its functions ([`crate::preempt`]), fuel is counted in all of them. Imports
//! are resolved interface by interface ([`crate::imports::interfaces`]). Differences:
//! - It is never refused for an interface that it was not granted; calls fail instead.
//! - Its modules are compiled as they are: none of [`crate::admission::rewrite`] and
//!   [`crate::admission::bulk_memory`]. One memory.fill or memory.copy is not interrupted.
//! - There are no threads and no layers over folders.

mod run;

pub(crate) use run::Command;

use crate::admission::AdmissionError;
use crate::engine::Host;
use crate::hostcalls::component::linker;
use crate::hostcalls::state::State;
use crate::policy::Metering;
use crate::preempt::CodeMap;
use std::sync::Arc;
use wasmtime::Engine;
use wasmtime::component::Component;
use wasmtime_wasi::p2::bindings::CommandPre;

/// A component that passed admission, linked and not yet instantiated.
pub(crate) struct AdmittedComponent {
    /// Everything but the store is there.
    pub command: CommandPre<State>,
    pub host: Arc<Host>,
    pub code: Arc<CodeMap>,
}

impl AdmittedComponent {
    /// Links a compiled component.
    ///
    /// # Errors
    /// [`AdmissionError::ImportType`], [`AdmissionError::NoRun`].
    pub fn link(host: &Arc<Host>, component: &Component) -> Result<Self, AdmissionError> {
        let command = command(&host.engine, component)?;
        let code = Arc::new(CodeMap::of_component(component, host.hook.entry()));
        Ok(Self { command, host: Arc::clone(host), code })
    }

    /// The engine whose epoch the code looks at, if it does.
    pub fn epochs(&self) -> Option<Engine> {
        (self.host.metering == Metering::Epoch).then(|| self.host.engine.clone())
    }
}

/// The component with its imports resolved.
///
/// # Errors
/// [`AdmissionError::ImportType`], [`AdmissionError::NoRun`].
pub(crate) fn command(
    engine: &Engine,
    component: &Component,
) -> Result<CommandPre<State>, AdmissionError> {
    let wrong =
        |error: wasmtime::Error| AdmissionError::ImportType { message: format!("{error:#}") };
    let linker = linker(engine, component).map_err(wrong)?;
    let instance = linker.instantiate_pre(component).map_err(wrong)?;
    CommandPre::new(instance).map_err(|_| AdmissionError::NoRun)
}
