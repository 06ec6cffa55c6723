//! What calls of a module can change in its instance, as far as its binary tells.

use crate::admission::AdmissionError;
use serde::{Deserialize, Serialize};
use wasmparser::{
    Data, DataKind, FunctionBody, GlobalType, Operator, Parser, Payload, TypeRef, ValType,
};

/// More globals than these are not worth being made as new one by one.
const GLOBALS_MAX: usize = 64;

/// All that a call can change: mutable globals of numbers, and one memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Changes {
    /// The mutable globals, by index.
    pub globals: Vec<u32>,
    /// Memories of the instance's own.
    pub memories: u32,
    /// Where the memory's first content ends, in bytes; `None` if that is not a constant.
    pub image_bytes: Option<u64>,
}

/// What calls of `binary` change; `None` if it is more than is known how to make as new: tables,
/// segments that are dropped, several memories, globals that refer to something.
///
/// # Errors
/// [`AdmissionError::Malformed`] where the parser finds it so.
pub(crate) fn changes(binary: &[u8]) -> Result<Option<Changes>, AdmissionError> {
    let mut changes = Changes { image_bytes: Some(0), ..Changes::default() };
    let (mut imported, mut imported_memories) = (0, 0);
    for payload in Parser::new(0).parse_all(binary) {
        let known = match payload? {
            Payload::ImportSection(section) => {
                let mut known = true;
                for import in section.into_imports() {
                    known &= match import?.ty {
                        TypeRef::Global(global) => {
                            imported += 1;
                            !global.mutable
                        }
                        TypeRef::Memory(memory) => {
                            imported_memories += 1;
                            memory.shared
                        }
                        TypeRef::Table(_) => false,
                        _ => true,
                    };
                }
                known
            }
            Payload::MemorySection(section) => {
                changes.memories = section.count();
                let mut short = changes.memories < 2;
                for memory in section {
                    short &= !memory?.memory64;
                }
                short
            }
            Payload::GlobalSection(section) => {
                let mut known = true;
                for (index, global) in (imported..).zip(section) {
                    known &= changes.global(index, global?.ty);
                }
                known
            }
            Payload::DataSection(section) => {
                let mut own = true;
                for data in section {
                    let data = data?;
                    let end = data_end(&data)?;
                    changes.image_bytes = changes.image_bytes.zip(end).map(|(a, b)| a.max(b));
                    // Each instance writes it to what it shares, when it is made.
                    own &= !matches!(data.kind, DataKind::Active { memory_index, .. }
                        if memory_index < imported_memories);
                }
                own
            }
            Payload::CodeSectionEntry(body) => !changes_more(&body)?,
            _ => true,
        };
        if !known {
            return Ok(None);
        }
    }
    Ok(Some(changes))
}

impl Changes {
    /// Adds it if it changes; false if it cannot be made as new.
    fn global(&mut self, index: u32, ty: GlobalType) -> bool {
        if !ty.mutable {
            return true;
        }
        self.globals.push(index);
        let is_number = !matches!(ty.content_type, ValType::Ref(_));
        is_number && self.globals.len() <= GLOBALS_MAX
    }
}

/// Where a segment ends that is there from the beginning, else 0; `None` if it is not a constant.
fn data_end(data: &Data<'_>) -> Result<Option<u64>, AdmissionError> {
    let DataKind::Active { offset_expr, .. } = &data.kind else { return Ok(Some(0)) };
    let mut operators = offset_expr.get_operators_reader();
    let (first, second) = (operators.read()?, operators.read()?);
    Ok(match (first, second) {
        (Operator::I32Const { value }, Operator::End) => {
            Some(u64::from(value as u32).saturating_add(data.data.len() as u64))
        }
        _ => None,
    })
}

/// Whether a function changes what is neither memory nor a global.
fn changes_more(body: &FunctionBody<'_>) -> Result<bool, AdmissionError> {
    let mut operators = body.get_operators_reader()?;
    while !operators.eof() {
        if matches!(
            operators.read()?,
            Operator::TableSet { .. }
                | Operator::TableGrow { .. }
                | Operator::TableFill { .. }
                | Operator::TableCopy { .. }
                | Operator::TableInit { .. }
                | Operator::ElemDrop { .. }
                | Operator::DataDrop { .. }
        ) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<Changes> {
        changes(&wat::parse_str(text).unwrap()).unwrap()
    }

    #[test]
    fn globals_and_the_end_of_the_first_content_are_found() {
        let text = r#"(module (import "m" "g" (global i32)) (memory 1) (data (i32.const 9) "abc")
          (data (i32.const 2) "d") (data "not there yet") (global i32 (i32.const 1))
          (global (mut f64) (f64.const 1)) (global (mut v128) (v128.const i64x2 1 2)))"#;
        let expected = Changes { globals: vec![2, 3], memories: 1, image_bytes: Some(12) };
        assert_eq!(of(text), Some(expected));
        assert_eq!(of("(module)").unwrap().image_bytes, Some(0));
    }

    #[test]
    fn a_place_that_is_no_constant_is_not_known() {
        for place in ["(global.get 0)", "(i32.add (i32.const 1) (i32.const 2))"] {
            let text = format!(
                "(module (global i32 (i32.const 7)) (memory 1) (data (offset {place}) \"x\"))"
            );
            assert_eq!(of(&text).unwrap().image_bytes, None, "{place}");
        }
    }

    #[test]
    fn more_than_memory_and_numbers_is_not_known() {
        let table = "(table 1 funcref) (elem $e func $f) (elem declare func $f) (data $d \"x\")";
        for code in [
            "(table.set (i32.const 0) (ref.null func))",
            "(drop (table.grow (ref.null func) (i32.const 1)))",
            "(table.fill (i32.const 0) (ref.null func) (i32.const 1))",
            "(table.copy (i32.const 0) (i32.const 0) (i32.const 1))",
            "(table.init $e (i32.const 0) (i32.const 0) (i32.const 1))",
            "(elem.drop $e)",
            "(data.drop $d)",
        ] {
            let text = |code| format!("(module {table} (func $f {code}))");
            assert_eq!(of(&text(code)), None, "{code}");
            assert!(of(&text("(drop (table.get (i32.const 0)))")).is_some());
        }
        for text in [
            "(module (memory 1) (memory 1))",
            "(module (memory i64 1))",
            "(module (global (mut funcref) (ref.null func)))",
            r#"(module (import "m" "g" (global (mut i32))))"#,
            r#"(module (import "m" "m" (memory 1)))"#,
            r#"(module (import "m" "t" (table 1 funcref)))"#,
        ] {
            assert_eq!(of(text), None, "{text}");
        }
        let shared = |data| format!(r#"(module (import "m" "m" (memory 1 1 shared)) {data})"#);
        assert!(of(&shared("(data \"x\")")).is_some());
        assert_eq!(of(&shared("(data (i32.const 0) \"x\")")), None);
        let globals = |count| "(global (mut i32) (i32.const 0))".repeat(count);
        assert!(of(&format!("(module {})", globals(GLOBALS_MAX))).is_some());
        assert_eq!(of(&format!("(module {})", globals(GLOBALS_MAX + 1))), None);
    }
}
