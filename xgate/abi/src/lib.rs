//! Numbers that hosts and guests share: handles, kinds, rights, status codes.
//!
//! This crate is a leaf: no standard library, no project crate. The same numbers are
//! emitted as a C header ([`write_c_header`]) for code that is not Rust; a test holds
//! the checked-in copy `include/exocell_abi.h` equal to it.

#![forbid(unsafe_code)]
#![no_std]

mod handle;
mod header;
mod kind;
mod rights;
mod status;

pub use handle::Handle;
pub use header::write_c_header;
pub use kind::Kind;
pub use rights::Rights;
pub use status::Status;

/// Version of these numbers. A change to any of them raises it.
pub const ABI_VERSION: u32 = 1;
