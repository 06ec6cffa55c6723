//! What a disk holds: a file, or pieces of several, each at the same place as on the disk.

use std::fs::File;
use std::io;

use super::request::SECTOR;
use crate::devices::DeviceError;
use crate::devices::sys;
use crate::devices::transport::buffers::Buffers;

/// The bytes of a disk. Its length is rounded down to whole sectors of 512 bytes; no file may
/// shrink.
#[derive(Debug)]
pub struct Contents {
    files: Vec<File>,
    /// Where each piece begins, in bytes, and the file that it is of. It ends where the next begins.
    pieces: Vec<(u64, usize)>,
    /// Of all pieces; of one file its own.
    bytes: Option<u64>,
}

impl From<File> for Contents {
    fn from(file: File) -> Self {
        Self { files: vec![file], pieces: vec![(0, 0)], bytes: None }
    }
}

/// Bytes of a page.
const PAGE: u64 = 4096;

/// Pages of files that make up a disk.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    pub files: &'a [File],
    /// Where each piece begins, in bytes, and the file that it is of.
    pub pieces: &'a [(u64, usize)],
    /// Of all, whole pages.
    pub bytes: u64,
}

impl Pages<'_> {
    /// As many as the guest kernel takes (IMAGE_FILES_MAX and PIECES_MAX of the patched kernel).
    pub const FILES_MAX: usize = 32;
    pub const PIECES_MAX: usize = 256;
}

impl Contents {
    /// What `pieces` say of `files`, `bytes` in all.
    ///
    /// # Errors
    /// The first does not begin the disk, one begins before another ends, or it is of no file.
    pub fn pieced(
        files: Vec<File>,
        pieces: Vec<(u64, usize)>,
        bytes: u64,
    ) -> Result<Self, DeviceError> {
        let is_sorted = pieces.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let is_of_files = pieces.iter().all(|(_, file)| *file < files.len());
        let begins = pieces.first().is_some_and(|(start, _)| *start == 0);
        match is_sorted && is_of_files && begins {
            true => Ok(Self { files, pieces, bytes: Some(bytes) }),
            false => Err(DeviceError::DiskTooSmall { bytes: 0 }),
        }
    }

    /// All of it as pages of files, if it is nothing else, and of few enough files and pieces.
    pub fn pages(&self) -> Option<Pages<'_>> {
        let bytes = self.bytes().ok()?.next_multiple_of(PAGE);
        let lengths: Option<Vec<u64>> =
            self.files.iter().map(|file| Some(file.metadata().ok()?.len())).collect();
        let lengths = lengths?;
        // A piece ends where the next one begins.
        let ends = self.pieces.windows(2).map(|pair| pair[1].0).chain([bytes]);
        let are_whole = self.pieces.iter().zip(ends).all(|((start, file), end)| {
            // What is behind a file's end in its last page reads as zeros.
            start % PAGE == 0 && end <= lengths[*file].next_multiple_of(PAGE)
        });
        let are_few =
            self.files.len() <= Pages::FILES_MAX && self.pieces.len() <= Pages::PIECES_MAX;
        let pages = Pages { files: &self.files, pieces: &self.pieces, bytes };
        (are_whole && are_few && bytes > 0).then_some(pages)
    }

    /// Where there is one file: that.
    pub fn only(&self) -> Option<&File> {
        match &self.files[..] {
            [only] => Some(only),
            _ => None,
        }
    }

    /// How long the disk is, in bytes.
    pub(super) fn bytes(&self) -> Result<u64, DeviceError> {
        let measured = |file: &File| file.metadata().map(|found| found.len());
        match (self.bytes, self.files.first()) {
            (Some(bytes), _) => Ok(bytes),
            (None, Some(file)) => measured(file).map_err(DeviceError::host("look at a disk file")),
            (None, None) => Ok(0),
        }
    }

    /// The same in sectors.
    pub(super) fn sectors(&self) -> Result<u64, DeviceError> {
        let bytes = self.bytes()?;
        match bytes / SECTOR {
            0 => Err(DeviceError::DiskTooSmall { bytes }),
            sectors => Ok(sectors),
        }
    }

    /// Reads from `at` on into all of `to`; a file that ends before has shrunk.
    pub(super) fn read(&self, mut at: u64, to: &mut Buffers<'_>) -> io::Result<()> {
        while !to.is_empty() {
            let next = self.pieces.partition_point(|(start, _)| *start <= at);
            let end = self.pieces.get(next).map_or(u64::MAX, |(start, _)| *start);
            let count = usize::try_from(end - at).unwrap_or(usize::MAX);
            // The first piece begins at 0.
            let file = &self.files[self.pieces[next - 1].1];
            if count >= to.len() {
                return read_all(file, at, to);
            }
            read_all(file, at, &mut to.take(count))?;
            at = end;
        }
        Ok(())
    }
}

fn read_all(file: &File, mut at: u64, to: &mut Buffers<'_>) -> io::Result<()> {
    while !to.is_empty() {
        let done = sys::read_at(file, to.slices(), at)?;
        if done == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at += to.take(done).len() as u64;
    }
    Ok(())
}
