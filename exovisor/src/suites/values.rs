//! Values of scripts as the engine has them, and what a script expects.

use wasmtime::{HeapType, Val};
use wast::core::{NanPattern, V128Pattern, WastArgCore, WastRetCore};
use wast::token::{F32, F64};

const F32_QUIET: u32 = 0x7fc0_0000;
const F64_QUIET: u64 = 0x7ff8_0000_0000_0000;

/// The value for an argument; `None` for those that only a garbage collector could hold.
pub(super) fn argument(argument: &WastArgCore<'_>) -> Option<Val> {
    use wast::core::{AbstractHeapType, HeapType as Heap};
    Some(match argument {
        WastArgCore::I32(value) => Val::I32(*value),
        WastArgCore::I64(value) => Val::I64(*value),
        WastArgCore::F32(value) => Val::F32(value.bits),
        WastArgCore::F64(value) => Val::F64(value.bits),
        WastArgCore::V128(value) => Val::V128(u128::from_le_bytes(value.to_le_bytes()).into()),
        WastArgCore::RefNull(Heap::Abstract { ty: AbstractHeapType::Func, .. }) => {
            Val::null_ref(&HeapType::Func)
        }
        _ => return None,
    })
}

/// Whether a result is one of those that are expected.
pub(super) fn matches(value: &Val, expected: &WastRetCore<'_>) -> bool {
    match (value, expected) {
        (value, WastRetCore::Either(cases)) => cases.iter().any(|case| matches(value, case)),
        (Val::I32(value), WastRetCore::I32(expected)) => value == expected,
        (Val::I64(value), WastRetCore::I64(expected)) => value == expected,
        (Val::F32(bits), WastRetCore::F32(pattern)) => is_f32(*bits, pattern),
        (Val::F64(bits), WastRetCore::F64(pattern)) => is_f64(*bits, pattern),
        (Val::V128(value), WastRetCore::V128(pattern)) => is_v128(value.as_u128(), pattern),
        (Val::FuncRef(function), WastRetCore::RefNull(_)) => function.is_none(),
        (Val::FuncRef(function), WastRetCore::RefFunc(None)) => function.is_some(),
        _ => false,
    }
}

fn is_f32(bits: u32, pattern: &NanPattern<F32>) -> bool {
    match pattern {
        NanPattern::CanonicalNan => bits & 0x7fff_ffff == F32_QUIET,
        NanPattern::ArithmeticNan => bits & F32_QUIET == F32_QUIET,
        NanPattern::Value(expected) => bits == expected.bits,
    }
}

fn is_f64(bits: u64, pattern: &NanPattern<F64>) -> bool {
    match pattern {
        NanPattern::CanonicalNan => bits & 0x7fff_ffff_ffff_ffff == F64_QUIET,
        NanPattern::ArithmeticNan => bits & F64_QUIET == F64_QUIET,
        NanPattern::Value(expected) => bits == expected.bits,
    }
}

fn is_v128(value: u128, pattern: &V128Pattern) -> bool {
    let lane = |index: usize, bits: usize| (value >> (index * bits)) as u64;
    match pattern {
        V128Pattern::I8x16(lanes) => all(lanes, |index, one| lane(index, 8) as i8 == *one),
        V128Pattern::I16x8(lanes) => all(lanes, |index, one| lane(index, 16) as i16 == *one),
        V128Pattern::I32x4(lanes) => all(lanes, |index, one| lane(index, 32) as i32 == *one),
        V128Pattern::I64x2(lanes) => all(lanes, |index, one| lane(index, 64) as i64 == *one),
        V128Pattern::F32x4(lanes) => all(lanes, |index, one| is_f32(lane(index, 32) as u32, one)),
        V128Pattern::F64x2(lanes) => all(lanes, |index, one| is_f64(lane(index, 64), one)),
    }
}

fn all<T>(lanes: &[T], is: impl Fn(usize, &T) -> bool) -> bool {
    lanes.iter().enumerate().all(|(index, one)| is(index, one))
}
