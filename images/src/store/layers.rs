//! What the files of images were as layers: notes beside them, so that none is packed to find out
//! that a registry has it. The layers themselves are not kept; they are made again where they are
//! wanted ([`crate::compose::layer`]).

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{ImageRecord, Store, layer_file};
use crate::error::{ImageError, Result};
use crate::layer::Layer;

const VERSION: u32 = 1;
/// More is no note.
const NOTE_BYTES_MAX: u64 = 4 << 10;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    version: u32,
    layer: Layer,
}

impl Store {
    /// What the files of an image were as compressed layers, the lowest first, as far as that is
    /// known.
    #[must_use]
    pub fn layers(&self, image: &ImageRecord) -> Vec<Option<Layer>> {
        image.below.iter().chain([&image.erofs]).map(|path| read(&layer_file(path))).collect()
    }

    /// Notes what the file `number` of an image is as a compressed layer.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn note_layer(&self, image: &ImageRecord, number: usize, layer: &Layer) -> Result<()> {
        let mut files = image.below.iter().chain([&image.erofs]);
        let Some(path) = files.nth(number).filter(|path| path.exists()) else { return Ok(()) };
        let note = Note { version: VERSION, layer: layer.clone() };
        let text = serde_json::to_vec(&note)
            .map_err(|error| ImageError::store(self.root(), error.into()))?;
        self.replace(&layer_file(path), &text)
    }
}

fn read(path: &Path) -> Option<Layer> {
    let is_short = fs::symlink_metadata(path).is_ok_and(|found| found.len() <= NOTE_BYTES_MAX);
    let text = is_short.then(|| fs::read(path).ok()).flatten()?;
    let note: Note = serde_json::from_slice(&text).ok()?;
    (note.version == VERSION).then_some(note.layer)
}
