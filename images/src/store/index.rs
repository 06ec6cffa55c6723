//! index.json: what the store holds. It is read by every command, so it has of each image what
//! takes the same room for all: how the image is run, and its document, are in files of their own.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Store;
use crate::Digest;
use crate::config::ImageConfig;
use crate::error::{ImageError, Result};
use crate::reference::Reference;

const VERSION: u32 = 3;
/// Each image was one file. A store of which that holds is written so still, for who reads no other.
const VERSION_SINGLE: u32 = 2;
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
    /// Of its own file.
    pub size_bytes: u64,
    pub architecture: String,
    /// The name of its own file, where that is not its id's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The files that its own is over, the lowest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub below: Vec<Shared>,
    /// Whether it goes when nobody uses it any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub passing: bool,
    /// Of an index of before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<ImageConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document: Option<String>,
}

/// A file that several images may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Shared {
    pub file: String,
    pub size_bytes: u64,
}

impl StoredImage {
    /// The name of its own file.
    pub fn own_file(&self, id: Digest) -> String {
        self.file.clone().unwrap_or_else(|| file_of(id))
    }

    /// All its files, the lowest first.
    pub fn files(&self, id: Digest) -> impl Iterator<Item = (String, u64)> + '_ {
        let below = self.below.iter().map(|shared| (shared.file.clone(), shared.size_bytes));
        below.chain([(self.own_file(id), self.size_bytes)])
    }
}

/// What the file of an image is called where nothing is against that.
pub(super) fn file_of(id: Digest) -> String {
    format!("{}{FILE_END}", id.hex())
}

/// What all their names end with.
pub(super) const FILE_END: &str = ".erofs";

/// Whether a name can be that of a file of the store.
fn is_file_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    name.strip_suffix(FILE_END).is_some_and(|stem| !stem.is_empty() && stem.bytes().all(plain))
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

    /// Whether an image other than `id` has this file.
    pub fn is_shared(&self, file: &str, id: Digest) -> bool {
        let others = self.images.iter().filter(|(other, _)| **other != id);
        others.into_iter().any(|(other, image)| image.files(*other).any(|(own, _)| own == file))
    }

    /// How many images have each file.
    pub fn users(&self) -> HashMap<String, usize> {
        let mut users = HashMap::new();
        for (file, _) in self.images.iter().flat_map(|(id, image)| image.files(*id)) {
            *users.entry(file).or_default() += 1;
        }
        users
    }

    /// A name for a new file of the image `id`: no file that another image has is ever replaced.
    pub fn new_file(&self, id: Digest, below: &[Shared]) -> String {
        let numbered = (1..).map(|count: u64| format!("{}-{count}{FILE_END}", id.hex()));
        let mut names = std::iter::once(file_of(id)).chain(numbered);
        let is_below = |name: &String| below.iter().any(|shared| shared.file == *name);
        let is_free = |name: &String| !is_below(name) && !self.is_shared(name, id);
        names.find(is_free).unwrap_or_else(|| file_of(id))
    }

    fn has_stacks(&self) -> bool {
        self.images.values().any(|image| !image.below.is_empty() || image.file.is_some())
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
            VERSION | VERSION_SINGLE | VERSION_WHOLE => {
                let mut files = index.images.iter().flat_map(|(id, image)| image.files(*id));
                if let Some((bad, _)) = files.find(|(file, _)| !is_file_name(file)) {
                    return Err(corrupt(format!("it names the file {bad:?}")));
                }
                drop(files);
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
            None => self.write_index(&mut Index::default()),
            Some(image) => Err(ImageError::StoreCorrupt {
                path: self.root.clone(),
                why: format!("it has no index.json, but {}", image.display()),
            }),
        }
    }

    /// Makes an index of before one of now. The store is locked.
    pub(super) fn split_index(&self, index: &mut Index) -> Result<()> {
        if index.version != VERSION_WHOLE {
            return Ok(());
        }
        for (id, image) in &mut index.images {
            if let (Some(config), Some(document)) = (image.config.take(), image.document.take()) {
                self.write_details(*id, &config, &document)?;
            }
        }
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

    pub(super) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let failed = |error| ImageError::store(&self.root, error);
        let mut file = tempfile::Builder::new()
            .prefix("index-")
            .tempfile_in(self.temporary())
            .map_err(failed)?;
        file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(failed)?;
        file.persist(path).map_err(|error| failed(error.error)).map(drop)
    }

    /// Replaces the index. The store is locked.
    pub(super) fn write_index(&self, index: &mut Index) -> Result<()> {
        let failed = |error| ImageError::store(&self.root, error);
        index.version = if index.has_stacks() { VERSION } else { VERSION_SINGLE };
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
