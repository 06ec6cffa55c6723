//! Under which ids images of this store are in archives and registries: an image that is saved has
//! one layer for each file that the store has of it, and so another id. Where it comes back, it is
//! the image that it was.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use super::Store;
use crate::Digest;
use crate::error::{ImageError, Result};
use crate::private;

/// Ids that are noted of one image: it has as many as it had forms.
const IDS_MAX: usize = 16;

impl Store {
    pub(super) fn saved_file(&self, id: Digest) -> PathBuf {
        self.blobs().join(format!("{}.saved", id.hex()))
    }

    /// Notes that the image `id` is called `saved` elsewhere: whoever says so has made that of it.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn note_saved(&self, id: Digest, saved: Digest) -> Result<()> {
        let path = self.saved_file(id);
        let failed = |error: io::Error| ImageError::store(&path, error);
        let _lock = self.lock()?;
        let is_here = self.read_index()?.images.contains_key(&id);
        let mut ids = self.saved_of(id);
        if saved == id || !is_here || ids.contains(&saved) {
            return Ok(());
        }
        ids.truncate(IDS_MAX - 1);
        ids.insert(0, saved);
        let new = path.with_extension("saved-new");
        let text = ids.iter().map(|id| format!("{id}\n")).collect::<String>();
        let written = private::create(&new).and_then(|mut file| file.write_all(text.as_bytes()));
        written.and_then(|()| fs::rename(&new, &path)).map_err(failed)
    }

    fn saved_of(&self, id: Digest) -> Vec<Digest> {
        let text = fs::read_to_string(self.saved_file(id)).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// The images of this store by what they are called elsewhere.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn originals(&self) -> Result<BTreeMap<Digest, Digest>> {
        let ids = self.ids()?.into_iter();
        Ok(ids.flat_map(|id| self.saved_of(id).into_iter().map(move |saved| (saved, id))).collect())
    }
}
