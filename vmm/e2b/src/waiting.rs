//! What waits in the pool, and what is to: see [`crate::pool`].

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::note::Note;

/// How long a template is left alone that could not be booted.
const TRY_AGAIN: Duration = Duration::from_secs(30);

/// See the module's head.
pub struct Pool<T> {
    state: Mutex<State<T>>,
    /// Told when one was taken, is there, or failed.
    pub changed: Notify,
}

struct State<T> {
    waiting: Vec<(Kind, String, T)>,
    /// Those that boot.
    coming: Vec<Kind>,
    /// Until when a template is left alone, by its name.
    left: HashMap<String, Instant>,
}

/// What two sandboxes must have in common to be the same before a client has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    /// Whose they are to be; anybody's who may have the template else.
    pub owner: Option<String>,
    pub name: String,
    pub image: String,
    /// Whether programs of the template have run in it, with these rules of the network.
    pub runs: bool,
    pub rules: Vec<String>,
}

impl Kind {
    fn serves(&self, note: &Note) -> bool {
        note.alias.as_ref() == Some(&self.name)
            && note.template == self.image
            && self.owner.as_ref().is_none_or(|owner| *owner == note.tenant)
            && (!self.runs || self.rules == note.rules)
    }
}

/// What is to wait.
pub struct Wanted<F> {
    pub kind: Kind,
    pub found: F,
    pub count: usize,
}

impl<T> State<T> {
    fn count(&self, kind: &Kind) -> usize {
        let waiting = self.waiting.iter().map(|(own, ..)| own);
        waiting.chain(&self.coming).filter(|own| *own == kind).count()
    }
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        let state = State { waiting: Vec::new(), coming: Vec::new(), left: HashMap::new() };
        Self { state: Mutex::new(state), changed: Notify::new() }
    }
}

impl<T> Pool<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many there are, those that boot among them.
    pub fn len(&self) -> usize {
        let state = self.lock();
        state.waiting.len() + state.coming.len()
    }

    /// Takes one out that ended.
    pub fn forget(&self, id: &str) -> bool {
        let mut state = self.lock();
        let before = state.waiting.len();
        state.waiting.retain(|(_, own, _)| own != id);
        let was_there = state.waiting.len() < before;
        if was_there {
            self.changed.notify_one();
        }
        was_there
    }

    /// One that is as `note` says before a client has it, and the rules that it has.
    pub fn claim(&self, note: &Note) -> Option<(T, Vec<String>)> {
        let mut state = self.lock();
        let at = state.waiting.iter().position(|(kind, ..)| kind.serves(note))?;
        let (kind, _, sandbox) = state.waiting.remove(at);
        self.changed.notify_one();
        Some((sandbox, kind.rules))
    }

    /// Takes out what is of no use any more, or too much.
    pub fn outdated<F>(&self, wanted: &[Wanted<F>]) -> Vec<T> {
        let mut state = self.lock();
        let mut left: Vec<(&Kind, usize)> = wanted.iter().map(|it| (&it.kind, it.count)).collect();
        let mut is_wanted = |(kind, ..): &mut (Kind, String, T)| match left
            .iter_mut()
            .find(|(own, left)| *own == kind && *left > 0)
        {
            Some((_, left)) => {
                *left -= 1;
                true
            }
            None => false,
        };
        let over = state.waiting.extract_if(.., |it| !is_wanted(it));
        over.map(|(.., sandbox)| sandbox).collect()
    }

    /// Begins to fill: what of `wanted` is to boot now.
    pub fn next<'a, F>(&self, wanted: &'a [Wanted<F>]) -> Option<&'a Wanted<F>> {
        let mut state = self.lock();
        let now = Instant::now();
        state.left.retain(|_, until| *until > now);
        let lacks = |it: &&Wanted<F>| {
            state.count(&it.kind) < it.count && !state.left.contains_key(&it.kind.name)
        };
        // The one of which there is least.
        let next = wanted.iter().filter(lacks).min_by_key(|it| state.count(&it.kind))?;
        state.coming.push(next.kind.clone());
        Some(next)
    }

    /// One of `kind` waits, by its id, or could not be booted.
    pub fn came(&self, kind: &Kind, sandbox: Option<(String, T)>) {
        let mut state = self.lock();
        if let Some(at) = state.coming.iter().position(|own| own == kind) {
            state.coming.remove(at);
        }
        match sandbox {
            Some((id, sandbox)) => state.waiting.push((kind.clone(), id, sandbox)),
            None => drop(state.left.insert(kind.name.clone(), Instant::now() + TRY_AGAIN)),
        }
        self.changed.notify_one();
    }

    /// Takes any out, for another that needs its place.
    pub fn give_up(&self) -> Option<T> {
        let mut state = self.lock();
        state.waiting.pop().map(|(.., sandbox)| sandbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_serves_who_would_have_booted_the_same() {
        let kind = Kind {
            owner: None,
            name: "base".into(),
            image: "sha256:1".into(),
            runs: false,
            rules: Vec::new(),
        };
        let note = Note {
            tenant: "ann".into(),
            template: "sha256:1".into(),
            alias: Some("base".into()),
            rules: vec!["a.org:443".into()],
            ..Note::default()
        };
        assert!(kind.serves(&note), "its rules are said when it is taken");
        let ran = Kind { runs: true, ..kind.clone() };
        assert!(!ran.serves(&note), "its programs had less");
        assert!(Kind { rules: note.rules.clone(), ..ran.clone() }.serves(&note));
        let less = Note { rules: Vec::new(), ..note.clone() };
        assert!(!Kind { rules: note.rules.clone(), ..ran }.serves(&less), "they had more");
        assert!(Kind { owner: Some("ann".into()), ..kind.clone() }.serves(&note));
        assert!(!Kind { owner: Some("bob".into()), ..kind.clone() }.serves(&note));
        assert!(!Kind { image: "sha256:2".into(), ..kind.clone() }.serves(&note));
        assert!(!Kind { name: "other".into(), ..kind }.serves(&note));
    }
}
