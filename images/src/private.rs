//! Folders and files that are their owner's alone, whatever the umask says.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// What nobody else may have of a folder or a file.
const OTHERS: u32 = 0o077;

/// Makes the folder at `path`, and those above it that are missing, for their owner alone. One
/// that is there is closed to others.
///
/// # Errors
/// It can't be made, or is somebody else's and open to others.
pub fn folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let mode = fs::metadata(path)?.mode();
    match mode & OTHERS {
        0 => Ok(()),
        _ => fs::set_permissions(path, Permissions::from_mode(mode & 0o7777 & !OTHERS)),
    }
}

/// How to open a file so that a new one is its owner's alone.
#[must_use]
pub fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// Makes an empty file at `path`, for its owner alone if it is new.
///
/// # Errors
/// As of [`File::create`].
pub fn create(path: impl AsRef<Path>) -> io::Result<File> {
    options().create(true).truncate(true).write(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_its_owners_and_a_folder_is_closed() {
        let place = tempfile::tempdir().unwrap();
        let (dir, file) = (place.path().join("a/b"), place.path().join("a/b/c"));
        fs::create_dir_all(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        folder(&dir).unwrap();
        create(&file).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&file)), (0o700, 0o600));
        folder(&place.path().join("x/y")).unwrap();
        assert_eq!(mode(&place.path().join("x")), 0o700);
    }
}
