//! Long operations on memory, done in pieces.
//!
//! `memory.fill`, `memory.copy` and `memory.init` are calls of the host, which no signal takes
//! the CPU from before they are over: a megabyte of fresh pages keeps it for some 300 us. So a
//! module that has them gets functions of its own that do them a piece at a time, and calls those
//! instead. Between two pieces it is code like any other. What is out of bounds is left to the
//! instruction, which then traps before it has written anything.

#[cfg(test)]
mod tests;

use crate::admission::AdmissionError;
use crate::admission::rewrite::{Instead, leave_unknown, replace};
use std::collections::BTreeMap;
use std::convert::Infallible;
use wasm_encoder::reencode::{Error, Reencode, utils};
use wasm_encoder::{
    BlockType, CodeSection, Function, FunctionSection, Instruction, Module, TypeSection, ValType,
};
use wasmparser::{DataKind, FunctionBody, MemoryType, Operator, Parser, Payload, TypeRef};

/// The longest that an instruction does at once, in bytes.
pub(crate) const PIECE_BYTES: u32 = 64 << 10;
/// What memories without a page size of their own count by, as a power of two.
const PAGE_LOG2: u32 = 16;

/// An operation, with the memories and the segment it is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Fill { memory: u32 },
    Copy { to: u32, from: u32 },
    Init { memory: u32, segment: u32 },
}

impl Operation {
    fn of(operator: &Operator<'_>) -> Option<Self> {
        match *operator {
            Operator::MemoryFill { mem } => Some(Self::Fill { memory: mem }),
            Operator::MemoryCopy { dst_mem, src_mem } => {
                Some(Self::Copy { to: dst_mem, from: src_mem })
            }
            Operator::MemoryInit { data_index, mem } => {
                Some(Self::Init { memory: mem, segment: data_index })
            }
            _ => None,
        }
    }

    fn instruction(self) -> Instruction<'static> {
        match self {
            Self::Fill { memory } => Instruction::MemoryFill(memory),
            Self::Copy { to, from } => Instruction::MemoryCopy { src_mem: from, dst_mem: to },
            Self::Init { memory, segment } => {
                Instruction::MemoryInit { mem: memory, data_index: segment }
            }
        }
    }
}

/// `binary` with its long operations in pieces of `piece_bytes`; `None` if it has none.
///
/// # Errors
/// [`AdmissionError::Malformed`] where the parser finds it so.
pub(crate) fn in_pieces(
    binary: &[u8],
    piece_bytes: u32,
) -> Result<Option<Vec<u8>>, AdmissionError> {
    let layout = Layout::read(binary, piece_bytes)?;
    if layout.operations.is_empty() {
        return Ok(None);
    }
    let mut module = Module::new();
    Rewriter { layout, types: 0 }
        .parse_core_module(&mut module, Parser::new(0), binary)
        .map_err(|error| AdmissionError::Malformed { message: error.to_string() })?;
    Ok(Some(module.finish()))
}

/// What the functions that are added depend on.
struct Layout {
    piece_bytes: u32,
    memories: Vec<MemoryType>,
    /// Lengths of the segments; 0 for those that are gone once there is an instance.
    segments: Vec<u64>,
    functions: u32,
    /// Each with its place among the functions that are added.
    operations: BTreeMap<Operation, u32>,
}

impl Layout {
    fn read(binary: &[u8], piece_bytes: u32) -> Result<Self, AdmissionError> {
        let (memories, segments, operations) = (Vec::new(), Vec::new(), BTreeMap::new());
        let mut layout = Self { piece_bytes, memories, segments, functions: 0, operations };
        for payload in Parser::new(0).parse_all(binary) {
            layout.look(payload?)?;
        }
        Ok(layout)
    }

    fn look(&mut self, payload: Payload<'_>) -> Result<(), AdmissionError> {
        match payload {
            Payload::ImportSection(section) => {
                for import in section.into_imports() {
                    match import?.ty {
                        TypeRef::Func(_) | TypeRef::FuncExact(_) => self.functions += 1,
                        TypeRef::Memory(memory) => self.memories.push(memory),
                        _ => {}
                    }
                }
            }
            Payload::FunctionSection(section) => {
                self.functions = self.functions.saturating_add(section.count());
            }
            Payload::MemorySection(section) => {
                for memory in section {
                    self.memories.push(memory?);
                }
            }
            Payload::DataSection(section) => {
                for segment in section {
                    let segment = segment?;
                    let passive = matches!(segment.kind, DataKind::Passive);
                    self.segments.push(if passive { segment.data.len() as u64 } else { 0 });
                }
            }
            Payload::CodeSectionEntry(body) => self.look_into(&body)?,
            _ => {}
        }
        Ok(())
    }

    fn look_into(&mut self, body: &FunctionBody<'_>) -> Result<(), AdmissionError> {
        let mut reader = body.get_operators_reader()?;
        let mut before = None;
        while !reader.eof() {
            let operator = reader.read()?;
            if let Some(operation) = self.long(&operator, before.as_ref()) {
                let next = self.operations.len() as u32;
                self.operations.entry(operation).or_insert(next);
            }
            before = Some(operator);
        }
        Ok(())
    }

    /// The operation, unless it is known to be short: its length is the operand that comes last.
    fn long(&self, operator: &Operator<'_>, before: Option<&Operator<'_>>) -> Option<Operation> {
        let operation = Operation::of(operator)?;
        let short = match before {
            Some(Operator::I32Const { value }) => *value as u32 <= self.piece_bytes,
            Some(Operator::I64Const { value }) => *value as u64 <= u64::from(self.piece_bytes),
            _ => false,
        };
        (!short).then_some(operation)
    }

    /// How a memory is addressed. One that does not exist is the compiler's to refuse.
    fn address(&self, memory: u32) -> Address {
        let memory = self.memories.get(memory as usize);
        let log2 = memory.and_then(|memory| memory.page_size_log2).unwrap_or(PAGE_LOG2);
        Address { long: memory.is_some_and(|memory| memory.memory64), page_log2: log2 }
    }

    /// Types of destination, source (or value) and length.
    fn operands(&self, operation: Operation) -> [Address; 3] {
        let short = Address { long: false, page_log2: 0 };
        match operation {
            Operation::Fill { memory } => [self.address(memory), short, self.address(memory)],
            Operation::Copy { to, from } => {
                let (to, from) = (self.address(to), self.address(from));
                [to, from, if to.long { from } else { to }]
            }
            Operation::Init { memory, .. } => [self.address(memory), short, short],
        }
    }

    /// The function that does `operation`.
    fn function(&self, operation: Operation) -> Function {
        let [to, from, length] = self.operands(operation);
        let mut out = Body { function: Function::new([]), piece: self.piece_bytes };
        out.push([Instruction::Block(BlockType::Empty)]);
        // Short ones are done by the instruction, and so are those out of bounds.
        out.push([LENGTH, length.constant(self.piece_bytes), length.is_at_most()]);
        out.push([Instruction::BrIf(0)]);
        let (memory, source) = match operation {
            Operation::Fill { memory } => (memory, None),
            Operation::Init { memory, segment } => {
                let bytes = self.segments.get(segment as usize).copied().unwrap_or(0);
                (memory, Some(Bound::Constant(bytes)))
            }
            Operation::Copy { to, from } => (to, Some(Bound::Memory(from))),
        };
        out.leave_beyond(Bound::Memory(memory), TO, to, length, to);
        if let Some(bound) = source {
            out.leave_beyond(bound, FROM, from, length, from);
        }
        match operation {
            Operation::Copy { to: one, from: other } if one == other => {
                out.copy_downwards(operation, to);
            }
            _ => out.upwards(operation, to, from, length),
        }
        out.push([Instruction::End, TO, FROM, LENGTH, operation.instruction(), Instruction::End]);
        out.function
    }
}

/// Where an operation may end.
#[derive(Clone, Copy)]
enum Bound {
    Memory(u32),
    Constant(u64),
}

/// The width of an address or a length.
#[derive(Clone, Copy)]
struct Address {
    long: bool,
    page_log2: u32,
}

/// The parameters: destination, source or value, length.
const TO: Instruction<'static> = Instruction::LocalGet(0);
const FROM: Instruction<'static> = Instruction::LocalGet(1);
const LENGTH: Instruction<'static> = Instruction::LocalGet(2);

impl Address {
    fn value_type(self) -> ValType {
        if self.long { ValType::I64 } else { ValType::I32 }
    }

    fn constant(self, value: u32) -> Instruction<'static> {
        match self.long {
            true => Instruction::I64Const(i64::from(value)),
            false => Instruction::I32Const(value as i32),
        }
    }

    fn is_at_most(self) -> Instruction<'static> {
        if self.long { Instruction::I64LeU } else { Instruction::I32LeU }
    }

    fn is_more(self) -> Instruction<'static> {
        if self.long { Instruction::I64GtU } else { Instruction::I32GtU }
    }

    fn add(self) -> Instruction<'static> {
        if self.long { Instruction::I64Add } else { Instruction::I32Add }
    }

    fn subtract(self) -> Instruction<'static> {
        if self.long { Instruction::I64Sub } else { Instruction::I32Sub }
    }
}

struct Body {
    function: Function,
    piece: u32,
}

impl Body {
    fn push<const N: usize>(&mut self, instructions: [Instruction<'_>; N]) {
        for instruction in instructions {
            self.function.instruction(&instruction);
        }
    }

    /// As 64 bits.
    fn push_long(&mut self, value: Instruction<'_>, address: Address) {
        self.push([value]);
        if !address.long {
            self.push([Instruction::I64ExtendI32U]);
        }
    }

    fn push_bound(&mut self, bound: Bound, address: Address) {
        match bound {
            Bound::Constant(bytes) => self.push([Instruction::I64Const(bytes as i64)]),
            Bound::Memory(memory) => {
                self.push_long(Instruction::MemorySize(memory), address);
                let log2 = i64::from(address.page_log2);
                self.push([Instruction::I64Const(log2), Instruction::I64Shl]);
            }
        }
    }

    /// Leaves the block unless the length from `start` on ends within `bound`.
    fn leave_beyond(
        &mut self,
        bound: Bound,
        start: Instruction<'_>,
        address: Address,
        length: Address,
        bounded: Address,
    ) {
        self.push_long(LENGTH, length);
        self.push_bound(bound, bounded);
        self.push([Instruction::I64GtU, Instruction::BrIf(0)]);
        self.push_long(start, address);
        self.push_bound(bound, bounded);
        self.push_long(LENGTH, length);
        self.push([Instruction::I64Sub, Instruction::I64GtU, Instruction::BrIf(0)]);
    }

    /// From the first byte on, as long as more than a piece is left.
    fn upwards(&mut self, operation: Operation, to: Address, from: Address, length: Address) {
        let piece = self.piece;
        self.push([Instruction::Loop(BlockType::Empty), TO, FROM, length.constant(piece)]);
        self.push([operation.instruction()]);
        self.push([TO, to.constant(piece), to.add(), Instruction::LocalSet(0)]);
        if !matches!(operation, Operation::Fill { .. }) {
            self.push([FROM, from.constant(piece), from.add(), Instruction::LocalSet(1)]);
        }
        self.push([LENGTH, length.constant(piece), length.subtract(), Instruction::LocalTee(2)]);
        self.push([length.constant(piece), length.is_more(), Instruction::BrIf(0)]);
        self.push([Instruction::End]);
    }

    /// Within one memory, from the last byte on where the source lies below: what is still to be
    /// read is not to be written over.
    fn copy_downwards(&mut self, operation: Operation, address: Address) {
        let piece = self.piece;
        self.push([TO, FROM, address.is_at_most(), Instruction::If(BlockType::Empty)]);
        self.upwards(operation, address, address, address);
        self.push([Instruction::Else, Instruction::Loop(BlockType::Empty)]);
        self.push([LENGTH, address.constant(piece), address.subtract(), Instruction::LocalSet(2)]);
        for start in [TO, FROM] {
            self.push([start, LENGTH, address.add()]);
        }
        self.push([address.constant(piece), operation.instruction()]);
        self.push([LENGTH, address.constant(piece), address.is_more(), Instruction::BrIf(0)]);
        self.push([Instruction::End, Instruction::End]);
    }
}

struct Rewriter {
    layout: Layout,
    /// Index of the first type that is added.
    types: u32,
}

impl Reencode for Rewriter {
    type Error = Infallible;

    fn parse_type_section(
        &mut self,
        types: &mut TypeSection,
        section: wasmparser::TypeSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        utils::parse_type_section(self, types, section)?;
        self.types = types.len();
        for operation in in_order(&self.layout.operations) {
            let operands = self.layout.operands(operation).map(Address::value_type);
            types.ty().function(operands, []);
        }
        Ok(())
    }

    fn parse_function_section(
        &mut self,
        functions: &mut FunctionSection,
        section: wasmparser::FunctionSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        utils::parse_function_section(self, functions, section)?;
        for place in 0..self.layout.operations.len() as u32 {
            functions.function(self.types.saturating_add(place));
        }
        Ok(())
    }

    fn parse_code_section(
        &mut self,
        code: &mut CodeSection,
        section: wasmparser::CodeSectionReader<'_>,
    ) -> Result<(), Error<Infallible>> {
        utils::parse_code_section(self, code, section)?;
        for operation in in_order(&self.layout.operations) {
            code.function(&self.layout.function(operation));
        }
        Ok(())
    }

    fn parse_function_body(
        &mut self,
        code: &mut CodeSection,
        body: FunctionBody<'_>,
    ) -> Result<(), Error<Infallible>> {
        let mut before = None;
        replace(self, code, &body, |Self { layout, .. }, operator| {
            let operation = layout.long(operator, before.as_ref());
            before = Some(operator.clone());
            let place = layout.operations.get(&operation?)?;
            let callee = layout.functions.saturating_add(*place);
            Some(Instead::Call { callee, constant: None })
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
}

/// In the order of their places.
fn in_order(operations: &BTreeMap<Operation, u32>) -> Vec<Operation> {
    let mut ordered: Vec<_> = operations.iter().collect();
    ordered.sort_unstable_by_key(|(_, place)| **place);
    ordered.into_iter().map(|(operation, _)| *operation).collect()
}
