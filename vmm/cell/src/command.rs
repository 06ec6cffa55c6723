//! The command as a guest has it that may start isolates: a build without shared libraries,
//! whatever the image holds, in a file system of its own that all such cells share.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use exocell_images::pack_program;

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
    let stamp = [metadata.mtime(), metadata.mtime_nsec(), metadata.len() as i64];
    let stamp = stamp.map(|part| format!("{part:x}")).join("-");
    let folder = layout.root().join("commands");
    let path = folder.join(format!("{stamp}.erofs"));
    match File::open(&path) {
        Ok(packed) => Ok(packed),
        Err(_) => pack(&program, &folder, &path),
    }
}

fn pack(program: &Path, folder: &Path, path: &Path) -> Result<File, CellError> {
    let failed = || CellError::host(format!("cannot make {}", path.display()));
    fs::create_dir_all(folder).map_err(failed())?;
    let image = tempfile::NamedTempFile::new_in(folder).map_err(failed())?;
    let file = image.as_file().try_clone().map_err(failed())?;
    pack_program(program, NAME, file, folder)?;
    // Opened before it has its name: whoever is faster takes only the name away.
    let packed = File::open(image.path()).map_err(failed())?;
    for entry in fs::read_dir(folder).map_err(failed())?.flatten() {
        let older = entry.path();
        if older.extension().is_some_and(|extension| extension == "erofs") {
            // Someone else may have removed it.
            let _ = fs::remove_file(older);
        }
    }
    image.persist(path).map_err(|error| error.error).map_err(failed())?;
    Ok(packed)
}
