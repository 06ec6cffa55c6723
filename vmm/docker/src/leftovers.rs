//! Which volumes go, and when.
//!
//! One without a name of its own was made for a container. It goes with that if the container
//! removes itself, or its operator says so; whoever is killed in between leaves it to the next who
//! sweeps.

use std::collections::BTreeSet;

use exocell_cell::{Record, now_ms};

use crate::containers::{Container, Containers};
use crate::error::ApiResult;
use crate::notes::Notes;

/// Milliseconds in which a volume's cell comes to be on the slowest host.
const BIRTH_MAX_MS: u64 = 10 * 60 * 1000;
/// The same where an operator asks for volumes of cells that are gone.
const BIRTH_USUAL_MS: u64 = 10 * 1000;

impl Containers {
    /// The names of volumes that containers have.
    ///
    /// # Errors
    /// As of [`Self::all`].
    pub fn used_volumes(&self) -> ApiResult<BTreeSet<String>> {
        let all = self.all()?;
        let mounts = all.into_iter().flat_map(|seen| seen.container.mounts);
        Ok(mounts.filter_map(|mount| mount.volume).collect())
    }

    /// Removes the volumes without names that were made for `container`, which is gone; not those
    /// that another has got. Their names.
    pub fn discard_volumes_of(&self, container: &Container) -> Vec<String> {
        let names = container.mounts.iter().filter_map(|mount| mount.volume.clone());
        self.discard_among(names, container.id())
    }

    /// Has volumes that stay beyond `container`, which is gone, wait for it no longer.
    pub fn disown_volumes_of(&self, container: &Container) {
        let shelf = self.shelf();
        for name in container.mounts.iter().filter_map(|mount| mount.volume.as_deref()) {
            if shelf.notes(name).owner.as_deref() == Some(container.id()) {
                // One that is still waited for is only removed later.
                let _ = shelf.disown(name);
            }
        }
    }

    /// Removes those that were made for `owner`, whatever its mounts are.
    pub fn discard_volumes_owned(&self, owner: &str) {
        let shelf = self.shelf();
        self.discard_among(shelf.names().unwrap_or_default().into_iter(), owner);
    }

    fn discard_among(&self, names: impl Iterator<Item = String>, owner: &str) -> Vec<String> {
        let shelf = self.shelf();
        let is_own = |name: &String| shelf.notes(name).owner.as_deref() == Some(owner);
        let own: Vec<String> = names.filter(is_own).collect();
        if own.is_empty() {
            return own;
        }
        let Ok(used) = self.used_volumes() else { return Vec::new() };
        own.into_iter().filter(|name| !used.contains(name) && shelf.discard(name).is_ok()).collect()
    }

    /// Removes volumes that were to go with containers which are gone: whoever was to remove them
    /// was ended before, or there was nobody.
    pub fn sweep_volumes(&self) {
        let shelf = self.shelf();
        let is_left = |name: &String| {
            let notes = shelf.notes(name);
            let owner = notes.owner.as_deref().filter(|_| notes.ends_with_owner);
            notes.created_ms.saturating_add(BIRTH_MAX_MS) < now_ms()
                && owner.is_some_and(|owner| !self.exists(owner))
        };
        let left: Vec<String> =
            shelf.names().unwrap_or_default().into_iter().filter(is_left).collect();
        if left.is_empty() {
            return;
        }
        let Ok(used) = self.used_volumes() else { return };
        for name in left.iter().filter(|name| !used.contains(*name)) {
            // The next one tries again.
            let _ = shelf.discard(name);
        }
    }

    /// Whether a volume was made just now for a container that is not there yet.
    pub fn awaits_owner(&self, notes: &Notes) -> bool {
        notes.created_ms.saturating_add(BIRTH_USUAL_MS) > now_ms()
            && notes.owner.as_deref().is_some_and(|owner| !self.exists(owner))
    }

    fn exists(&self, id: &str) -> bool {
        Record::exists(self.layout(), id) || self.read(id).is_ok()
    }
}
