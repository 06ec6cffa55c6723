//! Which volumes go, and when.
//!
//! One without a name of its own was made for a container. It goes with that if the container
//! removes itself, or its operator says so; whoever is killed in between leaves it to the next who
//! sweeps.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use exocell_cell::{Record, now_ms};

use crate::containers::{Container, Containers, Seen};
use crate::error::{ApiError, ApiResult};
use crate::notes::Notes;

/// Milliseconds in which a volume's cell usually comes to be.
const BIRTH_USUAL_MS: u64 = 10 * 1000;
/// How long a cell that is made with a volume is waited for where the volume is named to be removed.
pub const START_MAX: Duration = Duration::from_secs(10);

/// What came of a volume that was to be removed.
#[derive(Debug)]
pub enum Discarded {
    Gone,
    /// There is none.
    Missing,
    /// A cell is being made with it.
    Starting,
    /// These have it.
    Used(Vec<Seen>),
}

impl Discarded {
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone)
    }
}

impl Containers {
    /// Removes the volume `name` if no container has it, and none is made with it, for which it
    /// waits so long.
    ///
    /// # Errors
    /// As of [`Self::all`]; the host's.
    pub fn discard_volume(&self, name: &str, patience: Duration) -> ApiResult<Discarded> {
        let failed = |error: io::Error| {
            ApiError::internal(format!("cannot remove the volume {name}: {error}"))
        };
        let shelf = self.shelf();
        let alone = match shelf.alone(name, patience) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Discarded::Missing),
            alone => alone.map_err(failed)?,
        };
        let Some(alone) = alone else { return Ok(Discarded::Starting) };
        // Whoever came before is listed by now, and nobody comes meanwhile.
        let uses = |seen: &Seen| {
            seen.container.mounts.iter().any(|mount| mount.volume.as_deref() == Some(name))
        };
        let users: Vec<Seen> = self.all()?.into_iter().filter(uses).collect();
        if !users.is_empty() {
            return Ok(Discarded::Used(users));
        }
        shelf.discard(name, alone).map_err(failed)?;
        Ok(Discarded::Gone)
    }

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
        let goes = |name: &String| {
            self.discard_volume(name, Duration::ZERO).is_ok_and(|done| done.is_gone())
        };
        names.filter(is_own).filter(goes).collect()
    }

    /// Removes volumes that were to go with containers which are gone: whoever was to remove them
    /// was ended before, or there was nobody. A start that is under way holds its own.
    pub fn sweep_volumes(&self) {
        let shelf = self.shelf();
        let is_left = |name: &str| {
            let notes = shelf.notes(name);
            let owner = notes.owner.as_deref().filter(|_| notes.ends_with_owner);
            owner.is_some_and(|owner| !self.exists(owner))
        };
        for name in shelf.names().unwrap_or_default().iter().filter(|name| is_left(name)) {
            // The next one tries again.
            let _ = self.discard_volume(name, Duration::ZERO);
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Barrier;

    use super::*;
    use crate::admit::MountPoint;
    use crate::containers::tests::with_one;

    #[test]
    fn nobody_removes_a_volume_with_which_a_cell_is_made() {
        let root = tempfile::tempdir().unwrap();
        let containers = with_one(root.path(), "quiet");
        let (shelf, own) = (containers.shelf(), containers.find("quiet").unwrap().container);
        let notes = Notes::new(BTreeMap::new(), false);
        let mount = MountPoint { volume: Some("v".to_owned()), ..MountPoint::default() };
        let with = Container { mounts: vec![mount], ..own.clone() };
        let missing = containers.discard_volume("v", Duration::ZERO).unwrap();
        assert!(matches!(missing, Discarded::Missing), "{missing:?}");
        let barrier = Barrier::new(2);
        let mut removed = 0;
        for turn in 0..200 {
            let made = std::thread::scope(|scope| {
                // As a start does it: the volume, much else, the cell.
                let start = scope.spawn(|| {
                    barrier.wait();
                    let held = shelf.make("v", &notes).unwrap();
                    std::fs::write(shelf.path("v").join("kept"), "").unwrap();
                    (0..turn % 7).for_each(|_| std::thread::yield_now());
                    containers.write(&with).unwrap();
                    drop(held);
                });
                barrier.wait();
                (0..turn % 5).for_each(|_| std::thread::yield_now());
                let done = containers.discard_volume("v", START_MAX).unwrap();
                start.join().unwrap();
                done
            });
            removed += usize::from(made.is_gone());
            assert!(!matches!(made, Discarded::Starting), "it waits");
            assert!(shelf.path("v").join("kept").exists(), "turn {turn}: {made:?}");
            let used = containers.discard_volume("v", Duration::ZERO).unwrap();
            assert!(matches!(&used, Discarded::Used(by) if by.len() == 1), "{used:?}");
            containers.write(&own).unwrap();
            // Every other one finds none.
            if turn % 2 == 0 {
                assert!(containers.discard_volume("v", Duration::ZERO).unwrap().is_gone());
                let notes = std::fs::read_dir(root.path().join("docker/volume-notes")).unwrap();
                assert_eq!(notes.count(), 0, "neither notes nor a lock are left");
            }
        }
        println!("{removed} of 200 went before their cell came");
        let held = shelf.make("v", &notes).unwrap();
        let starting = containers.discard_volume("v", Duration::ZERO).unwrap();
        assert!(matches!(starting, Discarded::Starting), "{starting:?}");
        drop(held);
        assert!(containers.discard_volume("v", Duration::ZERO).unwrap().is_gone());
    }
}
