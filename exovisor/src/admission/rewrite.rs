//! What cannot be linked once for all calls is rewritten so that it can.
//!
//! - A memory, table or stack pointer that the module wants from its host becomes its own
//!   definition, which the pool serves like any other; indices stay as they are.
//! - `memory.atomic.wait` and `notify` on the shared memory become calls of host functions: the
//!   instruction would block the whole thread below all fibers, and nothing could end it.
//! - `memory.fill` of much of it with zeros does, too: linkers write it for static variables,
//!   because they do not know that the memory is new, and it would touch all their pages.
//! - A function is added that threads begin with ([`crate::admission::thread_entry`]).
//! - `data.drop` goes where nothing can tell ([`crate::admission::data_drop`]).
//!
//! A module that needs none of it stays as it is, byte for byte.

use crate::admission::AdmissionError;
use crate::admission::data_drop;
use crate::admission::scan::{Asked, Imported, Shape};
use crate::admission::thread_entry::{BOTH, Both};
use crate::imports::{ATOMIC_NAMES, ATOMICS};
use std::convert::Infallible;
use wasm_encoder::reencode::{Error, Reencode, utils};
use wasm_encoder::{
    CodeSection, ConstExpr, EntityType, ExportKind, ExportSection, FunctionSection, GlobalSection,
    ImportSection, Instruction, MemorySection, Module, RawSection, SectionId, TableSection,
    TypeSection, ValType,
};
use wasmparser::{FunctionBody, Operator, Parser};

/// From how many bytes on zeros are not written.
const CLEARED_FROM_BYTES: u32 = 32 << 10;
/// The stack below the first value of a hosted `__stack_pointer`, in bytes.
const STACK_BYTES: u64 = 1 << 20;
const PAGE_BYTES: u64 = 64 << 10;

/// The sections that something may be added to, in the order of the format.
const ORDER: [SectionId; 13] = [
    SectionId::Type,
    SectionId::Import,
    SectionId::Function,
    SectionId::Table,
    SectionId::Memory,
    SectionId::Tag,
    SectionId::Global,
    SectionId::Export,
    SectionId::Start,
    SectionId::Element,
    SectionId::DataCount,
    SectionId::Code,
    SectionId::Data,
];

/// Rewrites `binary`, whose structure is `shape`; `None` if nothing is to be done.
///
/// # Errors
/// [`AdmissionError::Malformed`] where the parser finds it so.
pub(crate) fn rewritten(binary: &[u8], shape: &Shape) -> Result<Option<Vec<u8>>, AdmissionError> {
    if !shape.is_threaded() && shape.hosted().next().is_none() {
        return Ok(None);
    }
    let mut rewriter = Rewriter::new(shape);
    if shape.is_threaded() {
        rewriter.keeps_data = data_drop::are_unseen(binary)?;
        rewriter.both = Both::find(binary)?;
    }
    let mut module = Module::new();
    rewriter
        .parse_core_module(&mut module, Parser::new(0), binary)
        .map_err(|error| AdmissionError::Malformed { message: error.to_string() })?;
    Ok(Some(module.finish()))
}

struct Rewriter<'a> {
    shape: &'a Shape,
    /// Whether no segment is dropped.
    keeps_data: bool,
    /// What threads begin with, if that is to be one function.
    both: Option<Both>,
    /// Index of the first type that is added.
    types: u32,
    /// Position in [`ORDER`] that is next.
    next: usize,
}

impl<'a> Rewriter<'a> {
    fn new(shape: &'a Shape) -> Self {
        Self { shape, keeps_data: false, both: None, types: 0, next: 0 }
    }

    fn added_functions(&self) -> u32 {
        if self.shape.is_threaded() { ATOMIC_NAMES.len() as u32 } else { 0 }
    }

    fn hosted(&self) -> impl Iterator<Item = &'a Imported> + use<'a> {
        self.shape.hosted()
    }

    fn add_types(&mut self, types: &mut TypeSection) {
        use ValType::{I32, I64};
        self.types = types.len();
        types.ty().function([I32, I32, I64, I64], [I32]);
        types.ty().function([I32, I64, I64, I64], [I32]);
        types.ty().function([I32, I32, I64], [I32]);
        types.ty().function([I32, I32, I32], []);
        Both::add_type(types);
    }

    fn add_tables(&mut self, tables: &mut TableSection) -> Result<(), Error<Infallible>> {
        for import in self.hosted() {
            if let Asked::Table(ty) = import.asked {
                tables.table(self.table_type(ty)?);
            }
        }
        Ok(())
    }

    fn add_memories(&mut self, memories: &mut MemorySection) -> Result<(), Error<Infallible>> {
        for import in self.hosted() {
            if let Asked::Memory(mut ty) = import.asked {
                if let Some(top) = self.stack_top() {
                    ty.initial = ty.initial.max(top / PAGE_BYTES);
                }
                memories.memory(self.memory_type(ty)?);
            }
        }
        Ok(())
    }

    fn add_globals(&mut self, globals: &mut GlobalSection) -> Result<(), Error<Infallible>> {
        for import in self.hosted() {
            if let Asked::Global(ty) = import.asked {
                let top = self.stack_top().unwrap_or(0);
                globals.global(self.global_type(ty)?, &ConstExpr::i32_const(top as i32));
            }
        }
        Ok(())
    }

    fn add_exports(&self, exports: &mut ExportSection) {
        if self.hosted().any(|import| matches!(import.asked, Asked::Memory(_)))
            && !self.shape.exports_memory
        {
            exports.export("memory", ExportKind::Memory, 0);
        }
        if let Some(both) = self.both {
            let index = both.functions.saturating_add(self.added_functions());
            exports.export(BOTH, ExportKind::Func, index);
        }
    }

    /// Where a hosted stack begins: above all data, growing down.
    fn stack_top(&self) -> Option<u64> {
        self.hosted()
            .any(|import| matches!(import.asked, Asked::Global(_)))
            .then(|| self.shape.data_end.next_multiple_of(PAGE_BYTES).saturating_add(STACK_BYTES))
    }

    /// A section that the module does not have and that something is added to.
    fn add_section(&mut self, module: &mut Module, id: SectionId) -> Result<(), Error<Infallible>> {
        let (mut tables, mut memories) = (TableSection::new(), MemorySection::new());
        let (mut globals, mut exports) = (GlobalSection::new(), ExportSection::new());
        match id {
            SectionId::Table => self.add_tables(&mut tables)?,
            SectionId::Memory => self.add_memories(&mut memories)?,
            SectionId::Global => self.add_globals(&mut globals)?,
            SectionId::Export => self.add_exports(&mut exports),
            _ => {}
        }
        if !tables.is_empty() {
            module.section(&tables);
        }
        if !memories.is_empty() {
            module.section(&memories);
        }
        if !globals.is_empty() {
            module.section(&globals);
        }
        if !exports.is_empty() {
            module.section(&exports);
        }
        Ok(())
    }

    /// What stands for an instruction on the shared memory. `before` are the two operators before
    /// it.
    fn instead(
        &self,
        operator: &Operator<'_>,
        before: &[Option<Operator<'_>>; 2],
    ) -> Option<Instead> {
        let (index, memarg) = match operator {
            Operator::DataDrop { .. } if self.keeps_data => return Some(Instead::Nothing),
            Operator::MemoryFill { mem: 0 } if self.shape.is_threaded() && are_zeros(before) => {
                let callee = self.shape.imported_functions.saturating_add(3);
                return Some(Instead::Call { callee, constant: None });
            }
            Operator::MemoryAtomicWait32 { memarg } => (0, memarg),
            Operator::MemoryAtomicWait64 { memarg } => (1, memarg),
            Operator::MemoryAtomicNotify { memarg } => (2, memarg),
            _ => return None,
        };
        let shared = self.shape.is_threaded() && memarg.memory == 0;
        let callee = self.shape.imported_functions.saturating_add(index);
        shared.then_some(Instead::Call { callee, constant: Some(memarg.offset) })
    }
}

/// What is written in the place of an instruction.
pub(crate) enum Instead {
    Nothing,
    /// A call of a function, which is passed a constant last, if there is one.
    Call {
        callee: u32,
        constant: Option<u64>,
    },
}

/// Writes a function with other instructions in the place of some: `instead` is asked for each
/// operator, in order.
pub(crate) fn replace<'a, R: Reencode<Error = Infallible>>(
    rewriter: &mut R,
    code: &mut CodeSection,
    body: &FunctionBody<'a>,
    mut instead: impl FnMut(&mut R, &Operator<'a>) -> Option<Instead>,
) -> Result<(), Error<Infallible>> {
    let mut function = rewriter.new_function_with_parsed_locals(body)?;
    let mut reader = body.get_operators_reader()?;
    while !reader.eof() {
        let operator = reader.read()?;
        match instead(rewriter, &operator) {
            Some(Instead::Nothing) => {}
            Some(Instead::Call { callee, constant }) => {
                if let Some(constant) = constant {
                    function.instruction(&Instruction::I64Const(constant as i64));
                }
                function.instruction(&Instruction::Call(callee));
            }
            None => {
                function.instruction(&rewriter.instruction(operator)?);
            }
        }
    }
    code.function(&function);
    Ok(())
}

/// Sections that this version of the parser does not know are left to the compiler.
pub(crate) fn leave_unknown(
    module: &mut Module,
    id: u8,
    data: &[u8],
) -> Result<(), Error<Infallible>> {
    module.section(&RawSection { id, data });
    Ok(())
}

/// Whether what is filled is many bytes, and with zeros.
fn are_zeros(before: &[Option<Operator<'_>>; 2]) -> bool {
    let [Some(Operator::I32Const { value: 0 }), Some(Operator::I32Const { value: length })] =
        before
    else {
        return false;
    };
    *length as u32 >= CLEARED_FROM_BYTES
}

impl Reencode for Rewriter<'_> {
    type Error = Infallible;

    fn function_index(&mut self, func: u32) -> Result<u32, Error<Infallible>> {
        let imported = func < self.shape.imported_functions;
        Ok(if imported { func } else { func.saturating_add(self.added_functions()) })
    }

    fn parse_type_section(
        &mut self,
        types: &mut TypeSection,
        section: wasmparser::TypeSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        utils::parse_type_section(self, types, section)?;
        if self.shape.is_threaded() {
            self.add_types(types);
        }
        Ok(())
    }

    fn parse_import_section(
        &mut self,
        imports: &mut ImportSection,
        section: wasmparser::ImportSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        for (import, known) in section.into_imports().zip(&self.shape.imports) {
            let import = import?;
            if !known.is_hosted() {
                self.parse_import(imports, import)?;
            }
        }
        if self.shape.is_threaded() {
            for (ty, name) in (self.types..).zip(ATOMIC_NAMES) {
                imports.import(ATOMICS, name, EntityType::Function(ty));
            }
        }
        Ok(())
    }

    fn parse_table_section(
        &mut self,
        tables: &mut TableSection,
        section: wasmparser::TableSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        self.add_tables(tables)?;
        utils::parse_table_section(self, tables, section)
    }

    fn parse_memory_section(
        &mut self,
        memories: &mut MemorySection,
        section: wasmparser::MemorySectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        self.add_memories(memories)?;
        utils::parse_memory_section(self, memories, section)
    }

    fn parse_global_section(
        &mut self,
        globals: &mut GlobalSection,
        section: wasmparser::GlobalSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        self.add_globals(globals)?;
        utils::parse_global_section(self, globals, section)
    }

    fn parse_export_section(
        &mut self,
        exports: &mut ExportSection,
        section: wasmparser::ExportSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        utils::parse_export_section(self, exports, section)?;
        self.add_exports(exports);
        Ok(())
    }

    fn parse_function_section(
        &mut self,
        functions: &mut FunctionSection,
        section: wasmparser::FunctionSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        utils::parse_function_section(self, functions, section)?;
        if self.both.is_some() {
            functions.function(self.types.saturating_add(ATOMIC_NAMES.len() as u32));
        }
        Ok(())
    }

    fn parse_code_section(
        &mut self,
        code: &mut CodeSection,
        section: wasmparser::CodeSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        utils::parse_code_section(self, code, section)?;
        if let Some(both) = self.both {
            code.function(&both.function(|index| self.function_index(index))?);
        }
        Ok(())
    }

    fn parse_function_body(
        &mut self,
        code: &mut CodeSection,
        body: FunctionBody<'_>,
    ) -> Result<(), Error<Infallible>> {
        let mut before = [None, None];
        replace(self, code, &body, |rewriter, operator| {
            let instead = rewriter.instead(operator, &before);
            before = [before[1].take(), Some(operator.clone())];
            instead
        })
    }

    fn parse_unknown_section(
        &mut self,
        module: &mut Module,
        id: u8,
        data: &[u8],
    ) -> Result<(), Error<Infallible>> {
        leave_unknown(module, id, data)
    }

    fn intersperse_section_hook(
        &mut self,
        module: &mut Module,
        _: Option<SectionId>,
        before: Option<SectionId>,
    ) -> Result<(), Error<Infallible>> {
        let position = |id| ORDER.iter().position(|known| *known == id).unwrap_or(0);
        let end = before.map_or(ORDER.len(), position);
        let skipped: Vec<SectionId> = ORDER.iter().copied().take(end).skip(self.next).collect();
        self.next = self.next.max(end + 1);
        skipped.into_iter().try_for_each(|id| self.add_section(module, id))
    }
}
