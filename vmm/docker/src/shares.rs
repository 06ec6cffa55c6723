//! What a cell with the server's socket may take of what all share: names, places, disk. Without
//! bounds one cell would leave nothing for the operator and for others.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use exocell_cell::images::{ImageRecord, Reference};
use exocell_cell::networks::Networks;

use crate::caller::{Caller, Cell};
use crate::containers::{Container, Containers, short};
use crate::error::{ApiError, ApiResult, refused};
use crate::shelf::Shelf;

/// Networks that one cell has had made, at once.
pub const NETWORKS_MAX: usize = 16;
/// Volumes that one cell has had made, at once.
pub const VOLUMES_MAX: usize = 64;
/// Images that one cell pulls at once.
pub const PULLS_MAX: usize = 2;
/// Images that one cell makes of its containers, as long as the server runs.
pub const COMMITS_MAX: usize = 16;
/// Where images of cells have their names, below the cell's own: no registry has such a host, so
/// nobody who starts an image by a name that he knows starts one of these.
const COMMITTED: &str = "localhost";
/// Images that tenants of a server of E2B's protocol have made: each is its tenant's alone.
const OF_TENANTS: &str = "exocell-e2b/";

/// Counts what each cell takes, by its id.
#[derive(Debug, Default, Clone)]
pub struct Taken(Arc<Mutex<HashMap<String, usize>>>);

/// A place that is given back with this value.
#[derive(Debug)]
pub struct Place {
    of: Taken,
    id: String,
}

impl Taken {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more for `id`, if that is not more than `most`.
    fn add(&self, id: &str, most: usize) -> bool {
        let mut all = self.lock();
        let count = all.entry(id.to_owned()).or_default();
        let is_free = *count < most;
        *count += usize::from(is_free);
        is_free
    }

    /// Takes one of `most` places for `id`; `None` where there is none left.
    fn take(&self, id: &str, most: usize) -> Option<Place> {
        self.add(id, most).then(|| Place { of: self.clone(), id: id.to_owned() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.of.lock();
        if let Some(count) = all.get_mut(&self.id) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                all.remove(&self.id);
            }
        }
    }
}

/// What cells take as the server runs.
#[derive(Debug, Default)]
pub struct Shares {
    pulls: Taken,
    commits: Taken,
}

impl Shares {
    /// A place for a pull; the operator needs none.
    ///
    /// # Errors
    /// 403 where the cell pulls as many images as it may.
    pub fn pull(&self, caller: &Caller) -> ApiResult<Option<Place>> {
        let Some(cell) = caller.cell() else { return Ok(None) };
        match self.pulls.take(cell.id(), PULLS_MAX) {
            Some(place) => Ok(Some(place)),
            None => Err(refused(format!(
                "the cell pulls {PULLS_MAX} images, which is as many as it may at once; try again \
                 when one is there"
            ))),
        }
    }

    /// Counts an image that a cell makes.
    ///
    /// # Errors
    /// 403 where it has made as many as it may.
    pub fn commit(&self, cell: &Cell) -> ApiResult<()> {
        // It is not given back: images are the operator's to remove.
        match self.commits.add(cell.id(), COMMITS_MAX) {
            true => Ok(()),
            false => Err(refused(format!(
                "the cell has made {COMMITS_MAX} images of its containers, which is as many as it \
                 may; have the operator make more"
            ))),
        }
    }
}

/// Whether an image is a tenant's alone: a template, or a snapshot with what he has worked on. No
/// prune takes it, and no cell finds it.
#[must_use]
pub fn is_tenants(image: &ImageRecord) -> bool {
    !image.tags.is_empty() && image.tags.iter().all(|tag| tag.starts_with(OF_TENANTS))
}

/// Whether an image is one that the caller may see and start.
pub fn sees(caller: &Caller, image: &ImageRecord) -> bool {
    caller.cell().is_none() || !is_tenants(image)
}

/// The same for one that was named.
///
/// # Errors
/// 404, as if there were none.
pub fn check_sees(caller: &Caller, image: &ImageRecord, name: &str) -> ApiResult<()> {
    match sees(caller, image) {
        true => Ok(()),
        false => Err(ApiError::not_found(format!("No such image: {name}"))),
    }
}

/// Whether a cell may give this name to an image of its own.
///
/// # Errors
/// 403 with the name that it may give.
pub fn check_name(cell: &Cell, name: &Reference) -> ApiResult<()> {
    let own = format!("{}/", cell.name.to_ascii_lowercase());
    let below = name.repository.strip_prefix(&own).is_some_and(|rest| !rest.is_empty());
    match name.registry == COMMITTED && below {
        true => Ok(()),
        false => Err(refused(format!(
            "an image that the cell {} makes is called {COMMITTED}/{own}NAME, so that nobody takes \
             it for another's; it cannot be {name}",
            cell.name
        ))),
    }
}

/// Whether what is of the operator's container `own` may have a volume or network, `what`, that
/// `line` has made.
///
/// # Errors
/// 409 for one of another cell's.
pub fn check_maker(what: &str, name: &str, line: &[String], own: &str) -> ApiResult<()> {
    match line.last() {
        Some(maker) if !line.iter().any(|id| id == own) => Err(ApiError::conflict(format!(
            "the {what} {name} was made by the cell {}, which has the Docker server's socket and \
             may look into it; take another name, or remove it first (docker {what} rm {name})",
            short(maker)
        ))),
        _ => Ok(()),
    }
}

/// Whether a cell may remove a volume or network, `what`.
///
/// # Errors
/// 403 for one that it has not made and that is of no session of its own.
pub fn check_tidies(
    caller: &Caller,
    what: &str,
    name: &str,
    line: &[String],
    labels: &BTreeMap<String, String>,
) -> ApiResult<()> {
    match caller.tidies(line, labels) {
        true => Ok(()),
        false => Err(refused(format!(
            "the {what} {name} was not made by this cell, and has no label of its session; a cell \
             removes its own"
        ))),
    }
}

/// Whether a cell may make a network or volume, `what`, that is not there and is called `name`.
///
/// # Errors
/// 403 for a name that containers of others have.
pub fn check_unused(
    containers: &Containers,
    caller: &Caller,
    what: &str,
    name: &str,
) -> ApiResult<()> {
    if caller.cell().is_none() {
        return Ok(());
    }
    let has = |container: &Container| {
        container.spec.networks.iter().any(|own| what == "network" && own.network == name)
            || container
                .mounts
                .iter()
                .any(|m| what == "volume" && m.volume.as_deref() == Some(name))
    };
    let all = containers.all()?;
    match all.iter().find(|seen| has(&seen.container) && !caller.owns(&seen.container)) {
        None => Ok(()),
        Some(seen) => Err(refused(format!(
            "the container {} has a {what} that is called {name}, and was not made by this cell; \
             give yours another name",
            seen.container.name()
        ))),
    }
}

/// Whether a cell may have one more network made.
///
/// # Errors
/// 403 where it has as many as it may.
pub fn check_networks(networks: &Networks, caller: &Caller) -> ApiResult<()> {
    if caller.cell().is_none() {
        return Ok(());
    }
    let count = networks.all()?.iter().filter(|network| caller.has_made(&network.made_by)).count();
    check_count("networks", count, NETWORKS_MAX)
}

/// Whether a cell may have so many `more` volumes made.
///
/// # Errors
/// 403 where it has as many as it may.
pub fn check_volumes(shelf: &Shelf, caller: &Caller, more: usize) -> ApiResult<()> {
    if caller.cell().is_none() || more == 0 {
        return Ok(());
    }
    let names = shelf.names();
    let names = names.map_err(|error| ApiError::internal(format!("the volumes: {error}")))?;
    let count = names.iter().filter(|name| caller.has_made(&shelf.notes(name).made_by)).count();
    check_count("volumes", count + more - 1, VOLUMES_MAX)
}

/// How many volumes a container has that are not there yet.
pub fn new_volumes(shelf: &Shelf, container: &Container) -> usize {
    let names = container.mounts.iter().filter_map(|mount| mount.volume.as_deref());
    names.filter(|name| !shelf.path(name).exists()).count()
}

fn check_count(what: &str, count: usize, most: usize) -> ApiResult<()> {
    match count < most {
        true => Ok(()),
        false => Err(refused(format!(
            "the cell would have more than {most} {what}, which is as many as it may have; remove \
             some"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_by_cell_and_given_back() {
        let taken = Taken::default();
        let one = taken.take("a", 2).unwrap();
        let _two = taken.take("a", 2).unwrap();
        assert!(taken.take("a", 2).is_none() && taken.take("b", 2).is_some());
        drop(one);
        assert!(taken.take("a", 2).is_some());
    }

    #[test]
    fn what_a_cell_has_made_is_not_taken_for_the_operators() {
        let line = ["a".repeat(64), "b".repeat(64)];
        let refused = check_maker("volume", "pgdata", &line, "c").unwrap_err();
        assert_eq!(refused.status, hyper::StatusCode::CONFLICT);
        for word in ["pgdata", "bbbbbbbbbbbb", "docker volume rm pgdata"] {
            assert!(refused.message.contains(word), "{}", refused.message);
        }
        check_maker("volume", "pgdata", &[], "c").unwrap();
        // What a container has made it may join.
        check_maker("network", "own", &line, &line[0]).unwrap();
    }
}
