//! Making the file system of an image out of bytes that are somebody else's. Nothing here opens a
//! file or talks to anybody: all comes in by descriptors, so that a process without rights can do
//! it.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::config::{ConfigDocument, ImageConfig, Note};
use crate::erofs::DataArea;
use crate::error::{ImageError, Result};
use crate::layer::{self, LayerCheck, Spent};
use crate::limits::ImportLimits;
use crate::progress::{Progress, ProgressEvent};
use crate::reference::Reference;
use crate::rootfs::RootfsBuilder;
use crate::source::{self, Plan};

/// When an image was made, and for what machines.
const FIELD_BYTES_MAX: usize = 128;

/// An image that is to be made.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    pub from: From,
    /// Chooses among several.
    pub wanted: Option<String>,
    /// Images that need not be made.
    pub known: Vec<Digest>,
    pub limits: ImportLimits,
    /// For messages: where the image will lie.
    pub store: PathBuf,
}

/// What comes in.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum From {
    /// A tar file: `docker save`, or an OCI layout. The path is for messages.
    Archive(PathBuf),
    /// A socket to whoever has the files of an OCI layout.
    Layout(PathBuf),
    /// A socket to whoever reaches the registry; the version is a tag or a digest.
    Registry { version: String },
    /// A tar stream, which becomes the only layer.
    Layer(Box<ImageConfig>, Note),
}

/// Where the image goes.
#[derive(Debug)]
pub struct Room {
    /// An empty file, open for reading and writing.
    pub image: File,
    /// The same, which nobody needs afterwards.
    pub spool: File,
    /// Where an archive that is compressed as a whole is unpacked to. Without it that is refused.
    pub unpacked: Option<File>,
}

/// What was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Made {
    Image(Box<Image>),
    /// One of those that are known already.
    Known(Digest),
}

/// What is known of an image beside its file system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Digest of the document.
    pub id: Digest,
    /// The configuration as it came.
    pub document: String,
    /// Digest of the manifest, if there is one.
    pub manifest: Option<Digest>,
    pub created: Option<String>,
    pub architecture: String,
    pub config: ImageConfig,
}

impl Image {
    /// Reads a configuration.
    pub(crate) fn read(document: Vec<u8>, manifest: Option<Digest>) -> Result<Self> {
        let mut parsed = ConfigDocument::parse(&document)?;
        let config = parsed.run_config()?;
        let id = Digest::of(&document);
        let document = String::from_utf8(document)
            .map_err(|error| ImageError::malformed("the image configuration", error))?;
        let ConfigDocument { created, architecture, .. } = parsed;
        let image = Self { id, document, manifest, created, architecture, config };
        image.check()?;
        Ok(image)
    }

    /// Whether it is no larger than what the store keeps of an image.
    pub(crate) fn check(&self) -> Result<()> {
        let words = [Some(&self.architecture), self.created.as_ref()];
        if words.into_iter().flatten().any(|word| word.len() > FIELD_BYTES_MAX) {
            let what = "a field of the image configuration";
            return Err(ImageError::limit(what, "field bytes", FIELD_BYTES_MAX as u64));
        }
        self.config.check()
    }

    /// Of a file system with one layer.
    pub(crate) fn single_layer(config: (&ImageConfig, &Note), diff_id: Digest) -> Result<Self> {
        let document = serde_json::to_vec(&ConfigDocument::single_layer(config, diff_id))
            .map_err(|error| ImageError::malformed("the image configuration", error))?;
        Self::read(document, None)
    }
}

/// Reads `input`, as the job says, and makes the image in `room`.
///
/// # Errors
/// What is wrong with it, or with the disk.
pub fn build(job: &Job, input: OwnedFd, room: Room, progress: &mut dyn Progress) -> Result<Made> {
    let Room { image, spool, unpacked } = room;
    let limits = &job.limits;
    let mut rootfs = RootfsBuilder::new(DataArea::new(image, spool, limits), limits, &job.store);
    let wanted = job.wanted.as_deref().map(str::parse::<Reference>).transpose()?;
    let plan = match &job.from {
        From::Layer(config, note) => {
            return one_layer(&mut File::from(input), (config, note), rootfs, progress);
        }
        From::Archive(path) => {
            let file = whole(File::from(input), unpacked, limits)?;
            source::plan_archive(file, path, wanted.as_ref(), limits)?
        }
        From::Layout(path) => {
            source::plan_remote_layout(UnixStream::from(input), path, wanted.as_ref(), limits)?
        }
        From::Registry { version } => {
            source::plan_remote(UnixStream::from(input), version, limits)?
        }
    };
    let id = Digest::of(&plan.config);
    if job.known.contains(&id) {
        return Ok(Made::Known(id));
    }
    let image = of_plan(plan, &mut rootfs, progress)?;
    progress.event(ProgressEvent::Finishing);
    rootfs.finish(&image.id)?;
    Ok(Made::Image(Box::new(image)))
}

/// Applies the layers of a plan.
pub(crate) fn of_plan(
    plan: Plan,
    rootfs: &mut RootfsBuilder<'_>,
    progress: &mut dyn Progress,
) -> Result<Image> {
    let Plan { config, layers, manifest, input } = plan;
    let image = Image::read(config, manifest)?;
    let count = layers.len();
    let mut spent = Spent::default();
    for (index, layer) in layers.iter().enumerate() {
        progress.event(ProgressEvent::Layer {
            index,
            count,
            bytes: layer.blob.map(|(_, size)| size),
        });
        let what = format!("layer {} of {count}", index + 1);
        let (blob, diff_id) = (layer.blob, Some(layer.diff_id));
        let check = LayerCheck { what, blob, diff_id, has_marks: true };
        let mut stream = input.open_layer(layer)?;
        layer::apply(rootfs, &mut stream, &check, &mut spent, progress)?;
    }
    Ok(image)
}

fn one_layer(
    stream: &mut dyn Read,
    config: (&ImageConfig, &Note),
    mut rootfs: RootfsBuilder<'_>,
    progress: &mut dyn Progress,
) -> Result<Made> {
    progress.event(ProgressEvent::Layer { index: 0, count: 1, bytes: None });
    let what = "the layer".to_owned();
    let check = LayerCheck { what, blob: None, diff_id: None, has_marks: false };
    let diff_id = layer::apply(&mut rootfs, stream, &check, &mut Spent::default(), progress)?;
    progress.event(ProgressEvent::Finishing);
    let image = Image::single_layer(config, diff_id)?;
    rootfs.finish(&image.id)?;
    Ok(Made::Image(Box::new(image)))
}

/// The names that the images of an archive have, and the archive as [`build`] takes it: unpacked
/// to `unpacked` where it was compressed as a whole.
///
/// # Errors
/// What is wrong with it, or with the disk.
pub fn names(
    archive: File,
    path: &Path,
    unpacked: File,
    limits: &ImportLimits,
) -> Result<Vec<String>> {
    source::archive_names(whole(archive, Some(unpacked), limits)?, path, limits)
}

/// The file itself, or what it holds in compressed form.
fn whole(file: File, unpacked: Option<File>, limits: &ImportLimits) -> Result<File> {
    match unpacked {
        Some(mut to) if layer::is_packed(&file)? => {
            (&file).rewind().map_err(|error| ImageError::io("cannot read the archive", error))?;
            let mut from = BufReader::with_capacity(128 << 10, &file);
            layer::unpack_whole(&mut from, &mut to, limits)?;
            Ok(to)
        }
        _ => Ok(file),
    }
}
