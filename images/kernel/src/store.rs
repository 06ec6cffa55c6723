//! The cache of finished kernels: one directory a recipe hash, put there in one rename.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::KernelError;
use crate::progress::{Progress, Step};
use crate::source::Origin;

/// The prefix of directories of builds under way.
const BUILDING: &str = ".build-";

/// What is known of a finished kernel, kept beside it as `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The recipe's hash, the name of the kernel's directory.
    pub hash: String,
    /// The release, as the guest's `uname -r` shows it.
    pub version: String,
    /// The executable's size in bytes.
    pub size_bytes: u64,
    /// What it was built from.
    pub origin: Origin,
    /// The first line of `gcc --version`.
    pub compiler: String,
}

/// A kernel in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The executable: the guest kernel of a `vm` cell.
    pub path: PathBuf,
    /// Its `.config`.
    pub config: PathBuf,
    /// The log of its build.
    pub log: PathBuf,
    /// What is known of it.
    pub manifest: Manifest,
}

/// Whether a recipe's kernel is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// It is, and can be used.
    Present(Kernel),
    /// It is not; `exocell kernel build` would make it at `path`.
    Absent { hash: String, path: PathBuf },
}

/// The cache below a state root.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    pub fn new(state_root: &Path) -> Self {
        Self { root: state_root.join("kernels") }
    }

    /// Looks in the cache, then among the kernels that a package installed beside this executable.
    pub fn status(&self, hash: &str) -> Result<Status, KernelError> {
        let folder = self.root.join(hash);
        let path = folder.join("linux");
        for folder in [Some(folder), packaged(hash)].into_iter().flatten() {
            if let Some(kernel) = read_kernel(&folder)? {
                return Ok(Status::Present(kernel));
            }
        }
        Ok(Status::Absent { hash: hash.to_owned(), path })
    }

    /// Waits until no other process builds; the lock ends with the returned file, or its process.
    pub fn lock(&self, progress: &mut dyn FnMut(Progress)) -> Result<File, KernelError> {
        fs::create_dir_all(&self.root).map_err(KernelError::io("create", &self.root))?;
        let path = self.root.join("lock");
        let file = File::create(&path).map_err(KernelError::io("create", &path))?;
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                progress(Progress { step: Step::Wait, fraction: None })
            }
            Err(TryLockError::Error(error)) => return Err(KernelError::io("lock", &path)(error)),
        }
        file.lock().map_err(KernelError::io("lock", &path))?;
        Ok(file)
    }

    /// A new directory for a build, after removing what killed builds left. Needs the lock.
    pub fn work_folder(&self) -> Result<tempfile::TempDir, KernelError> {
        let failed = || KernelError::io("clean", &self.root);
        for entry in fs::read_dir(&self.root).map_err(failed())? {
            let entry = entry.map_err(failed())?;
            if entry.file_name().to_string_lossy().starts_with(BUILDING) {
                fs::remove_dir_all(entry.path())
                    .map_err(KernelError::io("remove", &entry.path()))?;
            }
        }
        let folder = tempfile::Builder::new().prefix(BUILDING).tempdir_in(&self.root);
        folder.map_err(KernelError::io("create a directory in", &self.root))
    }

    /// Where the log of a failed build is kept.
    pub fn failed_log(&self) -> PathBuf {
        self.root.join("failed.log")
    }

    /// Moves a finished directory to its place in the cache. Needs the lock.
    pub fn install(&self, stage: &Path, manifest: &Manifest) -> Result<Kernel, KernelError> {
        let file = stage.join("manifest.json");
        let text = serde_json::to_vec_pretty(manifest).map_err(std::io::Error::from);
        text.and_then(|text| fs::write(&file, text)).map_err(KernelError::io("write", &file))?;
        sync_files(stage)?;
        let folder = self.root.join(&manifest.hash);
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(KernelError::io("remove", &folder))?;
        }
        fs::rename(stage, &folder).map_err(KernelError::io("create", &folder))?;
        Ok(kernel_in(&folder, manifest.clone()))
    }
}

/// Where a package has a recipe's kernel.
fn packaged(hash: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    Some(own.parent()?.join("kernels").join(hash))
}

/// Flushes the files of a directory, so that a crash after the rename leaves whole ones.
fn sync_files(folder: &Path) -> Result<(), KernelError> {
    let sync = || -> std::io::Result<()> {
        for entry in fs::read_dir(folder)? {
            File::open(entry?.path())?.sync_all()?;
        }
        Ok(())
    };
    sync().map_err(KernelError::io("flush", folder))
}

/// The kernel of a directory; none where it is missing, half there or damaged.
fn read_kernel(folder: &Path) -> Result<Option<Kernel>, KernelError> {
    let file = folder.join("manifest.json");
    let text = match fs::read(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(KernelError::io("read", &file)(error)),
    };
    let Ok(manifest) = serde_json::from_slice::<Manifest>(&text) else {
        return Ok(None);
    };
    let size = fs::metadata(folder.join("linux")).map(|meta| meta.len()).ok();
    Ok((size == Some(manifest.size_bytes)).then(|| kernel_in(folder, manifest)))
}

fn kernel_in(folder: &Path, manifest: Manifest) -> Kernel {
    let [path, config, log] = ["linux", "config", "build.log"].map(|name| folder.join(name));
    Kernel { path, config, log, manifest }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let origin =
            Origin { name: "x".into(), version: "1".into(), sha256: "00".into(), pinned: true };
        Manifest {
            hash: "abc".into(),
            version: "1-x".into(),
            size_bytes: 5,
            origin,
            compiler: "gcc".into(),
        }
    }

    fn installed(root: &Path) -> (Store, Kernel) {
        let store = Store::new(root);
        let _lock = store.lock(&mut |_| {}).expect("lock");
        let work = store.work_folder().expect("folder");
        let stage = work.path().join("stage");
        fs::create_dir(&stage).expect("create");
        fs::write(stage.join("linux"), "12345").expect("write");
        let kernel = store.install(&stage, &manifest()).expect("install");
        (store, kernel)
    }

    #[test]
    fn a_kernel_is_absent_then_present_and_leaves_no_build_folder() {
        let root = tempfile::tempdir().expect("temporary folder");
        let absent = Store::new(root.path()).status("abc").expect("status");
        assert!(matches!(absent, Status::Absent { .. }));
        let (store, kernel) = installed(root.path());
        assert_eq!(store.status("abc").expect("status"), Status::Present(kernel));
        let names = fs::read_dir(root.path().join("kernels")).expect("list").count();
        assert_eq!(names, 2, "the lock and the kernel");
    }

    #[test]
    fn a_truncated_kernel_or_a_broken_manifest_is_absent_and_can_be_replaced() {
        let root = tempfile::tempdir().expect("temporary folder");
        let (store, kernel) = installed(root.path());
        fs::write(&kernel.path, "123").expect("truncate");
        assert!(matches!(store.status("abc"), Ok(Status::Absent { .. })));
        let (store, kernel) = installed(root.path());
        assert!(matches!(store.status("abc"), Ok(Status::Present(_))));
        fs::write(kernel.path.with_file_name("manifest.json"), "{").expect("break");
        assert!(matches!(store.status("abc"), Ok(Status::Absent { .. })));
    }

    #[test]
    fn what_a_killed_build_left_is_removed_by_the_next() {
        let root = tempfile::tempdir().expect("temporary folder");
        let store = Store::new(root.path());
        let _lock = store.lock(&mut |_| {}).expect("lock");
        let left = store.work_folder().expect("folder").keep();
        assert!(left.exists());
        store.work_folder().expect("folder");
        assert!(!left.exists());
    }

    #[test]
    fn a_second_builder_waits_and_says_so() {
        let root = tempfile::tempdir().expect("temporary folder");
        let first = Store::new(root.path()).lock(&mut |_| {}).expect("lock");
        let (told, waits) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let mut tell = |progress: Progress| told.send(progress.step).expect("send");
                Store::new(root.path()).lock(&mut tell).expect("lock")
            });
            assert_eq!(waits.recv().expect("told"), Step::Wait);
            assert!(!second.is_finished());
            drop(first);
            second.join().expect("gets the lock");
        });
    }
}
