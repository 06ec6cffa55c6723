//! Adding an image: plan, build in a locked temporary file, publish.

use std::fs::{File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::time::{SystemTime, UNIX_EPOCH};

use tempfile::NamedTempFile;

use super::index::{StoredImage, sync_folder};
use super::{ImageRecord, Store, disk_bytes};
use crate::Digest;
use crate::config::{ConfigDocument, ImageConfig};
use crate::erofs::DataArea;
use crate::error::{ImageError, Result};
use crate::layer::{self, LayerCheck};
use crate::limits::ImportLimits;
use crate::progress::{Progress, ProgressEvent};
use crate::reference::Reference;
use crate::rootfs::RootfsBuilder;
use crate::source::{self, Plan, Source};

/// An image that is built but not yet in the index.
struct Built {
    id: Digest,
    document: Vec<u8>,
    manifest: Option<Digest>,
    file: NamedTempFile,
}

impl Store {
    /// Imports an image and gives it the name `tag`. If its file system is in
    /// the store already, only the name is new. A failure leaves the store as
    /// it was.
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
            let built = self.build_directory(path, config, limits, progress)?;
            return self.publish(built, tag);
        };
        let id = Digest::of(&plan.config);
        if let Some(record) = self.name_present(id, tag)? {
            progress.event(ProgressEvent::Present { id });
            return Ok(record);
        }
        let built = self.build_layers(id, plan, limits, progress)?;
        self.publish(built, tag)
    }

    fn build_layers(
        &self,
        id: Digest,
        plan: Plan,
        limits: &ImportLimits,
        progress: &mut dyn Progress,
    ) -> Result<Built> {
        ConfigDocument::parse(&plan.config)?.run_config()?;
        let (file, mut rootfs) = self.begin(limits)?;
        let count = plan.layers.len();
        let mut bytes = 0;
        for (index, layer) in plan.layers.iter().enumerate() {
            progress.event(ProgressEvent::Layer {
                index,
                count,
                bytes: layer.blob.map(|(_, size)| size),
            });
            let what = format!("layer {} of {count}", index + 1);
            let check = LayerCheck { what, blob: layer.blob, diff_id: Some(layer.diff_id) };
            let mut stream = plan.input.open_layer(layer)?;
            layer::apply(&mut rootfs, &mut stream, &check, &mut bytes, progress)?;
        }
        progress.event(ProgressEvent::Finishing);
        rootfs.finish(&id)?;
        Ok(Built { id, document: plan.config, manifest: plan.manifest, file })
    }

    fn build_directory(
        &self,
        path: &std::path::Path,
        config: &ImageConfig,
        limits: &ImportLimits,
        progress: &mut dyn Progress,
    ) -> Result<Built> {
        let (file, mut rootfs) = self.begin(limits)?;
        progress.event(ProgressEvent::Layer { index: 0, count: 1, bytes: None });
        let diff_id = source::import_directory(&mut rootfs, path, progress)?;
        single(file, rootfs, config, diff_id, progress)
    }

    /// Makes an image of one layer, a tar stream that nobody vouches for, and
    /// gives it the name `tag`.
    ///
    /// # Errors
    /// What is wrong with the stream. The store is as it was then.
    pub fn import_layer(
        &self,
        stream: &mut dyn Read,
        config: &ImageConfig,
        tag: Option<&Reference>,
        limits: &ImportLimits,
        progress: &mut dyn Progress,
    ) -> Result<ImageRecord> {
        let (file, mut rootfs) = self.begin(limits)?;
        progress.event(ProgressEvent::Layer { index: 0, count: 1, bytes: None });
        let check = LayerCheck { what: "the layer".to_owned(), blob: None, diff_id: None };
        let diff_id = layer::apply(&mut rootfs, stream, &check, &mut 0, progress)?;
        let built = single(file, rootfs, config, diff_id, progress)?;
        self.publish(built, tag)
    }

    /// A temporary file under lock, and a builder that writes to it.
    fn begin<'a>(&'a self, limits: &'a ImportLimits) -> Result<(NamedTempFile, RootfsBuilder<'a>)> {
        let failed = |error: io::Error| ImageError::store(&self.root, error);
        // The sweep holds this lock too, so it never sees the file unlocked.
        let _lock = self.lock()?;
        let folder = self.temporary();
        let file =
            tempfile::Builder::new().prefix("import-").tempfile_in(&folder).map_err(failed)?;
        file.as_file().lock().map_err(failed)?;
        let spool = tempfile::tempfile_in(&folder).map_err(failed)?;
        let image = file.as_file().try_clone().map_err(failed)?;
        Ok((file, RootfsBuilder::new(DataArea::new(image, spool), limits, &self.root)))
    }

    /// Moves a built image into the store and names it. The blob is in place
    /// before the index says so.
    fn publish(&self, built: Built, tag: Option<&Reference>) -> Result<ImageRecord> {
        let failed = |error: io::Error| ImageError::store(&self.root, error);
        let size_bytes = settle(built.file.as_file()).map_err(failed)?;
        let _lock = self.lock()?;
        let mut index = self.read_index()?;
        if let std::collections::btree_map::Entry::Vacant(vacant) = index.images.entry(built.id) {
            let blob = self.blob(built.id);
            // The lock that marked the file as being written goes with its file.
            built.file.persist(&blob).map_err(|error| failed(error.error))?;
            sync_folder(&self.blobs()).map_err(failed)?;
            vacant.insert(stored(&built.document, built.manifest, size_bytes)?);
        }
        if let Some(tag) = tag {
            index.tags.insert(tag.to_string(), built.id);
        }
        self.write_index(&index)?;
        let image = index.images.get(&built.id);
        image
            .map(|image| self.record(built.id, image, &index))
            .ok_or_else(|| ImageError::NotFound { name: built.id.to_string() })
    }

    /// Names an image that is in the store; `None` if it is not.
    fn name_present(&self, id: Digest, tag: Option<&Reference>) -> Result<Option<ImageRecord>> {
        let _lock = self.lock()?;
        let mut index = self.read_index()?;
        if !index.images.contains_key(&id) || !self.blob(id).is_file() {
            return Ok(None);
        }
        if let Some(tag) = tag {
            index.tags.insert(tag.to_string(), id);
            self.write_index(&index)?;
        }
        Ok(index.images.get(&id).map(|image| self.record(id, image, &index)))
    }
}

/// Makes the file last and readable by all; its bytes on disk.
fn settle(file: &File) -> io::Result<u64> {
    file.set_permissions(Permissions::from_mode(0o444))?;
    file.sync_all()?;
    disk_bytes(file)
}

fn stored(document: &[u8], manifest: Option<Digest>, size_bytes: u64) -> Result<StoredImage> {
    let mut parsed = ConfigDocument::parse(document)?;
    let text = std::str::from_utf8(document)
        .map_err(|error| ImageError::malformed("the image configuration", error))?;
    Ok(StoredImage {
        manifest,
        created: parsed.created.clone(),
        imported: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        size_bytes,
        architecture: parsed.architecture.clone(),
        config: parsed.run_config()?,
        document: text.to_owned(),
    })
}

/// The image of a file system with one layer.
fn single(
    file: NamedTempFile,
    rootfs: RootfsBuilder<'_>,
    config: &ImageConfig,
    diff_id: Digest,
    progress: &mut dyn Progress,
) -> Result<Built> {
    progress.event(ProgressEvent::Finishing);
    let document = serde_json::to_vec(&ConfigDocument::single_layer(config, diff_id))
        .map_err(|error| ImageError::malformed("the image configuration", error))?;
    let id = Digest::of(&document);
    rootfs.finish(&id)?;
    Ok(Built { id, document, manifest: None, file })
}
