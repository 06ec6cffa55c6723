//! From bytes to a module that may run: everything that is checked once.

use crate::hostcalls;
use crate::imports::{Import, MODULE};
use crate::isolate::State;
use crate::scan::{self, ModuleLimits, Shape};
use exocell_xgate::CapabilitySet;
use wasmtime::{Config, Engine, InstancePre, Linker, Module};

/// Why a module is refused. Nothing of it has run.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The bytes are neither a Wasm binary nor Wasm text.
    #[error("this is not a Wasm module: it starts neither with \\0asm nor with Wasm text")]
    NotWasm,
    /// A component, not a core module.
    #[error("this is a Wasm component; only core modules (wasm32-wasip1) are run")]
    Component,
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
    /// It imports a name that no host function has.
    #[error("import `{module}.{name}` is not known; only {MODULE} functions can be imported")]
    UnknownImport {
        /// Module part of the name.
        module: String,
        /// Field part of the name.
        name: String,
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

/// One import of a module and what it needs, for explaining.
#[derive(Clone, Debug)]
pub struct Requirement {
    /// Module part of the import.
    pub module: String,
    /// Field part of the import.
    pub name: String,
    /// The entry of the import table; `None` if the name is unknown.
    pub import: Option<&'static Import>,
}

/// Longest stack of Wasm frames, in bytes. It fits the 2 MiB stack of a Rust thread.
const STACK_BYTES: usize = 1 << 20;

/// Admits modules. Compiling uses the calling thread only.
pub struct Admission {
    engine: Engine,
    limits: ModuleLimits,
}

impl Admission {
    /// Sets up an engine for isolates under `caps`.
    ///
    /// # Errors
    /// [`AdmissionError::Engine`].
    pub fn new(caps: &CapabilitySet, limits: ModuleLimits) -> Result<Self, AdmissionError> {
        let mut config = Config::new();
        config
            .epoch_interruption(true)
            .consume_fuel(caps.fuel().is_some())
            .max_wasm_stack(STACK_BYTES)
            .parallel_compilation(false)
            // No copy-on-write image: it would need a memory file made inside the jail.
            .memory_init_cow(false);
        let engine = Engine::new(&config)
            .map_err(|error| AdmissionError::Engine { message: format!("{error:#}") })?;
        Ok(Self { engine, limits })
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
        let imports = scan::scan(&binary, limits)?.imports;
        let resolve = |(module, name): (String, String)| {
            let import = Import::find(&module, &name);
            Requirement { module, name, import }
        };
        Ok(imports.into_iter().map(resolve).collect())
    }

    /// Admits a module, binary or text, under `caps`: size and structure, imports, validation,
    /// compilation, in this order.
    ///
    /// # Errors
    /// [`AdmissionError`] names the first thing that is wrong.
    pub fn admit(&self, bytes: &[u8], caps: &CapabilitySet) -> Result<Admitted, AdmissionError> {
        let binary = scan::binary(bytes, &self.limits)?;
        let shape = scan::scan(&binary, &self.limits)?;
        check(&shape, caps)?;
        let module = Module::from_binary(&self.engine, &binary)
            .map_err(|error| AdmissionError::Compile { message: format!("{error:#}") })?;
        let linker = self.linker()?;
        let module = linker
            .instantiate_pre(&module)
            .map_err(|error| AdmissionError::ImportType { message: format!("{error:#}") })?;
        Ok(Admitted { module })
    }

    fn linker(&self) -> Result<Linker<State>, AdmissionError> {
        let mut linker = Linker::new(&self.engine);
        hostcalls::link(&mut linker)
            .map_err(|error| AdmissionError::Engine { message: format!("{error:#}") })?;
        Ok(linker)
    }
}

/// A module that passed admission, linked and not yet instantiated.
#[derive(Clone)]
pub struct Admitted {
    pub(crate) module: InstancePre<State>,
}

fn check(shape: &Shape, caps: &CapabilitySet) -> Result<(), AdmissionError> {
    for (module, name) in &shape.imports {
        let unknown =
            || AdmissionError::UnknownImport { module: module.clone(), name: name.clone() };
        let import = Import::find(module, name).ok_or_else(unknown)?;
        if !import.is_granted(caps) {
            let needs = import.needs_text();
            return Err(AdmissionError::NotGranted { name: import.name, needs });
        }
    }
    if shape.has_start { Ok(()) } else { Err(AdmissionError::NoStart) }
}
