//! How much of the host's disk a folder's guest may take.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

use crate::Limits;
use crate::host::Ident;

/// Bytes of a block as stat(2) counts them.
const BLOCK_BYTES: u64 = 512;

/// What a guest's changes have taken and given back. What others change in the folder
/// meanwhile counts for whoever touches the file next.
#[derive(Debug)]
pub struct Quota {
    grown: u64,
    grown_max: u64,
    made: u64,
    made_max: u64,
}

impl Quota {
    pub fn new(limits: &Limits) -> Self {
        let Limits { grown_bytes_max, made_max, .. } = *limits;
        Self { grown: 0, grown_max: grown_bytes_max, made: 0, made_max }
    }

    /// Before `file` grows: its state, to be given to [`Self::changed`].
    ///
    /// # Errors
    /// EDQUOT where the bound is reached and it `grows`.
    pub fn before(&self, file: impl AsFd, grows: bool) -> Result<Stat, Errno> {
        if grows && self.grown >= self.grown_max {
            return Err(Errno::DQUOT);
        }
        rustix::fs::fstat(file)
    }

    /// Bytes that files may still grow by.
    pub fn left(&self) -> u64 {
        self.grown_max.saturating_sub(self.grown)
    }

    /// After a change, which may go on for one message beyond the bound.
    pub fn changed(&mut self, before: &Stat, after: &Stat) {
        self.grown = self.grown.saturating_add(bytes(after)).saturating_sub(bytes(before));
    }

    /// Before a name is made.
    ///
    /// # Errors
    /// EDQUOT where there are as many as there may be.
    pub fn check_names(&self) -> Result<(), Errno> {
        if self.made >= self.made_max { Err(Errno::DQUOT) } else { Ok(()) }
    }

    /// A name was made.
    pub fn made(&mut self) {
        self.made += 1;
    }

    /// Removes a name of `dir` by `remove`. The bytes of a file that has other names stay, and those
    /// of one that `is_held` until it is [`Self::gone`].
    pub fn remove(
        &mut self,
        dir: impl AsFd,
        name: &[u8],
        is_held: impl FnOnce(Ident) -> bool,
        remove: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
        remove()?;
        self.made = self.made.saturating_sub(1);
        if let Ok(stat) = stat.as_ref()
            && stat.st_nlink == 1
            && !is_held(Ident::of(stat))
        {
            self.gone(stat);
        }
        Ok(())
    }

    /// A file is gone: it has no name, and nobody holds it.
    pub fn gone(&mut self, stat: &Stat) {
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
            self.grown = self.grown.saturating_sub(bytes(stat));
        }
    }
}

fn bytes(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0) * BLOCK_BYTES
}
