//! What the start commands of images have come to, see [`crate::beginning`].

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};

/// Images and networks of which it is remembered.
const KINDS_MAX: usize = 1024;

/// What the start command of an image came to in the first sandbox, by the image's id and the
/// sandbox' network.
#[derive(Default)]
pub struct Settled(Mutex<HashMap<String, State>>);

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
    pub fn of(&self, kind: &str) -> Option<State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(kind).cloned()
    }

    pub fn set(&self, kind: String, state: State) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < KINDS_MAX {
            all.insert(kind, state);
        }
    }
}
