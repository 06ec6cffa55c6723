//! Folders and files that are their owner's alone, whatever the umask says.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use tempfile::NamedTempFile;

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

/// Puts a file of `bytes`, which is its owner's alone, in the place of `path`: whole, or not at all.
///
/// # Errors
/// As of open(2), write(2) and rename(2); what was there stays.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    beside(path, bytes)?.persist(path).map(drop).map_err(|failed| failed.error)
}

/// The same where nothing is yet.
///
/// # Errors
/// As of [`replace`], and [`io::ErrorKind::AlreadyExists`].
pub fn make(path: &Path, bytes: &[u8]) -> io::Result<()> {
    beside(path, bytes)?.persist_noclobber(path).map(drop).map_err(|failed| failed.error)
}

fn beside(path: &Path, bytes: &[u8]) -> io::Result<NamedTempFile> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let mut file = NamedTempFile::with_prefix_in(".new-", parent.unwrap_or(Path::new(".")))?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    Ok(file)
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
        make(&place.path().join("k"), b"one").unwrap();
        let again = make(&place.path().join("k"), b"two").unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(place.path().join("k")).unwrap(), b"one");
        replace(&place.path().join("k"), b"two").unwrap();
        assert_eq!(fs::read(place.path().join("k")).unwrap(), b"two");
        assert_eq!(mode(&place.path().join("k")), 0o600);
        // What does not come to its end leaves nothing.
        replace(&place.path().join("a"), b"x").unwrap_err();
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2);
        folder(&place.path().join("x/y")).unwrap();
        assert_eq!(mode(&place.path().join("x")), 0o700);
    }
}
