//! ONNX models, checked and bounded before they are run (tract).
//!
//! ```text
//! bytes ─> check: operators, constants, attributes ─> shapes of all values, without their data
//!       ─> bounds on memory and work ─> optimized ─> Model::run, which can be ended between operators
//! ```
//! A model is code of a kind: what it allocates and how long it runs follow from its shapes. So
//! only models whose shapes are all fixed are taken, and only operators that make nothing of
//! the data of another (`check.rs` lists them). No other file is ever read.

#![forbid(unsafe_code)]

mod check;
mod run;
mod sizes;

pub use run::{Ended, Model};

use std::fmt;
use tract_onnx::prelude::DatumType;

/// The largest model, in bytes.
pub const MODEL_BYTES_MAX: usize = 64 << 20;
/// What all values of one run may hold together, in bytes.
pub const VALUES_BYTES_MAX: u64 = 256 << 20;
/// Multiplications of one run.
pub const PRODUCTS_MAX: u64 = 20_000_000_000;

/// Why a model is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// It is no ONNX file, or a damaged one.
    #[error("this is not an ONNX model: {0}")]
    NotOnnx(String),
    /// It asks for something that is not offered.
    #[error("the model {0}")]
    Unsupported(String),
    /// It is larger than allowed.
    #[error("the model is too large: {what} {found}, the limit is {max}")]
    TooLarge {
        /// What was counted.
        what: &'static str,
        /// The count.
        found: u64,
        /// The limit.
        max: u64,
    },
    /// Its operators do not fit together.
    #[error("the model is not consistent: {0}")]
    Inconsistent(String),
}

/// Numbers that tensors are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// Byte.
    U8,
    /// 32-bit integer.
    I32,
    /// 64-bit integer.
    I64,
}

impl Element {
    const ALL: [(Self, DatumType); 5] = [
        (Self::F32, DatumType::F32),
        (Self::F64, DatumType::F64),
        (Self::U8, DatumType::U8),
        (Self::I32, DatumType::I32),
        (Self::I64, DatumType::I64),
    ];

    fn of(datum: DatumType) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == datum).map(|(element, _)| *element)
    }

    fn datum(self) -> DatumType {
        match self {
            Self::F32 => DatumType::F32,
            Self::F64 => DatumType::F64,
            Self::U8 => DatumType::U8,
            Self::I32 => DatumType::I32,
            Self::I64 => DatumType::I64,
        }
    }
}

/// What a tensor looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    /// Its dimensions.
    pub dims: Vec<usize>,
    /// Its numbers.
    pub element: Element,
}

impl Form {
    /// Bytes of such a tensor.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.dims.iter().product::<usize>() * self.element.datum().size_of()
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{:?}", self.element, self.dims)
    }
}
