//! The start section as an export.
//!
//! A start function runs while its instance is being made, when nothing can preempt it yet. So
//! its section is taken out of the binary, the function is exported under a reserved name, and
//! the call begins with it. Everything else of the binary stays as it is, byte for byte.

use crate::admission::AdmissionError;
use wasmparser::{Parser, Payload};
use wasmtime::{ExternType, Module, ModuleExport};

/// The reserved name. A module that exports it is refused.
pub(crate) const EXPORT: &str = "\0exocell start";

const HEADER: usize = 8;
const EXPORT_SECTION: u8 = 7;
const START_SECTION: u8 = 8;
/// An export's kind byte for functions.
const FUNCTION: u8 = 0;
/// Sections that come before the exports; custom sections (0) may be anywhere. Tags (13) come
/// between memories and globals.
const BEFORE_EXPORTS: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 13];

/// `binary` with its start function exported instead.
///
/// # Errors
/// [`AdmissionError::Malformed`] where the parser finds it so.
pub(crate) fn exported(binary: &[u8]) -> Result<Vec<u8>, AdmissionError> {
    let sections = sections(binary)?;
    let Some(function) = sections.iter().find_map(|section| section.start) else {
        return Ok(binary.to_vec());
    };
    let mut out = binary.get(..HEADER).unwrap_or_default().to_vec();
    let mut done = false;
    for section in &sections {
        let follows = !BEFORE_EXPORTS.contains(&section.id);
        if follows && !done {
            let old = if section.id == EXPORT_SECTION { section.content } else { &[0] };
            append(&mut out, EXPORT_SECTION, &with_export(old, function)?);
            done = true;
        }
        if section.id != EXPORT_SECTION && section.id != START_SECTION {
            append(&mut out, section.id, section.content);
        }
    }
    Ok(out)
}

/// The start function of a compiled module, which neither takes nor returns anything.
///
/// # Errors
/// [`AdmissionError::Malformed`] if it does.
pub(crate) fn of(module: &Module) -> Result<Option<ModuleExport>, AdmissionError> {
    let ty = module.get_export(EXPORT);
    let ty = ty.as_ref().and_then(ExternType::func);
    if ty.is_some_and(|ty| ty.params().len() + ty.results().len() > 0) {
        let message = "the start function takes or returns something".to_owned();
        return Err(AdmissionError::Malformed { message });
    }
    Ok(module.get_export_index(EXPORT))
}

struct Section<'a> {
    id: u8,
    content: &'a [u8],
    start: Option<u32>,
}

fn sections(binary: &[u8]) -> Result<Vec<Section<'_>>, AdmissionError> {
    let mut sections = Vec::new();
    for payload in Parser::new(0).parse_all(binary) {
        let payload = payload?;
        let start = match &payload {
            Payload::StartSection { func, .. } => Some(*func),
            _ => None,
        };
        if let Some((id, range)) = payload.as_section() {
            sections.push(Section { id, content: binary.get(range).unwrap_or_default(), start });
        }
    }
    Ok(sections)
}

/// An export section's content with one entry more.
fn with_export(content: &[u8], function: u32) -> Result<Vec<u8>, AdmissionError> {
    let mut reader = wasmparser::BinaryReader::new(content, 0);
    let count = reader.read_var_u32()?;
    let entries = content.get(reader.original_position()..).unwrap_or_default();
    let mut out = leb128(count.saturating_add(1));
    out.extend_from_slice(entries);
    out.extend(leb128(EXPORT.len() as u32));
    out.extend_from_slice(EXPORT.as_bytes());
    out.push(FUNCTION);
    out.extend(leb128(function));
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
        exported(&wat::parse_str(text).unwrap()).unwrap()
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
            let start = instance.get_typed_func::<(), ()>(&mut store, EXPORT).unwrap();
            start.call(&mut store, ()).unwrap();
            assert_eq!(seen.get(&mut store).unwrap_i32(), 7);
        }
    }

    #[test]
    fn a_start_function_takes_and_returns_nothing() {
        for (signature, right) in [("", true), ("(param i32)", false), ("(result i32)", false)] {
            let text = format!("(module (func $f {signature} unreachable) (start $f))");
            let binary = wat::parse_str(&text).unwrap();
            let module = Module::new(&Engine::default(), exported(&binary).unwrap()).unwrap();
            assert_eq!(of(&module).is_ok_and(|start| start.is_some()), right, "{signature}");
        }
    }

    #[test]
    fn a_module_without_exports_gets_the_section_in_its_place() {
        let text = "(module (type (func)) (memory 1) (func) (start 0) (data (i32.const 0) \"x\"))";
        assert!(Module::new(&Engine::default(), rewritten(text)).is_ok());
    }

    #[test]
    fn a_module_without_a_start_section_stays_as_it_is() {
        let binary = wat::parse_str("(module (func (export \"f\")))").unwrap();
        assert_eq!(exported(&binary).unwrap(), binary);
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
