//! Room on the disk that imports, and others that take in much, leave free.

use std::fs::File;
use std::io;

use crate::limits::ImportLimits;

/// Written between two looks at the disk.
const LOOK_BYTES: u64 = 256 << 10;

/// Refuses writes that would leave less than a part of the disk free.
#[derive(Debug)]
pub struct Reserve {
    max: u64,
    unseen: u64,
}

impl Reserve {
    /// Leaves as much as `limits` say.
    pub fn new(limits: &ImportLimits) -> Self {
        Self { max: limits.disk_free_bytes, unseen: LOOK_BYTES }
    }

    /// To be asked before `bytes` are written to `file`.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`].
    pub fn spend(&mut self, file: &File, bytes: usize) -> io::Result<()> {
        self.unseen = self.unseen.saturating_add(bytes as u64);
        if self.unseen < LOOK_BYTES {
            return Ok(());
        }
        self.unseen = 0;
        // One that does not say how full it is says so when it is.
        let Ok(disk) = rustix::fs::fstatvfs(file) else { return Ok(()) };
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        let whole = disk.f_blocks.saturating_mul(disk.f_frsize);
        let need = reserve(whole, self.max).saturating_add(bytes as u64);
        if whole > 0 && free < need { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

/// A small disk keeps less: a twentieth.
fn reserve(whole: u64, max: u64) -> u64 {
    (whole / 20).min(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_twentieth_is_kept_and_no_more_than_the_limit() {
        assert_eq!(reserve(20 << 20, 1 << 30), 1 << 20);
        assert_eq!(reserve(1 << 44, 1 << 30), 1 << 30);
    }
}
