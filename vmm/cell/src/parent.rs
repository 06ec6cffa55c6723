//! The `vm` cell that this process runs in, if it does: what isolates in it may have.
//!
//! The guest's init leaves a table (`images/init/src/isolates.rs`). It only takes rights away,
//! and an isolate's jail is the same in a cell as on a host, so whoever forges the table on a
//! host takes rights from himself. Whoever can remove it in a cell, its root, has no more than
//! the cell either, whose limits are enforced from outside.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use exocell_agent::{ISOLATES_PLACES, ISOLATES_TABLE};
use exocell_xgate::CapabilitySet;

use crate::CellError;

/// The cell around this process.
#[derive(Debug, Clone, PartialEq)]
pub struct Parent {
    /// The most that an isolate may have.
    pub most: CapabilitySet,
}

impl Parent {
    /// Where its table lies.
    pub const TABLE: &str = ISOLATES_TABLE;

    /// The cell around this process; `None` on a host.
    ///
    /// # Errors
    /// A table that is there and cannot be read: less is not taken for all.
    pub fn find() -> Result<Option<Self>, CellError> {
        let unreadable = || format!("cannot read the table of this cell, {ISOLATES_TABLE}");
        if !fs::exists(ISOLATES_TABLE).map_err(CellError::host(unreadable()))? {
            return Ok(None);
        }
        let text = fs::read_to_string(ISOLATES_TABLE).map_err(CellError::host(unreadable()))?;
        Ok(Some(Self { most: CapabilitySet::parse(&text, Path::new("/"))? }))
    }

    /// Fails in a cell, where there is no further one.
    pub fn refuse_cells() -> Result<(), CellError> {
        match Self::find()? {
            None => Ok(()),
            Some(_) => Err(CellError::Usage(
                "this is a vm cell, which starts isolates alone; give a Wasm module (--strength \
                 isolate), or start the other cell on the host"
                    .to_owned(),
            )),
        }
    }
}

/// One of the isolates that may run at once in a cell, as long as it is open somewhere.
#[derive(Debug)]
pub(crate) struct Place {
    _locked: File,
}

impl Place {
    /// Takes a place that is free; `None` on a host, where they are not counted.
    pub fn take() -> Result<Option<Self>, CellError> {
        let failed = || CellError::host(format!("cannot take a place in {ISOLATES_PLACES}"));
        let Ok(places) = fs::read_dir(ISOLATES_PLACES) else { return Ok(None) };
        let mut count = 0;
        for place in places {
            let file = File::open(place.map_err(failed())?.path()).map_err(failed())?;
            match file.try_lock() {
                Ok(()) => return Ok(Some(Self { _locked: file })),
                Err(TryLockError::WouldBlock) => count += 1,
                Err(TryLockError::Error(error)) => return Err(failed()(error)),
            }
        }
        Err(CellError::Usage(format!(
            "as many isolates as this cell may run at once run already ({count}, spawn.max); wait \
             for one to end, or grant the cell more when it starts (--cap spawn=N)"
        )))
    }
}
