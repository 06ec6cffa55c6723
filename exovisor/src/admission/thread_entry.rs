//! What a thread begins with: the start function and then `wasi_thread_start`, in one function.
//!
//! Each thread has an instance, and each instance runs the start function first. The engine makes
//! a fiber for a call from the host; so that it makes one a thread and not two, admission adds a
//! function to modules that have both, which calls one after the other.

use crate::admission::AdmissionError;
use wasm_encoder::{Function, Instruction, TypeSection, ValType};
use wasmparser::{ExternalKind, FuncType, Parser, Payload, TypeRef};
use wasmtime::{Module, ModuleExport, ValType as Type};

/// What a thread's own function is called (wasi-threads, "Design choice: instance per thread").
const OWN: &str = "wasi_thread_start";
/// The name of the function that is added.
pub(crate) const BOTH: &str = "\0exocell thread";

/// The two functions of a module that has both, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Both {
    start: u32,
    own: u32,
    /// Functions of the module, imported ones included.
    pub functions: u32,
}

impl Both {
    /// Those of `binary`; `None` if it lacks one, or a thread's does not take just two words.
    ///
    /// # Errors
    /// [`AdmissionError::Malformed`] where the parser finds it so.
    pub fn find(binary: &[u8]) -> Result<Option<Self>, AdmissionError> {
        let (mut fitting, mut types) = (Vec::new(), Vec::new());
        let (mut start, mut own) = (None, None);
        for payload in Parser::new(0).parse_all(binary) {
            match payload? {
                Payload::TypeSection(section) => {
                    for ty in section.into_iter_err_on_gc_types() {
                        fitting.push(is_fitting(&ty?));
                    }
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        if let TypeRef::Func(ty) = import?.ty {
                            types.push(ty);
                        }
                    }
                }
                Payload::FunctionSection(section) => {
                    for ty in section {
                        types.push(ty?);
                    }
                }
                Payload::ExportSection(section) => {
                    for export in section {
                        let export = export?;
                        if export.kind == ExternalKind::Func && export.name == OWN {
                            own = Some(export.index);
                        }
                    }
                }
                Payload::StartSection { func, .. } => start = Some(func),
                _ => {}
            }
        }
        let ty = own.and_then(|own| types.get(own as usize));
        let fits = ty.and_then(|ty| fitting.get(*ty as usize)) == Some(&true);
        let functions = types.len() as u32;
        let both = start.zip(own).filter(|_| fits);
        Ok(both.map(|(start, own)| Self { start, own, functions }))
    }

    /// The type of the function that is added.
    pub fn add_type(types: &mut TypeSection) {
        types.ty().function([ValType::I32, ValType::I32], []);
    }

    /// The function that is added; `renumbered` says which index another one has by now.
    pub fn function<E>(
        &self,
        mut renumbered: impl FnMut(u32) -> Result<u32, E>,
    ) -> Result<Function, E> {
        let mut function = Function::new([]);
        function
            .instruction(&Instruction::Call(renumbered(self.start)?))
            .instruction(&Instruction::LocalGet(0))
            .instruction(&Instruction::LocalGet(1))
            .instruction(&Instruction::Call(renumbered(self.own)?))
            .instruction(&Instruction::End);
        Ok(function)
    }
}

/// A thread cannot begin.
pub(crate) fn missing() -> wasmtime::Error {
    wasmtime::format_err!("the module exports no function `{OWN}` of two 32-bit integers")
}

fn is_fitting(ty: &FuncType) -> bool {
    ty.params() == [wasmparser::ValType::I32; 2] && ty.results().is_empty()
}

/// What threads of a compiled module begin with.
pub(crate) struct Entry {
    pub function: ModuleExport,
    /// Whether the start function is in it.
    pub has_start: bool,
}

impl Entry {
    /// `None` if there is no such function, or it does not take just two words.
    pub fn of(module: &Module) -> Option<Self> {
        let has_start = module.get_export(BOTH).is_some();
        let name = if has_start { BOTH } else { OWN };
        let ty = module.get_export(name)?.func()?.clone();
        let words = ty.params().len() == 2 && ty.params().all(|ty| matches!(ty, Type::I32));
        let function = module.get_export_index(name)?;
        (words && ty.results().len() == 0).then_some(Self { function, has_start })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<Both> {
        Both::find(&wat::parse_str(text).unwrap()).unwrap()
    }

    #[test]
    fn both_are_found_where_they_fit() {
        let own = |text: &str| {
            format!(
                r#"(module (import "m" "f" (func (param i64))) (func $f) (start $f)
                (func (export "wasi_thread_start") {text}))"#
            )
        };
        let found = Both { start: 1, own: 2, functions: 3 };
        assert_eq!(of(&own("(param i32 i32)")), Some(found));
        for text in
            ["", "(param i32)", "(param i32 i64)", "(param i32 i32) (result i32) (local.get 0)"]
        {
            assert_eq!(of(&own(text)), None, "{text}");
        }
        assert_eq!(of(&own("(param i32 i32)").replace("(start $f)", "")), None);
        assert_eq!(of("(module (func $f) (start $f))"), None);
        let memory = r#"(module (func $f) (start $f) (memory (export "wasi_thread_start") 1))"#;
        assert_eq!(of(memory), None);
    }
}
