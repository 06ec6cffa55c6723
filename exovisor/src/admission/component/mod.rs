//! What is checked of a component before it is compiled.

mod scan;
mod types;

pub(crate) use scan::scan;

use crate::admission::AdmissionError;
use exocell_xgate::{CapabilitySet, Folder, Rights};

/// Refuses what was granted and is not for components, rather than leave it out.
///
/// # Errors
/// [`AdmissionError::NotForComponents`].
pub(crate) fn check(caps: &CapabilitySet) -> Result<(), AdmissionError> {
    let is_layer = |folder: &&Folder| folder.rights.contains(Rights::OVERLAY);
    match caps.folders().iter().find(is_layer) {
        Some(folder) => Err(AdmissionError::NotForComponents {
            capability: folder.name(),
            what: "a layer of its own over a folder",
        }),
        None => Ok(()),
    }
}
