//! What the start commands of images have come to, see [`crate::beginning`].

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::keys::POOL;

/// Images and networks of which it is remembered, for each tenant. The oldest goes.
const KINDS_MAX: usize = 64;

/// What the start command of an image came to in a tenant's first sandbox of it, by the image's id
/// and the sandbox' network. What came of it in one of the pool's, which no tenant had reached, is
/// for all.
#[derive(Default)]
pub struct Settled(Mutex<HashMap<String, VecDeque<(String, State)>>>);

/// How far one has come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    pub sockets: BTreeSet<String>,
    pub has_ended: bool,
}

impl State {
    /// Whether another has come as far as this one.
    pub fn is_reached_by(&self, other: &Self) -> bool {
        self.sockets.is_subset(&other.sockets) && (other.has_ended || !self.has_ended)
    }
}

impl Settled {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, VecDeque<(String, State)>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it came to for `tenant`.
    pub fn of(&self, tenant: &str, kind: &str) -> Option<State> {
        let all = self.lock();
        let mut own = [POOL, tenant].into_iter().filter_map(|name| all.get(name)).flatten();
        own.find(|(known, _)| known == kind).map(|(_, state)| state.clone())
    }

    /// Remembers what it came to in a sandbox of `tenant`.
    pub fn set(&self, tenant: &str, kind: String, state: State) {
        let mut all = self.lock();
        let own = all.entry(tenant.to_owned()).or_default();
        own.retain(|(known, _)| *known != kind);
        if own.len() >= KINDS_MAX {
            own.pop_front();
        }
        own.push_back((kind, state));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(socket: &str) -> State {
        State { sockets: [socket.to_owned()].into(), has_ended: false }
    }

    #[test]
    fn a_tenant_teaches_nobody_else_and_the_pool_teaches_all() {
        let settled = Settled::default();
        settled.set("ann", "image".to_owned(), State::default());
        assert_eq!(settled.of("ann", "image"), Some(State::default()));
        assert_eq!((settled.of("bob", "image"), settled.of(POOL, "image")), (None, None));
        settled.set(POOL, "image".to_owned(), at("0050"));
        for tenant in ["ann", "bob", POOL] {
            assert_eq!(settled.of(tenant, "image"), Some(at("0050")), "{tenant}");
        }
    }

    #[test]
    fn a_tenant_that_has_many_images_takes_no_others_room() {
        let settled = Settled::default();
        settled.set("bob", "image".to_owned(), at("0050"));
        for number in 0..10 * KINDS_MAX {
            settled.set("ann", number.to_string(), at("0051"));
        }
        assert_eq!(settled.lock()["ann"].len(), KINDS_MAX);
        assert_eq!(settled.of("ann", "0"), None);
        assert!(settled.of("ann", &(10 * KINDS_MAX - 1).to_string()).is_some());
        assert_eq!(settled.of("bob", "image"), Some(at("0050")));
    }
}
