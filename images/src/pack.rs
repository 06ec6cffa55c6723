//! A few files of the host as a file system: what a guest mounts to have them.

use std::fs::File;
use std::path::Path;

use crate::Digest;
use crate::erofs::DataArea;
use crate::error::{ImageError, Result};
use crate::limits::ImportLimits;
use crate::rootfs::RootfsBuilder;
use crate::tar::Extent;
use crate::tree::Meta;
use crate::walk::Found;

/// A file of the host, and what it is in the guest. No part of its path is a link.
#[derive(Debug, Clone, Copy)]
pub struct Packed<'a> {
    pub path: &'a Path,
    /// Its name in the root of the file system.
    pub name: &'a str,
    /// Its permissions.
    pub mode: u16,
}

/// Writes a file system with `files` to `image`, an empty file that is open for reading and
/// writing.
///
/// # Errors
/// [`ImageError`] where a file cannot be read or `folder`, where `image` lies, is full.
pub fn pack(files: &[Packed], image: File, folder: &Path) -> Result<()> {
    let spool = tempfile::tempfile_in(folder).map_err(|error| ImageError::store(folder, error))?;
    let limits = ImportLimits::default();
    let mut rootfs = RootfsBuilder::new(DataArea::new(image, spool, &limits), &limits, folder);
    rootfs.begin_layer();
    for Packed { path, name, mode } in files {
        let read = |error| ImageError::read(path, error);
        let mut content = Found::real(path).and_then(|found| found.file()).map_err(read)?;
        let bytes = content.metadata().map_err(read)?.len();
        let meta = Meta { mode: *mode, ..Meta::default() };
        rootfs.add_file(name.as_bytes(), meta, bytes, &[Extent::whole(bytes)], &mut content)?;
    }
    let names: Vec<_> = files.iter().map(|file| file.name).collect();
    rootfs.finish(&Digest::of(names.join("\n").as_bytes()))?;
    Ok(())
}
