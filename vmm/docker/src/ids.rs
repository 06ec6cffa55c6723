//! Ids as Docker has them.

use exocell_cell::CellSpec;

use crate::error::ApiResult;

/// 256 random bits in hexadecimal.
pub fn new_id() -> ApiResult<String> {
    Ok(CellSpec::new_id()? + &CellSpec::new_id()?)
}
