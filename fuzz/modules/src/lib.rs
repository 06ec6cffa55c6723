//! Random Wasm modules (wasm-smith), the same every time: what a tenant may bring who writes
//! anything that is valid, for tests and measurements of who runs it.
#![forbid(unsafe_code)]

use arbitrary::Unstructured;
use std::sync::LazyLock;
use wasm_smith::{Config, Module};

/// What each module exports, and the types of the parameters.
pub const FUNCTIONS: [(&str, &str); 3] = [("one", ""), ("two", "iF"), ("three", "Ifi")];
/// The same for wasm-smith; what it makes of them is random.
const EXPORTS: &str = r#"(module
  (func (export "one") (result i32) unreachable)
  (func (export "two") (param i32 f64) (result i64) unreachable)
  (func (export "three") (param i64 f32 i32) unreachable))"#;
/// Modules import some of these: one needs no capability, the other nobody has.
const IMPORTS: &str = r#"(module
  (import "env" "pow" (func (param f64 f64) (result f64)))
  (import "env" "nothing" (func (param i64) (result f32))))"#;
/// One in so many is of any kind: with imports, types and sizes that no host has.
const WILD_ONE_IN: u8 = 16;
/// A function's instructions, functions besides the exported, and bytes of memory at the beginning.
const INSTRUCTIONS_MAX: usize = 120;
const FUNCTIONS_MAX: usize = 6;
const MEMORY_BYTES_MAX: u64 = 2 << 20;

/// The module that these bytes describe; a few more bytes make a larger one. `None` if they
/// describe none.
#[must_use]
pub fn module(bytes: &[u8]) -> Option<Vec<u8>> {
    let (kind, bytes) = bytes.split_first()?;
    let config = if kind % WILD_ONE_IN == 0 { wild() } else { tame() };
    let module = Module::new(config, &mut Unstructured::new(bytes)).ok()?;
    Some(module.to_bytes())
}

/// Of what the exovisor's engine takes: no collected types, and wasm-smith's references are of
/// these. Its shared memories are never imported.
fn tame() -> Config {
    Config {
        available_imports: Some(IMPORTS_BINARY.clone()),
        memory64_enabled: false,
        exceptions_enabled: false,
        gc_enabled: false,
        threads_enabled: false,
        reference_types_enabled: false,
        max_imports: 4,
        max_memory32_bytes: MEMORY_BYTES_MAX,
        max_table_elements: 10_000,
        ..wild()
    }
}

fn wild() -> Config {
    Config {
        exports: Some(EXPORTS_BINARY.clone()),
        max_funcs: FUNCTIONS_MAX,
        max_instructions: INSTRUCTIONS_MAX,
        ..Config::default()
    }
}

static EXPORTS_BINARY: LazyLock<Vec<u8>> = LazyLock::new(|| binary(EXPORTS));
static IMPORTS_BINARY: LazyLock<Vec<u8>> = LazyLock::new(|| binary(IMPORTS));

fn binary(text: &str) -> Vec<u8> {
    wat::parse_str(text).expect("the text is right")
}

/// So many bytes, others for each seed: xorshift64* (S. Vigna, 2014).
#[must_use]
pub fn entropy(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
    };
    (0..count).map(|_| next()).collect()
}
