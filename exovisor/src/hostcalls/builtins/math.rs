//! The functions of `math.h` that compiled code has no instruction for.

use crate::hostcalls::state::State;
use crate::imports::ENV;
use wasmtime::{Linker, Result};

type Unary = (&'static str, fn(f64) -> f64);
type Binary = (&'static str, fn(f64, f64) -> f64);

const UNARY: [Unary; 11] = [
    ("sin", f64::sin),
    ("cos", f64::cos),
    ("tan", f64::tan),
    ("asin", f64::asin),
    ("acos", f64::acos),
    ("atan", f64::atan),
    ("exp", f64::exp),
    ("exp2", f64::exp2),
    ("log", f64::ln),
    ("log2", f64::log2),
    ("log10", f64::log10),
];

const BINARY: [Binary; 3] =
    [("atan2", f64::atan2), ("pow", f64::powf), ("fmod", |value, divisor| value % divisor)];

pub(super) fn link(linker: &mut Linker<State>) -> Result<()> {
    for (name, function) in UNARY {
        linker.func_wrap(ENV, name, function)?;
    }
    for (name, function) in BINARY {
        linker.func_wrap(ENV, name, function)?;
    }
    Ok(())
}
