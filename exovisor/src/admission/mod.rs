//! What is checked of a module's or component's bytes, and how a module is rewritten, before it is
//! compiled.
//!
//! ```text
//! bytes -> scan (structure, complexity) -> check (imports against the grant)
//!       -> rewrite -> internal_exports -> bulk_memory -> inline_recursion -> the compiler
//! ```
//! Nothing here has an engine, and nothing of the module runs.

pub(crate) mod bulk_memory;
pub(crate) mod changes;
pub(crate) mod complexity;
pub(crate) mod component;
pub(crate) mod data_drop;
pub(crate) mod inline_recursion;
pub(crate) mod internal_exports;
pub(crate) mod rewrite;
pub(crate) mod scan;
pub(crate) mod thread_entry;

use crate::imports::Import;
use crate::policy::ModuleLimits;
use exocell_xgate::CapabilitySet;
use scan::{Asked, Imported, Shape};
use wasmparser::Parser;

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

/// What a module or component imports and what that needs, without compiling it.
///
/// # Errors
/// Those of a module that is not one, or too large.
pub(crate) fn requirements(
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

/// The entry of the import table, if that is what the module asks for.
fn known(imported: &Imported) -> Option<&'static Import> {
    Import::find(&imported.module, &imported.name)
        .filter(|import| imported.asked.is_served_by(import))
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
