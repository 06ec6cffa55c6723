//! What a guest has taken of the host's disk, written down for whoever serves the folder next.
//!
//! A process that is killed writes nothing, so what is written down is ahead of what was taken: a
//! share is noted before any of it is used. The end of access puts the true numbers there.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

/// How far ahead it is noted.
const BYTES_AHEAD: u64 = 16 << 20;
const NAMES_AHEAD: u64 = 1 << 10;

/// Bytes that files have grown by, and names that were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    pub bytes: u64,
    pub names: u64,
}

/// A file with two numbers.
#[derive(Debug)]
pub struct Tally {
    file: OwnedFd,
    noted: Taken,
}

impl Tally {
    const LEN: usize = 16;

    /// Takes a file that is empty, or what is in one.
    ///
    /// # Errors
    /// The host's; EINVAL for a file that is no tally.
    pub fn open(file: OwnedFd) -> Result<(Self, Taken), Errno> {
        let mut numbers = [0; Self::LEN + 1];
        let mut filled = 0;
        loop {
            match rustix::io::pread(&file, &mut numbers[filled..], filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        let taken = match (filled, numbers.first_chunk(), numbers[8..].first_chunk()) {
            (0, ..) => Taken::default(),
            (Self::LEN, Some(bytes), Some(names)) => {
                Taken { bytes: u64::from_le_bytes(*bytes), names: u64::from_le_bytes(*names) }
            }
            _ => return Err(Errno::INVAL),
        };
        Ok((Self { file, noted: taken }, taken))
    }

    /// Notes `wanted`, unless it is within what was noted.
    ///
    /// # Errors
    /// The host's: then no more may be taken.
    pub fn reach(&mut self, wanted: Taken) -> Result<(), Errno> {
        if wanted.bytes <= self.noted.bytes && wanted.names <= self.noted.names {
            return Ok(());
        }
        self.note(Taken {
            bytes: wanted.bytes.saturating_add(BYTES_AHEAD),
            names: wanted.names.saturating_add(NAMES_AHEAD),
        })
    }

    /// Notes what was taken in the end.
    ///
    /// # Errors
    /// The host's; what was noted before stays.
    pub fn note(&mut self, taken: Taken) -> Result<(), Errno> {
        let mut numbers = [0; Self::LEN];
        let (bytes, names) = numbers.split_at_mut(Self::LEN / 2);
        bytes.copy_from_slice(&taken.bytes.to_le_bytes());
        names.copy_from_slice(&taken.names.to_le_bytes());
        let written =
            rustix::io::retry_on_intr(|| rustix::io::pwrite(self.file.as_fd(), &numbers, 0))?;
        if written != Self::LEN {
            return Err(Errno::NOSPC);
        }
        self.noted = taken;
        Ok(())
    }
}
