//! Whether a module can tell that its data segments were dropped.
//!
//! Linkers give a module with threads a start function that copies its segments to the shared
//! memory in the first thread and drops them in all (LLVM's `__wasm_init_memory`). What was
//! dropped cannot be had back, so an instance in which it ran could not begin anew. Where nothing
//! can tell the difference, [`crate::admission::rewrite`] leaves the dropping out.

use crate::admission::AdmissionError;
use wasmparser::{
    ConstExpr, ElementItems, ExternalKind, FunctionBody, Operator, Parser, Payload, TypeRef,
};

/// Whether only the start function copies or drops segments of `binary`, it runs once in an
/// instance, and copies none after it has dropped one.
///
/// # Errors
/// [`AdmissionError::Malformed`] where the parser finds it so.
pub(crate) fn are_unseen(binary: &[u8]) -> Result<bool, AdmissionError> {
    let (mut start, mut next) = (None, 0);
    // The start section comes after some of those that may refer to the function.
    for payload in Parser::new(0).parse_all(binary) {
        match payload? {
            Payload::StartSection { func, .. } => start = Some(func),
            Payload::ImportSection(section) => {
                for import in section.into_imports() {
                    next += u32::from(matches!(import?.ty, TypeRef::Func(_)));
                }
            }
            _ => {}
        }
    }
    let Some(start) = start else { return Ok(false) };
    for payload in Parser::new(0).parse_all(binary) {
        let is_unseen = match payload? {
            Payload::ExportSection(section) => {
                let mut others = true;
                for export in section {
                    let export = export?;
                    others &= export.kind != ExternalKind::Func || export.index != start;
                }
                others
            }
            Payload::GlobalSection(section) => {
                let mut others = true;
                for global in section {
                    others &= !refers(&global?.init_expr, start)?;
                }
                others
            }
            Payload::TableSection(section) => {
                let mut others = true;
                for table in section {
                    if let wasmparser::TableInit::Expr(init) = &table?.init {
                        others &= !refers(init, start)?;
                    }
                }
                others
            }
            Payload::ElementSection(section) => {
                let mut others = true;
                for element in section {
                    match element?.items {
                        ElementItems::Functions(functions) => {
                            for function in functions {
                                others &= function? != start;
                            }
                        }
                        ElementItems::Expressions(_, items) => {
                            for item in items {
                                others &= !refers(&item?, start)?;
                            }
                        }
                    }
                }
                others
            }
            Payload::CodeSectionEntry(body) => {
                next += 1;
                if next - 1 == start { copies_first(&body)? } else { !sees(&body, start)? }
            }
            _ => true,
        };
        if !is_unseen {
            return Ok(false);
        }
    }
    Ok(true)
}

fn refers(expression: &ConstExpr<'_>, start: u32) -> Result<bool, AdmissionError> {
    for operator in expression.get_operators_reader() {
        if matches!(operator?, Operator::RefFunc { function_index } if function_index == start) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the start function copies nothing after it has dropped something. Without loops it
/// goes only forward.
fn copies_first(body: &FunctionBody<'_>) -> Result<bool, AdmissionError> {
    let mut dropped = false;
    for operator in body.get_operators_reader()? {
        match operator? {
            Operator::Loop { .. } => return Ok(false),
            Operator::DataDrop { .. } => dropped = true,
            Operator::MemoryInit { .. } if dropped => return Ok(false),
            _ => {}
        }
    }
    Ok(true)
}

/// Whether another function copies or drops a segment, or refers to the start function.
fn sees(body: &FunctionBody<'_>, start: u32) -> Result<bool, AdmissionError> {
    for operator in body.get_operators_reader()? {
        match operator? {
            Operator::MemoryInit { .. } | Operator::DataDrop { .. } => return Ok(true),
            Operator::Call { function_index }
            | Operator::ReturnCall { function_index }
            | Operator::RefFunc { function_index }
                if function_index == start =>
            {
                return Ok(true);
            }
            _ => {}
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: &str = "(memory.init $d (i32.const 0) (i32.const 0) (i32.const 1))";

    fn of(start: &str, other: &str, more: &str) -> bool {
        let text = format!(
            r#"(module (import "m" "f" (func)) (memory 1) (table $t 2 funcref) (data $d "x")
            (func $other {other}) (func $start {start}) (start $start) {more})"#
        );
        are_unseen(&wat::parse_str(text).unwrap()).unwrap()
    }

    #[test]
    fn what_the_start_function_drops_last_is_not_seen() {
        let usual = format!("(if (i32.load8_u (i32.const 9)) (then {COPY})) (data.drop $d)");
        assert!(of(&usual, "(call 0)", "(elem (table $t) (i32.const 0) func $other)"));
        assert!(!of(&format!("(data.drop $d) {COPY}"), "", ""));
        assert!(!of(&format!("(loop {usual})"), "", ""));
        for other in [
            COPY,
            "(data.drop $d)",
            "(call $start)",
            "(return_call $start)",
            "(drop (ref.func $start))",
        ] {
            assert!(!of(&usual, other, "(elem declare func $start)"), "{other}");
        }
        for more in [
            r#"(export "s" (func $start))"#,
            "(elem (table $t) (i32.const 0) func $start)",
            "(elem funcref (ref.func $start))",
            "(global funcref (ref.func $start))",
            "(table 1 1 funcref (ref.func $start))",
        ] {
            assert!(!of(&usual, "", more), "{more}");
        }
        let without = wat::parse_str(r#"(module (func (data.drop 0)) (data "x"))"#).unwrap();
        assert!(!are_unseen(&without).unwrap());
    }
}
