//! From hostile bytes to code: a module or component checked, rewritten and compiled, and the form
//! in which that goes from the process that did it to the one that runs it.
//!
//! ```text
//! a jailed process                            file          the isolate's own jail
//! bytes --Checked::new--> Checked --compile--> Compiled --> Admission::load --> Admitted
//!         size, structure, complexity,
//!         imports against the grant
//! ```
//!
//! What is in such a file is as hostile as the bytes that it was made of: the process that wrote
//! it may have been taken over, and the code is native.

use crate::admission;
use crate::admission::bulk_memory::{self, PIECE_BYTES};
use crate::admission::changes::{Changes, changes};
use crate::admission::inline_recursion;
use crate::admission::internal_exports;
use crate::admission::rewrite;
use crate::admission::scan::{self, Shape};
use crate::admission::{AdmissionError, check};
use crate::component;
use crate::exec::module::Link;
use crate::hostcalls;
use crate::policy::{Metering, Policy};
use exocell_xgate::CapabilitySet;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use wasmparser::Parser;
use wasmtime::component::Component;
use wasmtime::{Engine, Linker, Module};

/// What such a file begins with; the length of the facts follows.
const MAGIC: &[u8; 8] = b"exocell\x01";
const HEAD_BYTES: usize = MAGIC.len() + size_of::<u32>();
/// Of the facts, in bytes: a list of at most some tens of globals is in them.
const FACTS_BYTES_MAX: u32 = 64 << 10;
/// The longest native code, in bytes.
pub const CODE_BYTES_MAX: u64 = 256 << 20;

/// Which of the two it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// A core module.
    Module,
    /// A component.
    Component,
}

/// What is to be compiled for which use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Use {
    /// A command, a module or component, which is run once.
    Command,
    /// A module whose functions are called.
    Functions,
}

/// What is to be known of a compiled module beside its code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Facts {
    pub form: Form,
    pub metering: Metering,
    /// Whether its memory is shared by threads.
    pub is_threaded: bool,
    /// Whether it imports functions that act on streams, folders or clocks.
    pub uses_host: bool,
    /// What its calls change, if that is known.
    pub changes: Option<Changes>,
}

/// A binary that keeps to the limits and imports nothing that was not granted.
#[derive(Debug)]
pub struct Checked<'a> {
    binary: Cow<'a, [u8]>,
    /// `None` for a component.
    shape: Option<Shape>,
}

impl<'a> Checked<'a> {
    /// Checks a binary or text: size and structure, complexity, imports, in this order.
    ///
    /// # Errors
    /// [`AdmissionError`] names the first thing that is wrong.
    pub fn new(
        policy: &Policy,
        wanted: &Use,
        bytes: &'a [u8],
        caps: &CapabilitySet,
    ) -> Result<Self, AdmissionError> {
        let binary = scan::binary(bytes, &policy.modules)?;
        if Parser::is_component(&binary) && *wanted == Use::Command {
            admission::component::scan(&binary, &policy.modules)?;
            admission::component::check(caps)?;
            return Ok(Self { binary, shape: None });
        }
        let shape = scan::scan(&binary, &policy.modules)?;
        check(&shape, caps)?;
        policy.pool.as_ref().map_or(Ok(()), |pool| shape.fits(pool))?;
        match wanted {
            Use::Command if !shape.has_start => Err(AdmissionError::NoStart),
            _ => Ok(Self { binary, shape: Some(shape) }),
        }
    }

    /// Which of the two it is.
    #[must_use]
    pub fn form(&self) -> Form {
        if self.shape.is_some() { Form::Module } else { Form::Component }
    }

    /// Compiles it, on the calling thread only, for isolates of this policy.
    ///
    /// # Errors
    /// [`AdmissionError::Compile`]: it does not validate, or cannot be compiled.
    pub fn compile(self, policy: &Policy, metering: Metering) -> Result<Compiled, AdmissionError> {
        self.compile_with(&crate::engine::compiler(policy, metering)?, policy, metering)
    }

    pub(crate) fn compile_with(
        self,
        engine: &Engine,
        policy: &Policy,
        metering: Metering,
    ) -> Result<Compiled, AdmissionError> {
        let failed =
            |error: wasmtime::Error| AdmissionError::Compile { message: format!("{error:#}") };
        let Self { binary, shape } = self;
        let Some(shape) = shape else {
            let facts = Facts::of_component(metering);
            let code = engine.precompile_component(&binary).map_err(failed)?;
            return Ok(Compiled { facts, code });
        };
        let (binary, changes) = rewritten(binary, &shape, policy, metering)?;
        let code = engine.precompile_module(&binary).map_err(failed)?;
        Ok(Compiled { facts: Facts::of_module(&shape, metering, changes), code })
    }
}

/// The module as it is compiled, and what calls change in its instances.
fn rewritten<'a>(
    binary: Cow<'a, [u8]>,
    shape: &Shape,
    policy: &Policy,
    metering: Metering,
) -> Result<(Cow<'a, [u8]>, Option<Changes>), AdmissionError> {
    let binary = rewrite::rewritten(&binary, shape)?.map_or(binary, Cow::Owned);
    let changes = changes(&binary)?;
    let globals = changes.as_ref().map_or(&[][..], |changes| &changes.globals);
    let binary = internal_exports::exported(&binary, globals)?.map_or(binary, Cow::Owned);
    let binary = bulk_memory::in_pieces(&binary, PIECE_BYTES)?.map_or(binary, Cow::Owned);
    let inlined = match policy.inline_recursion && metering != Metering::Fuel {
        true => inline_recursion::inlined(&binary)?,
        false => None,
    };
    Ok((inlined.map_or(binary, Cow::Owned), changes))
}

impl Facts {
    fn of_component(metering: Metering) -> Self {
        Self { form: Form::Component, metering, is_threaded: false, uses_host: true, changes: None }
    }

    fn of_module(shape: &Shape, metering: Metering, changes: Option<Changes>) -> Self {
        Self {
            form: Form::Module,
            metering,
            is_threaded: shape.is_threaded(),
            uses_host: shape.uses_host(),
            changes,
        }
    }
}

/// Shows that this process may be taken over by a module's native code: it is in a jail in which
/// that gains nothing.
#[derive(Debug)]
pub struct Jailed(());

impl Jailed {
    /// # Safety
    /// What is loaded by this is native code, and nothing shows that it is what a compiler made: it
    /// may do whatever this process can, from when it is loaded on. The caller has to have
    /// entered a jail in which that is no more than the module may do anyway.
    #[allow(unsafe_code)]
    #[must_use]
    pub unsafe fn new() -> Self {
        Self(())
    }

    /// For what this process has just compiled itself, of bytes that it trusts or may be lost to.
    pub(crate) fn for_own(_: &Compiled) -> Self {
        Self(())
    }
}

/// A compiled module or component. Only [`crate::Admission::load`] makes something of it.
pub struct Compiled {
    pub(crate) facts: Facts,
    code: Vec<u8>,
}

impl Compiled {
    /// Writes it to a file.
    ///
    /// # Errors
    /// What the host says.
    pub fn write(&self, mut file: &File) -> io::Result<()> {
        let facts = serde_json::to_vec(&self.facts)?;
        let length = u32::try_from(facts.len()).map_err(|_| io::ErrorKind::InvalidData)?;
        file.write_all(MAGIC)?;
        file.write_all(&length.to_le_bytes())?;
        file.write_all(&facts)?;
        file.write_all(&self.code)
    }

    /// Reads it from the beginning of a file, wherever that stands.
    ///
    /// # Errors
    /// What the host says, and `InvalidData` for what is not of this form.
    pub fn read(file: &File) -> io::Result<Self> {
        let mut head = [0; HEAD_BYTES];
        file.read_exact_at(&mut head, 0)?;
        let (magic, length) = head.split_at(MAGIC.len());
        let length = length.try_into().map_or(u32::MAX, u32::from_le_bytes);
        if magic != MAGIC || length > FACTS_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut facts = vec![0; length as usize];
        file.read_exact_at(&mut facts, HEAD_BYTES as u64)?;
        let facts = serde_json::from_slice(&facts)?;
        let begins = HEAD_BYTES as u64 + u64::from(length);
        let bytes = file.metadata()?.len().saturating_sub(begins);
        if bytes > CODE_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut code = vec![0; usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidData)?];
        file.read_exact_at(&mut code, begins)?;
        Ok(Self { facts, code })
    }

    /// Which of the two it is.
    #[must_use]
    pub fn form(&self) -> Form {
        self.facts.form
    }

    /// Whether all that it imports has the type that it takes it for. What has threads is linked
    /// to its memory, so that is seen when it is loaded.
    ///
    /// # Errors
    /// [`AdmissionError`].
    pub fn try_link(&self, policy: &Policy, jailed: &Jailed) -> Result<(), AdmissionError> {
        let engine = crate::engine::compiler(policy, self.facts.metering)?;
        let failed =
            |error: wasmtime::Error| AdmissionError::Compile { message: format!("{error:#}") };
        match self.form() {
            Form::Component => {
                let component = self.component(&engine, jailed).map_err(failed)?;
                component::command(&engine, &component).map(drop)
            }
            Form::Module if self.facts.is_threaded => Ok(()),
            Form::Module => {
                let module = self.module(&engine, jailed).map_err(failed)?;
                let mut linker = Linker::new(&engine);
                hostcalls::link(&mut linker).map_err(failed)?;
                internal_exports::start(&module)?;
                Link::new(&linker, &module, false)
                    .map(drop)
                    .map_err(|error| AdmissionError::ImportType { message: format!("{error:#}") })
            }
        }
    }

    #[allow(unsafe_code)]
    pub(crate) fn module(&self, engine: &Engine, _: &Jailed) -> wasmtime::Result<Module> {
        // SAFETY: the maker of the token promised that the code may take this process over;
        // loading native code has no safe form.
        unsafe { Module::deserialize(engine, &self.code) }
    }

    #[allow(unsafe_code)]
    pub(crate) fn component(&self, engine: &Engine, _: &Jailed) -> wasmtime::Result<Component> {
        // SAFETY: as above.
        unsafe { Component::deserialize(engine, &self.code) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"(module (memory 1) (func (export \"_start\")))";

    fn compiled(text: &[u8], wanted: &Use) -> Result<Compiled, AdmissionError> {
        let (policy, caps) = (Policy::default(), CapabilitySet::nothing());
        Checked::new(&policy, wanted, text, &caps)?.compile(&policy, Metering::Time)
    }

    fn file(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    #[test]
    fn what_is_written_is_read_and_can_be_linked() {
        let compiled = compiled(TEXT, &Use::Command).unwrap();
        let file = tempfile::tempfile().unwrap();
        compiled.write(&file).unwrap();
        let read = Compiled::read(&file).unwrap();
        assert_eq!((&read.facts, &read.code), (&compiled.facts, &compiled.code));
        assert_eq!(read.form(), Form::Module);
        read.try_link(&Policy::default(), &Jailed::for_own(&read)).unwrap();
    }

    #[test]
    fn what_is_of_another_form_is_refused() {
        let file = |bytes: &[u8]| Compiled::read(&file(bytes));
        for bytes in [&b""[..], b"exocell", b"exocell\x02\0\0\0\0", b"exocell\x01\xff\xff\xff\xff"]
        {
            assert!(file(bytes).is_err(), "{bytes:?}");
        }
        assert!(file(b"exocell\x01\x02\0\0\0{}").is_err(), "facts that lack something");
        assert!(file(b"exocell\x01\x64\0\0\0{}").is_err(), "facts that are cut off");
    }

    #[test]
    fn what_was_compiled_for_another_policy_is_not_loaded() {
        let compiled = compiled(TEXT, &Use::Command).unwrap();
        let other = Policy { copy_on_write: true, ..Policy::default() };
        assert!(compiled.try_link(&other, &Jailed::for_own(&compiled)).is_err());
    }

    #[test]
    fn a_command_needs_a_start_and_functions_do_not() {
        let text = b"(module (func (export \"f\")))";
        assert!(matches!(compiled(text, &Use::Command), Err(AdmissionError::NoStart)));
        assert!(compiled(text, &Use::Functions).is_ok());
        let component = b"(component)";
        let refused = compiled(component, &Use::Functions);
        assert!(matches!(refused, Err(AdmissionError::Component)));
    }

    #[test]
    fn an_import_of_a_wrong_type_is_refused_before_anything_runs() {
        let text = br#"(module (import "wasi_snapshot_preview1" "proc_exit" (func))
            (func (export "_start")))"#;
        let compiled = compiled(text, &Use::Command).unwrap();
        let refused = compiled.try_link(&Policy::default(), &Jailed::for_own(&compiled));
        assert!(matches!(refused, Err(AdmissionError::ImportType { .. })));
    }
}
