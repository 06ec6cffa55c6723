//! A module's structure, looked at before any of it is compiled.

use crate::admission::AdmissionError;
use crate::admission::complexity::Complexity;
use crate::imports::{Import, Item, NN, RESERVED, WASI};
use crate::policy::{ModuleLimits, Pool, Slots};
use std::borrow::Cow;
use wasmparser::{
    Data, DataKind, Encoding, GlobalType, MemoryType, Operator, Parser, Payload, RefType,
    SectionLimited, TableType, TypeRef, ValType,
};

/// What the structure shows.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The imports, in order.
    pub imports: Vec<Imported>,
    /// How many of them are functions.
    pub imported_functions: u32,
    /// Whether `_start` is exported.
    pub has_start: bool,
    /// Whether something is exported as `memory`.
    pub exports_memory: bool,
    /// Where the data of memory 0 ends, as far as its place is a constant.
    pub data_end: u64,
    /// The memories and tables that it makes, by what they begin with: bytes, elements.
    pub memories: Vec<u64>,
    pub tables: Vec<u64>,
}

/// One import.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Imported {
    pub module: String,
    pub name: String,
    pub asked: Asked,
}

/// What an import is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Function,
    SharedMemory,
    Memory(MemoryType),
    Table(TableType),
    Global(GlobalType),
    Other,
}

impl Imported {
    /// Whether the host makes it for each instance.
    pub fn is_hosted(&self) -> bool {
        matches!(self.asked, Asked::Memory(_) | Asked::Table(_) | Asked::Global(_))
    }
}

impl Shape {
    /// Whether its memory is shared by threads.
    pub fn is_threaded(&self) -> bool {
        self.imports.iter().any(|import| import.asked == Asked::SharedMemory)
    }

    /// Whether it imports functions that act on streams, folders or clocks.
    pub fn uses_host(&self) -> bool {
        self.imports.iter().any(|import| [WASI, NN].contains(&import.module.as_str()))
    }

    /// The imports that the host makes for each instance.
    pub fn hosted(&self) -> impl Iterator<Item = &Imported> {
        self.imports.iter().filter(|import| import.is_hosted())
    }
}

impl Asked {
    fn of(ty: TypeRef) -> Self {
        match ty {
            TypeRef::Func(_) => Self::Function,
            TypeRef::Memory(memory) if memory.shared => Self::SharedMemory,
            TypeRef::Memory(memory) => Self::Memory(memory),
            TypeRef::Table(table) => Self::Table(table),
            TypeRef::Global(global) => Self::Global(global),
            _ => Self::Other,
        }
    }

    /// Whether `import` is what is asked for.
    pub fn is_served_by(self, import: &Import) -> bool {
        match self {
            Self::Function => import.item == Item::Function,
            Self::SharedMemory | Self::Memory(_) => import.item == Item::Memory,
            Self::Table(table) => {
                import.item == Item::Table && table.element_type == RefType::FUNCREF
            }
            Self::Global(global) => {
                let is_word = global.mutable && global.content_type == ValType::I32;
                import.item == Item::Global && is_word
            }
            Self::Other => false,
        }
    }
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

/// Reads a binary once, and checks it against all limits.
pub(crate) fn scan(binary: &[u8], limits: &ModuleLimits) -> Result<Shape, AdmissionError> {
    let (mut shape, mut complexity) = (Shape::default(), Complexity::default());
    for payload in Parser::new(0).parse_all(binary) {
        look(payload?, limits, &mut shape, &mut complexity)?;
    }
    Ok(shape)
}

pub(crate) fn look(
    payload: Payload<'_>,
    limits: &ModuleLimits,
    shape: &mut Shape,
    complexity: &mut Complexity,
) -> Result<(), AdmissionError> {
    structure(&payload, limits, shape)?;
    complexity.look(&payload, &limits.complexity)
}

/// What it consists of, without looking into function bodies.
fn structure(
    payload: &Payload<'_>,
    limits: &ModuleLimits,
    shape: &mut Shape,
) -> Result<(), AdmissionError> {
    match payload {
        Payload::Version { encoding: Encoding::Component, .. } => Err(AdmissionError::Component),
        Payload::TypeSection(section) => entries("types", section, limits),
        Payload::FunctionSection(section) => entries("functions", section, limits),
        Payload::TableSection(section) => {
            entries("tables", section, limits)?;
            for table in section.clone() {
                shape.tables.push(table?.ty.initial);
            }
            Ok(())
        }
        Payload::MemorySection(section) => {
            entries("memories", section, limits)?;
            section.clone().into_iter().try_for_each(|memory| shape.memory(memory?))
        }
        Payload::GlobalSection(section) => entries("globals", section, limits),
        Payload::ElementSection(section) => entries("element segments", section, limits),
        Payload::DataSection(section) => {
            entries("data segments", section, limits)?;
            for data in section.clone() {
                shape.data_end = shape.data_end.max(data_end(&data?)?);
            }
            Ok(())
        }
        Payload::ImportSection(section) => {
            entries("imports", section, limits)?;
            for import in section.clone().into_imports() {
                shape.import(import?)?;
            }
            Ok(())
        }
        Payload::ExportSection(section) => {
            entries("exports", section, limits)?;
            for export in section.clone() {
                let name = export?.name;
                if name.starts_with(RESERVED) {
                    return Err(malformed(&format!("the export name {name:?} is reserved")));
                }
                shape.has_start |= name == "_start";
                shape.exports_memory |= name == "memory";
            }
            Ok(())
        }
        Payload::CodeSectionEntry(body) => {
            at_most("bytes of one function", body.range().len(), limits.body_bytes)
        }
        _ => Ok(()),
    }
}

impl Shape {
    fn import(&mut self, import: wasmparser::Import<'_>) -> Result<(), AdmissionError> {
        let asked = Asked::of(import.ty);
        match import.ty {
            TypeRef::Func(_) => self.imported_functions += 1,
            TypeRef::Memory(memory) if memory.shared => self.share(memory)?,
            _ => {}
        }
        let (module, name) = (import.module.to_owned(), import.name.to_owned());
        self.imports.push(Imported { module, name, asked });
        Ok(())
    }

    /// The shared memory has to be memory 0 and the only one of its kind, with short addresses.
    fn share(&self, memory: MemoryType) -> Result<(), AdmissionError> {
        let is_memory =
            |import: &Imported| matches!(import.asked, Asked::SharedMemory | Asked::Memory(_));
        if memory.memory64 || self.imports.iter().any(is_memory) {
            return Err(malformed("a shared memory has to be the first and 32-bit"));
        }
        Ok(())
    }

    fn memory(&mut self, memory: MemoryType) -> Result<(), AdmissionError> {
        if memory.shared {
            return Err(malformed("a shared memory has to be imported, or no thread can share it"));
        }
        let page = 1u64.checked_shl(memory.page_size_log2.unwrap_or(16)).unwrap_or(u64::MAX);
        self.memories.push(memory.initial.saturating_mul(page));
        Ok(())
    }

    /// Whether an isolate of a pool has room for what it begins with: else it would never run.
    pub fn fits(&self, pool: &Pool) -> Result<(), AdmissionError> {
        let most = |sizes: &[u64]| {
            usize::try_from(sizes.iter().copied().max().unwrap_or(0)).unwrap_or(usize::MAX)
        };
        at_most("bytes of a memory in a pool", most(&self.memories), pool.memory_bytes)?;
        if pool.slots == Slots::Guarded {
            at_most("memories of a module in a pool", self.memories.len(), 1)?;
            at_most("tables of a module in a pool", self.tables.len(), 1)?;
            at_most("elements of a table in a pool", most(&self.tables), pool.table_elements)?;
        }
        Ok(())
    }
}

pub(crate) fn malformed(message: &str) -> AdmissionError {
    AdmissionError::Malformed { message: message.to_owned() }
}

/// Where a segment ends if it lies at a constant place of memory 0, else 0.
fn data_end(data: &Data<'_>) -> Result<u64, AdmissionError> {
    let DataKind::Active { memory_index: 0, offset_expr } = &data.kind else { return Ok(0) };
    let offset = match offset_expr.get_operators_reader().read()? {
        Operator::I32Const { value } => u64::from(value as u32),
        _ => 0,
    };
    Ok(offset.saturating_add(data.data.len() as u64))
}

fn entries<T>(
    what: &'static str,
    section: &SectionLimited<'_, T>,
    limits: &ModuleLimits,
) -> Result<(), AdmissionError> {
    at_most(what, section.count() as usize, limits.entries as usize)
}

pub(crate) fn at_most(what: &'static str, found: usize, max: usize) -> Result<(), AdmissionError> {
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
        let import = &shape.imports[0];
        assert_eq!((import.module.as_str(), import.name.as_str()), ("a", "b"));
        assert_eq!((import.asked, shape.imported_functions), (Asked::Function, 1));
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
    fn what_no_pool_has_room_for_is_refused() {
        let fits = |text: &str, slots| {
            let pool = Pool { slots, ..Pool::default() };
            shape(text, &ModuleLimits::default()).unwrap().fits(&pool)
        };
        let fine = "(module (memory 1024) (table 20000 funcref))";
        for slots in [Slots::Guarded, Slots::Compact] {
            assert!(fits(fine, slots).is_ok());
            assert!(fits("(module (memory 1025))", slots).is_err());
            assert!(fits("(module (memory i64 0xffffffffff))", slots).is_err());
        }
        for text in [
            "(module (memory 1) (memory 1))",
            "(module (table 20001 funcref))",
            "(module (table 1 funcref) (table 1 externref))",
        ] {
            assert!(fits(text, Slots::Guarded).is_err(), "{text}");
            assert!(fits(text, Slots::Compact).is_ok(), "{text}");
        }
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
