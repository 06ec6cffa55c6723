//! Where images come from.

mod directory;
mod docker;
mod files;
mod oci;
mod registry;

use std::io::Read;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::Digest;
use crate::config::ImageConfig;
use crate::error::{ImageError, Result};
use crate::limits::ImportLimits;
use crate::reference::Reference;
pub(crate) use directory::import_directory;
use files::Files;
pub use registry::{Credentials, RegistryOptions};

/// An image that is to be imported.
#[derive(Debug, Clone)]
pub enum Source {
    /// A plain directory, which becomes the only layer. Nothing is followed
    /// out of it: other file systems mounted in it count as empty directories.
    Directory { path: PathBuf, config: ImageConfig },
    /// A directory in the OCI image layout.
    Layout(PathBuf),
    /// A tar file: `docker save`, or an OCI layout.
    Archive(PathBuf),
    /// A registry that speaks the OCI distribution API.
    Registry { reference: Reference, options: RegistryOptions },
}

impl Source {
    /// Tells what `path` is: a directory with an `index.json` and `blobs` is a
    /// layout, another directory is a root file system, a file an archive.
    pub fn detect(path: &Path, config: ImageConfig) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|error| ImageError::read(path, error))?;
        let path = path.to_path_buf();
        Ok(match metadata.is_dir() {
            true if path.join("index.json").is_file() && path.join("blobs").is_dir() => {
                Self::Layout(path)
            }
            true => Self::Directory { path, config },
            false => Self::Archive(path),
        })
    }
}

/// One layer of a [`Plan`].
pub(crate) struct LayerPlan {
    /// How the input names it.
    pub name: String,
    pub blob: Option<(Digest, u64)>,
    pub diff_id: Digest,
}

/// What an import will read.
pub(crate) struct Plan {
    /// The configuration's bytes; their digest is the image's id.
    pub config: Vec<u8>,
    pub layers: Vec<LayerPlan>,
    /// Digest of the manifest, if the input has one.
    pub manifest: Option<Digest>,
    pub input: Box<dyn Input>,
}

/// Opens the layers of a plan.
pub(crate) trait Input {
    fn open_layer(&self, layer: &LayerPlan) -> Result<Box<dyn Read + '_>>;
}

/// Reads what `source` holds, short of its layers. `None` for a directory.
pub(crate) fn plan(
    source: &Source,
    wanted: Option<&Reference>,
    limits: &ImportLimits,
) -> Result<Option<Plan>> {
    let plan = match source {
        Source::Directory { .. } => return Ok(None),
        Source::Layout(path) => oci::plan_files(Files::directory(path), wanted, limits)?,
        Source::Archive(path) => {
            let files = Files::archive(path, limits)?;
            match files.has("index.json") {
                true => oci::plan_files(files, wanted, limits)?,
                false => docker::plan(files, wanted, limits)?,
            }
        }
        Source::Registry { reference, options } => registry::plan(reference, options, limits)?,
    };
    if plan.layers.len() > limits.layers_max {
        return Err(ImageError::limit(
            "the number of layers",
            "layers_max",
            limits.layers_max as u64,
        ));
    }
    Ok(Some(plan))
}

/// All of a small document.
fn read_document(stream: &mut dyn Read, what: &str, limits: &ImportLimits) -> Result<Vec<u8>> {
    let max = limits.document_bytes_max as u64;
    let mut bytes = Vec::new();
    stream
        .take(max + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| ImageError::io(format!("cannot read {what}"), error))?;
    if bytes.len() as u64 > max {
        return Err(ImageError::limit(what, "document_bytes_max", max));
    }
    Ok(bytes)
}

fn parse<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| ImageError::malformed(what, error))
}
