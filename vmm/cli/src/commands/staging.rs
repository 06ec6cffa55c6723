//! The folder in which `exocell cp` unpacks: beside what it is to become, so anywhere on the host.
//! A note under the state root says where, and is locked as long as the folder is used; whoever
//! finds one that is not locked removes both. Where a cell has that place, the folder is the
//! cell's too: it is used open, never by its path.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use exocell_cell::images::private;
use exocell_cell::images::walk::Directory;
use exocell_cell::{CellSpec, Layout};

/// How the folders' names begin.
const PREFIX: &str = ".exocell-cp-";
/// The lock of whoever makes or removes notes.
const LOCK: &str = ".lock";
/// The longest path in a note.
const PATH_BYTES_MAX: u64 = 4096;

/// An empty folder that is the operator's alone. Dropped, it is gone.
pub struct Staging {
    /// Where it lies, and under which name.
    base: Directory,
    name: OsString,
    directory: Directory,
    note: PathBuf,
    /// Locked.
    _held: File,
}

impl Staging {
    /// Makes one in `base`.
    pub fn new(layout: &Layout, base: &Directory) -> io::Result<Self> {
        let notes = layout.copies();
        private::folder(&notes)?;
        let _lock = lock(&notes)?;
        let id = CellSpec::new_id().map_err(io::Error::other)?;
        let name = OsString::from(format!("{PREFIX}{id}"));
        let (path, note) = (base.path()?.join(&name), notes.join(&id));
        let mut held = private::options().write(true).create_new(true).open(&note)?;
        held.lock()?;
        let made = held
            .write_all(path.as_os_str().as_bytes())
            .and_then(|()| base.make(&name, 0o700))
            .and_then(|made| Ok((made, base.enter("")?)));
        match made {
            Ok((directory, base)) => Ok(Self { base, name, directory, note, _held: held }),
            Err(error) => {
                // The first error is the one to tell.
                let _ = fs::remove_file(&note);
                Err(error)
            }
        }
    }

    pub fn directory(&self) -> &Directory {
        &self.directory
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // What is left is swept by the next command.
        if self.base.remove(&self.name).is_ok() {
            let _ = fs::remove_file(&self.note);
        }
    }
}

fn lock(notes: &Path) -> io::Result<File> {
    let file =
        private::options().create(true).truncate(false).write(true).open(notes.join(LOCK))?;
    file.lock()?;
    Ok(file)
}

/// Removes `folder`, unless a link has come between: then it is not where it was, and not ours.
fn remove(folder: &Path) -> io::Result<()> {
    use rustix::io::Errno;
    let (Some(base), Some(name)) = (folder.parent(), folder.file_name()) else { return Ok(()) };
    match Directory::real(base).and_then(|base| base.remove(name)) {
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(()),
            _ => Err(error),
        },
        Ok(()) => Ok(()),
    }
}

/// Removes the folders of commands that were killed. What cannot be removed now is left to the
/// next command.
pub fn sweep(layout: &Layout) {
    let notes = layout.copies();
    let Ok(entries) = fs::read_dir(&notes) else { return };
    let found: Vec<PathBuf> =
        entries.flatten().filter(|e| e.file_name() != LOCK).map(|entry| entry.path()).collect();
    if found.is_empty() {
        return;
    }
    let Ok(_lock) = lock(&notes) else { return };
    for note in found {
        // One that is gone, or used, is not for us.
        let _ = sweep_one(&note);
    }
}

fn sweep_one(note: &Path) -> io::Result<()> {
    let file = File::open(note)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(()),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let mut path = Vec::new();
    (&file).take(PATH_BYTES_MAX).read_to_end(&mut path)?;
    let path = PathBuf::from(std::ffi::OsString::from_vec(path));
    let is_ours =
        path.file_name().is_some_and(|name| name.as_bytes().starts_with(PREFIX.as_bytes()));
    if path.is_absolute() && is_ours {
        remove(&path)?;
    }
    fs::remove_file(note)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_stays_and_what_was_left_goes() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::new(place.path().join("root"));
        let base = Directory::at(place.path()).unwrap();
        let used = Staging::new(&layout, &base).unwrap();
        let left = place.path().join(format!("{PREFIX}left"));
        fs::create_dir_all(left.join("deep")).unwrap();
        let note = layout.copies().join("left");
        fs::write(&note, left.as_os_str().as_bytes()).unwrap();
        // A note that leads elsewhere removes nothing but itself.
        let (other, forged) = (place.path().join("other"), layout.copies().join("forged"));
        fs::create_dir(&other).unwrap();
        fs::write(&forged, other.as_os_str().as_bytes()).unwrap();
        sweep(&layout);
        assert!(!left.exists() && !note.exists() && !forged.exists());
        let path = place.path().join(&used.name);
        assert!(path.exists() && other.exists());
        drop(used);
        assert!(!path.exists());
        assert_eq!(fs::read_dir(layout.copies()).unwrap().count(), 1, "its lock");
    }

    #[test]
    fn a_folder_that_a_cell_swaps_for_a_link_leads_nowhere() {
        let place = tempfile::tempdir().unwrap();
        let (shared, host) = (place.path().join("shared"), place.path().join("host"));
        fs::create_dir(&shared).unwrap();
        fs::create_dir(&host).unwrap();
        fs::write(host.join("kept"), "kept").unwrap();
        let layout = Layout::new(place.path().join("root"));
        let base = Directory::at(&shared).unwrap();
        let staging = Staging::new(&layout, &base).unwrap();
        let (path, moved) = (shared.join(&staging.name), shared.join("moved"));
        fs::rename(&path, &moved).unwrap();
        std::os::unix::fs::symlink(&host, &path).unwrap();
        // It is the folder that was made, whatever has its name.
        assert!(staging.directory().names().unwrap().is_empty());
        drop(staging);
        assert!(!path.is_symlink() && host.join("kept").exists());
        // The same of one that was left, with the link further up.
        let left = host.join(format!("{PREFIX}left"));
        fs::create_dir(&left).unwrap();
        let note = layout.copies().join("left");
        std::os::unix::fs::symlink(&host, shared.join("up")).unwrap();
        fs::write(&note, shared.join("up").join(format!("{PREFIX}left")).as_os_str().as_bytes())
            .unwrap();
        sweep(&layout);
        assert!(left.exists() && !note.exists());
    }
}
