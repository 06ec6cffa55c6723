//! Applies one layer: a tar stream, packed or not, with digests to keep.

mod unpack;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::digest::{self, Hashing};
use crate::disk::Reserve;
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::progress::{Progress, ProgressEvent};
use crate::rootfs::RootfsBuilder;
use crate::tar::{EntryKind, TarEntry, TarReader};
use crate::tree::Kind;
pub(crate) use unpack::Spent;
use unpack::{Guard, unpack};

/// A layer that was made here, as its file holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Digest of the tar stream.
    pub diff_id: Digest,
    pub bytes: u64,
    /// Digest and length of the file, which holds the stream, compressed or not.
    pub blob: Digest,
    pub blob_bytes: u64,
}

/// Whether a file is compressed as a whole.
pub(crate) fn is_packed(file: &File) -> Result<bool> {
    let mut magic = [0; 4];
    let failed = |error| ImageError::io("cannot read the archive", error);
    let count = file.read_at(&mut magic, 0).map_err(failed)?;
    Ok(unpack::is_packed(&magic[..count]))
}

/// Unpacks a stream that was compressed with gzip, for somebody who counts what comes.
///
/// # Errors
/// What is wrong with it, or with whoever takes it.
pub fn unzip(from: &mut dyn Read, to: &mut dyn Write) -> Result<()> {
    let copied = std::io::copy(&mut flate2::read::MultiGzDecoder::new(from), to);
    copied.map(drop).map_err(|error| ImageError::io("cannot unpack the archive", error))
}

/// Unpacks what is compressed as a whole.
pub(crate) fn unpack_whole(
    from: &mut dyn BufRead,
    to: &mut File,
    limits: &ImportLimits,
) -> Result<()> {
    let (what, nothing) = ("the archive", Spent::default());
    let mut guard = Guard::new(unpack(from, what)?, what, limits, &nothing, None);
    let mut to = Reserving::new(to, limits);
    let copied = std::io::copy(&mut guard, &mut to);
    copied.map(drop).map_err(|error| ImageError::io("cannot unpack the archive", error))
}

/// Writes as long as the disk has room.
pub(crate) struct Reserving<'a> {
    reserve: Reserve,
    to: &'a mut File,
}

impl<'a> Reserving<'a> {
    pub fn new(to: &'a mut File, limits: &ImportLimits) -> Self {
        Self { reserve: Reserve::new(limits), to }
    }
}

impl Write for Reserving<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.reserve.spend(self.to, bytes.len())?;
        self.to.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// Names that begin with this are marks, not files (OCI image-spec, layer.md).
pub(crate) const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const WHITEOUT_OWN: &[u8] = b".wh..wh.";

/// What a layer must turn out to be.
#[derive(Debug, Clone)]
pub(crate) struct LayerCheck {
    /// For messages: `layer 1 of 3`.
    pub what: String,
    /// Digest and size of the blob as it is stored, if the input names them.
    pub blob: Option<(Digest, u64)>,
    /// Digest of the unpacked tar stream, if it is known.
    pub diff_id: Option<Digest>,
    /// Whether it says of what is below it what is hidden; else it is all that there is.
    pub has_marks: bool,
}

/// Refuses a name that no image can hold: in a layer it would hide another file.
pub(crate) fn check_name(path: &[u8]) -> Result<()> {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    if !name.starts_with(WHITEOUT) {
        return Ok(());
    }
    let why = "its name begins with `.wh.`, which hides another file in an image";
    Err(ImageError::UnsafePath { path: shown(path), why })
}

/// Reads all of `stream` into `rootfs` and checks it; the digest of the unpacked
/// tar stream. `spent` counts what all layers come to.
pub(crate) fn apply(
    rootfs: &mut RootfsBuilder<'_>,
    stream: &mut dyn Read,
    check: &LayerCheck,
    spent: &mut Spent,
    progress: &mut dyn Progress,
) -> Result<Digest> {
    let limits = rootfs.limits();
    // One byte more than promised is enough to tell that it is longer.
    let size_max = check.blob.map_or(u64::MAX, |(_, size)| size.saturating_add(1));
    let mut blob = Hashing::new(Counted { inner: stream.take(size_max), progress });
    let mut packed = BufReader::with_capacity(128 << 10, &mut blob);
    let unpacked = unpack(&mut packed, &check.what)?;
    let guard = Guard::new(unpacked, &check.what, limits, spent, check.diff_id);
    let mut tar = TarReader::new(Hashing::new(guard), limits);
    rootfs.begin_layer();
    let applied = apply_entries(rootfs, &mut tar, check).and_then(|()| tar.drain());
    let hashed = tar.into_inner();
    let (diff_id, unpacked_bytes) = (hashed.digest(), hashed.byte_count());
    let packed_bytes = hashed.inner().packed();
    drop(hashed);
    if let Err(error @ (ImageError::Malformed { .. } | ImageError::Io { .. })) = applied {
        // A blob that is not what its digest says is the better explanation.
        if std::io::copy(&mut packed, &mut std::io::sink()).is_ok() {
            drop(packed);
            check_blob(&blob, check)?;
        }
        return Err(named(error, &check.what));
    }
    applied?;
    let drained = std::io::copy(&mut packed, &mut std::io::sink());
    drop(packed);
    drained.map_err(|error| ImageError::io(format!("cannot read {}", check.what), error))?;
    check_blob(&blob, check)?;
    if let Some(expected) = check.diff_id {
        digest::expect(format!("{} (unpacked)", check.what), expected, diff_id)?;
    }
    spent.add(diff_id, unpacked_bytes, packed_bytes);
    Ok(diff_id)
}

/// Reads the files of an archive into `rootfs` as they are: no name in it is a mark.
pub(crate) fn apply_files(
    rootfs: &mut RootfsBuilder<'_>,
    stream: &mut dyn Read,
    what: &str,
    progress: &mut dyn Progress,
) -> Result<()> {
    let (limits, nothing) = (rootfs.limits(), Spent::default());
    let mut packed = BufReader::with_capacity(128 << 10, Counted { inner: stream, progress });
    let guard = Guard::new(unpack(&mut packed, what)?, what, limits, &nothing, None);
    let mut tar = TarReader::new(guard, limits);
    rootfs.begin_layer();
    while let Some(entry) = tar.next_entry().map_err(|error| named(error, what))? {
        rootfs.count_entry()?;
        apply_file(rootfs, entry, &mut tar).map_err(|error| named(error, what))?;
    }
    tar.drain()
}

/// What a stream unpacks to that is an archive, as a whole or in parts.
pub(crate) fn unpacked<'a>(
    stream: impl Read + 'a,
    what: &str,
    limits: &'a ImportLimits,
    nothing: &'a Spent,
) -> Result<impl Read + 'a> {
    const NAME: &str = "the archive";
    let packed = BufReader::with_capacity(128 << 10, stream);
    Ok(Guard::new(unpack(packed, what)?, NAME, limits, nothing, None))
}

fn check_blob<R: Read>(blob: &Hashing<R>, check: &LayerCheck) -> Result<()> {
    let Some((expected, size)) = check.blob else { return Ok(()) };
    if blob.byte_count() != size {
        let what = check.what.clone();
        return Err(ImageError::SizeMismatch { what, expected: size, found: blob.byte_count() });
    }
    digest::expect(check.what.clone(), expected, blob.digest())
}

/// Says in which layer a malformed thing was met.
fn named(error: ImageError, layer: &str) -> ImageError {
    match error {
        ImageError::Malformed { what, why } => {
            ImageError::malformed(format!("{what} in {layer}"), why)
        }
        ImageError::Io { what, source } => {
            ImageError::Io { what: format!("{layer}: {what}"), source }
        }
        other => other,
    }
}

fn apply_entries<R: Read>(
    rootfs: &mut RootfsBuilder<'_>,
    tar: &mut TarReader<R>,
    check: &LayerCheck,
) -> Result<()> {
    while let Some(entry) = tar.next_entry()? {
        rootfs.count_entry()?;
        if !check.has_marks {
            check_name(&entry.path)?;
        }
        apply_entry(rootfs, entry, tar)?;
    }
    Ok(())
}

fn apply_entry(
    rootfs: &mut RootfsBuilder<'_>,
    entry: TarEntry,
    content: &mut dyn Read,
) -> Result<()> {
    if apply_mark(rootfs, &entry.path)? {
        return Ok(());
    }
    apply_file(rootfs, entry, content)
}

fn apply_file(
    rootfs: &mut RootfsBuilder<'_>,
    entry: TarEntry,
    content: &mut dyn Read,
) -> Result<()> {
    let TarEntry { path, kind, meta } = entry;
    match kind {
        EntryKind::File { size, extents } => rootfs.add_file(&path, meta, size, &extents, content),
        EntryKind::Directory => rootfs.add(&path, meta, Kind::Directory(Default::default())),
        EntryKind::Symlink(target) => rootfs.add(&path, meta, Kind::Symlink(target.into())),
        EntryKind::HardLink(target) => rootfs.add_hard_link(&path, &target),
        EntryKind::Fifo => rootfs.add(&path, meta, Kind::Fifo),
        // overlayfs' own form of a whiteout.
        EntryKind::Device { char: true, major: 0, minor: 0 } => rootfs.hide(&path),
        EntryKind::Device { .. } => Err(ImageError::DeviceNode { path: shown(&path) }),
    }
}

/// Acts on a whiteout; false if the path is no such mark.
fn apply_mark(rootfs: &mut RootfsBuilder<'_>, path: &[u8]) -> Result<bool> {
    let start = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let (above, name) = path.split_at(start);
    let Some(hidden) = name.strip_prefix(WHITEOUT) else { return Ok(false) };
    if name == OPAQUE {
        rootfs.hide_siblings(path)?;
    } else if matches!(hidden, b"" | b"." | b"..") {
        let why = "it hides no file of its directory";
        return Err(ImageError::UnsafePath { path: shown(path), why });
    } else if !name.starts_with(WHITEOUT_OWN) {
        rootfs.hide(&[above, hidden].concat())?;
    }
    Ok(true)
}

/// Reports bytes as they are read.
struct Counted<'a, R> {
    inner: R,
    progress: &'a mut dyn Progress,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.progress.event(ProgressEvent::Bytes(count as u64));
        Ok(count)
    }
}
