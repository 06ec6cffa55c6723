//! The command as a guest has it that may start isolates: a build without shared libraries,
//! whatever the image holds, in a file system of its own that all such cells share.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use exocell_images::{Packed, pack, private};

use crate::{CellError, Layout};

/// The build for guests, beside the running one.
const PROGRAM: &str = "exocell-static";
/// What it is called in the guest.
const NAME: &str = "exocell";

/// The file system with the installed build, made on first use. An older one ends with the
/// last cell that has it.
pub fn prepare(layout: &Layout) -> Result<File, CellError> {
    let own = std::env::current_exe().map_err(CellError::host("cannot find this program"))?;
    let program = own.with_file_name(PROGRAM);
    let metadata = fs::metadata(&program).map_err(|_| {
        CellError::Usage(format!(
            "the command for guests, {}, is missing; run make build, or leave out spawn",
            program.display()
        ))
    })?;
    let program = program.canonicalize().map_err(CellError::host("cannot find this program"))?;
    let stamp = [metadata.mtime(), metadata.mtime_nsec(), metadata.len() as i64];
    let stamp = stamp.map(|part| format!("{part:x}")).join("-");
    let folder = layout.root().join("commands");
    let path = folder.join(format!("{stamp}.erofs"));
    let failed = || CellError::host(format!("cannot make {}", path.display()));
    if let Ok(packed) = File::open(&path) {
        return Ok(packed);
    }
    private::folder(&folder).map_err(failed())?;
    // Who packs has the folder locked; it is free again when this is dropped.
    let lock = File::open(&folder).map_err(failed())?;
    lock.lock().map_err(failed())?;
    if !path.exists() {
        sweep(&folder).map_err(failed())?;
        let image = tempfile::NamedTempFile::new_in(&folder).map_err(failed())?;
        let file = image.as_file().try_clone().map_err(failed())?;
        pack(&[Packed { path: &program, name: NAME, mode: 0o755 }], file, &folder)?;
        image.persist(&path).map_err(|error| error.error).map_err(failed())?;
    }
    File::open(&path).map_err(failed())
}

/// Removes older file systems, and what a kill left.
fn sweep(folder: &Path) -> std::io::Result<()> {
    fs::read_dir(folder)?.try_for_each(|entry| fs::remove_file(entry?.path()))
}
