//! The models of a grant as a guest has them that may start isolates: copies of what they are when
//! the cell starts.

use std::fs::File;

use exocell_exovisor::MODEL_BYTES_MAX;
use exocell_images::walk::Found;
use exocell_images::{Packed, pack, private};
use exocell_xgate::Model;

use crate::{CellError, Layout};

/// A file system with a copy of each, without a name; `None` where there are no models.
///
/// # Errors
/// [`CellError`] where a file is none or too large, or the host's disk is full.
pub fn prepare(layout: &Layout, models: &[Model]) -> Result<Option<File>, CellError> {
    if models.is_empty() {
        return Ok(None);
    }
    models.iter().try_for_each(check)?;
    let folder = layout.disks();
    let what = || format!("cannot copy models to {}", folder.display());
    private::folder(&folder).map_err(CellError::host(what()))?;
    let image = tempfile::tempfile_in(&folder).map_err(CellError::host(what()))?;
    let names: Vec<String> = models.iter().map(Model::file_name).collect();
    let copies = models.iter().zip(&names);
    let files: Vec<_> =
        copies.map(|(model, name)| Packed { path: &model.file, name, mode: 0o444 }).collect();
    pack(&files, image.try_clone().map_err(CellError::host(what()))?, &folder)?;
    Ok(Some(image))
}

/// Isolates would refuse it too, but later.
fn check(model: &Model) -> Result<(), CellError> {
    let Model { name, file } = model;
    let found = Found::real(file).map_err(CellError::host(format!(
        "cannot read {}, the file of the model {name}",
        file.display()
    )))?;
    let about = found.metadata();
    let fault = match about.len() {
        _ if !about.is_file() => "is no file".to_owned(),
        bytes if bytes > MODEL_BYTES_MAX as u64 => {
            format!("has {bytes} bytes; the most is {} MiB", MODEL_BYTES_MAX >> 20)
        }
        _ => return Ok(()),
    };
    Err(CellError::Usage(format!("{}, the file of the model {name}, {fault}", file.display())))
}
