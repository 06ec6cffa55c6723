//! How large and how complex a module may be.

use serde::{Deserialize, Serialize};

/// Bounds of one module or component.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModuleLimits {
    /// Length of the binary or the text, in bytes.
    pub bytes: usize,
    /// Entries of any one section but the code: types, imports, functions, exports, ...
    pub entries: u32,
    /// Length of one function's body, in bytes. Compile time grows with it.
    pub body_bytes: usize,
    /// Levels of components in components, and of types in types.
    pub depth: usize,
    /// Instances of core modules that a component becomes.
    pub instances: usize,
    /// Definitions in all of them: each takes a few words of the host's memory.
    pub items: usize,
    /// How much work it may be for the compiler.
    pub complexity: ComplexityLimits,
}

impl Default for ModuleLimits {
    /// 64 MiB, 100,000 entries, 2 MiB a body: room for whole language interpreters. Of a
    /// component, 32 levels, 256 instances and a million definitions.
    fn default() -> Self {
        Self {
            bytes: 64 << 20,
            entries: 100_000,
            body_bytes: 2 << 20,
            depth: 32,
            instances: 256,
            items: 1_000_000,
            complexity: ComplexityLimits::default(),
        }
    }
}

/// How complex modules may be: a module's own, or those of a component together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ComplexityLimits {
    /// Bytes of all functions.
    pub code_bytes: u64,
    /// Locals of one function, its parameters included.
    pub locals: u64,
    /// Locals of all functions.
    pub all_locals: u64,
    /// Blocks, branches among them, of one function.
    pub blocks: u64,
    /// The product of the two in one function.
    pub locals_by_blocks: u64,
    /// The sum of these products.
    pub all_locals_by_blocks: u64,
    /// Blocks in blocks.
    pub nesting: u64,
    /// Targets of the branch tables of one function.
    pub targets: u64,
    /// Parameters and results of all types.
    pub signatures: u64,
    /// Entries of all element segments.
    pub elements: u64,
    /// Bytes of all names of imports and exports.
    pub names_bytes: u64,
}

impl Default for ComplexityLimits {
    /// Several times what CPython, SQLite and other large programs are.
    fn default() -> Self {
        Self {
            code_bytes: 48 << 20,
            locals: 20_000,
            all_locals: 4_000_000,
            blocks: 100_000,
            locals_by_blocks: 20_000_000,
            all_locals_by_blocks: 400_000_000,
            nesting: 2_000,
            targets: 50_000,
            signatures: 1_000_000,
            elements: 1_000_000,
            names_bytes: 4 << 20,
        }
    }
}
