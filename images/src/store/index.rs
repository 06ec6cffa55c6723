//! index.json: what the store holds. It is read by every command, so it has of each image what
//! takes the same room for all: how the image is run, and its document, are in files of their own.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Store;
use crate::Digest;
use crate::config::ImageConfig;
use crate::error::{ImageError, Result};
use crate::reference::Reference;

const VERSION: u32 = 2;
/// All of an image was in the index.
const VERSION_WHOLE: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    pub version: u32,
    pub images: BTreeMap<Digest, StoredImage>,
    /// Names as [`crate::Reference`] shows them.
    pub tags: BTreeMap<String, Digest>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredImage {
    pub manifest: Option<Digest>,
    pub created: Option<String>,
    pub imported: u64,
    pub size_bytes: u64,
    pub architecture: String,
    /// Whether it goes when nobody uses it any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub passing: bool,
    /// Of an index of before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<ImageConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document: Option<String>,
}

impl Default for Index {
    fn default() -> Self {
        Self { version: VERSION, images: BTreeMap::new(), tags: BTreeMap::new() }
    }
}

impl Index {
    pub fn tags_of(&self, id: Digest) -> Vec<String> {
        self.tags.iter().filter(|(_, tagged)| **tagged == id).map(|(tag, _)| tag.clone()).collect()
    }
}

impl Store {
    /// The index as it is now; readers need no lock, since it is replaced as a
    /// whole.
    pub(super) fn read_index(&self) -> Result<Index> {
        let path = self.root.join("index.json");
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Index::default()),
            Err(error) => return Err(ImageError::read(&path, error)),
        };
        let corrupt = |why: String| ImageError::StoreCorrupt { path: self.root.clone(), why };
        let mut index: Index =
            serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
        match index.version {
            VERSION | VERSION_WHOLE => {
                // One that reads as an id is none, whoever wrote it.
                index.tags.retain(|tag, _| tag.parse::<Reference>().is_ok());
                Ok(index)
            }
            other => Err(corrupt(format!("its version is {other}, not {VERSION}"))),
        }
    }

    /// Makes the index of a new store. The store is locked.
    ///
    /// # Errors
    /// [`ImageError::StoreCorrupt`] where images lie that an index must have named: without it they
    /// would be taken for leftovers.
    pub(super) fn begin_index(&self) -> Result<()> {
        if self.root.join("index.json").exists() {
            return Ok(());
        }
        let is_image = |path: &PathBuf| path.extension().is_some_and(|end| end == "erofs");
        match super::files(&self.blobs())?.iter().find(|path| is_image(path)) {
            None => self.write_index(&Index::default()),
            Some(image) => Err(ImageError::StoreCorrupt {
                path: self.root.clone(),
                why: format!("it has no index.json, but {}", image.display()),
            }),
        }
    }

    /// Makes an index of before one of now. The store is locked.
    pub(super) fn split_index(&self, index: &mut Index) -> Result<()> {
        if index.version == VERSION {
            return Ok(());
        }
        for (id, image) in &mut index.images {
            if let (Some(config), Some(document)) = (image.config.take(), image.document.take()) {
                self.write_details(*id, &config, &document)?;
            }
        }
        index.version = VERSION;
        self.write_index(index)
    }

    /// How an image is run; `None` where that is gone.
    pub(super) fn config(&self, id: Digest, image: &StoredImage) -> Result<Option<ImageConfig>> {
        if let Some(config) = &image.config {
            return Ok(Some(config.clone()));
        }
        let Some(text) = read_if_there(&self.config_file(id))? else { return Ok(None) };
        let config = serde_json::from_slice(&text);
        config.map(Some).map_err(|error| ImageError::Damaged { id, why: error.to_string() })
    }

    /// The document of an image, byte for byte; `None` where that is gone.
    pub(super) fn document(&self, id: Digest, image: &StoredImage) -> Result<Option<String>> {
        if let Some(document) = &image.document {
            return Ok(Some(document.clone()));
        }
        let Some(text) = read_if_there(&self.document_file(id))? else { return Ok(None) };
        String::from_utf8(text).map(Some).map_err(|error| ImageError::StoreCorrupt {
            path: self.root.clone(),
            why: format!("{}: {error}", self.document_file(id).display()),
        })
    }

    /// Writes what the index does not hold. The store is locked, and the index does not name the
    /// image yet.
    pub(super) fn write_details(
        &self,
        id: Digest,
        config: &ImageConfig,
        document: &str,
    ) -> Result<()> {
        let config = serde_json::to_vec(config)
            .map_err(|error| ImageError::store(&self.root, error.into()))?;
        self.replace(&self.document_file(id), document.as_bytes())?;
        self.replace(&self.config_file(id), &config)
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let failed = |error| ImageError::store(&self.root, error);
        let mut file = tempfile::Builder::new()
            .prefix("index-")
            .tempfile_in(self.temporary())
            .map_err(failed)?;
        file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(failed)?;
        file.persist(path).map_err(|error| failed(error.error)).map(drop)
    }

    /// Replaces the index. The store is locked.
    pub(super) fn write_index(&self, index: &Index) -> Result<()> {
        let failed = |error| ImageError::store(&self.root, error);
        let text = serde_json::to_vec_pretty(index).map_err(|error| failed(error.into()))?;
        self.replace(&self.root.join("index.json"), &text)?;
        sync_folder(&self.root).map_err(failed)
    }
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ImageError::read(path, error)),
    }
}

/// Makes renames in a folder last through a power failure.
pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
