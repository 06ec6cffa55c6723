//! Connections that wait for their client, and which of them goes when there is no room.
//!
//! A connection owes nothing while it waits for a request. Where all are taken, the one that has
//! waited longest goes: who connects and says little, with a key or without, keeps nobody out.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The connections that wait.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// In the order in which they began to wait.
    by_number: BTreeMap<u64, Arc<Notify>>,
    last: u64,
}

/// A connection that waits, until this is dropped.
#[derive(Debug)]
pub(crate) struct Wait<'a> {
    guests: &'a Guests,
    number: u64,
    told: Arc<Notify>,
}

impl Guests {
    pub fn wait(&self) -> Wait<'_> {
        let mut waiting = self.waiting();
        waiting.last += 1;
        let (number, told) = (waiting.last, Arc::new(Notify::new()));
        waiting.by_number.insert(number, Arc::clone(&told));
        Wait { guests: self, number, told }
    }

    /// Tells the one that has waited longest to go. It stays if its request has just come.
    pub fn make_room(&self) {
        if let Some((_, told)) = self.waiting().by_number.pop_first() {
            told.notify_one();
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wait<'_> {
    /// Until it has to go.
    pub async fn told_to_go(&self) {
        self.told.notified().await;
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.guests.waiting().by_number.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_to_go(wait: &Wait<'_>) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            tokio::select! { biased; () = wait.told_to_go() => true, () = async {} => false }
        })
    }

    #[test]
    fn who_has_waited_longest_goes_first() {
        let guests = Guests::default();
        guests.make_room();
        let [first, second, third] = [(); 3].map(|()| guests.wait());
        // Its request has come.
        drop(first);
        let first = guests.wait();
        guests.make_room();
        assert_eq!([&first, &second, &third].map(has_to_go), [false, true, false]);
        drop(third);
        guests.make_room();
        assert!(has_to_go(&first));
    }
}
