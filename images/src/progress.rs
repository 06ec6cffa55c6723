//! What an import tells its caller while it works.

use crate::Digest;

/// One step of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProgressEvent<'a> {
    /// Layer `index` of `count` begins; `bytes` is its packed size if known.
    Layer { index: usize, count: usize, bytes: Option<u64> },
    /// So many packed bytes more were read.
    Bytes(u64),
    /// Something was left out of the image, and why.
    Skipped { path: &'a str, why: &'a str },
    /// The image is in the store already; nothing is read again.
    Present { id: Digest },
    /// All content is read; the file system is being finished.
    Finishing,
}

/// Receives the steps of an import.
pub trait Progress {
    fn event(&mut self, event: ProgressEvent<'_>);
}

/// Ignores every step.
#[derive(Debug, Default, Clone, Copy)]
pub struct Silent;

impl Progress for Silent {
    fn event(&mut self, _event: ProgressEvent<'_>) {}
}

impl<F: FnMut(ProgressEvent<'_>)> Progress for F {
    fn event(&mut self, event: ProgressEvent<'_>) {
        self(event);
    }
}
