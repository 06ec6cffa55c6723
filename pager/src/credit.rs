//! A guest's credit: memory that it may take, within its limit and of the budget. How
//! it asks is its transport's affair.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::abi::PAGE_BYTES;
use crate::{BudgetError, Member};

/// How long a guest that gets nothing is held, while others are asked to give back.
/// A vCPU waits for that with interrupts off.
const PATIENCE: Duration = Duration::from_secs(1);
/// Where that was in vain, nobody waits again for so long.
const IN_VAIN: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(5);

/// What was granted and what may be, in bytes.
#[derive(Debug)]
pub struct Account {
    pub guarantee: u64,
    pub limit: AtomicU64,
    pub granted: AtomicU64,
}

impl Account {
    pub fn new(guarantee: u64, limit: u64) -> Arc<Self> {
        let (limit, granted) = (AtomicU64::new(limit), AtomicU64::new(0));
        Arc::new(Self { guarantee, limit, granted })
    }
}

/// It holds more than it was granted.
#[derive(Debug, thiserror::Error)]
#[error("it holds {held} bytes of memory, {may} were granted")]
pub struct Overdrawn {
    held: u64,
    may: u64,
}

/// Who lends to one guest.
#[derive(Debug)]
pub struct Credit {
    account: Arc<Account>,
    /// What it may have now: a lower limit counts once it keeps to it.
    cap: u64,
    member: Option<Member>,
    /// When it last got less than it asked for.
    short_since: Option<Instant>,
    no_patience_until: Instant,
}

impl Credit {
    /// Of the budget of `member`, where there is one.
    pub fn new(account: Arc<Account>, member: Option<Member>) -> Self {
        let cap = account.limit.load(Ordering::Relaxed);
        Self { account, cap, member, short_since: None, no_patience_until: Instant::now() }
    }

    /// Whether others may want some of what it has.
    pub fn is_lent(&self) -> bool {
        self.member.is_some() && self.granted() > self.account.guarantee
    }

    pub(crate) fn granted(&self) -> u64 {
        self.account.granted.load(Ordering::Relaxed)
    }

    /// What it may have altogether.
    fn cap(&mut self) -> u64 {
        let limit = self.account.limit.load(Ordering::Relaxed);
        if limit > self.cap || self.granted() <= limit {
            self.cap = limit;
        }
        self.cap
    }

    /// Of `want` bytes as many as the limit and the budget allow, in whole pages.
    ///
    /// # Errors
    /// The budget cannot be read or written.
    pub fn ask(&mut self, want: u64) -> Result<u64, BudgetError> {
        let want = want.min(self.cap().saturating_sub(self.granted()));
        let granted = self.of_budget(want)?;
        self.account.granted.fetch_add(granted, Ordering::Relaxed);
        // Only whole pages are of use, and parts of a budget may be anything.
        let rest = granted % PAGE_BYTES;
        self.give(rest)?;
        Ok(granted - rest)
    }

    fn of_budget(&mut self, want: u64) -> Result<u64, BudgetError> {
        let Some(member) = &mut self.member else { return Ok(want) };
        let until = Instant::now() + PATIENCE;
        let in_vain = Instant::now() < self.no_patience_until;
        loop {
            let granted = member.ask(want)?;
            self.short_since = (granted < want).then(Instant::now);
            if granted > 0 || want == 0 || in_vain {
                return Ok(granted);
            }
            if Instant::now() >= until || !member.is_due()? {
                self.no_patience_until = Instant::now() + IN_VAIN;
                return Ok(0);
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// Takes so many bytes back, or what it has.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn give(&mut self, bytes: u64) -> Result<(), BudgetError> {
        let bytes = bytes.min(self.granted());
        self.account.granted.fetch_sub(bytes, Ordering::Relaxed);
        match &mut self.member {
            Some(member) => member.give(bytes),
            None => Ok(()),
        }
    }

    /// Refuses a guest for which the host holds more than it was granted.
    pub fn check(&self, held: u64) -> Result<(), Overdrawn> {
        // It boots before it asks.
        let may = self.granted().max(self.account.guarantee);
        if held > may { Err(Overdrawn { held, may }) } else { Ok(()) }
    }

    /// What it should give back for others, in bytes; to be looked at now and then.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn wanted_back(&mut self) -> Result<u64, BudgetError> {
        let is_lent = self.is_lent();
        let Some(member) = &mut self.member else { return Ok(0) };
        if self.short_since.is_some_and(|at| at.elapsed() > IN_VAIN) {
            member.settle()?;
            self.short_since = None;
        }
        if is_lent { member.wanted_back() } else { Ok(0) }
    }
}
