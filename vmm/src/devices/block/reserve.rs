//! What a disk leaves of the host's: its file is sparse, and what it may grow to may be more than
//! the host has.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use nix::unistd::{Whence, lseek};

/// What stays free of a file system: a hundredth, between these bounds. The import of images
/// leaves more, so that it ends first.
const BYTES_MIN: u64 = 64 << 20;
const BYTES_MAX: u64 = 1 << 30;
/// What is written at most between two looks at the file system.
const STRIDE_BYTES: u64 = 4 << 20;

/// The guard of one disk.
#[derive(Default)]
pub(super) struct Reserve {
    /// How much may be written before the next look.
    allowed: Cell<u64>,
}

/// How full a file system is, in bytes.
#[derive(Debug, Clone, Copy)]
struct Space {
    all: u64,
    free: u64,
}

impl Space {
    fn of(file: &File) -> io::Result<Self> {
        let found = nix::sys::statfs::fstatfs(file.as_fd())?;
        let block = u64::try_from(found.block_size()).unwrap_or(0);
        let bytes = |blocks: u64| blocks.saturating_mul(block);
        Ok(Self { all: bytes(found.blocks()), free: bytes(found.blocks_available()) })
    }

    /// What may be taken of it.
    fn left(self) -> u64 {
        match self.all {
            // In memory, where nothing bounds the file system.
            0 => u64::MAX,
            all => self.free.saturating_sub((all / 100).clamp(BYTES_MIN, BYTES_MAX)),
        }
    }
}

impl Reserve {
    /// Whether `len` bytes may be written to `file` at `at`. Where the file has them already, they
    /// always may: a host that others have filled breaks no disk that does not grow.
    ///
    /// # Errors
    /// They may not ([`io::ErrorKind::StorageFull`]).
    pub fn take(&self, file: &File, at: u64, len: u64) -> io::Result<()> {
        if let Some(rest) = self.allowed.get().checked_sub(len) {
            self.allowed.set(rest);
            return Ok(());
        }
        // What cannot be asked is no reason to refuse: the host refuses what does not fit.
        let left = Space::of(file).map_or(u64::MAX, Space::left);
        match left >= len {
            // Many disks may look at the same time.
            true => self.allowed.set((left / 64).min(STRIDE_BYTES)),
            false if !is_there(file, at, len) => return Err(io::ErrorKind::StorageFull.into()),
            false => {}
        }
        Ok(())
    }
}

/// Whether `file` has room of the host's for all of these bytes.
fn is_there(file: &File, at: u64, len: u64) -> bool {
    let hole = i64::try_from(at).map(|at| lseek(file, at, Whence::SeekHole));
    matches!(hole, Ok(Ok(hole)) if u64::try_from(hole).is_ok_and(|hole| hole >= at + len))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_part_of_the_file_system_is_nobodys() {
        let left = |all, free| Space { all, free }.left();
        assert_eq!(left(10 << 30, 9 << 30), (9 << 30) - (10 << 30) / 100);
        assert_eq!(left(200 << 20, 100 << 20), 36 << 20);
        assert_eq!(left(200 << 20, 64 << 20), 0);
        assert_eq!(left(1 << 50, 1 << 30), 0);
        assert_eq!(left(1 << 50, (1 << 30) + 7), 7);
        assert_eq!(left(0, 0), u64::MAX);
    }

    #[test]
    fn what_is_written_again_takes_nothing() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[1; 64 << 10], 128 << 10).unwrap();
        assert!(is_there(&file, 128 << 10, 64 << 10));
        assert!(is_there(&file, 132 << 10, 512));
        assert!(!is_there(&file, 128 << 10, 128 << 10));
        assert!(!is_there(&file, 0, 512));
        let reserve = Reserve::default();
        reserve.take(&file, 0, 512).unwrap();
        let left = reserve.allowed.get();
        assert!(left <= STRIDE_BYTES, "{left}");
    }
}
