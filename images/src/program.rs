//! One program as a file system: what a guest mounts to have it.

use std::fs::File;
use std::path::Path;

use crate::Digest;
use crate::erofs::DataArea;
use crate::error::{ImageError, Result};
use crate::limits::ImportLimits;
use crate::rootfs::RootfsBuilder;
use crate::tar::Extent;
use crate::tree::Meta;

/// Writes a file system to `image`, an empty file that is open for reading and writing: the
/// program at `path`, as `/name`, which everyone may execute.
///
/// # Errors
/// [`ImageError`] where the program cannot be read or `folder`, where `image` lies, is full.
pub fn pack_program(path: &Path, name: &str, image: File, folder: &Path) -> Result<()> {
    let read = |error| ImageError::read(path, error);
    let mut program = File::open(path).map_err(read)?;
    let bytes = program.metadata().map_err(read)?.len();
    let spool = tempfile::tempfile_in(folder).map_err(|error| ImageError::store(folder, error))?;
    let limits = ImportLimits::default();
    let mut rootfs = RootfsBuilder::new(DataArea::new(image, spool), &limits, folder);
    rootfs.begin_layer();
    let meta = Meta { mode: 0o755, ..Meta::default() };
    rootfs.add_file(name.as_bytes(), meta, bytes, &[Extent::whole(bytes)], &mut program)?;
    rootfs.finish(&Digest::of(name.as_bytes()))?;
    Ok(())
}
