//! Images for cells: OCI and docker images, and plain directories, become one
//! erofs file system each, in a content-addressed [`Store`].
//!
//! The way of an image: [`Store::import`] makes a plan of what a [`Source`]
//! holds, applies its layers to a file tree in memory while the bytes of files
//! stream into the erofs image (nothing is extracted to the host's file
//! system and no privilege is needed), checks all digests, and publishes the
//! image by a rename. A cell uses it through [`Store::open_rootfs`].
//!
//! Every image is hostile: [`ImportLimits`] bounds what an import may cost.
#![forbid(unsafe_code)]

mod archive;
pub mod build;
pub mod compose;
mod config;
mod digest;
mod disk;
pub mod dockerfile;
mod erofs;
mod error;
mod extract;
mod layer;
mod limits;
mod pack;
pub mod private;
mod progress;
mod reference;
mod rootfs;
mod source;
mod store;
mod tar;
mod tree;
pub mod walk;

/// How long a registry may send nothing of an image.
pub const STALL_MAX: std::time::Duration = std::time::Duration::from_secs(60);

pub use archive::{archive, context};
pub use config::{Healthcheck, ImageConfig, Note, document_over};
pub use digest::{Digest, Hashing};
pub use disk::Reserve;
pub use erofs::{Piece, Rootfs};
pub use error::{Fault, ImageError, Refusal, Result};
pub use extract::extract;
pub use layer::unzip;
pub use limits::ImportLimits;
pub use pack::{Packed, pack};
pub use progress::{Progress, ProgressEvent, Silent};
pub use reference::Reference;
pub use source::{
    Connection, Credentials, Grant, Judge, Looked, Platform, ProxyOptions, Pushed, RegistryOptions,
    Source, layout_server, log_in, look, present, push, registry_server, version,
};
pub use store::{Draft, ImageRecord, Store};
pub use tar::{FirstEntry, first_entry, pass};
