//! The volumes of a state root for an operator who asks no server: the same folders and notes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use exocell_cell::images::walk;
use exocell_cell::{CellError, Layout};

use crate::check_volume_name;
use crate::containers::Containers;
use crate::ids::new_id;
use crate::leftovers::{Discarded, START_MAX};
use crate::notes::Notes;
use crate::shelf::Shelf;

/// A volume as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    pub name: String,
    /// Where its files are.
    pub path: PathBuf,
    pub labels: BTreeMap<String, String>,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    /// Whether its maker gave it no name.
    pub is_anonymous: bool,
    /// The names of the cells that have it, ended ones too.
    pub cells: Vec<String>,
}

fn missing(name: &str) -> CellError {
    CellError::Usage(format!("no such volume: {name} (exocell volume ls lists them)"))
}

/// The names of the cells that have each volume.
fn users(layout: &Layout) -> Result<BTreeMap<String, Vec<String>>, CellError> {
    let all = Containers::of(layout).all().map_err(|error| CellError::Usage(error.message))?;
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for seen in all {
        let name = seen.container.spec.name;
        for volume in seen.container.mounts.into_iter().filter_map(|mount| mount.volume) {
            users.entry(volume).or_default().push(name.clone());
        }
    }
    Ok(users)
}

/// All volumes, by their names.
///
/// # Errors
/// The volumes or the cells cannot be listed.
pub fn all(layout: &Layout) -> Result<Vec<Volume>, CellError> {
    let shelf = Shelf::of(layout);
    let mut users = users(layout)?;
    let names = shelf.names().map_err(CellError::host("cannot list the volumes"))?;
    let volume = |name: String| {
        let path = shelf.path(&name);
        // One that goes meanwhile is not there.
        let made = path.metadata().ok()?.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        let Notes { labels, created_ms, is_anonymous, .. } = shelf.notes(&name);
        let created_ms = if created_ms == 0 { made.as_millis() as u64 } else { created_ms };
        let cells = users.remove(&name).unwrap_or_default();
        Some(Volume { name, path, labels, created_ms, is_anonymous, cells })
    };
    Ok(names.into_iter().filter_map(volume).collect())
}

/// The volume `name`.
///
/// # Errors
/// There is none; as of [`all`].
pub fn find(layout: &Layout, name: &str) -> Result<Volume, CellError> {
    let found = all(layout)?.into_iter().find(|volume| volume.name == name);
    found.ok_or_else(|| missing(name))
}

/// Makes a volume; without a name it is called by an id. One that is there stays what it is. Its
/// name.
///
/// # Errors
/// It cannot be called so; as of mkdir(2).
pub fn create(
    layout: &Layout,
    name: Option<String>,
    labels: BTreeMap<String, String>,
) -> Result<String, CellError> {
    let notes = Notes::new(labels, name.is_none());
    let name = match name {
        Some(name) => name,
        None => new_id().map_err(|error| CellError::Usage(error.message))?,
    };
    check_volume_name(&name).map_err(CellError::Usage)?;
    let failed = CellError::host(format!("cannot make the volume {name}"));
    drop(Shelf::of(layout).make(&name, &notes).map_err(failed)?);
    Ok(name)
}

/// Removes a volume that no cell has, and its files.
///
/// # Errors
/// There is none, or a cell has it; the host's.
pub fn remove(layout: &Layout, name: &str) -> Result<(), CellError> {
    // Else it might be a path.
    check_volume_name(name).map_err(|_| missing(name))?;
    let done = Containers::of(layout).discard_volume(name, START_MAX);
    match done.map_err(|error| CellError::Usage(error.message))? {
        Discarded::Gone => Ok(()),
        Discarded::Missing => Err(missing(name)),
        Discarded::Starting => Err(CellError::Usage(format!(
            "the volume {name} is in use by a cell that is being started; try again later"
        ))),
        Discarded::Used(cells) => {
            let names: Vec<&str> = cells.iter().map(|seen| seen.container.name()).collect();
            Err(CellError::Usage(format!(
                "the volume {name} is in use by {}; exocell rm removes a cell",
                names.join(", ")
            )))
        }
    }
}

/// Removes the volumes that no cell has and of which `wanted` holds, those with names too if
/// `named`. What was removed, and the bytes that it took.
///
/// # Errors
/// As of [`all`]; the host's.
pub fn prune(
    layout: &Layout,
    named: bool,
    wanted: impl Fn(&Volume) -> bool,
) -> Result<(Vec<String>, u64), CellError> {
    let containers = Containers::of(layout);
    let shelf = Shelf::of(layout);
    let is_idle = |volume: &Volume| {
        volume.cells.is_empty()
            && (named || volume.is_anonymous)
            && !containers.awaits_owner(&shelf.notes(&volume.name))
    };
    let (mut removed, mut freed) = (Vec::new(), 0);
    for volume in all(layout)?.into_iter().filter(|volume| is_idle(volume) && wanted(volume)) {
        let bytes = walk::bytes(&volume.path);
        let done = containers.discard_volume(&volume.name, Duration::ZERO);
        // Who has come to use it meanwhile keeps it.
        if done.map_err(|error| CellError::Usage(error.message))?.is_gone() {
            freed += bytes;
            removed.push(volume.name);
        }
    }
    Ok((removed, freed))
}
