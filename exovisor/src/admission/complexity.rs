//! How much work a module is for its compiler, counted in one pass before it begins.
//!
//! What is counted is what cranelift's time and memory grow with: each local variable is followed
//! through each basic block of its function, each branch table has an edge for each target, and
//! blocks are held on a stack. A module that is beyond a limit is refused with the limit's name
//! and both figures, after at most one reading of its bytes.

use crate::admission::AdmissionError;
use crate::admission::scan::at_most;
use crate::policy::ComplexityLimits;
use wasmparser::{CompositeInnerType, ElementItems, FunctionBody, Operator, Payload};

/// What was counted so far.
#[derive(Debug, Default)]
pub(crate) struct Complexity {
    code_bytes: u64,
    all_locals: u64,
    all_locals_by_blocks: u64,
    signatures: u64,
    elements: u64,
    names_bytes: u64,
    /// Of the module that is being read: the parameters of its types, and the types of its own
    /// functions.
    parameters: Vec<u32>,
    functions: Vec<u32>,
    /// Which of its functions is next.
    next: usize,
}

/// One function's own.
#[derive(Default)]
struct Body {
    blocks: u64,
    nesting: u64,
    deepest: u64,
    targets: u64,
}

impl Complexity {
    /// Another module begins; what was counted stays.
    pub fn next_module(&mut self) {
        (self.parameters, self.functions, self.next) = (Vec::new(), Vec::new(), 0);
    }

    /// Counts a part of a module.
    ///
    /// # Errors
    /// [`AdmissionError::TooLarge`], [`AdmissionError::Malformed`].
    pub fn look(
        &mut self,
        payload: &Payload<'_>,
        limits: &ComplexityLimits,
    ) -> Result<(), AdmissionError> {
        match payload {
            Payload::TypeSection(section) => {
                for group in section.clone() {
                    for ty in group?.types() {
                        let CompositeInnerType::Func(ty) = &ty.composite_type.inner else {
                            self.parameters.push(0);
                            continue;
                        };
                        self.parameters.push(ty.params().len() as u32);
                        self.signatures += (ty.params().len() + ty.results().len()) as u64;
                        within("parameters of all types", self.signatures, limits.signatures)?;
                    }
                }
            }
            Payload::FunctionSection(section) => {
                for ty in section.clone() {
                    self.functions.push(ty?);
                }
            }
            Payload::ImportSection(section) => {
                for import in section.clone().into_imports() {
                    let import = import?;
                    self.name(import.module.len() + import.name.len(), limits)?;
                }
            }
            Payload::ExportSection(section) => {
                for export in section.clone() {
                    self.name(export?.name.len(), limits)?;
                }
            }
            Payload::ElementSection(section) => {
                for element in section.clone() {
                    self.elements += u64::from(match element?.items {
                        ElementItems::Functions(items) => items.count(),
                        ElementItems::Expressions(_, items) => items.count(),
                    });
                    within("entries of element segments", self.elements, limits.elements)?;
                }
            }
            Payload::CodeSectionEntry(body) => self.function(body, limits)?,
            _ => {}
        }
        Ok(())
    }

    fn name(&mut self, bytes: usize, limits: &ComplexityLimits) -> Result<(), AdmissionError> {
        self.names_bytes += bytes as u64;
        within("bytes of names", self.names_bytes, limits.names_bytes)
    }

    fn function(
        &mut self,
        body: &FunctionBody<'_>,
        limits: &ComplexityLimits,
    ) -> Result<(), AdmissionError> {
        self.code_bytes += body.range().len() as u64;
        within("bytes of all functions", self.code_bytes, limits.code_bytes)?;
        let ty = self.functions.get(self.next).copied().unwrap_or(u32::MAX);
        self.next += 1;
        let mut locals = u64::from(self.parameters.get(ty as usize).copied().unwrap_or(0));
        for group in body.get_locals_reader()? {
            locals += u64::from(group?.0);
        }
        within("locals of one function", locals, limits.locals)?;
        self.all_locals += locals;
        within("locals of all functions", self.all_locals, limits.all_locals)?;
        let mut counted = Body::default();
        let mut operators = body.get_operators_reader()?;
        while !operators.eof() {
            counted.look(&operators.read()?, limits)?;
        }
        let product = locals.saturating_mul(counted.blocks);
        within("locals times blocks of one function", product, limits.locals_by_blocks)?;
        self.all_locals_by_blocks += product;
        let (all, most) = (self.all_locals_by_blocks, limits.all_locals_by_blocks);
        within("locals times blocks of all functions", all, most)
    }
}

impl Body {
    fn look(
        &mut self,
        operator: &Operator<'_>,
        limits: &ComplexityLimits,
    ) -> Result<(), AdmissionError> {
        match operator {
            Operator::Block { .. }
            | Operator::Loop { .. }
            | Operator::If { .. }
            | Operator::TryTable { .. }
            | Operator::Try { .. } => {
                self.blocks += 1;
                self.nesting += 1;
                self.deepest = self.deepest.max(self.nesting);
                within("blocks in blocks", self.deepest, limits.nesting)?;
            }
            Operator::End => self.nesting = self.nesting.saturating_sub(1),
            Operator::Else
            | Operator::BrIf { .. }
            | Operator::BrOnNull { .. }
            | Operator::BrOnNonNull { .. }
            | Operator::BrOnCast { .. }
            | Operator::BrOnCastFail { .. } => self.blocks += 1,
            Operator::BrTable { targets } => {
                self.blocks += 1;
                self.targets += u64::from(targets.len());
                within(
                    "targets of the branch tables of one function",
                    self.targets,
                    limits.targets,
                )?;
            }
            _ => return Ok(()),
        }
        within("blocks of one function", self.blocks, limits.blocks)
    }
}

fn within(what: &'static str, found: u64, max: u64) -> Result<(), AdmissionError> {
    let size = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
    at_most(what, size(found), size(max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::component;
    use crate::admission::scan;
    use crate::policy::ModuleLimits;

    const LARGE: ComplexityLimits = ComplexityLimits {
        code_bytes: 1000,
        locals: 1000,
        all_locals: 1000,
        blocks: 1000,
        locals_by_blocks: 1000,
        all_locals_by_blocks: 1000,
        nesting: 1000,
        targets: 1000,
        signatures: 1000,
        elements: 1000,
        names_bytes: 1000,
    };
    /// Three locals, two blocks in each other and two branches, two targets, two functions.
    const TEXT: &str = r#"(module
        (func (export "four") (param i32) (result i32) (local i64 i64)
          (block (block (br_if 0 (local.get 0))) (br_table 0 0 0 (local.get 0)))
          (i32.const 0))
        (func (local i32))
        (table 4 funcref) (elem (i32.const 0) 0 1 0 1))"#;

    /// What is refused under `complexity`, alone and in a component.
    fn refused(complexity: ComplexityLimits) -> Option<&'static str> {
        let limits = ModuleLimits { complexity, ..ModuleLimits::default() };
        let what = |error| match error {
            AdmissionError::TooLarge { what, .. } => what,
            error => panic!("{error}"),
        };
        let binary = wat::parse_str(TEXT).unwrap();
        let alone = scan::scan(&binary, &limits).err().map(what);
        let inside = wat::parse_str(TEXT.replacen("(module", "(component (core module", 1) + ")");
        let inside = component::scan(&inside.unwrap(), &limits).err().map(what);
        assert_eq!(alone, inside);
        alone
    }

    #[test]
    fn each_limit_refuses_and_is_named() {
        assert_eq!(refused(LARGE), None);
        let cases = [
            (ComplexityLimits { code_bytes: 20, ..LARGE }, "bytes of all functions"),
            (ComplexityLimits { locals: 2, ..LARGE }, "locals of one function"),
            (ComplexityLimits { all_locals: 3, ..LARGE }, "locals of all functions"),
            (ComplexityLimits { blocks: 3, ..LARGE }, "blocks of one function"),
            (
                ComplexityLimits { locals_by_blocks: 11, ..LARGE },
                "locals times blocks of one function",
            ),
            (
                ComplexityLimits { all_locals_by_blocks: 11, ..LARGE },
                "locals times blocks of all functions",
            ),
            (ComplexityLimits { nesting: 1, ..LARGE }, "blocks in blocks"),
            (
                ComplexityLimits { targets: 1, ..LARGE },
                "targets of the branch tables of one function",
            ),
            (ComplexityLimits { signatures: 1, ..LARGE }, "parameters of all types"),
            (ComplexityLimits { elements: 3, ..LARGE }, "entries of element segments"),
            (ComplexityLimits { names_bytes: 3, ..LARGE }, "bytes of names"),
        ];
        for (limits, what) in cases {
            assert_eq!(refused(limits), Some(what));
        }
    }

    #[test]
    fn modules_of_a_component_count_together() {
        let module = "(core module (func (local i32 i32)))";
        let binary = wat::parse_str(format!("(component {module} {module})")).unwrap();
        let scan = |all_locals| {
            let complexity = ComplexityLimits { all_locals, ..LARGE };
            component::scan(&binary, &ModuleLimits { complexity, ..ModuleLimits::default() })
        };
        assert!(scan(4).is_ok() && scan(3).is_err());
    }
}
