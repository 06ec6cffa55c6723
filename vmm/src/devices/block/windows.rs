//! More files behind one read-only disk, which come and go while the guest runs.
//!
//! ```text
//! the disk: [ its own file ........ | window 1: a file | window 2 | ... ]
//!            0                       1 TiB              2 TiB
//! ```
//! No device can be plugged into a guest that runs. So the disk is as large as all windows, and a
//! file appears in the next one that nobody had: what the guest keeps of one that is gone is never
//! taken for another's. What is in no file fails.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Contents;
use super::request::SECTOR;
use crate::devices::DeviceError;

/// The windows of one disk; clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Windows {
    opened: Arc<Mutex<Opened>>,
}

#[derive(Debug, Default)]
struct Opened {
    /// How many there were.
    count: u64,
    /// By the window's number, with its sectors.
    files: BTreeMap<u64, (Arc<Contents>, u64)>,
}

/// A file that the guest sees, until this is dropped.
#[derive(Debug)]
pub struct Window {
    number: u64,
    windows: Windows,
    /// Where the guest has it on the disk.
    pub offset_bytes: u64,
    pub length_bytes: u64,
}

impl Windows {
    /// From one to the next.
    pub const WINDOW_BYTES: u64 = 1 << 40;
    /// With the disk's own, which is number 0; the bytes of all of them fit an i64.
    const COUNT: u64 = 1 << 22;
    /// The disk's size.
    pub(super) const SECTORS: u64 = Self::WINDOW_BYTES / SECTOR * Self::COUNT;

    /// Shows `contents` to the guest.
    ///
    /// # Errors
    /// It has no sector, or does not fit; or there were too many.
    pub fn open(&self, contents: impl Into<Contents>) -> Result<Window, DeviceError> {
        let contents = contents.into();
        let (bytes, sectors) = (contents.bytes()?, contents.sectors()?);
        let mut opened = self.lock();
        let number = opened.count + 1;
        if bytes > Self::WINDOW_BYTES || number >= Self::COUNT {
            return Err(DeviceError::NoWindow { bytes });
        }
        opened.count = number;
        opened.files.insert(number, (Arc::new(contents), sectors));
        drop(opened);
        let offset_bytes = number * Self::WINDOW_BYTES;
        Ok(Window { number, windows: self.clone(), offset_bytes, length_bytes: sectors * SECTOR })
    }

    /// The file in window `number`, and how many sectors it has.
    pub(super) fn find(&self, number: u64) -> Option<(Arc<Contents>, u64)> {
        self.lock().files.get(&number).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Opened> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.windows.lock().files.remove(&self.number);
    }
}

/// The window that byte `at` of the disk is in, and where in it; `None` in the disk's own file.
pub(super) fn place(at: u64, windows: Option<&Windows>) -> Option<(u64, u64)> {
    windows?;
    let number = at / Windows::WINDOW_BYTES;
    (number > 0).then_some((number, at % Windows::WINDOW_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_nobodys_again_and_never_anothers() {
        let windows = Windows::default();
        let file = || {
            let file = tempfile::tempfile().unwrap();
            file.set_len(1000).unwrap();
            file
        };
        let first = windows.open(file()).unwrap();
        let second = windows.open(file()).unwrap();
        assert_eq!((first.offset_bytes, first.length_bytes), (1 << 40, 512));
        assert_eq!(second.offset_bytes, 2 << 40);
        assert!(windows.find(1).is_some_and(|(_, sectors)| sectors == 1));
        drop(first);
        assert!(windows.find(1).is_none() && windows.find(2).is_some());
        assert_eq!(windows.open(file()).unwrap().offset_bytes, 3 << 40);
        assert!(windows.open(tempfile::tempfile().unwrap()).is_err());
        assert!(i64::try_from(Windows::SECTORS * SECTOR).is_ok());
    }

    #[test]
    fn a_place_lies_in_one_window() {
        let windows = Windows::default();
        let at = |at| place(at, Some(&windows));
        assert_eq!(at(0), None);
        assert_eq!(at((1 << 40) - 512), None);
        assert_eq!(at(3 << 40), Some((3, 0)));
        assert_eq!(at((4 << 40) - 512), Some((3, (1 << 40) - 512)));
        assert_eq!(place(3 << 40, None), None);
    }
}
