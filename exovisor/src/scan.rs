//! A module's structure, looked at before any of it is compiled.

use crate::admission::AdmissionError;
use crate::start;
use std::borrow::Cow;
use wasmparser::{Encoding, Parser, Payload, SectionLimited};

/// How large and how complex a module may be.
#[derive(Clone, Debug)]
pub struct ModuleLimits {
    /// Length of the binary or the text, in bytes.
    pub bytes: usize,
    /// Entries of any one section but the code: types, imports, functions, exports, ...
    pub entries: u32,
    /// Length of one function's body, in bytes. Compile time grows with it.
    pub body_bytes: usize,
}

impl Default for ModuleLimits {
    /// 64 MiB, 100,000 entries, 2 MiB a body: room for whole language interpreters.
    fn default() -> Self {
        Self { bytes: 64 << 20, entries: 100_000, body_bytes: 2 << 20 }
    }
}

/// What the structure shows.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Module and name of each import, in order.
    pub imports: Vec<(String, String)>,
    /// Whether `_start` is exported.
    pub has_start: bool,
    /// The function that the start section names.
    pub start: Option<u32>,
}

/// Turns text into a binary; a binary is taken as it is.
pub(crate) fn binary<'a>(
    bytes: &'a [u8],
    limits: &ModuleLimits,
) -> Result<Cow<'a, [u8]>, AdmissionError> {
    at_most("length in bytes", bytes.len(), limits.bytes)?;
    if bytes.starts_with(b"\0asm") {
        return Ok(Cow::Borrowed(bytes));
    }
    let text = std::str::from_utf8(bytes).ok().map(str::trim_start);
    let text = text.filter(|text| text.starts_with('(') || text.starts_with(";;"));
    let text = text.ok_or(AdmissionError::NotWasm)?;
    let binary = wat::parse_str(text)
        .map_err(|error| AdmissionError::Malformed { message: error.to_string() })?;
    at_most("length in bytes", binary.len(), limits.bytes)?;
    Ok(Cow::Owned(binary))
}

/// Reads a binary's sections, without looking into function bodies.
pub(crate) fn scan(binary: &[u8], limits: &ModuleLimits) -> Result<Shape, AdmissionError> {
    let mut shape = Shape::default();
    for payload in Parser::new(0).parse_all(binary) {
        look(payload?, limits, &mut shape)?;
    }
    Ok(shape)
}

fn look(
    payload: Payload<'_>,
    limits: &ModuleLimits,
    shape: &mut Shape,
) -> Result<(), AdmissionError> {
    match payload {
        Payload::Version { encoding: Encoding::Component, .. } => Err(AdmissionError::Component),
        Payload::TypeSection(section) => entries("types", &section, limits),
        Payload::FunctionSection(section) => entries("functions", &section, limits),
        Payload::TableSection(section) => entries("tables", &section, limits),
        Payload::MemorySection(section) => entries("memories", &section, limits),
        Payload::GlobalSection(section) => entries("globals", &section, limits),
        Payload::ElementSection(section) => entries("element segments", &section, limits),
        Payload::DataSection(section) => entries("data segments", &section, limits),
        Payload::ImportSection(section) => {
            entries("imports", &section, limits)?;
            for import in section.into_imports() {
                let import = import?;
                shape.imports.push((import.module.to_owned(), import.name.to_owned()));
            }
            Ok(())
        }
        Payload::ExportSection(section) => {
            entries("exports", &section, limits)?;
            for export in section {
                let name = export?.name;
                if name == start::EXPORT {
                    return Err(AdmissionError::Malformed {
                        message: format!("the export name {name:?} is reserved"),
                    });
                }
                shape.has_start |= name == "_start";
            }
            Ok(())
        }
        Payload::StartSection { func, .. } => {
            shape.start = Some(func);
            Ok(())
        }
        Payload::CodeSectionEntry(body) => {
            at_most("bytes of one function", body.range().len(), limits.body_bytes)
        }
        _ => Ok(()),
    }
}

fn entries<T>(
    what: &'static str,
    section: &SectionLimited<'_, T>,
    limits: &ModuleLimits,
) -> Result<(), AdmissionError> {
    at_most(what, section.count() as usize, limits.entries as usize)
}

fn at_most(what: &'static str, found: usize, max: usize) -> Result<(), AdmissionError> {
    if found <= max { Ok(()) } else { Err(AdmissionError::TooLarge { what, found, max }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(text: &str, limits: &ModuleLimits) -> Result<Shape, AdmissionError> {
        scan(&binary(text.as_bytes(), limits)?, limits)
    }

    #[test]
    fn imports_and_start_are_seen() {
        let text = r#"(module (import "a" "b" (func)) (func (export "_start")))"#;
        let shape = shape(text, &ModuleLimits::default()).unwrap();
        assert_eq!(shape.imports, [("a".to_owned(), "b".to_owned())]);
        assert!(shape.has_start);
    }

    #[test]
    fn each_limit_refuses() {
        let text = "(module (func nop nop nop) (func))";
        let is_large = |limits: ModuleLimits| {
            matches!(shape(text, &limits), Err(AdmissionError::TooLarge { .. }))
        };
        assert!(!is_large(ModuleLimits::default()));
        assert!(is_large(ModuleLimits { bytes: 10, ..Default::default() }));
        assert!(is_large(ModuleLimits { entries: 1, ..Default::default() }));
        assert!(is_large(ModuleLimits { body_bytes: 3, ..Default::default() }));
    }

    #[test]
    fn other_files_are_not_modules() {
        for bytes in [&b""[..], b"\x7fELF", b"#!/bin/sh\n", b"\xff\xfe", b"hello"] {
            let error = binary(bytes, &ModuleLimits::default()).unwrap_err();
            assert!(matches!(error, AdmissionError::NotWasm), "{error}");
        }
        let component = shape("(component)", &ModuleLimits::default()).unwrap_err();
        assert!(matches!(component, AdmissionError::Component), "{component}");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(tail: Vec<u8>, with_header: bool) {
            let header: &[u8] = if with_header { b"\0asm\x01\0\0\0" } else { b"" };
            let bytes = [header, &tail].concat();
            let limits = ModuleLimits::default();
            if let Ok(binary) = binary(&bytes, &limits) {
                let _ = scan(&binary, &limits);
            }
        }
    }
}
