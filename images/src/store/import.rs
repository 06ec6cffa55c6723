//! Adding an image: plan, build in a locked temporary file, publish.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use tempfile::NamedTempFile;

use super::index::{Index, Shared, StoredImage, file_of, sync_folder};
use super::{ImageRecord, Store, disk_bytes, layer_file, remove_file};
use crate::build::{self, Image};
use crate::config::{ImageConfig, Note};
use crate::erofs::{DataArea, Rootfs};
use crate::error::{ImageError, Result};
use crate::limits::ImportLimits;
use crate::progress::{Progress, ProgressEvent};
use crate::reference::Reference;
use crate::rootfs::RootfsBuilder;
use crate::source::{self, Source};
use crate::{Digest, digest};

/// A file under lock in which the file system of an image is made.
#[derive(Debug)]
pub struct Draft {
    file: NamedTempFile,
    spool: File,
}

impl Draft {
    /// The image's file, and one for what is needed while it is made: both empty.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn files(&self) -> Result<(File, File)> {
        let failed = |error| ImageError::io("cannot share a file of the store", error);
        Ok((
            self.file.as_file().try_clone().map_err(failed)?,
            self.spool.try_clone().map_err(failed)?,
        ))
    }
}

impl Store {
    /// Imports an image in this process, and gives it the name `tag`. If its file system is in
    /// the store already, only the name is new. A failure leaves the store as it was.
    ///
    /// What others made, all but a [`Source::Directory`], is read in a jailed process by
    /// whoever can have one: with [`Store::begin`], [`crate::build::build`] there, and
    /// [`Store::publish`].
    pub fn import(
        &self,
        source: &Source,
        tag: Option<&Reference>,
        limits: &ImportLimits,
        progress: &mut dyn Progress,
    ) -> Result<ImageRecord> {
        let own = match source {
            Source::Registry { reference, .. } => Some(reference),
            _ => None,
        };
        let tag = tag.or(own);
        let Some(plan) = source::plan(source, tag, limits)? else {
            let Source::Directory { path, config } = source else {
                return Err(ImageError::malformed("the source", "it has no plan"));
            };
            return self.import_directory(path, config, tag, limits, progress);
        };
        let id = Digest::of(&plan.config);
        if let Some(record) = self.name_present(id, tag)? {
            progress.event(ProgressEvent::Present { id });
            return Ok(record);
        }
        let draft = self.begin()?;
        let mut rootfs = self.rootfs(&draft, limits)?;
        let image = build::of_plan(plan, &mut rootfs, progress)?;
        progress.event(ProgressEvent::Finishing);
        rootfs.finish(&image.id)?;
        self.publish(draft, image, None, tag)
    }

    /// Makes an image of a directory of the operator's, which is copied, and gives it the name
    /// `tag`.
    ///
    /// # Errors
    /// What cannot be read. The store is as it was then.
    pub fn import_directory(
        &self,
        path: &Path,
        config: &ImageConfig,
        tag: Option<&Reference>,
        limits: &ImportLimits,
        progress: &mut dyn Progress,
    ) -> Result<ImageRecord> {
        let draft = self.begin()?;
        let mut rootfs = self.rootfs(&draft, limits)?;
        progress.event(ProgressEvent::Layer { index: 0, count: 1, bytes: None });
        let diff_id = source::import_directory(&mut rootfs, path, progress)?;
        progress.event(ProgressEvent::Finishing);
        let image = Image::single_layer((config, &Note::default()), diff_id)?;
        rootfs.finish(&image.id)?;
        self.publish(draft, image, None, tag)
    }

    fn rootfs<'a>(&'a self, draft: &Draft, limits: &'a ImportLimits) -> Result<RootfsBuilder<'a>> {
        let (image, spool) = draft.files()?;
        Ok(RootfsBuilder::new(DataArea::new(image, spool, limits), limits, &self.root))
    }

    /// Room for an image that is to be made.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn begin(&self) -> Result<Draft> {
        let failed = |error: io::Error| ImageError::store(&self.root, error);
        // The sweep holds this lock too, so it never sees the file unlocked.
        let _lock = self.lock()?;
        let folder = self.temporary();
        let file =
            tempfile::Builder::new().prefix("import-").tempfile_in(&folder).map_err(failed)?;
        file.as_file().lock().map_err(failed)?;
        let spool = tempfile::tempfile_in(&folder).map_err(failed)?;
        Ok(Draft { file, spool })
    }

    /// A file in the store that has no name: it is gone with its last holder.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn scratch(&self) -> Result<File> {
        tempfile::tempfile_in(self.temporary())
            .map_err(|error| ImageError::store(&self.root, error))
    }

    /// Moves an image that was made in `draft` into the store and names it. The blob is in place
    /// before the index says so. As a delta it is over `below`, an image of this store.
    ///
    /// # Errors
    /// The store cannot be written, or the image is not what its id says.
    pub fn publish(
        &self,
        draft: Draft,
        image: Image,
        below: Option<&Rootfs>,
        tag: Option<&Reference>,
    ) -> Result<ImageRecord> {
        let failed = |error: io::Error| ImageError::store(&self.root, error);
        let id = image.id;
        let (_lock, mut index, size_bytes) = self.receive(&draft, &image, below, true)?;
        self.keep_passing(&mut index, id)?;
        // What a file of the store has lost, an import of the same image gives back.
        if !index.images.get(&id).is_some_and(|known| self.is_whole(id, known)) {
            self.place(&mut index, draft, image, below, size_bytes, false)?;
            sync_folder(&self.blobs()).map_err(failed)?;
        }
        if let Some(tag) = tag {
            index.tags.insert(tag.to_string(), id);
        }
        self.write_index(&mut index)?;
        let found = index.images.get(&id).map(|image| self.record(id, image, &index));
        found.transpose()?.flatten().ok_or_else(|| ImageError::NotFound { name: id.to_string() })
    }

    /// The same of an image that no list shows, and that goes when nobody uses it any more: the
    /// returned files, or duplicates of them, are a use.
    ///
    /// # Errors
    /// As of [`Self::publish`].
    pub fn publish_passing(
        &self,
        draft: Draft,
        image: Image,
        below: Option<&Rootfs>,
    ) -> Result<(ImageRecord, Rootfs)> {
        let id = image.id;
        let (_lock, mut index, size_bytes) = self.receive(&draft, &image, below, false)?;
        if !index.images.get(&id).is_some_and(|known| self.is_whole(id, known)) {
            let own = self.place(&mut index, draft, image, below, size_bytes, true)?;
            // Who made it may hold its lock still: from now on it is a user's.
            own.lock_shared().map_err(|error| ImageError::store(&self.root, error))?;
            self.write_index(&mut index)?;
        }
        let missing = || ImageError::NotFound { name: id.to_string() };
        let image = index.images.get(&id).ok_or_else(missing)?;
        // While the store is locked nobody finds it unused.
        let rootfs = self.open_files(id, image)?;
        let record = self.record(id, image, &index)?.ok_or_else(missing)?;
        Ok((record, rootfs))
    }

    /// Looks at an image that was made, and locks the store for it: the lock, the index, and the
    /// bytes that its file takes.
    fn receive(
        &self,
        draft: &Draft,
        image: &Image,
        below: Option<&Rootfs>,
        lasts: bool,
    ) -> Result<(File, Index, u64)> {
        let failed = |error: io::Error| ImageError::store(&self.root, error);
        // Another process may have said it.
        digest::expect("the image configuration", image.id, Digest::of(image.document.as_bytes()))?;
        image.check()?;
        if let Some(below) = below {
            let failed = |error| ImageError::io("cannot share an image", error);
            let files = below.files().iter().chain([draft.file.as_file()]);
            let files = files.map(File::try_clone).collect::<io::Result<_>>();
            Rootfs::of(files.map_err(failed)?)?;
        }
        let size_bytes = settle(draft.file.as_file(), lasts).map_err(failed)?;
        // Files of images that were to go may not be on the disk yet.
        for file in below.filter(|_| lasts).into_iter().flat_map(Rootfs::files) {
            file.sync_all().map_err(failed)?;
        }
        let lock = self.lock()?;
        let index = self.read_index()?;
        Ok((lock, index, size_bytes))
    }

    /// Gives what was made its place, and has the index name it; its file. The store is locked.
    fn place(
        &self,
        index: &mut Index,
        draft: Draft,
        image: Image,
        below: Option<&Rootfs>,
        size_bytes: u64,
        passing: bool,
    ) -> Result<File> {
        let failed = |error: io::Error| ImageError::store(&self.root, error);
        let id = image.id;
        let below = below.map(|below| self.shared(below)).transpose()?.unwrap_or_default();
        let name = index.new_file(id, &below);
        let path = self.blobs().join(&name);
        // Of another file, if there was one.
        remove_file(&layer_file(&path))?;
        // The lock that marked the file as being written goes with its file.
        let own = draft.file.persist(&path).map_err(|error| failed(error.error))?;
        self.write_details(id, &image.config, &image.document)?;
        let file = (name != file_of(id)).then_some(name);
        let image = StoredImage { passing, file, below, ..stored(image, size_bytes) };
        index.images.insert(id, image);
        Ok(own)
    }

    /// How the index tells of the files of an image that another is over. The store is locked.
    fn shared(&self, below: &Rootfs) -> Result<Vec<Shared>> {
        let failed = |error: io::Error| ImageError::store(&self.root, error);
        let another = |why: String| ImageError::StoreCorrupt { path: self.root.clone(), why };
        if below.names.len() != below.files().len() {
            return Err(another("the image below is of another store".to_owned()));
        }
        let note = |(name, file): (&String, &File)| {
            let here = fs::metadata(self.blobs().join(name)).map_err(failed)?;
            let used = file.metadata().map_err(failed)?;
            match (here.dev(), here.ino()) == (used.dev(), used.ino()) {
                true => {
                    Ok(Shared { file: name.clone(), size_bytes: disk_bytes(file).map_err(failed)? })
                }
                false => Err(another(format!("{name} was replaced while it was used; try again"))),
            }
        };
        below.names.iter().zip(below.files()).map(note).collect()
    }

    /// Has an image stay that was to go. The store is locked.
    pub(super) fn keep_passing(&self, index: &mut Index, id: Digest) -> Result<()> {
        let Some(image) = index.images.get_mut(&id).filter(|image| image.passing) else {
            return Ok(());
        };
        image.passing = false;
        for (name, _) in image.files(id) {
            match File::open(self.blobs().join(name)).and_then(|file| file.sync_all()) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(ImageError::store(&self.root, error)),
            }
        }
        Ok(())
    }

    /// Whether the files of an image that the index names are there, as long as they were.
    fn is_whole(&self, id: Digest, known: &StoredImage) -> bool {
        let is_there = |(name, bytes): (String, u64)| {
            let found = File::open(self.blobs().join(name)).and_then(|file| disk_bytes(&file));
            found.is_ok_and(|found| found == bytes)
        };
        known.files(id).all(is_there) && matches!(self.config(id, known), Ok(Some(_)))
    }

    /// The images that there are.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn ids(&self) -> Result<Vec<Digest>> {
        let index = self.read_index()?;
        let is_there = |(id, image): &(Digest, StoredImage)| {
            image.files(*id).all(|(name, _)| self.blobs().join(name).is_file())
        };
        Ok(index.images.into_iter().filter(is_there).map(|(id, _)| id).collect())
    }

    /// Names an image that is in the store; `None` if it is not.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn name_present(&self, id: Digest, tag: Option<&Reference>) -> Result<Option<ImageRecord>> {
        let _lock = self.lock()?;
        let mut index = self.read_index()?;
        if !index.images.get(&id).is_some_and(|known| self.is_whole(id, known)) {
            return Ok(None);
        }
        let was_passing = index.images.get(&id).is_some_and(|image| image.passing);
        self.keep_passing(&mut index, id)?;
        if let Some(tag) = tag {
            index.tags.insert(tag.to_string(), id);
        }
        if tag.is_some() || was_passing {
            self.write_index(&mut index)?;
        }
        let found = index.images.get(&id).map(|image| self.record(id, image, &index));
        Ok(found.transpose()?.flatten())
    }
}

/// Leaves the file to be read by its owner alone, and makes it last if that is wanted; its bytes
/// on disk.
fn settle(file: &File, lasts: bool) -> io::Result<u64> {
    file.set_permissions(Permissions::from_mode(0o400))?;
    if lasts {
        file.sync_all()?;
    }
    disk_bytes(file)
}

fn stored(image: Image, size_bytes: u64) -> StoredImage {
    let Image { manifest, created, architecture, .. } = image;
    let imported = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    StoredImage {
        manifest,
        created,
        imported,
        size_bytes,
        architecture,
        file: None,
        below: Vec::new(),
        passing: false,
        config: None,
        document: None,
    }
}
