//! A writer of uncompressed erofs file systems (Linux fs/erofs/erofs_fs.h).
//!
//! File data is written first, as it arrives ([`DataArea`]); the rest follows
//! when the tree is complete ([`finish`]):
//!
//! ```text
//! block 0      | data of files | whole directory blocks | metadata
//! (superblock) | (holes stay)  |                        | (inodes, xattrs, tails)
//! ```
//!
//! The image file is sparse: blocks of zeros, and blocks of files that an
//! upper layer replaced, take no space. The same input gives the same bytes.
//! What changes little of an image is a file over its files ([`Rootfs`]).

mod data;
mod delta;
mod device;
mod directory;
mod format;
mod meta;
mod read;
mod slots;
mod xattr;

pub(crate) use data::DataArea;
pub(crate) use delta::finish as finish_delta;
pub use device::{Piece, Rootfs};
pub(crate) use meta::finish;
pub(crate) use read::{Content, Reader, Shape, extents};
pub(crate) use xattr::{body_bytes as xattr_bytes, is_kept as xattr_is_kept};
