//! What all tenants share, and how much of it one may have at once.
//!
//! A tenant may have half of anything. The last quarter is for those who have little of it, a
//! sixteenth at most: no tenant, nor two together, keep another out.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Threads that work for sandboxes: half of what the runtime has.
const THREADS: u64 = 256;
/// Files that are sent or taken, each with a thread of its own, and those that are unpacked, each
/// with a process.
const TRANSFERS: u64 = 256;
const UNPACKING: u64 = 64;
/// Bytes of requests that have not come to their end, of commands that run, and of answers that are
/// not taken yet.
const BYTES: u64 = 128 << 20;
/// Bytes of what has happened in directories, for clients that ask for it now and then.
const EVENT_BYTES: u64 = 64 << 20;
/// Bytes of what builds have said.
const LOG_BYTES: u64 = 256 << 20;
/// Archives that come.
const ARCHIVES: u64 = 16;

/// See the module's head.
#[derive(Debug)]
pub struct Bounds {
    /// Connections: who comes beyond that has another go ([`exocell_door`]).
    pub connections: usize,
    /// Calls with a key or a sandbox' token.
    pub calls: Arc<Shares>,
    /// Calls that sandboxes' programs answer.
    pub visits: Arc<Shares>,
    pub threads: Arc<Shares>,
    pub transfers: Arc<Shares>,
    pub unpacking: Arc<Shares>,
    pub bytes: Arc<Shares>,
    pub event_bytes: Arc<Shares>,
    pub log_bytes: Arc<Shares>,
    pub archives: Arc<Shares>,
}

impl Bounds {
    /// Of a server with so many connections. Some of them are neither calls nor visits: there is
    /// always one that can go.
    pub fn new(connections: usize) -> Self {
        let all = connections as u64;
        Self {
            connections,
            calls: Shares::new(all / 2),
            visits: Shares::new(all / 8 * 3),
            threads: Shares::new(THREADS),
            transfers: Shares::new(TRANSFERS),
            unpacking: Shares::new(UNPACKING),
            bytes: Shares::new(BYTES),
            event_bytes: Shares::new(EVENT_BYTES),
            log_bytes: Shares::new(LOG_BYTES),
            archives: Shares::new(ARCHIVES),
        }
    }
}

/// An amount of something, of which each tenant has a share.
#[derive(Debug)]
pub struct Shares {
    most: u64,
    taken: Mutex<Taken>,
    given_back: Notify,
}

#[derive(Debug, Default)]
struct Taken {
    all: u64,
    by: HashMap<String, u64>,
}

/// What one has of it, until this is dropped.
#[derive(Debug)]
pub struct Share {
    of: Arc<Shares>,
    who: String,
    amount: u64,
}

impl Shares {
    pub fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { most, taken: Mutex::default(), given_back: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing yet, for `who`.
    pub fn none(self: &Arc<Self>, who: &str) -> Share {
        Share { of: self.clone(), who: who.to_owned(), amount: 0 }
    }

    /// `amount` for `who`, if that may be.
    pub fn take(self: &Arc<Self>, who: &str, amount: u64) -> Option<Share> {
        let mut share = self.none(who);
        share.grow(amount).then_some(share)
    }

    /// The same, when it may be.
    pub async fn wait(self: &Arc<Self>, who: &str, amount: u64) -> Share {
        loop {
            let mut told = pin!(self.given_back.notified());
            told.as_mut().enable();
            if let Some(share) = self.take(who, amount) {
                return share;
            }
            told.await;
        }
    }
}

impl Share {
    /// Has `amount` more, or nothing more at all.
    #[must_use]
    pub fn grow(&mut self, amount: u64) -> bool {
        let most = self.of.most;
        let mut taken = self.of.lock();
        let own = taken.by.get(&self.who).copied().unwrap_or(0).saturating_add(amount);
        let all = taken.all.saturating_add(amount);
        let is_little = own <= (most / 16).max(1);
        let may = own <= (most / 2).max(1) && all <= most && (all <= most - most / 4 || is_little);
        if may && amount > 0 {
            taken.by.insert(self.who.clone(), own);
            taken.all = all;
            self.amount += amount;
        }
        may
    }

    /// Nothing yet, for the same one.
    pub fn another(&self) -> Self {
        self.of.none(&self.who)
    }

    pub fn shrink(&mut self, amount: u64) {
        let amount = amount.min(self.amount);
        if amount == 0 {
            return;
        }
        self.amount -= amount;
        let mut taken = self.of.lock();
        taken.all = taken.all.saturating_sub(amount);
        if let Some(own) = taken.by.get_mut(&self.who) {
            *own = own.saturating_sub(amount);
            if *own == 0 {
                taken.by.remove(&self.who);
            }
        }
        drop(taken);
        self.of.given_back.notify_waiters();
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_of(shares: &Arc<Shares>, who: &str) -> Vec<Share> {
        std::iter::from_fn(|| shares.take(who, 1)).collect()
    }

    #[test]
    fn no_number_of_tenants_takes_all() {
        let shares = Shares::new(32);
        let (of_a, of_b) = (all_of(&shares, "a"), all_of(&shares, "b"));
        assert_eq!((of_a.len(), of_b.len()), (16, 8));
        // What is kept is for those who have little.
        let (of_c, of_d) = (all_of(&shares, "c"), all_of(&shares, "d"));
        assert_eq!((of_c.len(), of_d.len()), (2, 2));
        drop(of_a);
        assert_eq!(all_of(&shares, "c").len(), 12);
        drop((of_b, of_c, of_d));
        let taken = shares.lock();
        assert!(taken.all == 0 && taken.by.is_empty());
    }

    #[test]
    fn a_share_grows_within_its_bound() {
        let shares = Shares::new(100);
        let mut share = shares.none("a");
        assert!(share.grow(50) && !share.grow(1) && !share.grow(u64::MAX));
        share.shrink(20);
        assert!(share.grow(20) && !share.grow(1));
        assert!(shares.take("b", 25).is_some() && shares.take("b", 26).is_none());
    }

    #[tokio::test]
    async fn who_waits_gets_what_is_given_back() {
        let shares = Shares::new(2);
        let first = shares.wait("a", 1).await;
        let mut second = pin!(shares.wait("a", 1));
        tokio::select! {
            biased;
            _ = &mut second => panic!("half is all that it may have"),
            () = async {} => {}
        }
        drop(first);
        second.await;
    }

    #[test]
    fn a_connection_can_always_go() {
        for connections in [16, 128, 2048] {
            let bounds = Bounds::new(connections);
            let counted = bounds.calls.most + bounds.visits.most;
            assert!(counted < connections as u64, "{counted} of {connections}");
        }
    }
}
