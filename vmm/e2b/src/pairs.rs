//! Names and values that clients send: metadata, and variables of commands.

use std::collections::BTreeMap;

use crate::error::{Problem, Result};

/// Pairs of one kind, and bytes of all of them.
const PAIRS_MAX: usize = 256;
const PAIRS_BYTES_MAX: usize = 256 << 10;

/// Refuses what is too much, or no variable.
pub fn check_pairs(name: &str, pairs: Option<&BTreeMap<String, String>>) -> Result<()> {
    let Some(pairs) = pairs else { return Ok(()) };
    let bytes: usize = pairs.iter().map(|(name, value)| name.len() + value.len()).sum();
    if pairs.len() > PAIRS_MAX || bytes > PAIRS_BYTES_MAX {
        return Err(Problem::invalid(format!(
            "{name} has more than {PAIRS_MAX} entries or {PAIRS_BYTES_MAX} bytes"
        )));
    }
    let broken = |(key, value): (&String, &String)| {
        let is_variable = name != "metadata";
        is_variable && (key.is_empty() || key.contains(['=', '\0']) || value.contains('\0'))
    };
    match pairs.iter().any(broken) {
        true => Err(Problem::invalid(format!("{name} holds what is no name or value"))),
        false => Ok(()),
    }
}
