//! Exports under reserved names: the start section, memories and mutable globals.
//!
//! A start function runs while its instance is being made, when nothing can preempt it yet. So
//! its section is taken out of the binary, the function is exported under a reserved name, and
//! the call begins with it. The module's own memories are exported, too, so that they can be given
//! back before the instance goes ([`crate::exec::reclaim`]), and globals, so that an instance can
//! be made as new ([`crate::exec::reuse`]). Everything else of the binary stays as it is, byte for
//! byte.

use crate::admission::AdmissionError;
use wasmparser::{Parser, Payload, TypeRef};
use wasmtime::{ExternType, Module, ModuleExport};

/// Those of memories and globals end with a number. No module may have such names of its own
/// ([`crate::imports::RESERVED`]).
const START: &str = "\0exocell start";
const MEMORY: &str = "\0exocell memory ";
const GLOBAL: &str = "\0exocell global ";

const HEADER: usize = 8;
const EXPORT_SECTION: u8 = 7;
const START_SECTION: u8 = 8;
/// An export's kind bytes.
const FUNCTION_KIND: u8 = 0;
const MEMORY_KIND: u8 = 2;
const GLOBAL_KIND: u8 = 3;
/// Sections that come before the exports; custom sections (0) may be anywhere. Tags (13) come
/// between memories and globals.
const BEFORE_EXPORTS: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 13];

/// `binary` with its start function, its memories and some globals exported; `None` if that is
/// nothing.
///
/// # Errors
/// [`AdmissionError::Malformed`] where the parser finds it so.
pub(crate) fn exported(binary: &[u8], globals: &[u32]) -> Result<Option<Vec<u8>>, AdmissionError> {
    let Contents { sections, mut exports } = Contents::read(binary)?;
    exports.extend(globals.iter().copied().map(Export::global));
    if exports.is_empty() {
        return Ok(None);
    }
    let mut out = binary.get(..HEADER).unwrap_or_default().to_vec();
    let mut done = false;
    for (id, content) in sections.iter().copied().chain([(EXPORT_SECTION, &[0][..])]) {
        if !BEFORE_EXPORTS.contains(&id) && !done {
            let old = if id == EXPORT_SECTION { content } else { &[0] };
            append(&mut out, EXPORT_SECTION, &with_exports(old, &exports)?);
            done = true;
        }
        if id != EXPORT_SECTION && id != START_SECTION {
            append(&mut out, id, content);
        }
    }
    Ok(Some(out))
}

/// The start function of a compiled module, which neither takes nor returns anything.
///
/// # Errors
/// [`AdmissionError::Malformed`] if it does.
pub(crate) fn start(module: &Module) -> Result<Option<ModuleExport>, AdmissionError> {
    let ty = module.get_export(START);
    let ty = ty.as_ref().and_then(ExternType::func);
    if ty.is_some_and(|ty| ty.params().len() + ty.results().len() > 0) {
        let message = "the start function takes or returns something".to_owned();
        return Err(AdmissionError::Malformed { message });
    }
    Ok(module.get_export_index(START))
}

/// The memories of a compiled module that are its own.
pub(crate) fn memories(module: &Module) -> Vec<ModuleExport> {
    numbered(module, MEMORY)
}

/// The globals of a compiled module that were exported here.
pub(crate) fn globals(module: &Module) -> Vec<ModuleExport> {
    numbered(module, GLOBAL)
}

fn numbered(module: &Module, prefix: &str) -> Vec<ModuleExport> {
    let names = module.exports().map(|export| export.name());
    let own = names.filter(|name| name.starts_with(prefix));
    own.filter_map(|name| module.get_export_index(name)).collect()
}

/// A binary's sections, each with its number, and what is to be exported.
#[derive(Default)]
struct Contents<'a> {
    sections: Vec<(u8, &'a [u8])>,
    exports: Vec<Export>,
}

struct Export {
    name: String,
    kind: u8,
    index: u32,
}

impl<'a> Contents<'a> {
    fn read(binary: &'a [u8]) -> Result<Self, AdmissionError> {
        let (mut contents, mut imported) = (Self::default(), 0);
        for payload in Parser::new(0).parse_all(binary) {
            let payload = payload?;
            if let Some((id, range)) = payload.as_section() {
                contents.sections.push((id, binary.get(range).unwrap_or_default()));
            }
            match payload {
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        imported += u32::from(matches!(import?.ty, TypeRef::Memory(_)));
                    }
                }
                Payload::MemorySection(section) => {
                    let all = (imported..).take(section.count() as usize);
                    contents.exports.extend(all.map(Export::memory));
                }
                Payload::StartSection { func, .. } => {
                    let (name, kind) = (START.to_owned(), FUNCTION_KIND);
                    contents.exports.push(Export { name, kind, index: func });
                }
                _ => {}
            }
        }
        Ok(contents)
    }
}

impl Export {
    fn memory(index: u32) -> Self {
        Self { name: format!("{MEMORY}{index}"), kind: MEMORY_KIND, index }
    }

    fn global(index: u32) -> Self {
        Self { name: format!("{GLOBAL}{index}"), kind: GLOBAL_KIND, index }
    }
}

/// An export section's content with entries more.
fn with_exports(content: &[u8], exports: &[Export]) -> Result<Vec<u8>, AdmissionError> {
    let mut reader = wasmparser::BinaryReader::new(content, 0);
    let count = reader.read_var_u32()?;
    let entries = content.get(reader.original_position()..).unwrap_or_default();
    let mut out = leb128(count.saturating_add(exports.len() as u32));
    out.extend_from_slice(entries);
    for Export { name, kind, index } in exports {
        out.extend(leb128(name.len() as u32));
        out.extend_from_slice(name.as_bytes());
        out.push(*kind);
        out.extend(leb128(*index));
    }
    Ok(out)
}

fn append(out: &mut Vec<u8>, id: u8, content: &[u8]) {
    out.push(id);
    out.extend(leb128(content.len() as u32));
    out.extend_from_slice(content);
}

/// Unsigned LEB128 (WebAssembly core specification, 5.2.2).
fn leb128(mut value: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            bytes.push(low);
            return bytes;
        }
        bytes.push(low | 0x80);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wasmtime::{Engine, Instance, Store};

    fn rewritten(text: &str) -> Vec<u8> {
        exported(&wat::parse_str(text).unwrap(), &[]).unwrap().unwrap()
    }

    #[test]
    fn the_start_function_runs_when_it_is_called_and_not_before() {
        for export in ["", r#"(export "global" (global 0))"#] {
            let text = format!(
                "(module (global (export \"seen\") (mut i32) (i32.const 0)) {export}
                  (data \"x\") (memory 1)
                  (func $set (global.set 0 (i32.const 7))) (start $set))"
            );
            let engine = Engine::default();
            let module = Module::new(&engine, rewritten(&text)).unwrap();
            let mut store = Store::new(&engine, ());
            let instance = Instance::new(&mut store, &module, &[]).unwrap();
            let seen = instance.get_global(&mut store, "seen").unwrap();
            assert_eq!(seen.get(&mut store).unwrap_i32(), 0);
            let start = instance.get_typed_func::<(), ()>(&mut store, START).unwrap();
            start.call(&mut store, ()).unwrap();
            assert_eq!(seen.get(&mut store).unwrap_i32(), 7);
        }
    }

    #[test]
    fn a_start_function_takes_and_returns_nothing() {
        for (signature, right) in [("", true), ("(param i32)", false), ("(result i32)", false)] {
            let text = format!("(module (func $f {signature} unreachable) (start $f))");
            let module = rewritten(&text);
            let module = Module::new(&Engine::default(), module).unwrap();
            assert_eq!(start(&module).is_ok_and(|start| start.is_some()), right, "{signature}");
        }
    }

    #[test]
    fn a_module_without_exports_gets_the_section_in_its_place() {
        let text = "(module (type (func)) (memory 1) (func) (start 0) (data (i32.const 0) \"x\"))";
        assert!(Module::new(&Engine::default(), rewritten(text)).is_ok());
    }

    #[test]
    fn a_module_with_neither_stays_as_it_is() {
        let text = r#"(module (import "a" "m" (memory 1)) (func (export "f")))"#;
        assert_eq!(exported(&wat::parse_str(text).unwrap(), &[]).unwrap(), None);
    }

    #[test]
    fn globals_are_exported_by_index() {
        let text = "(module (global i32 (i32.const 1)) (global (mut i64) (i64.const 2)))";
        let binary = exported(&wat::parse_str(text).unwrap(), &[1]).unwrap().unwrap();
        let module = Module::new(&Engine::default(), binary).unwrap();
        assert_eq!(globals(&module).len(), 1);
        let ty = module.get_export(&format!("{GLOBAL}1")).unwrap();
        assert!(ty.global().unwrap().content().is_i64());
    }

    #[test]
    fn a_modules_own_memories_are_exported_and_no_others() {
        let text = r#"(module (import "a" "m" (memory 1)) (memory 2) (memory (export "x") 3))"#;
        let module = Module::new(&Engine::default(), rewritten(text)).unwrap();
        assert_eq!(memories(&module).len(), 2);
        let sizes = [1, 2].map(|index| module.get_export(&format!("{MEMORY}{index}")).unwrap());
        assert_eq!(sizes.map(|ty| ty.memory().unwrap().minimum()), [2, 3]);
        let bare = Module::new(&Engine::default(), "(module (memory 1))").unwrap();
        assert_eq!(memories(&bare).len(), 0);
        let text = "(module (memory 1))";
        assert_eq!(memories(&Module::new(&Engine::default(), rewritten(text)).unwrap()).len(), 1);
    }

    #[test]
    fn numbers_are_written_as_the_parser_reads_them() {
        for value in [0, 1, 127, 128, 16384, u32::MAX] {
            let bytes = leb128(value);
            let mut reader = wasmparser::BinaryReader::new(&bytes, 0);
            assert_eq!(reader.read_var_u32().unwrap(), value);
        }
    }
}
