//! What builds keep for the next, below `ROOT/builds`:
//!
//! ```text
//! lock            flock shared by each build; who has it alone sweeps
//! cache/HEX.json  what came of a step, by the digest of all that it depends on
//! layers/HEX      a layer, by the digest of its tar stream
//! caches/HEX      a directory of `RUN --mount=type=cache`
//! work/*          of one build: disks of its cells, files that they are shown
//! ```
//! A build that is killed leaves files in `work`; its cell ends with it. The next build that is
//! alone removes what is left.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use exocell_cell::images::compose::Layer;
use exocell_cell::images::{Digest, Store, private, walk};
use exocell_cell::{CellError, Layout, Record, end};
use serde::{Deserialize, Serialize};
use tempfile::{NamedTempFile, TempDir};

/// The label by which people find the cells of builds.
pub const LABEL: &str = "exocell.build";
/// What layers may take all together before those are removed that were not used for longest.
const LAYER_BYTES_MAX: u64 = 20 << 30;
/// Steps that are remembered.
const ENTRIES_MAX: usize = 10_000;
/// The longest note of a step.
const ENTRY_BYTES_MAX: u64 = 64 << 10;
const VERSION: u32 = 1;

/// What came of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    version: u32,
    /// The image that the stage began with; none for `scratch`.
    pub base: Option<Digest>,
    /// When it was done, as the image says (RFC 3339).
    pub created: String,
    pub layer: Option<Layer>,
}

impl Entry {
    pub fn new(base: Option<Digest>, created: String, layer: Option<Layer>) -> Self {
        Self { version: VERSION, base, created, layer }
    }
}

/// The folder, held by one build.
#[derive(Debug)]
pub struct Keep {
    root: PathBuf,
    _lock: File,
    work: TempDir,
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> CellError {
    CellError::host(format!("cannot write {}", path.display()))
}

impl Keep {
    /// Holds the folder for a build. What killed ones left is removed if no other runs.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn open(layout: &Layout) -> Result<Self, CellError> {
        let root = layout.builds();
        for folder in ["", "cache", "layers", "caches", "work"] {
            let folder = root.join(folder);
            private::folder(&folder).map_err(failed(&folder))?;
        }
        let path = root.join("lock");
        let lock = private::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(failed(&path))?;
        if lock.try_lock().is_ok() {
            sweep(layout, &root)?;
        }
        lock.lock_shared().map_err(failed(&path))?;
        let work = tempfile::Builder::new().prefix("build-").tempdir_in(root.join("work"));
        let work = work.map_err(failed(&root))?;
        Ok(Self { root, _lock: lock, work })
    }

    /// A folder that goes with the build.
    pub fn work(&self) -> &Path {
        self.work.path()
    }

    /// A directory that later builds find again by `id`.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn cache_folder(&self, id: &str) -> Result<PathBuf, CellError> {
        let path = self.root.join("caches").join(Digest::of(id.as_bytes()).hex());
        private::folder(&path).map_err(failed(&path))?;
        Ok(path)
    }

    fn entry_path(&self, key: Digest) -> PathBuf {
        self.root.join("cache").join(format!("{}.json", key.hex()))
    }

    /// What came of the step with this key, and its layer, if both are there.
    pub fn find(&self, key: Digest) -> Option<(Entry, Option<File>)> {
        let path = self.entry_path(key);
        let entry = read(&path)?;
        let layer = match &entry.layer {
            None => None,
            Some(layer) => {
                let file = File::open(layer_path(&self.root, layer)).ok()?;
                if file.metadata().ok()?.len() != layer.blob_bytes {
                    return None;
                }
                // When it was used last; one that is not noted goes sooner.
                let _ = file.set_modified(SystemTime::now());
                Some(file)
            }
        };
        let _ =
            File::options().append(true).open(&path).map(|it| it.set_modified(SystemTime::now()));
        Some((entry, layer))
    }

    /// Remembers what came of a step.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn note(&self, key: Digest, entry: &Entry) -> Result<(), CellError> {
        let path = self.entry_path(key);
        let text = serde_json::to_vec(entry).map_err(|error| failed(&path)(error.into()))?;
        let mut file = NamedTempFile::new_in(self.work()).map_err(failed(&path))?;
        file.write_all(&text).map_err(failed(&path))?;
        file.persist(&path).map_err(|error| failed(&path)(error.error)).map(drop)
    }

    /// An empty file for a layer.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn draft(&self) -> Result<NamedTempFile, CellError> {
        NamedTempFile::new_in(self.work()).map_err(failed(self.work()))
    }

    /// Keeps the layer in `draft` under its name; open for reading.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn settle(&self, draft: NamedTempFile, layer: &Layer) -> Result<File, CellError> {
        let path = layer_path(&self.root, layer);
        let file = draft.persist(&path).map_err(|error| failed(&path)(error.error))?;
        let bytes = file.metadata().map_err(failed(&path))?.len();
        match bytes == layer.blob_bytes {
            true => Ok(file),
            false => Err(CellError::Usage("a layer is not as long as was said of it".to_owned())),
        }
    }
}

fn layer_path(root: &Path, layer: &Layer) -> PathBuf {
    root.join("layers").join(layer.blob.hex())
}

fn read(path: &Path) -> Option<Entry> {
    let is_short = fs::symlink_metadata(path).is_ok_and(|found| found.len() <= ENTRY_BYTES_MAX);
    let text = is_short.then(|| fs::read(path).ok()).flatten()?;
    serde_json::from_slice(&text).ok().filter(|entry: &Entry| entry.version == VERSION)
}

/// Removes all that no build and no image wants any more. No build runs.
fn sweep(layout: &Layout, root: &Path) -> Result<(), CellError> {
    for (record, spec, status) in Record::all(layout)? {
        // Others have tied cells as well.
        if spec.tied && spec.labels.contains_key(LABEL) {
            end::remove(layout, &record, &status, true)?;
        }
    }
    for left in files(&root.join("work")) {
        let _ = fs::remove_dir_all(&left).or_else(|_| fs::remove_file(&left));
    }
    sweep_cache(root, &Store::open(layout.images())?.ids()?.into_iter().collect());
    Ok(())
}

/// Steps of images that are gone go, and what is not used where there is too much. A file that
/// cannot be removed is tried again by the next build.
fn sweep_cache(root: &Path, images: &BTreeSet<Digest>) {
    let mut kept: BTreeMap<(SystemTime, PathBuf), Entry> = BTreeMap::new();
    for path in files(&root.join("cache")) {
        let used = fs::metadata(&path).and_then(|found| found.modified());
        match (read(&path), used) {
            (Some(entry), Ok(used)) if entry.base.is_none_or(|base| images.contains(&base)) => {
                kept.insert((used, path), entry);
            }
            _ => drop(fs::remove_file(&path)),
        }
    }
    let mut layers = BTreeSet::new();
    let mut bytes = 0u64;
    // Those that were used last stay.
    for (count, ((_, path), entry)) in kept.iter().rev().enumerate() {
        let own = entry.layer.as_ref().map_or(0, |layer| layer.blob_bytes);
        bytes = bytes.saturating_add(own);
        if count >= ENTRIES_MAX || bytes > LAYER_BYTES_MAX {
            let _ = fs::remove_file(path);
        } else if let Some(layer) = &entry.layer {
            layers.insert(layer_path(root, layer));
        }
    }
    for path in files(&root.join("layers")).filter(|path| !layers.contains(path)) {
        let _ = fs::remove_file(path);
    }
}

fn files(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Something that builds keep for the next.
#[derive(Debug)]
pub struct Kept {
    pub id: String,
    /// As docker calls it: `regular` for a layer, `exec.cachemount`.
    pub kind: &'static str,
    pub bytes: u64,
    /// When it was used last.
    pub used: SystemTime,
}

/// All that builds keep for the next.
pub fn kept(layout: &Layout) -> Vec<Kept> {
    let root = layout.builds();
    let kinds = [("layers", "regular"), ("caches", "exec.cachemount")];
    let paths = kinds.into_iter().flat_map(|(folder, kind)| {
        let all: Vec<PathBuf> = files(&root.join(folder)).collect();
        all.into_iter().map(move |path| (path, kind))
    });
    let all = paths.filter_map(|(path, kind)| {
        let found = fs::symlink_metadata(&path).ok()?;
        let id = path.file_name()?.to_string_lossy().into_owned();
        let bytes = if found.is_dir() { walk::bytes(&path) } else { found.len() };
        Some(Kept { id, kind, bytes, used: found.modified().ok()? })
    });
    all.collect()
}

/// Removes what builds keep for the next: bytes that were freed. Nothing where a build runs.
///
/// # Errors
/// The folder cannot be read.
pub fn prune(layout: &Layout) -> Result<u64, CellError> {
    let root = layout.builds();
    let Ok(lock) = File::options().write(true).open(root.join("lock")) else { return Ok(0) };
    if lock.try_lock().is_err() {
        return Err(CellError::Usage(
            "a build is running; its cache is removed when that has ended".to_owned(),
        ));
    }
    sweep(layout, &root)?;
    let mut freed = 0;
    for folder in ["cache", "layers"] {
        for path in files(&root.join(folder)) {
            let bytes = fs::metadata(&path).map_or(0, |found| found.len());
            if fs::remove_file(&path).is_ok() {
                freed += bytes;
            }
        }
    }
    for path in files(&root.join("caches")) {
        let _ = fs::remove_dir_all(path);
    }
    Ok(freed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(place: &Path, content: &[u8]) -> Layer {
        let digest = Digest::of(content);
        let blob_bytes = content.len() as u64;
        let layer = Layer { diff_id: digest, bytes: blob_bytes, blob: digest, blob_bytes };
        fs::write(layer_path(place, &layer), content).unwrap();
        layer
    }

    #[test]
    fn steps_go_with_their_images_and_layers_with_their_steps() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::new(place.path());
        let keep = Keep::open(&layout).unwrap();
        let root = layout.builds();
        let [here, gone] = [Digest::of(b"here"), Digest::of(b"gone")];
        let note = |name: &[u8], base, layer| {
            keep.note(Digest::of(name), &Entry::new(base, "now".to_owned(), layer)).unwrap();
        };
        note(b"a", Some(here), Some(layer(&root, b"one")));
        note(b"b", Some(gone), Some(layer(&root, b"two")));
        note(b"c", None, None);
        layer(&root, b"nobody's");
        assert!(keep.find(Digest::of(b"b")).is_some());
        sweep_cache(&root, &BTreeSet::from([here]));
        let (entry, file) = keep.find(Digest::of(b"a")).unwrap();
        assert!(entry.layer.is_some() && file.is_some());
        assert!(keep.find(Digest::of(b"b")).is_none());
        assert!(keep.find(Digest::of(b"c")).is_some());
        assert_eq!(files(&root.join("layers")).count(), 1);
        // One that lost its layer, or a part of it, is done again.
        fs::write(layer_path(&root, &entry.layer.unwrap()), b"x").unwrap();
        assert!(keep.find(Digest::of(b"a")).is_none());
    }

    #[test]
    fn what_a_killed_build_left_goes_with_the_next() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::new(place.path());
        let first = Keep::open(&layout).unwrap();
        let left = layout.builds().join("work/left");
        fs::create_dir(&left).unwrap();
        let second = Keep::open(&layout).unwrap();
        assert!(left.exists(), "another build runs");
        drop((first, second));
        assert!(prune(&layout).is_ok());
        assert!(!left.exists());
        let third = Keep::open(&layout).unwrap();
        assert!(prune(&layout).is_err() && third.work().exists());
    }
}
