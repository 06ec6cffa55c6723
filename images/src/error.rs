//! Everything that can go wrong with an image, in words for its user.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Digest;

/// Result of an image operation.
pub type Result<T> = std::result::Result<T, ImageError>;

/// Why an image operation failed. Nothing is left in the store by a failure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error("no space left in the image store {}: free some space, or run `image prune`", .path.display())]
    StoreFull { path: PathBuf },
    #[error("the image store {} cannot be read: {why}; restore its index.json or empty the store", .path.display())]
    StoreCorrupt { path: PathBuf, why: String },
    #[error("the image {id} is damaged ({why}); exocell image rm {id}, and import it again")]
    Damaged { id: Digest, why: String },
    #[error(
        "{what} is corrupt: its digest is {found}, not {expected}; fetch or save the image again"
    )]
    DigestMismatch { what: String, expected: Digest, found: Digest },
    #[error(
        "{what} is {found} bytes long, not the {expected} its manifest says; fetch or save the image again"
    )]
    SizeMismatch { what: String, expected: u64, found: u64 },
    #[error("{whose}: stat {path}: file does not exist")]
    NotInSource { whose: &'static str, path: String },
    #[error("{what} is malformed: {why}")]
    Malformed { what: String, why: String },
    #[error("`{path}` leaves the image: {why}; rebuild the image without it")]
    UnsafePath { path: String, why: &'static str },
    #[error(
        "nothing came of the image for {} seconds; look whether the registry is reachable, and try again",
        crate::STALL_MAX.as_secs()
    )]
    Stalled,
    #[error("`{path}` goes through a loop of symbolic links; rebuild the image without it")]
    LinkLoop { path: String },
    #[error("`{path}` is a hard link to `{target}`, {why}; rebuild the image without it")]
    BadHardLink { path: String, target: String, why: &'static str },
    #[error(
        "`{path}` lies under `{parent}`, which is not a directory; rebuild the image without it"
    )]
    ParentNotDirectory { path: String, parent: String },
    #[error(
        "`{path}` is a device node, which an image must not hold: a cell has its own /dev; rebuild the image without it"
    )]
    DeviceNode { path: String },
    #[error("{what} is over the import limit {limit} = {max}; make an image with less")]
    LimitExceeded { what: String, limit: &'static str, max: u64 },
    #[error(
        "{what} unpacks to more than {ratio_max} times its size after {bytes} bytes: a decompression bomb; if it is none, save it without compression"
    )]
    Bomb { what: String, ratio_max: u64, bytes: u64 },
    #[error("the image is for {found}; cells run linux/amd64 images only, get that variant")]
    WrongPlatform { found: String },
    #[error("{what} is not supported: {why}")]
    Unsupported { what: String, why: String },
    #[error("the image {id} was removed while it was imported; import it again")]
    Gone { id: Digest },
    #[error("{} is not an image: {why}", .path.display())]
    NotAnImage { path: PathBuf, why: String },
    #[error("{} holds several images ({names}); name one of them", .path.display())]
    SeveralImages { path: PathBuf, names: String },
    #[error("`{reference}` is not an image name: {why}")]
    BadReference { reference: String, why: &'static str },
    #[error(
        "no image `{name}` in the store; `image ls` lists what there is, `image pull` or `image import` adds one"
    )]
    NotFound { name: String },
    #[error("`{name}` is the beginning of more than one image id; give more digits")]
    AmbiguousId { name: String },
    #[error("the image {id} is in use by a cell; remove the cell first")]
    InUse { id: Digest },
    #[error(
        "the image {id} has several names ({tags}); remove them one by one, or remove it with force"
    )]
    SeveralTags { id: Digest, tags: String },
    #[error(
        "the registry {registry} gives no access to {what}: {why}; check the name and the credentials"
    )]
    Unauthorized { registry: String, what: String, why: String },
    #[error("the registry {registry} has no {what}; check the name and the tag")]
    NotInRegistry { registry: String, what: String },
    #[error("the registry {registry} failed for {what}: {why}")]
    Registry { registry: String, what: String, why: String },
    /// What another process said.
    #[error("{}", .0.message)]
    Refused(Refusal),
}

/// An error that came from another process: for whom it is, and in what words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub fault: Fault,
    pub message: String,
}

/// Whose fault something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// The image is not what it should be.
    Image,
    /// The registry has no such image.
    NotInRegistry,
    /// The registry gives no access to it.
    Unauthorized,
    /// Something else, on the way or here.
    Other,
}

impl ImageError {
    /// What is told of it to another process.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        let fault = match self {
            Self::Refused(refusal) => return refusal.clone(),
            Self::NotInRegistry { .. } => Fault::NotInRegistry,
            Self::Unauthorized { .. } => Fault::Unauthorized,
            Self::BadReference { .. }
            | Self::NotAnImage { .. }
            | Self::NotInSource { .. }
            | Self::Malformed { .. } => Fault::Image,
            _ => Fault::Other,
        };
        Refusal { fault, message: self.to_string() }
    }

    /// Wraps an I/O error that happened during `what`; an [`ImageError`] that
    /// travelled inside one comes out as itself.
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        match source.downcast::<ImageError>() {
            Ok(inner) => inner,
            Err(source) => Self::Io { what: what.into(), source },
        }
    }

    /// Like [`ImageError::io`] for writes below the store at `path`.
    pub(crate) fn store(path: &Path, source: io::Error) -> Self {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match source.kind() {
            StorageFull | QuotaExceeded => Self::StoreFull { path: path.to_path_buf() },
            _ => Self::io(format!("cannot write {}", path.display()), source),
        }
    }

    /// Like [`ImageError::io`] for reads of `path`.
    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        Self::io(format!("cannot read {}", path.display()), source)
    }

    pub(crate) fn malformed(what: impl Into<String>, why: impl ToString) -> Self {
        Self::Malformed { what: what.into(), why: why.to_string() }
    }

    pub(crate) fn limit(what: impl Into<String>, limit: &'static str, max: u64) -> Self {
        Self::LimitExceeded { what: what.into(), limit, max }
    }
}

impl From<ImageError> for io::Error {
    fn from(error: ImageError) -> Self {
        io::Error::other(error)
    }
}

/// Untrusted bytes as text for a message: escaped and cut to a line.
pub(crate) fn shown(bytes: &[u8]) -> String {
    const SHOWN_BYTES_MAX: usize = 120;
    let cut = bytes.get(..SHOWN_BYTES_MAX).unwrap_or(bytes);
    let ellipsis = if cut.len() < bytes.len() { "..." } else { "" };
    format!("{}{ellipsis}", String::from_utf8_lossy(cut).escape_debug())
}
