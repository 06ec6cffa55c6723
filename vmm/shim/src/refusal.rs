//! What is refused, and what of a specification says nothing and is not.

use serde_json::{Map, Value};

use crate::error::ShimError;

type Object = Map<String, Value>;

/// Refuses `what`, with the way out.
pub fn refused(what: impl std::fmt::Display, remedy: &str) -> ShimError {
    ShimError::invalid(format!("{what} is not carried out in a cell: {remedy}"))
}

/// Whether a value says nothing.
pub fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
    }
}

/// Takes `name` away; what it says, if it says anything.
pub fn said(from: &mut Object, name: &str) -> Option<Value> {
    from.remove(name).filter(|value| !is_empty(value))
}
