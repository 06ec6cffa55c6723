//! Folders that a run fills below the cache. Each is locked for as long as it is in
//! use, so what a killed run left is known by its free lock, and the next run sweeps it.

use std::fs::{self, File};
use std::path::Path;

use tempfile::TempDir;

use crate::BenchError;

const PREFIX: &str = "work-";

/// A folder of this run's own, removed with its owner unless it was renamed.
pub struct Scratch {
    folder: TempDir,
    _lock: File,
}

impl Scratch {
    /// Makes `cache` where it is not there yet.
    pub fn new(cache: &Path) -> Result<Self, BenchError> {
        let failed = || BenchError::host(cache.display());
        fs::create_dir_all(cache).map_err(failed())?;
        // Nobody sweeps between the making of a folder and its lock.
        let all = File::open(cache).map_err(failed())?;
        all.lock().map_err(failed())?;
        sweep(cache);
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(cache).map_err(failed())?;
        let lock = File::open(folder.path()).map_err(failed())?;
        lock.lock().map_err(failed())?;
        Ok(Self { folder, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Removes folders that nobody uses; what cannot be removed now can be later.
fn sweep(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let Ok(lock) = File::open(entry.path()) else { continue };
        if ours && lock.try_lock().is_ok() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_left_is_swept_and_nothing_else() {
        let cache = tempfile::tempdir().unwrap();
        let left = cache.path().join("work-left");
        fs::create_dir_all(left.join("cells")).unwrap();
        fs::create_dir(cache.path().join("files-1")).unwrap();
        let first = Scratch::new(cache.path()).unwrap();
        let second = Scratch::new(cache.path()).unwrap();
        assert!(!left.exists() && first.path().exists() && second.path().exists());
        drop((first, second));
        let names: Vec<_> = fs::read_dir(cache.path()).unwrap().flatten().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }
}
