//! The memory that all cells of a state root may have together.
//!
//! A file: a header with the budget, then a slot for each cell with its [`Share`].
//! A cell's supervisor locks its slot for as long as it lives (fcntl(2), open file
//! description locks), so what a dead one had is free at once. Whoever changes
//! anything locks the header, for as long as that takes.
//!
//! ```text
//! 0      64       128
//! header | slot 0 | slot 1 | ...      header: magic, budget
//!                                     slot:   guarantee, granted, short, beside
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::share::{self, Share};

const MAGIC: [u8; 8] = *b"exobdgt1";
const SLOT_BYTES: usize = 64;
/// More cells than one host runs; a damaged file is not read for ever.
const SLOTS_MAX: usize = 65_536;

/// Why a cell has no place in the budget.
#[derive(Debug, thiserror::Error)]
pub enum BudgetError {
    #[error("{0} is no memory budget; remove it and set the budget again (exocell budget SIZE)")]
    Format(String),
    #[error(
        "the memory budget has {left} bytes left, {guarantee} are to be set aside for the cell; end a cell, ask for less (--memory, or --pager credit with its --memory-guarantee) or set more (exocell budget SIZE)"
    )]
    Full { left: u64, guarantee: u64 },
    #[error("cannot use the memory budget: {0}")]
    Host(#[from] io::Error),
}

/// How a budget stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub budget: u64,
    /// Of the cells that live.
    pub shares: Vec<Share>,
}

impl Standing {
    /// `None`: no budget was set.
    ///
    /// # Errors
    /// The file is damaged, or the host's.
    pub fn read(path: &Path) -> Result<Option<Self>, BudgetError> {
        let Some(ledger) = Ledger::open(path)? else { return Ok(None) };
        let _header = ledger.lock_header()?;
        let (budget, mut slots) = ledger.read()?;
        ledger.sweep(&mut slots, None)?;
        let live = |share: &Share| *share != Share::default();
        Ok(Some(Self { budget, shares: slots.into_iter().filter(live).collect() }))
    }

    /// Sets the budget to `bytes`, for cells that run and those to come. What was lent
    /// beyond a smaller one is not taken away; nothing more is lent until it is back.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn set(path: &Path, bytes: u64) -> Result<(), BudgetError> {
        let file =
            File::options().create(true).truncate(false).read(true).write(true).open(path)?;
        let ledger = Ledger { file, path: path.display().to_string() };
        let _header = ledger.lock_header()?;
        if ledger.file.metadata()?.len() > 0 {
            ledger.read()?;
        }
        Ok(ledger.file.write_all_at(&[MAGIC, bytes.to_le_bytes()].concat(), 0)?)
    }

    /// What is neither guaranteed to anyone nor lent, in bytes.
    pub fn left(&self) -> u64 {
        share::left(self.budget, &self.shares)
    }
}

/// A cell's place in the budget, for as long as this lives.
#[derive(Debug)]
pub struct Member {
    ledger: Ledger,
    slot: usize,
}

impl Member {
    /// Sets `guarantee` bytes aside for a cell that may take `beside` bytes of the host beside
    /// its memory; `None` where no budget was set.
    ///
    /// # Errors
    /// [`BudgetError::Full`] where there is less.
    pub fn join(path: &Path, guarantee: u64, beside: u64) -> Result<Option<Self>, BudgetError> {
        let Some(ledger) = Ledger::open(path)? else { return Ok(None) };
        let header = ledger.lock_header()?;
        let (budget, mut slots) = ledger.read()?;
        ledger.sweep(&mut slots, None)?;
        let left = share::left(budget, &slots);
        if left < guarantee {
            return Err(BudgetError::Full { left, guarantee });
        }
        let mut free = (0..SLOTS_MAX).filter(|at| slots.get(*at).is_none_or(is_empty));
        let slot = free.find_map(|at| match ledger.lock_slot(at) {
            Ok(true) => Some(Ok(at)),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        });
        let slot = slot.ok_or(BudgetError::Full { left: 0, guarantee })??;
        ledger.write(slot, &Share { guarantee, beside, ..Share::default() })?;
        drop(header);
        Ok(Some(Self { ledger, slot }))
    }

    /// Asks for `want` bytes more; what there is of them is granted.
    pub fn ask(&mut self, want: u64) -> Result<u64, BudgetError> {
        self.change(|budget, shares, at| {
            let granted = share::grant(budget, shares, at, want);
            shares[at].granted += granted;
            shares[at].short = want - granted;
            granted
        })
    }

    /// Gives `bytes` back.
    pub fn give(&mut self, bytes: u64) -> Result<(), BudgetError> {
        self.change(|_, shares, at| {
            shares[at].granted = shares[at].granted.saturating_sub(bytes);
        })
    }

    /// It does not want any more what it did not get.
    pub fn settle(&mut self) -> Result<(), BudgetError> {
        self.change(|_, shares, at| shares[at].short = 0)
    }

    /// Whether others are asked to give back for it.
    pub fn is_due(&mut self) -> Result<bool, BudgetError> {
        self.change(|budget, shares, at| share::is_due(budget, shares, at))
    }

    /// What it should give back for others.
    pub fn wanted_back(&mut self) -> Result<u64, BudgetError> {
        self.change(|budget, shares, at| share::wanted_back(budget, shares, at))
    }

    fn change<T>(&self, how: impl FnOnce(u64, &mut [Share], usize) -> T) -> Result<T, BudgetError> {
        let _header = self.ledger.lock_header()?;
        let (budget, mut slots) = self.ledger.read()?;
        if slots.len() <= self.slot {
            return Err(BudgetError::Format(self.ledger.path.clone()));
        }
        self.ledger.sweep(&mut slots, Some(self.slot))?;
        let before = slots[self.slot];
        let result = how(budget, &mut slots, self.slot);
        if slots[self.slot] != before {
            self.ledger.write(self.slot, &slots[self.slot])?;
        }
        Ok(result)
    }
}

fn is_empty(share: &Share) -> bool {
    *share == Share::default()
}

#[derive(Debug)]
struct Ledger {
    file: File,
    path: String,
}

/// The header's lock.
struct Header<'a>(&'a File);

impl Drop for Header<'_> {
    fn drop(&mut self) {
        // It cannot fail: unlocking waits for nobody and takes no memory.
        let _ = fcntl(self.0, FcntlArg::F_OFD_SETLK(&range(libc::F_UNLCK, 0)));
    }
}

/// The `index`th piece of the file; piece 0 is the header.
fn range(kind: libc::c_int, index: usize) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: (index * SLOT_BYTES) as libc::off_t,
        l_len: SLOT_BYTES as libc::off_t,
        l_pid: 0,
    }
}

impl Ledger {
    /// `None` where there is none, or one that was about to be set when the disk was full.
    fn open(path: &Path) -> Result<Option<Self>, BudgetError> {
        match File::options().read(true).write(true).open(path) {
            Ok(file) if file.metadata()?.len() == 0 => Ok(None),
            Ok(file) => Ok(Some(Self { file, path: path.display().to_string() })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn lock_header(&self) -> Result<Header<'_>, BudgetError> {
        loop {
            match fcntl(&self.file, FcntlArg::F_OFD_SETLKW(&range(libc::F_WRLCK, 0))) {
                Ok(_) => return Ok(Header(&self.file)),
                Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
    }

    /// Whether the slot was nobody's and is ours now.
    fn lock_slot(&self, slot: usize) -> Result<bool, BudgetError> {
        match fcntl(&self.file, FcntlArg::F_OFD_SETLK(&range(libc::F_WRLCK, slot + 1))) {
            Ok(_) => Ok(true),
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(false),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    fn is_locked(&self, slot: usize) -> Result<bool, BudgetError> {
        let mut lock = range(libc::F_WRLCK, slot + 1);
        fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock)).map_err(io::Error::from)?;
        Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK)
    }

    /// The budget and all slots.
    fn read(&self) -> Result<(u64, Vec<Share>), BudgetError> {
        let bytes = self.file.metadata()?.len();
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).min((SLOTS_MAX + 1) * SLOT_BYTES);
        let mut text = vec![0; bytes.max(SLOT_BYTES)];
        let held = &mut text[..bytes];
        self.file.read_exact_at(held, 0)?;
        let word = |piece: &[u8], index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&piece[index * 8..][..8]);
            u64::from_le_bytes(word)
        };
        let (header, slots) = text.split_at(SLOT_BYTES);
        if header[..8] != MAGIC {
            return Err(BudgetError::Format(self.path.clone()));
        }
        let share = |piece: &[u8]| Share {
            guarantee: word(piece, 0),
            granted: word(piece, 1),
            short: word(piece, 2),
            beside: word(piece, 3),
        };
        Ok((word(header, 1), slots.chunks_exact(SLOT_BYTES).map(share).collect()))
    }

    fn write(&self, slot: usize, share: &Share) -> Result<(), BudgetError> {
        let mut piece = [0; SLOT_BYTES];
        let words = [share.guarantee, share.granted, share.short, share.beside];
        for (at, word) in words.into_iter().enumerate() {
            piece[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        Ok(self.file.write_all_at(&piece, ((slot + 1) * SLOT_BYTES) as u64)?)
    }

    /// Empties the slots of supervisors that are gone; `own` is locked by us, which
    /// cannot be seen.
    fn sweep(&self, slots: &mut [Share], own: Option<usize>) -> Result<(), BudgetError> {
        for (at, share) in slots.iter_mut().enumerate() {
            if Some(at) != own && !is_empty(share) && !self.is_locked(at)? {
                *share = Share::default();
                self.write(at, share)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn budget(bytes: u64) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budget");
        Standing::set(&path, bytes).unwrap();
        (folder, path)
    }

    #[test]
    fn without_a_budget_there_is_nothing_to_join() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budget");
        assert!(Member::join(&path, MIB, 0).unwrap().is_none());
        assert_eq!(Standing::read(&path).unwrap(), None);
    }

    #[test]
    fn members_share_a_budget_and_what_the_dead_had_comes_back() {
        let (_folder, path) = budget(100 * MIB);
        let mut first = Member::join(&path, 30 * MIB, 0).unwrap().unwrap();
        let mut second = Member::join(&path, 30 * MIB, 0).unwrap().unwrap();
        assert_eq!(first.ask(80 * MIB).unwrap(), 70 * MIB);
        assert_eq!(second.ask(40 * MIB).unwrap(), 30 * MIB);
        // 20 each can be lent: the first has 40, the second is short of 10.
        assert_eq!(first.wanted_back().unwrap(), 10 * MIB);
        first.give(10 * MIB).unwrap();
        assert_eq!(first.ask(10 * MIB).unwrap(), 0);
        assert_eq!(second.ask(10 * MIB).unwrap(), 10 * MIB);
        assert_eq!(Standing::read(&path).unwrap().unwrap().left(), 0);
        assert!(matches!(Member::join(&path, MIB, 0), Err(BudgetError::Full { left: 0, .. })));
        drop(first);
        let standing = Standing::read(&path).unwrap().unwrap();
        assert_eq!((standing.shares.len(), standing.left()), (1, 60 * MIB));
        let mut third = Member::join(&path, 60 * MIB, 0).unwrap().unwrap();
        assert_eq!(third.ask(MIB).unwrap(), MIB);
    }

    #[test]
    fn a_budget_changes_under_its_members() {
        let (_folder, path) = budget(10 * MIB);
        let mut member = Member::join(&path, MIB, 0).unwrap().unwrap();
        assert_eq!(member.ask(20 * MIB).unwrap(), 10 * MIB);
        Standing::set(&path, 5 * MIB).unwrap();
        assert_eq!(member.ask(MIB).unwrap(), 0);
        Standing::set(&path, 15 * MIB).unwrap();
        assert_eq!(member.ask(20 * MIB).unwrap(), 5 * MIB);
    }

    /// The disk was full when it was set.
    #[test]
    fn an_empty_file_is_no_budget_yet() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budget");
        std::fs::write(&path, "").unwrap();
        assert_eq!(Standing::read(&path).unwrap(), None);
        assert!(Member::join(&path, MIB, 0).unwrap().is_none());
        Standing::set(&path, MIB).unwrap();
        assert_eq!(Standing::read(&path).unwrap().unwrap().budget, MIB);
    }

    #[test]
    fn a_file_of_something_else_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budget");
        for text in ["x", &"y".repeat(200)] {
            std::fs::write(&path, text).unwrap();
            assert!(matches!(Standing::read(&path), Err(BudgetError::Format(_))));
            assert!(matches!(Member::join(&path, 0, 0), Err(BudgetError::Format(_))));
            assert!(matches!(Standing::set(&path, 1), Err(BudgetError::Format(_))));
        }
    }
}
