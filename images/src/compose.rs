//! Images that are made of an image and layers over it, as builds make them.
//!
//! ```text
//! base image (erofs) ─┐
//! layers (tar, zstd) ─┴─> tree ──> `compose`: another image (erofs)
//! files (erofs)      ───> `copy`: one more layer, whose names are resolved in that tree
//! a tar stream       ───> `keep`: one more layer      `take`: files to copy from
//! ```
//! As [`crate::build`] it opens no file: all comes in by descriptors.

mod copy;
mod layer;
mod owners;
mod paths;
mod select;

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::build::{Image, Room};
use crate::digest::HashingWriter;
use crate::erofs::{DataArea, Rootfs};
use crate::error::{ImageError, Result};
use crate::layer::{self as layers, LayerCheck, Reserving, Spent};
use crate::limits::ImportLimits;
use crate::progress::{Progress, ProgressEvent};
use crate::rootfs::RootfsBuilder;
use crate::tar::TarReader;

pub use crate::layer::Layer;
pub use crate::rootfs::Form;
pub use copy::{Copied, Copy, copy, pack};
pub use layer::layer;
pub use select::{Selection, hash, text};

/// How layers are compressed: they are read again soon, on the same machine.
const ZSTD_LEVEL: i32 = 1;

/// What is over nothing, or over an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stack {
    /// The layers, the lowest first.
    pub layers: Vec<Layer>,
    pub limits: ImportLimits,
    /// For messages: where images lie.
    pub store: PathBuf,
}

/// The files of a [`Stack`].
#[derive(Debug)]
pub struct Files {
    /// The image below; `None` is nothing.
    pub base: Option<Rootfs>,
    pub layers: Vec<File>,
}

impl Stack {
    /// All of it.
    fn rootfs(
        &self,
        files: Files,
        room: Room,
        progress: &mut dyn Progress,
    ) -> Result<RootfsBuilder<'_>> {
        let limits = &self.limits;
        let area = DataArea::new(room.image, room.spool, limits);
        let mut rootfs = match files.base {
            Some(base) => RootfsBuilder::over(base, area, limits, &self.store)?,
            None => RootfsBuilder::new(area, limits, &self.store),
        };
        let mut spent = Spent::default();
        let count = self.layers.len();
        for (index, (known, mut file)) in self.layers.iter().zip(files.layers).enumerate() {
            progress.event(ProgressEvent::Layer { index, count, bytes: Some(known.blob_bytes) });
            let what = format!("layer {} of {count}", index + 1);
            file.rewind().map_err(|error| ImageError::io(format!("cannot read {what}"), error))?;
            let blob = Some((known.blob, known.blob_bytes));
            let diff_id = Some(known.diff_id);
            let check = LayerCheck { what, blob, diff_id, has_marks: true };
            layers::apply(&mut rootfs, &mut file, &check, &mut spent, progress)?;
        }
        Ok(rootfs)
    }
}

/// Makes the image with the configuration `document` in `room`, where it can be as what it has over
/// the image below.
///
/// # Errors
/// What is wrong with what it is made of, or with the disk.
pub fn compose(
    stack: &Stack,
    document: &str,
    files: Files,
    room: Room,
    progress: &mut dyn Progress,
) -> Result<(Image, Form)> {
    let rootfs = stack.rootfs(files, room, progress)?;
    progress.event(ProgressEvent::Finishing);
    let image = Image::read(document.as_bytes().to_vec(), None)?;
    let form = rootfs.finish_over(&image.id)?;
    Ok((image, form))
}

/// Keeps the tar stream `from` as a layer in the empty file `to`, if it can be one.
///
/// # Errors
/// What is wrong with it, or with the disk.
pub fn keep(from: &mut dyn Read, to: &mut File, limits: &ImportLimits) -> Result<Layer> {
    let mut writer = LayerWriter::new(to, limits)?;
    let mut tar = TarReader::new(Tee { from, to: &mut writer }, limits);
    let mut entries = 0u64;
    while tar.next_entry()?.is_some() {
        entries += 1;
        if entries > limits.entries_max {
            let what = "the number of files of a layer";
            return Err(ImageError::limit(what, "entries_max", limits.entries_max));
        }
    }
    tar.drain()?;
    writer.finish()
}

/// Takes the files of the tar stream `from` into `room`, to be copied from.
///
/// # Errors
/// What is wrong with it, or with the disk.
pub fn take(
    from: &mut dyn Read,
    room: Room,
    stack: &Stack,
    progress: &mut dyn Progress,
) -> Result<()> {
    let limits = &stack.limits;
    let area = DataArea::new(room.image, room.spool, limits);
    let mut rootfs = RootfsBuilder::new(area, limits, &stack.store);
    layers::apply_files(&mut rootfs, from, "the build context", progress)?;
    rootfs.finish(&Digest::of(b"")).map(drop)
}

/// Writes a layer to a file, compressed, and finds what it is called.
struct LayerWriter<'a> {
    stream: HashingWriter<zstd::Encoder<'static, Blob<'a>>>,
    bytes_max: u64,
}

type Blob<'a> = HashingWriter<BufWriter<Reserving<'a>>>;

impl<'a> LayerWriter<'a> {
    fn new(to: &'a mut File, limits: &ImportLimits) -> Result<Self> {
        let blob =
            HashingWriter::new(BufWriter::with_capacity(128 << 10, Reserving::new(to, limits)));
        let encoder = zstd::Encoder::new(blob, ZSTD_LEVEL)
            .map_err(|error| ImageError::io("cannot compress a layer", error))?;
        Ok(Self { stream: HashingWriter::new(encoder), bytes_max: limits.bytes_max })
    }

    fn finish(self) -> Result<Layer> {
        let failed = |error| ImageError::io("cannot write a layer", error);
        let bytes = self.stream.byte_count();
        let (diff_id, encoder) = self.stream.finish();
        let mut blob = encoder.finish().map_err(failed)?;
        blob.flush().map_err(failed)?;
        let blob_bytes = blob.byte_count();
        let (blob, _) = blob.finish();
        Ok(Layer { diff_id, bytes, blob, blob_bytes })
    }
}

impl Write for LayerWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.stream.byte_count().saturating_add(bytes.len() as u64) > self.bytes_max {
            return Err(ImageError::limit("a layer", "bytes_max", self.bytes_max).into());
        }
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Reads, and writes what was read.
struct Tee<'a, W> {
    from: &'a mut dyn Read,
    to: &'a mut W,
}

impl<W: Write> Read for Tee<'_, W> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        self.to.write_all(&buffer[..count])?;
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
