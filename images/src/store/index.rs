//! index.json: what the store holds.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::Store;
use crate::Digest;
use crate::config::ImageConfig;
use crate::error::{ImageError, Result};

const VERSION: u32 = 1;

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
    pub config: ImageConfig,
    /// The configuration document.
    pub document: String,
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
        let index: Index =
            serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
        match index.version {
            VERSION => Ok(index),
            other => Err(corrupt(format!("its version is {other}, not {VERSION}"))),
        }
    }

    /// Replaces the index. The store is locked.
    pub(super) fn write_index(&self, index: &Index) -> Result<()> {
        let failed = |error| ImageError::store(&self.root, error);
        let text = serde_json::to_vec_pretty(index).map_err(|error| failed(error.into()))?;
        let mut file = tempfile::Builder::new()
            .prefix("index-")
            .tempfile_in(self.temporary())
            .map_err(failed)?;
        file.write_all(&text).and_then(|()| file.as_file().sync_all()).map_err(failed)?;
        file.persist(self.root.join("index.json")).map_err(|error| failed(error.error))?;
        sync_folder(&self.root).map_err(failed)
    }
}

/// Makes renames in a folder last through a power failure.
pub(super) fn sync_folder(path: &std::path::Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
