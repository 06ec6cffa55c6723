//! Tables within tables: what a `vm` cell hands on to the isolates in it, and what one of them
//! takes of that.
//!
//! ```text
//! the cell's grant --handed_on--> the most that isolates in it have --within--> one's own
//! ```

use crate::{
    Capability, CapabilitySet, CapsError, Cpu, Derivation, Folder, Handle, Kind, Model, Rights,
    Scope, Table, explain,
};
use std::path::{Path, PathBuf};

/// Who holds what is derived from.
const CELL: &str = "the cell";
/// Who holds what is derived.
const ISOLATE: &str = "the isolate";

impl CapabilitySet {
    /// The most that isolates in a `vm` cell with this grant may have, in the cell's own paths:
    /// the cell's limits and network, its folders where it sees them, its root file system,
    /// which `root_writable` says it may change, and its models, copies of which lie in the
    /// cell's folder `models` ([`Model::file_name`]). Devices, further isolates and the execution
    /// of files, which isolates do not, are not handed on.
    ///
    /// # Errors
    /// [`CapsError::Value`] where the root is one folder too many.
    pub fn handed_on(&self, root_writable: bool, models: &Path) -> Result<Self, CapsError> {
        let rights = if root_writable { Rights::READ | Rights::WRITE } else { Rights::READ };
        let root = Folder { host: PathBuf::from("/"), guest: PathBuf::from("/"), rights };
        let seen = |folder: &Folder| Folder {
            host: folder.guest.clone(),
            guest: folder.guest.clone(),
            rights: folder.rights - Rights::EXECUTE,
        };
        let folders = std::iter::once(root).chain(self.folders.iter().map(seen)).collect();
        let copy = |model: &Model| Model {
            name: model.name.clone(),
            file: models.join(model.file_name()),
        };
        let models = self.models.iter().map(copy).collect();
        let own = self.clone();
        Self { devices: None, spawn_max: None, folders, models, ..own }.checked()
    }

    /// What an isolate gets that asks for nothing in a cell that hands on `most`: the default,
    /// as far as it is there.
    #[must_use]
    pub fn default_within(most: &Self) -> Self {
        let own = Self::default();
        let cpu = own.cpu.zip(most.cpu).map(|(own, most)| Cpu {
            count: own.count.min(most.count),
            weight: own.weight.min(most.weight),
        });
        Self {
            memory_bytes: lower(own.memory_bytes, most.memory_bytes),
            cpu,
            disk_bytes: lower(own.disk_bytes, most.disk_bytes),
            process_max: lower(own.process_max, most.process_max),
            clock: own.clock && most.clock,
            random: own.random && most.random,
            stdio: own.stdio && most.stdio,
            ..Self::nothing()
        }
    }

    /// This grant, each capability of it derived from one of `most`; a deadline or an amount of
    /// fuel that it does not name is that of `most`. What `most` may read can be a model, or lie
    /// under a layer of the isolate's own.
    ///
    /// # Errors
    /// [`CapsError::Beyond`] names what is more than there is.
    pub fn within(mut self, most: &Self) -> Result<Self, CapsError> {
        self.deadline = self.deadline.or(most.deadline);
        self.fuel = self.fuel.or(most.fuel);
        self.folders.iter_mut().for_each(|folder| folder.rights.remove(Rights::EXECUTE));
        let mut table = Table::new(Table::CAPACITY_MAX);
        // There is room: both are bounded by less than half of the table.
        let _ = most.with_uses(&self.models).install(&mut table, CELL);
        let unlimited = |kind| matches!(kind, Kind::Time | Kind::Fuel) && !most.grants(kind);
        let mut wishes =
            self.capabilities(ISOLATE).into_iter().filter(|wish| !unlimited(wish.kind()));
        wishes.try_for_each(|wish| derive(&mut table, &wish))?;
        Ok(self)
    }

    /// This grant and what follows from its folders, all of which may be read: layers over them,
    /// whose changes reach nobody else, and those of `models` whose files lie in one.
    fn with_uses(&self, models: &[Model]) -> Self {
        let mut all = self.clone();
        all.folders.iter_mut().for_each(|folder| folder.rights.insert(Rights::OVERLAY));
        let is_read =
            |model: &&Model| self.folders.iter().any(|folder| model.file.starts_with(&folder.host));
        all.models.extend(models.iter().filter(is_read).cloned());
        all
    }
}

fn lower<T: Ord>(own: Option<T>, most: Option<T>) -> Option<T> {
    own.zip(most).map(|(own, most)| own.min(most))
}

fn derive(table: &mut Table, wish: &Capability) -> Result<(), CapsError> {
    let parent = parent(table, wish);
    let parent = parent.ok_or_else(|| beyond(wish, "nothing"))?;
    let granted = shown(table.get(parent).unwrap_or(wish));
    let derivation = Derivation {
        name: wish.name(),
        holder: ISOLATE,
        rights: wish.rights(),
        scope: Some(wish.scope().clone()),
        quota: Some(wish.quota()),
    };
    table.derive(parent, derivation).map(drop).map_err(|_| beyond(wish, &granted))
}

/// What `wish` is to be derived from. Of folders it is the innermost around it: one that is
/// mounted in another has rights of its own.
fn parent(table: &Table, wish: &Capability) -> Option<Handle> {
    let held = table.iter().filter(|(_, own)| own.holder() == CELL && own.kind() == wish.kind());
    if !matches!(wish.kind(), Kind::Folder | Kind::Model) {
        return held.map(|(handle, _)| handle).next();
    }
    let around = held.filter(|(_, own)| own.scope().contains(wish.scope()));
    around.max_by_key(|(_, own)| depth(own.scope())).map(|(handle, _)| handle)
}

fn depth(scope: &Scope) -> usize {
    match scope {
        Scope::Folder(folder) => folder.host.components().count(),
        _ => 0,
    }
}

/// A capability as a person would say it.
fn shown(capability: &Capability) -> String {
    let scope = explain::scope(capability);
    match capability.kind() {
        Kind::Folder => format!("{} on {scope}", capability.rights()),
        _ => scope,
    }
}

fn beyond(wish: &Capability, granted: &str) -> CapsError {
    let (capability, asked) = (wish.name().to_owned(), shown(wish));
    CapsError::Beyond { capability, asked, granted: granted.to_owned() }
}

#[cfg(test)]
mod tests;
