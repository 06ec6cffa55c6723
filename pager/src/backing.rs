//! The host's side of binding: which pages of a guest's memory file it backs at the
//! guest's request, and what that costs its credit.

use std::fs::File;
use std::io;
use std::ops::Range;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use crate::abi::PAGE_BYTES;
use crate::{BudgetError, Credit, Overdrawn, allocated_bytes};

/// What was bound, in pages; rates are for who looks twice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    pub bound: u64,
    /// The most that was bound at once.
    pub peak: u64,
    /// All that was ever bound.
    pub binds: u64,
    pub unbinds: u64,
    /// Requests for which there was no credit, or no memory of the host's.
    pub refused: u64,
}

/// A memory file whose pages the host backs and takes back. A page is paid for once,
/// however often it is bound.
#[derive(Debug)]
pub struct Backing {
    memory: File,
    /// A bit for each page: whether it was bound, and paid for.
    bound: Vec<u64>,
    pages: u64,
    credit: Credit,
    figures: Figures,
}

impl Backing {
    /// # Errors
    /// The file's size cannot be read.
    pub fn new(memory: File, credit: Credit) -> io::Result<Self> {
        let pages = memory.metadata()?.len() / PAGE_BYTES;
        let words = usize::try_from(pages.div_ceil(64)).map_err(io::Error::other)?;
        Ok(Self { memory, bound: vec![0; words], pages, credit, figures: Figures::default() })
    }

    /// Of the whole file.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    pub fn figures(&self) -> Figures {
        self.figures
    }

    /// Credit for so many pages at most, of which those are then the guest's to touch.
    ///
    /// # Errors
    /// The budget cannot be read or written.
    pub fn ask(&mut self, pages: u64) -> Result<u64, BudgetError> {
        Ok(self.credit.ask(pages.saturating_mul(PAGE_BYTES))? / PAGE_BYTES)
    }

    /// Takes credit for so many pages back, but not what bound pages cost.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn give(&mut self, pages: u64) -> Result<(), BudgetError> {
        let free = self.credit.granted().saturating_sub(self.figures.bound * PAGE_BYTES);
        self.credit.give(free.min(pages.saturating_mul(PAGE_BYTES)))
    }

    /// Whether the host holds no more for the guest than it was granted.
    ///
    /// # Errors
    /// The file's blocks cannot be counted.
    pub fn check(&self) -> io::Result<Result<(), Overdrawn>> {
        Ok(self.credit.check(allocated_bytes(&self.memory)?))
    }

    /// Backs all of `range`, or nothing of it: `false` where the credit or the host has
    /// too little. The range must be in the file.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn bind(&mut self, range: Range<u64>) -> Result<bool, BudgetError> {
        let new = range.clone().filter(|page| !self.is_bound(*page)).count() as u64;
        let granted = self.credit.ask(new * PAGE_BYTES)?;
        if granted < new * PAGE_BYTES || !self.change(&range, FallocateFlags::empty()) {
            self.credit.give(granted)?;
            self.figures.refused += 1;
            return Ok(false);
        }
        range.for_each(|page| self.mark(page, true));
        self.figures.bound += new;
        self.figures.binds += new;
        self.figures.peak = self.figures.peak.max(self.figures.bound);
        Ok(true)
    }

    /// Takes all of `range` back, with the credit of what was bound of it: `false` where
    /// the host cannot, and all is as it was. The range must be in the file.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn unbind(&mut self, range: Range<u64>) -> Result<bool, BudgetError> {
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        if !self.change(&range, hole) {
            return Ok(false);
        }
        let gone = range.clone().filter(|page| self.is_bound(*page)).count() as u64;
        range.for_each(|page| self.mark(page, false));
        self.figures.bound -= gone;
        self.figures.unbinds += gone;
        self.credit.give(gone * PAGE_BYTES)?;
        Ok(true)
    }

    /// fallocate(2), which undoes what it did where it fails, and is made again where a
    /// signal interrupted it.
    fn change(&self, range: &Range<u64>, flags: FallocateFlags) -> bool {
        let (at, bytes) = (range.start * PAGE_BYTES, (range.end - range.start) * PAGE_BYTES);
        loop {
            match fallocate(&self.memory, flags, at as i64, bytes as i64) {
                Err(Errno::EINTR) => {}
                result => return result.is_ok(),
            }
        }
    }

    fn is_bound(&self, page: u64) -> bool {
        self.bound[page as usize / 64] & (1 << (page % 64)) != 0
    }

    fn mark(&mut self, page: u64, bound: bool) {
        let word = &mut self.bound[page as usize / 64];
        let bit = 1 << (page % 64);
        *word = if bound { *word | bit } else { *word & !bit };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Account;

    fn backing(pages: u64, limit_pages: u64) -> Backing {
        let memory = tempfile::tempfile_in("/dev/shm").unwrap();
        memory.set_len(pages * PAGE_BYTES).unwrap();
        let credit = Credit::new(Account::new(0, limit_pages * PAGE_BYTES), None);
        Backing::new(memory, credit).unwrap()
    }

    fn held_pages(backing: &Backing) -> u64 {
        allocated_bytes(&backing.memory).unwrap() / PAGE_BYTES
    }

    #[test]
    fn a_page_is_paid_for_once_and_comes_back_once() {
        let mut backing = backing(256, 16);
        assert!(backing.bind(0..8).unwrap() && backing.bind(4..12).unwrap());
        assert_eq!((backing.figures.bound, held_pages(&backing)), (12, 12));
        // All or nothing: four are left.
        assert!(!backing.bind(100..105).unwrap());
        assert_eq!((held_pages(&backing), backing.figures.refused), (12, 1));
        assert!(backing.unbind(6..200).unwrap() && backing.unbind(6..200).unwrap());
        assert_eq!((backing.figures.bound, held_pages(&backing)), (6, 6));
        assert!(backing.bind(100..110).unwrap() && !backing.bind(200..201).unwrap());
        let told = Figures { bound: 16, peak: 16, binds: 22, unbinds: 6, refused: 2 };
        assert_eq!(backing.figures(), told);
        assert!(backing.check().unwrap().is_ok());
    }

    #[test]
    fn credit_for_what_is_bound_cannot_be_given_back() {
        let mut backing = backing(256, 16);
        assert!(backing.bind(0..8).unwrap());
        assert_eq!(backing.ask(100).unwrap(), 8);
        backing.give(100).unwrap();
        assert_eq!(backing.ask(100).unwrap(), 8);
    }

    #[test]
    fn what_nobody_was_granted_is_noticed() {
        let backing = backing(256, 16);
        std::os::unix::fs::FileExt::write_all_at(&backing.memory, &[1], 0).unwrap();
        let told = backing.check().unwrap().unwrap_err().to_string();
        assert_eq!(told, "it holds 4096 bytes of memory, 0 were granted");
    }
}
