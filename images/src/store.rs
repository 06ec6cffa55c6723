//! The image store: the files of images, shared by all cells, and by images that are made of others.
//!
//! ```text
//! ROOT/index.json               images by id, names; replaced by rename
//! ROOT/blobs/sha256/HEX.config  how the image is run
//! ROOT/blobs/sha256/HEX.json    its configuration document, as it came
//! ROOT/lock                     flock of whoever changes the store
//! ROOT/blobs/sha256/HEX.erofs   an image, or what it has over files of others; flock shared by
//!                               each cell that uses the image
//! ROOT/blobs/sha256/HEX.layer   what that was as a layer, see `layers`
//! ROOT/tmp/*                    flock exclusive by the import that writes it
//! ```
//!
//! A file goes when no image has it any more; the index says which have it. Who uses an image holds
//! the lock of the file that is its own: the index keeps the others for it.
//!
//! An image is in the store when index.json names it. A process that dies
//! leaves at most a file in `tmp` or a blob that index.json does not name; its
//! locks are gone with it, so the next [`Store::open`] removes both.

mod import;
mod index;
mod layers;
mod saved;

pub use import::Draft;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::Digest;
use crate::config::ImageConfig;
use crate::erofs::Rootfs;
use crate::error::{ImageError, Result};
use crate::private;
use crate::reference::Reference;
use index::{Index, StoredImage};

/// Fewest hex digits that stand for an id.
const PREFIX_DIGITS_MIN: usize = 3;
/// So many are an id sooner than a name: as many as tables show.
const SHORT_DIGITS: usize = 12;

/// An image in the store.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ImageRecord {
    /// Digest of the image's configuration.
    pub id: Digest,
    pub tags: Vec<String>,
    /// Digest of the manifest it was imported by, if it had one.
    pub manifest: Option<Digest>,
    /// When the image was made, as it says (RFC 3339).
    pub created: Option<String>,
    /// When it was imported: seconds since 1970.
    pub imported: u64,
    /// What its files take on the host's disk.
    pub size_bytes: u64,
    /// How much of that are files that other images have, too.
    pub shared_bytes: u64,
    pub architecture: String,
    pub config: ImageConfig,
    /// Its own erofs file.
    pub erofs: PathBuf,
    /// The files that its own is over, the lowest first.
    pub below: Vec<PathBuf>,
}

impl ImageRecord {
    /// What its removal would free.
    #[must_use]
    pub fn own_bytes(&self) -> u64 {
        self.size_bytes - self.shared_bytes
    }
}

/// A store of images. Several processes may use one at the same time.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// Opens the store at `root`, makes it if it is not there, and removes
    /// what dead imports left.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        let store = Self { root: root.into() };
        // The root itself may be a link to another store's.
        for folder in [store.root.clone(), store.blobs(), store.temporary()] {
            private::folder(&folder).map_err(|error| ImageError::store(&folder, error))?;
        }
        let _lock = store.lock()?;
        store.begin_index()?;
        let mut index = store.read_index()?;
        store.forget_passed(&mut index)?;
        store.sweep(&index)?;
        store.split_index(&mut index)?;
        Ok(store)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All images, newest import first, but for those that are damaged: who asks for one is told.
    pub fn list(&self) -> Result<Vec<ImageRecord>> {
        let index = self.read_index()?;
        let lasting = index.images.iter().filter(|(_, image)| !image.passing);
        let users = index.users();
        let records = lasting.map(|(id, image)| {
            let config = self.config(*id, image)?;
            Ok(config.map(|config| self.record_with(*id, image, &index, &users, config)))
        });
        let records = records.filter(|record| !matches!(record, Err(ImageError::Damaged { .. })));
        let mut records: Vec<_> = records.filter_map(Result::transpose).collect::<Result<_>>()?;
        records.sort_by_key(|record| (std::cmp::Reverse(record.imported), record.id));
        Ok(records)
    }

    /// The image with a name, an id (with or without `sha256:`) or the
    /// beginning of one.
    pub fn resolve(&self, name: &str) -> Result<ImageRecord> {
        let index = self.read_index()?;
        let id = find(&index, name)?.id;
        let found = index.images.get(&id).map(|image| self.record(id, image, &index));
        found.transpose()?.flatten().ok_or_else(|| ImageError::NotFound { name: name.into() })
    }

    /// The image's configuration document, byte for byte.
    pub fn inspect(&self, name: &str) -> Result<String> {
        let index = self.read_index()?;
        let id = find(&index, name)?.id;
        let found = index.images.get(&id).map(|image| self.document(id, image));
        found.transpose()?.flatten().ok_or_else(|| ImageError::NotFound { name: name.into() })
    }

    /// Opens the file system of an image for a cell. The image cannot be
    /// removed while the returned files, or duplicates of them, are open.
    pub fn open_rootfs(&self, record: &ImageRecord) -> Result<Rootfs> {
        let _lock = self.lock()?;
        let index = self.read_index()?;
        let missing = || ImageError::NotFound { name: record.id.to_string() };
        let image = index.images.get(&record.id).ok_or_else(missing)?;
        self.open_files(record.id, image)
    }

    /// The store is locked.
    fn open_files(&self, id: Digest, image: &StoredImage) -> Result<Rootfs> {
        let open = |name: &String| {
            let path = self.blobs().join(name);
            let opened = File::open(&path);
            opened.map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => ImageError::NotFound { name: id.to_string() },
                _ => ImageError::read(&path, error),
            })
        };
        let names: Vec<String> = image.files(id).map(|(name, _)| name).collect();
        let files = names.iter().map(open).collect::<Result<Vec<_>>>()?;
        let mut rootfs = Rootfs::of(files)?;
        if let Some(own) = rootfs.own() {
            own.lock_shared().map_err(|error| ImageError::read(&self.root, error))?;
        }
        rootfs.names = names;
        Ok(rootfs)
    }

    /// What all images that are listed take on the disk, what they share counted once.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn listed_bytes(&self) -> Result<u64> {
        let index = self.read_index()?;
        let lasting = index.images.iter().filter(|(_, image)| !image.passing);
        let files: BTreeMap<_, _> = lasting.flat_map(|(id, image)| image.files(*id)).collect();
        Ok(files.into_values().sum())
    }

    /// Gives an image one more name.
    pub fn tag(&self, name: &str, tag: &Reference) -> Result<()> {
        let _lock = self.lock()?;
        let mut index = self.read_index()?;
        let id = find(&index, name)?.id;
        self.keep_passing(&mut index, id)?;
        index.tags.insert(tag.to_string(), id);
        self.write_index(&mut index)
    }

    /// Removes a name, and the image with its last name. An id removes the
    /// image, which then must not have several names unless `force`. Returns
    /// the id if the image itself is gone.
    pub fn remove(&self, name: &str, force: bool) -> Result<Option<Digest>> {
        let _lock = self.lock()?;
        let mut index = self.read_index()?;
        let Found { id, tag: own } = find(&index, name)?;
        let tags = index.tags_of(id);
        if own.is_none() && tags.len() > 1 && !force {
            return Err(ImageError::SeveralTags { id, tags: tags.join(", ") });
        }
        if let Some(own) = own.filter(|_| tags.len() > 1) {
            index.tags.remove(&own);
            self.write_index(&mut index)?;
            return Ok(None);
        }
        self.remove_image(&mut index, id)?;
        Ok(Some(id))
    }

    /// Removes the images that have no name and are not in use.
    pub fn prune(&self) -> Result<Vec<ImageRecord>> {
        let _lock = self.lock()?;
        let mut index = self.read_index()?;
        let lasting: Vec<_> =
            index.images.iter().filter(|(_, image)| !image.passing).map(|(id, _)| *id).collect();
        let nameless: Vec<_> =
            lasting.into_iter().filter(|id| index.tags_of(*id).is_empty()).collect();
        let mut removed = Vec::new();
        for id in nameless {
            let Some(image) = index.images.get(&id) else { continue };
            let config = self.config(id, image)?.unwrap_or_default();
            let record = self.record_with(id, image, &index, &index.users(), config);
            match self.remove_image(&mut index, id) {
                Ok(()) => removed.push(record),
                Err(ImageError::InUse { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(removed)
    }

    /// The index forgets the image first: a kill in between leaves a blob for the next sweep. A
    /// full disk has no room for another index before the image is gone; who finds one then that
    /// names it finds no files of it.
    fn remove_image(&self, index: &mut Index, id: Digest) -> Result<()> {
        let own = index.images.get(&id).map_or_else(|| index::file_of(id), |own| own.own_file(id));
        let path = self.blobs().join(own);
        let unused = is_unused(&path).map_err(|error| ImageError::read(&path, error))?;
        if !unused {
            return Err(ImageError::InUse { id });
        }
        let removed = index.images.remove(&id);
        index.tags.retain(|_, tagged| *tagged != id);
        let known = self.known(index);
        let mut gone =
            vec![path, self.config_file(id), self.document_file(id), self.saved_file(id)];
        let files = removed.iter().flat_map(|image| image.files(id));
        for path in files.map(|(name, _)| self.blobs().join(name)) {
            gone.extend([layer_file(&path), path]);
        }
        gone.retain(|path| !known.contains(path));
        let remove = || gone.iter().try_for_each(|path| remove_unused(path));
        match self.write_index(index) {
            Err(ImageError::StoreFull { .. }) => {
                remove()?;
                self.write_index(index)
            }
            other => other.and_then(|()| remove()),
        }
    }

    /// The files of all images that the index names.
    fn known(&self, index: &Index) -> BTreeSet<PathBuf> {
        let mut known = BTreeSet::new();
        for (id, image) in &index.images {
            known.extend([self.config_file(*id), self.document_file(*id), self.saved_file(*id)]);
            for path in image.files(*id).map(|(name, _)| self.blobs().join(name)) {
                known.extend([layer_file(&path), path]);
            }
        }
        known
    }

    /// `None` where the image's files are gone.
    fn record(
        &self,
        id: Digest,
        image: &StoredImage,
        index: &Index,
    ) -> Result<Option<ImageRecord>> {
        let config = self.config(id, image)?;
        Ok(config.map(|config| self.record_with(id, image, index, &index.users(), config)))
    }

    fn record_with(
        &self,
        id: Digest,
        image: &StoredImage,
        index: &Index,
        users: &HashMap<String, usize>,
        config: ImageConfig,
    ) -> ImageRecord {
        let is_shared = |name: &String| users.get(name).is_some_and(|count| *count > 1);
        let shared = image.files(id).filter(|(name, _)| is_shared(name));
        ImageRecord {
            id,
            tags: index.tags_of(id),
            manifest: image.manifest,
            created: image.created.clone(),
            imported: image.imported,
            size_bytes: image.files(id).map(|(_, bytes)| bytes).sum(),
            shared_bytes: shared.map(|(_, bytes)| bytes).sum(),
            architecture: image.architecture.clone(),
            config,
            erofs: self.blobs().join(image.own_file(id)),
            below: image.below.iter().map(|shared| self.blobs().join(&shared.file)).collect(),
        }
    }

    /// Waits for the store's lock; it is free again when the file is dropped.
    fn lock(&self) -> Result<File> {
        let path = self.root.join("lock");
        let open = private::options().create(true).truncate(false).write(true).open(&path);
        let file = open.map_err(|error| ImageError::store(&path, error))?;
        file.lock().map_err(|error| ImageError::store(&path, error))?;
        Ok(file)
    }

    /// Forgets the images that were to go when nobody uses them any more, and that nobody does.
    /// The store is locked.
    fn forget_passed(&self, index: &mut Index) -> Result<()> {
        let before = index.images.len();
        let is_unused = |name: String| is_unused(&self.blobs().join(name)).unwrap_or(false);
        index.images.retain(|id, image| !image.passing || !is_unused(image.own_file(*id)));
        match index.images.len() == before {
            true => Ok(()),
            false => self.write_index(index),
        }
    }

    /// Removes temporary files whose writer is dead and blobs that no index
    /// names. The store is locked.
    fn sweep(&self, index: &Index) -> Result<()> {
        for path in files(&self.temporary())? {
            if is_unused(&path).unwrap_or(false) {
                remove_file(&path)?;
            }
        }
        let known = self.known(index);
        for path in files(&self.blobs())? {
            if !known.contains(&path) && is_unused(&path).unwrap_or(false) {
                remove_file(&path)?;
            }
        }
        Ok(())
    }

    fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    fn config_file(&self, id: Digest) -> PathBuf {
        self.blobs().join(format!("{}.config", id.hex()))
    }

    fn document_file(&self, id: Digest) -> PathBuf {
        self.blobs().join(format!("{}.json", id.hex()))
    }

    fn temporary(&self) -> PathBuf {
        self.root.join("tmp")
    }
}

/// The image that a name is of.
struct Found {
    id: Digest,
    /// The tag that the name is, if it is one.
    tag: Option<String>,
}

/// An id comes before names: no name takes the place of another image's id or of the digits that
/// tables show of it.
fn find(index: &Index, name: &str) -> Result<Found> {
    let missing = || ImageError::NotFound { name: crate::error::shown(name.as_bytes()) };
    let by_id = |id| Found { id, tag: None };
    if let Some(digits) = name.strip_prefix("sha256:") {
        return beginning(index, digits)?.map(by_id).ok_or_else(missing);
    }
    let is_hex = name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if is_hex
        && name.len() >= SHORT_DIGITS
        && let Some(id) = beginning(index, name)?
    {
        return Ok(by_id(id));
    }
    let reference = name.parse::<Reference>().ok();
    let tag = reference.as_ref().map(ToString::to_string);
    if let Some((tag, id)) = tag.and_then(|tag| index.tags.get_key_value(&tag)) {
        return Ok(Found { id: *id, tag: Some(tag.clone()) });
    }
    if let Some(digest) = reference.and_then(|reference| reference.digest) {
        let found = index.images.iter().find(|(_, image)| image.manifest == Some(digest));
        return found.map(|(id, _)| by_id(*id)).ok_or_else(missing);
    }
    beginning(index, name)?.map(by_id).ok_or_else(missing)
}

/// The one id that begins with `digits`.
fn beginning(index: &Index, digits: &str) -> Result<Option<Digest>> {
    if digits.len() < PREFIX_DIGITS_MIN {
        return Ok(None);
    }
    let mut found = index.images.keys().filter(|id| id.hex().starts_with(digits));
    match (found.next(), found.next()) {
        (Some(_), Some(_)) => Err(ImageError::AmbiguousId { name: digits.into() }),
        (found, _) => Ok(found.copied()),
    }
}

/// Whether nobody holds a lock on the file (a missing file has no users).
fn is_unused(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        other => other?,
    };
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// A file that many may share stays for who has it open; the next sweep removes it.
fn remove_unused(path: &Path) -> Result<()> {
    match is_unused(path) {
        Ok(false) => Ok(()),
        _ => remove_file(path),
    }
}

/// Where the note lies of what a file of the store was as a layer.
fn layer_file(erofs: &Path) -> PathBuf {
    erofs.with_extension("layer")
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(ImageError::store(path, error))
        }
        _ => Ok(()),
    }
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error| ImageError::read(folder, error);
    fs::read_dir(folder)
        .map_err(failed)?
        .map(|file| file.map(|file| file.path()).map_err(failed))
        .collect()
}

/// Bytes that a file takes on its disk.
fn disk_bytes(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.blocks() * 512)
}
