//! How much of the host's disk a folder's guest may take.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use crate::Limits;
use crate::host::{self, Ident};
use crate::tally::{Taken, Tally};

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
    tally: Option<Tally>,
}

impl Quota {
    pub fn new(limits: &Limits) -> Self {
        let Limits { grown_bytes_max, made_max, .. } = *limits;
        Self { grown: 0, grown_max: grown_bytes_max, made: 0, made_max, tally: None }
    }

    /// Goes on from what is written down in `file`, and writes down there what is taken.
    ///
    /// # Errors
    /// As of [`Tally::open`].
    pub fn go_on(&mut self, file: OwnedFd) -> Result<(), Errno> {
        let (tally, taken) = Tally::open(file)?;
        self.grown = self.grown.saturating_add(taken.bytes);
        self.made = self.made.saturating_add(taken.names);
        self.tally = Some(tally);
        Ok(())
    }

    /// Whether somebody goes on from what is taken here.
    pub fn is_written_down(&self) -> bool {
        self.tally.is_some()
    }

    /// At the end: writes down what was taken.
    pub fn settle(&mut self) {
        let taken = Taken { bytes: self.grown, names: self.made };
        if let Some(tally) = &mut self.tally {
            // Else more than that stays written down.
            let _ = tally.note(taken);
        }
    }

    /// Before so much more is taken. What cannot be written down is not taken.
    fn claim(&mut self, bytes: u64, names: u64) -> Result<(), Errno> {
        let wanted = Taken {
            bytes: self.grown.saturating_add(bytes),
            names: self.made.saturating_add(names),
        };
        self.tally.as_mut().map_or(Ok(()), |tally| tally.reach(wanted))
    }

    /// Before `file` grows by at most `by` bytes: its state, to be given to [`Self::changed`].
    ///
    /// # Errors
    /// EDQUOT where the bound is reached and it grows.
    pub fn before(&mut self, file: impl AsFd, by: u64) -> Result<Stat, Errno> {
        if by > 0 {
            if self.grown >= self.grown_max {
                return Err(Errno::DQUOT);
            }
            self.claim(by, 0)?;
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
    pub fn check_names(&mut self) -> Result<(), Errno> {
        if self.made >= self.made_max { Err(Errno::DQUOT) } else { self.claim(0, 1) }
    }

    /// A name was made.
    pub fn made(&mut self) {
        self.made += 1;
    }

    /// A name that was made is there no more.
    pub fn unmade(&mut self) {
        self.made = self.made.saturating_sub(1);
    }

    /// Removes the name of `dir` that `removed` says by `remove`. What that was gives back what it
    /// took if it has no name any more, unless it `is_held`: then once it is [`Self::gone`].
    pub fn remove(
        &mut self,
        dir: impl AsFd,
        removed: Removed<'_>,
        is_held: impl FnOnce(Ident) -> bool,
        attributes: impl FnOnce(&OwnedFd) -> u64,
        remove: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let (Removed::Named(name) | Removed::Replaced(name)) = removed;
        // Whatever has the name, and whatever others do to it meanwhile: this is the same file.
        let held = host::hold(dir, name)
            .and_then(|file| rustix::fs::fstat(&file).map(|before| (file, before)));
        remove()?;
        let after = held.and_then(|(file, before)| {
            rustix::fs::fstat(&file).map(|after| (after.st_nlink < before.st_nlink, file, after))
        });
        // A file that is moved onto itself, by whatever name, stays.
        let is_less = matches!(removed, Removed::Named(_)) || matches!(after, Ok((true, ..)));
        if is_less {
            self.unmade();
        }
        if let Ok((true, file, after)) = after
            && after.st_nlink == 0
            && !is_held(Ident::of(&after))
        {
            self.gone(&after, attributes(&file));
        }
        Ok(())
    }

    /// A file is gone: it has no name, and nobody holds it. It had so many bytes of attributes.
    pub fn gone(&mut self, stat: &Stat, attributes: u64) {
        let content = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => bytes(stat),
            _ => 0,
        };
        self.grown = self.grown.saturating_sub(content).saturating_sub(attributes);
    }

    /// Before an attribute of `before` bytes becomes one of `after`.
    ///
    /// # Errors
    /// EDQUOT where the bound is reached and it grows.
    pub fn check_attribute(&mut self, before: u64, after: u64) -> Result<(), Errno> {
        match after.saturating_sub(before) {
            0 => Ok(()),
            _ if self.grown >= self.grown_max => Err(Errno::DQUOT),
            more => self.claim(more, 0),
        }
    }

    /// After that.
    pub fn changed_attribute(&mut self, before: u64, after: u64) {
        self.grown = self.grown.saturating_add(after).saturating_sub(before);
    }
}

/// A name that is there no more.
#[derive(Clone, Copy, Debug)]
pub enum Removed<'a> {
    Named(&'a [u8]),
    /// By another that is moved there; it may be the same file's.
    Replaced(&'a [u8]),
}

fn bytes(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0) * BLOCK_BYTES
}
