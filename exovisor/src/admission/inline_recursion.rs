//! Recursion, several calls at a time.
//!
//! A short function that calls itself spends most of its time on entering and leaving. So where it
//! does, its own body stands instead of the call, which then calls itself less often. What it
//! computes stays the same; how deep it gets before its stack is full does not.
//!
//! A function that is not valid does not become so: its own body is still there, the outermost.

#[cfg(test)]
mod tests;

use crate::admission::AdmissionError;
use crate::admission::rewrite::leave_unknown;
use std::collections::BTreeMap;
use std::convert::Infallible;
use wasm_encoder::reencode::{Error, Reencode};
use wasm_encoder::{BlockType, CodeSection, Function, Instruction, Module, ValType};
use wasmparser::{CompositeInnerType, FuncType, FunctionBody, Operator, Parser, Payload, TypeRef};

/// How many bodies stand in each other, beside the function's own.
const LEVELS_MAX: u32 = 3;
/// Operators of a function that is made longer.
const OPERATORS_MAX: usize = 200;
/// The same in bytes, before it is: no need to look at longer ones.
const BODY_BYTES_MAX: usize = 4 * OPERATORS_MAX;
/// Parameters and other variables of such a function.
const LOCALS_MAX: usize = 16;
/// Operators by which a module grows.
const GROWTH_MAX: usize = 50_000;

/// `binary` with its short recursive functions inlined; `None` if it has none.
///
/// # Errors
/// [`AdmissionError::Malformed`] where the parser finds it so.
pub(crate) fn inlined(binary: &[u8]) -> Result<Option<Vec<u8>>, AdmissionError> {
    let mut layout = Layout::default();
    for payload in Parser::new(0).parse_all(binary) {
        layout.look(payload?)?;
    }
    if layout.recursive.is_empty() {
        return Ok(None);
    }
    let mut module = Module::new();
    Rewriter { recursive: layout.recursive, next: 0 }
        .parse_core_module(&mut module, Parser::new(0), binary)
        .map_err(|error| AdmissionError::Malformed { message: error.to_string() })?;
    Ok(Some(module.finish()))
}

/// What the module has, as far as it was read.
#[derive(Default)]
struct Layout<'a> {
    /// `None` for those that are not of functions.
    types: Vec<Option<FuncType>>,
    imported: u32,
    /// Types of the functions that are defined here.
    functions: Vec<u32>,
    bodies: usize,
    grown: usize,
    /// By their place among the bodies.
    recursive: BTreeMap<usize, Recursive<'a>>,
}

impl<'a> Layout<'a> {
    fn look(&mut self, payload: Payload<'a>) -> Result<(), AdmissionError> {
        match payload {
            Payload::TypeSection(section) => {
                for group in section {
                    self.types.extend(group?.into_types().map(
                        |ty| match ty.composite_type.inner {
                            CompositeInnerType::Func(ty) => Some(ty),
                            _ => None,
                        },
                    ));
                }
            }
            Payload::ImportSection(section) => {
                for import in section.into_imports() {
                    let ty = import?.ty;
                    self.imported +=
                        u32::from(matches!(ty, TypeRef::Func(_) | TypeRef::FuncExact(_)));
                }
            }
            Payload::FunctionSection(section) => {
                for ty in section {
                    self.functions.push(ty?);
                }
            }
            Payload::CodeSectionEntry(body) => {
                let place = self.bodies;
                self.bodies += 1;
                if let Some(recursive) = self.recursive(place, &body)? {
                    let grown = self.grown.saturating_add(recursive.growth());
                    if grown <= GROWTH_MAX {
                        self.grown = grown;
                        self.recursive.insert(place, recursive);
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn recursive(
        &self,
        place: usize,
        body: &FunctionBody<'a>,
    ) -> Result<Option<Recursive<'a>>, AdmissionError> {
        if body.range().len() > BODY_BYTES_MAX {
            return Ok(None);
        }
        let ty = self.functions.get(place).and_then(|ty| self.types.get(*ty as usize));
        let Some(Some(ty)) = ty else { return Ok(None) };
        let Some(index) = u32::try_from(place).ok().and_then(|at| at.checked_add(self.imported))
        else {
            return Ok(None);
        };
        Recursive::read(index, ty, body)
    }
}

/// A short function that calls itself.
struct Recursive<'a> {
    index: u32,
    parameters: usize,
    /// Parameters and other variables.
    locals: Vec<ValType>,
    result: BlockType,
    /// Without the last `end`.
    operators: Vec<Operator<'a>>,
    calls: usize,
    levels: u32,
}

impl<'a> Recursive<'a> {
    /// `None` if it is not one, or is not understood.
    fn read(
        index: u32,
        ty: &FuncType,
        body: &FunctionBody<'a>,
    ) -> Result<Option<Self>, AdmissionError> {
        let result = match ty.results() {
            [] => Some(BlockType::Empty),
            [result] => number(*result).map(BlockType::Result),
            _ => None,
        };
        let locals = locals(ty, body)?;
        let (Some(result), Some(locals)) = (result, locals) else { return Ok(None) };
        let parameters = ty.params().len();
        let operators = Vec::new();
        let mut read = Self { index, parameters, locals, result, operators, calls: 0, levels: 0 };
        let mut reader = body.get_operators_reader()?;
        let mut open = 1;
        while !reader.eof() {
            let operator = reader.read()?;
            open = nesting(open, &operator);
            if !read.understands(&operator) || (open == 0) != reader.eof() {
                return Ok(None);
            }
            read.calls += usize::from(read.is_call(&operator));
            read.operators.push(operator);
        }
        read.operators.pop();
        read.levels = (1..=LEVELS_MAX).take_while(|levels| read.fits(*levels)).last().unwrap_or(0);
        Ok((read.calls > 0 && read.levels > 0).then_some(read))
    }

    fn is_call(&self, operator: &Operator<'_>) -> bool {
        matches!(operator, Operator::Call { function_index } if *function_index == self.index)
    }

    /// Whether it means the same in a body that stands in another.
    fn understands(&self, operator: &Operator<'_>) -> bool {
        match operator {
            Operator::LocalGet { local_index }
            | Operator::LocalSet { local_index }
            | Operator::LocalTee { local_index } => (*local_index as usize) < self.locals.len(),
            Operator::ReturnCall { .. }
            | Operator::ReturnCallIndirect { .. }
            | Operator::ReturnCallRef { .. }
            | Operator::TryTable { .. }
            | Operator::Try { .. }
            | Operator::Catch { .. }
            | Operator::CatchAll
            | Operator::Delegate { .. }
            | Operator::Rethrow { .. } => false,
            _ => true,
        }
    }

    /// Bodies in a body with so many levels of them.
    fn bodies(&self, levels: u32) -> usize {
        (1..=levels).map(|level| self.calls.saturating_pow(level)).sum()
    }

    fn fits(&self, levels: u32) -> bool {
        let bodies = self.bodies(levels).saturating_add(1);
        bodies.saturating_mul(self.operators.len()) <= OPERATORS_MAX
    }

    fn growth(&self) -> usize {
        self.bodies(self.levels).saturating_mul(self.operators.len())
    }

    /// The function with its bodies in each other.
    fn inlined<R: Reencode<Error = Infallible>>(
        &self,
        rewriter: &mut R,
    ) -> Result<Function, Error<Infallible>> {
        // Those of one level are not used at the same time, and share theirs.
        let all = (0..=self.levels).flat_map(|_| &self.locals).skip(self.parameters);
        let mut function = Function::new_with_locals_types(all.copied());
        self.write(rewriter, &mut function, 0)?;
        function.instruction(&Instruction::End);
        Ok(function)
    }

    fn write<R: Reencode<Error = Infallible>>(
        &self,
        rewriter: &mut R,
        function: &mut Function,
        level: u32,
    ) -> Result<(), Error<Infallible>> {
        let local = |index: u32| self.first_local(level) + index;
        let mut open = 0;
        for operator in &self.operators {
            open = nesting(open, operator);
            match operator {
                Operator::LocalGet { local_index } => {
                    function.instruction(&Instruction::LocalGet(local(*local_index)));
                }
                Operator::LocalSet { local_index } => {
                    function.instruction(&Instruction::LocalSet(local(*local_index)));
                }
                Operator::LocalTee { local_index } => {
                    function.instruction(&Instruction::LocalTee(local(*local_index)));
                }
                Operator::Return if level > 0 => {
                    function.instruction(&Instruction::Br(open));
                }
                call if self.is_call(call) && level < self.levels => {
                    self.enter(function, level + 1);
                    self.write(rewriter, function, level + 1)?;
                    function.instruction(&Instruction::End);
                }
                other => {
                    function.instruction(&rewriter.instruction(other.clone())?);
                }
            }
        }
        Ok(())
    }

    /// Takes the arguments from the stack and makes all other variables as new.
    fn enter(&self, function: &mut Function, level: u32) {
        let locals = (self.first_local(level)..).zip(&self.locals);
        let (parameters, others): (Vec<_>, Vec<_>) =
            locals.enumerate().partition(|(at, _)| *at < self.parameters);
        for (_, (index, _)) in parameters.into_iter().rev() {
            function.instruction(&Instruction::LocalSet(index));
        }
        for (_, (index, ty)) in others {
            function.instruction(&zero(*ty)).instruction(&Instruction::LocalSet(index));
        }
        function.instruction(&Instruction::Block(self.result));
    }

    fn first_local(&self, level: u32) -> u32 {
        // At most LOCALS_MAX of each.
        level * self.locals.len() as u32
    }
}

/// How many blocks are open after `operator`.
fn nesting(open: u32, operator: &Operator<'_>) -> u32 {
    match operator {
        Operator::Block { .. } | Operator::Loop { .. } | Operator::If { .. } => open + 1,
        Operator::End => open.saturating_sub(1),
        _ => open,
    }
}

/// All variables of a function, if they are few and numbers.
fn locals(ty: &FuncType, body: &FunctionBody<'_>) -> Result<Option<Vec<ValType>>, AdmissionError> {
    let mut all: Vec<Option<ValType>> = ty.params().iter().copied().map(number).collect();
    for group in body.get_locals_reader()? {
        let (count, ty) = group?;
        // One too many is enough.
        all.extend(std::iter::repeat_n(number(ty), (count as usize).min(LOCALS_MAX + 1)));
    }
    Ok(if all.len() <= LOCALS_MAX { all.into_iter().collect() } else { None })
}

fn number(ty: wasmparser::ValType) -> Option<ValType> {
    match ty {
        wasmparser::ValType::I32 => Some(ValType::I32),
        wasmparser::ValType::I64 => Some(ValType::I64),
        wasmparser::ValType::F32 => Some(ValType::F32),
        wasmparser::ValType::F64 => Some(ValType::F64),
        wasmparser::ValType::V128 => Some(ValType::V128),
        wasmparser::ValType::Ref(_) => None,
    }
}

fn zero(ty: ValType) -> Instruction<'static> {
    match ty {
        ValType::I64 => Instruction::I64Const(0),
        ValType::F32 => Instruction::F32Const(0.0.into()),
        ValType::F64 => Instruction::F64Const(0.0.into()),
        ValType::V128 => Instruction::V128Const(0),
        _ => Instruction::I32Const(0),
    }
}

struct Rewriter<'a> {
    recursive: BTreeMap<usize, Recursive<'a>>,
    /// The place of the next body.
    next: usize,
}

impl Reencode for Rewriter<'_> {
    type Error = Infallible;

    fn parse_function_body(
        &mut self,
        code: &mut CodeSection,
        body: FunctionBody<'_>,
    ) -> Result<(), Error<Infallible>> {
        let recursive = self.recursive.remove(&self.next);
        self.next += 1;
        match recursive {
            Some(recursive) => code.function(&recursive.inlined(self)?),
            None => code.raw(body.as_bytes()),
        };
        Ok(())
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
